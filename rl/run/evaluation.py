"""What an evaluation says of the answers it got: rows to read and count again, mean figures,
pass@k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rl.episodes import TrajectoryGroup, group_metrics, mean
from rl.types import Problem

_SHOWN = {
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
    """The chance that one of k answers is right, estimated without bias from n answers of which c
    are right.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, arXiv 2107.03374, section 2.1, equation 1.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got {n=}, {c=}, {k=}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_figures(correct_P_G: Sequence[Sequence[float]], n: int) -> dict[str, float]:
    """pass@1, 2, 4, ... and pass@n, averaged over the problems all of whose n answers were scored,
    each with its standard error.

    The standard error is that of the mean over problems: the standard deviation (with P - 1) of the
    problems' own estimates over the root of their number P. Problems are taken for a sample of all
    that could be asked; what drawing other answers to the same problems would change is within it.
    """
    whole = [round(sum(correct_G)) for correct_G in correct_P_G if len(correct_G) == n]
    found: dict[str, float] = {}
    for k in sorted({*(2**i for i in range(n.bit_length())), n}) if whole else []:
        estimates_P = [pass_at_k(n, c, k) for c in whole]
        found[f"pass@{k}"] = mean(estimates_P)
        if len(whole) > 1:
            found[f"standard error of pass@{k}"] = standard_error(estimates_P)
    return found


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of two values or more."""
    variance = sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def answer_rows(
    groups: Sequence[TrajectoryGroup], problems: Sequence[Problem]
) -> list[dict[str, Any]]:
    """One row for each answer: problem, prompt, response, expected, reward, the reward's own
    metrics, tokens.
    """
    expected = {problem.index: problem.meta.get("answer") for problem in problems}
    rows = []
    for group in groups:
        for trajectory, reward in zip(group.trajectories_G, group.get_total_rewards(), strict=True):
            turn = trajectory.transitions[-1]
            # the prompt is their last
            logs = {name: value for name, value in turn.logs.items() if name != "messages"}
            asked = {
                "problem": group.problem_index,
                **logs,
                "expected": expected[group.problem_index],
            }
            rows.append({**asked, "reward": reward, **turn.metrics, "tokens": len(turn.ac.tokens)})
    return rows


def figures(groups: Sequence[TrajectoryGroup], samples: int) -> dict[str, float]:
    """Means over all answers; where it is known which are correct, the standard error over
    problems, and pass@k of several.

    It is known where the reward says so (its metric `correct`), and where it gives 0 and 1 alone.
    """
    metrics = group_metrics(groups)
    found = {
        label: metrics[f"env/all/{name}"]
        for name, label in _SHOWN.items()
        if f"env/all/{name}" in metrics
    }
    correct_P_G = [_correct(group) for group in groups]
    if not any(correct_P_G) and all(
        reward in (0.0, 1.0) for group in groups for reward in group.get_total_rewards()
    ):
        correct_P_G = [group.get_total_rewards() for group in groups]
        found["correct"] = mean(reward for correct_G in correct_P_G for reward in correct_G)
    means_P = [mean(correct_G) for correct_G in correct_P_G if correct_G]
    if len(means_P) > 1:
        found["standard error of correct"] = standard_error(means_P)
    return {**found, **(pass_figures(correct_P_G, samples) if samples > 1 else {})}


def _correct(group: TrajectoryGroup) -> list[float]:
    """What the reward said of each answer, where it says so."""
    last_turns = [trajectory.transitions[-1] for trajectory in group.trajectories_G]
    return [turn.metrics["correct"] for turn in last_turns if "correct" in turn.metrics]
