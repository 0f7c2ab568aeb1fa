"""Time kernels: device time on CUDA (events around each call, L2 flushed before it), wall time
elsewhere.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Hold the milliseconds (median, 20% and 80% quantiles) and the peak of allocated bytes above
    those held before (CUDA; else 0).
    """

    median: float
    low: float
    high: float
    peak_bytes: int


def quantiles(samples: list[float]) -> tuple[float, float, float]:
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    cuts = statistics.quantiles(samples, n=5, method="inclusive")
    return statistics.median(samples), cuts[0], cuts[3]


@dataclass(frozen=True)
class Step:
    """Hold a timed call: `run`, on the result of `prepare`, which is called just before and is not
    timed. `clear` frees what the last call kept.
    """

    run: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None
    clear: Callable[[], None] = lambda: None

    def __call__(self) -> object:
        return self.run(self.prepare())


def once(step: Step, device: str, flush: torch.Tensor | None) -> float:
    """Return the milliseconds of a single call."""
    state = step.prepare()
    if device != "cuda":
        start = time.perf_counter()
        step.run(state)
        return (time.perf_counter() - start) * 1e3
    assert flush is not None
    flush.zero_()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step.run(state)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def measure(steps: dict[str, Step], device: str, repeats: int) -> dict[str, Timing]:
    """Time each step `repeats` times after a warm-up. The order is reversed every round, so that no
    step always runs first.
    """
    flush = torch.empty(64 << 20, dtype=torch.int32, device=device) if device == "cuda" else None
    samples: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0)
    for name, step in steps.items():
        if device == "cuda":
            step()
            torch.cuda.synchronize()
            # Otherwise the last call's gradients, freed inside the next call, would hide as many
            # bytes of its peak.
            step.clear()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            torch.cuda.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated() - before
        else:
            step()
    for round_ in range(repeats):
        for name in list(steps) if round_ % 2 == 0 else list(steps)[::-1]:
            samples[name].append(once(steps[name], device, flush))
    return {name: Timing(*quantiles(samples[name]), peaks[name]) for name in steps}


def captured(run: Callable[[], object]) -> Step:
    """Return a step that replays `run` from a CUDA graph: its device time, where the host would
    take longer to launch it.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return Step(lambda _: graph.replay())
