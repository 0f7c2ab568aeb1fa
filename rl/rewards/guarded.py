"""Run a program under a reaper process (rl.rewards.guard).

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

from rl.plain import plain_text
from rl.rewards import guard


class GuardedProgram:
    """Run a program under a reaper process.

    `environment`: its complete environment. `fileno`: readable if the program printed output or
    ended, see `hear`. Raises OSError if the process cannot be started.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], mark: str):
        self._mark, self._last = mark, b""
        self._life, guard_end = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-S",
                    str(Path(guard.__file__)),
                    "-1",
                    str(os.getpid()),
                    "",
                    *words,
                ],
                stdin=subprocess.DEVNULL,
                stdout=guard_end.fileno(),
                stderr=guard_end.fileno(),
                env={**environment, guard.MARK: mark},
                start_new_session=True,
            )
        except BaseException:
            self._life.close()
            raise
        finally:
            guard_end.close()
        self._life.setblocking(False)

    def fileno(self) -> int:
        return self._life.fileno()

    def hear(self) -> bool:
        """Read the available output and keep only its end.

        Returns False if the program and all its descendants have ended.
        """
        while True:
            try:
                data = self._life.recv(1 << 16)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._last = (self._last + data)[-guard.LAST_BYTES :]

    def ended(self, seconds: float = guard.END_SECONDS) -> int:
        """Return the exit code, -N if signal N ended the program; -9 if it has to be killed."""
        try:
            code = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = -int(signal.SIGKILL)
        if code < 0:  # the program may have killed its reaper
            self.kill()
        return code

    @property
    def printed(self) -> str:
        """Return the last lines of the output."""
        return plain_text(self._last.decode(errors="replace").strip(), 400)

    def let_go(self) -> None:
        """Make the reaper end the program and all its descendants, without waiting."""
        self._life.close()

    def kill(self) -> None:
        """Kill the program and all processes with its mark, even if the reaper is dead."""
        with contextlib.suppress(OSError):
            self._life.close()
        for pid in {*guard.descendants(self._process.pid), *guard.marked(self._mark)} - {
            os.getpid()
        }:
            guard.kill(pid)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
