"""Helpers for tests that train until something is learned: their seed, and the figures that they
compare with bars.

`make test-all` runs the tests with the seeds that they name. bench/learning_seeds.py runs them with
others, by WHETSTONE_LEARNING_SEED (added to a test's seed), and collects the figures in the file
that WHETSTONE_LEARNING_FIGURES names.
"""

import json
import os
from pathlib import Path


def seed(reference: int = 0) -> int:
    """Return the seed of a test: `reference` plus WHETSTONE_LEARNING_SEED."""
    return reference + int(os.environ.get("WHETSTONE_LEARNING_SEED", "0"))


def check_figure(
    what: str, figure: float, *, above: float | None = None, below: float | None = None
) -> None:
    """Check that a figure is above (below) its bar, and record both if figures are collected."""
    bar = above if above is not None else below
    assert bar is not None and (above is None or below is None), "one bar"
    side = "above" if above is not None else "below"
    cleared = figure > bar if side == "above" else figure < bar
    if path := os.environ.get("WHETSTONE_LEARNING_FIGURES"):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0].rpartition("/")[2]
        row = {
            "test": test,
            "figure": what,
            "seed": seed(),
            "value": float(figure),
            side: bar,
            "cleared": bool(cleared),
        }
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")
    assert cleared, f"{what} is {figure:g}, the bar is {side} {bar:g}"
