"""What rewards print, in worker processes and in threads: shown line by line, made plain, and no
more than a part of it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rl.plain import plain_text

_MOST = 64 * 1024  # characters in all; then one line says that the rest is dropped
_LONGEST_LINE = 500


class Printed:
    """Writes to standard error, each line with the reward's name before it. Any thread may call it."""

    def __init__(self, name: str, most: int = _MOST):
        self._name, self._left = plain_text(name, 80), most
        self._lock = threading.Lock()

    def __call__(self, data: bytes) -> None:
        """A piece of what one worker printed, in UTF-8 as far as it goes."""
        with self._lock:
            if self._left <= 0:
                return
            lines = [
                f"[{self._name}] {plain_text(line, _LONGEST_LINE)}"
                for line in data.decode(errors="replace").split("\n")
                if line.strip()
            ]
            text = "\n".join(lines)[: self._left]
            self._left -= len(text)
            if self._left <= 0:
                text += f"\n[{self._name}] prints more than is shown: the rest is dropped"
        if text:
            _write(text + "\n")


def _write(text: str) -> None:
    """A stream that is closed, full or of a poor encoding is no reason to lose a score."""
    try:
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        # not back to the reward that printed it
        stream = sys.stderr.stream if isinstance(sys.stderr, _ByThread) else sys.stderr
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError, AttributeError, LookupError):
        pass


# ------------------------------------------------------------------------------------ from a thread


class _ByThread:
    """Stands for a stream of this process: what the threads in `owners` write goes to their own,
    all else to the stream.
    """

    def __init__(self, stream: Any):
        self.stream = stream
        self.owners: dict[int, Callable[[bytes], None]] = {}

    def write(self, text: str) -> int:
        owner = self.owners.get(threading.get_ident())
        if owner is None:
            return self.stream.write(text)
        owner(text.encode("utf-8", "backslashreplace"))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:  # flush, encoding, isatty, fileno, ...
        return getattr(self.stream, name)


_TURN = threading.Lock()


@contextlib.contextmanager
def from_this_thread(printed: Callable[[bytes], None]) -> Iterator[None]:
    """Inside, `printed` is called with each line that this thread prints; other threads print as
    ever.
    """
    pieces = _Lines(printed)
    me = threading.get_ident()
    for name in ("stdout", "stderr"):
        with _TURN:
            stream = getattr(sys, name)
            if stream is not None and not isinstance(stream, _ByThread):
                stream = _ByThread(stream)
                setattr(sys, name, stream)
            if stream is not None:
                stream.owners[me] = pieces
    try:
        yield
    finally:
        for name in ("stdout", "stderr"):
            with _TURN:
                stream = getattr(sys, name)
                if isinstance(stream, _ByThread):
                    stream.owners.pop(me, None)
                    if not stream.owners:
                        setattr(sys, name, stream.stream)
        pieces.end()


class _Lines:
    """Passes on whole lines, or what has grown longer than a line is shown: print writes a text and
    its end apart.
    """

    def __init__(self, printed: Callable[[bytes], None]):
        self._printed, self._begun = printed, b""

    def __call__(self, data: bytes) -> None:
        self._begun += data[: 1 << 16]
        if b"\n" in self._begun or len(self._begun) > _LONGEST_LINE:
            self.end()

    def end(self) -> None:
        if self._begun:
            self._printed(self._begun)
        self._begun = b""
