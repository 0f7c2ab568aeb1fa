"""What an evaluation says of the answers it got: rows to read and count again, mean figures, pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rl.episodes import TrajectoryGroup
from rl.metrics import group_metrics, mean
from rl.types import Problem

_SHOWN = {
    "reward/total": "mean reward",
    "correct": "correct",
    "format": "format",
    "ended": "ended by itself",
    "ac_tokens_per_turn": "tokens an answer",
}


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k answers is right, estimated without bias from n answers of which c are right.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, arXiv 2107.03374, equation 1.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got {n=}, {c=}, {k=}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_figures(correct_P_G: Sequence[Sequence[float]], n: int) -> dict[str, float]:
    """pass@1, 2, 4, ... and pass@n, averaged over the problems all of whose n answers were scored."""
    whole = [round(sum(correct_G)) for correct_G in correct_P_G if len(correct_G) == n]
    sizes = sorted({*(2**i for i in range(n.bit_length())), n})
    return {f"pass@{k}": mean(pass_at_k(n, c, k) for c in whole) for k in sizes} if whole else {}


def answer_rows(groups: Sequence[TrajectoryGroup], problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """One row for each answer: problem, prompt, response, expected, reward, the reward's own metrics, tokens."""
    expected = {problem.index: problem.meta.get("answer") for problem in problems}
    rows = []
    for group in groups:
        for trajectory, reward in zip(group.trajectories_G, group.get_total_rewards(), strict=True):
            turn = trajectory.transitions[-1]
            logs = {name: value for name, value in turn.logs.items() if name != "messages"}  # the prompt is their last
            asked = {"problem": group.problem_index, **logs, "expected": expected[group.problem_index]}
            rows.append({**asked, "reward": reward, **turn.metrics, "tokens": len(turn.ac.tokens)})
    return rows


def figures(groups: Sequence[TrajectoryGroup], samples: int) -> dict[str, float]:
    """Means over all answers; where the reward says `correct`, its standard error over problems, and pass@k of several."""
    metrics = group_metrics(groups)
    found = {label: metrics[f"env/all/{name}"] for name, label in _SHOWN.items() if f"env/all/{name}" in metrics}
    correct_P_G = [_correct(group) for group in groups]
    means_P = [mean(correct_G) for correct_G in correct_P_G if correct_G]
    if len(means_P) > 1:
        variance = sum((m - mean(means_P)) ** 2 for m in means_P) / (len(means_P) - 1)
        found["standard error of correct"] = math.sqrt(variance / len(means_P))
    return {**found, **(pass_figures(correct_P_G, samples) if samples > 1 else {})}


def _correct(group: TrajectoryGroup) -> list[float]:
    """What the reward said of each answer, where it says so."""
    last_turns = [trajectory.transitions[-1] for trajectory in group.trajectories_G]
    return [turn.metrics["correct"] for turn in last_turns if "correct" in turn.metrics]
