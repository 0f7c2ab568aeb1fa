"""Warnings that a stage gives once each, however often there is reason to."""

from __future__ import annotations

from rl.report import Console


class Said:
    """What was said already, by kind."""

    def __init__(self, console: Console):
        self._console = console
        self.kinds: set[str] = set()

    def warn(self, kind: str, text: str, *, most: int | None = None) -> None:
        """Says `text`, if nothing of its kind was said; a new kind is passed over where `most`
        kinds were.
        """
        if kind not in self.kinds and (most is None or len(self.kinds) < most):
            self.kinds.add(kind)
            self._console.warn(text)
