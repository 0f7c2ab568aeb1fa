"""Hold a connection in a single task of an event loop, from its start to its end, for callers in
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


class ClientSession:
    """Open `client` (an asynchronous context manager) in a separate task and call it in that task,
    as libraries on anyio require.

    `call` blocks; calls of several threads run concurrently. The constructor raises if the server
    cannot be reached.
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

    def call(self, function: Callable[[Any], Awaitable[Any]], seconds: float | None = None) -> Any:
        """Return the result of `function(client)`. Raises TimeoutError at the time limit, and any
        error of the call.
        """
        future: Future[Any] = asyncio.run_coroutine_threadsafe(
            _call(function, self._client), self._loop
        )
        limit = self.seconds if seconds is None else seconds
        try:
            return future.result(limit)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"the server did not answer within {limit:g} s") from None

    def close(self) -> None:
        """Close the connection."""
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join(_END_SECONDS)

    def _run(self, client: Callable[[], Any]) -> None:
        """Run the event loop of the connection; report an error to the constructor."""
        try:
            asyncio.run(self._keep_open(client))
        except (
            BaseException
        ) as error:  # boundary: an error of the library, raised again in the constructor
            self._ready.put((None, error))

    async def _keep_open(self, client: Callable[[], Any]) -> None:
        """Keep the connection open until `close`."""
        self._closing = asyncio.Event()
        async with client() as self._client:
            self._ready.put((asyncio.get_running_loop(), None))
            await self._closing.wait()


async def _call(function: Callable[[Any], Awaitable[Any]], client: Any) -> Any:
    """Call inside the event loop: some clients run synchronously outside a loop (OpenEnv from
    0.10).
    """
    return await function(client)
