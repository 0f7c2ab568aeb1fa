"""Register the built-in methods by name."""

from __future__ import annotations

from rl.algorithms.best_of_n import BestOfN
from rl.algorithms.distillation import Distillation
from rl.algorithms.dpo import DPO
from rl.algorithms.grpo import GRPO
from rl.algorithms.kto import KTO
from rl.algorithms.method_registry import MethodRegistry
from rl.algorithms.offline import Offline
from rl.algorithms.online_dpo import OnlineDPO
from rl.algorithms.orpo_simpo import ORPO, SIMPO
from rl.algorithms.ppo import PPO
from rl.algorithms.reinforce import REINFORCE
from rl.algorithms.reward_model import RewardModelTraining
from rl.algorithms.rlhf import RLHF
from rl.algorithms.sft import SFT

METHODS = MethodRegistry(
    {
        "grpo": GRPO,
        "reinforce": REINFORCE,
        "ppo": PPO,
        "online_dpo": OnlineDPO,
        "best_of_n": BestOfN,
        "sft": SFT,
        "dpo": DPO,
        "orpo": ORPO,
        "simpo": SIMPO,
        "kto": KTO,
        "reward_model": RewardModelTraining,
        "rlhf": RLHF,
        "offline": Offline,
        "distill": Distillation,
    }
)
