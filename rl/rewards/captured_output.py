"""Forward the output of rewards in worker processes and threads: line by line, sanitized,
truncated.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rl.sanitize import sanitize_text

_MAX_CHARACTERS = (
    64 * 1024
)  # characters in total; then a final line reports that the rest is dropped
_MAX_LINE_CHARACTERS = 500


class RewardOutput:
    """Write lines to standard error, each prefixed with the reward's name. Thread-safe."""

    def __init__(self, name: str, limit: int = _MAX_CHARACTERS):
        self._name, self._budget = sanitize_text(name, 80), limit
        self._lock = threading.Lock()

    def __call__(self, data: bytes) -> None:
        """Write a chunk of a worker's output, decoded as UTF-8 with replacement."""
        with self._lock:
            if self._budget <= 0:
                return
            lines = [
                f"[{self._name}] {sanitize_text(line, _MAX_LINE_CHARACTERS)}"
                for line in data.decode(errors="replace").split("\n")
                if line.strip()
            ]
            text = "\n".join(lines)[: self._budget]
            self._budget -= len(text)
            if self._budget <= 0:
                text += f"\n[{self._name}] exceeded its output limit: the rest is dropped"
        if text:
            _write_stderr(text + "\n")


def _write_stderr(text: str) -> None:
    """Write to standard error; ignore a stream that is closed, full or cannot encode the text.

    An output error must not lose a score.
    """
    try:
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        # not back to the reward that printed it
        stream = sys.stderr.stream if isinstance(sys.stderr, _ThreadRouter) else sys.stderr
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError, AttributeError, LookupError):
        pass


# ------------------------------------------------------------------------------ output of threads


class _ThreadRouter:
    """Wrap a stream of this process and route the output of registered threads.

    `sinks` maps a thread id to the function that receives the thread's output. All other output
    passes to the stream.
    """

    def __init__(self, stream: Any):
        self.stream = stream
        self.sinks: dict[int, Callable[[bytes], None]] = {}

    def write(self, text: str) -> int:
        owner = self.sinks.get(threading.get_ident())
        if owner is None:
            return self.stream.write(text)
        owner(text.encode("utf-8", "backslashreplace"))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:  # flush, encoding, isatty, fileno, ...
        return getattr(self.stream, name)


_STREAM_LOCK = threading.Lock()


@contextlib.contextmanager
def capture_thread_output(sink: Callable[[bytes], None]) -> Iterator[None]:
    """Call `sink` with each line that the current thread prints inside the context.

    The output of other threads is unchanged.
    """
    writer = _LineBuffer(sink)
    thread_id = threading.get_ident()
    with _STREAM_LOCK:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None:
                continue
            if not isinstance(stream, _ThreadRouter):
                stream = _ThreadRouter(stream)
                setattr(sys, name, stream)
            stream.sinks[thread_id] = writer
    try:
        yield
    finally:
        with _STREAM_LOCK:
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                if isinstance(stream, _ThreadRouter):
                    stream.sinks.pop(thread_id, None)
                    if not stream.sinks:
                        setattr(sys, name, stream.stream)
        writer.flush()


class _LineBuffer:
    """Buffer output until a line is complete or exceeds the shown length: print writes a text and
    its newline separately.
    """

    def __init__(self, sink: Callable[[bytes], None]):
        self._sink, self._buffer = sink, b""

    def __call__(self, data: bytes) -> None:
        self._buffer += data[: 1 << 16]
        if b"\n" in self._buffer or len(self._buffer) > _MAX_LINE_CHARACTERS:
            self.flush()

    def flush(self) -> None:
        if self._buffer:
            self._sink(self._buffer)
        self._buffer = b""
