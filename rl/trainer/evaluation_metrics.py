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
    "frac_truncated": "truncated",
    "ac_tokens_per_turn": "tokens an answer",
}
# Accuracies of instructions under the names of lm-eval: the metrics of the reward `ifeval` that are
# summed, and divided by the sum of another (None: by the number of answers).
_INSTRUCTION_ACCURACIES = {
    "prompt_level_strict_acc": ("correct", None),
    "inst_level_strict_acc": ("instructions_strict", "instructions"),
    "prompt_level_loose_acc": ("loose", None),
    "inst_level_loose_acc": ("instructions_loose", "instructions"),
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
            ones = [1.0] * len(estimates_P)
            result[f"standard error of pass@{k}"] = compute_clustered_error(estimates_P, ones)
    return result


def compute_clustered_error(totals_P: Sequence[float], counts_P: Sequence[float]) -> float:
    """Return the standard error of the mean score, with the answers clustered by problem.

    `totals_P`, `counts_P`: sum and number of the scores of each of 2 or more problems. Answers to
    the same problem, of all samples and seeds, are not independent. With the mean
    m = sum(totals) / sum(counts) the error is

        sqrt(P / (P - 1) * sum over problems of (total - m * count)^2) / sum(counts)

    This is the clustered standard error of Miller 2024, arXiv 2411.00640, section 2.2, whose sum
    over pairs of answers of a problem is the square of their sum, with the factor P / (P - 1) for a
    small number P of problems. If all counts are equal, it is the standard deviation (with P - 1)
    of the means of the problems, divided by the square root of P.
    """
    answers, problems = sum(counts_P), len(counts_P)
    average = sum(totals_P) / answers
    squares = sum(
        (total - average * count) ** 2 for total, count in zip(totals_P, counts_P, strict=True)
    )
    return math.sqrt(problems / (problems - 1) * squares) / answers


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
    """Return the mean metrics of all responses. The mean reward, the accuracies and pass@k have
    their standard errors, with the responses clustered by problem.

    `groups`: those of all seeds; a problem has a group for each seed. `samples`: the number of
    responses to a problem, of all seeds; pass@k is added if it is more than 1. Correctness is known
    if the reward reports it (its metric `correct`) or if all rewards are 0 or 1.
    """
    metrics = compute_group_metrics(groups)
    result = {
        label: metrics[f"env/all/{name}"]
        for name, label in _REPORTED_METRICS.items()
        if f"env/all/{name}" in metrics
    }
    rewards_P_G = _merge_by_problem(groups, [group.get_total_rewards() for group in groups])
    correct_P_G = _collect_metric(groups, "correct")
    if not any(correct_P_G) and all(
        reward in (0.0, 1.0) for rewards_G in rewards_P_G for reward in rewards_G
    ):
        correct_P_G = rewards_P_G
        result["correct"] = mean(reward for correct_G in correct_P_G for reward in correct_G)
    _add_error(result, "mean reward", rewards_P_G)
    _add_error(result, "correct", correct_P_G)
    if any(_collect_metric(groups, "instructions")):
        for label, (name, other) in _INSTRUCTION_ACCURACIES.items():
            values_P_G = _collect_metric(groups, name)
            counts_P_G = _collect_metric(groups, other) if other is not None else None
            _add_error(result, label, values_P_G, counts_P_G)
    return {**result, **(compute_pass_at_k(correct_P_G, samples) if samples > 1 else {})}


def _add_error(
    result: dict[str, float],
    label: str,
    values_P_G: Sequence[Sequence[float]],
    counts_P_G: Sequence[Sequence[float]] | None = None,
) -> None:
    """Add the standard error of a mean, and the mean itself unless `result` has it.

    `counts_P_G`: by what the sum of the values is divided; default: their number.
    """
    pairs = [
        (sum(values), float(len(values)) if counts_P_G is None else sum(counts_P_G[i]))
        for i, values in enumerate(values_P_G)
        if values
    ]
    if not pairs:
        return
    totals_P, counts_P = zip(*pairs, strict=True)
    result.setdefault(label, sum(totals_P) / sum(counts_P))
    if len(pairs) > 1:
        result[f"standard error of {label}"] = compute_clustered_error(totals_P, counts_P)


def _merge_by_problem(
    groups: Sequence[TrajectoryGroup], values_P_G: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Merge the values of all groups of the same problem, which several seeds sampled."""
    merged: dict[tuple[str, int], list[float]] = {}
    for group, values in zip(groups, values_P_G, strict=True):
        merged.setdefault((group.tag, group.problem_index), []).extend(values)
    return list(merged.values())


def _collect_metric(groups: Sequence[TrajectoryGroup], name: str) -> list[list[float]]:
    """Return a metric of the responses to each problem, of those that have it."""
    last_turns_P_G = [
        [trajectory.transitions[-1] for trajectory in group.trajectories_G] for group in groups
    ]
    return _merge_by_problem(
        groups,
        [
            [turn.metrics[name] for turn in last_turns if name in turn.metrics]
            for last_turns in last_turns_P_G
        ],
    )
