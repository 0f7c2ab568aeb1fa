"""The section of methods' settings about who waits for whom: episodes, rewards, learner. No torch
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.settings.checks import only_with
from rl.settings.ranges import Range, Size, check_ranges


@dataclass(frozen=True, kw_only=True)
class EpisodeFlowSettings:
    """How sampling, environments and rewards wait for each other."""

    rollout_mode: Literal["lockstep", "async"] = "lockstep"
    """lockstep: all episodes of a batch take their turns together. async: each episode continues as soon as its own turn, tool or reward is ready, while others decode; for slow rewards and episodes of uneven length. Both sample the same tokens."""
    max_waiting: Annotated[int, Range(1, 100_000)] = 256
    """rollout_mode async: environments and rewards that may be at work at once."""
    slice_steps: Size = 16
    """rollout_mode async: tokens that each running answer gets before whoever has become ready joins."""

    def __post_init__(self) -> None:
        check_ranges(self)
        only_with(
            self,
            ("max_waiting", "slice_steps"),
            self.continuous,
            "rollout_mode is lockstep",
            "set rollout_mode to async",
        )

    @property
    def continuous(self) -> bool:
        """Whether episodes go on by themselves: asked for, or needed for what was."""
        return self.rollout_mode == "async" or self.parts > 1 or self.steps_off_policy > 0

    @property
    def parts(self) -> int:
        """In which a batch's gradient is added up."""
        return 1

    @property
    def steps_off_policy(self) -> int:
        """Updates that a trained token may be old."""
        return 0


@dataclass(frozen=True, kw_only=True)
class FlowSettings(EpisodeFlowSettings):
    """How sampling, environments, rewards and learning wait for each other."""

    stream_minibatches: Annotated[int, Range(1, 10**6)] = 1
    """Add a batch's gradient up over so many parts, each as soon as its groups have ended, while the rest are still sampled; one update, the same as of the whole batch. 1: after all of it."""
    max_steps_off_policy: Annotated[int, Range(0, 10_000)] = 0
    """Sample on while the learner updates: no trained token is drawn by weights more than so many updates older than those it trains. 0: sampling and learning take turns, as ever."""
    on_stale: Literal["wait", "resample"] = "wait"
    """For a group that would exceed max_steps_off_policy before it ends. wait: the update waits for it (the newest weights sample its rest). resample: the group is dropped and sampled again by the newest weights, and other groups fill the batch. Both are counted."""
    sampler_ranks: Annotated[int, Range(0, 4096)] = 0
    """So many of the launched processes, the last ones, do nothing but sample, while the others learn; with max_steps_off_policy both go on at once. 0: every process does both, in turn."""
    recompute_cache: bool = False
    """Where new weights reach an answer that is being drawn: read it again by them; off: go on with what the older weights read."""

    def __post_init__(self) -> None:
        super().__post_init__()
        late = self.max_steps_off_policy > 0
        only_with(
            self,
            ("on_stale", "recompute_cache"),
            late,
            "max_steps_off_policy is 0",
            "set max_steps_off_policy, such as 2",
        )

    @property
    def parts(self) -> int:
        return self.stream_minibatches

    @property
    def steps_off_policy(self) -> int:
        return self.max_steps_off_policy
