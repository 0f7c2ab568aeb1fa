"""Run a program, or a worker with a channel of messages, under a reaper (rl.processes.reaper).

All processes that it starts end with it, and it ends with this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rl.processes import reaper
from rl.processes.message_frames import FrameReader, encode_frame, open_channel
from rl.sanitize import sanitize_text

# For a reaper to end. After it, the reaper is killed, and the processes below it are searched for.
_END_SECONDS = reaper.KILL_SECONDS + 2.0
_LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
_LAUNCH_PREFIXES = ("ACCELERATE_", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")


def get_environment_without_launch() -> dict[str, str]:
    """Return the environment of this process without the variables of its launch, for a process
    that belongs to none of the launch's process groups.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCH_VARIABLES and not name.startswith(_LAUNCH_PREFIXES)
    }


class WorkerDiedError(Exception):
    """Raised when a worker ended without a reply."""


class SupervisedProcess:
    """Run a program under a reaper process.

    `environment`: its complete environment. `channel`: a socket that it inherits. `path`: JSON of
    sys.path for a function of a module in place of a program. `folder`: its current folder, by
    default that of this process. `output`: called with chunks of its
    output. `fileno`: readable if the program printed output or ended, see `read_output`. Raises
    OSError if the process cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        channel: socket.socket | None = None,
        path: str = "",
        folder: str | None = None,
        output: Callable[[bytes], None] = lambda data: None,
    ):
        self._mark, self._output, self._output_tail = secrets.token_hex(16), output, b""
        self._is_closed = False  # whether the program closed a pipe or socket to this process
        self._has_killed_remaining = False
        fds = [] if channel is None else [channel.fileno()]
        flags = ["-P"] if path else ["-P", "-S"]  # a program needs no site-packages in its reaper
        line = [sys.executable, *flags, str(Path(reaper.__file__)), str(os.getpid())]
        with open_channel() as (self._output_socket, reaper_end):
            self._process = subprocess.Popen(
                [*line, str(fds[0] if fds else -1), path, *command],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=reaper_end.fileno(),
                stderr=reaper_end.fileno(),
                cwd=folder,
                env={**environment, reaper.MARK_VARIABLE: self._mark},
                start_new_session=True,
            )
        self._output_socket.setblocking(False)

    @property
    def pid(self) -> int:
        """Return the process id of the reaper."""
        return self._process.pid

    def fileno(self) -> int:
        return self._output_socket.fileno()

    def read_output(self) -> bool:
        """Read the available output and keep only its end.

        Returns False if the program and all its descendants have ended.
        """
        while True:
            try:
                data = self._output_socket.recv(1 << 16)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._output_tail = (self._output_tail + data)[-reaper.OUTPUT_TAIL_BYTES :]
            self._output(data)

    @property
    def last_output(self) -> str:
        """Return the last lines of the output."""
        return sanitize_text(self._output_tail.decode(errors="replace").strip(), 400)

    def describe_end(self) -> str:
        """Describe how the process ended, or that it is still running, with its last line of
        output.
        """
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=1.0)
        if code is not None and code < 0:  # while no other process has the reaper's number
            self._kill_remaining()
        self._is_closed = not self.read_output() or self._is_closed
        lines = self._output_tail.decode(errors="replace").strip().splitlines()
        # The line that ends a traceback, which other output may follow.
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        last_output = (
            f", it last printed: {sanitize_text((errors or lines)[-1].strip(), 300)}"
            if lines
            else ""
        )
        if code is None:
            state = f"it {'closed its pipe but ' * self._is_closed}is still running"
        else:
            state = f"killed by {_get_signal_name(-code)}" if code < 0 else f"exit code {code}"
        return state + last_output

    def request_end(self) -> None:
        """Make the reaper end the program and all its descendants, without waiting."""
        self._output_socket.close()

    def stop(self) -> int:
        """End the program and all its descendants; idempotent.

        Takes seconds only if a process evades. Returns the exit code, -N if signal N ended the
        program; -9 if it had to be killed.
        """
        self.request_end()
        try:
            code = self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            code = -int(signal.SIGKILL)
        if code < 0:  # the program may have killed or stopped its reaper
            self._kill_remaining()
        return code

    def _kill_remaining(self) -> None:
        """Kill the processes that a reaper did not end.

        They are identified by ancestry while the reaper exists (it adopts orphans), by session and
        mark otherwise. Later calls do nothing: another session may then have the reaper's number.
        """
        if self._has_killed_remaining:
            return
        self._has_killed_remaining = True
        for _ in range(3):  # again for processes forked in the meantime
            lives = self._process.poll() is None
            guarded = reaper.find_descendants(self._process.pid) if lives else []
            marked = reaper.find_marked_processes(self._mark, self._process.pid)
            for pid in {*guarded, *marked} - {os.getpid()}:
                reaper.kill_process(pid)
        if self._process.poll() is None:
            self._process.kill()
            # If the kernel blocks it, nothing more can be done.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5.0)


class MessageChannel:
    """Send framed messages over a socket to a process that may run user code, and receive its.

    `limit`: maximum length of a received message in bytes.
    """

    def __init__(self, channel: socket.socket, limit: int):
        self.channel, self._frames, self._is_closed = channel, FrameReader(limit), False
        self._readers: dict[int, Callable[[], bool]] = {}
        self._poller = select.poll()
        channel.setblocking(False)
        self._add_reader(channel, self._read_channel)

    def describe_end(self) -> str:
        """Describe why the other process sends no more messages."""
        raise NotImplementedError

    def stop(self) -> object:
        """End the other process; idempotent."""
        raise NotImplementedError

    def _add_reader(self, source: socket.socket, read: Callable[[], bool]) -> None:
        """Call `read` when the source has data; it returns False if the other end is closed."""
        self._readers[source.fileno()] = read
        self._poller.register(source, select.POLLIN)

    def send(self, message: bytes, seconds: float) -> None:
        """Send a message. Raises TimeoutError if the worker does not read it within `seconds`,
        WorkerDiedError if it has ended.
        """
        remaining, deadline = memoryview(encode_frame(message)), time.monotonic() + seconds
        poller = select.poll()
        poller.register(self.channel, select.POLLOUT)
        while remaining:
            try:
                remaining = remaining[self.channel.send(remaining) :]
            except BlockingIOError:
                if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                    raise TimeoutError from None
            except OSError as error:
                self._is_closed = True
                raise WorkerDiedError(self.describe_end()) from error

    def receive(self, seconds: float) -> bytes:
        """Return the next message. Raises TimeoutError after `seconds`, WorkerDiedError or
        InvalidReply.
        """
        deadline = time.monotonic() + seconds
        while (message := self._frames.next()) is None:
            if self._is_closed:
                raise WorkerDiedError(self.describe_end())
            self._wait_for_data(max(0.0, deadline - time.monotonic()))
        return message

    def _wait_for_data(self, seconds: float) -> None:
        """Wait for data. Raises TimeoutError after `seconds`."""
        events = self._poller.poll(1000 * seconds)
        if not events:
            raise TimeoutError
        for fd, _ in events:
            self._is_closed = not self._readers[fd]() or self._is_closed
        if self._is_closed:  # messages sent before the end count
            for _ in range(64):  # bounded, since another process may continue to send
                if not self._read_channel():
                    return

    def _read_channel(self) -> bool:
        """Read once. Return False if the worker has ended."""
        try:
            data = self.channel.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:  # it ended with messages unread
            return False
        self._frames.feed(data)
        return bool(data)


class WorkerProcess(SupervisedProcess, MessageChannel):
    """Run a function in a fresh interpreter in its own process group, and exchange messages with
    it.

    `function`: "module:function", called with the file descriptor of its end of the channel.
    `limit`: maximum length of a message in bytes. `channel`: this process's end.
    """

    def __init__(
        self,
        function: str,
        environment: Mapping[str, str],
        limit: int,
        output: Callable[[bytes], None] = lambda data: None,
    ):
        with open_channel() as (channel, worker_end):
            SupervisedProcess.__init__(
                self,
                [function],
                environment,
                channel=worker_end,
                path=json.dumps(sys.path),
                output=output,
            )
        MessageChannel.__init__(self, channel, limit)
        self._add_reader(self._output_socket, self.read_output)

    def has_ended(self) -> bool:
        """Return whether the worker has closed its end of the channel, or its reaper has ended."""
        poller = select.poll()
        poller.register(self.channel, 0)  # reports a hang-up alone
        return bool(poller.poll(0)) or self._process.poll() is not None

    def request_end(self) -> None:
        self.channel.close()
        super().request_end()


def _get_signal_name(number: int) -> str:
    is_named = number in set(signal.Signals)
    return signal.Signals(number).name if is_named else f"signal {number}"
