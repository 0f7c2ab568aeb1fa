"""Provide the training methods: three hooks and their settings, one or two files per method
(`ppo.py`, `ppo_settings.py`). Their shared parts are in `update.py`.
"""

from typing import TYPE_CHECKING

from rl.algorithms.advantages import (
    ADVANTAGES,
    AdvantageEstimator,
    PerProblemBaseline,
    RunningMeanBaseline,
    compute_gae,
    compute_returns_to_go,
    has_signal,
    normalize_by_batch,
)
from rl.algorithms.best_of_n import BestOfN
from rl.algorithms.builtin_method_registry import METHODS
from rl.algorithms.distillation import Distillation
from rl.algorithms.dpo import DPO
from rl.algorithms.grpo import GRPO
from rl.algorithms.grpo_settings import GrpoSettings, PolicyGradientSettings
from rl.algorithms.importance_correction import (
    ImportanceCorrection,
    apply_correction,
    index_episodes,
    merge_effective_sample_size,
)
from rl.algorithms.kl_penalty import (
    AdaptiveKL,
    apply_kl_penalty,
    compute_kl_metrics,
    compute_logprob_gaps,
)
from rl.algorithms.kto import KTO
from rl.algorithms.method_interface import (
    Method,
    ModelFactory,
    ModelRequests,
    Models,
    Progress,
    RowEvaluator,
)
from rl.algorithms.offline import Offline, check_stored_answer
from rl.algorithms.offline_settings import RolloutDataSettings
from rl.algorithms.online_dpo import OnlineDPO
from rl.algorithms.online_method import OnlineMethod
from rl.algorithms.orpo_simpo import ORPO, SIMPO, ReferenceFreeDPO
from rl.algorithms.ppo import PPO
from rl.algorithms.ppo_settings import PpoOptions, PpoSettings
from rl.algorithms.reinforce import REINFORCE, ReinforceSettings
from rl.algorithms.renamed_classes import make_getattr
from rl.algorithms.reward_model import RewardModelTraining
from rl.algorithms.reward_shaping import RewardShaper
from rl.algorithms.rlhf import RLHF
from rl.algorithms.sft import SFT, SftSettings
from rl.algorithms.streamed_step import StreamedStep
from rl.config import is_method_address

if not TYPE_CHECKING:  # mypy would accept every name of this module
    __getattr__ = make_getattr(__name__)

__all__ = [
    "ADVANTAGES",
    "AdvantageEstimator",
    "PerProblemBaseline",
    "RunningMeanBaseline",
    "normalize_by_batch",
    "has_signal",
    "compute_returns_to_go",
    "compute_gae",
    "ImportanceCorrection",
    "apply_correction",
    "index_episodes",
    "merge_effective_sample_size",
    "AdaptiveKL",
    "compute_logprob_gaps",
    "compute_kl_metrics",
    "apply_kl_penalty",
    "RewardShaper",
    "RowEvaluator",
    "GrpoSettings",
    "METHODS",
    "Models",
    "GRPO",
    "PolicyGradientSettings",
    "PPO",
    "PpoOptions",
    "PpoSettings",
    "Progress",
    "ReinforceSettings",
    "RolloutDataSettings",
    "SFT",
    "SftSettings",
    "StreamedStep",
    "check_stored_answer",
    "is_method_address",
    "BestOfN",
    "Distillation",
    "DPO",
    "KTO",
    "Method",
    "ModelFactory",
    "ModelRequests",
    "Offline",
    "OnlineDPO",
    "OnlineMethod",
    "ORPO",
    "REINFORCE",
    "RLHF",
    "SIMPO",
    "ReferenceFreeDPO",
    "RewardModelTraining",
]
