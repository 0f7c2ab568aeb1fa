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

from rl.rollout.rollout_types import EpisodeFailed

EpisodeKey = tuple[int, int]  # an episode: group and member


@dataclass(slots=True)
class _EnvCall:
    """Hold a pending call with a timeout of `timeout` from its start (None: no timeout)."""

    key: EpisodeKey
    function: Callable[[], Any]
    timeout: float | None
    start_time: float | None = None
    done: bool = False
    result: Any = None
    error: BaseException | None = None

    def is_late(self, now: float) -> bool:
        """Return whether the call has exceeded its timeout at time `now`."""
        return (
            not self.done
            and self.start_time is not None
            and self.timeout is not None
            and now > self.start_time + self.timeout
        )


class EnvExecutor:
    """Run at most `limit` calls at the same time, each in a daemon thread. Awaitables all run on a
    single event loop.

    A call that exceeds its timeout fails with EpisodeFailed and its thread is abandoned: a new
    thread replaces it, and no code joins the abandoned thread, not even at the end of the process.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._condition = threading.Condition()
        self._queue: deque[_EnvCall] = deque()
        self._calls: dict[EpisodeKey, _EnvCall] = {}
        self._threads = self._idle = 0
        self._woken = self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def free_slots(self) -> int:
        """Return the number of further calls that may start."""
        with self._condition:
            return self.limit - sum(not wait.done for wait in self._calls.values())

    def __len__(self) -> int:
        return len(self._calls)

    def keys(self) -> set[EpisodeKey]:
        """Return the keys of all calls."""
        with self._condition:
            return set(self._calls)

    def submit(
        self, key: EpisodeKey, function: Callable[[], Any], timeout: float | None = None
    ) -> None:
        """Queue the call `function` under `key`, with a timeout of `timeout`."""
        wait = _EnvCall(key, function, timeout)
        with self._condition:
            self._calls[key] = wait
            self._queue.append(wait)
            self._start_threads()
            self._condition.notify_all()

    def finished_keys(self) -> list[EpisodeKey]:
        """Return the keys of the finished calls, in order."""
        with self._condition:
            self._fail_late_calls()
            return sorted(key for key, wait in self._calls.items() if wait.done)

    def wait(self, keys: set[EpisodeKey] | None = None) -> None:
        """Wait until a call is finished (with `keys`: until all of these are finished), or until
        `wake`.
        """
        with self._condition:
            while True:
                self._fail_late_calls()
                done = {key for key, wait in self._calls.items() if wait.done}
                if self._woken or (done if keys is None else keys <= done):
                    self._woken = False
                    return
                now, times = (
                    time.monotonic(),
                    [
                        w.start_time + w.timeout
                        for w in self._calls.values()
                        if w.start_time and w.timeout and not w.done
                    ],
                )
                self._condition.wait(min(times) - now + 1e-3 if times else None)

    def wake(self) -> None:
        """Wake `wait` because of another event."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def take_result(self, key: EpisodeKey) -> Any:
        """Remove a finished call and return its result. Raises the exception that the call
        raised.
        """
        with self._condition:
            wait = self._calls.pop(key)
        if wait.error is not None:
            raise wait.error
        return wait.result

    def discard(self, key: EpisodeKey) -> None:
        """Discard a call, whether finished or not."""
        with self._condition:
            wait = self._calls.pop(key, None)
            if wait is not None and wait in self._queue:
                self._queue.remove(wait)
            elif wait is not None and not wait.done:
                self._threads -= 1  # its thread ends with the call; a new thread may replace it
                self._start_threads()
            self._condition.notify_all()

    def close(self) -> None:
        """Stop the idle threads and the event loop."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def _fail_late_calls(self) -> None:
        """Fail the calls that have exceeded their timeout."""
        now = time.monotonic()
        for wait in self._calls.values():
            if wait.is_late(now):
                wait.done, wait.error = (
                    True,
                    EpisodeFailed(
                        f"the environment did not answer within its timeout of {wait.timeout:g} s"
                    ),
                )
                self._threads -= 1
        self._start_threads()

    def _start_threads(self) -> None:
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
            with self._condition:
                while not self._queue and not self._closed:
                    self._condition.wait()
                self._idle -= 1
                if self._closed:
                    return
                wait = self._queue.popleft()
                wait.start_time = time.monotonic()
                self._condition.notify_all()
            result, error = None, None
            try:
                result = wait.function()
                if inspect.isawaitable(result):
                    result = asyncio.run_coroutine_threadsafe(
                        _await(result), self._event_loop()
                    ).result()
            except (
                BaseException
            ) as exception:  # boundary: user code; `take_result` raises the exception
                error = exception
            with self._condition:
                if wait.done or self._calls.get(wait.key) is not wait:
                    return  # abandoned: another thread has replaced this thread
                wait.result, wait.error, wait.done = result, error, True
                self._idle += 1
                self._condition.notify_all()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop for awaitables; start it on the first call."""
        with self._condition:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="waits-loop", daemon=True
                ).start()
            return self._loop


async def _await(awaitable: Any) -> Any:
    """Await an awaitable as a coroutine."""
    return await awaitable
