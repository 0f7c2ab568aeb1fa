"""Manage processes: collectives, launch, stop signals and atomic checkpoint folders."""

from rl.ranks import checkpoint, distributed, interrupts
from rl.ranks.agreement import require_same
from rl.ranks.checkpoint import below
from rl.ranks.interrupts import INTERRUPTED, Stopped, StopRequest, end_with_the_launcher
from rl.ranks.launch import asks_for_fsdp, make_accelerator, zero_settings
from rl.ranks.leaving import leave_at_exit
from rl.ranks.roles import called, check_roles, take_role
from rl.ranks.teams import check_apart_from_roles, check_divides, check_team

__all__ = [
    "INTERRUPTED",
    "StopRequest",
    "Stopped",
    "asks_for_fsdp",
    "below",
    "called",
    "check_apart_from_roles",
    "check_divides",
    "check_roles",
    "check_team",
    "checkpoint",
    "distributed",
    "end_with_the_launcher",
    "interrupts",
    "leave_at_exit",
    "make_accelerator",
    "require_same",
    "take_role",
    "zero_settings",
]
