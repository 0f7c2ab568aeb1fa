"""Manage a pool of zygotes, each of which takes a job at a time. A job is a socket to a run's
monitor.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl.errors import UserError
from rl.processes import open_channel
from rl.sandbox.inside import message_framing
from rl.sandbox.inside.message_framing import JsonObject
from rl.sandbox.zygote_launch import Zygote

_GRACE_SECONDS = 1.0  # beyond the limit of a run, which its monitor enforces
_BEGIN_SECONDS = _FREE_SECONDS = 10.0
_MAX_WORKERS_PER_CORE = 1024
_BROKEN_CONNECTION = (message_framing.ConnectionClosedError, message_framing.BadMessage)


class SandboxLost(Exception):
    """Raised if the sandbox around a run ended or stopped responding; the next run gets a new
    sandbox.
    """


@dataclass(eq=False)
class SandboxWorker:
    """Hold a zygote, started on first use and restarted after a loss. `core`: the CPU core that
    its programs run on. `core_claim`: the socket that claims the core.
    """

    start: Callable[[], Zygote]
    core: int
    core_claim: socket.socket
    zygote: Zygote | None = None

    def open(self, job: JsonObject) -> WorkerJob:
        """Begin a job. Raises SandboxLost if two attempts fail."""
        for attempt in (1, 2):
            try:
                zygote = self.zygote = self.zygote or self.start()
                with open_channel() as (monitor_socket, zygote_end):
                    message_framing.send(zygote.control, {"job": True}, (zygote_end.fileno(),))
                opened = WorkerJob(monitor_socket, secrets.token_hex(16))
                begin = {**job, "do": "begin", "nonce": opened.nonce, "cores": [self.core]}
                opened.request(begin, _BEGIN_SECONDS)
                return opened
            except (SandboxLost, RuntimeError, OSError, *_BROKEN_CONNECTION) as error:
                self.kill_zygote()
                if attempt == 2:
                    raise SandboxLost(f"no sandbox could be started: {error}") from error
        raise AssertionError("the second attempt returns or raises")

    def close(self, job: WorkerJob) -> None:
        """End a job and wait until all of its processes have ended."""
        job.socket.close()
        if self.zygote is None:
            return
        try:
            self.zygote.control.settimeout(_FREE_SECONDS)
            message_framing.receive(self.zygote.control)
        except (*_BROKEN_CONNECTION, OSError):
            self.kill_zygote()

    def kill_zygote(self) -> None:
        """Kill the zygote; the next job starts a new zygote."""
        zygote, self.zygote = self.zygote, None
        if zygote is not None:
            zygote.kill()


@dataclass(eq=False)
class WorkerJob:
    """Hold a socket to the monitor of a run. Each reply has to carry the run's nonce."""

    socket: socket.socket
    nonce: str

    def request(self, message: JsonObject, seconds: float) -> JsonObject:
        """Send a request and return the reply, which the monitor gives within `seconds`. Raises
        SandboxLost.
        """
        try:
            self.socket.settimeout(seconds + _GRACE_SECONDS)
            message_framing.send(self.socket, message)
            reply = message_framing.receive(self.socket)
        except (*_BROKEN_CONNECTION, OSError) as error:
            self.socket.close()
            raise SandboxLost(
                f"the run's monitor has ended ({type(error).__name__}: {error})"
            ) from error
        if reply.pop("nonce", None) != self.nonce or "failed" in reply:
            self.socket.close()
            raise SandboxLost(str(reply.get("failed", "a reply without this run's nonce")))
        return reply


def _claim_core() -> tuple[int, socket.socket]:
    """Return the core with the fewest sandbox workers of this host, of all processes, and the
    socket whose name claims it: the kernel frees the name when the socket or its process ends.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    cores = sorted(os.sched_getaffinity(0))
    for number, core in itertools.product(range(_MAX_WORKERS_PER_CORE), cores):
        with contextlib.suppress(OSError):  # another worker has this name
            claim.bind(f"\0whetstone-core-{core}-{number}")
            return core, claim
    return cores[0], claim


class WorkerPool:
    """Hold `count` workers, each pinned to a core."""

    def __init__(self, start: Callable[[], Zygote], count: int):
        self._start = start
        self._idle_workers: queue.LifoQueue[SandboxWorker | None] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._workers: set[SandboxWorker] = set()
        self.closed = False
        for _ in range(count):
            self._idle_workers.put(self.add_worker())

    def add_worker(self) -> SandboxWorker:
        """Create a worker outside of the queue of idle workers, for a session."""
        worker = SandboxWorker(self._start_zygote, *_claim_core())
        with self._lock:
            self._workers.add(worker)
        return worker

    def remove_worker(self, worker: SandboxWorker) -> None:
        """Remove a worker and kill its zygote. A second call does nothing."""
        worker.kill_zygote()
        worker.core_claim.close()
        with self._lock:
            self._workers.discard(worker)

    @contextlib.contextmanager
    def open_job(self, job: JsonObject) -> Any:
        """Run a job in the next idle worker. Raises SandboxLost."""
        worker = None if self.closed else self._idle_workers.get()
        if worker is None:
            self._idle_workers.put(None)  # wakes the next waiting thread
            raise UserError("this sandbox is closed: create a new Sandbox")
        try:
            opened = worker.open(job)
            try:
                yield opened
            except SandboxLost:
                worker.kill_zygote()
                raise
            finally:  # also if the caller raises: the worker stays usable
                worker.close(opened)
        finally:
            self._idle_workers.put(worker)

    def close(self) -> None:
        """Kill all zygotes. A second call does nothing."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            workers = list(self._workers)
        self._idle_workers.put(None)
        for worker in workers:
            self.remove_worker(worker)

    def _start_zygote(self) -> Zygote:
        if not self.closed:
            zygote = self._start()
            if not self.closed:
                return zygote
            zygote.kill()
        raise SandboxLost("this sandbox is closed")
