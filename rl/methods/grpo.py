"""GRPO: several answers to each problem, each credited with how much better it is than its group.

Shao et al., arXiv 2402.03300, by default with Dr. GRPO's advantage (centred, not divided by the
standard deviation; arXiv 2503.20783) and no KL term; its variants and REINFORCE are settings of the
same three hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.credit import ADVANTAGES, AdaptiveKL, RewardShaper, has_signal, penalised, returns_to_go
from rl.episodes import Trajectory, TrajectoryGroup, trajectory_to_datums
from rl.judges import FrozenScorer, check_vocabulary
from rl.methods.base import Hosts, Models, Progress
from rl.methods.grpo_settings import VARIANTS, GrpoSettings, coefficients_of
from rl.methods.steps import (
    corrected_datums,
    correction,
    one_pass,
    truncated_importance_sampling,
    weighted_by_sequence,
    with_fields,
    with_proximal_share,
)
from rl.types import Datum


def adaptive_kl(settings: GrpoSettings) -> AdaptiveKL:
    """The price of KL to a reference: off, 0.1 once a reference is named, or as given."""
    kl = settings.kl
    given = kl.kl_coef if kl.kl_coef is not None else 0.0 if kl.reference_model is None else 0.1
    return AdaptiveKL(given, kl.kl_target, kl.kl_rate)


class PolicyGradient:
    """Method class of `grpo` and `reinforce`: its training hooks and the models that a run loads
    for them. Subclasses inherit both.
    """

    online = True
    variants = VARIANTS

    @staticmethod
    def clients(settings: GrpoSettings, hosts: Hosts) -> dict[str, Any]:
        """Make the reference, where there is a price on the KL to it."""
        named = settings.kl.reference_model
        if not adaptive_kl(settings).active:
            return {}
        if named is None:
            return {"reference": hosts.beginning()}
        reference = hosts.load(named)
        check_vocabulary(hosts.policy, reference, f"reference {named}")
        return {"reference": FrozenScorer(reference)}

    @staticmethod
    def keeps_beginning(settings: GrpoSettings) -> bool:
        return adaptive_kl(settings).active and settings.kl.reference_model is None

    @staticmethod
    def weights(settings: GrpoSettings) -> list[str]:
        named = settings.kl.reference_model
        return [] if named is None or not adaptive_kl(settings).active else [named]

    def __init__(self, settings: Any):
        self.settings = settings
        self.group_size: int = settings.policy_gradient.group_size
        self.estimator = ADVANTAGES[settings.policy_gradient.advantage]
        self._memories = {
            one.state_key: one.fn() for one in ADVANTAGES.values() if one.state_key is not None
        }
        self.shaper = RewardShaper(settings.shaping, settings.sampling.max_tokens)
        self.kl = adaptive_kl(settings)
        self._kl_metrics: dict[str, float] = {}  # of the last batch

    def credit(
        self, groups: Sequence[TrajectoryGroup], models: Models, *, at_least_one: bool = True
    ) -> list[Datum]:
        """Advantages over each answer's tokens. Groups without signal are left out; if all are, one
        is kept (`at_least_one`).
        """
        how = self.settings.policy_gradient
        if how.step_rewards == "sum":
            rewards_P_G_N = [
                [[total] for total in totals_G] for totals_G in self.shaper.totals(groups)
            ]
        else:
            rewards_P_G_N = self.shaper.steps(groups)
        if how.step_rewards == "to_go":
            rewards_P_G_N = [
                [returns_to_go(steps, how.reward_discount) for steps in rewards_G_N]
                for rewards_G_N in rewards_P_G_N
            ]
        cells = compared(rewards_P_G_N, by_turn=how.step_rewards == "to_go")
        rewards_C_K = [[rewards_P_G_N[p][g][n] for g, n in members] for p, _, members in cells]
        keys_C = [
            f"{groups[p].tag}/{groups[p].problem_index}" + (f"/turn {turn}" if turn else "")
            for p, turn, _ in cells
        ]
        for (p, _, members), advantages_K in zip(
            cells, self._advantages(rewards_C_K, keys_C), strict=True
        ):
            for (g, n), advantage in zip(members, advantages_K, strict=True):
                rewards_P_G_N[p][g][n] = float(advantage)
        for group, advantages_G_N in zip(groups, rewards_P_G_N, strict=True):
            for trajectory, advantages_N in zip(group.trajectories_G, advantages_G_N, strict=True):
                self._credit(trajectory, advantages_N)
        learnt = {
            p
            for (p, _, _), rewards_K in zip(cells, rewards_C_K, strict=True)
            if self._keeps(rewards_K)
        }
        kept = sorted(learnt) or [0][: int(at_least_one)]
        datums = [
            datum
            for i in kept
            for trajectory in groups[i].trajectories_G
            for datum in trajectory_to_datums(trajectory)
        ]
        return self._held_near_reference(datums, models) if self.kl.active else datums

    def _held_near_reference(self, datums: list[Datum], models: Models) -> list[Datum]:
        """The KL to the reference charged to the advantages, or the reference's logprobs for the
        term in the loss.
        """
        ref_D = models.reference.logprobs(datums, self.settings.sampling.temperature)
        charged, self._kl_metrics = penalised(
            datums, ref_D, self.kl.coefficient, self.settings.policy_gradient.kl_discount
        )
        self._kl_metrics["optim/kl_coef"] = self.kl.coefficient
        if self.settings.kl.kl_placement == "reward":
            return charged
        return [
            with_fields(datum, ref_logprobs=ref_T)
            for datum, ref_T in zip(datums, ref_D, strict=True)
        ]

    def _advantages(
        self, rewards_C_K: Sequence[Sequence[float]], keys_C: Sequence[str]
    ) -> Sequence[Any]:
        """Return an advantage for each reward; C cells of K rewards that are compared with each
        other.
        """
        estimator = self.estimator
        if estimator.state_key is not None:
            return self._memories[estimator.state_key](rewards_C_K, keys_C)
        return (
            estimator.fn(rewards_C_K)
            if estimator.scope == "batch"
            else [estimator.fn(rewards_K) for rewards_K in rewards_C_K]
        )

    def _credit(self, trajectory: Trajectory, advantages_N: Sequence[float]) -> None:
        pg = self.settings.policy_gradient
        if pg.step_rewards == "sum":
            (trajectory.advantage,) = advantages_N
            return
        process = pg.step_rewards == "process_supervision"
        trajectory.advantages_N = (
            returns_to_go(advantages_N, pg.reward_discount) if process else list(advantages_N)
        )
        trajectory.advantage = trajectory.advantages_N[0]

    def _keeps(self, rewards_K: Sequence[float]) -> bool:
        """Whether a group is trained on: all are, unless nothing but its members against each other
        makes a gradient.
        """
        pg = self.settings.policy_gradient
        return (
            not self.estimator.compares_members
            or self.kl.active
            or pg.entropy_coef > 0
            or has_signal(rewards_K)
        )

    def learn(
        self, models: Models, datums: Sequence[Datum], progress: Progress
    ) -> dict[str, float]:
        settings, pg = self.settings, self.settings.policy_gradient
        datums, before = self.prepared(datums, models)
        metrics = one_pass(
            models,
            datums,
            loss=pg.loss,
            config=self.loss_config(),
            normalise=pg.normalise,
            optim=settings.optim,
            loop=settings.loop,
            progress=progress,
            peak=settings.learning_rate,
            max_tokens=settings.sampling.max_tokens,
        )
        if "optim/kl_ref_k3" in self._kl_metrics:
            self.kl.update(self._kl_metrics["optim/kl_ref_k3"])
        return {**metrics, **before, **self.shaper.metrics, **self._kl_metrics}

    @property
    def loss(self) -> str:
        return self.settings.policy_gradient.loss

    def prepared(
        self, datums: Sequence[Datum], models: Models
    ) -> tuple[Sequence[Datum], dict[str, float]]:
        """Credited datums as the loss takes them: corrected, weighed by their sequence; and what
        was measured on the way.
        """
        settings, pg = self.settings, self.settings.policy_gradient
        before: dict[str, float] = {}
        if pg.truncated_is is not None:
            datums, before = truncated_importance_sampling(
                models, datums, pg.truncated_is, settings.sampling.temperature
            )
        elif (how := settings.correction).active:
            datums, before = corrected_datums(
                models,
                datums,
                correction(how),
                against_learner=how.against_learner,
                temperature=settings.sampling.temperature,
            )
        if settings.interpolates:
            datums = with_proximal_share(datums, models.policy.version)
        if pg.normalise == "sequence_means":
            datums = weighted_by_sequence(datums)
        return datums, before

    def loss_config(self) -> dict[str, Any]:
        settings, pg = self.settings, self.settings.policy_gradient
        config: dict[str, Any] = {"temperature": settings.sampling.temperature}
        for name, key in coefficients_of(pg.loss).items():
            if name != "entropy_coef" or pg.entropy_coef:
                config[key] = getattr(pg, name)
        if self.kl.active and settings.kl.kl_placement == "loss":
            config |= {"kl_coef": self.kl.coefficient, "kl_kind": settings.kl.kl_kind}
        return config

    def state(self) -> dict[str, Any]:
        return {
            **{key: memory.state() for key, memory in self._memories.items()},
            "reward_statistics": self.shaper.state(),
            "kl_coef": self.kl.coefficient,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        for key, memory in self._memories.items():
            if key in state:  # else the estimator is newer than the checkpoint
                memory.load_state(state[key])
        self.shaper.load_state(state["reward_statistics"])
        self.kl.coefficient = state["kl_coef"]


def compared(
    rewards_P_G_N: Sequence[Sequence[Sequence[float]]], *, by_turn: bool
) -> list[tuple[int, int, list[tuple[int, int]]]]:
    """Return which rewards an estimator compares with each other, as cells (group p, turn, members
    (g, n)).

    `by_turn`: those of a group at the same turn, of the members that have one; else all rewards of
    a group are one cell.
    """
    cells = []
    for p, rewards_G_N in enumerate(rewards_P_G_N):
        every = [(g, n) for g, steps in enumerate(rewards_G_N) for n in range(len(steps))]
        turns = range(max((n for _, n in every), default=0) + 1) if by_turn else range(1)
        cells += [
            (p, turn, [(g, n) for g, n in every if n == turn or not by_turn]) for turn in turns
        ]
    return cells
