"""Wait for environments and rewards in threads, so that episodes that are ready continue while
others wait.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl.episodes.episode import EpisodeFailed

Key = tuple[int, int]  # an episode: group and member


@dataclass(slots=True)
class _Wait:
    """Hold a pending call with a timeout of `seconds` from its start (None: no timeout)."""

    key: Key
    what: Callable[[], Any]
    seconds: float | None
    begun: float | None = None
    done: bool = False
    found: Any = None
    error: BaseException | None = None

    def late(self, now: float) -> bool:
        """Return whether the call has exceeded its timeout at time `now`."""
        return (
            not self.done
            and self.begun is not None
            and self.seconds is not None
            and now > self.begun + self.seconds
        )


class Waiters:
    """Run at most `limit` calls at the same time, each in a daemon thread. Awaitables all run on a
    single event loop.

    A call that exceeds its timeout fails with EpisodeFailed and its thread is abandoned: a new
    thread replaces it, and no code joins the abandoned thread, not even at the end of the process.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._changed = threading.Condition()
        self._queue: deque[_Wait] = deque()
        self._waits: dict[Key, _Wait] = {}
        self._threads = self._idle = 0
        self._poked = self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def free(self) -> int:
        """Return the number of further calls that may start."""
        with self._changed:
            return self.limit - sum(not wait.done for wait in self._waits.values())

    def __len__(self) -> int:
        return len(self._waits)

    def keys(self) -> set[Key]:
        """Return the keys of all calls."""
        with self._changed:
            return set(self._waits)

    def begin(self, key: Key, what: Callable[[], Any], seconds: float | None = None) -> None:
        """Queue the call `what` under `key`, with a timeout of `seconds`."""
        wait = _Wait(key, what, seconds)
        with self._changed:
            self._waits[key] = wait
            self._queue.append(wait)
            self._staff()
            self._changed.notify_all()

    def ready(self) -> list[Key]:
        """Return the keys of the finished calls, in order."""
        with self._changed:
            self._give_up_late()
            return sorted(key for key, wait in self._waits.items() if wait.done)

    def wait(self, keys: set[Key] | None = None) -> None:
        """Wait until a call is finished (with `keys`: until all of these are finished), or until
        `poke`.
        """
        with self._changed:
            while True:
                self._give_up_late()
                done = {key for key, wait in self._waits.items() if wait.done}
                if self._poked or (done if keys is None else keys <= done):
                    self._poked = False
                    return
                now, times = (
                    time.monotonic(),
                    [
                        w.begun + w.seconds
                        for w in self._waits.values()
                        if w.begun and w.seconds and not w.done
                    ],
                )
                self._changed.wait(min(times) - now + 1e-3 if times else None)

    def poke(self) -> None:
        """Wake `wait` because of another event."""
        with self._changed:
            self._poked = True
            self._changed.notify_all()

    def take(self, key: Key) -> Any:
        """Remove a finished call and return its result. Raises the exception that the call
        raised.
        """
        with self._changed:
            wait = self._waits.pop(key)
        if wait.error is not None:
            raise wait.error
        return wait.found

    def forget(self, key: Key) -> None:
        """Discard a call, whether finished or not."""
        with self._changed:
            wait = self._waits.pop(key, None)
            if wait is not None and wait in self._queue:
                self._queue.remove(wait)
            elif wait is not None and not wait.done:
                self._threads -= 1  # its thread ends with the call; a new thread may replace it
                self._staff()
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the idle threads and the event loop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def _give_up_late(self) -> None:
        """Fail the calls that have exceeded their timeout."""
        now = time.monotonic()
        for wait in self._waits.values():
            if wait.late(now):
                wait.done, wait.error = (
                    True,
                    EpisodeFailed(
                        f"the environment did not answer within its timeout of {wait.seconds:g} s"
                    ),
                )
                self._threads -= 1
        self._staff()

    def _staff(self) -> None:
        """Start a thread for each queued call that no idle thread can take, up to `limit`
        threads.
        """
        while len(self._queue) > self._idle and self._threads < self.limit:
            self._threads += 1
            self._idle += 1
            threading.Thread(target=self._run, name=f"waits-{self._threads}", daemon=True).start()

    def _run(self) -> None:
        """Run queued calls in a thread until `close`."""
        while True:  # the thread counts as idle when it starts and after each call
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if self._closed:
                    return
                wait = self._queue.popleft()
                wait.begun = time.monotonic()
                self._changed.notify_all()
            result, error = None, None
            try:
                result = wait.what()
                if inspect.isawaitable(result):
                    result = asyncio.run_coroutine_threadsafe(
                        _awaited(result), self._event_loop()
                    ).result()
            except BaseException as exception:  # boundary: user code; `take` raises the exception
                error = exception
            with self._changed:
                if wait.done or self._waits.get(wait.key) is not wait:
                    return  # abandoned: another thread has replaced this thread
                wait.found, wait.error, wait.done = result, error, True
                self._idle += 1
                self._changed.notify_all()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop for awaitables; start it on the first call."""
        with self._changed:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="waits-loop", daemon=True
                ).start()
            return self._loop


async def _awaited(found: Any) -> Any:
    """Await an awaitable as a coroutine."""
    return await found
