"""Report on a run: console, logbook, plots, pages, alarms."""

from rl.report.alarms import Alarms
from rl.report.console import Console, compact
from rl.report.logbook import (
    CHECKPOINTS,
    CONFIG,
    CURVES,
    LOCK,
    Logbook,
    check_can_write,
    check_claim,
    claim,
    holds_a_run,
    never_took_a_step,
    saved_config,
    write_config,
)
from rl.report.plots import PICTURES, draw
from rl.report.tracker import check_tracker

__all__ = [
    "Alarms",
    "CHECKPOINTS",
    "CONFIG",
    "CURVES",
    "Console",
    "LOCK",
    "PICTURES",
    "Logbook",
    "check_can_write",
    "check_claim",
    "check_tracker",
    "claim",
    "compact",
    "draw",
    "holds_a_run",
    "never_took_a_step",
    "saved_config",
    "write_config",
]
