"""Roll out episodes of a policy: turns, episodes and groups, their datums and metrics."""

from rl.rollout.batch_rollout import (
    ActionSampler,
    RolloutSchedule,
    assign_random_streams,
    open_engine,
    rollout,
)
from rl.rollout.datum_builder import (
    check_datum,
    count_action_tokens,
    record_advantages,
    supervised_datum,
    trajectory_to_datums,
    validate_token_ids,
)
from rl.rollout.env_executor import (
    EnvCall,
    EnvExecutor,
    EnvThread,
    EventLoopThread,
    await_value,
)
from rl.rollout.event_log import EventLog, ReplayedEventLog
from rl.rollout.rollout_engine import (
    PlayerStream,
    RolloutEngine,
    restore_engine_state,
    save_engine_state,
)
from rl.rollout.rollout_metrics import (
    compute_calibration_error,
    compute_credited_share,
    compute_group_metrics,
    compute_sample_metrics,
    max_or_nan,
    mean,
    square,
)
from rl.rollout.rollout_rows import build_rollout_rows
from rl.rollout.rollout_types import (
    Env,
    EnvGroupBuilder,
    EpisodeFailed,
    Metrics,
    RolloutBatch,
    StepResult,
    Trajectory,
    TrajectoryGroup,
    Transition,
    has_signal,
    is_mixed,
    list_turns,
)
from rl.rollout.sample_scorer import (
    SampleScorer,
    ScorerSettings,
    open_sample_scorer,
    parse_answer,
)
from rl.rollout.staleness import StalenessController

__all__ = [
    "StalenessController",
    "EventLog",
    "RolloutEngine",
    "ReplayedEventLog",
    "PlayerStream",
    "EnvCall",
    "EnvExecutor",
    "EnvThread",
    "EventLoopThread",
    "RolloutSchedule",
    "open_engine",
    "record_advantages",
    "save_engine_state",
    "has_signal",
    "list_turns",
    "restore_engine_state",
    "Env",
    "EnvGroupBuilder",
    "EpisodeFailed",
    "Metrics",
    "RolloutBatch",
    "ActionSampler",
    "StepResult",
    "SampleScorer",
    "ScorerSettings",
    "open_sample_scorer",
    "parse_answer",
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
    "await_value",
    "is_mixed",
    "max_or_nan",
    "mean",
    "rollout",
    "build_rollout_rows",
    "compute_sample_metrics",
    "square",
    "supervised_datum",
    "trajectory_to_datums",
]
