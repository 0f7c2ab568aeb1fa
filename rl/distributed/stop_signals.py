"""Handle stop signals.

The current step is finished if time allows, the run is saved, and the exit code gives the reason.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from rl.errors import RankLost
from rl.processes import set_parent_death_signal

REQUEUE = 75  # EX_TEMPFAIL: run again with --resume
INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# A launcher forwards its signals, and a scheduler signals both launcher and processes, so a single
# request arrives several times.
_SAME_REQUEST_SECONDS = 1.0


class RunStopped(Exception):
    """Report that the run was stopped by a signal and has saved its state.

    `exit_code`: 75 means "requeue", 130 a person's Ctrl-C.
    """

    def __init__(self, exit_code: int):
        self.exit_code = exit_code
        super().__init__(f"stopped with exit code {exit_code}")


class StopRequest:
    """Handle SIGINT, SIGTERM and SIGUSR1 (a scheduler's warning) while entered.

    The first signal requests a stop: `exit_code` is set. A second signal, or `grace_seconds` after
    the first, ends the process immediately with the same code: the newest checkpoint is complete,
    and a resumed run continues from it. Until `has_started` is set nothing needs saving, and the
    first signal ends the process immediately. `on_exit` is called before an immediate end (to
    release a lock).

    In a notebook or a script (without `ends_process`), SIGINT raises KeyboardInterrupt instead of
    ending the process immediately, and no timer follows it.
    """

    def __init__(self, grace_seconds: float = 90.0, *, ends_process: bool = False) -> None:
        self.grace_seconds, self.ends_process = grace_seconds, ends_process
        self.exit_code: int | None = None
        self.has_started = False
        self.on_exit: Callable[[], None] = lambda: None
        self._requested_at = 0.0
        self._timer: threading.Timer | None = None
        self._previous_handlers: dict[int, object] = {}

    def exceeds_grace(self, seconds: float) -> bool:
        """Return whether a stop was requested and `seconds` of work no longer fit into the grace
        time.
        """
        return (
            self._timer is not None
            and time.monotonic() + seconds > self._requested_at + self.grace_seconds
        )

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        now = time.monotonic()
        raises = number == signal.SIGINT and not self.ends_process
        code = INTERRUPTED if number == signal.SIGINT else REQUEUE
        if self.exit_code is None and self.has_started:
            self.exit_code, self._requested_at = code, now
            if not raises:
                over = f"the {self.grace_seconds:g} s to stop in (the setting stop_grace) are over"
                self._timer = threading.Timer(self.grace_seconds, self._end, (code, over))
                self._timer.daemon = True
                self._timer.start()
        elif self.exit_code is None or now - self._requested_at > _SAME_REQUEST_SECONDS:
            if raises:
                raise KeyboardInterrupt
            when = "a second signal, {}" if self.has_started else "{} before the first step"
            reason = when.format(signal.Signals(number).name)
            self._end(code if code == INTERRUPTED else self.exit_code or code, reason)

    def _end(self, code: int, reason: str) -> None:
        """Call `on_exit` and end the process."""
        try:
            self.on_exit()
        finally:
            _end_immediately(code, reason)

    def __enter__(self) -> StopRequest:
        """Install the handlers on rank 0."""
        # Ranks other than 0 call defer_signals_to_driver when they serve. Before that a signal that
        # ends them loses nothing.
        if _is_main_thread() and os.environ.get("RANK", "0") == "0":
            for number in SIGNALS:
                self._previous_handlers[number] = signal.signal(number, self._handle_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        is_lost = self.ends_process and kind is not None and issubclass(kind, RankLost)
        for number, handler in self._previous_handlers.items():
            # A launcher sends SIGTERM at once after the loss of a rank: the error is printed first.
            ignores = is_lost and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if ignores else handler)  # type: ignore[arg-type]
        self._previous_handlers.clear()


def _end_immediately(code: int, reason: str) -> None:
    """End the process from a signal handler or a timer, without acquiring any lock."""
    show_cursor = b"\x1b[?25h" if sys.stdout.isatty() else b""  # a progress bar hides it
    os.write(
        2,
        show_cursor
        + f"ended immediately: {reason}; --resume uses the newest checkpoint, if any\n".encode(),
    )
    os._exit(code)


def defer_signals_to_driver(grace_seconds: float) -> None:
    """Let the driver handle stop signals on a serving rank, since the driver needs this rank to
    save.

    The rank ends when the driver does. If the driver hangs, the rank ends by itself half a minute
    after the driver's grace time.
    """

    def handle_signal(number: int, frame: FrameType | None) -> None:
        timer = threading.Timer(
            grace_seconds + 30.0, _end_immediately, (REQUEUE, "the driver never released this rank")
        )
        timer.daemon = True
        timer.start()

    if _is_main_thread():
        for number in SIGNALS:
            signal.signal(number, handle_signal)


def end_with_launcher() -> None:
    """Ask the system to send this process SIGTERM if its launcher (accelerate, torchrun) dies.

    Otherwise SIGTERM would reach the launcher only. Linux only (prctl PR_SET_PDEATHSIG); on other
    systems, signal the training process itself.
    """
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
    if launched:
        set_parent_death_signal(signal.SIGTERM)


def end_process_at_exit() -> None:
    """End this serving rank immediately once the script and all exit handlers have run, without
    tearing down the interpreter. The process exits normally if the script ended with an error.

    torch's process-group threads live until the end (DDP keeps a group's). A thread that needs the
    interpreter during teardown is unwound, and C++ then aborts with "terminate called without an
    active exception". A launch in some hundred failed this way after all work was done.
    """
    atexit.register(_end_process)


def _end_process() -> None:
    """Run the remaining exit handlers, then end the process."""
    atexit.unregister(_end_process)
    atexit._run_exitfuncs()
    if getattr(sys, "last_value", None) is None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _is_main_thread() -> bool:
    """Return whether this is the main thread, the only thread in which Python handles signals."""
    return threading.current_thread() is threading.main_thread()
