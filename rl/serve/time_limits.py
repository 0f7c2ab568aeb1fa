"""How long a client may take to send a request: its head (request line and headers), and its body."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rl.serve.refusals import Refused

# bytes a second of a body: every one of them gives its sender that much more time
_LEAST_RATE = 65_536

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


def limited_protocol(header_seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol, which closes a connection whose request's head has not come
    after so many seconds.

    uvicorn itself limits only how long a connection idles after an answer.
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class LimitedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _head_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head_timer = self.loop.call_later(header_seconds, self._head_is_late)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._answers():
                self._stop_timer()
            elif (
                self._head_timer is None
            ):  # the first bytes of another request; the rest of them does not move its limit
                self._head_timer = self.loop.call_later(header_seconds, self._head_is_late)

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _answers(self) -> bool:
            """Whether a head has come whose request is not answered yet."""
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


def bounded(receive: Receive, limit: int, seconds: float) -> Receive:
    """Return a `receive` that raises Refused for a body of more than `limit` bytes (413), and for
    one that is too slow (408).

    A body has `seconds`, and a second more for every 64 KiB that have come.
    """
    length, whole, begin = 0, False, time.monotonic()

    async def next_message() -> MutableMapping[str, Any]:
        nonlocal length, whole
        if whole:
            # waits for the client to hang up, for as long as the answer takes
            return await receive()
        left = begin + seconds + length / _LEAST_RATE - time.monotonic()
        try:
            message = await asyncio.wait_for(receive(), max(left, 0.001))
        except TimeoutError:
            raise Refused(
                408,
                f"only {length} bytes of the body came in {time.monotonic() - begin:.0f} s: send it faster",
            ) from None
        length += len(message.get("body", b""))
        whole = message["type"] != "http.request" or not message.get("more_body", False)
        if length > limit:
            raise Refused(413, f"a body may have {limit} bytes here: send less at once")
        return message

    return next_message
