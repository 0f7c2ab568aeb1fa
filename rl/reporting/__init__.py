"""Report on a run: console, logbook, plots, pages, alarms."""

from rl.reporting.alarm_monitor import AlarmMonitor
from rl.reporting.console import Console, format_count
from rl.reporting.curve_report import (
    collect_alarms,
    collect_axes,
    collect_panels,
    collect_series,
    collect_times,
)
from rl.reporting.html_report import MAX_REPORT_BYTES, load_plotly, render_report
from rl.reporting.logbook import (
    CHECKPOINTS,
    CONFIG,
    CURVES,
    LOCK,
    REPORT,
    REWARD_CHECK,
    ROLLOUTS,
    Logbook,
    check_claim_folder,
    check_writable,
    claim_folder,
    contains_run,
    has_no_steps,
    load_saved_config,
    write_config,
)
from rl.reporting.metric_plots import (
    PICTURE_SUFFIXES,
    TEACHER_KL,
    RunCurve,
    draw_curves,
    read_curve,
)
from rl.reporting.paired_comparison import PairedComparison, average_by_problem, compare_paired
from rl.reporting.rollout_report import (
    collect_rollouts,
    encode_json,
    list_evaluations,
    read_rollouts,
)
from rl.reporting.token_page import format_explanation, render_explanation
from rl.reporting.update_files import list_update_files, read_update_file
from rl.reporting.wandb_tracker import check_tracker

__all__ = [
    "AlarmMonitor",
    "CHECKPOINTS",
    "CONFIG",
    "CURVES",
    "Console",
    "LOCK",
    "PICTURE_SUFFIXES",
    "ROLLOUTS",
    "TEACHER_KL",
    "Logbook",
    "check_writable",
    "check_claim_folder",
    "check_tracker",
    "claim_folder",
    "format_count",
    "draw_curves",
    "contains_run",
    "has_no_steps",
    "load_saved_config",
    "write_config",
    "REPORT",
    "REWARD_CHECK",
    "MAX_REPORT_BYTES",
    "PairedComparison",
    "RunCurve",
    "average_by_problem",
    "collect_alarms",
    "collect_axes",
    "collect_panels",
    "collect_rollouts",
    "collect_series",
    "collect_times",
    "compare_paired",
    "encode_json",
    "format_explanation",
    "list_evaluations",
    "list_update_files",
    "load_plotly",
    "read_curve",
    "read_rollouts",
    "read_update_file",
    "render_explanation",
    "render_report",
]
