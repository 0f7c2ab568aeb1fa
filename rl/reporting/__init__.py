"""Report on a run: console, logbook, plots, pages, alarms."""

from rl.reporting.alarm_monitor import AlarmMonitor
from rl.reporting.console import Console, format_count
from rl.reporting.logbook import (
    CHECKPOINTS,
    CONFIG,
    CURVES,
    LOCK,
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
from rl.reporting.metric_plots import PICTURE_SUFFIXES, TEACHER_KL, draw_curves
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
]
