"""Send heartbeats of rank 0 from a separate thread, so they stop only when its process is stopped.

A rank that waits for rank 0 inside a collective cannot distinguish a working driver from a stopped
driver, and would wait until the collective times out. Each other rank receives these heartbeats on
a socket, whatever else it does, and ends once they stop.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

# Rank 0 works (or idles), waits for the other ranks, ends.
_BEAT, _COLLECTING, _GOODBYE = b".", b",", b"!"
_CONNECT_SECONDS = 20.0
_MAX_PENDING = 64  # maximum number of connections that have not sent the word yet


class HeartbeatSender:
    """Send a heartbeat every `interval_seconds` seconds from rank 0 to each connection that sends
    `token` to `port`.

    Closing it sends a goodbye. `collecting`: whether rank 0 waits for the other ranks. The
    heartbeats carry this flag: a rank that is ready then waits for another rank, not for rank 0.
    """

    def __init__(self, interval_seconds: float):
        self.interval_seconds = interval_seconds
        self.token = secrets.token_hex(16)
        self.collecting = False
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=dual, backlog=1024
        )
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the goodbye and stop the thread."""
        self._closed.set()
        self._thread.join(self.interval_seconds + 5.0)

    def _run(self) -> None:
        """Accept connections and send heartbeats until closed."""
        receivers: list[socket.socket] = []
        strangers: dict[socket.socket, bytes] = {}
        due = time.monotonic()
        while not self._closed.is_set():
            wait = min(0.2, max(0.0, due - time.monotonic()))
            for ready in _readable([self._listener, *strangers], wait):
                if ready is self._listener:
                    _accept(self._listener, strangers)
                elif self._authenticate(ready, strangers):
                    receivers.append(ready)
                    receivers = _send_to_all([ready], _BEAT) + receivers[:-1]
            if time.monotonic() >= due:
                receivers = _send_to_all(receivers, _COLLECTING if self.collecting else _BEAT)
                due = time.monotonic() + self.interval_seconds
        _send_to_all(receivers, _GOODBYE)
        for each in (self._listener, *receivers, *strangers):
            each.close()

    def _authenticate(self, connection: socket.socket, pending: dict[socket.socket, bytes]) -> bool:
        """Return whether the connection has sent the word; close it if it sent anything else."""
        try:
            received = connection.recv(64)
        except OSError:
            received = b""
        pending[connection] += received
        if hmac.compare_digest(pending[connection], self.token.encode()):
            del pending[connection]
            return True
        if not received or not self.token.encode().startswith(pending[connection]):
            del pending[connection]
            connection.close()
        return False


def _readable(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Return the sockets with data to read (or closed), after at most `seconds`.

    select itself does not accept descriptors above 1023.
    """
    poller, by_number = select.poll(), {each.fileno(): each for each in sockets}
    for number in by_number:
        poller.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poller.poll(1000 * seconds)]


def _accept(listener: socket.socket, pending: dict[socket.socket, bytes]) -> None:
    """Accept a connection as a stranger, or close it above the limit."""
    try:
        connection, _ = listener.accept()
    except OSError:  # the peer closed already, or the process is out of descriptors
        time.sleep(0.05)
        return
    if len(pending) >= _MAX_PENDING:
        connection.close()
        return
    connection.setblocking(False)
    pending[connection] = b""


def _send_to_all(receivers: list[socket.socket], payload: bytes) -> list[socket.socket]:
    """Send `payload` to each socket without waiting; return the sockets that are still connected.

    A full buffer (a stopped rank) loses the heartbeat, not the rank.
    """
    connected = []
    for each in receivers:
        try:
            each.send(payload)
        except BlockingIOError:
            pass
        except OSError:
            each.close()
            continue
        connected.append(each)
    return connected


class HeartbeatMonitor:
    """End this process with exit code 1 if rank 0 is silent for `timeout` seconds or has ended.

    `waiting_since`: the time at which this rank began to wait for rank 0, None if it does not wait.
    The process also ends if it has waited for longer than `timeout` while rank 0 sends heartbeats
    and does not wait for another rank.

    `lost_message`: returns the message for a number of seconds of silence. Without a connection
    nothing is monitored, and a warning is printed.
    """

    waiting_since: float | None = None

    def __init__(
        self,
        hosts: list[str],
        port: int,
        token: str,
        *,
        interval_seconds: float,
        timeout: float,
        lost_message: Callable[[float], str],
    ):
        self._interval_seconds = interval_seconds
        self._max_missed = max(2, round(timeout / interval_seconds))
        self._lost_message = lost_message
        self._timeout = timeout
        self._closed = threading.Event()
        connection = _connect(hosts, port)
        if connection is None:
            endpoint = f"port {port} of {' and '.join(hosts)}"
            print(
                f"no connection to {endpoint}: only the timeouts of collectives will detect a "
                "stopped driver",
                file=sys.stderr,
            )
            return
        connection.sendall(token.encode())
        threading.Thread(target=self._run, args=(connection,), name="watch", daemon=True).start()

    def close(self) -> None:
        """Stop monitoring."""
        self._closed.set()

    def _run(self, connection: socket.socket) -> None:
        """Count silent intervals, not seconds: a process that was itself stopped has missed one
        interval.
        """
        silent = 0
        with connection:
            connection.settimeout(self._interval_seconds)
            while silent < self._max_missed:
                try:
                    data = connection.recv(4096)
                except TimeoutError:
                    silent += 1
                    continue
                except OSError:
                    data = b""
                if self._closed.is_set() or _GOODBYE in data:
                    return
                # Rank 0 has ended. Collectives of this rank usually fail by themselves; wait for
                # that before ending the process.
                if not data:
                    silent = 0
                    break
                if (waited := self._overdue_seconds(data)) is not None:
                    self._end(waited)
                silent = 0
        if self._closed.wait(self._interval_seconds if silent else 2 * self._interval_seconds):
            return
        self._end(silent * self._interval_seconds)

    def _overdue_seconds(self, payload: bytes) -> float | None:
        """Return the seconds for which this rank has waited, if too long and rank 0 is not
        collecting.
        """
        since = self.waiting_since
        waited = 0.0 if since is None else time.monotonic() - since
        return waited if waited > self._timeout and payload.endswith(_BEAT) else None

    def _end(self, seconds: float) -> NoReturn:
        """Print the message and end the process."""
        os.write(2, f"{self._lost_message(seconds)}\n".encode(errors="backslashreplace"))
        os._exit(1)


def _connect(hosts: list[str], port: int) -> socket.socket | None:
    """Return a connection to the first reachable host, None after the deadline."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while time.monotonic() < deadline:
        for host in hosts:
            try:
                return socket.create_connection((host, port), timeout=5.0)
            except OSError:
                continue
        time.sleep(0.2)
    return None
