"""Bind a server's address and check its certificate, before a model is loaded; limit the time in
which a client sends a request: head (request line and headers), and body.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from rl.errors import UserError
from rl.serve.http_errors import HttpError
from rl.serve.serve_settings import ServeSettings

_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def bind_sockets(settings: ServeSettings) -> list[socket.socket]:
    """Return bound sockets for the host and port, a socket for each local address of the host name.

    The sockets do not listen yet: early connections are refused, and no other process gets the
    port. Raises UserError if no address can be bound.
    """
    try:
        addresses = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(
            f"--host {settings.host}: {getattr(error, 'strerror', None) or error}"
        ) from error
    sockets: list[socket.socket] = []
    last_error: OSError | None = None
    for family, _, _, _, (host, port, *more) in sorted(
        set(addresses), key=lambda info: info[0] != socket.AF_INET
    ):
        if sockets:  # port 0 selects any free port, which all sockets must share
            port = sockets[0].getsockname()[1]
        try:
            sockets.append(_bind_socket(family, (host, port, *more)))
        except OSError as error:
            if error.errno not in _NO_SUCH_ADDRESS:
                close_sockets(sockets)
                raise _make_bind_error(settings, error) from error
            last_error = error
    if not sockets:
        raise _make_bind_error(settings, last_error) from last_error
    return sockets


def _bind_socket(family: int, address: tuple) -> socket.socket:
    """Return a socket that is bound to `address`.

    With SO_REUSEADDR, Linux lets two sockets bind the same port as long as neither listens.
    Therefore SO_REUSEADDR is set only if binding fails without it, which happens while connections
    of an ended server remain on the port. It is cleared after binding, until `allow_port_reuse`.
    """
    for reuse in (False, True):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET6:
                # IPv4 has a separate socket
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
            sock.bind(address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            return sock
        except OSError as error:
            sock.close()
            if reuse or error.errno != errno.EADDRINUSE or os.name != "posix":
                raise
    raise AssertionError


def allow_port_reuse(sockets: list[socket.socket]) -> None:
    """Set SO_REUSEADDR before the sockets listen.

    The next server on the port then need not wait for remaining connections of this server.
    """
    for sock in sockets:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def close_sockets(sockets: list[socket.socket]) -> None:
    """Close the sockets."""
    for sock in sockets:
        sock.close()


def _make_bind_error(settings: ServeSettings, error: OSError | None) -> UserError:
    """Return the error for an address that cannot be bound, with its remedy."""
    remedy = {
        errno.EADDRINUSE: "the port is in use: pass another --port (0 selects any free port)",
        errno.EACCES: "this user lacks the rights for it: pass a --port above 1023",
        errno.EADDRNOTAVAIL: "this machine has no such address: pass an address of this machine, "
        "or 0.0.0.0 for all",
        errno.EAFNOSUPPORT: "this machine has no address of this family: pass an address of this "
        "machine, or 0.0.0.0 for all",
    }
    reason = remedy.get(error.errno or 0, str(error)) if error is not None else "it has no address"
    return UserError(f"--host {settings.host} --port {settings.port}: {reason}")


def check_certificate(cert: Path | None, key: Path | None) -> None:
    """Raise UserError if the TLS files cannot be read, or are not a certificate and its key."""
    if cert is None or key is None:
        return
    for flag, path in (("--tls-cert", cert), ("--tls-key", key)):
        if not os.access(path, os.R_OK) or not Path(path).is_file():
            raise UserError(f"{flag} {path}: no such file, or it cannot be read")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, lambda: "")
    except (ssl.SSLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise UserError(
            f"--tls-cert {cert} and --tls-key {key} are not a certificate and its key, in PEM and "
            f"without a password ({reason})"
        ) from error


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
            self._update_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._update_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _update_timer(self) -> None:
            """Stop the timer while a request with a complete head is answered; otherwise start it.

            The first bytes of the next request start it, and further bytes do not extend it.
            """
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_timer()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(header_seconds, self.transport.close)

        def _stop_timer(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

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
