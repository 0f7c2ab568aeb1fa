"""Forward the output of rewards in worker processes and threads: line by line, sanitized,
truncated.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rl.plain import plain_text

_MOST = 64 * 1024  # characters in total; then a final line reports that the rest is dropped
_LONGEST_LINE = 500


class Printed:
    """Write lines to standard error, each prefixed with the reward's name. Thread-safe."""

    def __init__(self, name: str, most: int = _MOST):
        self._name, self._left = plain_text(name, 80), most
        self._lock = threading.Lock()

    def __call__(self, data: bytes) -> None:
        """Write a chunk of a worker's output, decoded as UTF-8 with replacement."""
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
                text += f"\n[{self._name}] exceeded its output limit: the rest is dropped"
        if text:
            _write(text + "\n")


def _write(text: str) -> None:
    """Write to standard error; ignore a stream that is closed, full or cannot encode the text.

    An output error must not lose a score.
    """
    try:
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        # not back to the reward that printed it
        stream = sys.stderr.stream if isinstance(sys.stderr, _ByThread) else sys.stderr
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError, AttributeError, LookupError):
        pass


# ------------------------------------------------------------------------------ output of threads


class _ByThread:
    """Wrap a stream of this process and route the output of registered threads.

    `owners` maps a thread id to the function that receives the thread's output. All other output
    passes to the stream.
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
    """Call `printed` with each line that the current thread prints inside the context.

    The output of other threads is unchanged.
    """
    writer = _Lines(printed)
    thread_id = threading.get_ident()
    for name in ("stdout", "stderr"):
        with _TURN:
            stream = getattr(sys, name)
            if stream is not None and not isinstance(stream, _ByThread):
                stream = _ByThread(stream)
                setattr(sys, name, stream)
            if stream is not None:
                stream.owners[thread_id] = writer
    try:
        yield
    finally:
        for name in ("stdout", "stderr"):
            with _TURN:
                stream = getattr(sys, name)
                if isinstance(stream, _ByThread):
                    stream.owners.pop(thread_id, None)
                    if not stream.owners:
                        setattr(sys, name, stream.stream)
        writer.end()


class _Lines:
    """Buffer output until a line is complete or exceeds the shown length: print writes a text and
    its newline separately.
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
