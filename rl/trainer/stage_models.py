"""Create the models of a stage: its policy, the other models that its method needs, and the players
of an environment that are not the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml

from rl.algorithms import METHODS, ModelFactory
from rl.client import SampleStream, SamplingClient, ServiceClient, TrainingClient
from rl.config import (
    EnvironmentSettings,
    LearnedRewardSettings,
    ModelSettings,
    StageConfig,
    is_api_address,
)
from rl.distributed import checkpoint_folder
from rl.envs import OPPONENT_POOL, Environment, OpponentPool
from rl.errors import RunFolderError, UserError
from rl.judges import (
    APIRubricJudge,
    BaseModelScorer,
    ComparisonModel,
    FrozenScorer,
    LearnedRewards,
    OpenAIClient,
    PairwiseJudge,
    PublishedRewardModel,
    RewardModel,
    Rubric,
    RubricJudge,
    TokenScorer,
    WeightedRewardModels,
    shares_vocabulary,
)
from rl.models import is_adapter, load_classifier_config
from rl.renderers import Renderer, get_renderer
from rl.rollout import ActionSampler, RolloutBatch
from rl.seed import derive_seed
from rl.trainer.checkpoint_manager import CHECKPOINTS_FOLDER, WEIGHTS_FOLDER
from rl.trainer.initial_weights import (
    find_initial_weights,
    find_previous_stage,
    find_weights_folder,
)
from rl.trainer.saved_weights import SavedWeights, open_weights

if TYPE_CHECKING:
    from rl.sampler import SamplingRequest


def make_policy(
    service: ServiceClient,
    model: ModelSettings,
    previous: str | None,
    resume_from: str | None,
    seed: int,
    *,
    value_head: bool = False,
) -> TrainingClient:
    """Return the training client of a stage.

    Its weights are those of `resume_from`, of `previous` (the final checkpoint of the stage from
    which it continues), or of its base model.
    """
    if resume_from is not None:
        return service.create_training_client_from_state_with_optimizer(resume_from)
    base, continued = find_initial_weights(model, previous)
    if continued is not None:
        return service.create_training_client_from_state(
            continued, value_head=value_head, base_dtype=model.base_dtype
        )
    weights_seed = derive_seed(seed, "weights") % 2**31
    lora = model.make_lora(derive_seed(seed, "adapter") % 2**31)
    if lora is None:
        return service.create_full_training_client(
            base, tokenizer=model.tokenizer, seed=weights_seed, value_head=value_head
        )
    return service.create_lora_training_client(
        base,
        **asdict(lora),
        tokenizer=model.tokenizer,
        model_seed=weights_seed,
        value_head=value_head,
        base_dtype=model.base_dtype,
    )


@dataclass
class StageModelFactory(ModelFactory):
    """Create the models of a stage's method; see rl.algorithms.method_interface.ModelFactory.

    `previous` is the checkpoint from which the stage began. `earlier` maps each earlier stage to
    its final weights.
    `renderer` is the policy's renderer.
    """

    service: ServiceClient
    policy: TrainingClient
    model: ModelSettings
    previous: str | None
    earlier: Mapping[str, SavedWeights]
    seed: int
    resume_from: str | None = None
    tags: Sequence[str] = ()
    renderer: Renderer | None = None

    @classmethod
    def open_stage(
        cls,
        service: ServiceClient,
        stages: Sequence[StageConfig],
        index: int,
        final_path: Callable[[str], Path],
        seed: int,
        resume_from: str | None = None,
    ) -> Self:
        """Load the policy of a stage, and return the factory of its other models.

        `final_path` returns the final checkpoint of a stage by its name.
        """
        plan, before = stages[index], find_previous_stage(stages, index)
        earlier = {
            stage.name: SavedWeights(stage.name, final_path(stage.name), stage=stage)
            for stage in stages[:index]
        }
        # None: the stage begins from a base model
        previous = None if before is None else str(final_path(stages[before].name))
        model, value_head = plan.settings.model, METHODS.create(plan).value_head
        policy = make_policy(service, model, previous, resume_from, seed, value_head=value_head)
        renderer = stage_renderer(policy, plan.settings)
        return cls(service, policy, model, previous, earlier, seed, resume_from, renderer=renderer)

    def initial_policy(self) -> TokenScorer:
        """Return a scorer with the stage's initial weights, for example as the reference model.

        The weights are loaded from the policy's origin, not from the policy, so that they are the
        same when the stage begins and when it is resumed.
        """
        model = self.model
        base, continued = find_initial_weights(model, self.previous)
        source: dict[str, Any]
        if continued is not None:
            source = {"model_path": continued}
        elif model.lora_rank:
            return BaseModelScorer(self.policy)
        elif self.previous is not None and not is_adapter(base):
            source = {"model_path": self.previous}
        else:
            seed = derive_seed(self.seed, "weights") % 2**31
            source = {"base_model": base, "tokenizer": model.tokenizer, "seed": seed}
        return FrozenScorer(self.service.create_sampling_client(**source))

    def load(self, target: str) -> SamplingClient:
        """Return a client of an earlier stage, the policy's base model or other weights."""
        info = self.policy.info
        if target not in self.earlier and info["lora_rank"] and info["base_model"] == target:
            return self.policy.get_base_sampling_client()  # the base of the adapter, loaded already
        return self.open(target).create_sampler(self.service)

    def rewards(self, learned: LearnedRewardSettings) -> dict[str, LearnedRewards]:
        """Return the learned rewards that the settings name, under "rewards"; {} if none."""
        seed = derive_seed(self.seed, "rubric")
        if learned.comparison_model is not None:
            judge = self.load(learned.comparison_model)
            renderer = make_own_renderer(judge, self.open(learned.comparison_model))
            scorer: Any = PairwiseJudge(ComparisonModel(judge, renderer))
        elif learned.rubric_model is not None and is_api_address(learned.rubric_model):
            scorer = make_api_judge(learned, seed)
        elif learned.rubric_model is not None:
            judge = self.load(learned.rubric_model)
            if learned.rubric_renderer:
                renderer = make_renderer(judge, learned.rubric_renderer)
            else:
                renderer = make_own_renderer(judge, self.open(learned.rubric_model))
            scorer = RubricJudge(judge, renderer, make_rubric(learned), seed)
        elif learned.reward_models:
            models = [
                (name, self._load_reward_model(name), weight)
                for name, weight in learned.reward_models
            ]
            scorer = WeightedRewardModels(models)
        elif learned.reward_model is not None:
            scorer = self._load_reward_model(learned.reward_model)
        else:
            return {}
        return {"rewards": LearnedRewards(scorer, learned.other_reward_weight)}

    def _load_reward_model(self, target: str) -> RewardModel | PublishedRewardModel:
        """Return the reward model `target`. Raises UserError if it is no reward model."""
        weights = self.open(target)
        if target not in self.earlier and is_published_reward_model(weights):
            return PublishedRewardModel(self.service.create_classifier_client(target), target)
        if weights.stage is not None and weights.stage.method != "reward_model":
            training_method = weights.stage.method
            raise UserError(
                f"{target} is no reward model: {training_method} trained it, and its value head "
                "predicts the rewards of its policy. Name weights that train.py reward_model "
                "trained"
            )
        if not self.has_value_head(weights):
            raise UserError(
                f"{target} is no reward model: it is not a ...ForSequenceClassification with a "
                "single output, and has no value head that train.py reward_model trained. Train a "
                "reward model with train.py reward_model, or use a published reward model; a "
                "language model can score responses with --comparison-model"
            )
        client = self.service.create_training_client_from_state(str(weights.path))
        same_vocabulary = shares_vocabulary(self.policy, client, f"reward model {target}")
        return RewardModel(
            client,
            target,
            make_own_renderer(client, weights),
            shares_vocabulary=same_vocabulary,
            policy_renderer=self.renderer,
        )

    def open(self, target: str) -> SavedWeights:
        """Return the weights of an earlier stage or of another source."""
        return self.earlier.get(target) or open_weights(target)

    def has_value_head(self, weights: SavedWeights) -> bool:
        """Return whether a checkpoint holds a value head."""
        if weights.stage is not None and weights.name in self.earlier:
            return METHODS.create(weights.stage).value_head
        path = weights.path
        return (
            path is not None
            and (path / "state.json").is_file()
            and bool(checkpoint_folder.read_verified_state(path)["spec"].get("value_head"))
        )

    def create_critic(self, base_model: str) -> TrainingClient:
        """Return the critic: resumed, a copy of the policy's initial weights, or a base model."""
        if self.resume_from is not None:
            path = str(Path(self.resume_from) / "critic")
            return self.service.create_training_client_from_state_with_optimizer(path)
        model, previous = self.model, self.previous
        if base_model != "policy":
            model, previous = replace(model, base_model=find_weights_folder(base_model)), None
        return make_policy(self.service, model, previous, None, self.seed, value_head=True)


def make_own_renderer(client: TrainingClient | SamplingClient, weights: SavedWeights) -> Renderer:
    """Return the renderer of a model's training, with which it must be prompted; the default if no
    run trained it.
    """
    if weights.stage is None:
        return make_renderer(client, None)
    data = weights.stage.settings.data
    return make_renderer(client, data.renderer, data.template)


def is_published_reward_model(weights: SavedWeights) -> bool:
    """Return whether weights are a published reward model: a sequence classifier, not of a run.

    Raises UserError if `load_classifier_config` does.
    """
    if weights.path is not None and (weights.path / "state.json").is_file():
        return False
    return (
        load_classifier_config(weights.name if weights.path is None else str(weights.path))
        is not None
    )


def make_rubric(learned: LearnedRewardSettings) -> Rubric:
    """Return the rubric of the settings."""
    return Rubric.from_weights(
        learned.rubric,
        learned.rubric_reading,
        scale=learned.rubric_scale,
        max_tokens=learned.rubric_max_tokens,
    )


def make_api_judge(learned: LearnedRewardSettings, seed: int) -> APIRubricJudge:
    """Return the rubric's judge behind the API that `rubric_model` names."""
    assert learned.rubric_model is not None
    return APIRubricJudge(OpenAIClient(learned.rubric_model), make_rubric(learned), seed)


def make_renderer(
    client: TrainingClient | SamplingClient,
    renderer_name: str | None,
    template: Sequence[tuple[str, str]] = (),
    stop: Sequence[str] = (),
) -> Renderer:
    """Return the requested renderer, by default the model's chat template.

    The default is plain text if the tokenizer has no chat template. `template` holds settings of
    the template as YAML texts. `stop` holds texts that end a response. Raises UserError if the
    model has no tokenizer.
    """
    tokenizer = client.get_tokenizer()
    if tokenizer is None:
        raise UserError(
            f"{client.info['base_model']} has no tokenizer: name a tokenizer with --tokenizer, or "
            "put its files into the model's folder"
        )
    settings: dict[str, Any] = {
        name: yaml.safe_load(value) if value.strip() else value for name, value in template
    }
    renderer = get_renderer(
        renderer_name or ("chat_template" if tokenizer.chat_template else "plain"),
        tokenizer,
        **settings,
    )
    return renderer.with_stops(stop) if stop else renderer


def stage_renderer(client: TrainingClient | SamplingClient, settings: Any) -> Renderer:
    """Return the renderer of a stage according to its settings."""
    return make_renderer(
        client, settings.data.renderer, settings.data.template, settings.sampling.stop
    )


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


# samplers and renderers of the players, by player name
Players = tuple[dict[str, ActionSampler], dict[str, Renderer]]


def load_opponents(
    names: Sequence[str],
    load: Callable[[str], SamplingClient],
    find_weights: Callable[[str], SavedWeights],
    temperature: float,
) -> Players:
    """Load the models that play, except the pool. Raises UserError if a model cannot be loaded."""
    samplers: dict[str, ActionSampler] = {}
    renderers: dict[str, Renderer] = {}
    for name in names:
        if name != OPPONENT_POOL:
            client = load(name)
            samplers[name] = FixedTemperatureSampler(client, temperature)
            renderers[name] = make_own_renderer(client, find_weights(name))
    return samplers, renderers


def load_evaluation_opponents(
    environment: Environment,
    settings: EnvironmentSettings,
    weights: SavedWeights,
    service: ServiceClient,
) -> Players:
    """Return the other players for an evaluation of saved weights. For the pool it is the run's
    newest version that is older than the weights.
    """
    samplers, renderers = load_opponents(
        environment.models,
        lambda name: open_weights(name).create_sampler(service),
        open_weights,
        settings.players_temperature,
    )
    if OPPONENT_POOL in environment.models:
        paths = []
        if weights.path is not None and weights.stage is not None:
            versions = weights.path.parent.parent / WEIGHTS_FOLDER
            paths = [
                path
                for path in sorted(versions.glob(f"{weights.stage.name}-opponent-step-*"))
                if weights.step is None or int(path.name.rpartition("-")[2]) < weights.step
            ]
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
        factory: StageModelFactory,
        folder: Path,
        stage: str,
    ):
        self.factory, self.folder, self.stage = factory, folder, stage
        self.every = settings.opponents_every
        self.models, self.renderers = load_opponents(
            environment.models, factory.load, factory.open, settings.players_temperature
        )
        pool = OpponentPool(settings.opponents, settings.opponents_by)
        self.version_pool = pool if OPPONENT_POOL in environment.models else None
        self._loaded_version: tuple[str, SamplingClient] | None = None

    def add_initial_version(self, policy: TrainingClient, step: int) -> None:
        """Add the policy before the stage's first batch to the pool, as its first version."""
        if self.version_pool is not None and not self.version_pool.opponents:
            self._add_version(policy, step)

    def players(self, batch: int | None, seed: int) -> dict[str, ActionSampler]:
        """Return the samplers of the other players for a training batch, or (None) for an
        evaluation: the newest version of the pool. `seed`: the stage's.
        """
        pool = self.version_pool
        if pool is None:
            return self.models
        newest = pool.opponents[-1]
        version = newest if batch is None else pool.sample(derive_seed(seed, "opponent", batch))
        return {**self.models, OPPONENT_POOL: self._load(version.name)}

    def record_results(self, rollouts: RolloutBatch) -> None:
        """Rate the older version that the batch was played against."""
        if self.version_pool is not None and self._loaded_version is not None:
            self.version_pool.record_results(
                [(self._loaded_version[0], score) for score in _policy_scores(rollouts)]
            )

    def update_pool(self, policy: TrainingClient, done: int, step: int) -> dict[str, float]:
        """Add the policy to the pool when it is due. Return metrics.

        `done`: batches of the stage; `step`: of the run. Called after the evaluation, in which the
        policy plays against the newest version.
        """
        if self.version_pool is None:
            return {}
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
            name = path.name.removeprefix(f"{self.stage}-opponent-")
            if name not in referenced and path.is_dir() and not path.is_symlink():
                checkpoint_folder.remove_checkpoint(path)

    def _add_version(self, policy: TrainingClient, step: int) -> None:
        assert self.version_pool is not None
        # A version that leaves the pool is removed from disk with the next checkpoint: an earlier
        # checkpoint may still name it.
        self.version_pool.add(step)
        path = self._path(self.version_pool.opponents[-1].name)
        # saved by the run before it was resumed from an earlier step
        checkpoint_folder.remove_checkpoint(path)
        policy.save_weights_for_sampler(path.name).result()

    def _load(self, name: str) -> SamplingClient:
        if self._loaded_version is None or self._loaded_version[0] != name:
            if self._loaded_version is not None:
                self._loaded_version[1].release()
            client = self.factory.service.create_sampling_client(model_path=str(self._path(name)))
            self._loaded_version = name, client
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
