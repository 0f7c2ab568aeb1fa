"""Hold the constant inputs of a stage, shared by all of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl.data import Curriculum, ProblemSet
from rl.environments import EnvironmentSpec
from rl.methods import Models
from rl.renderers import Renderer
from rl.report import Console, Logbook
from rl.rewards import Scorer
from rl.run.decisions import Decisions
from rl.run.keeper import Keeper
from rl.run.opponents import Opponents
from rl.settings import EpisodeFlowSettings
from rl.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Given:
    """Hold the constant inputs of a stage.

    `seed` is the stage's, not the run's. `first_step` is the run's step count before the stage.
    `identity` is described in rl.run.identity.
    """

    name: str
    index: int
    method: Any
    models: Models
    problems: ProblemSet | Curriculum
    test_problems: ProblemSet | None
    renderer: Renderer
    scorer: Scorer | None
    seed: int
    first_step: int
    logbook: Logbook
    console: Console
    keeper: Keeper
    identity: Mapping[str, Any]
    environment: EnvironmentSpec | None = None
    decisions: Decisions | None = None

    @property
    def rewarded(self) -> bool:
        """Return whether episodes are scored, by a reward function or by an environment."""
        return self.scorer is not None or self.environment is not None

    @property
    def opponents(self) -> Opponents | None:
        """Return the opponents that play against the policy in an environment, if any."""
        return self.models.opponents

    @property
    def settings(self) -> Any:
        """Return the settings of the stage's method."""
        return self.method.settings

    @property
    def flow(self) -> EpisodeFlowSettings:
        """Return the settings of episode scheduling; the defaults if the method has none."""
        return getattr(self.settings, "flow", EpisodeFlowSettings())

    @property
    def loop(self) -> Any:
        """Return the settings of the training loop."""
        return self.settings.loop

    @property
    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters of training samples."""
        sampling = self.settings.sampling
        return SamplingParams(max_tokens=sampling.max_tokens, temperature=sampling.temperature)

    @property
    def eval_params(self) -> SamplingParams:
        """Return the sampling parameters of held-out samples."""
        sampling = self.settings.sampling
        held_out = (
            sampling.temperature if sampling.eval_temperature is None else sampling.eval_temperature
        )
        return SamplingParams(max_tokens=sampling.max_tokens, temperature=held_out)
