"""Rewards: text to score. Names and settings are in `registry`, built-ins in `text` and `maths`, safe running in `scorer`."""

from rl.rewards import maths, text
from rl.rewards.registry import Reward, RewardResult, register_reward, registered_rewards, resolve_reward
from rl.rewards.scorer import PendingScore, Score, Scorer

__all__ = [
    "PendingScore",
    "Reward",
    "RewardResult",
    "Score",
    "Scorer",
    "maths",
    "register_reward",
    "registered_rewards",
    "resolve_reward",
    "text",
]
