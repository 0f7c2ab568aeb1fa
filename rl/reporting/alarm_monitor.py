"""Detect faults of a run from its metrics, with a remedy for each alarm. Alarms are pure functions
of a stage's rows so far.

Each alarm reads a `MetricHistory`, which summarizes the training rows of a stage (rows of
metrics.jsonl), and returns a message or None. Alarms about a trend compare the newest batches with
the first batches; they return None until there are enough batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from rl.jsonl import Row
from rl.rollout import max_or_nan

AlarmCheck = Callable[["MetricHistory"], str | None]

KL = ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2")
GRAD_NORM, CRITIC_NORM, SKIPPED = (
    "optim/grad_norm",
    "optim/critic_grad_norm",
    "optim/skipped_nonfinite",
)
ENTROPY = "optim/entropy"
# updates between the weights that sampled a token and the weights that it trains, if sampling
# overlaps with updates
AGE = "async/age/mean"
# share of the sampled tokens that were trained on with an advantage other than 0
CREDITED = "optim/frac_credited"
TEACHER = (
    "teacher/kl_per_token"  # if the advantages come from a teacher, and rewards are only monitored
)
REWARD, STD, LOW, HIGH = (f"env/all/reward/{name}" for name in ("total", "std", "min", "max"))
MIXED = "env/all/by_group/frac_mixed"
TEMPERATURE = "sampler/temperature"
BEGINNINGS, GROUPS = "env/all/distinct_beginnings", "env/all/total_groups"
EPISODES, LENGTH, TRUNCATED = (
    "env/all/total_episodes",
    "env/all/ac_tokens_per_turn",
    "env/all/frac_truncated",
)
FAILED = "reward/failed"
CORRECT, FORMAT = "env/all/correct", "env/all/format"

MAX_GRADIENT_NORM = 10.0
# nats an answer: the most likely answer has a probability of at least exp(-0.1), nine in ten
CERTAIN_ENTROPY = 0.1
# batches: enough to exclude an accident; enough for a level; enough for a trend under noise
FAULT_BATCHES, LEVEL_BATCHES, TREND_BATCHES = 3, 5, 20
# Metrics with a comparison of first and last values, and the number of values compared.
_TREND_LENGTHS = {
    REWARD: TREND_BATCHES,
    ENTROPY: LEVEL_BATCHES,
    BEGINNINGS: LEVEL_BATCHES,
    LENGTH: LEVEL_BATCHES,
    TRUNCATED: LEVEL_BATCHES,
    FORMAT: TREND_BATCHES // 2,
    CORRECT: TREND_BATCHES // 2,
}
LOW_TEMPERATURE = 0.6  # lower end of the range recommended for exploration, 0.6 to 1
_MAX_VALUE = 1e300


# -------------------------------------------------------------------------------------- the history


def read_metric(row: Row, name: str) -> float:
    """Return the metric; NaN if it is absent, null because it was not finite, or so large that a
    sum of few such values is not finite.
    """
    value = row.get(name)
    if value is None or _MAX_VALUE < abs(value) < math.inf:
        return math.nan
    return float(value)


def read_column(rows: Iterable[Row], name: str) -> list[float]:
    """Return the metric of each row."""
    return [read_metric(row, name) for row in rows]


class MetricHistory:
    """Summarize a stage's rows: the last five rows, the first and last values of trends, the range
    of rewards. Its space and its time for a row do not grow with the number of rows.
    """

    def __init__(self) -> None:
        self.last_rows: deque[Row] = deque(maxlen=LEVEL_BATCHES)
        self.first_mixed: list[float] = []  # share of mixed groups in each of the first five rows
        self.lowest = self.highest = math.nan  # lowest and highest reward of any answer
        # first and last finite values of each trend
        self._trends: dict[str, tuple[list[float], deque[float]]] = {
            name: ([], deque(maxlen=count)) for name, count in _TREND_LENGTHS.items()
        }

    def add(self, row: Row) -> None:
        """Add a row."""
        low, high = read_metric(row, LOW), read_metric(row, HIGH)
        # Same as min and max over a list: NaN stays if it is the first value, and is ignored
        # otherwise.
        self.lowest = low if not self.last_rows or low < self.lowest else self.lowest
        self.highest = high if not self.last_rows or high > self.highest else self.highest
        self.last_rows.append(row)
        if len(self.first_mixed) < LEVEL_BATCHES:
            self.first_mixed.append(read_metric(row, MIXED))
        for name, (first, last) in self._trends.items():
            if math.isfinite(value := read_metric(row, name)):
                last.append(value)
                if len(first) < 2 * _TREND_LENGTHS[name]:
                    first.append(value)

    @property
    def newest(self) -> Row:
        """Return the newest row."""
        return self.last_rows[-1]

    def read(self, name: str) -> float:
        """Return a metric of the newest row; NaN if it is absent or null."""
        return read_metric(self.newest, name)

    def newest_rows(self, count: int) -> list[Row]:
        """Return the last `count` rows (at most five); fewer if fewer exist."""
        return list(self.last_rows)[-count:]

    def trend_windows(self, name: str) -> tuple[list[float], list[float]] | None:
        """Return the first and the last values of a trend; None until they do not overlap."""
        (first, last), count = self._trends[name], _TREND_LENGTHS[name]
        return (first[:count], list(last)) if len(first) >= 2 * count else None


def rises_significantly(first: Sequence[float], last: Sequence[float]) -> bool:
    """Return whether the mean rises by more than two standard errors."""
    # no squares, which may be beyond floats
    error = math.hypot(*(pstdev(part) / math.sqrt(len(part)) for part in (first, last)))
    return fmean(last) - fmean(first) > 2 * error


def is_solved(history: MetricHistory) -> bool:
    """Return whether every answer of the newest batch earned the highest reward so far, and earlier
    answers earned less.
    """
    return history.read(LOW) >= history.highest and history.lowest < history.highest


def is_mastered(history: MetricHistory) -> bool:
    """Return whether the last five batches earned at least nine tenths of the range between the
    lowest and the highest reward so far.
    """
    low, high = history.lowest, history.highest
    return high > low and fmean(read_column(history.last_rows, REWARD)) >= low + 0.9 * (high - low)


# --------------------------------------------------------------------------------------- the checks


def make_kl_check(level: float) -> AlarmCheck:
    """Return a check for a KL between sampler and learner above `level` nats a token."""

    def check(history: MetricHistory) -> str | None:
        value = max_or_nan([abs(history.read(KL[0])), history.read(KL[1])])
        age = history.read(AGE)
        late = f" (tokens are {age:.1f} updates old on average)" if age > 0 else ""
        if value <= level:  # False for NaN, which therefore raises the alarm
            return None
        return f"KL between sampler and learner is {value:.3g}, above {level:g}{late}"

    return check


def check_gradient_norm(history: MetricHistory) -> str | None:
    """Check for a gradient norm (policy or critic) above 10 in three batches, or a gradient that is
    not finite, whether it was skipped or not.

    When a task is mastered, only a few answers in hundreds still have an advantage, and the
    gradient is a mean over their tokens alone: noise with a norm of 10 to 30 in a healthy run. In
    this case the check uses the policy's norm as a mean over all sampled tokens.
    """
    if history.read(SKIPPED) > 0:
        return "the gradient is not finite: the optimizer step was skipped"
    last, unit_weights = history.newest_rows(FAULT_BATCHES), [1.0] * FAULT_BATCHES
    shares = [row.get(CREDITED, 1.0) for row in last] if is_mastered(history) else unit_weights
    for norm_name, name, weights in (
        ("gradient norm", GRAD_NORM, shares),
        ("the critic's gradient norm", CRITIC_NORM, unit_weights),
    ):
        norms = read_column(last, name)
        if name in last[-1] and not math.isfinite(norms[-1]):
            return f"{norm_name} is not finite"
        if len(last) == FAULT_BATCHES and all(
            norm * weight > MAX_GRADIENT_NORM for norm, weight in zip(norms, weights, strict=True)
        ):
            return (
                f"{norm_name} {norms[-1]:.3g}, above {MAX_GRADIENT_NORM:g} for "
                f"{FAULT_BATCHES} batches"
            )
    return None


def check_advantages(history: MetricHistory) -> str | None:
    """Check for three consecutive batches without a learning signal, unless all or nearly all
    answers earned the highest reward.

    No signal: no advantage differs from 0. If a KL penalty or a learned value gives every token an
    advantage anyway: rewards are equal within each group (for single answers: across all three
    batches).
    """
    last = history.newest_rows(FAULT_BATCHES)
    if len(last) < FAULT_BATCHES or is_solved(history) or is_mastered(history):
        return None
    if all(read_metric(row, CREDITED) == 0 for row in last):
        fault = "all advantages are zero"
    elif TEACHER in history.newest:
        return None
    elif all(_has_groups(row) and read_metric(row, MIXED) == 0 for row in last):
        fault = "rewards are equal within every group"
    elif not any(_has_groups(row) or read_metric(row, EPISODES) < 2 for row in last) and min(
        read_column(last, LOW)
    ) == max(read_column(last, HIGH)):
        fault = "rewards are all equal"
    else:
        return None
    return (
        f"{fault} for {FAULT_BATCHES} batches: answers are not distinguished (mean reward "
        f"{history.read(REWARD):.3g})"
    )


def check_reward_rise(history: MetricHistory) -> str | None:
    """Check whether the last 20 batches earn no more than the first 20, within noise, although
    higher rewards are possible.
    """
    windows = history.trend_windows(REWARD)
    if windows is None or rises_significantly(*windows) or is_mastered(history):
        return None
    spread = (
        f"min {history.read(LOW):.3g}, max {history.read(HIGH):.3g}, std "
        f"{history.read(STD):.3g} in this batch"
    )
    return (
        f"reward has not risen: mean {fmean(windows[0]):.3g} of the first {TREND_BATCHES} batches, "
        f"{fmean(windows[1]):.3g} of the last ({spread})"
    )


def check_entropy(history: MetricHistory) -> str | None:
    """Check for entropy below a tenth of its first values, or for answers that are certain, before
    the task is mastered.

    Low entropy is fine for a mastered task. Answers are certain below 0.1 nats an answer, which may
    hold from the start of a run.
    """
    if is_mastered(history):
        return None
    newest = [read_metric(row, ENTROPY) * read_metric(row, LENGTH) for row in history.last_rows]
    if len(newest) == LEVEL_BATCHES and max_or_nan(newest) < CERTAIN_ENTROPY:
        return f"answers are certain: {fmean(newest):.2g} nats of entropy an answer"
    windows = history.trend_windows(ENTROPY)
    if windows is None:
        return None
    first, last = fmean(windows[0]), max(windows[1])
    if not last < 0.1 * first:
        return None
    return f"entropy fell from {first:.2g} to {last:.2g} nats a token"


def check_temperature(history: MetricHistory) -> str | None:
    """Check for a temperature below 0.6 when the rewards of most groups were equal from the
    start.
    """
    temperature, mixed = history.read(TEMPERATURE), history.first_mixed
    if (
        len(mixed) < LEVEL_BATCHES
        or not temperature < LOW_TEMPERATURE
        or not fmean(mixed) < 0.5
        or is_mastered(history)
        or not _has_groups(history.newest)
    ):
        return None
    return (
        f"temperature {temperature:g} explores little: in {1 - fmean(mixed):.0%} of the first "
        f"groups all answers earned the same"
    )


def check_modes(history: MetricHistory) -> str | None:
    """Check for answers that begin alike: fewer distinct beginnings than half the problems, and
    less than a quarter of the first values.
    """
    windows = history.trend_windows(BEGINNINGS)
    if windows is None:
        return None
    first, last = map(fmean, windows)
    problems = history.read(GROUPS) / history.read(EPISODES)
    if not (last < 0.25 * first and last < 0.5 * problems):
        return None
    return f"answers begin alike: {last:.1%} distinct 50-character beginnings, {first:.1%} at first"


def check_length(history: MetricHistory) -> str | None:
    """Check for answers three times as long as at first, or half as long again and truncated much
    more often.
    """
    windows, truncated_windows = history.trend_windows(LENGTH), history.trend_windows(TRUNCATED)
    if windows is None or truncated_windows is None:
        return None
    first, last = map(fmean, windows)
    truncated_first, truncated_last = map(fmean, truncated_windows)
    growth = last / max(1e-9, first)
    if not (growth > 3 or (growth > 1.5 and truncated_last > truncated_first + 0.2)):
        return None
    return (
        f"answers grew from {first:.0f} to {last:.0f} tokens; "
        f"{truncated_last:.0%} are cut off, {truncated_first:.0%} at first"
    )


def check_format(history: MetricHistory) -> str | None:
    """Check for a format that improves over 20 or more batches while correctness does not."""
    form, right = history.trend_windows(FORMAT), history.trend_windows(CORRECT)
    if form is None or right is None:
        return None
    first, last = map(fmean, form)
    if not rises_significantly(*form) or last - first < 0.05 or rises_significantly(*right):
        return None
    return (
        f"only the format improves: format {first:.2f} to {last:.2f}, "
        f"correct {fmean(right[0]):.2f} to {fmean(right[1]):.2f}"
    )


def check_reward_failures(history: MetricHistory) -> str | None:
    """Check whether half of the newest batch's samples could not be scored, or more than a tenth
    over three batches.

    Half of a batch raises the alarm immediately: the displayed reward is the mean of the remaining
    samples, which may be few and good.
    """
    failed, scored = history.read(FAILED), history.read(EPISODES)
    if failed and failed >= scored:
        return (
            f"{failed:.0f} of the {failed + scored:.0f} samples of this batch could not be scored: "
            f"its reward is the mean of the other samples"
        )
    last = history.newest_rows(FAULT_BATCHES)
    failed, scored = sum(read_column(last, FAILED)), sum(read_column(last, EPISODES))
    if len(last) < FAULT_BATCHES or not failed > 0.1 * (failed + scored):
        return None
    return (
        f"{failed / (failed + scored):.0%} of the samples of {FAULT_BATCHES} "
        "batches could not be scored"
    )


def _has_groups(row: Row) -> bool:
    """Return whether problems have several answers. Without several answers, no group can be
    mixed.
    """
    return read_metric(row, EPISODES) > read_metric(row, GROUPS)


# --------------------------------------------------------------------------------- list of alarms


@dataclass(frozen=True)
class AlarmSpec:
    """Define an alarm: its `name` in metrics (alarm/<name>), the `required_metrics` that a row must
    have, the `check` and the remedy.
    """

    name: str
    required_metrics: tuple[str, ...]
    check: AlarmCheck
    remedy: str


_MISMATCH_REMEDY = (
    "Samples and learner should agree: check precision (fp32 on both sides, or bf16 on both), and "
    "whether the policy was changed between sampling and learning; truncated_is (grpo) bounds the "
    "effect. If tokens are several updates old, lower max_steps_off_policy (grpo) or "
    "learning_rate, or set a correction."
)
ALARMS = (
    AlarmSpec("kl_0.01", KL, make_kl_check(0.01), _MISMATCH_REMEDY),
    AlarmSpec(
        "kl_0.1",
        KL,
        make_kl_check(0.1),
        _MISMATCH_REMEDY + " Gradients now noticeably belong to another policy.",
    ),
    AlarmSpec(
        "kl_1",
        KL,
        make_kl_check(1.0),
        "The policy has diverged: stop, return to a checkpoint, and lower learning_rate.",
    ),
    AlarmSpec(
        "grad_norm",
        (GRAD_NORM,),
        check_gradient_norm,
        "Lower learning_rate or add warmup_steps; with large rewards, reward_scale or reward_clip "
        "(RL); keep grad_clip_norm at 1.",
    ),
    AlarmSpec(
        "zero_advantages",
        (CREDITED, REWARD, LOW, HIGH),
        check_advantages,
        "Such batches teach nothing: check in rollouts/ that the reward works, choose easier (or "
        "harder) problems or a "
        "curriculum, raise temperature or group_size, or set dynamic_sampling (grpo).",
    ),
    AlarmSpec(
        "reward_flat",
        (REWARD, LOW, HIGH),
        check_reward_rise,
        "Check in rollouts/ that the reward separates good answers from bad answers; then raise "
        "temperature (0.8 to 1), group_size or "
        "learning_rate; a model that is never right needs SFT first.",
    ),
    AlarmSpec(
        "entropy_collapse",
        (ENTROPY, REWARD, LOW, HIGH),
        check_entropy,
        "Lower learning_rate, raise temperature, add an entropy bonus (entropy_coef) or a KL term "
        "(kl_coef), or raise clip_high (grpo) to 1.28.",
    ),
    AlarmSpec(
        "low_temperature",
        (TEMPERATURE, MIXED, GROUPS, EPISODES, REWARD, LOW, HIGH),
        check_temperature,
        "Raise temperature to 0.8 or more: answers that do not differ teach nothing.",
    ),
    AlarmSpec(
        "mode_collapse",
        (BEGINNINGS, GROUPS, EPISODES),
        check_modes,
        "Check in rollouts/ which text the answers share, and whether the reward pays for it; "
        "return to a checkpoint with a lower learning_rate, a KL term or an entropy bonus.",
    ),
    AlarmSpec(
        "length",
        (LENGTH, TRUNCATED),
        check_length,
        "If longer answers are not better, set overlong_share (RL) to 0.2, normalise (grpo) to "
        "constant or tokens, or lower max_tokens.",
    ),
    AlarmSpec(
        "format_alone",
        (FORMAT, CORRECT),
        check_format,
        "The reward pays for the format alone: lower the weight of the format, or reward it only "
        "if the answer is right.",
    ),
    AlarmSpec(
        "rewards_failing",
        (FAILED, EPISODES),
        check_reward_failures,
        "Samples without a score are left out of training, which biases the batch, since failures "
        "are rarely random: fix the reward "
        "(the warning above names the first error), or raise reward_timeout.",
    ),
)


class AlarmMonitor:
    """Evaluate the alarms of a stage. `rows`: the stage's rows so far, which a resumed run reads
    back from its metrics.

    The message of an alarm is issued once for each onset: when the alarm is raised after
    QUIET_ROWS rows in which it was off (or not evaluated).
    """

    QUIET_ROWS = 20

    def __init__(self, rows: Iterable[Row] = ()):
        self._history = MetricHistory()
        # raised alarms of each of the last QUIET rows
        self._raised: deque[frozenset[str]] = deque(maxlen=self.QUIET_ROWS)
        for row in rows:
            self._history.add(row)
            self._raised.append(_list_raised(row))

    def __call__(self, row: Row) -> tuple[dict[str, float], list[str]]:
        """Return (alarm/<name> 0 or 1 for each alarm that this row allows to evaluate, new
        messages).
        """
        self._history.add(row)
        before = frozenset().union(*self._raised)
        metrics: dict[str, float] = {}
        messages = []
        for alarm in ALARMS:
            if all(name in row for name in alarm.required_metrics):
                text = alarm.check(self._history)
                metrics[f"alarm/{alarm.name}"] = float(text is not None)
                if text is not None and alarm.name not in before:
                    messages.append(f"{text}. {alarm.remedy}")
        self._raised.append(_list_raised(metrics))
        return metrics, messages


def _list_raised(row: Row) -> frozenset[str]:
    """Return the names of the alarms that are raised in a row."""
    return frozenset(alarm.name for alarm in ALARMS if row.get(f"alarm/{alarm.name}"))
