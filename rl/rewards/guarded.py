"""A program of somebody's, run under a guard (rl.rewards.guard): whatever it starts ends with it,
and it ends with this process.
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
    """`environment`: all that it gets. `fileno`: readable when it printed something or ended, see
    `hear`. OSError where none starts.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], mark: str):
        self._mark, self._last = mark, b""
        self._life, guards = socket.socketpair()
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
                stdout=guards.fileno(),
                stderr=guards.fileno(),
                env={**environment, guard.MARK: mark},
                start_new_session=True,
            )
        except BaseException:
            self._life.close()
            raise
        finally:
            guards.close()
        self._life.setblocking(False)

    def fileno(self) -> int:
        return self._life.fileno()

    def hear(self) -> bool:
        """Reads what it printed, and drops all but the end. False where it has ended, with all that
        it started.
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
        """Its exit code, -N where signal N ended it; -9 where it has to be killed for one."""
        try:
            code = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = -int(signal.SIGKILL)
        if code < 0:  # the guard itself may have been killed, by a program that knows what it is
            self.kill()
        return code

    @property
    def printed(self) -> str:
        """The end of what it printed: the last lines."""
        return plain_text(self._last.decode(errors="replace").strip(), 400)

    def let_go(self) -> None:
        """Has the guard end it and all that it started; nobody waits for that."""
        self._life.close()

    def kill(self) -> None:
        """Ends it and all that carries its mark, whatever became of the guard."""
        with contextlib.suppress(OSError):
            self._life.close()
        for pid in {*guard.descendants(self._process.pid), *guard.marked(self._mark)} - {
            os.getpid()
        }:
            guard.kill(pid)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)
