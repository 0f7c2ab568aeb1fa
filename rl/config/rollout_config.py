"""Define the settings of the rollout engine: scheduling, streaming, staleness. This module imports
no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.config.check_config import require
from rl.config.fields import check_ranges
from rl.config.number_range import Range, Size


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Hold the settings of scheduling between sampling, environments and rewards."""

    rollout_mode: Literal["lockstep", "async"] = "lockstep"
    """Scheduling of rollouts. lockstep: all episodes of a batch take each turn together. async: each episode continues as soon as its turn, tool call or reward is ready, while other episodes decode; for slow rewards and episodes of uneven length. Both sample the same tokens. Evaluation is always async."""
    max_waiting: Annotated[int, Range(1, 100_000)] = 256
    """Maximum number of environment and reward calls at once (rollout_mode async)."""
    slice_steps: Size = 16
    """Number of tokens that each running sequence decodes before new sequences join (rollout_mode async)."""

    def __post_init__(self) -> None:
        check_ranges(self)
        require(
            self,
            ("max_waiting", "slice_steps"),
            self.is_async,
            "rollout_mode is lockstep",
            "set rollout_mode to async",
        )

    @property
    def is_async(self) -> bool:
        """Return whether episodes advance independently of each other, because rollout_mode is
        async or another setting requires it.
        """
        return self.rollout_mode == "async" or self.gradient_parts > 1 or self.steps_off_policy > 0

    @property
    def gradient_parts(self) -> int:
        """Return the number of parts over which the gradient of a batch is accumulated."""
        return 1

    @property
    def steps_off_policy(self) -> int:
        """Return the maximum staleness of a trained token, in updates."""
        return 0


@dataclass(frozen=True, kw_only=True)
class AsyncRolloutSettings(RolloutSettings):
    """Hold the settings of scheduling between sampling, environments, rewards and training."""

    stream_minibatches: Annotated[int, Range(1, 10**6)] = 1
    """Number of parts in which a batch is trained: the gradient of each part is computed as soon as its groups are complete, while the remaining groups are still sampled. A single optimizer step follows, equal to that of the whole batch. 1: train after all groups are complete."""
    max_steps_off_policy: Annotated[int, Range(0, 10_000)] = 0
    """Maximum staleness, in updates, of the weights that sample a trained token: sampling continues while the learner updates. 0: sampling and training alternate."""
    on_stale: Literal["wait", "resample"] = "wait"
    """Action for a group that would exceed max_steps_off_policy before it is complete. wait: delay the update until the group is complete (the newest weights sample the remaining tokens). resample: drop the group and sample it again with the newest weights; other groups fill the batch. Both are counted."""
    sampler_ranks: Annotated[int, Range(0, 4096)] = 0
    """Number of launched processes, the last ranks, that only sample while the other ranks train; with max_steps_off_policy both run at the same time. 0: every process samples and trains in turn."""
    recompute_cache: bool = False
    """Recompute the KV cache of running sequences when new weights arrive; off: keep the entries that the older weights computed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        late = self.max_steps_off_policy > 0
        require(
            self,
            ("on_stale", "recompute_cache"),
            late,
            "max_steps_off_policy is 0",
            "set max_steps_off_policy, such as 2",
        )

    @property
    def gradient_parts(self) -> int:
        """Return `stream_minibatches`."""
        return self.stream_minibatches

    @property
    def steps_off_policy(self) -> int:
        """Return `max_steps_off_policy`."""
        return self.max_steps_off_policy
