"""Define REINFORCE (Williams 1992) with a running-mean baseline and an entropy bonus: GRPO's hooks
with other settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rl.algorithms.grpo import GRPO
from rl.algorithms.grpo_settings import GrpoSettings, PolicyGradientSettings


def _default_policy_gradient() -> PolicyGradientSettings:
    """Return the defaults of REINFORCE."""
    return replace(
        PolicyGradientSettings(),
        group_size=1,
        advantage="running_mean",
        loss="importance_sampling",
        entropy_coef=0.01,
    )


@dataclass(frozen=True, kw_only=True)
class ReinforceSettings(GrpoSettings):
    """Plain policy gradient: one answer to each problem, compared with a running mean."""

    policy_gradient: PolicyGradientSettings = field(default_factory=_default_policy_gradient)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy_gradient.variant is not None:
            variant = self.policy_gradient.variant
            raise ValueError(
                "variants are settings of grpo, not of reinforce: use train.py grpo --variant "
                f"{variant}, or leave out variant"
            )

    @property
    def learning_rate(self) -> float:
        """Return the learning rate: as set, else 1e-5."""
        rate = self.optim.learning_rate
        return rate if rate is not None else 1e-5


class REINFORCE(GRPO):
    """Implement `reinforce`."""

    Settings = ReinforceSettings
    summary = "RL: one answer to each problem, compared with a running mean of rewards"
    variants = {}
