"""Write the page of a run while it trains, at a bounded cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from rl.errors import install_command
from rl.reporting import REPORT, Console, has_plotly
from rl.trainer.launch_log import LaunchLog
from rl.trainer.run_report import write_report

_MAX_SHARE = 0.01  # of the run's time
_FIRST_COST = 0.5  # expected CPU seconds of the first page


class ReportWriter:
    """Write report.html and launches.jsonl of a run. A failure is a warning and never ends the run.

    Evaluations write the page in a thread, unless pages would then take more than 1% of the time:
    a page that took C seconds of CPU time is followed by the next one after 100 C seconds at the
    earliest. `close` always writes it, except if the grace time of a stop request is too short.

    `guard` raises if the folder no longer belongs to this process. `exceeds_grace` returns whether
    a stop was requested whose grace time is shorter than a number of seconds.
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        launches: LaunchLog,
        *,
        guard: Callable[[], None] = lambda: None,
        exceeds_grace: Callable[[float], bool] = lambda seconds: False,
    ):
        self.folder, self.console, self.launches = folder, console, launches
        self._guard, self._exceeds_grace = guard, exceeds_grace
        self._cost, self._last_end = _FIRST_COST, time.monotonic()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._has_warned = False
        self._is_available = has_plotly()
        self._write_launches()
        if not self._is_available:
            console.note(f"no {REPORT}: it needs plotly: {install_command('report')}")

    def update(self) -> None:
        """Begin the page of an evaluation, if its cost allows."""
        self._warn_of_failure()
        busy = self._thread is not None and self._thread.is_alive()
        if busy or time.monotonic() - self._last_end < self._cost / _MAX_SHARE:
            return
        self._write_launches()
        if self._is_available:
            self._thread = threading.Thread(target=self._write_page, name="report", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write the page of the whole run."""
        self._write_launches()
        if self._is_available and not self._exceeds_grace(1 + 4 * self._cost):
            if self._thread is not None:
                self._thread.join()
            self._write_page()
        self._warn_of_failure()

    def _write_launches(self) -> None:
        try:
            self._guard()
            self.launches.write()
        except Exception as error:  # a full disk, or a damaged file
            self._failure = error
        self._warn_of_failure()

    def _write_page(self) -> None:
        """Write the page, and measure the CPU time that it takes."""
        start = time.thread_time()
        try:
            self._guard()
            write_report([self.folder])
        except Exception as error:  # arbitrary files and texts are read
            self._failure = error
        self._cost = time.thread_time() - start
        self._last_end = time.monotonic()

    def _warn_of_failure(self) -> None:
        """Warn of the first failure, on the thread of the run."""
        if self._failure is not None and not self._has_warned:
            self._has_warned = True
            kind, text = type(self._failure).__name__, str(self._failure)
            self.console.warn(f"no {REPORT} ({kind}: {text[:500]}); the run continues without it")
        self._failure = None
