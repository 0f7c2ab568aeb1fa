"""Shape rewards before advantages: overlong penalty, normalization by running statistics, scale,
clipping. Pure numbers.

Letters: P problems (groups), G members of a group, N steps (turns) of an episode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rl.config import ShapingSettings
from rl.rollout import Metrics, TrajectoryGroup, mean, square


@dataclass
class RunningStatistics:
    """Track the mean and (population) standard deviation of all values so far, a batch at a time
    (Chan, Golub, LeVeque 1979).
    """

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0  # sum of squared distances to the mean

    @property
    def std(self) -> float:
        """Return the standard deviation; 0 without values."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0

    def update(self, values: Sequence[float]) -> None:
        """Add a batch of values."""
        if not values:
            return
        n, mean = len(values), math.fsum(values) / len(values)
        m2 = math.fsum(square(v - mean) for v in values)
        total, shift = self.count + n, mean - self.mean
        self.m2 += m2 + shift * shift * self.count * n / total
        self.mean += shift * n / total
        self.count = total


def overlong_penalty(tokens: int, max_tokens: int, share: float, penalty: float) -> float:
    """Return the penalty of an answer of `tokens` for its length: 0 up to (1 - share) max_tokens,
    then linearly up to `penalty`.

    DAPO's soft overlong punishment (arXiv 2503.14476, equation 13) with L_cache = share *
    max_tokens and L_max = max_tokens.
    """
    if not share:
        return 0.0
    allowed = (1 - share) * max_tokens
    return penalty * max(0.0, min(tokens, max_tokens) - allowed) / (max_tokens - allowed)


class RewardShaper:
    """Shape a batch's rewards: length penalties, then (r - mean) / std over all batches so far,
    then scale, then clipping.

    The running statistics are of total rewards, this batch's included. A resumed run needs `state`.
    """

    def __init__(self, settings: ShapingSettings, max_tokens: int):
        self.settings = settings
        self.max_tokens = max_tokens
        self.statistics = RunningStatistics()
        self.metrics: Metrics = {}

    def shape_totals(self, groups: Sequence[TrajectoryGroup]) -> list[list[float]]:
        """Return the shaped total rewards [P][G]."""
        rewards_P_G_N = self._step_rewards(groups)
        centre = self.statistics.mean if self.settings.normalise_rewards else 0.0
        return [
            [self._shape(sum(steps), centre) for steps in rewards_G_N]
            for rewards_G_N in rewards_P_G_N
        ]

    def shape_steps(self, groups: Sequence[TrajectoryGroup]) -> list[list[list[float]]]:
        """Return the shaped rewards of each step [P][G][N].

        They are divided by the std of totals, but not centered: a longer episode gets no higher
        reward.
        """
        return [
            [[self._shape(r, 0.0) for r in steps] for steps in rewards_G_N]
            for rewards_G_N in self._step_rewards(groups)
        ]

    def _step_rewards(self, groups: Sequence[TrajectoryGroup]) -> list[list[list[float]]]:
        """Return the rewards of each step [P][G][N]; the last step includes a group's final rewards
        and the penalties.

        Update the metrics, and the running statistics if rewards are normalized.
        """
        s = self.settings
        overlong, cut_off, rewards_P_G_N = [], [], []
        for group in groups:
            rewards_G_N = [[*steps] for steps in group.get_step_rewards()]
            for trajectory, steps in zip(group.trajectories_G, rewards_G_N, strict=True):
                turns = trajectory.transitions
                # max_tokens bounds each turn, not the episode
                longest = max(turn.ac.num_tokens for turn in turns)
                overlong.append(
                    overlong_penalty(longest, self.max_tokens, s.overlong_share, s.overlong_penalty)
                )
                cut_off.append(s.cut_off_penalty * (turns[-1].ac.stop_reason == "length"))
                steps[-1] = steps[-1] - overlong[-1] - cut_off[-1]
            rewards_P_G_N.append(rewards_G_N)
        self.metrics = {"reward/overlong_penalty": mean(overlong)} if s.overlong_share else {}
        if s.cut_off_penalty:
            self.metrics["reward/cut_off_penalty"] = mean(cut_off)
        if s.normalise_rewards:
            self.statistics.update([sum(steps) for group in rewards_P_G_N for steps in group])
            self.metrics |= {
                "reward/running_mean": self.statistics.mean,
                "reward/running_std": self.statistics.std,
            }
        return rewards_P_G_N

    def _shape(self, reward: float, centre: float) -> float:
        """Return the reward after normalization, scale and clipping."""
        s = self.settings
        if s.normalise_rewards:
            # if all rewards so far were equal, the std is 0 except for rounding: do not divide
            std = self.statistics.std
            reward = (reward - centre) / (std + 1e-8 if std > 1e-8 else 1.0)
        reward *= s.reward_scale
        return reward if s.reward_clip is None else max(-s.reward_clip, min(s.reward_clip, reward))

    def state(self) -> dict[str, Any]:
        """Return the running statistics, for a checkpoint."""
        return asdict(self.statistics)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the running statistics from a checkpoint."""
        self.statistics = RunningStatistics(state["count"], state["mean"], state["m2"])
