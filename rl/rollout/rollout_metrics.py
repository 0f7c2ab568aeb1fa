"""Compute metrics of trajectory groups, under the metric names of Tinker."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rl.rewards import hash_beginning
from rl.rollout.rollout_types import Metrics, Trajectory, TrajectoryGroup, has_signal, list_turns
from rl.types import Datum


def compute_sample_metrics(groups: Sequence[TrajectoryGroup]) -> Metrics:
    """Return metrics of the training samples: the number of groups, and the share of distinct
    answer prefixes (50 characters).
    """
    beginnings = [
        _answer_prefix(trajectory) for group in groups for trajectory in group.trajectories_G
    ]
    return {
        "env/all/total_groups": len(groups),
        "env/all/distinct_beginnings": len(set(beginnings)) / max(1, len(beginnings)),
    }


def compute_credited_share(groups: Sequence[TrajectoryGroup], datums: Sequence[Datum]) -> float:
    """Return the share of the sampled tokens of `groups` that `datums` train on. If the datums have
    advantages, only tokens with an advantage other than 0 count.
    """
    sampled = sum(turn.ac.num_tokens for turn in list_turns(groups))
    fields = [
        next(
            d.loss_fn_inputs[name]
            for name in ("advantages", "weights", "mask")
            if name in d.loss_fn_inputs
        )
        for d in datums
    ]
    credited = sum(np.count_nonzero(values.array) for values in fields)
    return credited / max(1, sampled)


def _answer_prefix(trajectory: Trajectory) -> bytes | tuple[int, ...]:
    """Return what is equal for first answers that begin with the same 50 characters; the first 50
    tokens if the environment logs no text.
    """
    turn = trajectory.transitions[0]
    if turn.ac.score is not None:
        return turn.ac.score.beginning
    text = turn.logs.get("response")
    return hash_beginning(text) if isinstance(text, str) else tuple(turn.ac.tokens[:50])


def max_or_nan(values: Iterable[float]) -> float:
    """Return the largest value; NaN if any value is NaN (`max` returns NaN only if it comes first);
    0 if empty.
    """
    values = list(values)
    return math.nan if any(math.isnan(value) for value in values) else max(values, default=0.0)


def mean(values: Iterable[float]) -> float:
    """Return the mean; 0 if empty."""
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def square(value: float) -> float:
    """Return the square; infinity beyond the range of floats, where ** raises."""
    try:
        return value**2
    except OverflowError:
        return math.inf


def compute_group_metrics(groups: Sequence[TrajectoryGroup], prefix: str = "env") -> Metrics:
    """Return `<prefix>/all/...` over all groups and, if there are several data sets,
    `<prefix>/<tag>/...` for each data set; the data set named "all" is `<prefix>/all-rows/...`.

    The metrics are reward/total (mean over episodes, with std, min and max), turns and tokens, each
    metric of environments and rewards (the mean over the episodes that have it), and the shares of
    groups that are mixed, all good or all bad. If an episode has context_overflow, its mean is over
    all episodes: the share of those that overflowed.
    """
    overflow = "context_overflow" in {name for turn in list_turns(groups) for name in turn.metrics}
    zero_if_missing = {"context_overflow": 0.0} if overflow else {}
    metrics = _compute_prefixed_metrics(groups, f"{prefix}/all", zero_if_missing)
    by_tag: dict[str, list[TrajectoryGroup]] = defaultdict(list)
    for group in groups:
        by_tag[group.tag].append(group)
    if len(by_tag) > 1:
        for tag, members in sorted(by_tag.items()):
            name = "all-rows" if tag == "all" else tag.replace("/", "-")
            metrics |= _compute_prefixed_metrics(members, f"{prefix}/{name}", zero_if_missing)
    return metrics


def _compute_prefixed_metrics(
    groups: Sequence[TrajectoryGroup], name: str, last_turn_defaults: Mapping[str, float]
) -> Metrics:
    """Return the metrics of the groups with the prefix `name`. Groups are mixed by their rewards,
    otherwise all good (equal and above 0) or all bad (equal, 0 or below). `last_turn_defaults`:
    metrics that the last turn of each episode has, with this value unless it has another.
    """
    rewards_P_G = [group.get_total_rewards() for group in groups]
    rewards = [r for rewards_G in rewards_P_G for r in rewards_G]
    turns = list_turns(groups)
    average = mean(rewards)
    metrics = {
        f"{name}/reward/total": average,
        f"{name}/reward/std": mean(square(r - average) for r in rewards) ** 0.5,
        f"{name}/reward/min": min(rewards, default=0.0),
        f"{name}/reward/max": max(rewards, default=0.0),
        f"{name}/total_episodes": len(rewards),
        f"{name}/turns_per_episode": len(turns) / max(1, len(rewards)),
        f"{name}/ac_tokens_per_turn": mean(turn.ac.num_tokens for turn in turns),
        f"{name}/ob_tokens_per_turn": mean(turn.ob.length for turn in turns),
        f"{name}/frac_truncated": mean(turn.ac.stop_reason == "length" for turn in turns),
    }
    values: dict[str, list[float]] = defaultdict(list)
    for source in (*(turn.metrics for turn in turns), *(m for g in groups for m in g.metrics_G)):
        for key, value in source.items():
            values[key].append(value)
    for key, value in last_turn_defaults.items():
        last = (t.transitions[-1] for group in groups for t in group.trajectories_G)
        values[key] += [value for turn in last if key not in turn.metrics]
    mixed = [has_signal(rewards_G) for rewards_G in rewards_P_G]
    good = [not m and rewards_G[0] > 0 for m, rewards_G in zip(mixed, rewards_P_G, strict=True)]
    bad = [not m and not g for m, g in zip(mixed, good, strict=True)]
    return {
        **metrics,
        **{f"{name}/{key}": mean(numbers) for key, numbers in values.items()},
        f"{name}/by_group/frac_mixed": mean(mixed),
        f"{name}/by_group/frac_all_good": mean(good),
        f"{name}/by_group/frac_all_bad": mean(bad),
    }


def compute_calibration_error(
    probabilities: Sequence[float], correct: Sequence[float], bins: int = 10
) -> float:
    """Return the expected calibration error of binary choices (Guo et al., arXiv 1706.04599,
    equation 3).

    `probabilities`: the probability of the chosen side, 0.5 to 1. `correct`: 1 if the chosen side
    was the better side, 0 if not (0.5: half). Sum over `bins` equal bins of 0.5 to 1: (share of
    all) |mean correct - mean probability|.
    """
    p, r = np.asarray(probabilities, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    bin_indices = np.minimum(((p - 0.5) * 2 * bins).astype(int), bins - 1)
    total = sum(abs(float((r - p)[bin_indices == b].sum())) for b in range(bins))
    return total / max(1, len(p))
