"""Run an environment's code in a separate thread within a time limit. Exceptions and hangs become
errors of the episode.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from rl.episodes import EpisodeFailed
from rl.plain import says


class EpisodeThread:
    """Run calls in sequence in a single thread, within `seconds` in total. `name` identifies it in
    errors.

    The thread starts with the first call. Awaitable results are awaited, always in the same event
    loop. A thread that hangs is abandoned: no caller waits for it any longer, and `abandon` is
    called.
    """

    def __init__(self, seconds: float, name: str, abandon: Callable[[], None] = lambda: None):
        self.left, self.name, self.abandon = seconds, name, abandon
        self.seconds = seconds
        self._waiting: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.broken = False

    def do(self, what: Callable[[], Any]) -> Work:
        """Queue a call. `wait` on the returned object gives its result."""
        work = Work(self, what)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        self._waiting.put(work)
        return work

    def end(self, last: Callable[[], Any]) -> None:
        """Queue the last call, if the thread was ever started. Its result and its errors are
        ignored.
        """
        if self._thread is not None and not self.broken:
            self._waiting.put(Work(self, last))
            self._waiting.put(None)
        self.broken = True

    def _run(self) -> None:
        """Process queued calls until None arrives."""
        loop: asyncio.AbstractEventLoop | None = None
        while (work := self._waiting.get()) is not None:
            try:
                result = work.what()
                if inspect.isawaitable(result):
                    loop = loop or asyncio.new_event_loop()
                    result = loop.run_until_complete(_awaited(result))
                work.finish(result)
            except BaseException as error:  # boundary: the user's code, SystemExit included
                work.fail(error)
        if loop is not None:
            loop.close()


async def _awaited(found: Any) -> Any:
    """Await any awaitable, as the coroutine that an event loop requires."""
    return await found


class Work:
    """Hold a queued call and its result."""

    def __init__(self, thread: EpisodeThread, what: Callable[[], Any]):
        self.thread, self.what = thread, what
        self.begun = time.monotonic()
        self._done = threading.Event()
        self._found: Any = None
        self._error: BaseException | None = None
        self._ended = self.begun

    def finish(self, found: Any) -> None:
        """Set the result."""
        self._found, self._ended = found, time.monotonic()
        self._done.set()

    def fail(self, error: BaseException) -> None:
        """Set the error."""
        self._error, self._ended = error, time.monotonic()
        self._done.set()

    def until_done(self) -> None:
        """Block as long as `wait` would, without raising."""
        self._done.wait(max(0.0, self.begun + self.thread.left - time.monotonic()))

    def wait(self) -> Any:
        """Return the result. Raises EpisodeFailed if the call raised, or exceeded the remaining
        time.
        """
        thread = self.thread
        if not self._done.wait(max(0.0, self.begun + thread.left - time.monotonic())):
            thread.broken = True
            thread.abandon()
            raise EpisodeFailed(
                f"the environment {thread.name} was not done within its {thread.seconds:g} s"
            )
        thread.left -= self._ended - self.begun
        if isinstance(self._error, EpisodeFailed):
            raise EpisodeFailed(str(self._error)) from self._error
        if self._error is not None:
            raise EpisodeFailed(
                f"the environment {thread.name} raised {says(self._error, 1000)}"
            ) from self._error
        return self._found
