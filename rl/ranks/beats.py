"""Signs of life of rank 0: sent from a thread of its own, so they stop when its process is stopped,
and only then.

A rank that waits for rank 0 inside a collective cannot tell a driver that works from one that was
stopped, and would wait for as long as the collective does. The other ranks hear these beats on a
socket each, whatever else they do, and end once none comes.
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

# it works itself (or idles), it waits for the others, it ends
_BEAT, _COLLECTING, _GOODBYE = b".", b",", b"!"
_CONNECT_SECONDS = 20.0
_STRANGERS = 64  # connections that have not said the word yet: more are turned away


class Drum:
    """On rank 0: beats every `every` seconds to whoever connects to `port` and says `word`. Close
    it to say goodbye.

    `collecting`: whether rank 0 waits for the others, which its beats tell: who is ready then waits
    for one of them, not for rank 0.
    """

    def __init__(self, every: float):
        self.every, self.word, self.collecting = every, secrets.token_hex(16), False
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=dual, backlog=1024
        )
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beats", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(self.every + 5.0)

    def _run(self) -> None:
        known: list[socket.socket] = []
        strangers: dict[socket.socket, bytes] = {}
        due = time.monotonic()
        while not self._over.is_set():
            wait = min(0.2, max(0.0, due - time.monotonic()))
            for ready in _readable([self._listener, *strangers], wait):
                if ready is self._listener:
                    _accept(self._listener, strangers)
                elif self._admitted(ready, strangers):
                    known.append(ready)
                    known = _tell([ready], _BEAT) + known[:-1]
            if time.monotonic() >= due:
                known, due = (
                    _tell(known, _COLLECTING if self.collecting else _BEAT),
                    time.monotonic() + self.every,
                )
        _tell(known, _GOODBYE)
        for each in (self._listener, *known, *strangers):
            each.close()

    def _admitted(self, stranger: socket.socket, strangers: dict[socket.socket, bytes]) -> bool:
        """Whether it has said the word by now. Who says another is sent away."""
        try:
            said = stranger.recv(64)
        except OSError:
            said = b""
        strangers[stranger] += said
        if hmac.compare_digest(strangers[stranger], self.word.encode()):
            del strangers[stranger]
            return True
        if not said or not self.word.encode().startswith(strangers[stranger]):
            del strangers[stranger]
            stranger.close()
        return False


def _readable(sockets: list[socket.socket], seconds: float) -> list[socket.socket]:
    """Those with something to read (or closed), after at most so many seconds. (select itself takes
    no descriptor above 1023.)
    """
    poller, by_number = select.poll(), {each.fileno(): each for each in sockets}
    for number in by_number:
        poller.register(number, select.POLLIN)
    return [by_number[number] for number, _ in poller.poll(1000 * seconds)]


def _accept(listener: socket.socket, strangers: dict[socket.socket, bytes]) -> None:
    try:
        connection, _ = listener.accept()
    except OSError:  # it is gone already, or no descriptor is left
        time.sleep(0.05)
        return
    if len(strangers) >= _STRANGERS:
        connection.close()
        return
    connection.setblocking(False)
    strangers[connection] = b""


def _tell(known: list[socket.socket], what: bytes) -> list[socket.socket]:
    """Sends without waiting. Returns those that are still there; a full buffer (a stopped rank)
    loses the beat, not the rank.
    """
    left = []
    for each in known:
        try:
            each.send(what)
        except BlockingIOError:
            pass
        except OSError:
            each.close()
            continue
        left.append(each)
    return left


class Watch:
    """On another rank: ends this process with exit code 1 once rank 0 was silent for `timeout`
    seconds, or is gone.

    `waiting_since`: when this rank began to wait for rank 0, None where it does not. It ends as
    well where rank 0 beats but has left it waiting for longer than `timeout`, and does not wait for
    another rank itself.

    `lost`: what to say, from the seconds of silence. Where no connection comes about, nothing is
    watched, and that is said.
    """

    waiting_since: float | None = None

    def __init__(
        self,
        hosts: list[str],
        port: int,
        word: str,
        *,
        every: float,
        timeout: float,
        lost: Callable[[float], str],
    ):
        self._every, self._beats, self._lost = every, max(2, round(timeout / every)), lost
        self._timeout = timeout
        self._over = threading.Event()
        connection = _connect(hosts, port)
        if connection is None:
            where = f"port {port} of {' and '.join(hosts)}"
            print(
                f"no connection to {where}: a driver that is stopped is noticed by the bounds of collectives alone",
                file=sys.stderr,
            )
            return
        connection.sendall(word.encode())
        threading.Thread(target=self._run, args=(connection,), name="watch", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _run(self, connection: socket.socket) -> None:
        """Counts silent intervals, not seconds: a process that was itself stopped for a while has
        missed one, not all.
        """
        silent = 0
        with connection:
            connection.settimeout(self._every)
            while silent < self._beats:
                try:
                    heard = connection.recv(4096)
                except TimeoutError:
                    silent += 1
                    continue
                except OSError:
                    heard = b""
                if self._over.is_set() or _GOODBYE in heard:
                    return
                # rank 0 has ended: what this rank waits for fails by itself, unless it cannot tell
                if not heard:
                    silent = 0
                    break
                if (waited := self._left_waiting(heard)) is not None:
                    self._end(waited)
                silent = 0
        if self._over.wait(self._every if silent else 2 * self._every):
            return
        self._end(silent * self._every)

    def _left_waiting(self, heard: bytes) -> float | None:
        """For how many seconds, where that is too long and rank 0 has no reason that it knows of."""
        since = self.waiting_since
        waited = 0.0 if since is None else time.monotonic() - since
        return waited if waited > self._timeout and heard.endswith(_BEAT) else None

    def _end(self, seconds: float) -> NoReturn:
        os.write(2, f"{self._lost(seconds)}\n".encode(errors="backslashreplace"))
        os._exit(1)


def _connect(hosts: list[str], port: int) -> socket.socket | None:
    deadline = time.monotonic() + _CONNECT_SECONDS
    while time.monotonic() < deadline:
        for host in hosts:
            try:
                return socket.create_connection((host, port), timeout=5.0)
            except OSError:
                continue
        time.sleep(0.2)
    return None
