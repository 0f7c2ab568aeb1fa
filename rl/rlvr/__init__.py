"""Train with verifiable rewards (RLVR) in a user's script: sample, score, `update`.

    from rl import LoRAConfig, ServiceClient, TrainingConfig
    from rl.rlvr import PPO, PPOConfig, RolloutSampler, resolve_reward

The package is a thin layer: clients and methods do the computation.
"""

from typing import Any

from rl.client import LoRAConfig, ServiceClient, TrainingConfig
from rl.rewards import register_reward, resolve_reward
from rl.rlvr.algorithms import Algorithm, UpdateResult
from rl.rlvr.algorithms import PPOAlgorithm as PPO
from rl.rlvr.algorithms import REINFORCEAlgorithm as REINFORCE
from rl.rlvr.configs import PPOConfig, REINFORCEConfig
from rl.rlvr.rollout_sampler import RolloutSampler, ScoredTrajectory, TrajectoryBatch

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


def __getattr__(name: str) -> Any:
    # ImportError and not AttributeError: `from rl.rlvr import name` shows its text
    if name == "MockRolloutSampler":
        raise ImportError(
            "rl.rlvr samples from a model: write RolloutSampler(client, ...) in place of "
            "MockRolloutSampler(...) (docs/rlvr.md)"
        )
    raise AttributeError(f"module 'rl.rlvr' has no attribute {name!r}")
