"""Online DPO: several answers to each problem by the policy as it is, the better against the worse,
and DPO's loss on them.

Guo et al., "Direct Language Model Alignment from Online AI Feedback" (arXiv 2402.04792, algorithm
1), where a language model says which of two answers is the better (here: --comparison-model); any
reward that tells answers apart does as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from rl.credit import RewardShaper
from rl.episodes import TrajectoryGroup, trajectory_to_datums
from rl.errors import UserError
from rl.methods import dpo
from rl.methods.base import Models, Progress
from rl.methods.spec import samples_alone
from rl.methods.steps import sampler_against_learner, with_fields
from rl.settings import (
    DataSettings,
    EnvironmentSettings,
    EpisodeFlowSettings,
    LearnedRewardSettings,
    LoopSettings,
    ModelSettings,
    OptimSettings,
    Range,
    SamplingSettings,
    ShapingSettings,
    check_ranges,
    check_substeps,
)
from rl.types import AdamParams, Datum


@dataclass(frozen=True, kw_only=True)
class OnlinePreferenceSettings(dpo.PreferenceSettings):
    """How answers become preferences, and these a gradient."""

    group_size: Annotated[int, Range(2, 10**6, why="an answer is better than another one")] = 2
    """Answers sampled for each problem."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Which answers of a group are set against each other: the best and the worst; or every two whose rewards differ."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self)
        if self.precompute_reference:
            raise ValueError(
                "precompute_reference scores answers before the first step, and online_dpo samples them: leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class OnlineDpoSettings:
    """Direct preference optimization on the policy's own answers, ranked by their rewards."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    env: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    shaping: ShapingSettings = field(default_factory=ShapingSettings)
    preference: OnlinePreferenceSettings = field(default_factory=OnlinePreferenceSettings)
    learned: LearnedRewardSettings = field(default_factory=LearnedRewardSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    flow: EpisodeFlowSettings = field(default_factory=EpisodeFlowSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)

    def __post_init__(self) -> None:
        check_substeps(self)

    @property
    def learning_rate(self) -> float:
        given = self.optim.learning_rate
        return given if given is not None else (5e-6 if self.model.lora_rank else 5e-7)


def pairs_of(rewards_G: Sequence[float], kind: str) -> list[tuple[int, int]]:
    """Members of a group as (better, worse); none where all rewards are the same. Of equals the
    first counts.
    """
    members = range(len(rewards_G))
    if kind == "all":
        return [(i, j) for i in members for j in members if rewards_G[i] > rewards_G[j]]
    best, worst = max(members, key=lambda i: rewards_G[i]), min(members, key=lambda i: rewards_G[i])
    return [(best, worst)] if rewards_G[best] > rewards_G[worst] else []


class OnlineDpo(dpo.Dpo):
    """The hooks of `online_dpo`: `learn` is DPO's, at the temperature that was sampled at."""

    online = True
    reads = staticmethod(samples_alone)
    needs_reward = True
    ranks_held_out = False

    def __init__(self, settings: OnlineDpoSettings):
        super().__init__(settings)
        self.group_size = settings.preference.group_size
        self.shaper = RewardShaper(settings.shaping, settings.sampling.max_tokens)
        # this batch's answers with the sampler's logprobs, by the pair's own datum
        self._drawn: dict[int, Datum] = {}
        self._ranked = True  # whether the batch has a pair

    def begin(self, rows: Iterable[Any], renderer: Any, models: Models) -> None:
        """There are no rows to score."""

    def credit(self, groups: Sequence[TrajectoryGroup], models: Models) -> list[Datum]:
        """Two datums a pair, the better first. Where no group has a pair: two answers of the first,
        which nothing is learnt from.
        """
        found = [
            pairs_of(rewards_G, self.settings.preference.pairs)
            for rewards_G in self.shaper.totals(groups)
        ]
        self._ranked = any(found)
        if not self._ranked:
            found[0] = [(0, min(1, len(groups[0].trajectories_G) - 1))]
        wanted = sorted({(p, i) for p, pairs in enumerate(found) for pair in pairs for i in pair})
        drawn = [_one_datum(groups[p], i) for p, i in wanted]
        fields = [
            {name: datum.loss_fn_inputs[name] for name in ("target_tokens", "mask")}
            for datum in drawn
        ]
        own = [datum.with_inputs(inputs) for datum, inputs in zip(drawn, fields, strict=True)]
        if not self.settings.preference.reference_free:
            scored = models.reference.logprobs(own, self.settings.sampling.temperature)
            own = [
                with_fields(datum, ref_logprobs=logprobs)
                for datum, logprobs in zip(own, scored, strict=True)
            ]
        at = dict(zip(wanted, own, strict=True))
        self._drawn = {id(mine): full for mine, full in zip(own, drawn, strict=True)}
        return [at[p, i] for p, pairs in enumerate(found) for pair in pairs for i in pair]

    def learn(
        self, models: Models, datums: Sequence[Datum], progress: Progress
    ) -> dict[str, float]:
        """DPO's pass; where no answer was better than another, at learning rate 0, and counted."""
        metrics = super().learn(models, datums, progress)
        self._drawn = {}
        own = {"optim/pairs": len(datums) // 2 if self._ranked else 0}
        return {
            **metrics,
            **own,
            **({} if self._ranked else {"optim/skipped_no_signal": 1.0}),
            **self.shaper.metrics,
        }

    def _params(self, progress: Progress) -> AdamParams:
        params = super()._params(progress)
        return params if self._ranked else replace(params, learning_rate=0.0)

    def _watched(self, datums: Sequence[Datum], logprobs: Sequence[Any]) -> dict[str, float]:
        seen = {
            id(datum): (self._drawn[id(datum)], logp)
            for datum, logp in zip(datums, logprobs, strict=True)
        }
        return sampler_against_learner(
            [full for full, _ in seen.values()], [logp for _, logp in seen.values()]
        )

    def _config(self) -> dict[str, float]:
        return {**super()._config(), "temperature": self.settings.sampling.temperature}

    def state(self) -> dict[str, Any]:
        return {"reward_statistics": self.shaper.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.shaper.load_state(state["reward_statistics"])


def _one_datum(group: TrajectoryGroup, member: int) -> Datum:
    trajectory = group.trajectories_G[member]
    trajectory.advantage = 0.0  # none is used; DPO credits whole answers
    datums = trajectory_to_datums(trajectory)
    if len(datums) > 1:
        raise UserError(
            "online_dpo compares answers that are one sequence of tokens, and an episode here is several (its observations do not "
            "continue what came before, as with a template that drops earlier thinking): use grpo, or another renderer"
        )
    return datums[0]
