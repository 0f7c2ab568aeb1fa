"""Report on a run: console, logbook, plots, pages, alarms."""

from rl.reporting.alarm_monitor import AlarmMonitor
from rl.reporting.console import Console, format_count, format_held_out
from rl.reporting.curve_report import collect_curves
from rl.reporting.evaluation_table import (
    TABLE_COLUMNS,
    compare_evaluations,
    format_markdown,
    list_evaluation_tables,
    make_table_rows,
    read_evaluation,
)
from rl.reporting.html_report import (
    MAX_REPORT_BYTES,
    encode_json,
    has_plotly,
    load_plotly,
    render_report,
)
from rl.reporting.logbook import (
    CHECKPOINTS,
    CONFIG,
    CURVES,
    EVALUATIONS,
    LAUNCHES,
    REPORT,
    REWARD_CHECK,
    ROLLOUTS,
    Logbook,
    check_claim_folder,
    check_writable,
    claim_folder,
    contains_run,
    has_steps,
    load_saved_config,
    write_config,
)
from rl.reporting.metric_plots import (
    AXES,
    PICTURE_SUFFIXES,
    TEACHER_KL,
    RunCurve,
    draw_curves,
    label_runs,
    read_curve,
)
from rl.reporting.paired_comparison import PairedComparison, average_by_problem, compare_paired
from rl.reporting.rollout_report import (
    collect_rollouts,
    list_evaluations,
    read_rollouts,
)
from rl.reporting.run_follower import RunFollower
from rl.reporting.seed_groups import flatten_config, group_by_settings
from rl.reporting.token_page import format_explanation, render_explanation
from rl.reporting.tracker_process import check_trackers
from rl.reporting.update_files import UpdateRecord, list_update_files, read_update_file
from rl.reporting.watch_view import render_runs

__all__ = [
    "AXES",
    "AlarmMonitor",
    "CHECKPOINTS",
    "CONFIG",
    "CURVES",
    "Console",
    "EVALUATIONS",
    "TABLE_COLUMNS",
    "LAUNCHES",
    "PICTURE_SUFFIXES",
    "ROLLOUTS",
    "TEACHER_KL",
    "Logbook",
    "check_writable",
    "check_claim_folder",
    "check_trackers",
    "claim_folder",
    "format_count",
    "format_held_out",
    "draw_curves",
    "contains_run",
    "has_steps",
    "load_saved_config",
    "write_config",
    "REPORT",
    "REWARD_CHECK",
    "MAX_REPORT_BYTES",
    "PairedComparison",
    "RunCurve",
    "RunFollower",
    "UpdateRecord",
    "average_by_problem",
    "collect_curves",
    "collect_rollouts",
    "compare_evaluations",
    "compare_paired",
    "format_markdown",
    "list_evaluation_tables",
    "make_table_rows",
    "read_evaluation",
    "encode_json",
    "flatten_config",
    "group_by_settings",
    "format_explanation",
    "list_evaluations",
    "has_plotly",
    "list_update_files",
    "load_plotly",
    "label_runs",
    "read_curve",
    "read_rollouts",
    "read_update_file",
    "render_explanation",
    "render_report",
    "render_runs",
]
