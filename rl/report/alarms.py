"""Alarms: what goes wrong in a run, seen in its metrics and said with what to do. Pure functions of
a stage's rows so far.

Each alarm looks at a `History`, what is kept of the training rows of one stage (as metrics.jsonl
has them), and says what it sees, or None. Alarms that speak of a trend compare the newest batches
with the first ones; they are silent until there are enough.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance

from rl.episodes import largest
from rl.report.history import HIGH, LOW, MIXED, SOME, History, Row, column, number

Check = Callable[["History"], str | None]

KL = ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2")
GRAD_NORM, CRITIC_NORM, SKIPPED = (
    "optim/grad_norm",
    "optim/critic_grad_norm",
    "optim/skipped_nonfinite",
)
ENTROPY = "optim/entropy"
# updates between a token's weights and those it trains, where sampling goes on while the learner
# updates
AGE = "async/age/mean"
# share of the sampled tokens that were trained on with an advantage other than 0
CREDITED = "optim/frac_credited"
TEACHER = "teacher/kl_per_token"  # where advantages are a teacher's, and rewards only looked at
REWARD, STD = "env/all/reward/total", "env/all/reward/std"
TEMPERATURE = "sampler/temperature"
BEGINNINGS, GROUPS = "env/all/distinct_beginnings", "env/all/total_groups"
EPISODES, LENGTH, TRUNCATED = (
    "env/all/total_episodes",
    "env/all/ac_tokens_per_turn",
    "env/all/frac_truncated",
)
FAILED = "reward/failed"
CORRECT, FORMAT = "env/all/correct", "env/all/format"

LARGE_NORM = 10.0
CERTAIN = 0.1  # nats an answer: the likeliest has a probability of at least exp(-0.1), nine in ten
FEW, MANY = 3, 20  # batches: until a fault is no accident; for a trend under noise
LOW_TEMPERATURE = 0.6  # the lower end of what is recommended for exploration, 0.6 to 1


def rises(first: Sequence[float], last: Sequence[float]) -> bool:
    """Whether the mean rises by more than two standard errors."""
    error = math.sqrt(pvariance(first) / len(first) + pvariance(last) / len(last))
    return fmean(last) - fmean(first) > 2 * error


def solved(seen: History) -> bool:
    """Whether every answer of the newest batch earned the highest reward there ever was, and others
    once earned less.
    """
    return number(seen.newest, LOW) >= seen.highest and seen.lowest < seen.highest


def mastered(seen: History) -> bool:
    """Whether the last five batches earned nine tenths of what there is between the lowest and the
    highest reward ever.
    """
    low, high = seen.lowest, seen.highest
    return high > low and fmean(column(seen.last, REWARD)) >= low + 0.9 * (high - low)


# --------------------------------------------------------------------------------------- the checks


def kl_above(level: float) -> Check:
    def check(seen: History) -> str | None:
        value = largest([abs(number(seen.newest, KL[0])), number(seen.newest, KL[1])])
        age = number(seen.newest, AGE)
        late = f" (tokens are {age:.1f} updates old on average)" if age > 0 else ""
        # nan is not below
        return (
            None
            if value <= level
            else f"KL between sampler and learner is {value:.3g}, above {level:g}{late}"
        )

    return check


def large_gradient(seen: History) -> str | None:
    """The policy's or the critic's norm above 10 for three batches; or a gradient that is not
    finite, whether it was skipped or not.

    What is left of a task that is mastered are a few answers in hundreds, and the gradient is a
    mean over their tokens alone: noise of a norm of 10 to 30 in a run that is well. There the
    policy's norm is taken as a mean over all sampled tokens.
    """
    if number(seen.newest, SKIPPED) > 0:
        return "the gradient is not finite: the optimizer step was left out"
    last, ones = seen.newest_few(FEW), [1.0] * FEW
    shares = [row.get(CREDITED, 1.0) for row in last] if mastered(seen) else ones
    for what, name, weights in (
        ("gradient norm", GRAD_NORM, shares),
        ("the critic's gradient norm", CRITIC_NORM, ones),
    ):
        norms = column(last, name)
        if name in last[-1] and not math.isfinite(norms[-1]):
            return f"{what} is not finite"
        if len(last) == FEW and all(
            norm * weight > LARGE_NORM for norm, weight in zip(norms, weights, strict=True)
        ):
            return f"{what} {norms[-1]:.3g}, above {LARGE_NORM:g} for {FEW} batches"
    return None


def zero_advantages(seen: History) -> str | None:
    """Three batches in a row that tell no answer from another, though not all were as good as can
    be, nor nearly all.

    No advantage other than 0; or, where a price on KL or a learned value gives every token one all
    the same, rewards that are equal within each group (of single answers: in all three batches).
    """
    last = seen.newest_few(FEW)
    if len(last) < FEW or solved(seen) or mastered(seen):
        return None
    value = f"mean reward {number(seen.newest, REWARD):.3g}"
    if all(number(row, CREDITED) == 0 for row in last):
        return f"all advantages are zero for {FEW} batches: answers are not told apart ({value})"
    if TEACHER in seen.newest:
        return None
    if all(_in_groups(row) and number(row, MIXED) == 0 for row in last):
        return f"rewards are equal within every group for {FEW} batches: answers are not told apart ({value})"
    if not any(_in_groups(row) or number(row, EPISODES) < 2 for row in last) and min(
        column(last, LOW)
    ) == max(column(last, HIGH)):
        return f"rewards are all equal for {FEW} batches: answers are not told apart ({value})"
    return None


def reward_flat(seen: History) -> str | None:
    """The last 20 batches earn no more than the first 20, noise considered, and there is more to
    earn.
    """
    found = seen.ends(REWARD)
    if found is None or rises(*found) or mastered(seen):
        return None
    row = seen.newest
    spread = f"min {number(row, LOW):.3g}, max {number(row, HIGH):.3g}, std {number(row, STD):.3g} in this batch"
    return f"reward has not risen: mean {fmean(found[0]):.3g} of the first {MANY} batches, {fmean(found[1]):.3g} of the last ({spread})"


def entropy_collapse(seen: History) -> str | None:
    """Entropy below a tenth of what it was at first, or answers that are certain, with much still
    to learn.

    A task mastered may leave no doubt. Certain: below 0.1 nats an answer, which a run may be from
    its beginning on.
    """
    if mastered(seen):
        return None
    newest = [number(row, ENTROPY) * number(row, LENGTH) for row in seen.last]
    if len(newest) == SOME and largest(newest) < CERTAIN:
        return f"answers are certain: {fmean(newest):.2g} nats of entropy an answer"
    found = seen.ends(ENTROPY)
    if found is None:
        return None
    first, last = fmean(found[0]), max(found[1])
    return (
        f"entropy fell from {first:.2g} to {last:.2g} nats a token" if last < 0.1 * first else None
    )


def low_temperature(seen: History) -> str | None:
    """A temperature below 0.6, and most groups all alike from the beginning on."""
    temperature, mixed = number(seen.newest, TEMPERATURE), seen.first_mixed
    if (
        len(mixed) < SOME
        or not temperature < LOW_TEMPERATURE
        or not fmean(mixed) < 0.5
        or mastered(seen)
        or not _in_groups(seen.newest)
    ):
        return None
    return f"temperature {temperature:g} explores little: in {1 - fmean(mixed):.0%} of the first groups all answers earned the same"


def mode_collapse(seen: History) -> str | None:
    """Answers begin alike: fewer beginnings than half the problems, and a quarter of those at
    first.
    """
    found = seen.ends(BEGINNINGS)
    if found is None:
        return None
    first, last = fmean(found[0]), fmean(found[1])
    problems = number(seen.newest, GROUPS) / number(seen.newest, EPISODES)
    if not (last < 0.25 * first and last < 0.5 * problems):
        return None
    return f"answers begin alike: {last:.1%} distinct 50-character beginnings, {first:.1%} at first"


def length_running_away(seen: History) -> str | None:
    """Answers three times as long as at first, or half as long again and cut off much more often."""
    found, cut = seen.ends(LENGTH), seen.ends(TRUNCATED)
    if found is None or cut is None:
        return None
    growth, cut_first, cut_last = (
        fmean(found[1]) / max(1e-9, fmean(found[0])),
        fmean(cut[0]),
        fmean(cut[1]),
    )
    if not (growth > 3 or (growth > 1.5 and cut_last > cut_first + 0.2)):
        return None
    return f"answers grew from {fmean(found[0]):.0f} to {fmean(found[1]):.0f} tokens; {cut_last:.0%} are cut off, {cut_first:.0%} at first"


def format_alone(seen: History) -> str | None:
    """Over 20 batches and more the format got better and correctness did not."""
    form, right = seen.ends(FORMAT), seen.ends(CORRECT)
    if (
        form is None
        or right is None
        or not rises(*form)
        or fmean(form[1]) - fmean(form[0]) < 0.05
        or rises(*right)
    ):
        return None
    return (
        f"only the format improves: format {fmean(form[0]):.2f} to {fmean(form[1]):.2f}, "
        f"correct {fmean(right[0]):.2f} to {fmean(right[1]):.2f}"
    )


def rewards_failing(seen: History) -> str | None:
    """Half of the newest batch's samples could not be scored, or more than a tenth over three
    batches.

    At once for half of them: the reward that is shown is that of the others, which may be few and
    good.
    """
    failed, scored = number(seen.newest, FAILED), number(seen.newest, EPISODES)
    if failed and failed >= scored:
        return f"{failed:.0f} of the {failed + scored:.0f} samples of this batch could not be scored: its reward is that of the others"
    last = seen.newest_few(FEW)
    failed, scored = sum(column(last, FAILED)), sum(column(last, EPISODES))
    if len(last) < FEW or not failed > 0.1 * (failed + scored):
        return None
    return f"{failed / (failed + scored):.0%} of the samples of {FEW} batches could not be scored"


def _in_groups(row: Row) -> bool:
    """Whether problems have several answers: with one each, no group can be mixed."""
    return number(row, EPISODES) > number(row, GROUPS)


# -------------------------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Alarm:
    """`name` in metrics (alarm/<name>), the metrics it `needs` in a row to be judged, `check`, and
    what to do about it.
    """

    name: str
    needs: tuple[str, ...]
    check: Check
    remedy: str


_MISMATCH = (
    "Samples and learner should agree: check precision (fp32 on both sides, or bf16 on both), and whether the policy was changed "
    "between sampling and learning; truncated_is (grpo) bounds what it does. Where tokens are updates old, lower max_steps_off_policy "
    "(grpo) or learning_rate, or set a correction."
)
ALARMS = (
    Alarm("kl_0.01", KL, kl_above(0.01), _MISMATCH),
    Alarm("kl_0.1", KL, kl_above(0.1), _MISMATCH + " Gradients are now noticeably of another policy."),
    Alarm("kl_1", KL, kl_above(1.0), "The policy has diverged: stop, go back to a checkpoint, and lower learning_rate."),
    Alarm(
        "grad_norm", (GRAD_NORM,), large_gradient,
        "Lower learning_rate or add warmup_steps; with large rewards, reward_scale or reward_clip (RL); keep grad_clip_norm at 1.",
    ),
    Alarm(
        "zero_advantages", (CREDITED, REWARD, LOW, HIGH), zero_advantages,
        "Nothing is learnt from such batches: look at rollouts/ whether the reward works, choose easier (or harder) problems or a "
        "curriculum, raise temperature or group_size, or set dynamic_sampling (grpo).",
    ),
    Alarm(
        "reward_flat", (REWARD, LOW, HIGH), reward_flat,
        "Look at rollouts/ whether the reward tells good answers from bad; then raise temperature (0.8 to 1), group_size or "
        "learning_rate; a model that is never right needs SFT first.",
    ),
    Alarm(
        "entropy_collapse", (ENTROPY, REWARD, LOW, HIGH), entropy_collapse,
        "Lower learning_rate, raise temperature, give an entropy bonus (entropy_coef) or a KL term (kl_coef), or raise clip_high (grpo) "
        "to 1.28.",
    ),
    Alarm(
        "low_temperature", (TEMPERATURE, MIXED, GROUPS, EPISODES, REWARD, LOW, HIGH), low_temperature,
        "Raise temperature to 0.8 or more: answers that do not differ teach nothing.",
    ),
    Alarm(
        "mode_collapse", (BEGINNINGS, GROUPS, EPISODES), mode_collapse,
        "Look at rollouts/ for what every answer now says, and whether the reward pays for it; go back to a checkpoint with a lower "
        "learning_rate, a KL term or an entropy bonus.",
    ),
    Alarm(
        "length", (LENGTH, TRUNCATED), length_running_away,
        "If the answers are no better for it, set overlong_share (RL) to 0.2, normalise (grpo) to constant or tokens, or lower max_tokens.",
    ),
    Alarm(
        "format_alone", (FORMAT, CORRECT), format_alone,
        "The reward pays for form without substance: lower the weight of the format, or pay it only where the answer is right.",
    ),
    Alarm(
        "rewards_failing", (FAILED, EPISODES), rewards_failing,
        "They are left out of training, and those that fail are seldom like the others: mend the reward (the warning above names the "
        "first error), or raise reward_timeout.",
    ),
)  # fmt: skip


class Alarms:
    """The alarms of a stage. `rows` so far: what a resumed run starts from, read back from its
    metrics.

    An alarm is said once for each onset: when it comes on after having been off (or not judged) for
    QUIET rows.
    """

    QUIET = 20

    def __init__(self, rows: Iterable[Row] = ()):
        self._seen = History(_KEPT, _TRENDS)
        # which alarms were on, row by row
        self._quiet: deque[frozenset[str]] = deque(maxlen=self.QUIET)
        for row in rows:
            self._seen.add(row)
            self._quiet.append(
                frozenset(alarm.name for alarm in ALARMS if row.get(f"alarm/{alarm.name}"))
            )

    def __call__(self, row: Row) -> tuple[dict[str, float], list[str]]:
        """(alarm/<name> 0 or 1 for each that can be judged by this row, what is to be said now)."""
        self._seen.add(row)
        found = {
            alarm: alarm.check(self._seen)
            for alarm in ALARMS
            if all(name in row for name in alarm.needs)
        }
        metrics = {f"alarm/{alarm.name}": float(text is not None) for alarm, text in found.items()}
        before = frozenset().union(*self._quiet)
        said = [
            f"{text}. {alarm.remedy}"
            for alarm, text in found.items()
            if text is not None and alarm.name not in before
        ]
        self._quiet.append(
            frozenset(alarm.name for alarm, text in found.items() if text is not None)
        )
        return metrics, said


_KEPT = frozenset(
    (
        *(name for alarm in ALARMS for name in alarm.needs),
        CREDITED,
        STD,
        CRITIC_NORM,
        SKIPPED,
        TEACHER,
        AGE,
    )
)
# Of which metrics the first and last values are compared, and how many.
_TRENDS = {
    REWARD: MANY,
    ENTROPY: SOME,
    BEGINNINGS: SOME,
    LENGTH: SOME,
    TRUNCATED: SOME,
    FORMAT: MANY // 2,
    CORRECT: MANY // 2,
}
