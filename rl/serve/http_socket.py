"""Bind a server's address and check its certificate, before a model is loaded."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from pathlib import Path

from rl.errors import UserError
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
