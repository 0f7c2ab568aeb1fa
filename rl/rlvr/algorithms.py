"""Provide REINFORCE and PPO as objects with `update(batch, client)`, based on rl.algorithms.

An algorithm holds its config and the method's state, which is readable JSON. The method object is
created again for each update.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from rl.algorithms import (
    GRPO,
    PPO,
    Models,
    PolicyGradientSettings,
    PpoOptions,
    PpoSettings,
    Progress,
    ReinforceSettings,
    compute_kl_metrics,
    compute_logprob_gaps,
    normalize_by_batch,
)
from rl.config import KlSettings, LoopSettings, OptimSettings, SamplingSettings, ShapingSettings
from rl.errors import UserError
from rl.judges import BaseModelScorer, FrozenScorer, check_vocabulary
from rl.rlvr.configs import PPOConfig, REINFORCEConfig
from rl.rlvr.rollout_sampler import TrajectoryBatch
from rl.rollout import Metrics
from rl.types import Datum

if TYPE_CHECKING:
    from rl.client import SamplingClient, TrainingClient

Config = TypeVar("Config", REINFORCEConfig, PPOConfig)


@dataclass(frozen=True)
class UpdateResult:
    """Hold the results of an update.

    Losses and entropy are means over action tokens (and over PPO's epochs), in nats.

    policy_loss    without entropy bonus and value loss
    value_loss     of PPO; 0 for REINFORCE, which learns no value
    entropy        of the policy
    kl_divergence  KL(policy that sampled || policy after the update), the k3 estimate from
                   recomputed logprobs
    grad_norm      before clipping; the largest of several optimizer steps
    metrics        all metrics of the method, under the names that train.py logs
    """

    policy_loss: float
    value_loss: float
    entropy: float
    kl_divergence: float
    grad_norm: float
    metrics: Metrics


class Algorithm(ABC, Generic[Config]):
    """Train a client on batches with `update`.

    `get_state` and `from_state` save and restore the algorithm. `reference` is the reference model
    of kl_penalty_coef; by default it is the base model under the client's LoRA adapter. Raises
    UserError if `config` is of another class.
    """

    name: ClassVar[str]
    config_class: ClassVar[type]

    def __init__(self, config: Config | None = None, *, reference: SamplingClient | None = None):
        if config is not None and not isinstance(config, self.config_class):
            raise UserError(f"{self.name} takes a {self.config_class.__name__}, got {config!r}")
        self.config: Config = self.config_class() if config is None else config
        self.reference = reference
        self.updates = 0
        self._state: dict[str, Any] = self._make_method(1.0).state()

    @abstractmethod
    def _make_method(self, temperature: float) -> Any:
        """Return the hooks of the method, for samples of this temperature."""

    def _update_models(self, method: Any, models: Models, datums: Sequence[Datum]) -> Metrics:
        """Update on the datums and return the metrics, including `optim/approx_kl_k3`."""
        progress = Progress(self.updates, self.updates + 1, models.policy.service.seed)
        return method.update(models, datums, progress)

    def update(self, batch: TrajectoryBatch, client: TrainingClient) -> UpdateResult:
        """Train `client` on the batch; every trajectory needs a reward.

        Raises UserError before training if rewards are missing, or if the batch was sampled
        greedily or from weights that have been updated since.
        """
        groups = batch.groups()
        if not batch.temperature:
            raise UserError(
                "the batch was sampled greedily (temperature 0), so it has no information about "
                "other responses: sample with a temperature above 0, such as 1.0"
            )
        _check_versions(batch, client)
        method = self._make_method(batch.temperature)
        method.load_state(copy.deepcopy(self._state))
        models = self._make_models(client)
        datums = method.compute_advantages(method.shape_rewards(groups), models)
        metrics = self._update_models(method, models, datums)
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

    def _make_models(self, client: TrainingClient) -> Models:
        """Return the policy and the reference model. Raises UserError if a reference is missing."""
        if not self.config.kl_penalty_coef:
            return Models(client)
        if self.reference is not None:
            check_vocabulary(client, self.reference, "reference")
            return Models(client, {"reference": FrozenScorer(self.reference)})
        if client.info["lora_rank"] is None:
            raise UserError(
                f"kl_penalty_coef {self.config.kl_penalty_coef} needs a reference model, and a "
                "client that trains all weights keeps no copy of its base model: pass "
                f"{self.name}(config, reference=service.create_sampling_client(base_model=...)), "
                "or train a LoRA adapter"
            )
        return Models(client, {"reference": BaseModelScorer(client)})

    def get_state(self) -> dict[str, Any]:
        """Return the config, the number of updates and the method's state, as JSON."""
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
        """Return the algorithm with the state that `get_state` returned.

        Raises UserError if the state is incomplete or of another algorithm.
        """
        expected = ("algorithm", "config", "updates", "method")
        missing = [key for key in expected if key not in state]
        if missing:
            raise UserError(
                f"this is not the state of an algorithm: it lacks {', '.join(missing)} (it has "
                f"{', '.join(sorted(map(str, state)))}); pass a state from get_state"
            )
        if state["algorithm"] != cls.name:
            raise UserError(
                f"the state is of {state['algorithm']}, not of {cls.name}: load it with from_state "
                "of that class"
            )
        algorithm = cls(cls.config_class(**state["config"]), reference=reference)
        algorithm.updates, algorithm._state = state["updates"], copy.deepcopy(dict(state["method"]))
        return algorithm


def _check_versions(batch: TrajectoryBatch, client: TrainingClient) -> None:
    """Raise UserError if a trajectory was not sampled from the client's current weights.

    A trajectory without a weight version is accepted.
    """
    current_version = client.version
    for i, trajectory in enumerate(batch):
        sampled_version = trajectory.episode.transitions[-1].ac.version
        if sampled_version is not None and sampled_version != current_version:
            raise UserError(
                f"trajectory {i} was sampled from weight version {sampled_version}, expected the "
                f"current version {current_version}. Call generate_trajectories before each "
                "update; PPOConfig(ppo_epochs=...) trains several epochs on each batch"
            )


class _NormalizedGRPO(GRPO):
    """Compute REINFORCE advantages, normalized to mean 0 and std 1 over the batch."""

    def _estimate_advantages(
        self, rewards_P_K: Sequence[Sequence[float]], keys_P: Sequence[str]
    ) -> Sequence[Any]:
        advantages_P_K = super()._estimate_advantages(rewards_P_K, keys_P)
        return normalize_by_batch(advantages_P_K) if len(advantages_P_K) > 1 else advantages_P_K


class REINFORCEAlgorithm(Algorithm[REINFORCEConfig]):
    """Update with REINFORCE; see REINFORCEConfig."""

    name = "REINFORCE"
    config_class = REINFORCEConfig

    def _make_method(self, temperature: float) -> GRPO:
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
        return _NormalizedGRPO(settings) if c.normalize_advantages else GRPO(settings)

    def _update_models(self, method: GRPO, models: Models, datums: Sequence[Datum]) -> Metrics:
        metrics = super()._update_models(method, models, datums)
        temperature = {"temperature": method.settings.sampling.temperature}
        after = models.policy.forward(datums, "importance_sampling", temperature).result()
        return metrics | compute_kl_metrics(
            datums,
            compute_logprob_gaps(datums, [o["logprobs"].array for o in after.loss_fn_outputs]),
            "optim/approx_kl",
        )


class PPOAlgorithm(Algorithm[PPOConfig]):
    """Update with PPO; see PPOConfig.

    The value is a head on the policy, which `create_training_client` creates.
    """

    name = "PPO"
    config_class = PPOConfig

    def _make_method(self, temperature: float) -> PPO:
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
        return PPO(
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

    def _make_models(self, client: TrainingClient) -> Models:
        if not client.info["value_head"]:
            raise UserError(
                "PPO learns values, and this client's model has no value head: create it with "
                "service.create_training_client(TrainingConfig(model_ref=...)), or with "
                "value_head=True"
            )
        return super()._make_models(client)
