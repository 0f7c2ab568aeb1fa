"""Define the settings of `ppo` (and `rlhf`). This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl.config import (
    POSITIVE,
    RATE,
    CorrectionSettings,
    DataSettings,
    EnvironmentSettings,
    Inside,
    KlSettings,
    LearnedRewardSettings,
    LoopSettings,
    ModelSettings,
    OptimSettings,
    Range,
    RolloutSettings,
    SamplingSettings,
    ShapingSettings,
    Share,
    Weight,
    check_comparison_groups,
    check_ranges,
    check_substeps,
    require,
)


@dataclass(frozen=True, kw_only=True)
class PpoOptions:
    """Configure the way rewards become gradients."""

    group_size: Annotated[int, Range(1, 10**6)] = 1
    """Answers sampled for each problem."""
    epochs: Annotated[int, Range(1, 10**6)] = 4
    """Passes over each batch; num_substeps is the number of minibatches per pass."""
    clip: Inside = 0.2
    """Ratios outside 1 - clip to 1 + clip have no gradient in the direction away from 1."""
    target_kl: Annotated[float | None, POSITIVE] = 0.01
    """Stop after an epoch if KL(old policy || new), measured again after each epoch, is above this; None: all epochs."""
    gamma: Share = 1.0
    """Discount per token."""
    gae_lambda: Share = 0.95
    """Lambda of generalized advantage estimation: 1 is return minus value, 0 one-step."""
    truncated: Literal["bootstrap", "end"] = "bootstrap"
    """An answer cut off by max_tokens, or an episode cut off by its environment: bootstrap from the value at its end, or treat the end as terminal."""
    normalise_advantages: bool = True
    """Scale advantages to mean 0 and std 1 over the actions of a batch."""
    value_coef: Weight = 0.1
    """Weight of the value loss, if the value is a head on the policy."""
    value_clip: Annotated[float | None, POSITIVE] = 0.2
    """A value further than this from its old value has no gradient that increases the distance; None: no clipping."""
    entropy_coef: Weight = 0.01
    """Weight of the entropy bonus."""
    critic_model: str | None = None
    """A separate value model: a hub name, a folder, tiny:<preset>, or "policy" for the weights from which the stage begins. By default the value is a head on the policy."""
    critic_learning_rate: Annotated[float | None, RATE] = None
    """Learning rate of the critic; by default the policy's."""

    def __post_init__(self) -> None:
        check_ranges(self)
        separate = self.critic_model is not None
        require(
            self,
            ("critic_learning_rate",),
            separate,
            "the value is a head on the policy and shares its learning rate",
            "set critic_model",
        )
        require(
            self,
            ("value_coef",),
            not separate,
            "critic_model does not enter the policy's loss",
            "leave critic_model out",
        )


@dataclass(frozen=True, kw_only=True)
class PpoSettings:
    """Proximal policy optimization: sample, compute token advantages from a learned value function,
    and take several clipped steps.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    env: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    shaping: ShapingSettings = field(default_factory=ShapingSettings)
    kl: KlSettings = field(default_factory=lambda: KlSettings(kl_coef=0.1))
    learned: LearnedRewardSettings = field(default_factory=LearnedRewardSettings)
    ppo: PpoOptions = field(default_factory=PpoOptions)
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    flow: RolloutSettings = field(default_factory=RolloutSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)

    def __post_init__(self) -> None:
        check_substeps(self)
        check_comparison_groups(self, self.ppo.group_size)
        reason = "it selects groups with different rewards, and ppo compares no answers"
        require(self.sampling, ("dynamic_sampling",), False, reason, "use grpo")
        if self.correction.proximal == "interpolated":
            raise ValueError(
                "proximal interpolated uses the age of tokens, and ppo trains no off-policy tokens: set proximal to learner"
            )

    @property
    def learning_rate(self) -> float:
        """Return the learning rate: as set, else 4e-5 with LoRA, 1e-6 without."""
        rate = self.optim.learning_rate
        return rate if rate is not None else (4e-5 if self.model.lora_rank else 1e-6)
