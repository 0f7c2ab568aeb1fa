"""Limit the time in which a client sends a request: head (request line and headers), and body."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rl.serve.http_errors import HttpError

# lowest accepted rate of a body, in bytes per second: each byte extends the timeout by its inverse
_MIN_BYTES_PER_SECOND = 65_536

ReceiveFn = Callable[[], Awaitable[MutableMapping[str, Any]]]


def make_timeout_protocol(header_seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with a timeout for the head of a request.

    It closes a connection if the head has not arrived after `header_seconds`. uvicorn itself limits
    only the idle time of a connection after a response.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """Close connections with a late head."""

        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head_timer = self.loop.call_later(header_seconds, self._head_is_late)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._answers():
                self._stop_timer()
            elif self._head_timer is None:
                # the first bytes of the next request; further bytes do not extend its timeout
                self._head_timer = self.loop.call_later(header_seconds, self._head_is_late)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _answers(self) -> bool:
            """Return whether a request has a complete head and no complete response."""
            return self.cycle is not None and not self.cycle.response_complete

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

        def _head_is_late(self) -> None:
            self._head_timer = None
            if not self._answers() and not self.transport.is_closing():
                self.transport.close()

    return LimitedProtocol


def limit_body(receive: ReceiveFn, limit: int, seconds: float) -> ReceiveFn:
    """Return a `receive` that limits size and duration of a body.

    It raises HttpError (413) for a body of more than `limit` bytes, and HttpError (408) for a slow
    body. The timeout is `seconds`, plus a second for every 64 KiB received.
    """
    length, complete, start = 0, False, time.monotonic()

    async def next_message() -> MutableMapping[str, Any]:
        nonlocal length, complete
        if complete:
            # waits for the client to disconnect, while the response is computed
            return await receive()
        remaining = start + seconds + length / _MIN_BYTES_PER_SECOND - time.monotonic()
        try:
            message = await asyncio.wait_for(receive(), max(remaining, 0.001))
        except TimeoutError:
            raise HttpError(
                408,
                f"received only {length} bytes of the body in {time.monotonic() - start:.0f} s: "
                "send it faster",
            ) from None
        length += len(message.get("body", b""))
        complete = message["type"] != "http.request" or not message.get("more_body", False)
        if length > limit:
            raise HttpError(413, f"a body may have at most {limit} bytes: send less at once")
        return message

    return next_message
