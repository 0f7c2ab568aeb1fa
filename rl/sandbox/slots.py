"""Zygotes that take jobs, one at a time each, and the jobs: a socket to a run's monitor."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

from rl.errors import UserError
from rl.sandbox.inside import frames
from rl.sandbox.launch import Zygote

_GRACE_SECONDS = 1.0  # beyond a run's own limit, which its monitor keeps
_FREE_SECONDS = 10.0


class Lost(Exception):
    """The sandbox around a run ended or fell silent; the next run gets a new one."""


class Slot:
    """One zygote, started when first needed, again where it was lost. `cores`: those that its
    programs run on.
    """

    def __init__(self, start: Callable[[], Zygote], cores: list[int]):
        self.start, self.cores = start, cores
        self.zygote: Zygote | None = None

    def open(self, job: dict[str, Any]) -> Job:
        """Begins a job. Raises Lost where that fails twice."""
        for attempt in (1, 2):
            try:
                return self._open(job)
            except (Lost, RuntimeError, OSError) as error:
                self.drop()
                if attempt == 2:
                    raise Lost(f"no sandbox could be started: {error}") from error
        raise AssertionError("the second attempt returns or raises")

    def _open(self, job: dict[str, Any]) -> Job:
        zygote = self.zygote = self.zygote or self.start()
        ours, theirs = socket.socketpair()
        try:
            frames.send(zygote.control, {"job": True}, (theirs.fileno(),))
        except (frames.Ended, OSError) as error:
            ours.close()
            raise Lost(str(error)) from error
        finally:
            theirs.close()
        opened = Job(ours, secrets.token_hex(16))
        try:
            opened.ask({**job, "do": "begin", "nonce": opened.nonce, "cores": self.cores}, 10.0)
        except Lost:
            ours.close()
            raise
        return opened

    def close(self, job: Job) -> None:
        """Ends a job and waits until nothing of it is left."""
        job.socket.close()
        if self.zygote is None:
            return
        try:
            self.zygote.control.settimeout(_FREE_SECONDS)
            frames.receive(self.zygote.control)
        except (frames.Ended, frames.BadMessage, OSError):
            self.drop()

    def drop(self) -> None:
        zygote, self.zygote = self.zygote, None
        if zygote is not None:
            zygote.kill()


class Job:
    def __init__(self, to: socket.socket, nonce: str):
        self.socket, self.nonce = to, nonce

    def ask(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """A verb's reply, which the monitor gives within `seconds`. Raises Lost."""
        try:
            self.socket.settimeout(seconds + _GRACE_SECONDS)
            frames.send(self.socket, message)
            reply = frames.receive(self.socket)
        except (frames.Ended, frames.BadMessage, OSError) as error:
            raise Lost(f"the run's monitor is gone ({type(error).__name__}: {error})") from error
        if reply.pop("nonce", None) != self.nonce or "failed" in reply:
            raise Lost(str(reply.get("failed", "a reply without this run's nonce")))
        return reply


class Slots:
    """`count` slots, each pinned to one of the cores; and one thread that starts zygotes, since a
    child that is to die with its parent dies with the thread that started it.
    """

    def __init__(self, start: Callable[[], Zygote], count: int):
        self._start = start
        self._cores = sorted(os.sched_getaffinity(0))
        self._free: queue.LifoQueue[Slot | None] = queue.LifoQueue()
        self._orders: queue.Queue[tuple[queue.Queue[Any]] | None] = queue.Queue()
        self._lock = threading.Lock()
        self._all: list[Slot] = []
        self.closed = False
        self._thread = threading.Thread(target=self._starter, daemon=True, name="sandbox starter")
        self._thread.start()
        for number in range(count):
            self._free.put(self.new(number))

    def new(self, number: int) -> Slot:
        slot = Slot(self._order, [self._cores[number % len(self._cores)]])
        with self._lock:
            self._all.append(slot)
        return slot

    def forget(self, slot: Slot) -> None:
        slot.drop()
        with self._lock:
            self._all.remove(slot)

    @contextlib.contextmanager
    def job(self, job: dict[str, Any]) -> Any:
        """A job in the next free slot. Raises Lost."""
        slot = self._take()
        try:
            opened = slot.open(job)
            try:
                yield opened
            except Lost:
                opened.socket.close()
                slot.drop()
                raise
            except (
                BaseException
            ):  # the caller's own, an interrupt too: the slot is for the next all the same
                slot.close(opened)
                raise
            else:
                slot.close(opened)
        finally:
            self._free.put(slot)

    def _take(self) -> Slot:
        slot = None if self.closed else self._free.get()
        if slot is None:
            self._free.put(None)  # for the next who waits
            raise UserError("this sandbox is closed: make a new one")
        return slot

    def close(self) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = True
            slots = list(self._all)
        self._free.put(None)
        self._orders.put(None)
        self._thread.join(timeout=30)
        for slot in slots:
            slot.drop()

    def _order(self) -> Zygote:
        if self.closed:
            raise Lost("this sandbox is closed")
        answer: queue.Queue[Any] = queue.Queue()
        self._orders.put((answer,))
        while True:
            try:
                found = answer.get(timeout=0.5)
                break
            except queue.Empty:
                if not self._thread.is_alive():
                    raise Lost("this sandbox is closed") from None
        if isinstance(found, BaseException):
            raise found
        return found  # type: ignore[no-any-return]

    def _starter(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                order[0].put(self._start())
            except Exception as error:  # for the thread that ordered it
                order[0].put(error)
