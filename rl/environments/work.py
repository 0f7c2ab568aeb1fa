"""Somebody's code, run in a thread of its own within a limit of time: what it raises or how it
hangs is said, and costs no more.
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
    """Does one thing after the other, `seconds` in all, for what is called `name`. Its thread
    begins with the first of them.

    What is awaitable is awaited, always in the same event loop. A thread that hangs is abandoned:
    nothing waits for it any more, and `abandon` is called.
    """

    def __init__(self, seconds: float, name: str, abandon: Callable[[], None] = lambda: None):
        self.left, self.name, self.abandon = seconds, name, abandon
        self.seconds = seconds
        self._waiting: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.broken = False

    def do(self, what: Callable[[], Any]) -> Work:
        """Begins it; `wait` on what is returned gives its result."""
        work = Work(self, what)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        self._waiting.put(work)
        return work

    def end(self, last: Callable[[], Any]) -> None:
        """The last thing to do, if the thread ever did anything; nobody waits for it, and what it
        raises is nobody's concern.
        """
        if self._thread is not None and not self.broken:
            self._waiting.put(Work(self, last))
            self._waiting.put(None)
        self.broken = True

    def _run(self) -> None:
        loop: asyncio.AbstractEventLoop | None = None
        while (work := self._waiting.get()) is not None:
            try:
                found = work.what()
                if inspect.isawaitable(found):
                    loop = loop or asyncio.new_event_loop()
                    found = loop.run_until_complete(_awaited(found))
                work.finish(found)
            except BaseException as error:  # boundary: the user's code, SystemExit included
                work.fail(error)
        if loop is not None:
            loop.close()


async def _awaited(found: Any) -> Any:
    return await found


class Work:
    """One thing that is being done."""

    def __init__(self, thread: EpisodeThread, what: Callable[[], Any]):
        self.thread, self.what = thread, what
        self.begun = time.monotonic()
        self._done = threading.Event()
        self._found: Any = None
        self._error: BaseException | None = None
        self._ended = self.begun

    def finish(self, found: Any) -> None:
        self._found, self._ended = found, time.monotonic()
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error, self._ended = error, time.monotonic()
        self._done.set()

    def until_done(self) -> None:
        """Waits as long as `wait` would, and says nothing."""
        self._done.wait(max(0.0, self.begun + self.thread.left - time.monotonic()))

    def wait(self) -> Any:
        """Its result. Raises EpisodeFailed where it raised, or was not done within the time that
        was left.
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
