"""Run reward workers on the other machines of a launch.

The items of these workers are queued, timed and counted on rank 0, like those of its own workers
(rl.rewards.reward_scorer): only the processes are elsewhere. A thread of one process on each other
machine (`serve_reward_workers`) connects to rank 0 and waits. Rank 0 takes the connection to start
a worker, and the thread connects again for the next one. The worker process inherits the
connection as its channel, so its messages pass through no third process. The thread watches the
worker: it reports the worker's end to rank 0, and ends the worker when rank 0 closes the
connection. A connection counts only with the secret token, which rank 0 sends over the launch's
own process group.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rl.processes import (
    InvalidReply,
    MessageChannel,
    SupervisedProcess,
    WorkerDiedError,
    encode_frame,
    read_message,
)
from rl.rewards.captured_output import RewardOutput
from rl.rewards.reward_workers import MAX_REPLY_BYTES, RUN_WORKER, build_worker_environment
from rl.sanitize import describe_error, sanitize_text

_MAX_BYTES = 1 << 20  # of the messages that precede those of a worker
_CONNECT_SECONDS = 20.0
_REQUEST_SECONDS = 5.0  # for a machine to connect again, and to take a request
_END = b"worker ended: "  # begins the message about a worker's end, which is no JSON
_ATTEMPTS, _PAUSE_SECONDS = 10, 3.0  # of a machine to connect
# Ends a connection without an answer of the other machine after about 11 s. By name, since macOS
# lacks some of these options.
_KEEPALIVE = {
    "TCP_NODELAY": 1,
    "TCP_KEEPIDLE": 5,
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 10_000,  # milliseconds
}


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class ConnectionLostError(WorkerDiedError):
    """Report that a connection ended, but not the worker: no answer is to blame."""


class RemoteProcess(MessageChannel):
    """Represent a reward process on another machine. `machine`: its name."""

    def __init__(self, channel: socket.socket, machine: str):
        super().__init__(channel, MAX_REPLY_BYTES)
        self._machine = machine

    def describe_end(self) -> str:
        return f"the connection to {self._machine} is closed"

    def receive(self, seconds: float) -> bytes:
        try:
            message = super().receive(seconds)
        except WorkerDiedError as error:
            raise ConnectionLostError(str(error)) from error
        if message.startswith(_END):
            raise WorkerDiedError(sanitize_text(message[len(_END) :].decode(), 400))
        return message

    def stop(self) -> None:
        """Close the connection: the process and all that it started are ended on its machine."""
        with contextlib.suppress(OSError):  # it is closed
            self.channel.shutdown(socket.SHUT_RDWR)  # a fork of this process may keep it open
        self.channel.close()


@dataclass(frozen=True)
class RewardMachine:
    """Hold the connections of another machine that wait for a request."""

    name: str
    connections: queue.SimpleQueue[socket.socket] = field(default_factory=queue.SimpleQueue)

    def start_process(self, reward: str, variables: Mapping[str, str]) -> RemoteProcess:
        """Start a reward process there. `reward`: its name, for the output. `variables`: variables
        of its environment besides those of its machine. Raises OSError if that fails.
        """
        try:
            connection = self.connections.get(timeout=_REQUEST_SECONDS)
        except queue.Empty:
            raise ConnectionError(f"{self.name} does not connect") from None
        connection.settimeout(_REQUEST_SECONDS)
        connection.sendall(encode_frame(json.dumps((reward, dict(variables))).encode()))
        return RemoteProcess(connection, self.name)


class RewardMachines:
    """Accept the other machines of a launch on rank 0. Thread-safe.

    `address`: port and token of its listener, None until `listen`.
    """

    def __init__(self) -> None:
        self.address: tuple[int, str] | None = None
        self._machines: dict[str, RewardMachine] = {}
        self._subscribers: list[Callable[[RewardMachine], None]] = []
        self._lock = threading.RLock()

    def listen(self) -> None:
        """Begin to accept connections. A second call is a no-op."""
        with self._lock:
            if self.address is not None:
                return
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            listener = socket.create_server(
                ("", 0), family=family, dualstack_ipv6=dual, backlog=1024
            )
            self.address = listener.getsockname()[1], secrets.token_hex(16)
        threading.Thread(
            target=self._accept, args=(listener,), name="reward machines", daemon=True
        ).start()

    def subscribe(self, callback: Callable[[RewardMachine], None]) -> None:
        """Call `callback` with each machine, also with those that connected before."""
        with self._lock:
            self._subscribers.append(callback)
            for machine in self._machines.values():
                callback(machine)

    def unsubscribe(self, callback: Callable[[RewardMachine], None]) -> None:
        """Do not call `callback` again."""
        with self._lock, contextlib.suppress(ValueError):  # closed twice
            self._subscribers.remove(callback)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
                threading.Thread(target=self._admit, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # no descriptor or thread is free; a machine retries
                time.sleep(_PAUSE_SECONDS)

    def _admit(self, connection: socket.socket) -> None:
        """Add a connection that sends the token to its machine; close any other."""
        assert self.address is not None
        try:
            connection.settimeout(_CONNECT_SECONDS)
            _keep_alive(connection)
            token, name = json.loads(read_message(connection, _MAX_BYTES))
            if not secrets.compare_digest(token, self.address[1]):
                raise ValueError
        except (OSError, InvalidReply, ValueError, TypeError):
            connection.close()
            return
        with self._lock:
            is_new = name not in self._machines
            machine = self._machines.setdefault(name, RewardMachine(name))
            machine.connections.put(connection)
            if is_new:
                for callback in self._subscribers:
                    callback(machine)


@functools.cache
def get_reward_machines() -> RewardMachines:
    """Return the other machines of this process's launch."""
    return RewardMachines()


# ---------------------------------------------------------------------- on the other machines


def serve_reward_workers(host: str, port: int, token: str) -> threading.Thread:
    """Start the thread that runs reward workers on this machine for rank 0. It ends with rank 0."""
    thread = threading.Thread(
        target=_serve_requests, args=(host, port, token), name="reward workers", daemon=True
    )
    thread.start()
    return thread


def _serve_requests(host: str, port: int, token: str) -> None:
    name, attempts = f"{socket.gethostname()} (process {os.getpid()})", 0
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
            _keep_alive(connection)
            connection.settimeout(None)  # the worker process, which inherits it, blocks
            connection.sendall(encode_frame(json.dumps((token, name)).encode()))
            request = read_message(connection, _MAX_BYTES)
        except (OSError, InvalidReply) as error:
            attempts += 1
            if attempts < _ATTEMPTS:
                time.sleep(_PAUSE_SECONDS)
                continue
            print(
                f"{name} runs no more reward workers: its connection to port {port} of {host}, "
                f"rank 0, failed ({describe_error(error)})",
                file=sys.stderr,
            )
            return
        if not request:  # rank 0 has ended
            return
        attempts = 0
        threading.Thread(target=_run_process, args=(connection, request), daemon=True).start()


def _run_process(connection: socket.socket, request: bytes) -> None:
    """Run a worker process with this connection as its channel until it or rank 0 ends."""
    reward, variables = json.loads(request)
    with connection:
        process = SupervisedProcess(
            [RUN_WORKER],
            {**build_worker_environment(), **variables},
            channel=connection,
            path=json.dumps(sys.path),
            output=RewardOutput(reward),
        )
        if _wait_for_end(connection, process):
            end = _END + process.describe_end().encode()
            with contextlib.suppress(OSError):  # rank 0 has closed it meanwhile
                connection.sendall(encode_frame(end))
        process.stop()


def _wait_for_end(connection: socket.socket, process: SupervisedProcess) -> bool:
    """Forward the process's output until it ends, or until rank 0 closes the connection. Return
    whether it ended.
    """
    poller = select.poll()
    poller.register(connection, select.POLLRDHUP)
    poller.register(process, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if fd == connection.fileno():
                return False
            if not process.read_output():
                return True
