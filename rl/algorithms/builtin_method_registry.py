"""Register the built-in methods by name: settings, a one-line summary, and the class of the hooks,
which declares the models that a run prepares for it.
"""

from __future__ import annotations

from rl.algorithms.best_of_n import BestOfN, BestOfNSettings
from rl.algorithms.distillation import Distillation
from rl.algorithms.distillation_settings import DistillSettings
from rl.algorithms.dpo import DPO, DpoSettings
from rl.algorithms.grpo import GRPO
from rl.algorithms.grpo_settings import GrpoSettings
from rl.algorithms.kto import KTO, KtoSettings
from rl.algorithms.method_registry import MethodRegistry
from rl.algorithms.method_spec import MethodSpec, make_method_spec
from rl.algorithms.offline import Offline
from rl.algorithms.offline_settings import OfflineSettings
from rl.algorithms.online_dpo import OnlineDPO, OnlineDpoSettings
from rl.algorithms.orpo_simpo import OrpoSettings, ReferenceFreeDPO, SimpoSettings
from rl.algorithms.ppo import PPO
from rl.algorithms.ppo_settings import PpoSettings
from rl.algorithms.reinforce import ReinforceSettings
from rl.algorithms.reward_model import RewardModelSettings, RewardModelTraining
from rl.algorithms.rlhf import RlhfSettings, list_rlhf_weights
from rl.algorithms.sft import SFT, SftSettings

METHODS: dict[str, MethodSpec] = MethodRegistry(
    {
        "grpo": make_method_spec(
            GRPO,
            GrpoSettings,
            "RL: a group of answers to each problem, each compared with its group",
        ),
        "reinforce": make_method_spec(
            GRPO,
            ReinforceSettings,
            "RL: one answer to each problem, compared with a running mean of rewards",
            variants={},
        ),
        "ppo": make_method_spec(
            PPO,
            PpoSettings,
            "RL: several clipped epochs a batch, with token advantages from a learned value "
            "function",
        ),
        "online_dpo": make_method_spec(
            OnlineDPO,
            OnlineDpoSettings,
            "RL: the better of the policy's answers against the worse, by DPO's loss",
        ),
        "best_of_n": make_method_spec(
            BestOfN,
            BestOfNSettings,
            "RL: fine-tune on the best of several answers to each problem (rejection sampling)",
        ),
        "sft": make_method_spec(
            SFT,
            SftSettings,
            "supervised fine-tuning on worked responses, conversations or plain texts",
        ),
        "dpo": make_method_spec(
            DPO,
            DpoSettings,
            "preferences: learn which of two answers is preferred, without a reward",
        ),
        "orpo": make_method_spec(
            ReferenceFreeDPO,
            OrpoSettings,
            "preferences: the preferred answer's likelihood and the odds against the other, "
            "without a reference",
        ),
        "simpo": make_method_spec(
            ReferenceFreeDPO,
            SimpoSettings,
            "preferences: mean logprobs and a margin, without a reference",
        ),
        "kto": make_method_spec(
            KTO, KtoSettings, "preferences: answers labeled good or bad, without pairs"
        ),
        "reward_model": make_method_spec(
            RewardModelTraining,
            RewardModelSettings,
            "preferences: train a model that predicts which of two answers is preferred",
        ),
        "rlhf": make_method_spec(
            PPO,
            RlhfSettings,
            "RL: ppo on the scores of a reward model",
            needs_reward=False,
            weights=list_rlhf_weights,
        ),
        "offline": make_method_spec(
            Offline,
            OfflineSettings,
            "learn from stored answers and their rewards, without sampling",
        ),
        "distill": make_method_spec(
            Distillation,
            DistillSettings,
            "learn to answer as a teacher does, from the student's answers or the teacher's",
        ),
    }
)
