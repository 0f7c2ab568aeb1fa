"""Test that bench/kernels.py keeps its measurements if an implementation fails, and that its
figures are not flattering.
"""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from bench import kernels
from bench.kernels import TINY, CannotRun, LogprobBatch, Provider, Step, Timing

TOKENS = 8
SMALL = replace(TINY, D=8, V=32)


class OutOfResources(Exception):
    """A stand-in for Triton's exception, which is not a standard Python exception."""


def compute_plain_logprobs(p: LogprobBatch) -> torch.Tensor:
    return torch.nn.functional.linear(p.x, p.w).log_softmax(-1).gather(-1, p.y[:, None])[:, 0]


def make_failing_logprobs(error: Exception, calls: int = 0):
    """Return a function that runs `calls` times, then raises."""
    remaining = [calls]

    def logprobs(p: LogprobBatch) -> torch.Tensor:
        remaining[0] -= 1
        if remaining[0] < 0:
            # a new exception, because a stored one keeps the frames that it passed through
            raise type(error)(*error.args)
        return compute_plain_logprobs(p)

    return logprobs


def make_providers(*inputs) -> tuple[Provider, ...]:
    return tuple(Provider(f"p{i}", "logits", 6, logprobs) for i, logprobs in enumerate(inputs))


ERRORS = [
    OutOfResources("shared memory 232448 > 101376"),
    AttributeError("no such kernel"),
    torch.OutOfMemoryError("of 80 GiB"),
    CannotRun("not installed"),
    AssertionError(),
]


def bench_head(names, repeats, left_out=lambda name, failure: None):
    return kernels.bench_head(SMALL, TOKENS, "cpu", torch.float32, names, repeats, left_out)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_what_one_provider_raises_costs_no_other_a_row(monkeypatch, error, calls):
    """A provider fails at its first call, after the errors were computed, or during timing."""
    fails = make_failing_logprobs(error, calls)
    providers = make_providers(compute_plain_logprobs, fails, compute_plain_logprobs)
    monkeypatch.setattr(kernels, "PROVIDERS", providers)
    left_out = {}
    rows = list(bench_head(["p0", "p1", "p2"], 2, left_out.__setitem__))
    for name in ("p0", "p2"):
        phases = [row["phase"] for row in rows if row["provider"] == name]
        assert phases == ["forward", "backward", "both"]
    assert set(left_out) == {"p1"}


def test_one_problem_is_alive_at_a_time(monkeypatch):
    """Eleven problems with their gradients took 24 GB of GPU memory for a large head, and what
    fitted in a trial did not fit when it was timed.
    """
    made, before = [], []
    make = LogprobBatch.make

    def counted(*inputs):
        gc.collect()
        before.append(sum(item() is not None for item in made))
        problem = make(*inputs)
        made.append(weakref.ref(problem.w))
        return problem

    plain, fails = compute_plain_logprobs, make_failing_logprobs(OutOfResources(), 2)
    monkeypatch.setattr(LogprobBatch, "make", staticmethod(counted))
    monkeypatch.setattr(kernels, "PROVIDERS", make_providers(plain, fails, plain, plain))
    names = ["p0", "p1", "p2", "p3"]
    list(bench_head(names, 2))
    assert before == [0, 0, 0, 0]


def test_each_provider_begins_with_nothing_compiled(monkeypatch):
    """After eight shapes torch.compile runs a function uncompiled: the ninth was timed in eager
    mode under its name.
    """
    resets, providers = [], make_providers(compute_plain_logprobs, compute_plain_logprobs)
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(len(resets)))
    monkeypatch.setattr(kernels, "PROVIDERS", providers)
    for _ in range(2):
        list(bench_head(["p0", "p1"], 1))
    assert len(resets) == 4


def test_the_peak_counts_the_gradients_of_the_weights(monkeypatch):
    """The gradients are freed before memory is read. Otherwise the next call frees them inside, and
    its peak misses that many bytes.
    """
    held, peak, order = [0], [0], []

    class Cuda:
        empty_cache = synchronize = staticmethod(lambda: None)
        memory_allocated = staticmethod(lambda: held[0])

        @staticmethod
        def reset_peak_memory_stats():
            peak[0] = held[0]

        @staticmethod
        def max_memory_allocated():
            return peak[0]

    def clear():
        held[0] = 0
        order.append("clear")

    def run(_):
        # like `grad = None` inside a step, with the gradients of the previous step still allocated
        # before
        held[0] = 100
        peak[0] = max(peak[0], held[0])
        order.append("run")

    real_empty = torch.empty
    monkeypatch.setattr(kernels.torch, "cuda", Cuda)
    monkeypatch.setattr(kernels.torch, "empty", lambda *size, device=None, **options: real_empty(1))
    monkeypatch.setattr(kernels, "once", lambda step, device, flush: 1.0)
    result = kernels.measure({"both": Step(run, clear=clear)}, "cuda", 1)
    assert result["both"] == Timing(1.0, 100) and order == ["run", "clear", "run"]


@pytest.mark.parametrize(("which", "column"), [("logp", 0), ("x", 1), ("w", 2)])
def test_errors_are_of_logprobs_and_of_both_gradients(which, column):
    """An error of 0.01 in a single number shows in its column; the others stay at rounding."""
    p = LogprobBatch.make(SMALL, TOKENS, "cpu", torch.float32)
    logp = compute_plain_logprobs(p)
    logp.backward(p.upstream)
    right = kernels.errors_of(logp.detach(), p)
    assert max(right) < 1e-5
    inputs = logp.detach().clone()
    with torch.no_grad():
        {"logp": inputs, "x": p.x.grad[0], "w": p.w.grad[0]}[which][0] += 0.01
    wrong = kernels.errors_of(inputs, p)
    assert wrong[column] > 1e-3 and all(wrong[i] == right[i] for i in range(3) if i != column)
