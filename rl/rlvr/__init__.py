"""Reinforcement learning from verifiable rewards in a script of one's own: sample, score, `update`.

    from rl import LoRAConfig, ServiceClient, TrainingConfig
    from rl.rlvr import PPO, PPOConfig, RolloutSampler, resolve_reward

A thin face over the clients and the methods: what it computes is theirs.
"""

from rl.clients import LoRAConfig, ServiceClient, TrainingConfig
from rl.rewards import register_reward, resolve_reward
from rl.rlvr.algorithms import PPO, REINFORCE, Algorithm, UpdateResult
from rl.rlvr.configs import PPOConfig, REINFORCEConfig
from rl.rlvr.rollouts import RolloutSampler, ScoredTrajectory, TrajectoryBatch

__all__ = [
    "PPO",
    "REINFORCE",
    "Algorithm",
    "LoRAConfig",
    "PPOConfig",
    "REINFORCEConfig",
    "RolloutSampler",
    "ScoredTrajectory",
    "ServiceClient",
    "TrainingConfig",
    "TrajectoryBatch",
    "UpdateResult",
    "register_reward",
    "resolve_reward",
]
