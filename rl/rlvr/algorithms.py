"""REINFORCE and PPO as objects with `update(batch, client)`: the hooks of rl.methods, and nothing
of their own besides.

An algorithm holds its config and the method's state, which is readable JSON; the method is made
anew for each update.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from rl.credit import batch_normalised, gaps, kl_metrics
from rl.errors import UserError
from rl.judges import BaseScorer, FrozenScorer, check_vocabulary
from rl.methods import (
    Models,
    PolicyGradient,
    PolicyGradientSettings,
    Ppo,
    PpoOptions,
    PpoSettings,
    Progress,
    ReinforceSettings,
)
from rl.rlvr.configs import PPOConfig, REINFORCEConfig
from rl.rlvr.rollouts import TrajectoryBatch
from rl.settings import KlSettings, LoopSettings, OptimSettings, SamplingSettings, ShapingSettings
from rl.types import Datum

if TYPE_CHECKING:
    from rl.clients import SamplingClient, TrainingClient

Config = TypeVar("Config", REINFORCEConfig, PPOConfig)


@dataclass(frozen=True)
class UpdateResult:
    """What an update did. Losses and entropy: means over action tokens (and over PPO's epochs), in
    nats.

    policy_loss    without entropy bonus and value loss
    value_loss     of PPO; 0 of REINFORCE, which learns no value
    entropy        of the policy
    kl_divergence  KL(policy that sampled || policy after the update), the estimate k3, from
    logprobs computed anew grad_norm      before clipping; of several optimizer steps the largest
    metrics        everything the method measured, under the names that train.py logs
    """

    policy_loss: float
    value_loss: float
    entropy: float
    kl_divergence: float
    grad_norm: float
    metrics: dict[str, float]


class Algorithm(ABC, Generic[Config]):
    """`update` trains a client on a batch; `get_state` and `from_state` take the algorithm through
    a checkpoint.

    `reference`: what kl_penalty_coef holds the policy near; by default the base model under the
    client's LoRA adapter.
    """

    name: ClassVar[str]
    config_class: ClassVar[type]

    def __init__(self, config: Config | None = None, *, reference: SamplingClient | None = None):
        if config is not None and not isinstance(config, self.config_class):
            raise UserError(
                f"{type(self).__name__} takes a {self.config_class.__name__}, got {config!r}"
            )
        self.config: Config = self.config_class() if config is None else config
        self.reference = reference
        self.updates = 0
        self._state: dict[str, Any] = self._method(1.0).state()

    @abstractmethod
    def _method(self, temperature: float) -> Any:
        """The method's hooks, for samples of this temperature."""

    @abstractmethod
    def _learn(self, method: Any, models: Models, datums: Sequence[Datum]) -> dict[str, float]:
        """Metrics, `optim/approx_kl_k3` among them."""

    def update(self, batch: TrajectoryBatch, client: TrainingClient) -> UpdateResult:
        """Trains `client` on the batch, whose every trajectory has its reward.

        Raises UserError, before anything is trained, for a batch that cannot be learnt from: one
        without its rewards, drawn greedily, or drawn from weights that were updated since.
        """
        groups = batch.groups()
        if not batch.temperature > 0:
            raise UserError(
                "the batch was drawn greedily (temperature 0), which tells nothing of other answers: sample at 1.0, say"
            )
        _check_versions(batch, client)
        method = self._method(batch.temperature)
        method.load_state(copy.deepcopy(self._state))
        models = self._models(client)
        metrics = self._learn(method, models, method.credit(groups, models))
        self._state, self.updates = method.state(), self.updates + 1
        return UpdateResult(
            policy_loss=metrics["optim/policy_loss"]
            if "optim/policy_loss" in metrics
            else metrics["optim/loss"],
            value_loss=metrics.get("optim/value_loss", 0.0),
            entropy=metrics.get("optim/policy_entropy", metrics["optim/entropy"]),
            kl_divergence=metrics["optim/approx_kl_k3"],
            grad_norm=metrics["optim/grad_norm"],
            metrics=metrics,
        )

    def _models(self, client: TrainingClient) -> Models:
        if not self.config.kl_penalty_coef:
            return Models(client)
        if self.reference is not None:
            check_vocabulary(client, self.reference, "reference")
            return Models(client, {"reference": FrozenScorer(self.reference)})
        if client.info["lora_rank"] is None:
            raise UserError(
                f"kl_penalty_coef {self.config.kl_penalty_coef} needs a reference, and a client that trains all weights keeps none: pass "
                f"{type(self).__name__}(config, reference=service.create_sampling_client(base_model=...)), or train a LoRA adapter"
            )
        return Models(client, {"reference": BaseScorer(client)})

    def _progress(self, models: Models) -> Progress:
        return Progress(self.updates, self.updates + 1, models.policy.service.seed)

    def get_state(self) -> dict[str, Any]:
        """Config, number of updates and the method's state: JSON."""
        return {
            "algorithm": self.name,
            "config": asdict(self.config),
            "updates": self.updates,
            "method": copy.deepcopy(self._state),
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], *, reference: SamplingClient | None = None
    ) -> Self:
        """The algorithm as it was when `get_state` was called. Raises UserError for a state of
        another algorithm.
        """
        expected = ("algorithm", "config", "updates", "method")
        missing = [key for key in expected if key not in state]
        if missing:
            raise UserError(
                f"this is no algorithm's state: it lacks {', '.join(missing)} (it has {', '.join(sorted(map(str, state)))})"
            )
        if state["algorithm"] != cls.name:
            raise UserError(
                f"the state is one of {state['algorithm']}, not of {cls.name}: load it with that class's from_state"
            )
        algorithm = cls(cls.config_class(**state["config"]), reference=reference)
        algorithm.updates, algorithm._state = state["updates"], copy.deepcopy(dict(state["method"]))
        return algorithm


def _check_versions(batch: TrajectoryBatch, client: TrainingClient) -> None:
    """Raises UserError where a trajectory is not of the client's weights as they are. One without a
    version is taken as it is.
    """
    now = client.version
    for i, trajectory in enumerate(batch):
        drawn = trajectory.episode.transitions[-1].ac.version
        if drawn is not None and drawn != now:
            raise UserError(
                f"trajectory {i} was drawn at version {drawn} of the weights, which are at version {now} now: each update takes samples of "
                "the weights it begins from. Call generate_trajectories before each update; PPOConfig(ppo_epochs=...) learns "
                "several times from one batch"
            )


class _Normalised(PolicyGradient):
    """REINFORCE whose advantages are brought to mean 0 and std 1 over the batch."""

    def _advantages(
        self, rewards_P_K: Sequence[Sequence[float]], keys_P: Sequence[str]
    ) -> Sequence[Any]:
        advantages_P_K = super()._advantages(rewards_P_K, keys_P)
        return batch_normalised(advantages_P_K) if len(advantages_P_K) > 1 else advantages_P_K


class REINFORCE(Algorithm[REINFORCEConfig]):
    """See REINFORCEConfig."""

    name = "REINFORCE"
    config_class = REINFORCEConfig

    def _method(self, temperature: float) -> PolicyGradient:
        c = self.config
        settings = ReinforceSettings(
            sampling=SamplingSettings(temperature=temperature),
            policy_gradient=PolicyGradientSettings(
                group_size=1,
                advantage="running_mean" if c.use_baseline else "none",
                loss="importance_sampling",
                entropy_coef=c.entropy_coef,
            ),
            kl=KlSettings(kl_coef=c.kl_penalty_coef),
            optim=OptimSettings(learning_rate=c.learning_rate, grad_clip_norm=c.max_grad_norm),
        )
        return _Normalised(settings) if c.normalize_advantages else PolicyGradient(settings)

    def _learn(
        self, method: PolicyGradient, models: Models, datums: Sequence[Datum]
    ) -> dict[str, float]:
        metrics = method.learn(models, datums, self._progress(models))
        temperature = {"temperature": method.settings.sampling.temperature}
        after = models.policy.forward(datums, "importance_sampling", temperature).result()
        return metrics | kl_metrics(
            datums,
            gaps(datums, [o["logprobs"].array for o in after.loss_fn_outputs]),
            "optim/approx_kl",
        )


class PPO(Algorithm[PPOConfig]):
    """See PPOConfig. The value is a head on the policy, which `create_training_client` makes."""

    name = "PPO"
    config_class = PPOConfig

    def _method(self, temperature: float) -> Ppo:
        c = self.config
        options = PpoOptions(
            epochs=c.ppo_epochs,
            clip=c.clip_range,
            target_kl=c.target_kl,
            gamma=c.gamma,
            gae_lambda=c.gae_lambda,
            normalise_advantages=c.normalize_advantages,
            value_coef=c.value_coef,
            value_clip=c.value_clip,
            entropy_coef=c.entropy_coef,
        )
        return Ppo(
            PpoSettings(
                sampling=SamplingSettings(temperature=temperature),
                shaping=ShapingSettings(normalise_rewards=c.reward_normalization),
                kl=KlSettings(kl_coef=c.kl_penalty_coef),
                ppo=options,
                optim=OptimSettings(
                    learning_rate=c.learning_rate,
                    grad_clip_norm=c.max_grad_norm,
                    num_substeps=c.minibatches,
                ),
                loop=LoopSettings(batch_size=c.minibatches),
            )
        )

    def _models(self, client: TrainingClient) -> Models:
        if not client.info["value_head"]:
            raise UserError(
                "PPO learns values, and this client's model has no value head: make it with "
                "service.create_training_client(TrainingConfig(model_ref=...)), or with value_head=True"
            )
        return super()._models(client)

    def _learn(self, method: Ppo, models: Models, datums: Sequence[Datum]) -> dict[str, float]:
        return method.learn(models, datums, self._progress(models))
