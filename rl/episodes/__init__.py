"""Roll out episodes of a policy: turns, episodes and groups, their datums and metrics."""

from rl.episodes.admission import Admission
from rl.episodes.clock import Clock, Replayed
from rl.episodes.continuous import continuous_rollout
from rl.episodes.datums import (
    action_tokens,
    check_datum,
    checked_ids,
    datums_with_turns,
    supervised_datum,
    trajectory_to_datums,
)
from rl.episodes.episode import (
    Env,
    EnvGroupBuilder,
    EpisodeFailed,
    StepResult,
    Trajectory,
    TrajectoryGroup,
    Transition,
    has_signal,
)
from rl.episodes.flow import Flow, Seat
from rl.episodes.in_flight import flow_state, restore
from rl.episodes.metrics import (
    calibration_error,
    credited_share,
    group_metrics,
    largest,
    mean,
    sampled_metrics,
)
from rl.episodes.rollout import Rollouts, Sampler, group_streams, is_mixed, rollout
from rl.episodes.rows import rollout_rows
from rl.episodes.waiting import Waiters

__all__ = [
    "Admission",
    "Clock",
    "Flow",
    "Replayed",
    "Seat",
    "Waiters",
    "continuous_rollout",
    "datums_with_turns",
    "flow_state",
    "has_signal",
    "restore",
    "Env",
    "EnvGroupBuilder",
    "EpisodeFailed",
    "Rollouts",
    "Sampler",
    "StepResult",
    "Trajectory",
    "TrajectoryGroup",
    "Transition",
    "action_tokens",
    "calibration_error",
    "check_datum",
    "checked_ids",
    "credited_share",
    "group_metrics",
    "group_streams",
    "is_mixed",
    "largest",
    "mean",
    "rollout",
    "rollout_rows",
    "sampled_metrics",
    "supervised_datum",
    "trajectory_to_datums",
]
