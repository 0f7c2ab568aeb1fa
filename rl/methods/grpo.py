"""GRPO: several answers to each problem, each credited with how much better it is than its group.

Shao et al., arXiv 2402.03300, by default with Dr. GRPO's advantage (centred, not divided by the standard deviation;
arXiv 2503.20783) and no KL term; its variants and REINFORCE are settings of the same three hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.credit import OVER_BATCH, WITHIN_GROUP, AdaptiveKL, PerProblemMean, RewardShaper, RunningMean, has_signal, penalised, returns_to_go
from rl.episodes import Trajectory, TrajectoryGroup, trajectory_to_datums
from rl.judges import FrozenScorer, check_vocabulary
from rl.methods.base import Hosts, Models, Progress
from rl.methods.grpo_settings import COMPARING, VARIANTS, GrpoSettings
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
    """The hooks of `grpo` and `reinforce`, and what a run prepares for them; a class derived from it inherits both."""

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
        self.baseline = RunningMean()
        self.per_problem = PerProblemMean()
        self.shaper = RewardShaper(settings.shaping, settings.sampling.max_tokens)
        self.kl = adaptive_kl(settings)
        self._kl_metrics: dict[str, float] = {}  # of the last batch

    def credit(self, groups: Sequence[TrajectoryGroup], models: Models, *, at_least_one: bool = True) -> list[Datum]:
        """Advantages over each answer's tokens. Groups without signal are left out; if all are, one is kept (`at_least_one`)."""
        to_go = self.settings.policy_gradient.step_rewards == "to_go"
        rewards_P_G_N = self.shaper.steps(groups) if to_go else [[[r] for r in totals_G] for totals_G in self.shaper.totals(groups)]
        rewards_P_K = [[r for steps in rewards_G_N for r in steps] for rewards_G_N in rewards_P_G_N]
        advantages_P_K = self._advantages(rewards_P_K, [f"{group.tag}/{group.problem_index}" for group in groups])
        for group, rewards_G_N, advantages_K in zip(groups, rewards_P_G_N, advantages_P_K, strict=True):
            left = iter(float(a) for a in advantages_K)
            for trajectory, steps in zip(group.trajectories_G, rewards_G_N, strict=True):
                self._credit(trajectory, [next(left) for _ in steps])
        kept = [i for i, rewards_K in enumerate(rewards_P_K) if self._keeps(rewards_K)] or [0][: int(at_least_one)]
        datums = [datum for i in kept for trajectory in groups[i].trajectories_G for datum in trajectory_to_datums(trajectory)]
        return self._held_near_reference(datums, models) if self.kl.active else datums

    def _held_near_reference(self, datums: list[Datum], models: Models) -> list[Datum]:
        """The KL to the reference charged to the advantages, or the reference's logprobs for the term in the loss."""
        ref_D = models.reference.logprobs(datums, self.settings.sampling.temperature)
        charged, self._kl_metrics = penalised(datums, ref_D, self.kl.coefficient, self.settings.policy_gradient.kl_discount)
        self._kl_metrics["optim/kl_coef"] = self.kl.coefficient
        if self.settings.kl.kl_in == "reward":
            return charged
        return [with_fields(datum, ref_logprobs=ref_T) for datum, ref_T in zip(datums, ref_D, strict=True)]

    def _advantages(self, rewards_P_K: Sequence[Sequence[float]], keys_P: Sequence[str]) -> Sequence[Any]:
        """An advantage for each reward, whichever baseline is asked for."""
        kind = self.settings.policy_gradient.advantage
        if kind == "running_mean":
            return self.baseline(rewards_P_K)
        if kind == "per_problem":
            return self.per_problem(rewards_P_K, keys_P)
        if kind in OVER_BATCH:
            return OVER_BATCH[kind](rewards_P_K)
        return [WITHIN_GROUP[kind](rewards_K) for rewards_K in rewards_P_K]

    def _credit(self, trajectory: Trajectory, advantages: Sequence[float]) -> None:
        pg = self.settings.policy_gradient
        if pg.step_rewards == "sum":
            (trajectory.advantage,) = advantages
            return
        trajectory.advantages_N = returns_to_go(advantages, pg.reward_discount)
        trajectory.advantage = trajectory.advantages_N[0]

    def _keeps(self, rewards_K: Sequence[float]) -> bool:
        """Whether a group is trained on: all are, unless nothing but its members against each other makes a gradient."""
        pg = self.settings.policy_gradient
        return pg.advantage not in COMPARING or self.kl.active or pg.entropy_coef > 0 or has_signal(rewards_K)

    def learn(self, models: Models, datums: Sequence[Datum], progress: Progress) -> dict[str, float]:
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
        if self._kl_metrics:
            self.kl.update(self._kl_metrics["optim/kl_ref_k3"])
        return {**metrics, **before, **self.shaper.metrics, **self._kl_metrics}

    @property
    def loss(self) -> str:
        return self.settings.policy_gradient.loss

    def prepared(self, datums: Sequence[Datum], models: Models) -> tuple[Sequence[Datum], dict[str, float]]:
        """Credited datums as the loss takes them: corrected, weighed by their sequence; and what was measured on the way."""
        settings, pg = self.settings, self.settings.policy_gradient
        before: dict[str, float] = {}
        if pg.truncated_is is not None:
            datums, before = truncated_importance_sampling(models, datums, pg.truncated_is, settings.sampling.temperature)
        elif (how := settings.correction).active:
            datums, before = corrected_datums(
                models, datums, correction(how), against_learner=how.against_learner, temperature=settings.sampling.temperature
            )
        if settings.interpolates:
            datums = with_proximal_share(datums, models.policy.version)
        if pg.normalise == "sequence_means":
            datums = weighted_by_sequence(datums)
        return datums, before

    def loss_config(self) -> dict[str, Any]:
        settings, pg = self.settings, self.settings.policy_gradient
        config: dict[str, Any] = {"temperature": settings.sampling.temperature}
        if pg.loss != "importance_sampling":
            config |= {"clip_low_threshold": pg.clip_low, "clip_high_threshold": pg.clip_high}
        if pg.entropy_coef:
            config["entropy_coef"] = pg.entropy_coef
        if self.kl.active and settings.kl.kl_in == "loss":
            config |= {"kl_coef": self.kl.coefficient, "kl_kind": settings.kl.kl_kind}
        return config

    def state(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline.value,
            "per_problem": {"values": self.per_problem.values, "overall": self.per_problem.overall.value},
            "reward_statistics": self.shaper.state(),
            "kl_coef": self.kl.coefficient,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.baseline.value = state["baseline"]
        self.per_problem.values = dict(state["per_problem"]["values"])
        self.per_problem.overall.value = state["per_problem"]["overall"]
        self.shaper.load_state(state["reward_statistics"])
        self.kl.coefficient = state["kl_coef"]
