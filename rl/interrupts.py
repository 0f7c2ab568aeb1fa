"""Being asked to stop: the step under way is finished, saved, and the process exits with a code that says why."""

from __future__ import annotations

import signal
import threading
from types import FrameType

REQUEUE = 75  # EX_TEMPFAIL: run me again with --resume
INTERRUPTED = 130


class Stopped(Exception):
    """The run was asked to stop and has saved what it had. `exit_code`: 75 means "requeue", 130 a person's Ctrl-C."""

    def __init__(self, exit_code: int):
        self.exit_code = exit_code
        super().__init__(f"stopped with exit code {exit_code}")


class StopRequest:
    """Listens for SIGINT, SIGTERM and SIGUSR1 while it is entered. A second SIGINT stops at once."""

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self._before: dict[int, object] = {}

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.exit_code is not None:
            raise KeyboardInterrupt
        self.exit_code = INTERRUPTED if number == signal.SIGINT else REQUEUE

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()
