"""Execute runs: the training loop, stages, resuming, and the memory plan of a whole run."""

from rl.trainer.entry_point import (
    SampledModel,
    TrainingResult,
    iterate_prompts,
    load_sampled_model,
    main,
    open_run,
    run_guarded,
    sample,
    select_fitting_problems,
    train,
)
from rl.trainer.evaluator import compute_evaluation_metrics, make_response_rows
from rl.trainer.export import check_hub_login, describe_export, export_weights, push_to_hub
from rl.trainer.reward_probe import (
    PROBED_ROWS,
    RewardProbeResult,
    format_probe_table,
    probe_reward,
)
from rl.trainer.run_report import write_report
from rl.trainer.run_summary import format_script
from rl.trainer.saved_weights import (
    check_trusted,
    list_environment_addresses,
    list_reward_addresses,
    load_run,
    open_weights,
)
from rl.trainer.stage_data import (
    build_episode_groups,
    find_sandbox_kind,
    load_held_out_problems,
    load_held_out_rows,
    load_training_problems,
    resolve_environment,
    resolve_episode_reward,
    resolve_stage_reward,
)
from rl.trainer.stage_models import load_evaluation_opponents, make_renderer
from rl.trainer.update_report import explain_update

__all__ = [
    "PROBED_ROWS",
    "RewardProbeResult",
    "SampledModel",
    "TrainingResult",
    "explain_update",
    "format_probe_table",
    "probe_reward",
    "load_training_problems",
    "load_run",
    "make_response_rows",
    "iterate_prompts",
    "check_trusted",
    "check_hub_login",
    "describe_export",
    "list_environment_addresses",
    "resolve_environment",
    "build_episode_groups",
    "resolve_episode_reward",
    "export_weights",
    "compute_evaluation_metrics",
    "run_guarded",
    "load_held_out_problems",
    "load_held_out_rows",
    "main",
    "make_renderer",
    "open_run",
    "load_sampled_model",
    "open_weights",
    "push_to_hub",
    "resolve_stage_reward",
    "list_reward_addresses",
    "find_sandbox_kind",
    "format_script",
    "load_evaluation_opponents",
    "sample",
    "select_fitting_problems",
    "train",
    "write_report",
]
