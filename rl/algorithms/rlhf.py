"""Define RLHF: reinforcement learning from a reward model (Ouyang et al., arXiv 2203.02155), which
is PPO with another source of rewards.

The same reward model in GRPO's loop: train.py grpo --reward-model ...
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rl.algorithms import ppo
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


def list_rlhf_weights(settings: Any) -> list[str]:
    """Return the names of the weights that rlhf loads. Raises UserError if the settings name no
    reward model.
    """
    if not settings.learned.model_names:
        raise UserError(
            "rlhf needs a reward model: --reward-model with an earlier stage, a reward_model "
            "run's folder or a checkpoint of it (or --comparison-model with a language model that "
            "compares answers)"
        )
    return ppo.PPO.weights(settings)
