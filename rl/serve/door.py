"""Where a server listens: its address is taken, and its certificate read, before a model is loaded."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from pathlib import Path

from rl.errors import UserError
from rl.serve.settings import ServeSettings


def take_address(settings: ServeSettings) -> socket.socket:
    """A socket on host and port that does not listen yet: who comes too early is turned away. UserError where it cannot be had."""
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UserError(f"--host {settings.host}: {error.strerror or error}") from error
    family, kind, protocol, _, address = found[0]
    taken = socket.socket(family, kind, protocol)
    if os.name == "posix":  # a server that has just ended leaves connections behind, which are no other server
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(address)
    except OSError as error:
        taken.close()
        remedy = {
            errno.EADDRINUSE: "something listens there already: give another --port (0 takes any that is free)",
            errno.EACCES: "it takes rights that this user has not: give a --port above 1023",
            errno.EADDRNOTAVAIL: "this machine has no such address: give one of its own, or 0.0.0.0 for all",
        }
        said = remedy.get(error.errno or 0, str(error))
        raise UserError(f"--host {settings.host} --port {settings.port}: {said}") from error
    taken.set_inheritable(False)
    return taken


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
