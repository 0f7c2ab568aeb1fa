"""Test that the host reads no result of a learner's call before its last micro-batch is launched,
and none of a step before its update is: on a GPU it would wait for all earlier work.

The calls run on the CPU and the reads are recorded: operators by a dispatch mode, and methods of
tensors by replacing them, since a dispatch mode does not see inside a custom op, and fake tensors
(test_fake_cuda_step.py) do not run what is inside. Not seen: reads in C++ inside a custom op. The
last test asks a GPU itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import call, gradient, make_worker, random_datums
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import linear_logprob_torch
from rl.learner import microbatches
from rl.learner.backend import ReplicatedBackend
from rl.learner.backend_fsdp import FSDPBackend
from rl.learner.learner import Learner
from rl.learner.packing import collate
from rl.losses import CUSTOM_LOSS, LOSSES, LossSpec
from rl.types import AdamParams, Datum, LoraConfig

# Operators with a result that the host reads.
WAITS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten._unique2.default",
    "aten.unique_dim.default",
    "aten.repeat_interleave.Tensor",
    "aten.equal.default",
}
# Methods that read, and functions that copy numbers of the host to a device, for which they wait.
READS = ("cpu", "numpy", "tolist", "item", "__int__", "__float__", "__bool__", "__index__")
COPIES_OF_NUMBERS = ("tensor", "as_tensor")
TERMS = {"entropy_coef": 0.1, "kl_coef": 0.1, "value_coef": 0.1, "value_clip": 0.2}
LAYOUTS = {
    "padded": {"layout": "padded"},
    "shared": {"layout": "shared"},
    "packed": {"layout": "packed"},
    "packed by lengths": {"layout": "packed", "varlen": True},
    "shared by lengths": {"layout": "shared", "varlen": True},
}


class ReadRecorder(TorchDispatchMode):
    """Record the operators whose result the host reads."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "lift_fresh" in str(func) and args[0].device.type == "cuda":
            self.events.append("copy of a number")
        leaves = torch.utils._pytree.tree_leaves(args[1:])
        masks = [x for x in leaves if isinstance(x, torch.Tensor) and x.dtype == torch.bool]
        kwargs = kwargs or {}
        is_read = str(func) in WAITS and kwargs.get("output_size") is None
        if is_read or ("aten.index" in str(func) and masks):
            self.events.append(f"read: {func}")
        return func(*args, **kwargs)


def make_datums(spec: LossSpec, count: int = 8) -> list[Datum]:
    """Return datums with all fields of a loss, masked in part."""
    rng = np.random.default_rng(3)
    datums = []
    for i, datum in enumerate(random_datums(count)):
        inputs = {name: data.array for name, data in datum.loss_fn_inputs.items()}
        n, mask = len(inputs["mask"]), inputs["mask"]
        for name in ("ref_logprobs", "returns", "values_old", "weights", "value_weights"):
            inputs[name] = (mask * rng.standard_normal(n)).astype(np.float32)
        inputs["labels"] = np.full(n, 1.0 if i % 2 else -1.0, np.float32)
        known = {name: inputs[name] for name in spec.known_fields if name in inputs}
        datums.append(Datum(datum.model_input, known))
    return datums


def make_learner(monkeypatch: pytest.MonkeyPatch, spec: LossSpec, **settings: Any) -> Any:
    """Return a worker whose head runs the custom ops, as on a GPU, although its model is tiny."""
    module = sys.modules["kernels.linear_logprob"]
    monkeypatch.setattr(module, "_is_small_problem", lambda *arguments: False)
    values = spec.values or spec.terms or spec is CUSTOM_LOSS
    return make_worker(token_budget=24, value_head=values, **settings)


def record_run(
    monkeypatch: pytest.MonkeyPatch, spec: LossSpec, config: dict[str, float], backward: bool,
    entropy: bool = False, **settings: Any,
) -> tuple[list[str], int]:  # fmt: skip
    """Return the passes and reads of a call in order, and its number of micro-batches."""
    learner, events = make_learner(monkeypatch, spec, **settings).learners[0], []
    record_passes(monkeypatch, learner, events)
    datums = make_datums(spec)
    with record_reads(monkeypatch, events):
        learner.run(
            datums, spec, config, temperature=0.9, divisor=1.0, backward=backward, entropy=entropy
        )
    return events, learner.num_micro_batches


def record_passes(monkeypatch: pytest.MonkeyPatch, learner: Learner, events: list[str]) -> None:
    """Record the begins of a learner's collations and the ends of its forwards and backwards."""
    forward, compute_gradient = learner._forward, learner.backend.backward

    def record_collation(*args: Any, **kwargs: Any) -> Any:
        events.append("collate")
        return collate(*args, **kwargs)

    def record_forward(*args: Any) -> Any:
        result = forward(*args)
        events.append("forward")
        return result

    def record_backward(value: torch.Tensor) -> None:
        compute_gradient(value)
        events.append("backward")

    monkeypatch.setattr(microbatches, "collate", record_collation)
    monkeypatch.setattr(learner, "_forward", record_forward)
    monkeypatch.setattr(learner.backend, "backward", record_backward)


@contextlib.contextmanager
def record_reads(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> Iterator[None]:
    """Record what the host reads, and the launches of updates."""

    def record_read(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            events.append(f"read: {name}")
            return original(tensor, *args, **kwargs)

        return read

    def record_copy(name: str) -> Any:
        original = getattr(torch, name)

        def copy(data: Any, *args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                events.append(f"read: {name}")
            return original(data, *args, **kwargs)

        return copy

    launch = torch.optim.AdamW.step

    def record_update(*args: Any) -> Any:
        result = launch(*args)
        events.append("update")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", record_update)
        for name in READS:
            patch.setattr(torch.Tensor, name, record_read(name))
        for name in COPIES_OF_NUMBERS:
            patch.setattr(torch, name, record_copy(name))
        with ReadRecorder(events):
            yield


def check_events(events: list[str], count: int, backward: bool, copies: list[str]) -> None:
    """Check that each micro-batch is collated once the one before it is launched, and before
    anything is read: on a GPU that one is still computed then.
    """
    passes = ["collate", "forward", "backward"] if backward else ["collate", "forward"]
    assert count > 2 and events[: len(passes) * count] == passes * count
    assert events[len(passes) * count :] == copies


# The sums of the metrics, then the outputs of all tokens: two copies for any batch.
COPIES = ["read: tolist", "read: cpu", "read: numpy"]


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_layout_reads_before_the_last_micro_batch(layout, backward, monkeypatch):
    events, count = record_run(monkeypatch, LOSSES["ppo"], {}, backward, **LAYOUTS[layout])
    check_events(events, count, backward, COPIES)


@pytest.mark.parametrize("name", [*LOSSES, "custom"])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 30])
def test_no_loss_reads_before_the_last_micro_batch(name, kept_bytes, monkeypatch):
    spec = LOSSES.get(name, CUSTOM_LOSS)
    events, count = record_run(
        monkeypatch, spec, TERMS if spec.terms else {}, True, layout="padded", kept_bytes=kept_bytes
    )
    check_events(events, count, True, COPIES)


@pytest.mark.parametrize("settings", [{"fused": False}, {"lora": LoraConfig(rank=2)}])
def test_no_head_reads_before_the_last_micro_batch(settings, monkeypatch):
    events, count = record_run(monkeypatch, LOSSES["dpo"], {}, True, layout="padded", **settings)
    check_events(events, count, True, COPIES)
    config = {"token_accuracy": 1}
    spec = LOSSES["cross_entropy"]
    events, count = record_run(monkeypatch, spec, config, False, entropy=True, **settings)
    check_events(events, count, False, COPIES)


# The norm, with whether the update was made.
STEP = ["update", "read: tolist"]


@pytest.mark.parametrize("grad_clip_norm", [0.0, 0.1])
@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig(rank=2)}])
def test_a_training_step_reads_its_norm_once_and_after_the_update(
    grad_clip_norm, settings, monkeypatch
):
    """`forward_backward`, then `optim_step`: the first step, the second, and one that is skipped."""
    spec, params = LOSSES["ppo"], AdamParams(grad_clip_norm=grad_clip_norm)
    worker, datums = make_learner(monkeypatch, spec, layout="padded", **settings), make_datums(spec)
    learner, events = worker.learners[0], list[str]()
    record_passes(monkeypatch, learner, events)
    for skipped in (False, False, True):
        events.clear()
        with record_reads(monkeypatch, events):
            call(worker, "forward_backward", 0, datums, "ppo", {}, 1.0, True)
            if skipped:
                next(iter(learner.trainable.values())).grad.fill_(float("nan"))
            metrics = worker.optim_step(0, params)
        assert ("skipped_nonfinite" in metrics) is skipped
        assert events[-2:] == STEP
        check_events(events[:-2], learner.num_micro_batches, True, COPIES)


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_step_reads_nothing_before_its_update(layout, num_calls, monkeypatch):
    """`train_step` launches every micro-batch of every call and the update, and then reads."""
    spec, params = LOSSES["ppo"], AdamParams(grad_clip_norm=0.1)
    worker, datums = make_learner(monkeypatch, spec, **LAYOUTS[layout]), make_datums(spec)
    learner, events = worker.learners[0], list[str]()
    record_passes(monkeypatch, learner, events)
    calls = [(datums, "ppo", {}, 1.0, True)] * num_calls
    for is_finite in (True, True, False):
        events.clear()
        if not is_finite:
            calls = [
                (make_datums(spec), "ppo", {"entropy_coef": float("inf")}, 1.0, True)
            ] * num_calls
        with record_reads(monkeypatch, events), contextlib.suppress(FloatingPointError):
            call(worker, "train_step", 0, calls, params)
        count = 3 * num_calls * learner.num_micro_batches
        assert events[:count] == ["collate", "forward", "backward"] * (count // 3)
        copies = COPIES[1:] * num_calls if is_finite else []
        assert events[count:] == [*STEP, COPIES[0], *copies]
    assert learner.version == 2


@pytest.mark.parametrize("grad_clip_norm", [0.0, 0.1])
def test_a_sharded_step_reads_its_norm_once_and_after_the_update(grad_clip_norm, monkeypatch):
    """FSDP2 with a single rank, beside the same model without it."""
    params, norms, weights = AdamParams(grad_clip_norm=grad_clip_norm), [], []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for shard in (False, True):
            model = tiny_model("llama")
            backend = (
                FSDPBackend(model, bf16=False)
                if shard
                else ReplicatedBackend(model, dict(model.named_parameters()), SimpleNamespace())
            )
            for scale in (1.0, 2.0, float("nan")):
                torch.manual_seed(0)
                backend.backward(model(torch.arange(8)[None]).logits.square().mean() * scale)
                events: list[str] = []
                with record_reads(monkeypatch, events):
                    norm, applied = backend.step(params)
                assert events == STEP and applied == (scale < 3)
                norms.append(norm)
            weights.append(dict(backend.iter_master_weights(backend.trainable)))
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(norms[:3], norms[3:], rtol=1e-6, atol=0, equal_nan=True)
    assert norms[0] > 0.1  # it is clipped
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-7)


def test_sharded_gradients_are_clipped_by_the_factor_of_the_host():
    """The factor on the device has the bits of a number of the host."""
    backend = FSDPBackend.__new__(FSDPBackend)
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        gradient = torch.randn(50, generator=generator)
        norm = torch.rand((), generator=generator) * 3
        expected = gradient * min(1.0, 0.7 / (float(norm) + 1e-6))
        backend._local_gradients = lambda gradient=gradient: [gradient]  # type: ignore
        backend._clip_gradients(0.7, norm)
        assert torch.equal(gradient, expected)


def test_a_loss_that_does_not_tell_waits_in_each_backward(monkeypatch):
    """This shows that the recorder sees inside the custom op."""
    spec = replace(LOSSES["ppo"], gradient_fields=())
    events, count = record_run(monkeypatch, spec, {}, True, layout="padded")
    assert events.count("read: __int__") == count


def test_a_prompt_costs_the_backward_of_the_head_nothing(monkeypatch):
    """The gradient is that of a backward which finds the tokens itself."""
    spec, rows = LOSSES["ppo"], []
    backward = linear_logprob_torch.saved_backward

    def count_rows(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(len(x))
        return backward(x, *args, **kwargs)

    monkeypatch.setattr(linear_logprob_torch, "saved_backward", count_rows)
    worker, datums = make_learner(monkeypatch, spec), make_datums(spec)
    gradients, counts = [], []
    for find in (LossSpec.find_gradient_tokens, lambda *args, **kwargs: None):
        monkeypatch.setattr(LossSpec, "find_gradient_tokens", find)
        worker.drop_gradients(0)
        rows.clear()
        worker.learners[0].run(datums, spec, {}, temperature=1.0, divisor=1.0, backward=True)
        gradients.append(gradient(worker))
        counts.append(sum(rows))
    actions = sum(int((d.loss_fn_inputs["mask"].array != 0).sum()) for d in datums)
    # The host does not know which ratios are clipped.
    assert counts[1] <= counts[0] <= actions < sum(d.model_input.length for d in datums)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
def test_ranks_that_share_a_micro_batch_know_the_tokens_of_their_columns(layout):
    spec = LOSSES["ppo"]
    datums = make_datums(spec, 5)
    active = np.concatenate([d.loss_fn_inputs["mask"].array for d in datums]) != 0

    def select(fields: Any) -> np.ndarray | None:
        return spec.find_gradient_tokens(fields, {})

    units = [[i] for i in range(5)]
    whole = collate(datums, units, layout, select_tokens=select)
    assert whole.gradient_tokens.tolist() == np.flatnonzero(active).tolist()
    for rank in range(2):
        group = SimpleNamespace(rank=rank, size=2)
        batch = collate(datums, units, layout, group=group, select_tokens=select)
        expected = np.flatnonzero(active[batch.shard.tokens.numpy()])
        assert batch.gradient_tokens.tolist() == expected.tolist()
    assert collate(datums, units, layout).gradient_tokens is None


def random_fields(kind: str) -> dict[str, torch.Tensor]:
    """Return fields of 12 tokens in 4 datums. `kind`: which mask they have."""
    g = torch.Generator().manual_seed(5)
    fields = {
        name: torch.randn(12, generator=g)
        for name in ("logprobs", "ref_logprobs", "returns", "values_old", "advantages")
    }
    mask = (torch.rand(12, generator=g) < 0.5).float() * torch.rand(12, generator=g)
    fields["labels"] = torch.ones(12)
    if kind != "none":
        fields[kind] = mask
    fields["advantages"][::3] = 0.0
    fields["target_tokens"] = torch.ones(12, dtype=torch.int64)
    fields["values"] = torch.randn(12, generator=g)
    return fields


def list_gradient_cases() -> list[Any]:
    """Return (loss, name of the mask, config) of each combination that a loss accepts."""
    cases = [("cross_entropy", kind, {}) for kind in ("mask", "weights", "none")]
    cases.append(("custom", "weights", {}))
    for name, spec in LOSSES.items():
        for kind in ("mask", "sequence_ratio_mask") if spec.gradient_fields else ():
            terms = ({}, *({key: value} for key, value in TERMS.items()), TERMS)
            cases += [(name, kind, config) for config in (terms if spec.terms else ({},))]
        if spec.needs_advantages and not spec.needs_mask:
            cases.append((name, "none", {}))
    return cases


@pytest.mark.parametrize(("name", "kind", "terms"), list_gradient_cases())
def test_every_token_with_a_gradient_is_found(name, kind, terms):
    spec, fields = LOSSES.get(name, CUSTOM_LOSS), random_fields(kind)
    leaves = [(-torch.rand(12)).requires_grad_() for _ in range(2)]
    cu_seqlens = torch.tensor([0, 3, 5, 8, 12])
    total, _ = spec.compute(*leaves, fields, cu_seqlens, terms)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    active = (gradients[0] != 0) | (gradients[1] != 0)
    arrays = {key: value.numpy() for key, value in fields.items()}
    selected = torch.from_numpy(spec.find_gradient_tokens(arrays, terms))
    assert not (active & ~selected).any() and active.any()
    if name in ("importance_sampling", "cispo", "dro", "dpo", "custom") and not terms:
        assert torch.equal(active, selected)  # nothing is clipped


def test_soft_targets_are_selected_by_any_weight():
    spec = LOSSES["cross_entropy"]
    targets = np.ones((3, 2), np.int64)
    weights = np.array([[0.0, 0.5], [0.0, 0.0], [1.0, 1.0]])
    fields = {"target_tokens": targets, "weights": weights}
    assert spec.find_gradient_tokens(fields, {}).tolist() == [True, False, True]
    assert spec.find_gradient_tokens({"target_tokens": targets}, {}).all()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*LOSSES, "custom"])
def test_a_gpu_does_not_wait_before_the_update(name, layout, monkeypatch):
    spec = LOSSES.get(name, CUSTOM_LOSS)
    learner = make_learner(monkeypatch, spec, **LAYOUTS[layout]).learners[0]
    (share,) = learner.split_batch(make_datums(spec), spec.group, 0.9)
    config = TERMS if spec.terms else {}
    calls = [(share, spec, config, {"divisor": 1.0, "backward": True})] * 2
    learner.train_step(calls, AdamParams())  # compiles kernels
    launch = torch.optim.AdamW.step

    def launch_and_end_check(*args: Any) -> Any:
        launch(*args)
        torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(torch.optim.AdamW, "step", launch_and_end_check)
    torch.cuda.set_sync_debug_mode("error")
    try:
        learner.train_step(calls, AdamParams())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert learner.version == 2
