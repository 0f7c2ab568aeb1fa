"""Define the settings of the RLVR algorithms. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rl.client import suggest_settings
from rl.config import POSITIVE, RATE, SIZE, Inside, NotNegative, Share, Weight, check_ranges


@suggest_settings
@dataclass(frozen=True, kw_only=True)
class REINFORCEConfig:
    """Configure the policy gradient of Williams 1992: an optimizer step per batch.

    Each trajectory's advantage is based on its whole reward.
    """

    learning_rate: Annotated[float, RATE] = 1e-5
    """AdamW's."""
    use_baseline: bool = True
    """Subtract a running mean of earlier batches' rewards."""
    normalize_advantages: bool = True
    """Normalize advantages to mean 0 and std 1 over the batch, which also removes any baseline; the
    advantage of a batch of 1 is not changed."""
    entropy_coef: Weight = 0.01
    """Weight of the entropy bonus."""
    kl_penalty_coef: Weight = 0.0
    """Weight of the penalty KL(policy || reference) in the reward, such as 0.1; 0: no reference
    model."""
    max_grad_norm: NotNegative = 1.0
    """Norm to which larger gradients are scaled down; 0: no clipping."""

    def __post_init__(self) -> None:
        check_ranges(self)


@suggest_settings
@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Configure proximal policy optimization (arXiv 1707.06347).

    Each batch is trained for several epochs with clipped ratios. The advantage of each token is
    relative to a learned value.
    """

    learning_rate: Annotated[float, RATE] = 1e-5
    """AdamW's."""
    clip_range: Inside = 0.2
    """Ratios outside 1 - clip_range to 1 + clip_range get no gradient that would move them further
    out."""
    ppo_epochs: Annotated[int, SIZE] = 4
    """Passes over each batch."""
    target_kl: Annotated[float | None, POSITIVE] = 0.01
    """KL from the policy that sampled, measured after each epoch, above which no further epoch is
    trained; None: all epochs."""
    value_coef: Weight = 0.5
    """Weight of the value loss."""
    entropy_coef: Weight = 0.01
    """Weight of the entropy bonus."""
    normalize_advantages: bool = True
    """Normalize advantages to mean 0 and std 1 over the batch's tokens."""
    reward_normalization: bool = True
    """Divide rewards by their running standard deviation, which is part of the state."""
    kl_penalty_coef: Weight = 0.0
    """Weight of the penalty KL(policy || reference) at each token, in the reward, such as 0.1;
    0: no reference model."""
    gamma: Share = 1.0
    """Discount per token."""
    gae_lambda: Share = 0.95
    """Lambda of generalised advantage estimation (arXiv 1506.02438)."""
    value_clip: Annotated[float | None, POSITIVE] = 0.2
    """Distance from its old value beyond which a value gets no gradient that would move it further;
    None: no clipping."""
    minibatches: Annotated[int, SIZE] = 1
    """Optimizer steps per epoch."""
    max_grad_norm: NotNegative = 1.0
    """Norm to which larger gradients are scaled down; 0: no clipping."""

    def __post_init__(self) -> None:
        check_ranges(self)
