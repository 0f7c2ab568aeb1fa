"""Send heartbeats of rank 0 from a separate thread, so they stop only when its process is stopped.

A rank that waits for rank 0 inside a collective cannot distinguish a working driver from a stopped
driver, and would wait until the collective times out. Each other rank receives these heartbeats on
a socket, whatever else it does, and ends once they stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

# Rank 0 works (or idles), waits for the other ranks, ends.
_BEAT, _COLLECTING, _GOODBYE = b".", b",", b"!"
_CONNECT_SECONDS = 20.0  # to connect, and then to send the token


class HeartbeatSender:
    """Send a heartbeat every `interval_seconds` seconds from rank 0 to each connection that sends
    `token` to `port`.

    Closing it sends a goodbye. `waiting_since`: the time at which rank 0 began to wait for the
    other ranks, None if it does not wait. The heartbeats tell whether it waits: a rank that is
    ready then waits for another rank, not for rank 0.
    """

    waiting_since: float | None = None

    def __init__(self, interval_seconds: float):
        self.interval_seconds = interval_seconds
        self.token = secrets.token_hex(16)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        self.port: int = self._listener.getsockname()[1]
        self._receivers: set[asyncio.StreamWriter] = set()
        self._strangers: set[asyncio.StreamWriter] = set()  # have not sent the token yet
        self._closed = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the goodbye and stop the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join(self.interval_seconds + 5.0)

    def _run(self) -> None:
        """Run the event loop until closed."""
        self._loop.run_until_complete(self._send_heartbeats())
        self._loop.close()

    async def _send_heartbeats(self) -> None:
        """Accept connections and send heartbeats until closed."""
        server = await asyncio.start_server(self._authenticate, sock=self._listener, backlog=1024)
        while not self._closed.is_set():
            self._send_to_all(_BEAT if self.waiting_since is None else _COLLECTING)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), self.interval_seconds)
        self._send_to_all(_GOODBYE)
        server.close()
        for connection in (*self._receivers, *self._strangers):
            connection.close()
        await asyncio.sleep(0.1)  # the connections close

    def _send_to_all(self, payload: bytes) -> None:
        """Send `payload` to each receiver without waiting, and drop those that have disconnected. A
        stopped rank whose buffer is full gets it later.
        """
        self._receivers = {each for each in self._receivers if not each.is_closing()}
        for receiver in self._receivers:
            receiver.write(payload)

    async def _authenticate(
        self, reader: asyncio.StreamReader, connection: asyncio.StreamWriter
    ) -> None:
        """Make a connection that sends the token in time a receiver; close any other."""
        token, received = self.token.encode(), b""
        self._strangers.add(connection)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                while received != token:
                    data = await reader.read(64)
                    received += data
                    if not data or not token.startswith(received):
                        connection.close()
                        return
        except OSError:  # the peer has closed, or the time is over
            connection.close()
            return
        finally:
            self._strangers.discard(connection)
        connection.write(_BEAT)
        self._receivers.add(connection)


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
        host: str,
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
        connection = _connect(host, port)
        if connection is None:
            print(
                f"no connection to port {port} of {host}: only the timeouts of collectives will "
                "detect a stopped driver",
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
                # this rank has waited for too long, and rank 0 does not wait for another rank
                since = self.waiting_since
                waited = 0.0 if since is None else time.monotonic() - since
                if waited > self._timeout and data.endswith(_BEAT):
                    self._end(waited)
                silent = 0
        if self._closed.wait(self._interval_seconds if silent else 2 * self._interval_seconds):
            return
        self._end(silent * self._interval_seconds)

    def _end(self, seconds: float) -> NoReturn:
        """Print the message and end the process."""
        os.write(2, f"{self._lost_message(seconds)}\n".encode(errors="backslashreplace"))
        os._exit(1)


def _connect(host: str, port: int) -> socket.socket | None:
    """Return a connection, None after the deadline."""
    deadline = time.monotonic() + _CONNECT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            return socket.create_connection((host, port), timeout=5.0)
        time.sleep(0.2)
    return None
