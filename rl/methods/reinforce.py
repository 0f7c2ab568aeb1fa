"""REINFORCE (Williams 1992) with a running-mean baseline and an entropy bonus: GRPO's hooks with
other settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rl.methods.grpo_settings import GrpoSettings, PolicyGradientSettings


def _policy_gradient() -> PolicyGradientSettings:
    return replace(
        PolicyGradientSettings(),
        group_size=1,
        advantage="running_mean",
        loss="importance_sampling",
        entropy_coef=0.01,
    )


@dataclass(frozen=True, kw_only=True)
class ReinforceSettings(GrpoSettings):
    """Plain policy gradient: one answer to each problem, credited against a running mean of
    rewards.
    """

    policy_gradient: PolicyGradientSettings = field(default_factory=_policy_gradient)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy_gradient.variant is not None:
            variant = self.policy_gradient.variant
            raise ValueError(
                f"variants are settings of grpo, reinforce has none: train.py grpo --variant {variant}, or leave out variant"
            )

    @property
    def learning_rate(self) -> float:
        given = self.optim.learning_rate
        return given if given is not None else 1e-5
