"""Implement ORPO and SimPO: learn from preference pairs without a reference model. Their losses are
in rl.losses.preference_losses.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from rl.algorithms.dpo import DPO
from rl.algorithms.row_datums import PairSettings
from rl.config import NotNegative, Range, check_ranges


@dataclass(frozen=True, kw_only=True)
class OrpoOptions:
    """Configure the way a preference becomes a gradient."""

    beta: Annotated[float, Range(1e-6, 1e6, why="such as 0.1")] = 0.1
    """Weight of the odds ratio relative to the likelihood of the preferred answer (the paper's lambda)."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class OrpoSettings(PairSettings):
    """ORPO: learn the preferred answer, and that it is likelier than the other, in a single stage
    after pre-training.
    """

    default_learning_rates = (1e-4, 8e-6)

    preference: OrpoOptions = OrpoOptions()


@dataclass(frozen=True, kw_only=True)
class SimpoOptions:
    """Configure the way a preference becomes a gradient."""

    beta: Annotated[float, Range(1e-6, 1e6, why="such as 2")] = 2.0
    """Scale of the reward, which is beta times the mean logprob of an answer's tokens."""
    gamma: NotNegative = 1.0
    """Target margin between the rewards of the preferred answer and the other (the paper's gamma; TRL's simpo_gamma)."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class SimpoSettings(PairSettings):
    """SimPO: learn which of two answers is preferred, by the mean logprobs of their tokens, without
    a reference.
    """

    default_learning_rates = (1e-5, 1e-6)

    preference: SimpoOptions = SimpoOptions()


class ReferenceFreeDPO(DPO):
    """Base class of the methods on pairs without a reference model. A subclass sets `Settings`,
    `_loss` and, unless it is the section `preference`, `_config`.
    """

    uses_reference = False

    def _config(self) -> dict[str, float]:
        return asdict(self.settings.preference)


class ORPO(ReferenceFreeDPO):
    """Implement `orpo`."""

    Settings, _loss = OrpoSettings, "orpo"
    summary = (
        "preferences: the preferred answer's likelihood and the odds against the other, "
        "without a reference"
    )


class SIMPO(ReferenceFreeDPO):
    """Implement `simpo`."""

    Settings, _loss = SimpoSettings, "simpo"
    summary = "preferences: mean logprobs and a margin, without a reference"
