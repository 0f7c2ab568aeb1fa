"""Compute learning-rate schedules as functions of the step."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "linear", "cosine")


def compute_lr_factor(schedule: str, step: int, total: int, warmup: int = 0) -> float:
    """Return the factor on the peak learning rate at `step` (0-based) of `total`.

    Warm-up rises linearly and reaches 1 at step `warmup`. Then `constant` stays at 1; `linear` and
    `cosine` (SGDR, arXiv 1608.03983, equation 5, a single cycle) fall to 0 at the step after
    the last.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return 1 - progress
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
    raise ValueError(f"unknown schedule {schedule!r}: one of {', '.join(SCHEDULES)}")
