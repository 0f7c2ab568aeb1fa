"""Being asked to stop: the step under way is finished if time allows, the run is saved, and the
exit code says why.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

REQUEUE = 75  # EX_TEMPFAIL: run me again with --resume
INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# A launcher passes on what it was sent, and a scheduler sends to launcher and processes alike: one
# request comes several times.
_SAME_REQUEST_SECONDS = 1.0


class Stopped(Exception):
    """The run was asked to stop and has saved what it had. `exit_code`: 75 means "requeue", 130 a
    person's Ctrl-C.
    """

    def __init__(self, exit_code: int):
        self.exit_code = exit_code
        super().__init__(f"stopped with exit code {exit_code}")


class StopRequest:
    """Listens for SIGINT, SIGTERM and SIGUSR1 (a scheduler's warning) while it is entered.

    The first asks for a stop: `exit_code` is set. A second one, or `grace_seconds` after the first,
    ends the process at once with the same code: the newest checkpoint is whole, and a resumed run
    goes on from it. Until `working` is set there is nothing to save, and the first ends it at once.
    `farewell` is called before an end at once (to give a lock back).
    """

    def __init__(self, grace_seconds: float = 90.0) -> None:
        self.grace_seconds = grace_seconds
        self.exit_code: int | None = None
        self.working = False
        self.farewell: Callable[[], None] = lambda: None
        self._asked_at = 0.0
        self._timer: threading.Timer | None = None
        self._before: dict[int, object] = {}

    def late(self, seconds: float) -> bool:
        """Whether a stop was asked for and what takes so long no longer fits into the grace time."""
        return (
            self.exit_code is not None
            and time.monotonic() + seconds > self._asked_at + self.grace_seconds
        )

    def _heard(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.exit_code is None:
            self.exit_code, self._asked_at = (
                INTERRUPTED if number == signal.SIGINT else REQUEUE,
                now,
            )
            if not self.working:
                self._end(self.exit_code, f"{signal.Signals(number).name} before the first step")
            over = f"the {self.grace_seconds:g} s to stop in (the setting stop_grace) are over"
            self._timer = threading.Timer(self.grace_seconds, self._end, (self.exit_code, over))
            self._timer.daemon = True
            self._timer.start()
        elif now - self._asked_at > _SAME_REQUEST_SECONDS:
            code = INTERRUPTED if number == signal.SIGINT else self.exit_code
            self._end(code, f"a second signal, {signal.Signals(number).name}")

    def _end(self, code: int, why: str) -> None:
        try:
            self.farewell()
        finally:
            _end_at_once(code, why)

    def __enter__(self) -> StopRequest:
        # Other ranks than 0 serve in here, and until they do, nothing is lost if a signal ends them
        # as it ends any process.
        if _is_main_thread() and os.environ.get("RANK", "0") == "0":
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()


def _end_at_once(code: int, why: str) -> None:
    """From a signal handler or a timer: no lock is taken that somebody else may hold."""
    show_cursor = b"\x1b[?25h" if sys.stdout.isatty() else b""  # which a progress bar hides
    os.write(
        2,
        show_cursor
        + f"ended at once: {why}; --resume goes on from the newest checkpoint, if there is one\n".encode(),
    )
    os._exit(code)


def leave_to_the_driver(grace_seconds: float) -> None:
    """On a rank that serves: signals to stop are the driver's to obey, which needs this rank to
    save.

    It ends when the driver does. Should it hang, it ends by itself half a minute after the driver's
    grace time.
    """

    def heard(number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(
            grace_seconds + 30.0, _end_at_once, (REQUEUE, "the driver never released this rank")
        )
        timer.daemon = True
        timer.start()

    if _is_main_thread():
        for number in SIGNALS:
            signal.signal(number, heard)


def end_with_the_launcher() -> None:
    """Under a launcher (accelerate's, torchrun): if it dies, this process is asked to stop by
    SIGTERM, which else reaches it alone.

    Linux only (prctl PR_SET_PDEATHSIG); elsewhere, signal the training process itself.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    if sys.platform == "linux" and launched:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


def _is_main_thread() -> bool:
    """Python hears signals in no other."""
    return threading.current_thread() is threading.main_thread()
