"""Implement best-of-n: sample several answers to each problem and fine-tune on the best (rejection
sampling fine-tuning).

RAFT (Dong et al., arXiv 2304.06767, algorithm 1); Llama 2's rejection sampling (arXiv 2307.09288,
section 3.2); with `min_reward` RFT (Yuan et al., arXiv 2308.01825) and STaR's filter (arXiv
2203.14465). The loss is the mean of -log p over the kept answers' tokens, at the sampling
temperature, so that the distribution that samples is fitted to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from rl.algorithms.method_interface import Models, OnlineMethod, OnlineSettings, Progress
from rl.algorithms.update import train_single_pass
from rl.config import (
    Range,
    check_comparison_groups,
    check_ranges,
)
from rl.rollout import Metrics, TrajectoryGroup, mean, trajectory_to_datums
from rl.types import Datum


@dataclass(frozen=True, kw_only=True)
class SelectionSettings:
    """Configure the answers that are learned."""

    group_size: Annotated[int, Range(1, 10**6)] = 8
    """Answers sampled for each problem: the n."""
    keep: Annotated[int, Range(1, 10**6)] = 1
    """Number of answers learned per group, the best first; of equal answers those sampled first."""
    min_reward: Annotated[float | None, Range(-1e9, 1e9)] = None
    """Learn no answer with a lower reward, such as 1 if a correct answer has reward 1. By default a group of answers with equal rewards is dropped."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.keep >= self.group_size and self.min_reward is None:
            raise ValueError(
                f"keep {self.keep} of group_size {self.group_size} answers selects all of them, "
                "whatever their rewards: raise group_size, lower keep, or set min_reward"
            )


@dataclass(frozen=True, kw_only=True)
class BestOfNSettings(OnlineSettings):
    """Best-of-n: sample several answers to each problem, fine-tune on the best, sample again."""

    default_learning_rates = (1e-4, 1e-5)

    selection: SelectionSettings = SelectionSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_comparison_groups(self, self.selection.group_size)


def select_best(rewards_G: Sequence[float], config: SelectionSettings) -> list[int]:
    """Return the members of a group that are learned, the best first."""
    if config.min_reward is None and len(set(rewards_G)) == 1:
        return []
    best = sorted(range(len(rewards_G)), key=lambda i: -rewards_G[i])[: config.keep]
    return [i for i in best if config.min_reward is None or rewards_G[i] >= config.min_reward]


class BestOfN(OnlineMethod):
    """Implement `best_of_n`."""

    Settings = BestOfNSettings
    summary = "RL: fine-tune on the best of several answers to each problem (rejection sampling)"

    def __init__(self, settings: BestOfNSettings):
        super().__init__(settings)
        self.group_size = settings.selection.group_size
        # the batch's kept answers with the behavior logprobs
        self._behavior_datums: list[Datum] = []
        self._metrics: Metrics = {}

    def compute_advantages(self, groups: Sequence[TrajectoryGroup], models: Models) -> list[Datum]:
        """Return the kept answers as datums. If no answer is kept, return an answer of the first
        group with weights of 0, which has no gradient.
        """
        rewards_P_G = [group.get_total_rewards() for group in groups]
        kept = [
            (p, i)
            for p, rewards_G in enumerate(rewards_P_G)
            for i in select_best(rewards_G, self.settings.selection)
        ]
        self._metrics = {
            "optim/answers_kept": len(kept),
            "optim/groups_kept": len({p for p, _ in kept}) / max(1, len(groups)),
        }
        if kept:
            self._metrics["reward/kept"] = mean([rewards_P_G[p][i] for p, i in kept])
        datums: list[Datum] = []
        for p, i in kept or [(0, 0)]:
            trajectory = groups[p].trajectories_G[i]
            datums += trajectory_to_datums(trajectory, 1.0 if kept else 0.0)
        self._behavior_datums = datums if kept else []
        sources = {"target_tokens": "target_tokens", "weights": "mask" if kept else "advantages"}
        return [
            datum.with_inputs({new: datum.loss_fn_inputs[old] for new, old in sources.items()})
            for datum in datums
        ]

    def update(self, models: Models, datums: Sequence[Datum], progress: Progress) -> Metrics:
        """Update the policy in a single pass over the kept answers."""
        metrics = train_single_pass(
            models,
            datums,
            self.settings,
            progress,
            loss="cross_entropy",
            config={"temperature": self.settings.sampling.temperature},
            behavior_datums=self._behavior_datums,
        )
        self._behavior_datums = []
        return {**metrics, **self._metrics}
