"""Watch a run for the monitor: its output, its end, and the resources of all its processes."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from dataclasses import dataclass
from typing import Any

from rl.sandbox.inside import isolation, message_framing, reply_parser
from rl.sandbox.inside.init_process import list_descendants
from rl.sandbox.inside.message_framing import HEAD, JsonObject

_TICK_SECONDS = 0.02  # minimum seconds between two counts
_COUNT_PAUSE_FACTOR = 10  # minimum pause as a multiple of the duration of the last count
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)
_CLOCK = os.sysconf("SC_CLK_TCK")


class LimitReached(Exception):
    """Raised if the run reaches a limit. `reason`: timeout, cpu, memory, processes, output, forged."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class CallerClosedError(Exception):
    """Raised if the caller closed its end of the socket: the run is no longer needed."""


@dataclass(eq=False)
class RunWatcher:
    """Watch a candidate. `init`: reports the end of the candidate. `out`, `err`: its output
    streams, read here. `limits`: fields of rl.sandbox.SandboxLimits.
    """

    init: socket.socket
    caller: socket.socket
    out: int
    err: int
    limits: JsonObject
    root: int
    counting: bool
    ended: JsonObject | None = None
    peak_mb: float = 0.0
    size: int = 0
    _unread: bytes = b""

    def __post_init__(self) -> None:
        self.printed: dict[int, list[bytes]] = {self.out: [], self.err: []}
        self._open = [self.out, self.err]
        self._next_count = time.monotonic() + _TICK_SECONDS
        self._cpu_start = 0.0  # CPU seconds of all processes when the request began
        self._interpreter_mb = 0.0
        with contextlib.suppress(OSError, ValueError, IndexError):
            self._interpreter_mb = _read_stat(os.getpid())[21] * _PAGE_MB
        for descriptor in self._open:
            os.set_blocking(descriptor, False)

    def begin_request(self) -> None:
        """Count CPU time from now on: `cpu_s` limits a single call, assert or turn."""
        self._cpu_start = 0.0
        for pid in list_descendants(self.root):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = _read_stat(pid)
                self._cpu_start += sum(fields[11:15]) / _CLOCK
                used = sum(fields[11:13]) / _CLOCK
                isolation.extend_cpu_limit(pid, used + self.limits["cpu_s"])

    def wait_for_end(self, deadline: float) -> None:
        """Wait until the candidate has ended."""
        while self.ended is None:
            self._wait_for_event(deadline, ())

    def read_message(self, source: int, deadline: float) -> JsonObject:
        """Return the next message from the pipe `source`, with the errors of `read_frame`. Raises
        LimitReached("forged") if the content is not a message.
        """
        try:
            return reply_parser.parse(self.read_frame(source, deadline))
        except reply_parser.ForgedMessageError:
            raise LimitReached("forged") from None

    def read_frame(self, source: int, deadline: float) -> bytes:
        """Return the next message from the pipe `source`, unparsed. Raises LimitReached; raises
        ConnectionClosedError if the candidate or the pipe ended before.
        """
        longest = int(self.limits["output_kb"]) << 10
        while True:
            if len(self._unread) >= HEAD.size:
                end = HEAD.size + HEAD.unpack_from(self._unread)[0]
                if end - HEAD.size > longest:
                    raise LimitReached("output")
                if len(self._unread) >= end:
                    body, self._unread = self._unread[HEAD.size : end], self._unread[end:]
                    return body
            if source in self._wait_for_event(deadline, (source,)):
                part = os.read(source, 1 << 18)
                if not part:
                    self._wait_for_exit(deadline)
                    raise message_framing.ConnectionClosedError("the candidate closed its end")
                self._unread += part
            elif self.ended is not None:
                raise message_framing.ConnectionClosedError("the candidate ended")

    def send(self, to: int, message: JsonObject, deadline: float) -> None:
        """Write a message to the pipe `to`, which the candidate may leave unread. Raises LimitReached,
        ConnectionClosedError.
        """
        data = memoryview(message_framing.pack(message))
        os.set_blocking(to, False)
        while data:
            try:
                data = data[os.write(to, data) :]
            except BlockingIOError:
                self._wait_for_event(deadline, (), (to,))
                if self.ended is not None:
                    raise message_framing.ConnectionClosedError("the candidate ended") from None
            except BrokenPipeError as error:
                self._wait_for_exit(deadline)
                raise message_framing.ConnectionClosedError(
                    "the candidate closed its end"
                ) from error

    def _wait_for_exit(self, deadline: float) -> None:
        """Wait shortly for the exit status of a candidate that closed its pipe, which usually means
        that it has ended.
        """
        with contextlib.suppress(LimitReached):
            self.wait_for_end(min(deadline, time.monotonic() + 0.25))

    def _wait_for_event(
        self, deadline: float, sources: tuple[int, ...], sinks: tuple[int, ...] = ()
    ) -> list[Any]:
        """Wait for an event, at most a tick; read the streams. Raises LimitReached at a limit, CallerClosedError."""
        now = time.monotonic()
        if now >= deadline:
            raise LimitReached("timeout")
        if self.counting and now >= self._next_count:
            self._count()
            took = time.monotonic() - now
            self._next_count = now + max(_TICK_SECONDS, _COUNT_PAUSE_FACTOR * took)
        waiting: list[Any] = [*self._open, self.init, self.caller, *sources]
        ready, _, _ = select.select(
            waiting, sinks, [], max(0.0, min(deadline - now, _TICK_SECONDS))
        )
        self._read([descriptor for descriptor in self._open if descriptor in ready])
        if self.init in ready:
            self.ended = message_framing.receive(self.init)
        if self.caller in ready:
            raise CallerClosedError  # a waiting caller sends no message: readable means closed
        return ready

    def _read(self, descriptors: list[int]) -> None:
        """Read once from each of these output streams, which are ready."""
        for descriptor in descriptors:
            try:
                part = os.read(descriptor, 1 << 16)
            except BlockingIOError:  # the program may read its own pipe
                continue
            if not part:
                self._open.remove(descriptor)
            self.printed[descriptor].append(part)
            self.size += len(part)
            if self.size > int(self.limits["output_kb"]) << 10:
                raise LimitReached("output")

    def drain(self) -> None:
        """Read the remaining output from the pipes."""
        with contextlib.suppress(LimitReached):
            while ready := select.select(self._open, [], [], 0)[0]:
                self._read(ready)

    def take_output(self) -> tuple[str, str]:
        """Return stdout and stderr since the last call."""
        out, err = (
            b"".join(self.printed[d]).decode("utf-8", "replace") for d in (self.out, self.err)
        )
        self.printed, self.size = {self.out: [], self.err: []}, 0
        return out, err

    def close(self) -> None:
        for descriptor in (self.out, self.err):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _count(self) -> None:
        processes, memory, cpu = 0, 0.0, 0.0
        for pid in list_descendants(self.root):
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = _read_stat(pid)
                processes += 1
                cpu += sum(fields[11:15]) / _CLOCK
                memory += max(0.0, fields[21] * _PAGE_MB - self._interpreter_mb)
        self.peak_mb = max(self.peak_mb, memory)
        if memory > self.limits["memory_mb"]:
            raise LimitReached("memory")
        if processes > self.limits["processes"]:
            raise LimitReached("processes")
        # The total drops if init reaps a process of the program.
        self._cpu_start = min(self._cpu_start, cpu)
        if cpu - self._cpu_start >= self.limits["cpu_s"]:
            raise LimitReached("cpu")


def _read_stat(pid: int) -> list[int]:
    """Return the numbers of /proc/PID/stat from the third field on, whose state is given as 0."""
    with open(f"/proc/{pid}/stat") as file:
        _, *numbers = file.read().rsplit(")", 1)[1].split()
    return [0, *map(int, numbers)]
