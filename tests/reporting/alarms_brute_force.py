"""Compute the alarms' formulas from lists of all rows of a stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pvariance
from typing import Any

from rl.rollout import max_or_nan

Row = Mapping[str, Any]
Check = Callable[[Sequence[Row]], str | None]

KL = ("optim/kl_sample_train_v1", "optim/kl_sample_train_v2")
GRAD_NORM, CRITIC_NORM, SKIPPED = (
    "optim/grad_norm", "optim/critic_grad_norm", "optim/skipped_nonfinite",
)  # fmt: skip
ENTROPY = "optim/entropy"
# share of the sampled tokens that were trained with a nonzero advantage
CREDITED = "optim/frac_credited"
TEACHER = "teacher/kl_per_token"  # set if a teacher gives advantages; rewards are only logged
REWARD, STD, LOW, HIGH = (f"env/all/reward/{name}" for name in ("total", "std", "min", "max"))
MIXED = "env/all/by_group/frac_mixed"
TEMPERATURE = "sampler/temperature"
BEGINNINGS, GROUPS = "env/all/distinct_beginnings", "env/all/total_groups"
EPISODES, LENGTH, TRUNCATED = (
    "env/all/total_episodes", "env/all/ac_tokens_per_turn", "env/all/frac_truncated",
)  # fmt: skip
CORRECT, FORMAT = "env/all/correct", "env/all/format"

LARGE_NORM = 10.0
CERTAIN = 0.1  # nats per answer: the likeliest has probability of at least exp(-0.1), nine in ten
# batches needed: to rule out an accident; to measure a level; to see a trend under noise
FEW, SOME, MANY = 3, 5, 20
LOW_TEMPERATURE = 0.6  # the lower end of the range recommended for exploration, 0.6 to 1


def number(row: Row, name: str) -> float:
    """Return the metric; NaN if it is absent, or null because it was not finite."""
    value = row.get(name)
    return math.nan if value is None else float(value)


def column(rows: Sequence[Row], name: str) -> list[float]:
    return [number(row, name) for row in rows]


def get_ends(rows: Sequence[Row], name: str, count: int) -> tuple[list[float], list[float]] | None:
    """Return the metric's first and last `count` values, which do not overlap; None for fewer
    values.
    """
    values = [v for v in column(rows, name) if not math.isnan(v)]
    return (values[:count], values[-count:]) if len(values) >= 2 * count else None


def check_rise(first: Sequence[float], last: Sequence[float]) -> bool:
    """Return whether the mean rises by more than two standard errors."""
    error = math.sqrt(pvariance(first) / len(first) + pvariance(last) / len(last))
    return fmean(last) - fmean(first) > 2 * error


def is_solved(rows: Sequence[Row]) -> bool:
    """Return whether every answer earned the highest reward ever seen, and earlier answers earned
    less.
    """
    best = max(column(rows, HIGH))
    return number(rows[-1], LOW) >= best and min(column(rows, LOW)) < best


def is_mastered(rows: Sequence[Row]) -> bool:
    """Return whether the last five batches earned at least nine tenths of the range of rewards."""
    low, high = min(column(rows, LOW)), max(column(rows, HIGH))
    return high > low and fmean(column(rows[-SOME:], REWARD)) >= low + 0.9 * (high - low)


# ------------------------------------------------------------------------------------------- checks


def kl_above(level: float) -> Check:
    def check(rows: Sequence[Row]) -> str | None:
        value = max_or_nan([abs(number(rows[-1], KL[0])), number(rows[-1], KL[1])])
        if value <= level:  # NaN must count as above
            return None
        return f"KL between sampler and learner is {value:.3g}, above {level:g}"

    return check


def large_gradient(rows: Sequence[Row]) -> str | None:
    """Report a norm of the policy or the critic above 10 for three batches, or a gradient that is
    not finite. In a mastered task the policy's norm is taken as a mean over all sampled tokens.
    """
    if number(rows[-1], SKIPPED) > 0:
        return "the gradient is not finite: the optimizer step was skipped"
    last, ones = rows[-FEW:], [1.0] * FEW
    shares = [row.get(CREDITED, 1.0) for row in last] if is_mastered(rows) else ones
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


def zero_advantages(rows: Sequence[Row]) -> str | None:
    """Report three batches in a row without an advantage, or with rewards that are equal within
    each group (for single answers: across all three batches), unless they are as high as possible.
    """
    last = rows[-FEW:]
    if len(last) < FEW or is_solved(rows) or is_mastered(rows):
        return None
    value = f"mean reward {number(rows[-1], REWARD):.3g}"
    if all(number(row, CREDITED) == 0 for row in last):
        return f"all advantages are zero for {FEW} batches: answers are not distinguished ({value})"
    if TEACHER in rows[-1]:
        return None
    if all(_in_groups(row) and number(row, MIXED) == 0 for row in last):
        return (
            f"rewards are equal within every group for {FEW} batches: "
            f"answers are not distinguished ({value})"
        )
    if not any(_in_groups(row) or number(row, EPISODES) < 2 for row in last) and min(
        column(last, LOW)
    ) == max(column(last, HIGH)):
        return f"rewards are all equal for {FEW} batches: answers are not distinguished ({value})"
    return None


def reward_flat(rows: Sequence[Row]) -> str | None:
    """Report that the last 20 batches earn no more than the first 20 while more can be earned."""
    result = get_ends(rows, REWARD, MANY)
    if result is None or check_rise(*result) or is_mastered(rows):
        return None
    low, high, std = (number(rows[-1], name) for name in (LOW, HIGH, STD))
    return (
        f"reward has not risen: mean {fmean(result[0]):.3g} of the first {MANY} batches, "
        f"{fmean(result[1]):.3g} of the last (min {low:.3g}, max {high:.3g}, std {std:.3g} in this "
        "batch)"
    )


def entropy_collapse(rows: Sequence[Row]) -> str | None:
    """Report entropy below a tenth of its initial value, or answers with less than 0.1 nats, unless
    the task is mastered.
    """
    if is_mastered(rows):
        return None
    newest = [number(row, ENTROPY) * number(row, LENGTH) for row in rows[-SOME:]]
    if len(newest) == SOME and max_or_nan(newest) < CERTAIN:
        return f"answers are certain: {fmean(newest):.2g} nats of entropy an answer"
    result = get_ends(rows, ENTROPY, SOME)
    if result is None or max(result[1]) >= 0.1 * (first := fmean(result[0])):
        return None
    return f"entropy fell from {first:.2g} to {max(result[1]):.2g} nats a token"


def low_temperature(rows: Sequence[Row]) -> str | None:
    """Report a temperature below 0.6 if most groups had equal rewards from the first batches on."""
    temperature, mixed = number(rows[-1], TEMPERATURE), column(rows[:SOME], MIXED)
    if (
        len(mixed) < SOME
        or not temperature < LOW_TEMPERATURE
        or not fmean(mixed) < 0.5
        or is_mastered(rows)
        or not _in_groups(rows[-1])
    ):
        return None
    return (
        f"temperature {temperature:g} explores little: in {1 - fmean(mixed):.0%} of the first "
        f"groups all answers earned the same"
    )


def mode_collapse(rows: Sequence[Row]) -> str | None:
    """Report fewer distinct beginnings than half the problems and than a quarter of the initial
    share.
    """
    result = get_ends(rows, BEGINNINGS, SOME)
    if result is None:
        return None
    first, last = fmean(result[0]), fmean(result[1])
    problems = number(rows[-1], GROUPS) / number(rows[-1], EPISODES)
    if not (last < 0.25 * first and last < 0.5 * problems):
        return None
    return f"answers begin alike: {last:.1%} distinct 50-character beginnings, {first:.1%} at first"


def length_running_away(rows: Sequence[Row]) -> str | None:
    """Report answers three times as long as at first, or 1.5 times as long and truncated far more
    often.
    """
    result, cut = get_ends(rows, LENGTH, SOME), get_ends(rows, TRUNCATED, SOME)
    if result is None or cut is None:
        return None
    first, last, cut_first, cut_last = map(fmean, (*result, *cut))
    growth = last / max(1e-9, first)
    if not (growth > 3 or (growth > 1.5 and cut_last > cut_first + 0.2)):
        return None
    return (
        f"answers grew from {first:.0f} to {last:.0f} tokens; {cut_last:.0%} are cut off, "
        f"{cut_first:.0%} at first"
    )


def format_alone(rows: Sequence[Row]) -> str | None:
    """Report that over at least 20 batches the format improved and correctness did not."""
    form, right = get_ends(rows, FORMAT, MANY // 2), get_ends(rows, CORRECT, MANY // 2)
    if form is None or right is None or not check_rise(*form) or check_rise(*right):
        return None
    before, after, right_before, right_after = map(fmean, (*form, *right))
    if after - before < 0.05:
        return None
    return (
        f"only the format improves: format {before:.2f} to {after:.2f}, "
        f"correct {right_before:.2f} to {right_after:.2f}"
    )


def rewards_failing(rows: Sequence[Row]) -> str | None:
    """Report that half of a batch's samples, or a tenth over three batches, were not scored."""

    def count(few: int) -> tuple[float, float]:
        """Return the failed samples of the last batches, and all their samples."""
        failed, scored = (sum(column(rows[-few:], name)) for name in ("reward/failed", EPISODES))
        return failed, failed + scored

    (failed, samples), (failed_of_3, samples_of_3) = count(1), count(3)
    if failed > 0 and failed / samples >= 0.5:
        return (
            f"{failed:.0f} of the {samples:.0f} samples of this batch could not be scored: its "
            f"reward is the mean of the other samples"
        )
    if len(rows) >= 3 and failed_of_3 > 0 and failed_of_3 / samples_of_3 > 0.1:
        return f"{failed_of_3 / samples_of_3:.0%} of the samples of 3 batches could not be scored"
    return None


def _in_groups(row: Row) -> bool:
    """Return whether problems have several answers: with a single answer, no group can be mixed."""
    return number(row, EPISODES) > number(row, GROUPS)


# --------------------------------------------------------------------------------------- all checks

CHECKS: dict[str, Check] = {
    "kl_0.01": kl_above(0.01), "kl_0.1": kl_above(0.1), "kl_1": kl_above(1.0),
    "grad_norm": large_gradient, "zero_advantages": zero_advantages, "reward_flat": reward_flat,
    "entropy_collapse": entropy_collapse, "low_temperature": low_temperature,
    "mode_collapse": mode_collapse, "length": length_running_away, "format_alone": format_alone,
    "rewards_failing": rewards_failing,
}  # fmt: skip
QUIET = 20


def brute_force(
    rows: Sequence[Row], needs: Mapping[str, Sequence[str]]
) -> list[tuple[dict[str, float], list[str]]]:
    """Return for each row: (alarm/<name> 0 or 1 for each alarm that can be evaluated, new
    messages).
    """
    messages: list[tuple[dict[str, float], list[str]]] = []
    for i, row in enumerate(rows):
        results = {
            name: check(rows[: i + 1])
            for name, check in CHECKS.items()
            if all(key in row for key in needs[name])
        }
        metrics = {f"alarm/{name}": float(seen is not None) for name, seen in results.items()}
        quiet = {name for old, _ in messages[-QUIET:] for name, value in old.items() if value}
        new = [name for name in results if f"alarm/{name}" not in quiet]
        messages.append((metrics, [seen for name in new if (seen := results[name]) is not None]))
    return messages
