"""Hold the constant inputs of a stage, shared by all of its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rl.algorithms import Models
from rl.config import RolloutSettings
from rl.data import Curriculum, ProblemSet
from rl.envs import EnvironmentSpec
from rl.renderers import Renderer
from rl.reporting import Console, Logbook
from rl.rewards import Scorer
from rl.seed import derive_seed
from rl.trainer.checkpoint_manager import CheckpointManager
from rl.trainer.opponent_models import OpponentModels
from rl.trainer.replay_log import ReplayLog
from rl.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """Hold the constant inputs of a stage.

    `first_step` is the run's step count before the stage. `identity` is what the stage's
    checkpoints record of the run (see rl.trainer.resume).
    """

    name: str
    index: int
    method: Any
    models: Models
    problems: ProblemSet | Curriculum
    test_problems: ProblemSet | None
    renderer: Renderer
    scorer: Scorer | None
    run_seed: int
    first_step: int
    logbook: Logbook
    console: Console
    checkpoints: CheckpointManager
    identity: Mapping[str, Any] = field(default_factory=dict)
    environment: EnvironmentSpec | None = None
    replay_log: ReplayLog | None = None

    @property
    def seed(self) -> int:
        """Return the stage's seed."""
        return derive_seed(self.run_seed, self.index)

    @property
    def has_rewards(self) -> bool:
        """Return whether episodes are scored, by a reward function or by an environment."""
        return self.scorer is not None or self.environment is not None

    @property
    def opponents(self) -> OpponentModels | None:
        """Return the opponents that play against the policy in an environment, if any."""
        return self.models.opponents

    @property
    def settings(self) -> Any:
        """Return the settings of the stage's method."""
        return self.method.settings

    @property
    def flow(self) -> RolloutSettings:
        """Return the settings of episode scheduling; the defaults if the method has none."""
        return getattr(self.settings, "flow", RolloutSettings())

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
