"""Summarize an evaluation: a row for each response, mean metrics, pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rl.rollout import TrajectoryGroup, compute_group_metrics, mean
from rl.types import Problem

_REPORTED_METRICS = {
    "reward/total": "mean reward",
    "correct": "correct",
    "format": "format",
    "won": "won",
    "drawn": "drawn",
    "lost": "lost",
    "ended": "ended by itself",
    "ac_tokens_per_turn": "tokens an answer",
}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from n responses of which c are correct.

    pass@k is the probability that at least 1 of k responses is correct. The estimate is
    1 - C(n - c, k) / C(n, k): Chen et al. 2021, arXiv 2107.03374, section 2.1, equation 1. Raises
    ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got {n=}, {c=}, {k=}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def compute_pass_at_k(correct_P_G: Sequence[Sequence[float]], n: int) -> dict[str, float]:
    """Return pass@1, 2, 4, ... and pass@n, each with its standard error.

    The mean is over the problems for which all n responses were scored. The standard error is that
    of the mean over problems: the standard deviation (with P - 1) of the estimates per problem
    divided by the square root of their number P. It treats the problems as a sample of all possible
    problems and includes the variance from sampling other responses to the same problems.
    """
    correct_counts = [round(sum(correct_G)) for correct_G in correct_P_G if len(correct_G) == n]
    result: dict[str, float] = {}
    for k in sorted({*(2**i for i in range(n.bit_length())), n}) if correct_counts else []:
        estimates_P = [pass_at_k(n, c, k) for c in correct_counts]
        result[f"pass@{k}"] = mean(estimates_P)
        if len(correct_counts) > 1:
            result[f"standard error of pass@{k}"] = compute_standard_error(estimates_P)
    return result


def compute_standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of 2 or more values."""
    variance = sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def make_response_rows(
    groups: Sequence[TrajectoryGroup], problems: Sequence[Problem]
) -> list[dict[str, Any]]:
    """Return a row for each response.

    It has problem, prompt, response, expected, reward, the metrics of the reward, and tokens.
    """
    expected = {problem.index: problem.meta.get("answer") for problem in problems}
    rows = []
    for group in groups:
        for trajectory, reward in zip(group.trajectories_G, group.get_total_rewards(), strict=True):
            turn = trajectory.transitions[-1]
            # the last message is the prompt, which has a separate key
            logs = {name: value for name, value in turn.logs.items() if name != "messages"}
            problem_fields = {
                "problem": group.problem_index,
                **logs,
                "expected": expected[group.problem_index],
            }
            rows.append(
                {**problem_fields, "reward": reward, **turn.metrics, "tokens": len(turn.ac.tokens)}
            )
    return rows


def compute_evaluation_metrics(groups: Sequence[TrajectoryGroup], samples: int) -> dict[str, float]:
    """Return the mean metrics of all responses; with known correctness also the standard error.

    pass@k is added for `samples` > 1. Correctness is known if the reward reports it (its metric
    `correct`) or if all rewards are 0 or 1. The standard error is that over problems.
    """
    metrics = compute_group_metrics(groups)
    result = {
        label: metrics[f"env/all/{name}"]
        for name, label in _REPORTED_METRICS.items()
        if f"env/all/{name}" in metrics
    }
    correct_P_G = [_list_correct(group) for group in groups]
    if not any(correct_P_G) and all(
        reward in (0.0, 1.0) for group in groups for reward in group.get_total_rewards()
    ):
        correct_P_G = [group.get_total_rewards() for group in groups]
        result["correct"] = mean(reward for correct_G in correct_P_G for reward in correct_G)
    means_P = [mean(correct_G) for correct_G in correct_P_G if correct_G]
    if len(means_P) > 1:
        result["standard error of correct"] = compute_standard_error(means_P)
    return {**result, **(compute_pass_at_k(correct_P_G, samples) if samples > 1 else {})}


def _list_correct(group: TrajectoryGroup) -> list[float]:
    """Return the `correct` metric of each response for which the reward reports it."""
    last_turns = [trajectory.transitions[-1] for trajectory in group.trajectories_G]
    return [turn.metrics["correct"] for turn in last_turns if "correct" in turn.metrics]
