"""Time kernels: device time on CUDA (events around each call, L2 flushed before it), wall time
elsewhere. Define the LM heads of the kernel benchmarks' models, and the limits of the GPU.

The limits are those that `bench/gpu.py` has measured on this GPU (the file named by
WHETSTONE_GPU_FLOORS), otherwise those of an H100.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_FLOORS = os.environ.get("WHETSTONE_GPU_FLOORS", "")
_LIMITS = {
    "tflops": 790.0,
    "tb_per_s": 3.0,
    **(json.loads(Path(_FLOORS).read_text()) if _FLOORS and Path(_FLOORS).is_file() else {}),
}
TFLOPS: float = _LIMITS["tflops"]  # bfloat16, a large square product
TB_PER_S: float = _LIMITS["tb_per_s"]  # a large copy


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Describe an LM head: hidden size D, vocabulary V, and the logits' softcap if it has any."""

    model: str
    D: int
    V: int
    softcap: float | None = None


SHAPES = (
    Shape(model="Qwen2.5-0.5B", D=896, V=151_936),
    Shape(model="Qwen3-0.6B", D=1024, V=151_936),
    Shape(model="Qwen3-1.7B", D=2048, V=151_936),
    Shape(model="Gemma-2-2B", D=2304, V=256_000, softcap=30.0),
    Shape(model="Qwen2.5-7B", D=3584, V=152_064),
    Shape(model="Llama-3.1-8B", D=4096, V=128_256),
)
TINY = Shape(model="tiny", D=64, V=4_096)
TOKENS = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768)


def floor_ms(products: float, tokens: int, shape: Shape) -> float:
    """Return the milliseconds of `products` x N D V operations."""
    return products * tokens * shape.D * shape.V / (TFLOPS * 1e9)


def copy_floor_ms(size: float) -> float:
    """Return the milliseconds to move `size` bytes."""
    return size / (TB_PER_S * 1e9)


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
