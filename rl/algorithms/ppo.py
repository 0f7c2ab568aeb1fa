"""Implement PPO: several clipped epochs on each batch, with token-level advantages from a learned
value function (Schulman et al., arXiv 1707.06347).

An episode's rewards are placed on the last token of each turn, the KL penalty to the reference on
every token (Ziegler et al., arXiv 1909.08593). Generalized advantage estimation (arXiv 1506.02438)
runs only over the action tokens, across observations and the datums of an episode. The value is a
head on the policy, or a separate critic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from rl.algorithms.advantages import (
    compute_gae,
    compute_kl_metrics,
    compute_logprob_gaps,
    select_actions,
)
from rl.algorithms.method_interface import (
    ModelFactory,
    Models,
    OnlineSettings,
    Progress,
    ReferenceMethod,
)
from rl.algorithms.update import (
    LossCall,
    UpdateSums,
    add_loss_field,
    add_loss_inputs,
    compute_divisor,
    compute_token_means,
    correct_by_settings,
    run_updates,
)
from rl.config import (
    POSITIVE,
    RATE,
    CorrectionSettings,
    DataSettings,
    Inside,
    KlSettings,
    Range,
    ShapingSettings,
    Share,
    Weight,
    check_comparison_groups,
    check_ranges,
    require,
)
from rl.errors import UserError
from rl.judges import restore_full_input
from rl.rollout import (
    Metrics,
    Trajectory,
    TrajectoryGroup,
    count_action_tokens,
    trajectory_to_datums,
)
from rl.seed import derive_seed
from rl.types import Datum

if TYPE_CHECKING:
    from rl.client import TrainingClient


@dataclass(frozen=True, kw_only=True)
class PpoOptions:
    """Configure the way rewards become gradients."""

    group_size: Annotated[int, Range(1, 10**6)] = 1
    """Answers sampled for each problem."""
    epochs: Annotated[int, Range(1, 10**6)] = 4
    """Passes over each batch; num_substeps is the number of minibatches per pass."""
    clip: Inside = 0.2
    """Ratios outside 1 - clip to 1 + clip have no gradient in the direction away from 1."""
    target_kl: Annotated[float | None, POSITIVE] = 0.01
    """Stop after an epoch if KL(old policy || new), measured again after each epoch, is above this; None: all epochs."""
    gamma: Share = 1.0
    """Discount per token."""
    gae_lambda: Share = 0.95
    """Lambda of generalized advantage estimation: 1 is return minus value, 0 one-step."""
    truncated: Literal["bootstrap", "end"] = "bootstrap"
    """An answer cut off by max_tokens, or an episode cut off by its environment: bootstrap from the value at its end, or treat the end as terminal."""
    normalise_advantages: bool = True
    """Scale advantages to mean 0 and std 1 over the actions of a batch."""
    value_coef: Weight = 0.1
    """Weight of the value loss, if the value is a head on the policy."""
    value_clip: Annotated[float | None, POSITIVE] = 0.2
    """A value further than this from its old value has no gradient that increases the distance; None: no clipping."""
    entropy_coef: Weight = 0.01
    """Weight of the entropy bonus."""
    critic_model: str | None = None
    """A separate value model: a hub name, a folder, tiny:<preset>, or "policy" for the weights from which the stage begins. By default the value is a head on the policy."""
    critic_learning_rate: Annotated[float | None, RATE] = None
    """Learning rate of the critic; by default the policy's."""

    def __post_init__(self) -> None:
        check_ranges(self)
        separate = self.critic_model is not None
        require(
            self,
            ("critic_learning_rate",),
            separate,
            "the value is a head on the policy and shares its learning rate",
            "set critic_model",
        )
        require(
            self,
            ("value_coef",),
            not separate,
            "critic_model does not enter the policy's loss",
            "leave critic_model out",
        )


@dataclass(frozen=True, kw_only=True)
class PpoSettings(OnlineSettings):
    """Proximal policy optimization: sample, compute token advantages from a learned value function,
    and take several clipped steps.
    """

    kl: KlSettings = KlSettings(kl_coef=0.1)
    ppo: PpoOptions = PpoOptions()
    correction: CorrectionSettings = CorrectionSettings()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_comparison_groups(self, self.ppo.group_size)
        reason = "it selects groups with different rewards, and ppo compares no answers"
        require(self.sampling, ("dynamic_sampling",), False, reason, "use grpo")
        if self.correction.proximal == "interpolated":
            raise ValueError(
                "proximal interpolated uses the age of tokens, and ppo trains no off-policy tokens: set proximal to learner"
            )


class PPO(ReferenceMethod):
    """Implement `ppo`."""

    Settings: ClassVar[type] = PpoSettings
    summary = (
        "RL: several clipped epochs a batch, with token advantages from a learned value function"
    )

    def __init__(self, settings: Any):
        super().__init__(settings)
        self.group_size = settings.ppo.group_size
        self.learns_by_step = True
        self.value_head = settings.ppo.critic_model is None
        self._value_metrics: Metrics = {}  # of the last batch

    def required_models(self, factory: ModelFactory) -> dict[str, Any]:
        """Create the reference model and the critic, if the settings request them."""
        models, critic_model = super().required_models(factory), self.settings.ppo.critic_model
        return (
            models if critic_model is None else {**models, "critic": factory.critic(critic_model)}
        )

    # --------------------------------------------------------------------------------------- credit

    def compute_advantages(self, groups: Sequence[TrajectoryGroup], models: Models) -> list[Datum]:
        """Return datums with `advantages`, `returns` and `values_old` at each action (and
        `ref_logprobs` for a KL term in the loss).
        """
        options = self.settings.ppo
        episodes = [
            EpisodeTokens(trajectory) for group in groups for trajectory in group.trajectories_G
        ]
        rewards_I_N = [steps for group in groups for steps in group.get_step_rewards()]
        flat = [datum for episode in episodes for datum in episode.parts]
        values_D = iter(_compute_values(models.critic or models.policy, flat))
        datums, charges = self._score_reference(flat, models)
        datums_D, charges_D = iter(datums), iter(charges)
        columns_I: list[dict[str, np.ndarray]] = []
        for episode, rewards_N in zip(episodes, rewards_I_N, strict=True):
            episode.parts = [next(datums_D) for _ in episode.parts]
            values_parts = [next(values_D) for _ in episode.parts]
            rewards = episode.place_rewards(rewards_N) - episode.gather_actions(
                [next(charges_D) for _ in episode.parts]
            )
            values = episode.gather_actions(values_parts)
            last, bootstrap = episode.trajectory.transitions[-1], 0.0
            # by max_tokens, or by the environment's limit
            cut_off = last.truncated or last.ac.stop_reason == "length"
            if cut_off and options.truncated == "bootstrap":
                bootstrap = float(values_parts[episode.last_part][-1])
            advantages = compute_gae(
                rewards, values, gamma=options.gamma, lam=options.gae_lambda, bootstrap=bootstrap
            )
            episode.trajectory.advantage = float(advantages.mean())
            columns_I.append(
                {"advantages": advantages, "returns": advantages + values, "values_old": values}
            )
        if options.normalise_advantages:  # over all actions of the batch
            everything = np.concatenate([columns["advantages"] for columns in columns_I])
            mean, std = everything.mean(), everything.std()
            for columns in columns_I:
                columns["advantages"] = (columns["advantages"] - mean) / (std + 1e-8)
        credited = [
            datum
            for episode, columns in zip(episodes, columns_I, strict=True)
            for datum in episode.make_datums(**columns)
        ]
        self._value_metrics = _compute_value_metrics(credited)
        return credited

    def _score_reference(
        self, datums: Sequence[Datum], models: Models
    ) -> tuple[Sequence[Datum], list[np.ndarray]]:
        """Return (the datums, with the reference's logprobs if the loss has a KL term; each token's
        KL penalty to the reference in the reward).
        """
        charges_D = [np.zeros(d.model_input.length) for d in datums]
        if not self.kl.needs_reference:
            return datums, charges_D
        ref_D, gaps_D = self.score_reference(datums, models)
        if self.settings.kl.kl_placement == "reward":
            return datums, [self.kl.coefficient * gap_T for gap_T in gaps_D]
        at_actions_D = [
            np.where(datum.action_mask, ref_T, 0.0)
            for datum, ref_T in zip(datums, ref_D, strict=True)
        ]
        return add_loss_field(datums, "ref_logprobs", at_actions_D), charges_D

    # ---------------------------------------------------------------------------------------- learn

    def update(self, models: Models, datums: Sequence[Datum], progress: Progress) -> Metrics:
        """Train epochs of minibatches until the policy is target_kl away from the policy that
        sampled. Then adapt kl_coef.
        """
        settings, options = self.settings, self.settings.ppo
        datums, before = correct_by_settings(models, datums, settings)
        drift: Metrics = {}

        def should_stop() -> bool:
            after = models.policy.forward(
                datums, "importance_sampling", {"temperature": settings.sampling.temperature}
            ).result()
            now_D = [output["logprobs"].array for output in after.loss_fn_outputs]
            drift.update(
                compute_kl_metrics(datums, compute_logprob_gaps(datums, now_D), "optim/approx_kl")
            )
            # A correction may reject every action. Nothing remains to learn from.
            return not drift or (
                options.target_kl is not None and drift["optim/approx_kl_k3"] > options.target_kl
            )

        totals = run_updates(
            models,
            datums,
            lambda part: self._make_calls(models, part),
            settings,
            progress,
            epochs=(
                _split_minibatches(datums, settings.optim.num_substeps, progress, epoch)
                for epoch in range(options.epochs)
            ),
            should_stop=should_stop,
        )
        self.adapt_kl()
        return {
            **summarize_epochs(totals, datums),
            **(before or totals.compare_first()),
            **drift,
            **self._kl_metrics,
            **self._value_metrics,
        }

    def _make_calls(self, models: Models, part: Sequence[Datum]) -> list[LossCall]:
        """Return the calls of a minibatch: of the policy and, if it exists, of the critic."""
        options, size = self.settings.ppo, compute_divisor(part, "tokens")
        calls = [LossCall(part, "ppo", self._config(models), size)]
        if models.critic is not None:
            config = {"value_clip": options.value_clip}
            rate = options.critic_learning_rate
            ratio = 1.0 if rate is None else rate / self.settings.learning_rate
            calls.append(LossCall(part, "value", config, size, "critic_", "critic", ratio))
        return calls

    def _config(self, models: Models) -> dict[str, Any]:
        """Return the config of the policy's loss."""
        options = self.settings.ppo
        config: dict[str, Any] = {
            "temperature": self.settings.sampling.temperature,
            "clip_low_threshold": 1 - options.clip,
            "clip_high_threshold": 1 + options.clip,
            "entropy_coef": options.entropy_coef,
        }
        if models.critic is None:
            config |= {"value_coef": options.value_coef, "value_clip": options.value_clip}
        return config | self.kl_config


@dataclass(frozen=True, kw_only=True)
class RlhfSettings(PpoSettings):
    """PPO on the scores of a reward model, with a KL penalty to the initial policy. Scores are
    divided by their running std.
    """

    data: DataSettings = DataSettings(reward=None)
    # A reward model's scores have an arbitrary scale. Without normalization their value loss may
    # dominate the policy's.
    shaping: ShapingSettings = ShapingSettings(normalise_rewards=True)


class RLHF(PPO):
    """Implement `rlhf`: reinforcement learning from a reward model (Ouyang et al., arXiv 2203.02155),
    which is PPO with another source of rewards.

    The same reward model in GRPO's loop: train.py grpo --reward-model ...
    """

    Settings = RlhfSettings
    summary = "RL: ppo on the scores of a reward model"
    needs_reward = False

    def required_models(self, factory: ModelFactory) -> dict[str, Any]:
        """Create the models of PPO. Raises UserError if the settings name no reward model."""
        if not self.judge_names:
            raise UserError(
                "rlhf needs a reward model: --reward-model with an earlier stage, a reward_model "
                "run's folder or a checkpoint of it (or --comparison-model with a language model "
                "that compares answers)"
            )
        return super().required_models(factory)


def summarize_epochs(totals: UpdateSums, datums: Sequence[Datum]) -> Metrics:
    """Return the metrics of all updates on `datums`: means over the tokens of every epoch."""
    sums = {name.removeprefix("critic_"): value for name, value in totals.sums.items()}
    sums["loss:sum"] = totals.sums["loss:sum"]  # the policy's
    tokens = count_action_tokens(datums)
    means = {
        f"optim/{name}": sums[f"{name}:sum"] / max(1, tokens * totals.epochs)
        for name in ("loss", "policy_loss")
        if f"{name}:sum" in sums
    }
    return {
        **totals.summarize(),
        **means,
        **compute_token_means(sums, tokens * totals.epochs),
        "optim/substeps": totals.steps,
        "optim/epochs": totals.epochs,
        "optim/tokens": tokens,
    }


class EpisodeTokens:
    """Arrange the action tokens of an episode as a single array in the order of its turns,
    independent of their distribution over datums.

    `parts`: the episode's datums, without advantages, or datums made from them. An episode that
    returns to an earlier conversation has datums with non-consecutive turns. Raises ValueError if
    the datums' masks disagree with the episode's turns.
    """

    def __init__(self, trajectory: Trajectory):
        self.trajectory = trajectory
        self.parts = trajectory_to_datums(trajectory, 0.0)  # token advantages follow
        turns_D = [turns for _, turns in trajectory.datums]
        self.masks = [datum.action_mask for datum in self.parts]
        turns_N = [turn.ac.num_tokens for turn in trajectory.transitions]  # action tokens
        self.ends_N = np.cumsum(turns_N)
        self.count = int(sum(mask.sum() for mask in self.masks))
        if self.count != self.ends_N[-1]:
            raise ValueError(
                f"the episode's turns have {self.ends_N[-1]} action tokens, its datums' masks "
                f"{self.count}"
            )
        self.last_part = next(d for d, turns in enumerate(turns_D) if turns[-1] == len(turns_N) - 1)
        # position in the order of the turns of each action token in the order of the datums
        ranges = [
            range(self.ends_N[turn] - turns_N[turn], self.ends_N[turn])
            for turns in turns_D
            for turn in turns
        ]
        self.positions = np.array([place for turn in ranges for place in turn], dtype=np.int64)

    def gather_actions(self, fields: Sequence[np.ndarray]) -> np.ndarray:
        """Return a field's values at the actions, float64 [tokens].

        Each datum's field has at least as many values as the datum has positions.
        """
        values = np.zeros(self.count)
        values[self.positions] = np.concatenate(
            [
                np.asarray(f, dtype=np.float64)[: len(m)][m]
                for f, m in zip(fields, self.masks, strict=True)
            ]
        )
        return values

    def place_rewards(self, rewards_N: Sequence[float]) -> np.ndarray:
        """Return rewards [tokens]: each turn's reward on the last token of its action.

        Raises ValueError unless there is a reward for each turn.
        """
        if len(rewards_N) != len(self.ends_N):
            raise ValueError(f"{len(rewards_N)} rewards for an episode of {len(self.ends_N)} turns")
        rewards = np.zeros(self.count)
        np.add.at(rewards, np.maximum(self.ends_N - 1, 0), rewards_N)
        return rewards

    def make_datums(self, **fields: np.ndarray) -> list[Datum]:
        """Return the datums with `fields` at the episode's actions, 0 elsewhere."""
        ends = np.cumsum([mask.sum() for mask in self.masks])[:-1]
        columns = {name: np.split(values[self.positions], ends) for name, values in fields.items()}
        datums = []
        for d, (datum, mask) in enumerate(zip(self.parts, self.masks, strict=True)):
            spread = {name: np.zeros(len(mask)) for name in fields}
            for name, column in columns.items():
                spread[name][mask] = column[d]
            datums.append(add_loss_inputs(datum, **spread))
        return datums


def _compute_values(critic: TrainingClient, datums: Sequence[Datum]) -> list[np.ndarray]:
    """Return the value at each position of each datum, and after its last token. A sequence that
    fills the model's context has no value after its last token.
    """
    limit = critic.info["max_context"]
    return critic.compute_values(
        [d.model_input if d.model_input.length == limit else restore_full_input(d) for d in datums]
    ).result()


def _compute_value_metrics(datums: Sequence[Datum]) -> Metrics:
    """Return value metrics. Explained variance is 1 - var(R - V) / var(R): 1 if the old values
    predict the returns perfectly, 0 if no better than their mean.
    """
    returns, values = (
        select_actions(datums, [d.loss_fn_inputs[name].array for d in datums])
        for name in ("returns", "values_old")
    )
    spread = float(returns.var())
    explained = 1 - float((returns - values).var()) / spread if spread > 0 else 0.0
    return {
        "optim/value": float(values.mean()),
        "optim/return": float(returns.mean()),
        "optim/explained_variance": explained,
    }


def _split_minibatches(
    datums: Sequence[Datum], num_minibatches: int, progress: Progress, epoch: int
) -> list[list[Datum]]:
    """Deal the datums out at random over n minibatches, with a new order in each epoch. Datums of a
    minibatch stay in their original order, to share prompts.
    """
    order = np.random.default_rng(
        derive_seed("minibatches", progress.seed, progress.batch, epoch)
    ).permutation(len(datums))
    parts = [[datums[i] for i in sorted(order[k::num_minibatches])] for k in range(num_minibatches)]
    return [part for part in parts if part]
