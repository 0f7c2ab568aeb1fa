"""Define RLHF: reinforcement learning from a reward model (Ouyang et al., arXiv 2203.02155), which
is PPO with another source of rewards.

The same reward model in GRPO's loop: train.py grpo --reward-model ...
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rl.algorithms.method_interface import ModelFactory
from rl.algorithms.ppo import PPO
from rl.algorithms.ppo_settings import PpoSettings
from rl.config import DataSettings, ShapingSettings
from rl.errors import UserError


def _default_data() -> DataSettings:
    """Return data settings without a reward function."""
    return DataSettings(reward=None)


def _default_shaping() -> ShapingSettings:
    # A reward model's scores have an arbitrary scale. Without normalization their value loss may
    # dominate the policy's.
    """Return shaping settings that divide rewards by their running std."""
    return ShapingSettings(normalise_rewards=True)


@dataclass(frozen=True, kw_only=True)
class RlhfSettings(PpoSettings):
    """PPO on the scores of a reward model, with a KL penalty to the initial policy. Scores are
    divided by their running std.
    """

    data: DataSettings = field(default_factory=_default_data)
    shaping: ShapingSettings = field(default_factory=_default_shaping)


class RLHF(PPO):
    """Implement `rlhf`."""

    Settings = RlhfSettings
    summary = "RL: ppo on the scores of a reward model"
    needs_reward = False

    def required_models(self, factory: ModelFactory) -> dict[str, Any]:
        """Create the models of PPO. Raises UserError if the settings name no reward model."""
        if not self.judge_names:
            raise UserError(
                "rlhf needs a reward model: --reward-model with an earlier stage, a reward_model "
                "run's folder or a checkpoint of it (or --comparison-model with a language model "
                "that compares answers)"
            )
        return super().required_models(factory)
