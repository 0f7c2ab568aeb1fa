"""GRPO: several answers to each problem, each credited with how much better it is than its group.

Shao et al., arXiv 2402.03300, with Dr. GRPO's advantage (centred, not divided by the standard deviation;
arXiv 2503.20783) and no KL term, as settings. REINFORCE is the same with a group of one and a running baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl.advantages import WITHIN_GROUP, RunningMean, has_signal
from rl.datums import trajectory_to_datums
from rl.methods.base import Models, Progress, one_pass
from rl.settings import DataSettings, LoopSettings, ModelSettings, OptimSettings, SamplingSettings
from rl.types import Datum, TrajectoryGroup


@dataclass(frozen=True, kw_only=True)
class PolicyGradientSettings:
    """How rewards become gradients."""

    group_size: int = 8
    """Answers sampled for each problem."""
    advantage: Literal["mean", "mean_std", "leave_one_out", "running_mean", "none"] = "mean"
    """Reward minus: the group's mean (Dr. GRPO); that, divided by the group's std (GRPO); the mean of the others (RLOO); a running mean over batches (REINFORCE); nothing."""
    loss: Literal["ppo", "importance_sampling", "cispo"] = "ppo"
    """Loss on the tokens of an answer."""
    clip_low: float = 0.8
    """Ratios below this earn no gradient where the advantage is negative (ppo, cispo). A ratio, not an epsilon."""
    clip_high: float = 1.2
    """Ratios above this earn no gradient where the advantage is positive (ppo, cispo)."""
    normalise: Literal["tokens", "sequences", "sum"] = "tokens"
    """The summed loss is divided by the optimizer step's action tokens, its sequences, or nothing."""

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size is at least 1, got {self.group_size}")
        if self.group_size == 1 and self.advantage in ("mean", "mean_std", "leave_one_out"):
            raise ValueError(
                f"a group of one has no one to be compared with: advantage {self.advantage!r} is always 0. "
                "Set group_size to 2 or more, or advantage to running_mean"
            )
        if not 0 <= self.clip_low <= 1 <= self.clip_high:
            raise ValueError(f"clip_low <= 1 <= clip_high are ratios, such as 0.8 and 1.2; got {self.clip_low} and {self.clip_high}")


@dataclass(frozen=True, kw_only=True)
class GrpoSettings:
    """Group-relative policy optimization: sample a group for each problem, credit each answer against its group."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    policy_gradient: PolicyGradientSettings = field(default_factory=PolicyGradientSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)

    def __post_init__(self) -> None:
        if self.loop.batch_size % self.optim.num_substeps:
            raise ValueError(f"batch_size {self.loop.batch_size} is no multiple of num_substeps {self.optim.num_substeps}")

    @property
    def learning_rate(self) -> float:
        given = self.optim.learning_rate
        return given if given is not None else (4e-5 if self.model.lora_rank else 1e-6)


class PolicyGradient:
    """The hooks of `grpo` and `reinforce`."""

    online = True

    def __init__(self, settings: Any):
        self.settings = settings
        self.group_size: int = settings.policy_gradient.group_size
        self.baseline = RunningMean()

    def credit(self, groups: Sequence[TrajectoryGroup], models: Models) -> list[Datum]:
        """Advantages, broadcast over each answer's tokens. Groups without signal are left out; if all are, one is kept."""
        kind = self.settings.policy_gradient.advantage
        rewards_P_G = [group.get_total_rewards() for group in groups]
        if kind == "running_mean":
            advantages_P_G = self.baseline(rewards_P_G)
            kept = list(range(len(groups)))
        else:
            advantages_P_G = [WITHIN_GROUP[kind](rewards_G) for rewards_G in rewards_P_G]
            kept = [i for i, rewards_G in enumerate(rewards_P_G) if has_signal(rewards_G) or kind == "none"] or [0]
        for group, advantages_G in zip(groups, advantages_P_G, strict=True):
            for trajectory, advantage in zip(group.trajectories_G, advantages_G, strict=True):
                trajectory.advantage = float(advantage)
        return [datum for i in kept for trajectory in groups[i].trajectories_G for datum in trajectory_to_datums(trajectory)]

    def learn(self, models: Models, datums: Sequence[Datum], progress: Progress) -> dict[str, float]:
        settings = self.settings
        pg = settings.policy_gradient
        config = {"temperature": settings.sampling.temperature}
        if pg.loss != "importance_sampling":
            config |= {"clip_low_threshold": pg.clip_low, "clip_high_threshold": pg.clip_high}
        return one_pass(
            models,
            datums,
            loss=pg.loss,
            config=config,
            normalise=pg.normalise,
            optim=settings.optim,
            loop=settings.loop,
            progress=progress,
            peak=settings.learning_rate,
        )

    def state(self) -> dict[str, Any]:
        return {"baseline": self.baseline.value}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.baseline.value = state["baseline"]
