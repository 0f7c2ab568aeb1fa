"""Threads that wait for environments and rewards, so that who is ready goes on while others are
not.
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
    """Something that is waited for, `seconds` at most (None: as long as it takes) from when its
    turn came.
    """

    key: Key
    what: Callable[[], Any]
    seconds: float | None
    begun: float | None = None
    done: bool = False
    found: Any = None
    error: BaseException | None = None

    def late(self, now: float) -> bool:
        return (
            not self.done
            and self.begun is not None
            and self.seconds is not None
            and now > self.begun + self.seconds
        )


class Waiters:
    """At most `limit` waits at once, each in a daemon thread; what is awaitable is awaited, all of
    it on one event loop.

    A wait that outlives its time has failed (EpisodeFailed) and its thread is given up: another
    takes its place, and nobody waits for it, not at the end of the process either.
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
        """How many more may begin."""
        with self._changed:
            return self.limit - sum(not wait.done for wait in self._waits.values())

    def __len__(self) -> int:
        return len(self._waits)

    def keys(self) -> set[Key]:
        """Of all waits."""
        with self._changed:
            return set(self._waits)

    def begin(self, key: Key, what: Callable[[], Any], seconds: float | None = None) -> None:
        wait = _Wait(key, what, seconds)
        with self._changed:
            self._waits[key] = wait
            self._queue.append(wait)
            self._staff()
            self._changed.notify_all()

    def ready(self) -> list[Key]:
        """Whose wait is over, in order."""
        with self._changed:
            self._give_up_late()
            return sorted(key for key, wait in self._waits.items() if wait.done)

    def wait(self, keys: set[Key] | None = None) -> None:
        """Until something is ready (`keys`: all of these are), or somebody pokes."""
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
        """Something else has happened: who waits looks."""
        with self._changed:
            self._poked = True
            self._changed.notify_all()

    def take(self, key: Key) -> Any:
        """What a wait that is over has found. Raises what it raised."""
        with self._changed:
            wait = self._waits.pop(key)
        if wait.error is not None:
            raise wait.error
        return wait.found

    def forget(self, key: Key) -> None:
        """Nobody is interested any more."""
        with self._changed:
            wait = self._waits.pop(key, None)
            if wait is not None and wait in self._queue:
                self._queue.remove(wait)
            elif wait is not None and not wait.done:
                self._threads -= 1  # its thread ends when it does; another may take its place
                self._staff()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def _give_up_late(self) -> None:
        now = time.monotonic()
        for wait in self._waits.values():
            if wait.late(now):
                wait.done, wait.error = (
                    True,
                    EpisodeFailed(f"the environment did not answer within its {wait.seconds:g} s"),
                )
                self._threads -= 1
        self._staff()

    def _staff(self) -> None:
        """A thread for each wait that has its turn and none."""
        while len(self._queue) > self._idle and self._threads < self.limit:
            self._threads += 1
            self._idle += 1
            threading.Thread(target=self._run, name=f"waits-{self._threads}", daemon=True).start()

    def _run(self) -> None:
        while True:  # counted as idle when it is started, and when it comes back
            with self._changed:
                while not self._queue and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if self._closed:
                    return
                wait = self._queue.popleft()
                wait.begun = time.monotonic()
                self._changed.notify_all()
            found, error = None, None
            try:
                found = wait.what()
                if inspect.isawaitable(found):
                    found = asyncio.run_coroutine_threadsafe(
                        _awaited(found), self._event_loop()
                    ).result()
            except (
                BaseException
            ) as caught:  # boundary: the user's code; whoever takes the result is told
                error = caught
            with self._changed:
                if wait.done or self._waits.get(wait.key) is not wait:
                    return  # given up: another thread has this one's place
                wait.found, wait.error, wait.done = found, error, True
                self._idle += 1
                self._changed.notify_all()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._changed:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(
                    target=self._loop.run_forever, name="waits-loop", daemon=True
                ).start()
            return self._loop


async def _awaited(found: Any) -> Any:
    return await found
