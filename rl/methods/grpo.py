"""GRPO: several answers to each problem, each credited with how much better it is than its group.

Shao et al., arXiv 2402.03300, by default with Dr. GRPO's advantage (centred, not divided by the standard deviation;
arXiv 2503.20783) and no KL term; its variants and REINFORCE are settings of the same three hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from rl.advantages import OVER_BATCH, WITHIN_GROUP, PerProblemMean, RunningMean, has_signal, returns_to_go
from rl.datums import trajectory_to_datums
from rl.episodes import Trajectory, TrajectoryGroup
from rl.errors import UserError
from rl.fields import SettingsError, unflatten
from rl.kl import AdaptiveKL, penalised
from rl.methods.base import (
    Hosts,
    Models,
    Progress,
    one_pass,
    truncated_importance_sampling,
    weighted_by_sequence,
    with_fields,
)
from rl.scoring import FrozenScorer, check_vocabulary
from rl.setting_checks import only_with
from rl.settings import (
    DataSettings,
    KlSettings,
    LearnedRewardSettings,
    LoopSettings,
    ModelSettings,
    OptimSettings,
    SamplingSettings,
    ShapingSettings,
)
from rl.shaping import RewardShaper
from rl.types import Datum

# Flat settings of each variant; what is given on the line or in a recipe wins over them.
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "mean_std", "normalise": "sequence_means"},
    "dr_grpo": {"advantage": "mean", "normalise": "constant"},
    "dapo": {"advantage": "mean_std", "clip_high": 1.28, "normalise": "tokens", "overlong_share": 0.2, "dynamic_sampling": 10},
    "gspo": {"advantage": "mean_std", "loss": "gspo", "clip_low": 1 - 3e-4, "clip_high": 1 + 4e-4, "normalise": "sequence_means"},
    "cispo": {"advantage": "mean_std", "loss": "cispo", "clip_low": 0.0, "clip_high": 5.0, "normalise": "tokens"},
    "rloo": {"advantage": "leave_one_out", "loss": "importance_sampling", "normalise": "sequences"},
    "reinforce_plus_plus": {"advantage": "batch", "group_size": 1, "normalise": "tokens"},
    "reinforce_plus_plus_baseline": {"advantage": "mean_batch_std", "normalise": "tokens"},
}
_WITHIN = ("mean", "mean_std", "leave_one_out", "mean_batch_std")  # advantages that compare the members of a group


@dataclass(frozen=True, kw_only=True)
class PolicyGradientSettings:
    """How rewards become gradients."""

    variant: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"] | None = None
    """A published set of settings; any that you give wins over it. grpo: arXiv 2402.03300, token means within each answer. dr_grpo: 2503.20783, no std, constant length. dapo: 2503.14476, higher upper clip, token mean, overlong penalty, dynamic sampling. gspo: 2507.18071, one ratio a sequence. cispo: 2506.13585, clipped weights (bounds of 2510.13786). rloo: 2402.14740, leave one out. reinforce_plus_plus: 2501.03262, one answer, normalised over the batch; _baseline: the group's mean first."""
    group_size: int = 8
    """Answers sampled for each problem."""
    advantage: Literal["mean", "mean_std", "leave_one_out", "mean_batch_std", "batch", "running_mean", "per_problem", "none"] = "mean"
    """Reward minus: the group's mean (Dr. GRPO); that, divided by the group's std (GRPO); the mean of the others (RLOO); the group's mean, divided by the batch's std (REINFORCE++-baseline); the batch's mean, divided by its std (REINFORCE++); a running mean over batches (REINFORCE); the problem's own running mean; nothing."""
    step_rewards: Literal["sum", "to_go"] = "sum"
    """Of episodes with several turns: credit each turn with the episode's total, or with the rewards from it on (process supervision, arXiv 2402.03300, section 4.1.3)."""
    reward_discount: float = 1.0
    """to_go: rewards k turns later count this to the power of k."""
    loss: Literal["ppo", "importance_sampling", "cispo", "gspo"] = "ppo"
    """Loss on the tokens of an answer."""
    clip_low: float = 0.8
    """Ratios below this earn no gradient where the advantage is negative (ppo, gspo; cispo: weights are cut off there). A ratio, not an epsilon."""
    clip_high: float = 1.2
    """Ratios above this earn no gradient where the advantage is positive (ppo, gspo; cispo: weights are cut off there)."""
    normalise: Literal["tokens", "sequences", "sequence_means", "constant", "sum"] = "tokens"
    """The summed loss is divided by the optimizer step's action tokens; its sequences; each sequence's tokens, then the sequences (GRPO); its sequences times max_tokens (Dr. GRPO); or nothing."""
    truncated_is: float | None = None
    """Weigh each token by min(this, learner's / sampler's probability) before the step, and take ratios against the learner (truncated importance sampling, Yao et al. 2025, such as 2): for a sampler of lower precision, or several substeps. One more forward."""

    entropy_coef: float = 0.0
    """Bonus for the policy's entropy at each token, such as 0.01: keeps it exploring."""
    kl_discount: float = 1.0
    """kl_in reward: a token is charged for the KL of those k later times this to the power of k; 1: all of the answer's rest, 0: its own alone."""

    def __new__(cls, **given: Any) -> Self:
        """Raises ValueError for a variant without its settings: some belong to other sections, so naming it here would not be enough."""
        if (variant := given.get("variant")) is not None:
            missing = [key for key in _variant(variant) if key in cls.__dataclass_fields__ and key not in given]
            if missing:
                raise ValueError(
                    f"variant {variant!r} names settings that are not given here: {', '.join(missing)}. All of its settings, those "
                    f"of other sections included, come from rl.methods.grpo.variant_settings({variant!r}, ...)"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size is at least 1, got {self.group_size}")
        if self.group_size == 1 and self.advantage in _WITHIN:
            raise ValueError(
                f"a group of one has no one to be compared with: advantage {self.advantage!r} is always 0. "
                "Set group_size to 2 or more, or advantage to running_mean"
            )
        if not 0 <= self.clip_low <= 1 <= self.clip_high:
            raise ValueError(f"clip_low <= 1 <= clip_high are ratios, such as 0.8 and 1.2; got {self.clip_low} and {self.clip_high}")
        for name in ("reward_discount", "kl_discount"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} lies from 0 to 1, got {getattr(self, name)}")
        if not self.entropy_coef >= 0:
            raise ValueError(f"entropy_coef is at least 0, got {self.entropy_coef}")
        if self.truncated_is is not None and not self.truncated_is > 0:
            raise ValueError(f"truncated_is is a positive cap, such as 2; got {self.truncated_is}")
        clips = self.loss != "importance_sampling"
        only_with(self, ("clip_low", "clip_high"), clips, f"loss {self.loss} does not clip", "set loss to ppo, cispo or gspo")
        only_with(self, ("reward_discount",), self.step_rewards == "to_go", "step_rewards is sum", "set step_rewards to to_go")


@dataclass(frozen=True, kw_only=True)
class GrpoSettings:
    """Group-relative policy optimization: sample a group for each problem, credit each answer against its group."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    shaping: ShapingSettings = field(default_factory=ShapingSettings)
    policy_gradient: PolicyGradientSettings = field(default_factory=PolicyGradientSettings)
    kl: KlSettings = field(default_factory=KlSettings)
    learned: LearnedRewardSettings = field(default_factory=LearnedRewardSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)

    def __post_init__(self) -> None:
        if self.loop.batch_size % self.optim.num_substeps:
            raise ValueError(f"batch_size {self.loop.batch_size} is no multiple of num_substeps {self.optim.num_substeps}")
        if self.learned.comparison_model is not None and self.policy_gradient.group_size == 1:
            raise ValueError("comparison_model compares the answers of a group with each other: set group_size to 2 or more")
        if self.sampling.dynamic_sampling and self.policy_gradient.group_size == 1:
            raise ValueError("dynamic_sampling looks for groups whose answers differ in reward: set group_size to 2 or more, or leave it out")
        only_with(self.policy_gradient, ("kl_discount",), self.kl.kl_in == "reward", "kl_in is loss", "set kl_in to reward")

    @property
    def learning_rate(self) -> float:
        given = self.optim.learning_rate
        return given if given is not None else (4e-5 if self.model.lora_rank else 1e-6)


def variant_settings(variant: str, **given: Any) -> GrpoSettings:
    """What `train.py grpo --variant ...` stands for: a published variant's settings, and over them any setting by its flat name.

    `variant_settings("dapo", max_tokens=512)`. Raises UserError for a variant or a setting that does not exist or fit.
    """
    problems: list[str] = []
    settings = unflatten(GrpoSettings, {"variant": variant, **_variant(variant), **given}, problems, "variant_settings")
    if problems:
        raise SettingsError(problems)
    return settings


def _variant(name: str) -> dict[str, Any]:
    if name not in VARIANTS:
        raise UserError(f"there is no variant {name!r}: one of {', '.join(VARIANTS)}")
    return VARIANTS[name]


def adaptive_kl(settings: GrpoSettings) -> AdaptiveKL:
    """The price of KL to a reference: off, 0.1 once a reference is named, or as given."""
    kl = settings.kl
    given = kl.kl_coef if kl.kl_coef is not None else 0.0 if kl.reference_model is None else 0.1
    return AdaptiveKL(given, kl.kl_target, kl.kl_rate)


def clients(settings: GrpoSettings, hosts: Hosts) -> dict[str, Any]:
    """The reference, where there is a price on the KL to it, and the model that rewards, where one does."""
    return {**_reference(settings, hosts), **hosts.rewards(settings.learned)}


def _reference(settings: GrpoSettings, hosts: Hosts) -> dict[str, Any]:
    named = settings.kl.reference_model
    if not adaptive_kl(settings).active:
        return {}
    if named is None:
        return {"reference": hosts.beginning()}
    reference = hosts.load(named)
    check_vocabulary(hosts.policy, reference, f"reference {named}")
    return {"reference": FrozenScorer(reference)}


def keeps_beginning(settings: GrpoSettings) -> bool:
    return adaptive_kl(settings).active and settings.kl.reference_model is None


def weights(settings: GrpoSettings) -> list[str]:
    named = settings.kl.reference_model
    return [*([] if named is None or not adaptive_kl(settings).active else [named]), *settings.learned.named]


class PolicyGradient:
    """The hooks of `grpo` and `reinforce`."""

    online = True

    def __init__(self, settings: Any):
        self.settings = settings
        self.group_size: int = settings.policy_gradient.group_size
        self.baseline = RunningMean()
        self.per_problem = PerProblemMean()
        self.shaper = RewardShaper(settings.shaping, settings.sampling.max_tokens)
        self.kl = adaptive_kl(settings)
        self._kl_metrics: dict[str, float] = {}  # of the last batch

    def credit(self, groups: Sequence[TrajectoryGroup], models: Models) -> list[Datum]:
        """Advantages over each answer's tokens. Groups without signal are left out; if all are, one is kept."""
        to_go = self.settings.policy_gradient.step_rewards == "to_go"
        rewards_P_G_N = self.shaper.steps(groups) if to_go else [[[r] for r in totals_G] for totals_G in self.shaper.totals(groups)]
        rewards_P_K = [[r for steps in rewards_G_N for r in steps] for rewards_G_N in rewards_P_G_N]
        advantages_P_K = self._advantages(rewards_P_K, [f"{group.tag}/{group.problem_index}" for group in groups])
        for group, rewards_G_N, advantages_K in zip(groups, rewards_P_G_N, advantages_P_K, strict=True):
            left = iter(float(a) for a in advantages_K)
            for trajectory, steps in zip(group.trajectories_G, rewards_G_N, strict=True):
                self._credit(trajectory, [next(left) for _ in steps])
        kept = [i for i, rewards_K in enumerate(rewards_P_K) if self._keeps(rewards_K)] or [0]
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
        return pg.advantage not in _WITHIN or self.kl.active or pg.entropy_coef > 0 or has_signal(rewards_K)

    def learn(self, models: Models, datums: Sequence[Datum], progress: Progress) -> dict[str, float]:
        settings = self.settings
        pg = settings.policy_gradient
        config = self._loss_config()
        before: dict[str, float] = {}
        if pg.truncated_is is not None:
            datums, before = truncated_importance_sampling(models, datums, pg.truncated_is, settings.sampling.temperature)
        if pg.normalise == "sequence_means":
            datums = weighted_by_sequence(datums)
        metrics = one_pass(
            models,
            datums,
            loss=pg.loss,
            config=config,
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

    def _loss_config(self) -> dict[str, Any]:
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
