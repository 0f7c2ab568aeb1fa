"""Settings of the algorithms that update on batches of trajectories. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from rl.training_config import names_nearest


@names_nearest
@dataclass(frozen=True, kw_only=True)
class REINFORCEConfig:
    """Policy gradient (Williams 1992): one optimizer step a batch, every trajectory credited with its whole reward."""

    learning_rate: float = 1e-5
    """AdamW's."""
    use_baseline: bool = True
    """Subtract a running mean of earlier batches' rewards."""
    normalize_advantages: bool = True
    """Advantages to mean 0 and std 1 over the batch, which takes out any baseline too; those of a batch of one stay as they are."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    kl_penalty_coef: float = 0.0
    """Price of KL(policy || reference) in the reward, such as 0.1; 0: no reference."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0: never."""

    def __post_init__(self) -> None:
        _check(self, positive=("learning_rate",), at_least_0=("entropy_coef", "kl_penalty_coef", "max_grad_norm"))


@names_nearest
@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Proximal policy optimization (arXiv 1707.06347): several clipped epochs a batch, every token credited against a learned value."""

    learning_rate: float = 1e-5
    """AdamW's."""
    clip_range: float = 0.2
    """Ratios outside 1 - clip_range to 1 + clip_range earn no gradient where that would take them further out."""
    ppo_epochs: int = 4
    """Passes over each batch."""
    target_kl: float | None = 0.01
    """No further epoch once the policy is this far from the one that sampled, measured anew after each; None: all epochs."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    normalize_advantages: bool = True
    """Advantages to mean 0 and std 1 over the batch's tokens."""
    reward_normalization: bool = True
    """Rewards divided by their running standard deviation, which is part of the state."""
    kl_penalty_coef: float = 0.0
    """Price of KL(policy || reference) at each token, in the reward, such as 0.1; 0: no reference."""
    gamma: float = 1.0
    """Discount a token."""
    gae_lambda: float = 0.95
    """Of generalised advantage estimation (arXiv 1506.02438)."""
    value_clip: float | None = 0.2
    """A value that moved further than this from its old one earns no further gradient away; None: no clipping."""
    minibatches: int = 1
    """Optimizer steps an epoch."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0: never."""

    def __post_init__(self) -> None:
        _check(
            self,
            positive=("learning_rate", "clip_range", "target_kl", "value_clip"),
            at_least_0=("value_coef", "entropy_coef", "kl_penalty_coef", "max_grad_norm", "gamma", "gae_lambda"),
            at_least_1=("ppo_epochs", "minibatches"),
            at_most_1=("clip_range", "gamma", "gae_lambda"),
        )


def _check(
    config: object,
    *,
    positive: tuple[str, ...] = (),
    at_least_0: tuple[str, ...] = (),
    at_least_1: tuple[str, ...] = (),
    at_most_1: tuple[str, ...] = (),
) -> None:
    """Raises ValueError for a setting outside its range; None, where a setting may be None, is in it."""
    ranges = (
        (positive, "positive", lambda value: value > 0),
        (at_least_0, "at least 0", lambda value: value >= 0),
        (at_least_1, "at least 1", lambda value: value >= 1),
        (at_most_1, "at most 1", lambda value: value <= 1),
    )
    for names, expected, holds in ranges:
        for name in names:
            value = getattr(config, name)
            if value is not None and not holds(value):
                raise ValueError(f"{type(config).__name__}: {name} is {expected}, got {value!r}")
