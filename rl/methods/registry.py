"""Register the built-in methods by name: settings, a one-line summary, and the class of the hooks,
which declares the models that a run prepares for it.
"""

from __future__ import annotations

from rl.methods.best_of_n import BestOfN, BestOfNSettings
from rl.methods.distill import Distill
from rl.methods.distill_settings import DistillSettings
from rl.methods.dpo import Dpo, DpoSettings
from rl.methods.grpo import PolicyGradient
from rl.methods.grpo_settings import GrpoSettings
from rl.methods.kto import Kto, KtoSettings
from rl.methods.offline import Offline
from rl.methods.offline_settings import OfflineSettings
from rl.methods.online_dpo import OnlineDpo, OnlineDpoSettings
from rl.methods.own import Methods
from rl.methods.ppo import Ppo
from rl.methods.ppo_settings import PpoSettings
from rl.methods.reinforce import ReinforceSettings
from rl.methods.reward_model import BradleyTerry, RewardModelSettings
from rl.methods.rlhf import RlhfSettings, weights
from rl.methods.sft import Sft, SftSettings
from rl.methods.spec import MethodSpec, method_spec
from rl.methods.without_reference import OrpoSettings, SimpoSettings, WithoutReference

METHODS: dict[str, MethodSpec] = Methods(
    {
        "grpo": method_spec(
            PolicyGradient,
            GrpoSettings,
            "RL: a group of answers to each problem, each compared with its group",
        ),
        "reinforce": method_spec(
            PolicyGradient,
            ReinforceSettings,
            "RL: one answer to each problem, compared with a running mean of rewards",
            variants={},
        ),
        "ppo": method_spec(
            Ppo,
            PpoSettings,
            "RL: several clipped epochs a batch, with token advantages from a learned value "
            "function",
        ),
        "online_dpo": method_spec(
            OnlineDpo,
            OnlineDpoSettings,
            "RL: the better of the policy's answers against the worse, by DPO's loss",
        ),
        "best_of_n": method_spec(
            BestOfN,
            BestOfNSettings,
            "RL: fine-tune on the best of several answers to each problem (rejection sampling)",
        ),
        "sft": method_spec(
            Sft,
            SftSettings,
            "supervised fine-tuning on worked responses, conversations or plain texts",
        ),
        "dpo": method_spec(
            Dpo,
            DpoSettings,
            "preferences: learn which of two answers is preferred, without a reward",
        ),
        "orpo": method_spec(
            WithoutReference,
            OrpoSettings,
            "preferences: the preferred answer's likelihood and the odds against the other, "
            "without a reference",
        ),
        "simpo": method_spec(
            WithoutReference,
            SimpoSettings,
            "preferences: mean logprobs and a margin, without a reference",
        ),
        "kto": method_spec(
            Kto, KtoSettings, "preferences: answers labeled good or bad, without pairs"
        ),
        "reward_model": method_spec(
            BradleyTerry,
            RewardModelSettings,
            "preferences: train a model that predicts which of two answers is preferred",
        ),
        "rlhf": method_spec(
            Ppo,
            RlhfSettings,
            "RL: ppo on the scores of a reward model",
            needs_reward=False,
            weights=weights,
        ),
        "offline": method_spec(
            Offline,
            OfflineSettings,
            "learn from stored answers and their rewards, without sampling",
        ),
        "distill": method_spec(
            Distill,
            DistillSettings,
            "learn to answer as a teacher does, from the student's answers or the teacher's",
        ),
    }
)
