"""What a stage is given: the same from its beginning to its end, and at hand in each of its parts."""

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
    """`seed`: of the stage, not of the run. `first_step`: the run's step count before it.
    `identity`: see rl.run.identity.
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
        """Whether episodes earn anything by themselves: by a reward, or in an environment."""
        return self.scorer is not None or self.environment is not None

    @property
    def opponents(self) -> Opponents | None:
        """Who plays seats that are not the policy's, where there is an environment."""
        return self.models.opponents

    @property
    def settings(self) -> Any:
        return self.method.settings

    @property
    def flow(self) -> EpisodeFlowSettings:
        """Who waits for whom; of a method without such settings, everybody."""
        return getattr(self.settings, "flow", EpisodeFlowSettings())

    @property
    def loop(self) -> Any:
        return self.settings.loop

    @property
    def sampling_params(self) -> SamplingParams:
        """Of training samples."""
        sampling = self.settings.sampling
        return SamplingParams(max_tokens=sampling.max_tokens, temperature=sampling.temperature)

    @property
    def eval_params(self) -> SamplingParams:
        """Of held-out samples."""
        sampling = self.settings.sampling
        held_out = (
            sampling.temperature if sampling.eval_temperature is None else sampling.eval_temperature
        )
        return SamplingParams(max_tokens=sampling.max_tokens, temperature=held_out)
