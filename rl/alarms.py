"""Alarms: what goes wrong in a run, seen in its metrics and said with what to do. Pure functions of a stage's rows so far.

Each alarm looks at `rows`, the training rows of one stage (as metrics.jsonl has them, the newest last), and says what it sees,
or None. Alarms that speak of a trend compare the newest batches with the first ones; they are silent until there are enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance
from typing import Any

Row = Mapping[str, Any]
Check = Callable[[Sequence[Row]], str | None]

KL = ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2")
GRAD_NORM, ENTROPY = "optim/grad_norm", "optim/entropy"
CREDITED = "optim/frac_credited"  # share of the sampled tokens that were trained on with an advantage other than 0
REWARD, STD, LOW, HIGH = (f"env/all/reward/{name}" for name in ("total", "std", "min", "max"))
MIXED = "env/all/by_group/frac_mixed"
TEMPERATURE = "sampler/temperature"
BEGINNINGS, GROUPS = "env/all/distinct_beginnings", "env/all/total_groups"
EPISODES, LENGTH, TRUNCATED = "env/all/total_episodes", "env/all/ac_tokens_per_turn", "env/all/frac_truncated"
CORRECT, FORMAT = "env/all/correct", "env/all/format"

LARGE_NORM = 10.0
FEW, SOME, MANY = 3, 5, 20  # batches: until a fault is no accident; for a level; for a trend under noise
LOW_TEMPERATURE = 0.6  # the lower end of what is recommended for exploration, 0.6 to 1


def number(row: Row, name: str) -> float:
    """The metric; NaN where it is absent, or null because it was not finite."""
    value = row.get(name)
    return math.nan if value is None else float(value)


def column(rows: Sequence[Row], name: str) -> list[float]:
    return [number(row, name) for row in rows]


def ends(rows: Sequence[Row], name: str, count: int) -> tuple[list[float], list[float]] | None:
    """The metric's first and last `count` values, which do not overlap; None before there are as many."""
    values = [v for v in column(rows, name) if not math.isnan(v)]
    return (values[:count], values[-count:]) if len(values) >= 2 * count else None


def rises(first: Sequence[float], last: Sequence[float]) -> bool:
    """Whether the mean rises by more than two standard errors."""
    error = math.sqrt(pvariance(first) / len(first) + pvariance(last) / len(last))
    return fmean(last) - fmean(first) > 2 * error


def solved(rows: Sequence[Row]) -> bool:
    """Whether every answer of the newest batch earned the highest reward there ever was, and others once earned less."""
    best = max(column(rows, HIGH))
    return number(rows[-1], LOW) >= best and min(column(rows, LOW)) < best


def mastered(rows: Sequence[Row]) -> bool:
    """Whether the last five batches earned nine tenths of what there is between the lowest and the highest reward ever."""
    low, high = min(column(rows, LOW)), max(column(rows, HIGH))
    return high > low and fmean(column(rows[-SOME:], REWARD)) >= low + 0.9 * (high - low)


# ---------------------------------------------------------------------------------------------------------- the checks


def kl_above(level: float) -> Check:
    def check(rows: Sequence[Row]) -> str | None:
        value = max(abs(number(rows[-1], KL[0])), number(rows[-1], KL[1]))
        return f"KL between sampler and learner is {value:.3g}, above {level:g}" if value > level else None

    return check


def large_gradient(rows: Sequence[Row]) -> str | None:
    """Above 10 for three batches, as a mean over all sampled tokens: where few groups carry signal, the norm is of few tokens."""
    norms = [number(row, GRAD_NORM) * row.get(CREDITED, 1.0) for row in rows[-FEW:]]
    if math.isnan(norms[-1]) or math.isinf(norms[-1]):
        return "the gradient is not finite"
    if len(norms) < FEW or not min(norms) > LARGE_NORM:
        return None
    return f"gradient norm {number(rows[-1], GRAD_NORM):.3g}, above {LARGE_NORM:g} for {FEW} batches"


def zero_advantages(rows: Sequence[Row]) -> str | None:
    """Three batches in a row without an advantage other than 0, though not all answers were as good as can be."""
    last = rows[-FEW:]
    if len(last) < FEW or any(number(row, CREDITED) != 0 for row in last) or solved(rows):
        return None
    value = number(rows[-1], REWARD)
    return f"all advantages are zero for {FEW} batches: answers are not told apart (mean reward {value:.3g})"


def reward_flat(rows: Sequence[Row]) -> str | None:
    """The last 20 batches earn no more than the first 20, noise considered, and there is more to earn."""
    found = ends(rows, REWARD, MANY)
    if found is None or rises(*found) or mastered(rows):
        return None
    row = rows[-1]
    spread = f"min {number(row, LOW):.3g}, max {number(row, HIGH):.3g}, std {number(row, STD):.3g} in this batch"
    return f"reward has not risen: mean {fmean(found[0]):.3g} of the first {MANY} batches, {fmean(found[1]):.3g} of the last ({spread})"


def entropy_collapse(rows: Sequence[Row]) -> str | None:
    """Entropy below a tenth of what it was at first, with much still to learn: a task mastered may leave no doubt."""
    found = ends(rows, ENTROPY, SOME)
    if found is None or mastered(rows):
        return None
    first, last = fmean(found[0]), max(found[1])
    return f"entropy fell from {first:.2g} to {last:.2g} nats a token" if last < 0.1 * first else None


def low_temperature(rows: Sequence[Row]) -> str | None:
    """A temperature below 0.6, and most groups all alike from the beginning on."""
    temperature, mixed = number(rows[-1], TEMPERATURE), column(rows[:SOME], MIXED)
    if len(mixed) < SOME or not temperature < LOW_TEMPERATURE or not fmean(mixed) < 0.5 or mastered(rows) or not _in_groups(rows[-1]):
        return None
    return f"temperature {temperature:g} explores little: in {1 - fmean(mixed):.0%} of the first groups all answers earned the same"


def mode_collapse(rows: Sequence[Row]) -> str | None:
    """Answers begin alike: fewer beginnings than half the problems, and a quarter of those at first."""
    found = ends(rows, BEGINNINGS, SOME)
    if found is None:
        return None
    first, last = fmean(found[0]), fmean(found[1])
    problems = number(rows[-1], GROUPS) / number(rows[-1], EPISODES)
    if not (last < 0.25 * first and last < 0.5 * problems):
        return None
    return f"answers begin alike: {last:.1%} distinct 50-character beginnings, {first:.1%} at first"


def length_running_away(rows: Sequence[Row]) -> str | None:
    """Answers three times as long as at first, or half as long again and cut off much more often."""
    found, cut = ends(rows, LENGTH, SOME), ends(rows, TRUNCATED, SOME)
    if found is None or cut is None:
        return None
    growth, cut_first, cut_last = fmean(found[1]) / max(1e-9, fmean(found[0])), fmean(cut[0]), fmean(cut[1])
    if not (growth > 3 or (growth > 1.5 and cut_last > cut_first + 0.2)):
        return None
    return f"answers grew from {fmean(found[0]):.0f} to {fmean(found[1]):.0f} tokens; {cut_last:.0%} are cut off, {cut_first:.0%} at first"


def format_alone(rows: Sequence[Row]) -> str | None:
    """Over 20 batches and more the format got better and correctness did not."""
    form, right = ends(rows, FORMAT, MANY // 2), ends(rows, CORRECT, MANY // 2)
    if form is None or right is None or not rises(*form) or fmean(form[1]) - fmean(form[0]) < 0.05 or rises(*right):
        return None
    return (
        f"only the format improves: format {fmean(form[0]):.2f} to {fmean(form[1]):.2f}, "
        f"correct {fmean(right[0]):.2f} to {fmean(right[1]):.2f}"
    )


def _in_groups(row: Row) -> bool:
    """Whether problems have several answers: with one each, no group can be mixed."""
    return number(row, EPISODES) > number(row, GROUPS)


# ---------------------------------------------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Alarm:
    """`name` in metrics (alarm/<name>), the metrics it `needs` in a row to be judged, `check`, and what to do about it."""

    name: str
    needs: tuple[str, ...]
    check: Check
    remedy: str


_MISMATCH = (
    "Samples and learner should agree: check precision (fp32 on both sides, or bf16 on both), and whether the policy was changed "
    "between sampling and learning; truncated_is bounds what it does."
)
ALARMS = (
    Alarm("kl_0.01", KL, kl_above(0.01), _MISMATCH),
    Alarm("kl_0.1", KL, kl_above(0.1), _MISMATCH + " Gradients are now noticeably of another policy."),
    Alarm("kl_1", KL, kl_above(1.0), "The policy has diverged: stop, go back to a checkpoint, and lower learning_rate."),
    Alarm(
        "grad_norm", (GRAD_NORM,), large_gradient,
        "Lower learning_rate or add warmup_steps; scale or clip rewards that are large (reward_scale, reward_clip); keep grad_clip_norm "
        "at 1.",
    ),
    Alarm(
        "zero_advantages", (CREDITED, REWARD, LOW, HIGH), zero_advantages,
        "Nothing is learnt from such batches: look at rollouts/ whether the reward works, choose easier (or harder) problems or a "
        "curriculum, raise temperature or group_size, or set dynamic_sampling.",
    ),
    Alarm(
        "reward_flat", (REWARD, LOW, HIGH), reward_flat,
        "Look at rollouts/ whether the reward tells good answers from bad; then raise temperature (0.8 to 1), group_size or "
        "learning_rate; a model that is never right needs SFT first.",
    ),
    Alarm(
        "entropy_collapse", (ENTROPY, REWARD, LOW, HIGH), entropy_collapse,
        "Lower learning_rate, raise temperature or clip_high (1.28), or give an entropy bonus or a KL term.",
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
        "If the answers are no better for it, set overlong_share (0.2), normalise to constant or tokens, or lower max_tokens.",
    ),
    Alarm(
        "format_alone", (FORMAT, CORRECT), format_alone,
        "The reward pays for form without substance: lower the weight of the format, or pay it only where the answer is right.",
    ),
)  # fmt: skip


class Alarms:
    """The alarms of a stage. `rows` so far: what a resumed run starts from, read back from its metrics.

    An alarm is said once for each onset: when it comes on after having been off (or not judged) for QUIET rows.
    """

    QUIET = 20

    def __init__(self, rows: Sequence[Row] = ()):
        self._rows: list[Row] = [_needed(row) for row in rows]

    def __call__(self, row: Row) -> tuple[dict[str, float], list[str]]:
        """(alarm/<name> 0 or 1 for each that can be judged by this row, what is to be said now)."""
        rows = [*self._rows, row]
        found = {alarm: alarm.check(rows) for alarm in ALARMS if all(name in row for name in alarm.needs)}
        metrics = {f"alarm/{alarm.name}": float(seen is not None) for alarm, seen in found.items()}
        said = [
            f"{seen}. {alarm.remedy}"
            for alarm, seen in found.items()
            if seen is not None and not any(old.get(f"alarm/{alarm.name}") for old in self._rows[-self.QUIET :])
        ]
        self._rows.append(_needed({**row, **metrics}))
        return metrics, said


def _needed(row: Row) -> Row:
    """What is kept of a row: a long run has many."""
    return {name: value for name, value in row.items() if name in _KEPT or name.startswith("alarm/")}


_KEPT = frozenset((*(name for alarm in ALARMS for name in alarm.needs), CREDITED, STD))
