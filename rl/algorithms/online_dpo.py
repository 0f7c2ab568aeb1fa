"""Implement online DPO: the current policy samples several answers to each problem, and DPO's loss
is applied to pairs of a better and a worse answer.

Guo et al., "Direct Language Model Alignment from Online AI Feedback" (arXiv 2402.04792, algorithm
1), in which a language model compares two answers (here: --comparison-model). Any reward that
distinguishes answers works as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from rl.algorithms.dpo import PreferenceMethod, PreferenceSettings
from rl.algorithms.method_interface import Models, OnlineMethod, OnlineSettings
from rl.algorithms.update import UpdateSums, add_loss_field, compare_sampler_and_learner
from rl.config import (
    Range,
    check_ranges,
)
from rl.errors import UserError
from rl.rollout import Metrics, TrajectoryGroup, trajectory_to_datums
from rl.types import Datum


@dataclass(frozen=True, kw_only=True)
class OnlinePreferenceSettings(PreferenceSettings):
    """Configure the way answers become preferences, and preferences a gradient."""

    group_size: Annotated[int, Range(2, 10**6, why="a pair needs two answers")] = 2
    """Answers sampled for each problem."""
    pairs: Literal["best_worst", "all"] = "best_worst"
    """Pairs of a group's answers. best_worst: the best and the worst; all: every two with different rewards."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges(self)
        if self.precompute_reference:
            raise ValueError(
                "precompute_reference scores answers before the first step, but online_dpo "
                "samples them: leave out precompute_reference"
            )


@dataclass(frozen=True, kw_only=True)
class OnlineDpoSettings(OnlineSettings):
    """Direct preference optimization on the policy's samples, ranked by their rewards."""

    default_learning_rates = (5e-6, 5e-7)

    preference: OnlinePreferenceSettings = OnlinePreferenceSettings()


def make_pairs(rewards_G: Sequence[float], kind: str) -> list[tuple[int, int]]:
    """Return pairs of a group's members as (better, worse); none if all rewards are equal. Of equal
    members the first is used.
    """
    members = range(len(rewards_G))
    if kind == "all":
        return [(i, j) for i in members for j in members if rewards_G[i] > rewards_G[j]]
    best, worst = max(members, key=lambda i: rewards_G[i]), min(members, key=lambda i: rewards_G[i])
    return [(best, worst)] if rewards_G[best] > rewards_G[worst] else []


class OnlineDPO(OnlineMethod, PreferenceMethod):
    """Implement `online_dpo`: `update` is DPO's, at the sampling temperature."""

    Settings = OnlineDpoSettings
    summary = "RL: the better of the policy's answers against the worse, by DPO's loss"

    def __init__(self, settings: OnlineDpoSettings):
        super().__init__(settings)
        self.group_size = settings.preference.group_size
        # this batch's answers with the behavior logprobs, by id of the pair's datum
        self._behavior_datums: dict[int, Datum] = {}
        self._num_pairs = 0  # of this batch

    def compute_advantages(self, groups: Sequence[TrajectoryGroup], models: Models) -> list[Datum]:
        """Return two datums per pair, the better first. If no group has a pair, return an answer of
        the first group twice without actions, which have no gradient.
        """
        pairs = [
            ((p, better), (p, worse))
            for p, group in enumerate(groups)
            for better, worse in make_pairs(
                group.get_total_rewards(), self.settings.preference.pairs
            )
        ]
        self._num_pairs = len(pairs)
        pairs = pairs or [((0, 0), (0, 0))]
        members = sorted({member for pair in pairs for member in pair})
        sampled = [_make_datum(groups[p], i) for p, i in members]
        fields = ("target_tokens", "mask")
        stripped = [
            d.with_inputs({name: d.loss_fn_inputs[name] for name in fields}) for d in sampled
        ]
        if not self.settings.preference.reference_free:
            scored = models.reference.logprobs(stripped, self.settings.sampling.temperature)
            stripped = add_loss_field(stripped, "ref_logprobs", scored)
        if not self._num_pairs:
            zeros = [np.zeros(datum.model_input.length) for datum in stripped]
            stripped = add_loss_field(stripped, "mask", zeros)
        by_member = dict(zip(members, stripped, strict=True))
        self._behavior_datums = dict(zip(map(id, stripped), sampled, strict=True))
        return [by_member[member] for pair in pairs for member in pair]

    def _extra_metrics(self, totals: UpdateSums) -> Metrics:
        """Return the number of pairs, and compare sampler and learner on each answer once."""
        distinct = {
            id(datum): (self._behavior_datums[id(datum)], output["logprobs"].array)
            for datum, output in zip(totals.first_datums, totals.first_outputs, strict=True)
        }
        self._behavior_datums = {}
        return {
            "optim/pairs": self._num_pairs,
            **compare_sampler_and_learner(
                [full for full, _ in distinct.values()], [logp for _, logp in distinct.values()]
            ),
        }

    def _config(self) -> Metrics:
        return {**super()._config(), "temperature": self.settings.sampling.temperature}


def _make_datum(group: TrajectoryGroup, member: int) -> Datum:
    """Return a member's answer as a datum. Raises UserError if its episode is several sequences of
    tokens.
    """
    # DPO compares whole answers and reads no advantage
    datums = trajectory_to_datums(group.trajectories_G[member], 0.0)
    if len(datums) > 1:
        raise UserError(
            "online_dpo compares answers that are a single sequence of tokens, but this episode "
            "is several sequences (its observations do not extend the earlier tokens, as with a "
            "template that drops earlier thinking): use grpo, or another renderer"
        )
    return datums[0]
