"""Implement GRPO: sample several answers to each problem and compare each answer's reward with its
group's.

Shao et al., arXiv 2402.03300, by default with Dr. GRPO's advantage (centered, not divided by the
standard deviation; arXiv 2503.20783) and no KL term. Its variants and REINFORCE are settings of the
same three hooks; the published variants are sets of settings. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from rl.algorithms.advantages import (
    ADVANTAGES,
    apply_kl_penalty,
    compute_returns_to_go,
    has_signal,
)
from rl.algorithms.method_interface import Models, OnlineSettings, Progress, ReferenceMethod
from rl.algorithms.update import (
    add_loss_field,
    add_proximal_weight,
    apply_truncated_is,
    correct_by_settings,
    train_single_pass,
    weight_by_sequence,
)
from rl.config import (
    AsyncRolloutSettings,
    CorrectionSettings,
    KlSettings,
    Range,
    SettingsError,
    Share,
    Weight,
    check_comparison_groups,
    check_ranges,
    require,
    unflatten_settings,
)
from rl.errors import UserError
from rl.rollout import Metrics, TrajectoryGroup, record_advantages, trajectory_to_datums
from rl.types import Datum

# Flat settings of each variant; settings of the command line or a recipe override them.
VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {"advantage": "mean_std", "normalise": "sequence_means"},
    "dr_grpo": {"advantage": "mean", "normalise": "constant"},
    "dapo": {
        "advantage": "mean_std",
        "clip_high": 1.28,
        "normalise": "tokens",
        "overlong_share": 0.2,
        "dynamic_sampling": 10,
    },
    "gspo": {
        "advantage": "mean_std",
        "loss": "gspo",
        "clip_low": 1 - 3e-4,
        "clip_high": 1 + 4e-4,
        "normalise": "sequence_means",
    },
    "cispo": {
        "advantage": "mean_std",
        "loss": "cispo",
        "clip_low": 0.0,
        "clip_high": 5.0,
        "normalise": "tokens",
    },
    "rloo": {"advantage": "leave_one_out", "loss": "importance_sampling", "normalise": "sequences"},
    "reinforce_plus_plus": {"advantage": "batch", "group_size": 1, "normalise": "tokens"},
    "reinforce_plus_plus_baseline": {"advantage": "mean_batch_std", "normalise": "tokens"},
}
# settings that a loss may read, mapped to the keys of its config
COEFFICIENT_KEYS = {
    "clip_low": "clip_low_threshold",
    "clip_high": "clip_high_threshold",
    "entropy_coef": "entropy_coef",
}
_CLIPPED = ("clip_low", "clip_high", "entropy_coef")


@dataclass(frozen=True)
class PolicyLoss:
    """Describe a built-in loss as far as settings need it, without torch.

    coefficients           the settings that it reads
    interpolates_proximal  whether off-policy tokens are by default compared with an interpolated
                           proximal policy (measured)
    """

    coefficients: tuple[str, ...] = ("entropy_coef",)
    interpolates_proximal: bool = False


# the values of the setting `loss`; each is an entry of rl.losses.LOSSES
POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(_CLIPPED, interpolates_proximal=True),
    "importance_sampling": PolicyLoss(),
    "cispo": PolicyLoss(_CLIPPED),
    "gspo": PolicyLoss(_CLIPPED),
}
if TYPE_CHECKING:
    Advantage = str
    Loss = str
    Variant = str
else:
    # the names of the tables, read by the command line
    Advantage = Literal[tuple(ADVANTAGES)]
    Loss = Literal[tuple(POLICY_LOSSES)]
    Variant = Literal[tuple(VARIANTS)]


@dataclass(frozen=True, kw_only=True)
class PolicyGradientSettings:
    """Configure the way rewards become gradients."""

    variant: Variant | None = None
    """A published set of settings; explicit settings override it. grpo: arXiv 2402.03300, token means within each answer. dr_grpo: 2503.20783, no std, constant length. dapo: 2503.14476, higher upper clip, token mean, overlong penalty, dynamic sampling. gspo: 2507.18071, one ratio per sequence. cispo: 2506.13585, clipped weights (bounds of 2510.13786). rloo: 2402.14740, leave-one-out baseline. reinforce_plus_plus: 2501.03262, one answer, normalized over the batch; _baseline: the group's mean first."""
    group_size: Annotated[int, Range(1, 10**6)] = 8
    """Answers sampled for each problem."""
    advantage: Advantage = "mean"
    """What is subtracted from a reward. mean: the group's mean (Dr. GRPO). mean_std: the same, divided by the group's std (GRPO). leave_one_out: the mean of the others (RLOO). mean_batch_std: the group's mean, divided by the batch's std (REINFORCE++-baseline). batch: the batch's mean, divided by its std (REINFORCE++). running_mean: a running mean over batches (REINFORCE). per_problem: the problem's running mean. none: nothing."""
    step_rewards: Literal["sum", "to_go", "process_supervision"] = "sum"
    """For episodes with several turns. sum: every turn gets the episode's total reward. to_go: each turn gets the rewards from that turn on, compared with those of the group at the same turn. process_supervision: compare every reward with all rewards of the group, then sum from each turn on (arXiv 2402.03300, section 4.1.3); if numbers of turns differ, episodes with equal totals then get different advantages."""
    reward_discount: Share = 1.0
    """to_go, process_supervision: rewards k turns later are multiplied by this to the power of k."""
    loss: Loss = "ppo"
    """Loss on the tokens of an answer."""
    clip_low: Annotated[float, Range(0, 1, why="a ratio, not an epsilon: such as 0.8")] = 0.8
    """Ratios below this have no gradient if the advantage is negative (ppo, gspo; cispo: weights are clipped to it). A ratio, not an epsilon."""
    clip_high: Annotated[float, Range(1, 1e9, why="a ratio, not an epsilon: such as 1.2")] = 1.2
    """Ratios above this have no gradient if the advantage is positive (ppo, gspo; cispo: weights are clipped to it)."""
    normalise: Literal["tokens", "sequences", "sequence_means", "constant", "sum"] = "tokens"
    """The summed loss is divided by: the optimizer step's action tokens; its sequences; each sequence's tokens, then the sequences (GRPO); its sequences times max_tokens (Dr. GRPO); or nothing."""
    truncated_is: Annotated[float | None, Range(0, 1e6, above=True, why="a cap, such as 2")] = None
    """Weight each token by min(this, learner's / sampler's probability) before the step, and take ratios against the learner (truncated importance sampling, Yao et al. 2025, such as 2): for a sampler of lower precision, or several substeps. Short for correction truncate with this as correction_high."""

    entropy_coef: Weight = 0.0
    """Bonus for the policy's entropy at each token, such as 0.01: keeps the policy exploring."""
    kl_discount: Share = 1.0
    """kl_placement reward: a token is charged for the KL of the tokens k positions later times this to the power of k; 1: the whole rest of the answer, 0: only the token itself."""

    def __new__(cls, **kwargs: Any) -> Self:
        """Create the settings.

        Raises ValueError for a variant without its settings: some of them belong to other sections,
        so naming the variant here would not be enough.
        """
        if (variant := kwargs.get("variant")) is not None:
            missing = [
                key
                for key in _get_variant(variant)
                if key in cls.__dataclass_fields__ and key not in kwargs
            ]
            if missing:
                raise ValueError(
                    f"variant {variant!r} requires settings that were not passed: {', '.join(missing)}. All of its settings, those "
                    f"of other sections included, come from rl.algorithms.grpo.variant_settings({variant!r}, ...)"
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.advantage not in ADVANTAGES:
            raise ValueError(
                f"unknown advantage {self.advantage!r}: expected {', '.join(ADVANTAGES)}"
            )
        if self.group_size == 1 and ADVANTAGES[self.advantage].compares_members:
            raise ValueError(
                f"a group of 1 answer has no other answers to compare with: advantage {self.advantage!r} is always 0. "
                "Set group_size to 2 or more, or advantage to running_mean"
            )
        for name in COEFFICIENT_KEYS:
            *others, last = [k for k, loss in POLICY_LOSSES.items() if name in loss.coefficients]
            require(
                self,
                (name,),
                name in find_loss_coefficients(self.loss),
                f"loss {self.loss} does not read it",
                f"set loss to {', '.join(others)}{' or ' if others else ''}{last}",
            )
        require(
            self,
            ("reward_discount",),
            self.step_rewards != "sum",
            "step_rewards is sum",
            "set step_rewards to to_go",
        )


def find_loss_coefficients(loss: str) -> dict[str, str]:
    """Return the settings that the loss reads, mapped to the keys of its config.

    A built-in loss is looked up here, without torch. Any other loss declares its keys in its entry
    of `rl.losses.LOSSES`. Raises BadRequestError for a loss without an entry.
    """
    if loss in POLICY_LOSSES:
        return {name: COEFFICIENT_KEYS[name] for name in POLICY_LOSSES[loss].coefficients}
    from rl.losses import get_loss  # registering the loss has already imported torch

    known = get_loss(loss).known_config
    return {name: key for name, key in COEFFICIENT_KEYS.items() if key in known}


@dataclass(frozen=True, kw_only=True)
class GrpoSettings(OnlineSettings):
    """Group-relative policy optimization: sample a group of answers to each problem and compare
    each answer with its group.
    """

    policy_gradient: PolicyGradientSettings = PolicyGradientSettings()
    correction: CorrectionSettings = CorrectionSettings()
    kl: KlSettings = KlSettings()
    flow: AsyncRolloutSettings = AsyncRolloutSettings()

    def __post_init__(self) -> None:
        check_flow_settings(self)
        super().__post_init__()
        check_comparison_groups(self, self.policy_gradient.group_size)
        if self.sampling.dynamic_sampling and self.policy_gradient.group_size == 1:
            raise ValueError(
                "dynamic_sampling selects groups with different rewards: set group_size to 2 or more, or leave out dynamic_sampling"
            )
        if self.policy_gradient.truncated_is is not None and (
            self.correction.active or self.correction.proximal == "interpolated"
        ):
            raise ValueError(
                "truncated_is is correction truncate with that correction_high: set either of the two, and no proximal"
            )
        if self.correction.proximal == "interpolated" and not self.flow.max_steps_off_policy:
            raise ValueError(
                "proximal interpolated uses the age of tokens, which is 0 unless max_steps_off_policy is above 0: set max_steps_off_policy"
            )
        require(
            self.policy_gradient,
            ("kl_discount",),
            self.kl.kl_placement == "reward",
            "kl_placement is loss",
            "set kl_placement to reward",
        )

    @property
    def interpolates_proximal(self) -> bool:
        """Return whether ratios are taken against the proximal policy interpolated by the age of
        tokens; by default if the loss says so and tokens may be off-policy.
        """
        options, pg = self.correction, self.policy_gradient
        if options.proximal is not None:
            return options.proximal == "interpolated"
        uncorrected = pg.truncated_is is None and options.correction == "none"
        loss = POLICY_LOSSES.get(pg.loss, PolicyLoss())
        return self.flow.max_steps_off_policy > 0 and uncorrected and loss.interpolates_proximal


def check_flow_settings(settings: GrpoSettings) -> None:
    """Raise ValueError if the settings of the flow contradict other settings."""
    flow, pg, parts = settings.flow, settings.policy_gradient, settings.flow.stream_minibatches
    off_policy = flow.max_steps_off_policy > 0
    sequential = {
        "num_substeps": settings.optim.num_substeps > 1,
        "dynamic_sampling": settings.sampling.dynamic_sampling > 0,
    }
    if parts > 1:
        if ADVANTAGES[pg.advantage].scope == "batch":
            within = [name for name, estimator in ADVANTAGES.items() if estimator.scope == "group"]
            raise ValueError(
                f"advantage {pg.advantage} compares the answers of the whole batch, but stream_minibatches {parts} trains before all have "
                f"arrived: set advantage to an estimator within a group ({', '.join(within)}), or stream_minibatches to 1"
            )
        for name, enabled in {
            **sequential,
            "normalise_rewards": settings.shaping.normalise_rewards,
            "max_steps_off_policy": off_policy,
            "kl_coef": settings.kl.kl_coef or settings.kl.kl_target or settings.kl.reference_model,
        }.items():
            if enabled:
                raise ValueError(
                    f"{name} needs the whole batch before its update, but stream_minibatches {parts} starts earlier: leave out either"
                )
        if parts > settings.loop.batch_size:
            raise ValueError(
                f"stream_minibatches {parts} is larger than batch_size {settings.loop.batch_size}: lower it or raise batch_size"
            )
    if off_policy:
        for name, enabled in {
            **sequential,
            "curriculum": settings.data.curriculum != "off",
        }.items():
            if enabled:
                raise ValueError(
                    f"{name} requires batches that are sampled sequentially: leave it out, or leave out max_steps_off_policy"
                )


def variant_settings(variant: str, **overrides: Any) -> GrpoSettings:
    """Return the settings of `train.py grpo --variant ...`: a published variant's settings,
    overridden by any setting by its flat name.

    `variant_settings("dapo", max_tokens=512)`. Raises UserError for an unknown variant, or for a
    setting that is unknown or invalid.
    """
    problems: list[str] = []
    settings = unflatten_settings(
        GrpoSettings,
        {"variant": variant, **_get_variant(variant), **overrides},
        problems,
        "variant_settings",
    )
    if problems:
        raise SettingsError(problems)
    return settings


def _get_variant(name: str) -> dict[str, Any]:
    """Return the flat settings of a variant. Raises UserError if it is unknown."""
    if name not in VARIANTS:
        raise UserError(f"unknown variant {name!r}: expected {', '.join(VARIANTS)}")
    return VARIANTS[name]


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
        inherited = all(getattr(type(self), name) is getattr(GRPO, name) for name in hooks)
        return inherited and self.estimator.scope == "group"

    def compute_advantages(
        self, groups: Sequence[TrajectoryGroup], models: Models, *, keep_first: bool = True
    ) -> list[Datum]:
        """Return datums with advantages over each answer's tokens.

        Groups without signal are dropped. If no group has signal, the first group is kept by
        default.
        """
        options = self.settings.policy_gradient
        kind, discount = options.step_rewards, options.reward_discount
        rewards_P_G_N = [group.get_step_rewards() for group in groups]
        if kind == "sum":
            rewards_P_G_N = [[[sum(steps)] for steps in group] for group in rewards_P_G_N]
        elif kind == "to_go":
            rewards_P_G_N = _sum_to_go(rewards_P_G_N, discount)
        problems_P = [f"{group.tag}/{group.problem_index}" for group in groups]
        advantages_P_G_N, trained = self._compare_rewards(rewards_P_G_N, problems_P)
        if kind == "process_supervision":
            advantages_P_G_N = _sum_to_go(advantages_P_G_N, discount)
        kept = trained or ({0} if keep_first else set())
        datums: list[Datum] = []
        for i, (group, advantages_G_N) in enumerate(zip(groups, advantages_P_G_N, strict=True)):
            for trajectory, advantages_N in zip(group.trajectories_G, advantages_G_N, strict=True):
                advantages: float | Sequence[float] = advantages_N
                if kind == "sum":
                    advantages = advantages_N[0]
                if i in kept:
                    datums += trajectory_to_datums(trajectory, advantages)
                else:
                    record_advantages(trajectory, advantages)
        return self._apply_reference(datums, models) if self.kl.needs_reference else datums

    def _compare_rewards(
        self, rewards_P_G_N: Sequence[Sequence[Sequence[float]]], problems_P: Sequence[str]
    ) -> tuple[list[list[list[float]]], set[int]]:
        """Return (advantages [P][G][N], the groups to train on).

        The estimator compares the rewards of a cell with each other: those of a group, or (to_go)
        of a group at the same turn. A group is dropped only if this comparison is the only source
        of gradient and all rewards are equal.
        """
        options = self.settings.policy_gradient
        by_turn = options.step_rewards == "to_go"
        # by (group, turn): the members (g, n) of the cell
        cells: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for p, rewards_G_N in enumerate(rewards_P_G_N):
            for g, steps in enumerate(rewards_G_N):
                for n in range(len(steps)):
                    cells.setdefault((p, n if by_turn else 0), []).append((g, n))
        rewards_C_K = [
            [rewards_P_G_N[p][g][n] for g, n in members] for (p, _), members in cells.items()
        ]
        keys_C = [problems_P[p] + (f"/turn {turn}" if turn else "") for p, turn in cells]
        advantages_C_K = self._estimate_advantages(rewards_C_K, keys_C)
        keeps_all = (
            not self.estimator.compares_members
            or self.kl.needs_reference
            or options.entropy_coef > 0
        )
        advantages_P_G_N = [[[0.0] * len(steps) for steps in group] for group in rewards_P_G_N]
        trained = set()
        for ((p, _), members), rewards_K, advantages_K in zip(
            cells.items(), rewards_C_K, advantages_C_K, strict=True
        ):
            for (g, n), advantage in zip(members, advantages_K, strict=True):
                advantages_P_G_N[p][g][n] = float(advantage)
            if keeps_all or has_signal(rewards_K):
                trained.add(p)
        return advantages_P_G_N, trained

    def _estimate_advantages(
        self, rewards_C_K: Sequence[Sequence[float]], keys_C: Sequence[str]
    ) -> Sequence[Any]:
        """Return an advantage for each reward; C cells of K rewards that are compared with each
        other.
        """
        estimator = self.estimator
        if estimator.state_key is not None:
            return self._baselines[estimator.state_key](rewards_C_K, keys_C)
        return estimator.estimate(rewards_C_K)

    def _apply_reference(self, datums: list[Datum], models: Models) -> list[Datum]:
        """Charge the KL to the reference to the advantages, or add the reference's logprobs for the
        KL term of the loss.
        """
        ref_D, _ = self.score_reference(datums, models)
        if self.settings.kl.kl_placement == "reward":
            discount = self.settings.policy_gradient.kl_discount
            return apply_kl_penalty(datums, ref_D, self.kl.coefficient, discount)[0]
        return add_loss_field(datums, "ref_logprobs", ref_D)

    def update(self, models: Models, datums: Sequence[Datum], progress: Progress) -> Metrics:
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
    ) -> tuple[Sequence[Datum], Metrics]:
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
        return super().state() | {key: m.state() for key, m in self._baselines.items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        for key, memory in self._baselines.items():
            if key in state:  # otherwise the estimator is newer than the checkpoint
                memory.load_state(state[key])


def _sum_to_go(
    values_P_G_N: Sequence[Sequence[Sequence[float]]], discount: float
) -> list[list[list[float]]]:
    """Return for each turn of each episode the discounted sum of the values from that turn on."""
    return [
        [compute_returns_to_go(steps, discount) for steps in values_G_N]
        for values_G_N in values_P_G_N
    ]


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
