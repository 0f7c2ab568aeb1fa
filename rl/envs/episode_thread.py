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

from rl.rollout import EpisodeFailed
from rl.sanitize import describe_error


class EpisodeThread:
    """Run calls in sequence in a single thread, within `seconds` in total. `name` identifies it in
    errors.

    The thread starts with the first call. Awaitable results are awaited, always in the same event
    loop. A thread that hangs is abandoned: no caller waits for it any longer, and `on_abandon` is
    called.
    """

    def __init__(self, seconds: float, name: str, on_abandon: Callable[[], None] = lambda: None):
        self.remaining_seconds, self.name, self.on_abandon = seconds, name, on_abandon
        self.seconds = seconds
        self._queue: queue.SimpleQueue[ThreadCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.broken = False

    def submit(self, function: Callable[[], Any]) -> ThreadCall:
        """Queue a call. `wait` on the returned object gives its result."""
        work = ThreadCall(self, function)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        self._queue.put(work)
        return work

    def finish(self, function: Callable[[], Any]) -> None:
        """Queue the last call, if the thread was ever started. Its result and its errors are
        ignored.
        """
        if self._thread is not None and not self.broken:
            self._queue.put(ThreadCall(self, function))
            self._queue.put(None)
        self.broken = True

    def _run(self) -> None:
        """Process queued calls until None arrives."""
        loop: asyncio.AbstractEventLoop | None = None
        while (work := self._queue.get()) is not None:
            try:
                result = work.function()
                if inspect.isawaitable(result):
                    loop = loop or asyncio.new_event_loop()
                    result = loop.run_until_complete(_await_value(result))
                work.set_result(result)
            except BaseException as error:  # boundary: the user's code, SystemExit included
                work.set_error(error)
        if loop is not None:
            loop.close()


async def _await_value(value: Any) -> Any:
    """Await any awaitable, as the coroutine that an event loop requires."""
    return await value


class ThreadCall:
    """Hold a queued call and its result."""

    def __init__(self, thread: EpisodeThread, function: Callable[[], Any]):
        self.thread, self.function = thread, function
        self.start_time = time.monotonic()
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None
        self._end_time = self.start_time

    def set_result(self, result: Any) -> None:
        """Set the result."""
        self._result, self._end_time = result, time.monotonic()
        self._done.set()

    def set_error(self, error: BaseException) -> None:
        """Set the error."""
        self._error, self._end_time = error, time.monotonic()
        self._done.set()

    def wait_until_done(self) -> None:
        """Block as long as `result` would, without raising."""
        self._done.wait(
            max(0.0, self.start_time + self.thread.remaining_seconds - time.monotonic())
        )

    def result(self) -> Any:
        """Return the result. Raises EpisodeFailed if the call raised, or exceeded the remaining
        time.
        """
        thread = self.thread
        if not self._done.wait(
            max(0.0, self.start_time + thread.remaining_seconds - time.monotonic())
        ):
            thread.broken = True
            thread.on_abandon()
            raise EpisodeFailed(
                f"the environment {thread.name} was not done within its {thread.seconds:g} s"
            )
        thread.remaining_seconds -= self._end_time - self.start_time
        if isinstance(self._error, EpisodeFailed):
            raise EpisodeFailed(str(self._error)) from self._error
        if self._error is not None:
            raise EpisodeFailed(
                f"the environment {thread.name} raised {describe_error(self._error, 1000)}"
            ) from self._error
        return self._result
