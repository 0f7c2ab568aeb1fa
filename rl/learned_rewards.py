"""Rewards from a model in the loop: a reward model's scores of whole episodes, or a language model's comparisons within groups.

Both score what was sampled after it was sampled, a batch at a time, and their scores become part of the group's rewards:
whatever comes after (advantages, shaping, metrics, KL in the reward) does not know where a reward is from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any, Protocol

from rl.comparison import Comparison, ComparisonModel
from rl.episodes import Trajectory, TrajectoryGroup
from rl.errors import UserError
from rl.rollout import Rollouts
from rl.types import Message, ModelInput

if TYPE_CHECKING:
    from rl.training_client import TrainingClient

_AT_ONCE = 512  # sequences in one call


class GroupScorer(Protocol):
    """`scores_alone`: whether an answer without others to be compared with has a score."""

    scores_alone: bool

    def scores(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        """A score for each episode, [P][G]."""
        ...


class RewardModel:
    """A model with a value head: an episode's score is the value after its last token, whether it ended or was cut off."""

    scores_alone = True

    def __init__(self, client: TrainingClient, name: str):
        self.client, self.name = client, name

    def scores(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        whole = [_tokens(trajectory) for group in groups for trajectory in group.trajectories_G]
        limit = self.client.info["max_context"]
        longest = max((one.length for one in whole), default=0)
        if limit is not None and longest > limit:
            raise UserError(
                f"the reward model {self.name} reads at most {limit} tokens, an episode has {longest}: lower max_tokens, or take "
                "a reward model of a longer context"
            )
        found: list[float] = []
        for i in range(0, len(whole), _AT_ONCE):
            found += [float(values[-1]) for values in self.client.compute_values(whole[i : i + _AT_ONCE]).result()]
        if not all(math.isfinite(score) for score in found):
            raise UserError(f"the reward model {self.name} gave {sum(not math.isfinite(s) for s in found)} scores that are not finite")
        scores = iter(found)
        return [[next(scores) for _ in group.trajectories_G] for group in groups]


class ComparedInGroup:
    """A judge: an episode's score is the share of its group that it is preferred to, a tie being half: 0 to 1, mean 1/2.

    Equal answers tie without being shown. An answer alone in its group scores 1/2.
    """

    scores_alone = False

    def __init__(self, judge: ComparisonModel):
        self.judge = judge

    def scores(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        asked: list[tuple[int, int, int]] = []
        comparisons: list[Comparison] = []
        for g, group in enumerate(groups):
            texts = [str(trajectory.transitions[-1].logs["response"]) for trajectory in group.trajectories_G]
            messages = _asked(group.trajectories_G[0].transitions[-1].logs)
            for i, j in combinations(range(len(texts)), 2):
                if texts[i] != texts[j]:
                    asked.append((g, i, j))
                    comparisons.append(Comparison(messages, texts[i], texts[j]))
        # win[g][i]: how many others i is preferred to; equal answers share the point
        wins = [[(len(group.trajectories_G) - 1) / 2] * len(group.trajectories_G) for group in groups]
        for start in range(0, len(comparisons), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            for (g, i, j), verdict in zip(asked[part], self.judge.verdicts(comparisons[part]), strict=True):
                ahead = (verdict.first - verdict.second) / 2
                wins[g][i] += ahead
                wins[g][j] -= ahead
        return [[win / (len(of_group) - 1) if len(of_group) > 1 else 0.5 for win in of_group] for of_group in wins]


class LearnedRewards:
    """Puts a scorer's scores into groups. `other_weight`: of the rewards that the environments gave; 0 measures them alone.

    Metrics of each episode: `reward/learned` and `reward/given`.
    """

    def __init__(self, scorer: GroupScorer, other_weight: float):
        self.scorer, self.other_weight = scorer, other_weight

    @property
    def scores_alone(self) -> bool:
        return self.scorer.scores_alone

    def __call__(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """The same groups, rewarded: each episode's score on its end, each step's own reward times `other_weight`."""
        found = []
        for group, scores_G in zip(groups, self.scorer.scores(groups), strict=True):
            given_G = group.get_total_rewards()
            members = [replace(one, transitions=[replace(t, reward=t.reward * self.other_weight) for t in one.transitions])
                       for one in group.trajectories_G]  # fmt: skip
            finals = [final * self.other_weight + score for final, score in zip(group.final_rewards_G, scores_G, strict=True)]
            metrics = [
                {**own, "reward/learned": score, "reward/given": given}
                for own, score, given in zip(group.metrics_G, scores_G, given_G, strict=True)
            ]
            found.append(replace(group, trajectories_G=members, final_rewards_G=finals, metrics_G=metrics))
        return found


def judged(rollouts: Rollouts, rewards: LearnedRewards | None, *, alone: bool = False) -> Rollouts:
    """The rollouts with a model's judgement as their reward; as they are without one. `alone`: answers stand in no group."""
    if rewards is None or not rollouts.groups or (alone and not rewards.scores_alone):
        return rollouts
    start = time.perf_counter()
    groups = rewards(rollouts.groups)
    return replace(rollouts, groups=groups, score_seconds=rollouts.score_seconds + time.perf_counter() - start)


def _asked(logs: Mapping[str, Any]) -> Sequence[Message]:
    """The whole conversation that was answered, as a judge is trained on it; of an environment that logs none, its prompt alone."""
    return logs["messages"] if "messages" in logs else [{"role": "user", "content": str(logs["prompt"])}]


def _tokens(trajectory: Trajectory) -> ModelInput:
    """All that was read and said up to the episode's last token, as tokens."""
    last = trajectory.transitions[-1]
    return ModelInput.from_ints([*last.ob.to_ints(), *last.ac.tokens])
