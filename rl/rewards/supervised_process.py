"""Run a program under a reaper process (rl.rewards.reaper).

All processes that the program starts end with it, and the program ends with this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl.rewards import reaper
from rl.sanitize import sanitize_text


class SupervisedProcess:
    """Run a program under a reaper process.

    `environment`: its complete environment. `fileno`: readable if the program printed output or
    ended, see `read_output`. Raises OSError if the process cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], mark: str):
        self._mark, self._output_tail = mark, b""
        self._socket, guard_end = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-S",
                    str(Path(reaper.__file__)),
                    "-1",
                    str(os.getpid()),
                    "",
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=guard_end.fileno(),
                stderr=guard_end.fileno(),
                env={**environment, reaper.MARK_VARIABLE: mark},
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            guard_end.close()
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def read_output(self) -> bool:
        """Read the available output and keep only its end.

        Returns False if the program and all its descendants have ended.
        """
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._output_tail = (self._output_tail + data)[-reaper.OUTPUT_TAIL_BYTES :]

    def wait(self, seconds: float = reaper.KILL_SECONDS) -> int:
        """Return the exit code, -N if signal N ended the program; -9 if it has to be killed."""
        try:
            code = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = -int(signal.SIGKILL)
        if code < 0:  # the program may have killed its reaper
            self.kill()
        return code

    @property
    def last_output(self) -> str:
        """Return the last lines of the output."""
        return sanitize_text(self._output_tail.decode(errors="replace").strip(), 400)

    def request_end(self) -> None:
        """Make the reaper end the program and all its descendants, without waiting."""
        self._socket.close()

    def kill(self) -> None:
        """Kill the program and all processes with its mark, even if the reaper is dead."""
        with contextlib.suppress(OSError):
            self._socket.close()
        for pid in {
            *reaper.find_descendants(self._process.pid),
            *reaper.find_marked_processes(self._mark),
        } - {os.getpid()}:
            reaper.kill_process(pid)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
