"""ORPO and SimPO: learn from preference pairs without a reference model. The losses stand in
rl.losses.preferences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from rl.methods.base import Models
from rl.methods.dpo import ACCURACY, Dpo, pair_datums
from rl.methods.spec import never, no_clients, no_weights
from rl.settings import (
    ModelSettings,
    NotNegative,
    OptimSettings,
    PreferenceDataSettings,
    Range,
    RowLoopSettings,
    SamplingSettings,
    check_ranges,
    check_substeps,
    without_samples,
)
from rl.types import Datum, Problem


def _loop() -> RowLoopSettings:
    return RowLoopSettings(keep_best=ACCURACY)


@dataclass(frozen=True, kw_only=True)
class _PairSettings:
    model: ModelSettings = field(default_factory=ModelSettings)
    data: PreferenceDataSettings = field(default_factory=PreferenceDataSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    loop: RowLoopSettings = field(default_factory=_loop)

    def __post_init__(self) -> None:
        check_substeps(self)
        without_samples(self, "it learns from the data's answers")


@dataclass(frozen=True, kw_only=True)
class OrpoOptions:
    """How a preference becomes a gradient."""

    beta: Annotated[float, Range(1e-6, 1e6, why="such as 0.1")] = 0.1
    """Weight of the odds ratio beside the likelihood of the preferred answer (the paper's lambda)."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, kw_only=True)
class OrpoSettings(_PairSettings):
    """ORPO: learn the preferred answer, and that it is likelier than the other, in one step after
    pre-training.
    """

    preference: OrpoOptions = field(default_factory=OrpoOptions)

    @property
    def learning_rate(self) -> float:
        given = self.optim.learning_rate
        return given if given is not None else (1e-4 if self.model.lora_rank else 8e-6)


@dataclass(frozen=True, kw_only=True)
class SimpoOptions:
    """How a preference becomes a gradient."""

    beta: Annotated[float, Range(1e-6, 1e6, why="such as 2")] = 2.0
    """Scale of the reward, which is beta times the mean logprob of an answer's tokens."""
    gamma: NotNegative = 1.0
    """By how much the preferred answer's reward is to be the higher one (the paper's gamma; TRL's simpo_gamma)."""

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
        given = self.optim.learning_rate
        return given if given is not None else (1e-5 if self.model.lora_rank else 1e-6)


class WithoutReference(Dpo):
    """The hooks of `orpo` and `simpo`."""

    clients, weights, keeps_beginning = (
        staticmethod(no_clients),
        staticmethod(no_weights),
        staticmethod(never),
    )

    def begin(self, rows: Iterable[Problem], renderer: Any, models: Models) -> None:
        """There is no reference to score rows by."""

    def datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """Two datums a row, the preferred answer's first."""
        return [datum for row in rows for datum in pair_datums(row, renderer, self.settings.data)]

    def _loss(self) -> str:
        return "orpo" if isinstance(self.settings, OrpoSettings) else "simpo"

    def _config(self) -> dict[str, float]:
        how = self.settings.preference
        return (
            {"beta": how.beta}
            if isinstance(how, OrpoOptions)
            else {"beta": how.beta, "gamma": how.gamma}
        )
