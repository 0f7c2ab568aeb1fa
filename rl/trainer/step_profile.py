"""Measure some steps of a stage: a trace for Perfetto, and a table of the time of each part."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from rl.errors import UserError

# part of a step -> the traced regions that it consists of
PARTS = {
    "sample": ("sample", "run_steps"),
    "collate": ("collate",),
    "forward": ("forward",),
    "backward": ("backward",),
    "update": ("update",),
    "weight transfer": (
        "snapshot",
        "snapshot_base",
        "begin_transfer",
        "receive_chunk",
        "end_transfer",
    ),
}
SCORE = "wait for rewards and environments"
REST = "rest of the step"
TOTAL = "wall time of the step"
NUM_OPERATORS = 20


class StepProfile:
    """Measure up to `steps` steps of a stage on rank 0, after a step that is not profiled
    (compilation, first allocations). A step before an evaluation is the last.

    Writes `folder`/NAME.json.gz (the trace) and `folder`/NAME.txt (the tables). The profiler
    changes no result and makes the profiled steps slower.
    """

    def __init__(self, folder: Path, name: str, steps: int):
        self.folder, self.name, self.steps = folder, name, steps
        self.table: str | None = None
        self._profiler: Any = None
        self._score_seconds: list[float] = []
        self._start_time = 0.0

    def iter_batches(self, batches: Iterable[int]) -> Iterator[int]:
        """Yield `batches`. The profiler starts with the second batch; with a single batch, with
        that batch.
        """
        numbers = list(batches)
        first = numbers[1:2] or numbers[:1]
        try:
            for batch in numbers:
                if self._profiler is None and self.table is None and [batch] == first:
                    self._start()
                yield batch
        finally:
            if self._profiler is not None:
                self._write()

    def end_step(self, row: Mapping[str, float], *, is_last: bool) -> None:
        """Take the metrics of a step at its end. `is_last`: an evaluation follows, which is no part
        of a step.
        """
        if self._profiler is not None:
            self._score_seconds.append(row.get("time/score", 0.0))
            if is_last or len(self._score_seconds) == self.steps:
                self._write()

    def _start(self) -> None:
        cuda = torch.cuda.is_available()
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
            # learner and sampler run in threads of their own
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.start()
        self._start_time = time.perf_counter()

    def _write(self) -> None:
        """Stop the profiler and write its files."""
        profiler, self._profiler = self._profiler, None
        seconds = time.perf_counter() - self._start_time
        profiler.stop()
        steps = max(1, len(self._score_seconds))
        events = profiler.key_averages()
        cuda = torch.cuda.is_available()
        self.table = format_parts(events, seconds, sum(self._score_seconds), steps, cuda=cuda)
        operators = events.table(
            sort_by="self_cuda_time_total" if cuda else "self_cpu_time_total",
            row_limit=NUM_OPERATORS,
            max_name_column_width=60,
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.folder / f"{self.name}.json.gz"))
            (self.folder / f"{self.name}.txt").write_text(f"{self.table}\n\n{operators}\n")
        except OSError as error:
            raise UserError(f"--profile could not write to {self.folder}: {error}") from error


def format_parts(
    events: Iterable[Any], seconds: float, score_seconds: float, steps: int, *, cuda: bool
) -> str:
    """Return the table of the parts of a step: milliseconds a step on the host, with `cuda` on the
    device too, and the share of the step's wall time.

    `events`: averages of torch's profiler; `seconds`: wall time of all `steps` steps;
    `score_seconds`: time in which the loop waited for rewards and environments. Parts in different
    threads may overlap, so that the shares may add up to more than 1.
    """
    regions = {
        event.key.removeprefix("whetstone/"): event
        for event in events
        if event.key.startswith("whetstone/")
    }
    rows: list[tuple[str, float, float]] = []  # part, seconds on the host and on the device
    for part, names in PARTS.items():
        part_events = [regions[name] for name in names if name in regions]
        host = sum(event.cpu_time_total for event in part_events) / 1e6
        device = sum(event.device_time_total for event in part_events) / 1e6
        rows.append((part, host, device))
        if part == "sample":
            rows.append((SCORE, score_seconds, 0.0))
    rows.append((REST, max(0.0, seconds - sum(host for _, host, _ in rows)), 0.0))
    rows.append((TOTAL, seconds, sum(device for *_, device in rows)))
    device_title = f"{'device ms':>11}" if cuda else ""
    lines = [f"{'part of a step':<34}{'host ms':>10}{device_title}{'share':>8}"]
    for part, host, device in rows:
        device_column = f"{1e3 * device / steps:>11.1f}" if cuda else ""
        lines.append(f"{part:<34}{1e3 * host / steps:>10.1f}{device_column}{host / seconds:>8.1%}")
    return "\n".join(lines)
