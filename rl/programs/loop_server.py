"""Serve an ASGI application on loopback, from an event loop in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from rl.errors import UserError, install_command

_START_SECONDS = 30.0
HOST = "127.0.0.1"


class LoopServer:
    """Run an application in a thread. `close` ends the server; the end of the process does as well.

    `url`: its address, a free port on loopback.
    """

    def __init__(self, application: Callable[[], Any], name: str):
        try:
            import uvicorn
        except ImportError as error:
            raise UserError(
                f"{name} needs uvicorn and starlette: {install_command('serve')}"
            ) from error
        self._socket = socket.socket()
        self._socket.bind((HOST, 0))
        self._socket.listen(2048)
        self.url = f"http://{HOST}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            application(),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=300,
            ws="none",
        )
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        if not self._started.wait(_START_SECONDS):
            raise UserError(
                f"{name} did not start listening at {self.url} within {_START_SECONDS:g} s"
            )

    def _run(self) -> None:
        """Run the event loop until the server ends."""
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._started.set)
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self._server.serve(sockets=[self._socket]))

    @property
    def is_alive(self) -> bool:
        """Return whether the server's thread is running."""
        return self._thread.is_alive()

    def run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run a coroutine in the server's event loop, and return its future."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in the server's event loop; do nothing if the loop has ended."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        """End the server, and wait up to 10 s for its thread."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(timeout=10.0)
