"""Roll out episodes of a policy: turns, episodes and groups, their datums and metrics."""

from rl.rollout.async_rollout import continuous_rollout
from rl.rollout.datum_builder import (
    build_datums_with_turns,
    check_datum,
    count_action_tokens,
    record_advantages,
    supervised_datum,
    trajectory_to_datums,
    validate_token_ids,
)
from rl.rollout.engine_state import restore_engine_state, save_engine_state
from rl.rollout.env_executor import EnvExecutor
from rl.rollout.event_log import EventLog, ReplayedEventLog
from rl.rollout.lockstep import (
    ActionSampler,
    RolloutBatch,
    assign_random_streams,
    is_mixed,
    rollout,
)
from rl.rollout.rollout_engine import PlayerStream, RolloutEngine
from rl.rollout.rollout_metrics import (
    compute_calibration_error,
    compute_credited_share,
    compute_group_metrics,
    compute_sample_metrics,
    max_or_nan,
    mean,
)
from rl.rollout.rollout_rows import build_rollout_rows
from rl.rollout.rollout_types import (
    Env,
    EnvGroupBuilder,
    EpisodeFailed,
    StepResult,
    Trajectory,
    TrajectoryGroup,
    Transition,
    has_signal,
)
from rl.rollout.staleness import StalenessController

__all__ = [
    "StalenessController",
    "EventLog",
    "RolloutEngine",
    "ReplayedEventLog",
    "PlayerStream",
    "EnvExecutor",
    "continuous_rollout",
    "build_datums_with_turns",
    "record_advantages",
    "save_engine_state",
    "has_signal",
    "restore_engine_state",
    "Env",
    "EnvGroupBuilder",
    "EpisodeFailed",
    "RolloutBatch",
    "ActionSampler",
    "StepResult",
    "Trajectory",
    "TrajectoryGroup",
    "Transition",
    "count_action_tokens",
    "compute_calibration_error",
    "check_datum",
    "validate_token_ids",
    "compute_credited_share",
    "compute_group_metrics",
    "assign_random_streams",
    "is_mixed",
    "max_or_nan",
    "mean",
    "rollout",
    "build_rollout_rows",
    "compute_sample_metrics",
    "supervised_datum",
    "trajectory_to_datums",
]
