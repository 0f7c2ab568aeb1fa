"""Run environment code that may block or hang: one deadline for every kind of call.

A call runs in a thread (`EnvThread`) or on an event loop (`EventLoopThread`). `EnvExecutor` waits
for many calls together, so that episodes that are ready continue while others wait.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from rl.rollout.rollout_types import EpisodeFailed
from rl.sanitize import describe_error

EpisodeKey = tuple[int, int]  # an episode: group and member
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(eq=False)
class EnvCall:
    """Hold a call in progress, which fails at its deadline. `convert` converts its result in the
    thread that asks for it. `on_late` is called if the deadline has passed.
    """

    future: Future[Any]
    name: str
    seconds: float | None
    get_deadline: Callable[[], float | None]
    on_late: Callable[[], object]
    convert: Callable[[Any], Any] | None
    start_time: float = field(init=False, default_factory=time.monotonic)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` with the future once the call has ended."""
        self.future.add_done_callback(callback)

    @property
    def deadline(self) -> float | None:
        """Return the deadline, as of time.monotonic. It moves while the call is queued."""
        return self.get_deadline()

    def result(self) -> Any:
        """Return the converted result. Raises EpisodeFailed if the call raised, or was not done at
        its deadline.
        """
        while not self.future.done():
            deadline = self.deadline
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                self.on_late()
                raise EpisodeFailed(f"{self.name} was not done within its {self.seconds:g} s")
            wait_for_futures([self.future], remaining)
        try:
            result = self.future.result()
        except EpisodeFailed:
            raise
        except BaseException as error:  # boundary: the user's code, SystemExit included
            raise EpisodeFailed(f"{self.name} raised {describe_error(error, 1000)}") from error
        return result if self.convert is None else self.convert(result)


class EnvThread:
    """Run calls in sequence in a single thread, within `seconds` in total (None: not limited).
    `name` identifies it in errors.

    The thread starts with the first call. Awaitable results are awaited, always in the same event
    loop: the thread's, so that a coroutine that blocks delays no other episode. If a call hangs, no
    caller waits for it any longer, and `on_abandon` is called.
    """

    def __init__(
        self, seconds: float | None, name: str, on_abandon: Callable[[], object] = lambda: None
    ):
        self.seconds = self.remaining_seconds = seconds
        self.name, self.on_abandon = name, on_abandon
        self._is_finished = False
        self._queue: queue.SimpleQueue[tuple[EnvCall, Callable[[], Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def submit(
        self, function: Callable[[], Any], convert: Callable[[Any], Any] | None = None
    ) -> EnvCall:
        """Queue a call."""
        remaining = self.remaining_seconds
        deadline = None if remaining is None else time.monotonic() + remaining
        call = EnvCall(
            Future(), self.name, self.seconds, lambda: deadline, self.on_abandon, convert
        )
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        self._queue.put((call, function))
        return call

    def finish(self, *functions: Callable[[], Any]) -> None:
        """Queue the last calls, if the thread was ever started. Their results and errors are
        ignored. If a call hangs, the last calls run after its end.
        """
        if self._thread is not None and not self._is_finished:
            for function in functions:
                self.submit(function)
            self._queue.put(None)
        self._is_finished = True

    def _run(self) -> None:
        """Process queued calls until None arrives."""
        loop: asyncio.AbstractEventLoop | None = None
        while (work := self._queue.get()) is not None:
            call, function = work
            try:
                result = function()
                if inspect.isawaitable(result):
                    loop = loop or asyncio.new_event_loop()
                    result = loop.run_until_complete(await_value(result))
                error = None
            except BaseException as raised:  # boundary: the user's code, SystemExit included
                result, error = None, raised
            if self.remaining_seconds is not None:
                self.remaining_seconds -= time.monotonic() - call.start_time
            if error is None:
                call.future.set_result(result)
            else:
                call.future.set_exception(error)
        if loop is not None:
            loop.close()


class EventLoopThread:
    """Run calls on an event loop in a separate thread, each within `seconds` of its beginning.

    A call that waits behind a call that blocks the loop has `seconds` from when the loop last began
    or ended a call, so that a loop that hangs delays no caller for longer.
    """

    def __init__(self, name: str, seconds: float | None = None):
        self.name, self.seconds = name, seconds
        self._last_progress = time.monotonic()  # when the loop last began or ended a call
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        """Run the loop until it is stopped."""
        self.loop.run_forever()
        if tasks := asyncio.all_tasks(self.loop):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=5.0))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def submit(
        self, function: Callable[[], Any], convert: Callable[[Any], Any] | None = None
    ) -> EnvCall:
        """Start a call in the loop, and await its result if it is awaitable."""
        submitted, begun = time.monotonic(), []

        async def run() -> Any:
            begun.append(time.monotonic())
            self._last_progress = begun[0]
            try:
                return await await_value(function())
            except SystemExit as error:  # would end the loop, and the other episodes on it
                raise RuntimeError(f"SystemExit: {error}") from error
            finally:
                self._last_progress = time.monotonic()

        def get_deadline() -> float | None:
            if self.seconds is None:
                return None
            start = begun[0] if begun else max(submitted, self._last_progress)
            return start + self.seconds

        task = asyncio.run_coroutine_threadsafe(run(), self.loop)
        return EnvCall(task, self.name, self.seconds, get_deadline, task.cancel, convert)

    def run(self, awaitable: Any) -> Any:
        """Await an awaitable of another thread in the loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(await_value(awaitable), self.loop).result()

    def close(self) -> None:
        """Stop the loop."""
        self.loop.call_soon_threadsafe(self.loop.stop)


async def await_value(value: Any) -> Any:
    """Return a value, awaited if it is awaitable, as the coroutine that an event loop requires."""
    return await value if inspect.isawaitable(value) else value


def trace_score(function: Callable[P, T]) -> Callable[P, T]:
    """Let a profile show a function as a part of scoring."""

    @functools.wraps(function)
    def traced(*inputs: P.args, **options: P.kwargs) -> T:
        from torch.profiler import record_function  # here, since help texts do not import torch

        with record_function("whetstone/score"):
            return function(*inputs, **options)

    return traced


class EnvExecutor:
    """Wait for the pending results of episodes. At most `limit` should be pending at once, until
    they are taken or discarded.

    A pending result is an EnvCall, a PendingScore or a Future. It may have a `deadline`, as of
    time.monotonic.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._condition = threading.Condition()
        self._pending: dict[EpisodeKey, Any] = {}
        self._finished: set[EpisodeKey] = set()
        self._woken = False
        self._loop: EventLoopThread | None = None

    @property
    def free_slots(self) -> int:
        """Return the number of further results that may be pending. A result that is not taken yet
        counts, so that a replay, which takes it at the same tick, has the same number.
        """
        return self.limit - len(self._pending)

    def __len__(self) -> int:
        return len(self._pending)

    def keys(self) -> set[EpisodeKey]:
        """Return the keys of all pending and finished results."""
        return set(self._pending)

    def watch(self, key: EpisodeKey, pending: Any) -> None:
        """Wait for a pending result under `key`."""
        self._pending[key] = pending
        pending.add_done_callback(lambda _: self._mark_finished(key, pending))

    def _mark_finished(self, key: EpisodeKey, pending: Any) -> None:
        """Wake `wait` for a finished result, unless it was discarded."""
        with self._condition:
            if self._pending.get(key) is pending:
                self._finished.add(key)
                self._condition.notify_all()

    def finished_keys(self) -> list[EpisodeKey]:
        """Return the keys of the results that are finished or have passed their deadline, in
        order.
        """
        now = time.monotonic()
        with self._condition:
            overdue = {key for key, deadline in self._deadlines().items() if deadline <= now}
            return sorted(self._finished | overdue)

    def _deadlines(self) -> dict[EpisodeKey, float]:
        """Return the deadlines of the pending results that have any."""
        deadlines = {
            key: getattr(pending, "deadline", None) for key, pending in self._pending.items()
        }
        return {key: deadline for key, deadline in deadlines.items() if deadline is not None}

    def wait(self, keys: set[EpisodeKey] | None = None) -> None:
        """Wait until a result is finished (with `keys`: until all of these are), or until
        `wake`.
        """
        from torch.profiler import record_function  # here, since help texts do not import torch

        with record_function("whetstone/wait"), self._condition:
            while True:
                done = set(self.finished_keys())
                if self._woken or (done if keys is None else keys <= done):
                    self._woken = False
                    return
                deadlines = [
                    deadline for key, deadline in self._deadlines().items() if key not in done
                ]
                self._condition.wait(
                    max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
                )

    def wake(self) -> None:
        """Wake `wait` because of another event."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    @trace_score
    def take_result(self, key: EpisodeKey) -> Any:
        """Remove a finished result and return it. Raises the exception that the call raised."""
        pending = self._pending[key]
        self.discard(key)
        return pending.result()

    def discard(self, key: EpisodeKey) -> None:
        """Discard a result, whether finished or not."""
        with self._condition:
            self._pending.pop(key, None)
            self._finished.discard(key)

    def run_awaitable(self, awaitable: Any) -> Any:
        """Await an awaitable on the event loop of all episodes, and return its result."""
        with self._condition:
            self._loop = self._loop or EventLoopThread("environments")
        return self._loop.run(awaitable)

    def close(self) -> None:
        """Stop the event loop, if any."""
        if self._loop is not None:
            self._loop.close()
