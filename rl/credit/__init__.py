"""Turn rewards into advantages: baselines, returns, shaping, KL, importance correction."""

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

__all__ = [
    "ADVANTAGES",
    "AdaptiveKL",
    "Correction",
    "Estimator",
    "PerProblemMean",
    "RewardShaper",
    "RunningMean",
    "batch_normalised",
    "corrected",
    "episodes",
    "gaps",
    "has_signal",
    "kl_metrics",
    "merged_sample_size",
    "penalised",
    "returns_to_go",
    "token_advantages",
]
