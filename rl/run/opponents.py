"""Who plays the seats that are not the policy's: other models, by their names, and older versions
of the policy itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.clients import SamplingClient, ServiceClient, TrainingClient
from rl.environments import POOL, Environment, OpponentPool
from rl.episodes import Rollouts, Sampler
from rl.errors import RunFolderError, UserError
from rl.ranks import checkpoint
from rl.renderers import Renderer
from rl.run.hosts import StageHosts, make_renderer
from rl.run.inventory import RESUMABLE, WEIGHTS
from rl.run.reopen import Weights, open_weights
from rl.seeds import derive_seed
from rl.settings import EnvironmentSettings

if TYPE_CHECKING:
    from rl.sampler import Request


class AtTemperature:
    """A sampler that draws at a temperature of its own, whatever is asked for."""

    def __init__(self, sampler: SamplingClient, temperature: float):
        self.sampler, self.temperature = sampler, temperature

    @property
    def info(self) -> Mapping[str, Any]:
        return self.sampler.info

    def sample_many(self, requests: Sequence[Request], /) -> Any:
        return self.sampler.sample_many(
            [
                replace(one, params=replace(one.params, temperature=self.temperature))
                for one in requests
            ]
        )


# a renderer's name (None: the default), settings of its template
Rendering = tuple[str | None, tuple[tuple[str, str], ...]]
# samplers and renderers of players, by their names
Seated = tuple[dict[str, Sampler], dict[str, Renderer]]


def load_models(
    names: Sequence[str],
    load: Callable[[str], SamplingClient],
    renderer_of: Callable[[str], Rendering],
    temperature: float,
) -> Seated:
    """The models that have a seat, but for the pool. UserError for one that is not there."""
    samplers: dict[str, Sampler] = {}
    renderers: dict[str, Renderer] = {}
    for name in names:
        if name != POOL:
            client = load(name)
            samplers[name] = AtTemperature(client, temperature)
            renderers[name] = make_renderer(client, *renderer_of(name))
    return samplers, renderers


def seated(
    environment: Environment,
    settings: EnvironmentSettings,
    weights: Weights,
    service: ServiceClient,
) -> Seated:
    """Who plays the seats that are not the policy's where saved weights are evaluated: of older
    versions the run's newest.
    """

    def renderer_of(name: str) -> Rendering:
        found = open_weights(name).stage
        return (
            (None, ())
            if found is None
            else (found.settings.data.renderer, found.settings.data.template)
        )

    samplers, renderers = load_models(
        environment.models,
        lambda name: open_weights(name).sampler(service),
        renderer_of,
        settings.players_temperature,
    )
    if POOL in environment.models:
        stage = None if weights.stage is None else weights.stage.name
        found = (
            []
            if weights.path is None
            else sorted((weights.path.parent.parent / WEIGHTS).glob(f"{stage}-opponent-step-*"))
        )
        if not found:
            raise UserError(
                f"{weights.name} keeps no older versions to play against: name other opponents with --environment.opponent and "
                "--environment.held_out_opponent"
            )
        samplers[POOL] = service.create_sampling_client(model_path=str(found[-1]))
    return samplers, renderers


class Opponents:
    """The other players of a stage. `older`: the pool of the policy's older versions, where one has
    a seat; a batch plays one of them.

    They lie below the run's folder as weights to sample from, `<stage>-opponent-<step>`, as long as
    the pool or a checkpoint that can be resumed from names them.
    """

    def __init__(
        self,
        environment: Environment,
        settings: EnvironmentSettings,
        hosts: StageHosts,
        folder: Path,
        stage: str,
    ):
        self.hosts, self.folder, self.stage, self.every = (
            hosts,
            folder,
            stage,
            settings.opponents_every,
        )
        self.models, self.renderers = load_models(
            environment.models, hosts.load, hosts.renderer_of, settings.players_temperature
        )
        pool = OpponentPool(settings.opponents, settings.opponents_by)
        self.older = pool if POOL in environment.models else None
        self._loaded: tuple[str, SamplingClient] | None = None

    def begin(self, policy: TrainingClient, step: int) -> None:
        """The policy as it is before the stage's first batch is the first of its older versions."""
        if self.older is not None and not self.older.opponents:
            self._take_in(policy, step)

    def players(self, batch: int, seed: int) -> dict[str, Sampler]:
        """The samplers of a training batch. `seed`: the stage's."""
        if self.older is None:
            return self.models
        return {
            **self.models,
            POOL: self._load(self.older.choose(derive_seed(seed, "opponent", batch)).name),
        }

    def held_out_players(self) -> dict[str, Sampler]:
        """Those of an evaluation: of older versions the newest."""
        if self.older is None:
            return self.models
        return {**self.models, POOL: self._load(self.older.opponents[-1].name)}

    def after(
        self, policy: TrainingClient, rollouts: Rollouts, done: int, step: int
    ) -> dict[str, float]:
        """Rates the older version that the batch was played against, and takes in the policy where
        it is time. Metrics.

        `done`: batches of the stage; `step`: of the run.
        """
        if self.older is None:
            return {}
        if self._loaded is not None:
            self.older.note([(self._loaded[0], score) for score in _scores(rollouts)])
        if done % self.every == 0:
            self._take_in(policy, step)
        return self.older.metrics()

    def state(self) -> dict[str, Any] | None:
        return None if self.older is None else self.older.state()

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        """Goes on with the versions that a checkpoint names. RunFolderError where one is not there,
        whole.
        """
        if self.older is None or state is None:
            return
        self.older.load_state(state)
        for opponent in self.older.opponents:
            path = self._path(opponent.name)
            try:
                checkpoint.verify(path)
            except checkpoint.DamagedCheckpoint as error:
                raise RunFolderError(
                    f"an older version that the run plays against is not whole: {error}"
                ) from error

    def prune(self) -> None:
        """Removes versions that neither the pool nor a checkpoint of the run names."""
        if self.older is None:
            return
        wanted = {opponent.name for opponent in self.older.opponents}
        for path in (self.folder / RESUMABLE).glob(f"{self.stage}-*"):
            wanted |= _named_by(path)
        for path in (self.folder / WEIGHTS).glob(f"{self.stage}-opponent-step-*"):
            if (
                path.name.removeprefix(f"{self.stage}-opponent-") not in wanted
                and path.is_dir()
                and not path.is_symlink()
            ):
                checkpoint.remove(path)

    def _take_in(self, policy: TrainingClient, step: int) -> None:
        assert self.older is not None
        # whoever goes is removed from the disk with the next checkpoint: one before may still name
        # it
        self.older.add(step)
        path = self._path(self.older.opponents[-1].name)
        checkpoint.remove(path)  # of the run before it was resumed from an earlier step
        policy.save_weights_for_sampler(path.name).result()

    def _load(self, name: str) -> SamplingClient:
        if self._loaded is None or self._loaded[0] != name:
            if self._loaded is not None:
                self._loaded[1].release()
            self._loaded = (
                name,
                self.hosts.service.create_sampling_client(model_path=str(self._path(name))),
            )
        return self._loaded[1]

    def _path(self, name: str) -> Path:
        return self.folder / WEIGHTS / f"{self.stage}-opponent-{name}"


def _scores(rollouts: Rollouts) -> list[float]:
    """The policy's score in each game against an older version: 1 won, 0.5 drawn, 0 lost; those
    that say no such thing have none.
    """
    scores = []
    for group in rollouts.sampled:
        for trajectory in group.trajectories_G:
            last = trajectory.transitions[-1]
            if POOL in last.logs.get("players", ()) and "won" in last.metrics:
                scores.append(last.metrics["won"] + 0.5 * last.metrics.get("drawn", 0.0))
    return scores


def _named_by(path: Path) -> set[str]:
    """The versions that a checkpoint's state names."""
    try:
        loop = checkpoint.glance(path).get("metadata")
    except checkpoint.DamagedCheckpoint:
        return set()
    state = loop.get("opponents") if isinstance(loop, dict) else None
    if not isinstance(state, dict):
        return set()
    pool = OpponentPool()
    pool.load_state(state)
    return {opponent.name for opponent in pool.opponents}
