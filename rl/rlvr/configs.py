"""Settings of the algorithms that update on batches of trajectories. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rl.clients import names_nearest
from rl.settings import POSITIVE, RATE, SIZE, Inside, NotNegative, Share, Weight, check_ranges


@names_nearest
@dataclass(frozen=True, kw_only=True)
class REINFORCEConfig:
    """Policy gradient (Williams 1992): one optimizer step a batch, every trajectory credited with
    its whole reward.
    """

    learning_rate: Annotated[float, RATE] = 1e-5
    """AdamW's."""
    use_baseline: bool = True
    """Subtract a running mean of earlier batches' rewards."""
    normalize_advantages: bool = True
    """Advantages to mean 0 and std 1 over the batch, which takes out any baseline too; those of a batch of one stay as they are."""
    entropy_coef: Weight = 0.01
    """Weight of the entropy bonus."""
    kl_penalty_coef: Weight = 0.0
    """Price of KL(policy || reference) in the reward, such as 0.1; 0: no reference."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are scaled down to this norm; 0: never."""

    def __post_init__(self) -> None:
        check_ranges(self)


@names_nearest
@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Proximal policy optimization (arXiv 1707.06347): several clipped epochs a batch, every token
    credited against a learned value.
    """

    learning_rate: Annotated[float, RATE] = 1e-5
    """AdamW's."""
    clip_range: Inside = 0.2
    """Ratios outside 1 - clip_range to 1 + clip_range earn no gradient where that would take them further out."""
    ppo_epochs: Annotated[int, SIZE] = 4
    """Passes over each batch."""
    target_kl: Annotated[float | None, POSITIVE] = 0.01
    """No further epoch once the policy is this far from the one that sampled, measured anew after each; None: all epochs."""
    value_coef: Weight = 0.5
    """Weight of the value loss."""
    entropy_coef: Weight = 0.01
    """Weight of the entropy bonus."""
    normalize_advantages: bool = True
    """Advantages to mean 0 and std 1 over the batch's tokens."""
    reward_normalization: bool = True
    """Rewards divided by their running standard deviation, which is part of the state."""
    kl_penalty_coef: Weight = 0.0
    """Price of KL(policy || reference) at each token, in the reward, such as 0.1; 0: no reference."""
    gamma: Share = 1.0
    """Discount a token."""
    gae_lambda: Share = 0.95
    """Of generalised advantage estimation (arXiv 1506.02438)."""
    value_clip: Annotated[float | None, POSITIVE] = 0.2
    """A value that moved further than this from its old one earns no further gradient away; None: no clipping."""
    minibatches: Annotated[int, SIZE] = 1
    """Optimizer steps an epoch."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are scaled down to this norm; 0: never."""

    def __post_init__(self) -> None:
        check_ranges(self)
