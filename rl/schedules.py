"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "linear", "cosine")


def factor(schedule: str, step: int, total: int, warmup: int = 0, floor: float = 0.0) -> float:
    """The factor on the peak learning rate at `step` (0-based) of `total`.

    Warm-up rises linearly and reaches 1 at step `warmup`; then `constant` stays, `linear` and `cosine`
    (SGDR, arXiv 1608.03983, equation 5, one cycle) fall to `floor` at the step after the last one.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    match schedule:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1 - floor) * (1 - done)
        case "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))
    raise ValueError(f"unknown schedule {schedule!r}: one of {', '.join(SCHEDULES)}")
