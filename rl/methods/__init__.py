"""Provide the training methods: three hooks and their settings, one or two files per method
(`ppo.py`, `ppo_settings.py`). Their shared parts are in `steps.py`.
"""

from rl.credit.advantages import (
    ADVANTAGES,
    Estimator,
    PerProblemMean,
    RunningMean,
    batch_normalised,
    has_signal,
    returns_to_go,
    token_advantages,
)
from rl.credit.corrections import Correction, corrected, episodes, merged_sample_size
from rl.credit.kl import AdaptiveKL, gaps, kl_metrics, penalised
from rl.credit.shaping import RewardShaper
from rl.methods.base import EvaluatesRows, Models, Progress
from rl.methods.grpo import PolicyGradient
from rl.methods.grpo_settings import GrpoSettings, PolicyGradientSettings
from rl.methods.offline import check_answer
from rl.methods.offline_settings import RolloutDataSettings
from rl.methods.own import is_address
from rl.methods.ppo import Ppo
from rl.methods.ppo_settings import PpoOptions, PpoSettings
from rl.methods.registry import METHODS
from rl.methods.reinforce import ReinforceSettings
from rl.methods.sft import Sft, SftSettings
from rl.methods.spec import MethodSpec
from rl.methods.streaming import StreamedStep

__all__ = [
    "ADVANTAGES",
    "Estimator",
    "PerProblemMean",
    "RunningMean",
    "batch_normalised",
    "has_signal",
    "returns_to_go",
    "token_advantages",
    "Correction",
    "corrected",
    "episodes",
    "merged_sample_size",
    "AdaptiveKL",
    "gaps",
    "kl_metrics",
    "penalised",
    "RewardShaper",
    "EvaluatesRows",
    "GrpoSettings",
    "METHODS",
    "MethodSpec",
    "Models",
    "PolicyGradient",
    "PolicyGradientSettings",
    "Ppo",
    "PpoOptions",
    "PpoSettings",
    "Progress",
    "ReinforceSettings",
    "RolloutDataSettings",
    "Sft",
    "SftSettings",
    "StreamedStep",
    "check_answer",
    "is_address",
]
