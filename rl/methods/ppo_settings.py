"""What `ppo` (and `rlhf`) may be told. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rl.settings import (
    POSITIVE,
    RATE,
    CorrectionSettings,
    DataSettings,
    EnvironmentSettings,
    EpisodeFlowSettings,
    Inside,
    KlSettings,
    LearnedRewardSettings,
    LoopSettings,
    ModelSettings,
    OptimSettings,
    Range,
    SamplingSettings,
    ShapingSettings,
    Share,
    Weight,
    check_compared,
    check_ranges,
    check_substeps,
    only_with,
)


@dataclass(frozen=True, kw_only=True)
class PpoOptions:
    """How rewards become gradients."""

    group_size: Annotated[int, Range(1, 10**6)] = 1
    """Answers sampled for each problem."""
    epochs: Annotated[int, Range(1, 10**6)] = 4
    """Passes over each batch; num_substeps is the number of minibatches of each."""
    clip: Inside = 0.2
    """Ratios outside 1 - clip to 1 + clip earn no gradient where that would take them further out."""
    target_kl: Annotated[float | None, POSITIVE] = 0.01
    """No further epoch once KL(old policy || new), measured anew after each, is above this; None: all epochs."""
    gamma: Share = 1.0
    """Discount a token."""
    gae_lambda: Share = 0.95
    """Of generalised advantage estimation: 1 is return minus value, 0 one-step."""
    truncated: Literal["bootstrap", "end"] = "bootstrap"
    """An answer cut off by max_tokens, or an episode by its environment: go on with the value at its end, or count it as ended there."""
    normalise_advantages: bool = True
    """Advantages to mean 0 and std 1 over the actions of a batch."""
    value_coef: Weight = 0.1
    """Weight of the value loss, where the value is a head on the policy."""
    value_clip: Annotated[float | None, POSITIVE] = 0.2
    """A value that moved further than this from its old one earns no further gradient away; None: no clipping."""
    entropy_coef: Weight = 0.01
    """Weight of the entropy bonus."""
    critic_model: str | None = None
    """A value model of its own: a hub name, a folder, tiny:<preset>, or "policy" for the weights the stage begins from. By default a head on the policy."""
    critic_learning_rate: Annotated[float | None, RATE] = None
    """Of the critic; by default the policy's."""

    def __post_init__(self) -> None:
        check_ranges(self)
        own = self.critic_model is not None
        only_with(
            self,
            ("critic_learning_rate",),
            own,
            "the value is a head on the policy, which has one rate",
            "give critic_model",
        )
        only_with(
            self,
            ("value_coef",),
            not own,
            "the critic_model is no part of the policy's loss",
            "leave critic_model out",
        )


@dataclass(frozen=True, kw_only=True)
class PpoSettings:
    """Proximal policy optimization: sample, credit every token against a learned value, and take
    several clipped steps.
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
    flow: EpisodeFlowSettings = field(default_factory=EpisodeFlowSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)

    def __post_init__(self) -> None:
        check_substeps(self)
        check_compared(self, self.ppo.group_size)
        why = "it looks for groups whose answers differ in reward, and ppo compares none"
        only_with(self.sampling, ("dynamic_sampling",), False, why, "use grpo")
        if self.correction.proximal == "interpolated":
            raise ValueError(
                "proximal interpolated goes by the age of tokens, and ppo trains none that are old: set proximal to learner"
            )

    @property
    def learning_rate(self) -> float:
        given = self.optim.learning_rate
        return given if given is not None else (4e-5 if self.model.lora_rank else 1e-6)
