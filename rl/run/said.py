"""Print each kind of warning of a stage once."""

from __future__ import annotations

from rl.report import Console


class Said:
    """Record which kinds of warnings were printed."""

    def __init__(self, console: Console):
        self._console = console
        self.kinds: set[str] = set()

    def warn(self, kind: str, text: str, *, most: int | None = None) -> None:
        """Print `text` unless its kind was printed before. Skip a new kind after `most` kinds."""
        if kind not in self.kinds and (most is None or len(self.kinds) < most):
            self.kinds.add(kind)
            self._console.warn(text)
