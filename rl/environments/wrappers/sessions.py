"""A connection that one task of an event loop holds from its beginning to its end, for callers in
other threads.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

_END_SECONDS = 5.0


class Session:
    """Opens `client` (an asynchronous context manager) in a task of its own and calls it there:
    what libraries on anyio ask for.

    `call` waits; calls of several threads run side by side. A server that cannot be reached is an
    error of the constructor.
    """

    def __init__(self, client: Callable[[], Any], seconds: float):
        self.seconds = seconds
        self._ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(client,), name="session", daemon=True
        )
        self._thread.start()
        try:
            self._loop, error = self._ready.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"the server did not answer within {seconds:g} s") from None
        if error is not None:
            raise error

    def call(self, what: Callable[[Any], Awaitable[Any]], seconds: float | None = None) -> Any:
        """What `what(client)` comes to. Raises TimeoutError, and what it raises."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(
            _call(what, self._client), self._loop
        )
        limit = self.seconds if seconds is None else seconds
        try:
            return future.result(limit)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"the server did not answer within {limit:g} s") from None

    def close(self) -> None:
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join(_END_SECONDS)

    def _run(self, client: Callable[[], Any]) -> None:
        try:
            asyncio.run(self._hold(client))
        except (
            BaseException
        ) as error:  # boundary: the library's; whoever waits for the session is told
            self._ready.put((None, error))

    async def _hold(self, client: Callable[[], Any]) -> None:
        self._over = asyncio.Event()
        async with client() as self._client:
            self._ready.put((asyncio.get_running_loop(), None))
            await self._over.wait()


async def _call(what: Callable[[Any], Awaitable[Any]], client: Any) -> Any:
    """Call inside the event loop: some clients run at once where there is none (OpenEnv from 0.10)."""
    return await what(client)
