"""Where a server listens: its address is taken, and its certificate read, before a model is loaded."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from pathlib import Path

from rl.errors import UserError
from rl.serve.settings import ServeSettings

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def take_address(settings: ServeSettings) -> list[socket.socket]:
    """Sockets on host and port, one for each address that the host's name has here. They do not
    listen yet: who comes too early is turned away, and nobody else gets the port. UserError where
    there is none to be had.
    """
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(
            f"--host {settings.host}: {getattr(error, 'strerror', None) or error}"
        ) from error
    taken: list[socket.socket] = []
    refused: OSError | None = None
    for family, _, _, _, (host, port, *more) in sorted(
        set(found), key=lambda one: one[0] != socket.AF_INET
    ):
        if taken:  # 0 stands for any, and all are to have the same
            port = taken[0].getsockname()[1]
        try:
            taken.append(_bound(family, (host, port, *more)))
        except OSError as error:
            if error.errno not in _NOT_HERE:
                let_go(taken)
                raise _refusal(settings, error) from error
            refused = error
    if not taken:
        raise _refusal(settings, refused) from refused
    return taken


def _bound(family: int, address: tuple) -> socket.socket:
    """Linux lets two sockets take one port as long as neither listens and both said that they may:
    so it is said only where it has to be, for a port whose last connections a server that has just
    ended left behind, and taken back until `listen_soon`.
    """
    for again in (False, True):
        one = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET6:
                # the other family has a socket of its own
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(again))
            one.bind(address)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            return one
        except OSError as error:
            one.close()
            if again or error.errno != errno.EADDRINUSE or os.name != "posix":
                raise
    raise AssertionError


def listen_soon(taken: list[socket.socket]) -> None:
    """Before they listen: so that the next server on the port need not wait for connections of this
    one.
    """
    for one in taken:
        if os.name == "posix":
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def let_go(taken: list[socket.socket]) -> None:
    for one in taken:
        one.close()


def _refusal(settings: ServeSettings, error: OSError | None) -> UserError:
    remedy = {
        errno.EADDRINUSE: "somebody has it already: give another --port (0 takes any that is free)",
        errno.EACCES: "it takes rights that this user has not: give a --port above 1023",
        errno.EADDRNOTAVAIL: "this machine has no such address: give one of its own, or 0.0.0.0 for all",
        errno.EAFNOSUPPORT: "this machine has no such kind of address: give one of its own, or 0.0.0.0 for all",
    }
    said = remedy.get(error.errno or 0, str(error)) if error is not None else "it has no address"
    return UserError(f"--host {settings.host} --port {settings.port}: {said}")


def check_certificate(cert: Path | None, key: Path | None) -> None:
    """UserError where the two files of TLS cannot be read, or are not a certificate and its key."""
    if cert is None or key is None:
        return
    for flag, path in (("--tls-cert", cert), ("--tls-key", key)):
        if not os.access(path, os.R_OK) or not Path(path).is_file():
            raise UserError(f"{flag} {path}: there is no such file that can be read")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, lambda: "")
    except (ssl.SSLError, ValueError, OSError) as error:
        said = getattr(error, "reason", None) or str(error)
        raise UserError(
            f"--tls-cert {cert} and --tls-key {key} are not a certificate and its key, in PEM and without a password ({said})"
        ) from error
