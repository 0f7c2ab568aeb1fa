"""Provide the training methods: three hooks and their settings, one file per method or family of
methods. Their shared parts are in `update.py`.
"""

from rl.algorithms.advantages import (
    ADVANTAGES,
    AdaptiveKL,
    AdvantageEstimator,
    PerProblemBaseline,
    RunningMeanBaseline,
    apply_kl_penalty,
    compute_gae,
    compute_kl_metrics,
    compute_logprob_gaps,
    compute_returns_to_go,
    has_signal,
    normalize_by_batch,
)
from rl.algorithms.best_of_n import BestOfN
from rl.algorithms.distillation import Distillation
from rl.algorithms.dpo import DPO
from rl.algorithms.grpo import (
    GRPO,
    REINFORCE,
    GrpoSettings,
    PolicyGradientSettings,
    ReinforceSettings,
)
from rl.algorithms.importance_correction import (
    ImportanceCorrection,
    apply_correction,
    index_episodes,
    merge_effective_sample_size,
)
from rl.algorithms.kto import KTO
from rl.algorithms.method_interface import (
    Method,
    ModelFactory,
    ModelRequests,
    Models,
    OnlineMethod,
    Progress,
    RowEvaluator,
)
from rl.algorithms.method_registry import METHODS, report_renamed_classes
from rl.algorithms.offline import Offline, RolloutDataSettings, check_stored_answer
from rl.algorithms.online_dpo import OnlineDPO
from rl.algorithms.orpo_simpo import ORPO, SIMPO, ReferenceFreeDPO
from rl.algorithms.ppo import PPO, RLHF, PpoOptions, PpoSettings
from rl.algorithms.reward_model import RewardModelTraining
from rl.algorithms.reward_shaping import RewardShaper
from rl.algorithms.sft import SFT, SftSettings
from rl.algorithms.streamed_step import StreamedStep
from rl.config import is_method_address

report_renamed_classes(__name__)

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
