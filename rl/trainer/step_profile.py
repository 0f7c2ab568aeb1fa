"""Measure some steps of a stage: a trace for Perfetto, and a table of the time of each part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from rl.errors import UserError

# part of a step -> the traced regions that it consists of
PARTS = {
    "sample": ("sample", "run_steps"),
    "wait": ("wait",),
    "score": ("score", "judge"),
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
OVERLAP = "parts at the same time"
REST = "rest of the step"
TOTAL = "wall time of the step"
STEP, JUDGE = "step", "judge"
# what a judge model may execute while its scores are awaited
JUDGE_CALLS = ("sample", "run_steps", "collate", "forward")
NUM_OPERATORS = 20

Interval = tuple[float, float]  # start and end in microseconds


@dataclass(frozen=True)
class TracedEvent:
    """Hold a traced region: its name, its time and its device time in microseconds."""

    name: str
    interval: Interval
    device_time: float = 0.0


class StepProfile:
    """Measure up to `steps` steps of a stage on rank 0, after a step that is not profiled
    (compilation, first allocations). The profiler stops for an evaluation, and starts again with
    the next step.

    Writes `folder`/NAME.json.gz (the trace; NAME+2.json.gz after an evaluation, and so on) and
    `folder`/NAME.txt (the tables). The profiler changes no result and makes the profiled steps
    slower.
    """

    def __init__(self, folder: Path, name: str, steps: int):
        self.folder, self.name, self.steps = folder, name, steps
        self.table: str | None = None
        self._profiler: Any = None
        self._step: Any = None  # the region of the step that is profiled
        self._done = 0
        self._seconds: list[dict[str, tuple[float, float]]] = []  # of each trace
        self._operators: list[str] = []  # of each trace

    def iter_batches(self, batches: Iterable[int]) -> Iterator[int]:
        """Yield `batches`. The profiler starts with the second batch; with a single batch, with
        that batch.
        """
        numbers = list(batches)
        skipped = numbers[:1] if len(numbers) > 1 else []
        try:
            for batch in numbers:
                if batch not in skipped and self._done < self.steps:
                    self._start()
                yield batch
        finally:
            self._stop()

    def end_step(self, *, is_evaluated: bool) -> None:
        """End a step. `is_evaluated`: an evaluation follows, which is no part of a step."""
        if self._step is not None:
            self._end_region()
            self._done += 1
            if is_evaluated or self._done == self.steps:
                self._stop()

    def _start(self) -> None:
        """Begin a step, and a trace unless the last one continues."""
        cuda = torch.cuda.is_available()
        if self._profiler is None:
            self._profiler = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
                # learner and sampler run in threads of their own
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            self._profiler.start()
        self._step = record_function(f"whetstone/{STEP}")
        self._step.__enter__()

    def _end_region(self) -> None:
        self._step.__exit__(None, None, None)
        self._step = None

    def _stop(self) -> None:
        """End a trace, if one has begun, and write the files."""
        if self._profiler is None:
            return
        if self._step is not None:  # the step was interrupted
            self._end_region()
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        cuda = torch.cuda.is_available()
        self._seconds.append(measure_parts(_list_regions(profiler.events())))
        self._operators.append(
            profiler.key_averages().table(
                sort_by="self_cuda_time_total" if cuda else "self_cpu_time_total",
                row_limit=NUM_OPERATORS,
                max_name_column_width=60,
            )
        )
        self.table = format_parts(self._seconds, max(1, self._done), cuda=cuda)
        count = len(self._seconds)
        # no name of a stage has a plus
        trace = self.name if count == 1 else f"{self.name}+{count}"
        text = "\n\n".join([self.table, *self._operators])
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self.folder / f"{trace}.json.gz"))
            (self.folder / f"{self.name}.txt").write_text(f"{text}\n")
        except OSError as error:
            raise UserError(f"--profile could not write to {self.folder}: {error}") from error


def _list_regions(events: Iterable[Any]) -> list[TracedEvent]:
    """Return this project's regions among the events of a profiler."""
    return [
        TracedEvent(
            event.name.removeprefix("whetstone/"),
            (event.time_range.start, event.time_range.end),
            event.device_time_total,
        )
        for event in events
        # the profiler repeats a region on the device, as an annotation
        if event.name.startswith("whetstone/")
        and event.device_type == torch.autograd.DeviceType.CPU
    ]


def measure_parts(regions: Sequence[TracedEvent]) -> dict[str, tuple[float, float]]:
    """Return the seconds of each part of the steps in a trace, on the host and on the device.

    A part's seconds on the host are those in which it runs in any thread. Parts of several threads
    may run at the same time, which OVERLAP subtracts. REST is the time without any part, so that
    the rows above TOTAL add up to it. What a judge model samples and computes is part of "score".
    """
    steps = [region.interval for region in regions if region.name == STEP]
    judgements = [region.interval for region in regions if region.name == JUDGE]
    total = sum(end - start for start, end in steps)
    seconds: dict[str, tuple[float, float]] = {}
    covered: list[Interval] = []
    for part, names in PARTS.items():
        members = [
            region
            for region in regions
            if region.name in names
            and any(start <= region.interval[0] < end for start, end in steps)
            and not (region.name in JUDGE_CALLS and _is_within(region.interval, judgements))
        ]
        intervals = [_clip(region.interval, steps) for region in members]
        covered += intervals
        device = sum(region.device_time for region in members)
        seconds[part] = _measure_union(intervals) / 1e6, device / 1e6
    host, union = sum(host for host, _ in seconds.values()), _measure_union(covered) / 1e6
    device = sum(device for _, device in seconds.values())
    seconds[OVERLAP] = union - host, 0.0
    seconds[REST] = total / 1e6 - union, 0.0
    seconds[TOTAL] = total / 1e6, device
    return seconds


def _is_within(interval: Interval, others: Iterable[Interval]) -> bool:
    return any(start <= interval[0] and interval[1] <= end for start, end in others)


def _clip(interval: Interval, steps: Sequence[Interval]) -> Interval:
    """Return the interval without what follows the step in which it starts."""
    end = next(end for start, end in steps if start <= interval[0] < end)
    return interval[0], min(interval[1], end)


def _measure_union(intervals: Iterable[Interval]) -> float:
    """Return the time that is in any of the intervals."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def format_parts(
    traces: Sequence[dict[str, tuple[float, float]]], steps: int, *, cuda: bool
) -> str:
    """Return the table of the parts of a step: milliseconds a step on the host, with `cuda` on the
    device too, and the share of the step's wall time.

    `traces`: the result of `measure_parts` for each trace; `steps`: the number of steps in them.
    """
    seconds = max(1e-9, sum(trace[TOTAL][0] for trace in traces))
    device_title = f"{'device ms':>11}" if cuda else ""
    lines = [f"{'part of a step':<34}{'host ms':>10}{device_title}{'share':>8}"]
    for part in traces[0]:
        host, device = (sum(trace[part][i] for trace in traces) for i in range(2))
        device_column = f"{1e3 * device / steps:>11.1f}" if cuda else ""
        lines.append(f"{part:<34}{1e3 * host / steps:>10.1f}{device_column}{host / seconds:>8.1%}")
    return "\n".join(lines)
