"""Helpers for tests that train until something is learned: their seed, and the bars of their figures.

`make test-all` runs the tests with the seeds that they name. tests/project/test_learning_seeds.py
runs them with others, by WHETSTONE_LEARNING_SEED (added to a test's seed).
"""

import os


def seed(reference: int = 0) -> int:
    """Return the seed of a test: `reference` plus WHETSTONE_LEARNING_SEED."""
    return reference + int(os.environ.get("WHETSTONE_LEARNING_SEED", "0"))


def check_figure(
    what: str, figure: float, *, above: float | None = None, below: float | None = None
) -> None:
    """Check that a figure is above (below) its bar."""
    bar = above if above is not None else below
    assert bar is not None and (above is None or below is None), "one bar"
    side = "above" if above is not None else "below"
    cleared = figure > bar if side == "above" else figure < bar
    assert cleared, f"{what} is {figure:g}, the bar is {side} {bar:g}"
