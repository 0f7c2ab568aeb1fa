"""Load the players that are not the policy: other models, by name, and older versions of the
policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.client import SampleStream, SamplingClient, ServiceClient, TrainingClient
from rl.config import EnvironmentSettings
from rl.distributed import checkpoint_folder
from rl.envs import OPPONENT_POOL, Environment, OpponentPool
from rl.errors import RunFolderError, UserError
from rl.renderers import Renderer
from rl.rollout import ActionSampler, RolloutBatch
from rl.seed import derive_seed
from rl.trainer.checkpoint_manager import CHECKPOINTS_FOLDER, WEIGHTS_FOLDER
from rl.trainer.saved_weights import SavedWeights, open_weights
from rl.trainer.stage_models import StageModelFactory, make_renderer

if TYPE_CHECKING:
    from rl.sampler import SamplingRequest


class FixedTemperatureSampler:
    """Sample at a fixed temperature, whatever temperature the request names."""

    def __init__(self, sampler: SamplingClient, temperature: float):
        self.sampler, self.temperature = sampler, temperature

    @property
    def info(self) -> Mapping[str, Any]:
        return self.sampler.info

    def sample_many(self, requests: Sequence[SamplingRequest], /) -> Any:
        return self.sampler.sample_many(
            [_replace_temperature(request, self.temperature) for request in requests]
        )

    def open_stream(self) -> SampleStream:
        return FixedTemperatureStream(self.sampler, self.temperature)


class FixedTemperatureStream(SampleStream):
    """Sample in a stream at a fixed temperature, whatever temperature the request names."""

    def __init__(self, client: SamplingClient, temperature: float):
        super().__init__(client)
        self.temperature = temperature

    def add(self, request: SamplingRequest, client: SamplingClient | None = None) -> int:
        return super().add(_replace_temperature(request, self.temperature), client)


def _replace_temperature(request: SamplingRequest, temperature: float) -> SamplingRequest:
    """Return the request at another temperature."""
    return replace(request, params=replace(request.params, temperature=temperature))


# name of a renderer (None: the default), settings of its template
Rendering = tuple[str | None, tuple[tuple[str, str], ...]]
# samplers and renderers of the players, by player name
Players = tuple[dict[str, ActionSampler], dict[str, Renderer]]


def load_opponents(
    names: Sequence[str],
    load: Callable[[str], SamplingClient],
    renderer_of: Callable[[str], Rendering],
    temperature: float,
) -> Players:
    """Load the models that play, except the pool. Raises UserError if a model cannot be loaded."""
    samplers: dict[str, ActionSampler] = {}
    renderers: dict[str, Renderer] = {}
    for name in names:
        if name != OPPONENT_POOL:
            client = load(name)
            samplers[name] = FixedTemperatureSampler(client, temperature)
            renderers[name] = make_renderer(client, *renderer_of(name))
    return samplers, renderers


def load_evaluation_opponents(
    environment: Environment,
    settings: EnvironmentSettings,
    weights: SavedWeights,
    service: ServiceClient,
) -> Players:
    """Return the other players for an evaluation of saved weights. For the pool it is the run's
    newest older version.
    """

    def renderer_of(name: str) -> Rendering:
        saved_stage = open_weights(name).stage
        return (
            (None, ())
            if saved_stage is None
            else (saved_stage.settings.data.renderer, saved_stage.settings.data.template)
        )

    samplers, renderers = load_opponents(
        environment.models,
        lambda name: open_weights(name).create_sampler(service),
        renderer_of,
        settings.players_temperature,
    )
    if OPPONENT_POOL in environment.models:
        stage = None if weights.stage is None else weights.stage.name
        paths = (
            []
            if weights.path is None
            else sorted(
                (weights.path.parent.parent / WEIGHTS_FOLDER).glob(f"{stage}-opponent-step-*")
            )
        )
        if not paths:
            raise UserError(
                f"{weights.name} has no older versions to play against: name other opponents "
                "with --environment.opponent and --environment.held_out_opponent"
            )
        samplers[OPPONENT_POOL] = service.create_sampling_client(model_path=str(paths[-1]))
    return samplers, renderers


class OpponentModels:
    """Hold the other players of a stage.

    `version_pool`: the pool of the policy's older versions, if it is a player; each batch plays
    against a single version.

    Older versions are stored in the run's folder as weights for sampling,
    `<stage>-opponent-<step>`, while the pool or a resumable checkpoint refers to them.
    """

    def __init__(
        self,
        environment: Environment,
        settings: EnvironmentSettings,
        hosts: StageModelFactory,
        folder: Path,
        stage: str,
    ):
        self.hosts, self.folder, self.stage, self.every = (
            hosts,
            folder,
            stage,
            settings.opponents_every,
        )
        self.models, self.renderers = load_opponents(
            environment.models, hosts.load, hosts.renderer_of, settings.players_temperature
        )
        pool = OpponentPool(settings.opponents, settings.opponents_by)
        self.version_pool = pool if OPPONENT_POOL in environment.models else None
        self._loaded_version: tuple[str, SamplingClient] | None = None

    def add_initial_version(self, policy: TrainingClient, step: int) -> None:
        """Add the policy before the stage's first batch to the pool, as its first version."""
        if self.version_pool is not None and not self.version_pool.opponents:
            self._add_version(policy, step)

    def players(self, batch: int, seed: int) -> dict[str, ActionSampler]:
        """Return the samplers of the other players for a training batch. `seed`: the stage's."""
        if self.version_pool is None:
            return self.models
        return {
            **self.models,
            OPPONENT_POOL: self._load(
                self.version_pool.sample(derive_seed(seed, "opponent", batch)).name
            ),
        }

    def held_out_players(self) -> dict[str, ActionSampler]:
        """Return the samplers of the other players for an evaluation: for the pool the newest
        version.
        """
        if self.version_pool is None:
            return self.models
        return {**self.models, OPPONENT_POOL: self._load(self.version_pool.opponents[-1].name)}

    def update_after_batch(
        self, policy: TrainingClient, rollouts: RolloutBatch, done: int, step: int
    ) -> dict[str, float]:
        """Rate the older version that the batch was played against, and add the policy to the pool
        when it is due. Return metrics.

        `done`: batches of the stage; `step`: of the run.
        """
        if self.version_pool is None:
            return {}
        if self._loaded_version is not None:
            self.version_pool.record_results(
                [(self._loaded_version[0], score) for score in _policy_scores(rollouts)]
            )
        if done % self.every == 0:
            self._add_version(policy, step)
        return self.version_pool.metrics()

    def state(self) -> dict[str, Any] | None:
        return None if self.version_pool is None else self.version_pool.state()

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Restore the versions that a checkpoint names. Raises RunFolderError if a version is
        missing or damaged.
        """
        if self.version_pool is None or state is None:
            return
        self.version_pool.load_state(state)
        for opponent in self.version_pool.opponents:
            path = self._path(opponent.name)
            try:
                checkpoint_folder.verify_checkpoint(path)
            except checkpoint_folder.DamagedCheckpoint as error:
                raise RunFolderError(
                    f"an older version that the run plays against is damaged: {error}"
                ) from error

    def prune(self) -> None:
        """Remove versions that neither the pool nor a checkpoint of the run names."""
        if self.version_pool is None:
            return
        referenced = {version.name for version in self.version_pool.opponents}
        for path in (self.folder / CHECKPOINTS_FOLDER).glob(f"{self.stage}-*"):
            referenced |= _read_referenced_versions(path)
        for path in (self.folder / WEIGHTS_FOLDER).glob(f"{self.stage}-opponent-step-*"):
            if (
                path.name.removeprefix(f"{self.stage}-opponent-") not in referenced
                and path.is_dir()
                and not path.is_symlink()
            ):
                checkpoint_folder.remove_checkpoint(path)

    def _add_version(self, policy: TrainingClient, step: int) -> None:
        assert self.version_pool is not None
        # A version that leaves the pool is removed from disk with the next checkpoint: an earlier
        # checkpoint may still name it.
        self.version_pool.add(step)
        path = self._path(self.version_pool.opponents[-1].name)
        checkpoint_folder.remove_checkpoint(
            path
        )  # saved by the run before it was resumed from an earlier step
        policy.save_weights_for_sampler(path.name).result()

    def _load(self, name: str) -> SamplingClient:
        if self._loaded_version is None or self._loaded_version[0] != name:
            if self._loaded_version is not None:
                self._loaded_version[1].release()
            self._loaded_version = (
                name,
                self.hosts.service.create_sampling_client(model_path=str(self._path(name))),
            )
        return self._loaded_version[1]

    def _path(self, name: str) -> Path:
        return self.folder / WEIGHTS_FOLDER / f"{self.stage}-opponent-{name}"


def _policy_scores(rollouts: RolloutBatch) -> list[float]:
    """Return the policy's score of each game against an older version: 1 won, 0.5 drawn, 0 lost.

    Games without such a result have no score.
    """
    scores = []
    for group in rollouts.all_groups:
        for trajectory in group.trajectories_G:
            last = trajectory.transitions[-1]
            if OPPONENT_POOL in last.logs.get("players", ()) and "won" in last.metrics:
                scores.append(last.metrics["won"] + 0.5 * last.metrics.get("drawn", 0.0))
    return scores


def _read_referenced_versions(path: Path) -> set[str]:
    """Return the versions that a checkpoint's state names."""
    try:
        loop = checkpoint_folder.read_unverified_state(path).get("metadata")
    except checkpoint_folder.DamagedCheckpoint:
        return set()
    state = loop.get("opponents") if isinstance(loop, dict) else None
    if not isinstance(state, dict):
        return set()
    pool = OpponentPool()
    pool.load_state(state)
    return {opponent.name for opponent in pool.opponents}
