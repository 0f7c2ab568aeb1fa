"""Define the interface of a method: one class with its settings, the models that it needs, the
advantages, the update and its state. rl.algorithms.update holds the shared parts of updates. The
base classes of methods that sample add shaped rewards and the KL to a reference. This module
imports no torch.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from rl.algorithms.advantages import AdaptiveKL, compute_kl_metrics, compute_logprob_gaps
from rl.algorithms.reward_shaping import RewardShaper
from rl.config import (
    DataSettings,
    EnvironmentSettings,
    LearnedRewardSettings,
    LoopSettings,
    ModelSettings,
    OptimSettings,
    RolloutSettings,
    RowLoopSettings,
    SamplingSettings,
    ShapingSettings,
    check_substeps,
    is_api_address,
    reject_sampling_settings,
)
from rl.data import ProblemSet
from rl.errors import UserError
from rl.judges import APIScoringClient, FrozenScorer, OpenAIClient, check_vocabulary
from rl.renderers import TrainOn
from rl.rollout import Metrics, TrajectoryGroup
from rl.types import Datum, Problem

if TYPE_CHECKING:
    from rl.client import SamplingClient, TrainingClient
    from rl.judges import LearnedRewards, TokenScorer


@dataclass
class Models:
    """Hold the clients that a method uses.

    `policy` is always set. `others` holds the models that the method requested from its
    `ModelFactory`.
    """

    policy: TrainingClient
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> TokenScorer:
        """Return the reference model.

        Raises UserError if the method's class did not declare that it needs a reference model.
        """
        if "reference" not in self.others:
            raise UserError(
                "the method scores with a reference model, but its class requested none: add a "
                'method required_models(self, factory) that returns {"reference": '
                "factory.reference()} (see rl/algorithms/grpo.py), or leave out kl_coef"
            )
        return self.others["reference"]

    @property
    def critic(self) -> TrainingClient | None:
        """Return the critic, or None if the method has none."""
        return self.others.get("critic")

    @property
    def rewards(self) -> LearnedRewards | None:
        """Return the model that scores answers in addition to (or instead of) the environments, or
        None.
        """
        return self.others.get("rewards")

    @property
    def opponents(self) -> Any:
        """Return the players of the seats that the policy does not take
        (rl.trainer.stage_models), or None if the stage has no environment.
        """
        return self.others.get("opponents")

    @property
    def trainable(self) -> dict[str, TrainingClient]:
        """Return the models that train together with the policy and are saved with it: the critic,
        if any.
        """
        return {name: self.others[name] for name in ("critic",) if name in self.others}


class ModelFactory(abc.ABC):
    """Create the other models of a method when its stage begins, and again after a resume.

    `tags` are the names of the stage's data sets.
    """

    policy: TrainingClient
    tags: Sequence[str] = ()

    @abc.abstractmethod
    def initial_policy(self) -> TokenScorer:
        """Return the policy as it was before the stage's first step.

        This is the base model under a fresh adapter, else a frozen copy of the weights.
        """

    @abc.abstractmethod
    def load(self, target: str) -> SamplingClient:
        """Load the final weights of an earlier stage (by name) or of a run's folder, or the weights
        of a model folder or hub name.

        The base model under the policy's adapter is not loaded a second time.
        """

    @abc.abstractmethod
    def rewards(self, learned: LearnedRewardSettings) -> dict[str, LearnedRewards]:
        """Return the model that judges answers under the key `rewards` of `Models.others`; {} if
        the settings name none.
        """

    @abc.abstractmethod
    def create_critic(self, base_model: str) -> TrainingClient:
        """Return a separate model with a value head; see `critic`."""

    def critic(self, base_model: str) -> TrainingClient:
        """Return the `critic` of `Models.others`. It is saved and resumed together with the policy.

        `base_model` is a hub name, a model folder or tiny:<preset>; "policy" selects the weights
        from which the stage begins. Raises UserError if its vocabulary is not the policy's.
        """
        critic = self.create_critic(base_model)
        check_vocabulary(self.policy, critic, f"critic {base_model}")
        return critic

    def load_matching(self, target: str, role: str) -> SamplingClient:
        """Load weights, or connect to the model behind an API. Raises UserError, naming the role,
        if its vocabulary is not the policy's.
        """
        if is_api_address(target):
            scorer = APIScoringClient(OpenAIClient(target))
            scorer.check_vocabulary(self.policy, f"{role} {target}")
            return cast("SamplingClient", scorer)
        client = self.load(target)
        check_vocabulary(self.policy, client, f"{role} {target}")
        return client

    def reference(self, target: str | None = None) -> TokenScorer:
        """Return the reference model: the weights `target`, by default the initial policy."""
        if target is None:
            return self.initial_policy()
        if is_api_address(target):
            raise UserError(f"the reference model is loaded here: {target} is an address")
        return FrozenScorer(self.load_matching(target, "reference"))

    def defer_initial_policy(self) -> Callable[[], TokenScorer]:
        """Return a function that creates the initial policy when it is first called."""
        return functools.cache(self.initial_policy)


class ModelRequests(ModelFactory):
    """Record the models that a method requests, and load none.

    weights               names of the weights of scorers and judges, in the order of the requests
    critic_model          the base model of the critic, or None
    needs_initial_policy  whether the policy as it was before the stage is a further model
    """

    def __init__(self, method: Method):
        self.weights: list[str] = []
        self.critic_model: str | None = None
        self.needs_initial_policy = False
        self.models = method.make_models(self)

    def initial_policy(self) -> Any:
        self.needs_initial_policy = True

    def load(self, target: str) -> Any:
        self.weights.append(target)

    def load_matching(self, target: str, role: str) -> Any:
        if not is_api_address(target):
            self.load(target)

    def rewards(self, learned: LearnedRewardSettings) -> dict[str, Any]:
        self.weights += learned.loaded_model_names
        return {"rewards": None}

    def create_critic(self, base_model: str) -> Any:
        self.critic_model = base_model

    def critic(self, base_model: str) -> Any:
        self.create_critic(base_model)

    def defer_initial_policy(self) -> Any:
        self.initial_policy()


@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """Base class of the settings of a method: a field for each section, among them `optim` and
    `loop`.

    `default_learning_rates`: the peak learning rates (with LoRA, without) if `optim` sets none.
    """

    default_learning_rates: ClassVar[tuple[float, float]] = (4e-5, 1e-6)

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()

    def __post_init__(self) -> None:
        check_substeps(self)

    @property
    def learning_rate(self) -> float:
        """Return the peak learning rate: as set, else the method's default."""
        sections: Any = self
        rate = sections.optim.learning_rate
        return self.default_learning_rates[not self.model.lora_rank] if rate is None else rate


@dataclass(frozen=True, kw_only=True)
class OnlineSettings(MethodSettings):
    """Base class of the settings of a method that samples and learns from rewards."""

    env: EnvironmentSettings = EnvironmentSettings()
    sampling: SamplingSettings = SamplingSettings()
    shaping: ShapingSettings = ShapingSettings()
    learned: LearnedRewardSettings = LearnedRewardSettings()
    optim: OptimSettings = OptimSettings()
    flow: RolloutSettings = RolloutSettings()
    loop: LoopSettings = LoopSettings()


@dataclass(frozen=True, kw_only=True)
class RowSettings(MethodSettings):
    """Base class of the settings of a method that learns from the answers in its rows. It samples
    only to held-out problems.
    """

    sampling: SamplingSettings = SamplingSettings()
    optim: OptimSettings = OptimSettings()
    loop: RowLoopSettings = RowLoopSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        reject_sampling_settings(self, "the method learns from the data's answers")


@dataclass(frozen=True)
class Progress:
    """Hold the position in a stage: batch `batch` of `steps`.

    `seed` is the stage's seed for the random choices of `update`.
    """

    batch: int
    steps: int
    seed: int = 0


class Method:
    """Base class of the methods: a class holds everything about a method.

    Settings                the dataclass that the command line reads
    summary                 one line for the command line
    variants                maps each value of the setting `variant` to the flat settings that it
                            implies; explicit settings override them
    online                  whether the method samples; it then has `compute_advantages` and
                            `group_size`, otherwise `build_datums`
    needs_reward            whether it cannot learn without a reward
    reads                   the answers of a row (fields of Problem) from which it learns
    reads_held_out_answers  whether it also reads those answers of held-out rows
    reads_optional_answers  whether it reads them of the held-out rows that have them
    train_on                the messages of a conversation that it trains on
    value_head              whether the policy has a value head

    `__init__` may replace a value by one that depends on the settings.
    """

    Settings: ClassVar[type]
    summary: ClassVar[str]
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    online: bool = False
    group_size: int = 1
    needs_reward: bool = True
    reads: tuple[str, ...] = ()
    reads_held_out_answers: bool = False
    reads_optional_answers: bool = False
    train_on: TrainOn = "last_assistant"
    value_head: bool = False

    def __init__(self, settings: Any):
        self.settings = settings

    @property
    def trains_in_parts(self) -> bool:
        """Return whether `rl.algorithms.StreamedStep` does the same as `compute_advantages` and
        `update`.
        """
        return False

    @property
    def judge_names(self) -> list[str]:
        """Return the names of the models that judge answers, from the section `learned`; none if
        the settings lack it.
        """
        learned = getattr(self.settings, "learned", None)
        return [] if learned is None else list(learned.model_names)

    def required_models(self, factory: ModelFactory) -> dict[str, Any]:
        """Create the models that the method uses in addition to the policy, `Models.others`.

        Before a run, a factory that only records the requests calls this method too: it has no
        policy and returns None for each model.
        """
        return {}

    def make_models(self, factory: ModelFactory) -> dict[str, Any]:
        """Create the required models, and the judge that the section `learned` names.

        The run applies the judge to the samples of any method, so no method has to request it.
        """
        models = self.required_models(factory)
        if self.judge_names and "rewards" not in models:
            models = {**models, **factory.rewards(self.settings.learned)}
        self._check_used_sections(models)
        return models

    def _check_used_sections(self, models: Mapping[str, Any]) -> None:
        """Raise UserError if the settings ask for a KL, shaped rewards or gradients in parts, and
        the class does not use them: it may read only some of the sections of its `Settings`.
        """
        kl, shaping = (getattr(self.settings, name, None) for name in ("kl", "shaping"))
        default = kl is not None and kl.kl_coef is None and kl.reference_model is not None
        active = kl is not None and (default or kl.kl_coef or kl.kl_target)
        if active and "reference" not in models:
            raise UserError(
                f"{type(self).__name__} takes kl_coef, kl_target and reference_model from its "
                "Settings, but requests no reference model, so they would have no effect: leave "
                "them out, or inherit from rl.algorithms.GRPO, or return "
                '{"reference": factory.reference()} from required_models(self, factory) and use '
                "models.reference"
            )
        shapes = type(self).shape_rewards is not Method.shape_rewards or hasattr(self, "shaper")
        if shaping is not None and not shapes:
            if shaping != type(self.settings)().shaping:
                raise UserError(
                    f"{type(self).__name__} takes the settings of shaped rewards from its "
                    "Settings, but shapes none, so they would have no effect: leave them out, or "
                    "inherit from rl.algorithms.OnlineMethod, or shape them in a method "
                    "shape_rewards(self, groups)"
                )

        flow = getattr(self.settings, "flow", None)
        if flow is not None and flow.gradient_parts > 1 and not self.trains_in_parts:
            raise UserError(
                f"{type(self).__name__} has a compute_advantages or an update of its own, which "
                "stream_minibatches would not call, or an estimator of scope 'batch', which would "
                "see a part of the batch: leave stream_minibatches out, or inherit both from "
                "rl.algorithms.GRPO, with an estimator of scope 'group'"
            )

    def describe_data(self, problems: ProblemSet, renderer: Any) -> str | None:
        """Return a message about the training data, or None."""
        return None

    def shape_rewards(self, groups: Sequence[TrajectoryGroup]) -> Sequence[TrajectoryGroup]:
        """Return the groups with final rewards, from which `compute_advantages` learns.

        Each batch passes through this hook once, between scoring and `compute_advantages`. The
        groups that it receives stay as they are: metrics and rollout files show their rewards.
        """
        return groups

    @property
    def shaping_metrics(self) -> Metrics:
        """Return the metrics of the last call of `shape_rewards`."""
        return {}

    def compute_advantages(self, groups: Sequence[TrajectoryGroup], models: Models) -> list[Datum]:
        """Return the datums of a batch of groups, whose rewards are final."""
        raise NotImplementedError(f"{type(self).__name__} does not sample")

    def build_datums(
        self, rows: Sequence[Problem], renderer: Any, models: Models, seed: int
    ) -> list[Datum]:
        """Return the datums of a batch of rows. `seed` is the batch's seed for random choices."""
        raise NotImplementedError(f"{type(self).__name__} reads no rows")

    def update(self, models: Models, datums: Sequence[Datum], progress: Progress) -> Metrics:
        """Train on the datums. Return the `optim/...` metrics."""
        raise NotImplementedError(f"{type(self).__name__} has no update")

    def state(self) -> dict[str, Any]:
        """Return the state that must survive a resume, as readable JSON."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""


class RowEvaluator(Method, abc.ABC):
    """Base class of methods that measure held-out rows themselves, in addition to (or instead of)
    sampling answers to them.

    `headline` is the metric that summarizes a run. `keeps_value_head` tells whether the best
    weights are useless without the value head.
    """

    headline: str
    keeps_value_head = False

    def prepare_rows(self, rows: Iterable[Problem], renderer: Any, models: Models) -> None:  # noqa: B027  (nothing, by default)
        """Prepare for all rows on which the stage trains or evaluates. Called before the first step
        and after a resume.
        """

    def longest(self, row: Problem, renderer: Any) -> int:
        """Return the number of tokens of the longest sequence that a row makes besides its prompt
        with each of the answers `reads`; 0 if there is no other.
        """
        return 0

    @abc.abstractmethod
    def evaluate(self, rows: Sequence[Problem], renderer: Any, models: Models) -> Metrics:
        """Return the `test/...` metrics of held-out rows."""


class OnlineMethod(Method):
    """Base class of methods that sample answers and learn from their rewards.

    `shaper` shapes the rewards of a batch by the section `shaping`. `learns_by_step`: whether the
    method learns from the rewards of steps, or else from those of whole episodes.
    """

    online = True
    learns_by_step: bool = False

    def __init__(self, settings: Any):
        super().__init__(settings)
        self.shaper = RewardShaper(settings.shaping, settings.sampling.max_tokens)

    def shape_rewards(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Return the groups with rewards shaped by the section `shaping`: those of each step, or
        of whole episodes.
        """
        rewards_P_G_N = (
            self.shaper.shape_steps(groups)
            if self.learns_by_step
            else [[[total] for total in totals_G] for totals_G in self.shaper.shape_totals(groups)]
        )
        return [
            replace(group, shaped_rewards_G_N=rewards_G_N)
            for group, rewards_G_N in zip(groups, rewards_P_G_N, strict=True)
        ]

    @property
    def shaping_metrics(self) -> Metrics:
        return self.shaper.metrics

    def state(self) -> dict[str, Any]:
        return {"reward_statistics": self.shaper.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.shaper.load_state(state["reward_statistics"])


class ReferenceMethod(OnlineMethod):
    """Base class of online methods with a KL to a reference model, by the section `kl`.

    Without `kl_coef` the coefficient is 0.1 if a reference model is named, else 0.
    """

    def __init__(self, settings: Any):
        super().__init__(settings)
        kl, default = settings.kl, 0.0 if settings.kl.reference_model is None else 0.1
        coefficient = default if kl.kl_coef is None else kl.kl_coef
        self.kl = AdaptiveKL(coefficient, kl.kl_target, kl.kl_rate)
        self._kl_metrics: Metrics = {}  # of the last batch

    def required_models(self, factory: ModelFactory) -> dict[str, Any]:
        """Create the reference model, if the KL to it has a coefficient."""
        if not self.kl.needs_reference:
            return {}
        return {"reference": factory.reference(self.settings.kl.reference_model)}

    @property
    def kl_config(self) -> dict[str, Any]:
        """Return the config of the loss's KL term; {} if the KL is part of the reward."""
        if not self.kl.needs_reference or self.settings.kl.kl_placement == "reward":
            return {}
        return {"kl_coef": self.kl.coefficient, "kl_kind": self.settings.kl.kl_kind}

    def score_reference(
        self, datums: Sequence[Datum], models: Models
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return the reference's logprobs of each datum and their gaps to the sampler's."""
        ref_D = models.reference.logprobs(datums, self.settings.sampling.temperature)
        gaps_D = compute_logprob_gaps(datums, ref_D)
        self._kl_metrics = {
            **compute_kl_metrics(datums, gaps_D),
            "optim/kl_coef": self.kl.coefficient,
        }
        return ref_D, gaps_D

    def adapt_kl(self) -> None:
        """Adapt the coefficient to the KL of the last batch."""
        if "optim/kl_ref_k3" in self._kl_metrics:
            self.kl.update(self._kl_metrics["optim/kl_ref_k3"])

    def state(self) -> dict[str, Any]:
        return {**super().state(), "kl_coef": self.kl.coefficient}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        if self.kl.target is not None:  # otherwise the settings determine the coefficient
            self.kl.coefficient = state["kl_coef"]
