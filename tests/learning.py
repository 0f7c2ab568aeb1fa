"""Tests that train until something is learnt: their seed, and the bars that their figures clear.

`make test-all` runs them with the seeds that they name. WHETSTONE_LEARNING_SEED is added to each, to
see whether another seed clears the bars, too.
"""

import os


def seed(own: int = 0) -> int:
    """The seed of a test whose own is `own`."""
    return own + int(os.environ.get("WHETSTONE_LEARNING_SEED", "0"))


def clears(
    what: str, figure: float, *, above: float | None = None, below: float | None = None
) -> None:
    """Asserts that a figure lies above (below) its bar."""
    bar = above if above is not None else below
    assert bar is not None and (above is None or below is None), "one bar"
    side = "above" if above is not None else "below"
    cleared = figure > bar if side == "above" else figure < bar
    assert cleared, f"{what} is {figure:g}, the bar is {side} {bar:g}"
