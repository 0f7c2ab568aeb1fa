"""Implement ORPO and SimPO: learn from preference pairs without a reference model. Their losses are
in rl.losses.preference_losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from rl.algorithms.dpo import ACCURACY_METRIC, DPO, make_pair_datums
from rl.algorithms.method_interface import ModelFactory, Models
from rl.algorithms.renamed_classes import make_getattr
from rl.config import (
    ModelSettings,
    NotNegative,
    OptimSettings,
    PreferenceDataSettings,
    Range,
    RowLoopSettings,
    SamplingSettings,
    check_ranges,
    check_substeps,
    reject_sampling_settings,
)
from rl.types import Datum, Problem


def _default_loop() -> RowLoopSettings:
    """Return loop settings that keep the checkpoint with the best accuracy."""
    return RowLoopSettings(keep_best=ACCURACY_METRIC)


@dataclass(frozen=True, kw_only=True)
class _PairSettings:
    """Hold the sections shared by `orpo` and `simpo`."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: PreferenceDataSettings = field(default_factory=PreferenceDataSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    loop: RowLoopSettings = field(default_factory=_default_loop)

    def __post_init__(self) -> None:
        check_substeps(self)
        reject_sampling_settings(self, "it learns from the data's answers")


@dataclass(frozen=True, kw_only=True)
class OrpoOptions:
    """Configure the way a preference becomes a gradient."""

    beta: Annotated[float, Range(1e-6, 1e6, why="such as 0.1")] = 0.1
    """Weight of the odds ratio relative to the likelihood of the preferred answer (the paper's lambda)."""  # noqa: E501

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class OrpoSettings(_PairSettings):
    """ORPO: learn the preferred answer, and that it is likelier than the other, in a single stage
    after pre-training.
    """

    preference: OrpoOptions = field(default_factory=OrpoOptions)

    @property
    def learning_rate(self) -> float:
        """Return the learning rate: as set, else 1e-4 with LoRA, 8e-6 without."""
        rate = self.optim.learning_rate
        return rate if rate is not None else (1e-4 if self.model.lora_rank else 8e-6)


@dataclass(frozen=True, kw_only=True)
class SimpoOptions:
    """Configure the way a preference becomes a gradient."""

    beta: Annotated[float, Range(1e-6, 1e6, why="such as 2")] = 2.0
    """Scale of the reward, which is beta times the mean logprob of an answer's tokens."""
    gamma: NotNegative = 1.0
    """Target margin between the rewards of the preferred answer and the other (the paper's gamma; TRL's simpo_gamma)."""  # noqa: E501

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class SimpoSettings(_PairSettings):
    """SimPO: learn which of two answers is preferred, by the mean logprobs of their tokens, without
    a reference.
    """

    preference: SimpoOptions = field(default_factory=SimpoOptions)

    @property
    def learning_rate(self) -> float:
        """Return the learning rate: as set, else 1e-5 with LoRA, 1e-6 without."""
        rate = self.optim.learning_rate
        return rate if rate is not None else (1e-5 if self.model.lora_rank else 1e-6)


class ReferenceFreeDPO(DPO):
    """Base class of the methods on pairs without a reference model. A subclass sets `Settings`,
    `_loss` and `_config`.
    """

    def required_models(self, factory: ModelFactory) -> dict[str, Any]:
        """Return no models."""
        return {}

    def begin(self, rows: Iterable[Problem], renderer: Any, models: Models) -> None:
        """Do nothing: no reference model scores the rows."""

    def datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """Return two datums per row, the preferred answer's first."""
        return [
            datum for row in rows for datum in make_pair_datums(row, renderer, self.settings.data)
        ]


class ORPO(ReferenceFreeDPO):
    """Implement `orpo`."""

    Settings = OrpoSettings
    summary = (
        "preferences: the preferred answer's likelihood and the odds against the other, "
        "without a reference"
    )

    def _loss(self) -> str:
        return "orpo"

    def _config(self) -> dict[str, float]:
        return {"beta": self.settings.preference.beta}


class SIMPO(ReferenceFreeDPO):
    """Implement `simpo`."""

    Settings = SimpoSettings
    summary = "preferences: mean logprobs and a margin, without a reference"

    def _loss(self) -> str:
        return "simpo"

    def _config(self) -> dict[str, float]:
        options = self.settings.preference
        return {"beta": options.beta, "gamma": options.gamma}


if not TYPE_CHECKING:  # mypy would accept every name of this module
    __getattr__ = make_getattr(__name__)
