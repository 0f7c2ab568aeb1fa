"""Implement GRPO: sample several answers to each problem and compare each answer's reward with its
group's.

Shao et al., arXiv 2402.03300, by default with Dr. GRPO's advantage (centered, not divided by the
standard deviation; arXiv 2503.20783) and no KL term. Its variants and REINFORCE are settings of the
same three hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rl.algorithms.advantages import ADVANTAGES, compute_returns_to_go, has_signal
from rl.algorithms.grpo_settings import (
    VARIANTS,
    GrpoSettings,
    PolicyGradientSettings,
    find_loss_coefficients,
)
from rl.algorithms.kl_penalty import apply_kl_penalty
from rl.algorithms.method_interface import Models, Progress, ReferenceMethod
from rl.algorithms.update import (
    add_loss_inputs,
    add_proximal_weight,
    apply_truncated_is,
    correct_by_settings,
    train_single_pass,
    weight_by_sequence,
)
from rl.rollout import TrajectoryGroup, record_advantages, trajectory_to_datums
from rl.types import Datum


class GRPO(ReferenceMethod):
    """Implement `grpo` and, with other settings, `reinforce`."""

    Settings: ClassVar[type] = GrpoSettings
    summary = "RL: a group of answers to each problem, each compared with its group"
    variants = VARIANTS

    def __init__(self, settings: Any):
        super().__init__(settings)
        self.group_size = settings.policy_gradient.group_size
        self.learns_by_step = settings.policy_gradient.step_rewards != "sum"
        self.estimator = ADVANTAGES[settings.policy_gradient.advantage]
        self._baselines = {
            estimator.state_key: estimator.fn()
            for estimator in ADVANTAGES.values()
            if estimator.state_key is not None
        }

    @property
    def trains_in_parts(self) -> bool:
        hooks = ("compute_advantages", "update")
        return all(getattr(type(self), name) is getattr(GRPO, name) for name in hooks)

    def compute_advantages(
        self, groups: Sequence[TrajectoryGroup], models: Models, *, keep_first: bool = True
    ) -> list[Datum]:
        """Return datums with advantages over each answer's tokens.

        Groups without signal are dropped. If no group has signal, the first group is kept by
        default.
        """
        options = self.settings.policy_gradient
        rewards_P_G_N = [group.get_step_rewards() for group in groups]
        if options.step_rewards == "sum":
            rewards_P_G_N = [[[sum(steps)] for steps in group] for group in rewards_P_G_N]
        if options.step_rewards == "to_go":
            rewards_P_G_N = [
                [compute_returns_to_go(steps, options.reward_discount) for steps in rewards_G_N]
                for rewards_G_N in rewards_P_G_N
            ]
        cells = group_comparable_rewards(rewards_P_G_N, by_turn=options.step_rewards == "to_go")
        rewards_C_K = [[rewards_P_G_N[p][g][n] for g, n in members] for p, _, members in cells]
        keys_C = [
            f"{groups[p].tag}/{groups[p].problem_index}" + (f"/turn {turn}" if turn else "")
            for p, turn, _ in cells
        ]
        advantages_P_G_N = [[[0.0] * len(steps) for steps in group] for group in rewards_P_G_N]
        for (p, _, members), advantages_K in zip(
            cells, self._estimate_advantages(rewards_C_K, keys_C), strict=True
        ):
            for (g, n), advantage in zip(members, advantages_K, strict=True):
                advantages_P_G_N[p][g][n] = float(advantage)
        trained = {
            p
            for (p, _, _), rewards_K in zip(cells, rewards_C_K, strict=True)
            if self._is_trained_on(rewards_K)
        }
        kept = trained or ({0} if keep_first else set())
        datums: list[Datum] = []
        for i, (group, advantages_G_N) in enumerate(zip(groups, advantages_P_G_N, strict=True)):
            for trajectory, advantages_N in zip(group.trajectories_G, advantages_G_N, strict=True):
                advantages = self._credit_turns(advantages_N)
                if i in kept:
                    datums += trajectory_to_datums(trajectory, advantages)
                else:
                    record_advantages(trajectory, advantages)
        return self._apply_reference(datums, models) if self.kl.needs_reference else datums

    def _apply_reference(self, datums: list[Datum], models: Models) -> list[Datum]:
        """Charge the KL to the reference to the advantages, or add the reference's logprobs for the
        KL term of the loss.
        """
        ref_D, _ = self.score_reference(datums, models)
        if self.settings.kl.kl_placement == "reward":
            discount = self.settings.policy_gradient.kl_discount
            return apply_kl_penalty(datums, ref_D, self.kl.coefficient, discount)[0]
        return [
            add_loss_inputs(datum, ref_logprobs=ref_T)
            for datum, ref_T in zip(datums, ref_D, strict=True)
        ]

    def _estimate_advantages(
        self, rewards_C_K: Sequence[Sequence[float]], keys_C: Sequence[str]
    ) -> Sequence[Any]:
        """Return an advantage for each reward; C cells of K rewards that are compared with each
        other.
        """
        estimator = self.estimator
        if estimator.state_key is not None:
            return self._baselines[estimator.state_key](rewards_C_K, keys_C)
        return (
            estimator.fn(rewards_C_K)
            if estimator.scope == "batch"
            else [estimator.fn(rewards_K) for rewards_K in rewards_C_K]
        )

    def _credit_turns(self, advantages_N: Sequence[float]) -> float | Sequence[float]:
        """Return the advantage of all turns of an episode, or that of each."""
        pg = self.settings.policy_gradient
        if pg.step_rewards == "sum":
            return advantages_N[0]
        if pg.step_rewards == "process_supervision":
            return compute_returns_to_go(advantages_N, pg.reward_discount)
        return advantages_N

    def _is_trained_on(self, rewards_K: Sequence[float]) -> bool:
        """Return whether a group is trained on.

        A group is dropped only if the comparison of its members is the only source of gradient and
        all rewards are equal.
        """
        pg = self.settings.policy_gradient
        return (
            not self.estimator.compares_members
            or self.kl.needs_reference
            or pg.entropy_coef > 0
            or has_signal(rewards_K)
        )

    def update(
        self, models: Models, datums: Sequence[Datum], progress: Progress
    ) -> dict[str, float]:
        """Update the policy in a single pass over the prepared datums. Then adapt kl_coef."""
        settings, pg = self.settings, self.settings.policy_gradient
        datums, before = self.prepare_datums(datums, models)
        metrics = train_single_pass(
            models,
            datums,
            settings,
            progress,
            loss=pg.loss,
            config=self.loss_config(),
            normalise=pg.normalise,
        )
        self.adapt_kl()
        return {**metrics, **before, **self._kl_metrics}

    @property
    def loss(self) -> str:
        """Return the name of the loss."""
        return self.settings.policy_gradient.loss

    def prepare_datums(
        self, datums: Sequence[Datum], models: Models
    ) -> tuple[Sequence[Datum], dict[str, float]]:
        """Return (datums as the loss expects them, metrics): corrected and weighted by sequence."""
        settings, pg = self.settings, self.settings.policy_gradient
        if pg.truncated_is is not None:
            datums, before = apply_truncated_is(
                models, datums, pg.truncated_is, settings.sampling.temperature
            )
        else:
            datums, before = correct_by_settings(models, datums, settings)
        if settings.interpolates_proximal:
            datums = add_proximal_weight(datums, models.policy.version)
        if pg.normalise == "sequence_means":
            datums = weight_by_sequence(datums)
        return datums, before

    def loss_config(self) -> dict[str, Any]:
        """Return the config of the loss."""
        settings, pg = self.settings, self.settings.policy_gradient
        config: dict[str, Any] = {"temperature": settings.sampling.temperature}
        for name, key in find_loss_coefficients(pg.loss).items():
            if name != "entropy_coef" or pg.entropy_coef:
                config[key] = getattr(pg, name)
        return config | self.kl_config

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            **{key: memory.state() for key, memory in self._baselines.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        for key, memory in self._baselines.items():
            if key in state:  # otherwise the estimator is newer than the checkpoint
                memory.load_state(state[key])


def group_comparable_rewards(
    rewards_P_G_N: Sequence[Sequence[Sequence[float]]], *, by_turn: bool
) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return the rewards that an estimator compares with each other, as cells (group p, turn,
    members (g, n)).

    With `by_turn`, a cell holds the rewards of a group at the same turn, of the members that have
    that turn; else a cell holds all rewards of a group.
    """
    cells = []
    for p, rewards_G_N in enumerate(rewards_P_G_N):
        entries = [(g, n) for g, steps in enumerate(rewards_G_N) for n in range(len(steps))]
        turns = range(max((n for _, n in entries), default=0) + 1) if by_turn else range(1)
        cells += [
            (p, turn, [(g, n) for g, n in entries if n == turn or not by_turn]) for turn in turns
        ]
    return cells


@dataclass(frozen=True, kw_only=True)
class ReinforceSettings(GrpoSettings):
    """Plain policy gradient: one answer to each problem, compared with a running mean."""

    default_learning_rates = (1e-5, 1e-5)

    policy_gradient: PolicyGradientSettings = PolicyGradientSettings(
        group_size=1, advantage="running_mean", loss="importance_sampling", entropy_coef=0.01
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy_gradient.variant is not None:
            variant = self.policy_gradient.variant
            raise ValueError(
                "variants are settings of grpo, not of reinforce: use train.py grpo --variant "
                f"{variant}, or leave out variant"
            )


class REINFORCE(GRPO):
    """Implement `reinforce` (Williams 1992), with a running-mean baseline and an entropy bonus: GRPO's
    hooks with other settings.
    """

    Settings = ReinforceSettings
    summary = "RL: one answer to each problem, compared with a running mean of rewards"
    variants = {}
