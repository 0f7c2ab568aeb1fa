"""Write the page and the launches of a run while it trains, at a bounded cost."""

from __future__ import annotations

import os
import platform
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rl.errors import RankLost, install_command
from rl.jsonl import write_jsonl
from rl.reporting import LAUNCHES, REPORT, Console, has_plotly, read_rollouts
from rl.trainer.memory_requirements import StageNeeds, get_machine_memory
from rl.trainer.run_report import write_report

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "triton", "numpy")
_MAX_LAUNCHES = 200  # rows that are kept of a run that is resumed again and again


def list_versions() -> dict[str, str]:
    """Return the versions of Python, of the main packages and of CUDA in this process."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**versions, **({"cuda": torch.version.cuda} if torch.version.cuda else {})}


def list_devices() -> list[dict[str, Any]]:
    """Return name and bytes of memory of each GPU of this machine; without one, its processor."""
    if torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [{"name": device.name, "memory": device.total_memory} for device in devices]
    name = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    return [{"name": name, "memory": get_machine_memory()}]


def measure_peak_memory() -> dict[str, Any]:
    """Return the most bytes that rank 0 has used so far: of GPU memory, otherwise of its process.
    The allocator's reserve counts as GPU memory.
    """
    if torch.cuda.is_initialized():
        return {"peak_memory": torch.cuda.max_memory_reserved(), "peak_memory_of": "GPU of rank 0"}
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak_memory": peak, "peak_memory_of": "process of rank 0"}


def describe_launch(
    step: int, info: Mapping[str, Any], plans: Sequence[StageNeeds]
) -> dict[str, Any]:
    """Return the record of a launch that starts at `step`. `info`: that of the policy's client.
    `plans`: the memory plan of each stage, if it was computed.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "step": step,
        "processes": info.get("world"),
        "device": str(info.get("device")),
        "dtype": str(info.get("dtype")),
        "parameters": info.get("parameters"),
        "trainable_parameters": info.get("trainable_parameters"),
        "versions": list_versions(),
        "devices": list_devices(),
        "planned_memory": {needs.stage: round(needs.plan.peak) for needs in plans},
    }


_MAX_SHARE = 0.01  # of the run's time
_FIRST_COST = 0.5  # expected CPU seconds of the first page


class ReportWriter:
    """Write report.html and launches.jsonl of a run. A failure is a warning and never ends the run.

    launches.jsonl has a row for each launch, the last is `launch` with the memory that it has used
    so far. Lines that are no JSON objects are dropped.

    Evaluations write the page in a thread, unless pages would then take more than 1% of the time:
    a page that took C seconds of CPU time is followed by the next one after 100 C seconds at the
    earliest. The end of a `with` block always writes it, except after the loss of a rank or if the
    grace time of a stop request is too short.

    `guard` raises if the folder no longer belongs to this process. `exceeds_grace` returns whether
    a stop was requested whose grace time is shorter than a number of seconds.
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        launch: Mapping[str, Any],
        *,
        guard: Callable[[], None] = lambda: None,
        exceeds_grace: Callable[[float], bool] = lambda seconds: False,
    ):
        self.folder, self.console, self._launch = folder, console, launch
        self._earlier_launches: list[dict[str, Any]] | None = None
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

    def close(self, *, draw: bool = True) -> None:
        """Write the launches, and the page of the whole run if `draw`."""
        self._write_launches()
        if draw and self._is_available and not self._exceeds_grace(1 + 4 * self._cost):
            if self._thread is not None:
                self._thread.join()
            self._write_page()
        self._warn_of_failure()

    def __enter__(self) -> ReportWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After the loss of a rank, the launcher soon ends this process, which has to print the
        # error before that.
        self.close(draw=kind is None or not issubclass(kind, RankLost))

    def _write_launches(self) -> None:
        try:
            self._guard()
            path = self.folder / LAUNCHES
            if self._earlier_launches is None:
                rows = read_rollouts(path) if path.exists() else []
                self._earlier_launches = rows[1 - _MAX_LAUNCHES :]
            rows = [*self._earlier_launches, {**self._launch, **measure_peak_memory()}]
            write_jsonl(path, rows)
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
