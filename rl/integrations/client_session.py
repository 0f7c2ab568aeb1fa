"""Hold a connection in a single task of an event loop, from its start to its end, for callers in
other threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any

from rl.rollout import EventLoopThread

_END_SECONDS = 5.0


class ClientSession:
    """Open `client` (an asynchronous context manager) in a separate task and call it in that task,
    as libraries on anyio require.

    `call` blocks; calls of several threads run concurrently. The constructor raises if the server
    cannot be reached.
    """

    def __init__(self, client: Callable[[], Any], seconds: float):
        self.seconds, self._loop = seconds, EventLoopThread("session")
        self._closing = asyncio.Event()
        opened: Future[Any] = Future()
        self._task = self._submit(self._keep_open(client, opened))
        # the task also ends if the client cannot be opened
        if not wait([opened, self._task], seconds, "FIRST_COMPLETED").done:
            self._loop.close()  # cancels the task, which ends what the client has started
            raise TimeoutError(f"the server did not answer within {seconds:g} s")
        if not opened.done():
            self._loop.close()
            self._task.result()
        self._client = opened.result()

    def _submit(self, coroutine: Any) -> Future[Any]:
        """Run a coroutine in the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop.loop)

    def call(self, function: Callable[[Any], Awaitable[Any]], seconds: float | None = None) -> Any:
        """Return the result of `function(client)`. Raises TimeoutError at the time limit, and any
        error of the call.
        """
        future = self._submit(_call(function, self._client))
        limit = self.seconds if seconds is None else seconds
        try:
            return future.result(limit)
        except TimeoutError:
            future.cancel()
            raise TimeoutError(f"the server did not answer within {limit:g} s") from None

    def close(self) -> None:
        """Close the connection."""
        if self._loop.loop.is_closed():
            return
        self._loop.loop.call_soon_threadsafe(self._closing.set)
        wait([self._task], _END_SECONDS)
        self._loop.close()  # cancels the task if the connection does not close

    async def _keep_open(self, client: Callable[[], Any], opened: Future[Any]) -> None:
        """Keep the connection open until `close`."""
        async with client() as opened_client:
            opened.set_result(opened_client)
            await self._closing.wait()


async def _call(function: Callable[[Any], Awaitable[Any]], client: Any) -> Any:
    """Call inside the event loop: some clients run synchronously outside a loop (OpenEnv from
    0.10).
    """
    return await function(client)
