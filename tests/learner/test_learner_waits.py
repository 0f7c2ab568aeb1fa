"""Test that the host reads no result of a learner's call before its last micro-batch is launched:
on a GPU it would wait for all earlier work.

Torch cannot run a model's forward on fake CUDA tensors without CUDA, so the calls run on the CPU
and the reads are recorded.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from helpers import make_worker, random_datums
from torch.utils._python_dispatch import TorchDispatchMode

from rl.losses import get_loss

# Operators with a result that the host reads, and tensor methods that copy to the host.
WAITS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten._unique2.default",
    "aten.unique_dim.default",
    "aten.repeat_interleave.Tensor",
    "aten.equal.default",
}
COPIES = ("cpu", "numpy", "tolist")


class ReadRecorder(TorchDispatchMode):
    """Record the operators whose result the host reads."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) in WAITS:
            self.events.append(f"read: {func}")
        return func(*args, **(kwargs or {}))


def recorded_run(
    monkeypatch: pytest.MonkeyPatch, layout: str, loss: str, backward: bool
) -> tuple[list[str], int]:
    """Return the passes and reads of a call in order, and its number of micro-batches."""
    learner, events = make_worker(token_budget=24, layout=layout).learners[0], []
    forward, compute_gradient = learner._forward, learner.backend.backward

    def record_forward(*args: Any) -> Any:
        result = forward(*args)
        events.append("forward")
        return result

    def record_backward(value: torch.Tensor) -> None:
        compute_gradient(value)
        events.append("backward")

    def record_copy(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def copy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            events.append(f"read: {name}")
            return original(tensor, *args, **kwargs)

        return copy

    monkeypatch.setattr(learner, "_forward", record_forward)
    monkeypatch.setattr(learner.backend, "backward", record_backward)
    # On a CPU the head checks the targets again, which waits for nothing.
    kernel_module = sys.modules["kernels.linear_logprob"]
    monkeypatch.setattr(kernel_module, "find_target_rows", lambda *arguments: None)
    for name in COPIES:
        monkeypatch.setattr(torch.Tensor, name, record_copy(name))
    with ReadRecorder(events):
        learner.run(
            random_datums(8), get_loss(loss), {}, temperature=1.0, divisor=1.0, backward=backward
        )
    return events, learner.num_micro_batches


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("layout", ["padded", "shared"])
@pytest.mark.parametrize("loss", ["ppo", "importance_sampling", "cispo"])
def test_the_host_reads_nothing_before_the_last_micro_batch(loss, layout, backward, monkeypatch):
    events, count = recorded_run(monkeypatch, layout, loss, backward)
    passes = ["forward", "backward"] * count if backward else ["forward"] * count
    assert count > 2 and events[: len(passes)] == passes
    # The sums of the metrics, then the outputs of all tokens: two copies for any batch.
    assert events[len(passes) :] == ["read: tolist", "read: cpu", "read: numpy"]
