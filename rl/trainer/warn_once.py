"""Print each kind of warning of a stage once."""

from __future__ import annotations

from rl.reporting import Console


class WarnOnce:
    """Record which kinds of warnings were printed."""

    def __init__(self, console: Console):
        self._console = console
        self.printed_kinds: set[str] = set()

    def warn(self, kind: str, text: str, *, max_kinds: int | None = None) -> None:
        """Print `text` unless its kind was printed before, at most `max_kinds` kinds."""
        if kind not in self.printed_kinds and (
            max_kinds is None or len(self.printed_kinds) < max_kinds
        ):
            self.printed_kinds.add(kind)
            self._console.warn(text)
