"""Test a step over static buffers on fake CUDA tensors: the requirements of a CUDA graph, checked
without a GPU.
"""

from __future__ import annotations

import gc
import math
import sys
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from sampler_models import add_lora, one_thread, tiny_model  # noqa: F401
from test_sampler_split import on_ranks, split
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rl.sampler import expert_layers, make_decoder
from rl.sampler.adapter_slots import AdapterSlots
from rl.sampler.cuda_graphs import count_processing_bytes, decode_step
from rl.sampler.decoder_fast import FastDecoder, MultiAdapterDecoder
from rl.sampler.decoder_weights import DecoderWeights
from rl.sampler.step_buffers import NO_PROCESSING, ProcessedRows, StepBuffers

pytest.importorskip("triton", reason="triton is not installed")

WAITS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten.unique_dim.default",
    "aten._unique2.default",
    "aten.repeat_interleave.Tensor",
    "aten.lift_fresh.default",
    "aten.equal.default",
}
VIEWS = (
    *("view", "_unsafe_view", "slice", "unsqueeze", "squeeze", "transpose", "t", "split"),
    *("select", "detach", "unbind", "empty", "empty_like", "new_empty"),
)
FROM_NOTHING = set("empty zeros ones full arange scalar_tensor empty_strided rand randn".split())


class Recorder(TorchDispatchMode):
    """Record operations in order with their shapes, syncs with the device, copies between devices,
    new tensors and Triton launches.
    """

    def __init__(self):
        super().__init__()
        self.done, self.waits, self.leaves, self.made, self.launched = [], [], [], [], Counter()
        self.launching, self.born, self.stayed = False, [], []
        self.alive, self.live = [], []  # new tensors, and their bytes after each operation
        self.grids = {}  # by kernel: grid and options of the latest launch

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        inside = [
            t
            for t in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        ]
        if name in WAITS:
            self.waits.append(name)
        out = func(*args, **(kwargs or {}))
        outside = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.done.append((name, *(tuple(t.shape) for t in (*inside, *outside))))
        if len({t.device.type for t in (*inside, *outside)}) > 1:
            self.leaves.append(name)
        kind = name.split(".")[1].removeprefix("new_")
        if kind in FROM_NOTHING and not (self.launching and kind == "empty"):
            self.made.append((name, tuple(outside[0].shape)))
        self.born += [weakref.ref(t) for t in outside if not any(t is item for item in inside)]
        storages = [t.untyped_storage()._cdata for t in inside]
        self.alive += [
            weakref.ref(t) for t in outside if t.untyped_storage()._cdata not in storages
        ]
        self.alive = [item for item in self.alive if item() is not None]
        self.live.append(sum(item().untyped_storage().nbytes() for item in self.alive))
        return out


class FakeKernel:
    """A kernel that counts launches and does not run."""

    def __init__(self, wire, name):
        self.wire, self.name = wire, name

    def __getitem__(self, grid):
        assert all(0 < size < 1 << 31 for size in grid)

        def launch(*args, **options):
            self.wire.launched.update([self.name])
            self.wire.grids[self.name] = (grid, options)

        return launch


@pytest.fixture
def recorder(monkeypatch):
    return record_launches(monkeypatch)


def record_launches(monkeypatch):
    """Replace Triton's kernels by counters. The code around the launches runs and may only allocate
    outputs (`empty`).
    """
    import triton

    from kernels import decode_ops, decode_ops_triton, lora_ops, lora_ops_triton, paged_attention
    from kernels import paged_attention_triton as attention_triton
    from kernels import sample_tokens_triton as sample_triton

    wire = Recorder()

    def marked(work):
        def launch(*args, **kwargs):
            wire.launching = True
            try:
                return work(*args, **kwargs)
            finally:
                wire.launching = False

        return launch

    launchers = (
        "fused_add_rms_norm silu_mul rope_to_cache append_to_cache add_lora_ add_row_lora_ "
        "sample_tokens compute_paged_attention"
    ).split()
    for module in (decode_ops_triton, lora_ops_triton, sample_triton, attention_triton):
        for name, first in list(vars(module).items()):
            if isinstance(first, triton.JITFunction) and name.endswith("_kernel"):
                kernel = FakeKernel(wire, name.strip("_").removesuffix("_kernel"))
                monkeypatch.setattr(module, name, kernel)
            elif name in launchers:
                monkeypatch.setattr(module, name, marked(first))
    sample_tokens = sys.modules["kernels.sample_tokens"]
    for module in (decode_ops, lora_ops, paged_attention, sample_tokens):
        monkeypatch.setattr(module, "device_context", lambda tensor: nullcontext())
    return wire


class FakeGroup:
    """A group of two ranks whose collectives return tensors of the right shapes."""

    rank, size = 0, 2

    def __init__(self):
        self.calls = Counter()

    def all_reduce_(self, x):
        self.calls["all_reduce_"] += 1
        return x

    def all_gather(self, x):
        self.calls["all_gather"] += 1
        return [x, torch.empty_like(x)]

    def broadcast_(self, x):
        self.calls["broadcast_"] += 1
        return x


def fake_decoder(real: FastDecoder, tp_group=None) -> FastDecoder:
    """Return the same decoder on fake CUDA tensors."""
    weights = DecoderWeights(tp_group)
    weights.slices = real.weights.slices
    weights.buffers = {
        key: torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda")
        for key, buffer in real.weights.buffers.items()
    }
    return FastDecoder(real.architecture, weights)


def mix_adapters(base: FastDecoder, adapters) -> MultiAdapterDecoder:
    """Return a decoder of the base and these adapters, all on fake CUDA tensors, with its tables."""
    decoder = MultiAdapterDecoder(base)
    for number, real in enumerate(adapters, 1):
        adapter = fake_decoder(real)
        adapter.base = base
        decoder.add_adapter(number, adapter, 0)
    with pytest.MonkeyPatch.context() as patch:  # fake tensors have no addresses
        patch.setattr(AdapterSlots, "_write", lambda *inputs: None)
        decoder.adapter_slots.update(decoder.names, 1024)
    return decoder


def two_steps(
    wire, model, rows, shared, choices=0, processed=NO_PROCESSING, tp_group=None, adapters=()
) -> tuple[list, int, StepBuffers]:
    """Return the operations of a step, which must equal those of the next step, the number of
    layers and the buffers. `choices`: recorded experts of a token. `model` may be a decoder.
    `adapters`: decoders of adapters on it, one of which each row uses.
    """
    is_decoder = isinstance(model, FastDecoder)
    real = model if is_decoder else make_decoder(model, dtype=torch.bfloat16, kind="fast")
    with FakeTensorMode():
        decoder = fake_decoder(real, tp_group)
        if adapters:
            decoder = mix_adapters(decoder, adapters)
        a = decoder.architecture
        kv = [
            torch.empty(2, 30, 256, a.key_heads, a.head_width, dtype=torch.bfloat16, device="cuda")
            for _ in decoder.layers
        ]
        rope = torch.empty(2, 2048, a.head_width, dtype=torch.bfloat16, device="cuda")
        device = torch.device("cuda")
        buffers = StepBuffers.allocate(1024, 8, 8, 16, decoder.vocab_size, device, choices)
        results = []
        for _ in range(2):
            wire.done.clear()
            wire.live.clear()
            wire.born.clear()
            with wire:
                decode_step(decoder, kv, rope, buffers, rows, 8, shared, processed)
            results.append(list(wire.done))
            gc.collect()
            wire.stayed += [item for item in wire.born if item() is not None]
        assert results[0] == results[1]
        return results[0], len(decoder.layers), buffers


STEPS = ["qwen3", "qwen2", "llama", "qwen3 with adapters", "qwen3 with one on the head"]
STEPS += ["large with one on the head"]


def check_step(recorder) -> None:
    """Check that no sync, no factory call and no copy was recorded, and all temporaries were
    freed.
    """
    assert recorder.waits == [] and recorder.leaves == []
    assert recorder.made == [] and recorder.born and recorder.stayed == []


@pytest.mark.parametrize(
    ("kind", "shared"),
    [("qwen3", False), ("qwen3 with adapters", False), *((k, True) for k in STEPS)],
)
def test_a_step_waits_for_nothing_makes_nothing_and_is_the_same_every_time(recorder, kind, shared):
    name, _, more = kind.partition(" with ")
    model = tiny_model("qwen3", vocab_size=5000) if name == "large" else tiny_model(name)
    adapters = ["lm_head"] if "head" in more else ["q_proj", "o_proj", "gate_proj", "down_proj"]
    two_steps(recorder, add_lora(model, adapters) if more else model, 24, shared)
    check_step(recorder)
    # two steps of two layers
    layer = ("silu_mul", "rope_to_cache", "private_pages", "merge", "shared_pages")
    expected = dict.fromkeys(layer if shared else layer[:-1], 2 * 2)
    expected["fused_add_rms_norm"] = 2 * 5
    if "head" not in more:
        expected |= {"slices": 2, "pick": 2, "search": 2}
    if more:  # all adapter products of the projections of a layer, per step
        products = {"adapters": 2 * 2 * 4, "one on the head": 2}[more]
        expected |= {"lora_down": products, "lora_up": products}
    assert recorder.launched == expected


@pytest.mark.parametrize(
    ("targets", "projections"),
    [
        (["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"], 4 * 2),
        (["q_proj", "lm_head"], 2 + 1),
        (["down_proj", "embed_tokens"], 2 + 1),
    ],
)
@pytest.mark.parametrize("processed", [NO_PROCESSING, ProcessedRows(16, True)])
def test_a_step_with_adapters_of_rows_waits_for_nothing_either(
    recorder, targets, projections, processed
):
    """Two launches for each matrix that some adapter is on, as with one adapter for all rows."""
    models = [tiny_model("qwen3"), *(add_lora(tiny_model("qwen3"), targets, r=r) for r in (4, 40))]
    base, *adapters = (make_decoder(m, dtype=torch.bfloat16, kind="fast") for m in models)
    two_steps(recorder, base, 24, True, processed=processed, adapters=adapters)
    if processed.truncates:
        assert {name for name, _ in recorder.made} == {"aten.arange.default"}
        recorder.made.clear()
    check_step(recorder)
    launched = {name: n for name, n in recorder.launched.items() if name.startswith("row_lora")}
    embeds = 2 * ("embed_tokens" in targets)
    down = {"row_lora_down": 2 * projections - embeds, "row_lora_up": 2 * projections}
    assert launched == down | ({"row_lora_embed": embeds} if embeds else {})
    assert recorder.launched["lora_down"] == 0


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen2_moe"])
def test_a_step_of_experts_waits_for_nothing_either(recorder, monkeypatch, kind, grouped):
    monkeypatch.setattr(
        expert_layers, "has_grouped_products", lambda weight: grouped and weight.is_cuda
    )
    model = tiny_model(kind, head_dim=16, moe_intermediate_size=32)
    done, layers, buffers = two_steps(recorder, model, 24, True, choices=4)
    check_step(recorder)
    counts = Counter(name for name, *_ in done)
    assert counts["aten._grouped_mm.default"] == (2 * layers if grouped else 0)
    assert buffers.experts.shape == (8, 1024, 2 * layers)


@pytest.mark.parametrize("truncates", [True, False])
def test_a_step_with_logits_processing_waits_for_nothing_either(recorder, truncates):
    """Logits are processed in parts of at most 2^21. Truncated rows are sorted, and each of their
    parts makes the ranks. The live temporaries and those of torch's sort (32 bytes a number, read
    in its source) are at most the bytes in the memory plan.
    """
    model = tiny_model("qwen3", vocab_size=32_000)
    two_steps(recorder, model, 256, True, processed=ProcessedRows(200, truncates))
    sorts = [shapes[0] for name, *shapes in recorder.done if name.startswith("aten.sort")]
    assert sorts == ([(65, 32_000)] * 3 + [(5, 32_000)] if truncates else [])
    assert {name for name, _ in recorder.made} == ({"aten.arange.default"} if truncates else set())
    peak = max(
        live + (32 * math.prod(shapes[0]) if name.startswith("aten.sort") else 0)
        for (name, *shapes), live in zip(recorder.done, recorder.live, strict=True)
    )
    planned = count_processing_bytes(256, 32_000)
    assert planned == 65 * 32_000 * 52 and peak < 1.02 * planned
    assert not truncates or peak > 0.99 * planned
    recorder.made.clear()
    check_step(recorder)


def test_a_step_with_penalties_waits_for_nothing_either(recorder):
    """The temporaries are fewer than those of truncated rows. The table of counts stays where it
    is.
    """
    model = tiny_model("qwen3", vocab_size=32_000)
    two_steps(recorder, model, 256, True, processed=ProcessedRows(200, False, True))
    assert max(recorder.live) < count_processing_bytes(256, 32_000)
    check_step(recorder)
    counts = Counter(name for name, *_ in recorder.done)
    assert counts["aten.index_add_.default"] == 1


@pytest.mark.parametrize("processed", [NO_PROCESSING, ProcessedRows(16, True)])
def test_a_step_of_several_ranks_waits_for_nothing_either(recorder, processed):
    """The sums after the embedding, attention and MLP, an exchange of the slices of the vocabulary,
    and one of the sample. Rows with logits processing: the columns of the logits, and the sample.
    """
    model, group = tiny_model("llama"), FakeGroup()
    real = on_ranks(2, lambda team: split(model, team, dtype=torch.bfloat16))[0]
    two_steps(recorder, real, 24, True, processed=processed, tp_group=group)
    if processed.truncates:
        assert {name for name, _ in recorder.made} == {"aten.arange.default"}
        recorder.made.clear()
    check_step(recorder)
    expected = {"all_reduce_": 2 * (1 + 2 * 2 + 1), "all_gather": 2}
    if processed.bucket:
        expected |= {"all_gather": 2 * 2, "broadcast_": 2}
    assert group.calls == expected
    assert recorder.launched["slices"] == recorder.launched["search"] == 2


def test_the_count_sees_what_a_graph_cannot_have(recorder):
    """Planted faults: a sync, a copy to the host, a factory call, a tensor that is not freed."""
    with FakeTensorMode(), recorder:
        x = torch.empty(3, device="cuda")
        x.cpu()
        assert recorder.leaves
        with pytest.raises(Exception, match="item|data-dependent|scalar"):
            x.sum().item()
        recorder.born.clear()
        stays, gone = x + 1, [torch.arange(4, device="cuda") * 2]
        gone.clear()
    assert recorder.waits == ["aten._local_scalar_dense.default"]
    assert [name for name, _ in recorder.made] == [
        "aten.empty.memory_format",
        "aten.arange.default",
    ]
    assert [entry() for entry in recorder.born if entry() is not None] == [stays]


@pytest.mark.parametrize(
    ("rows", "shared", "attention"), [(16, False, 2), (16, True, 3), (600, False, 1)]
)
def test_a_layer_is_nine_to_eleven_launches(recorder, rows, shared, attention):
    """Without adapters: four matrix products, attention (private pages, or also shared pages and a
    merge), and four of our kernels.
    """
    short = {}
    for layers in (1, 3):
        recorder.launched.clear()
        model = tiny_model("llama", num_hidden_layers=layers)
        names = [name for name, *_ in two_steps(recorder, model, rows, shared)[0]]
        short[layers] = Counter(
            name for name in names if name[:4] != "prim" and name.split(".")[1] not in VIEWS
        )
        # two steps; the norm and sampling at the end
        assert sum(recorder.launched.values()) == 2 * ((4 + attention) * layers + 4)
    assert short[3] - short[1] == {"aten.mm.default": 2 * 4}


def test_there_are_no_logits(recorder):
    done, _, _ = two_steps(recorder, tiny_model("llama", vocab_size=5000), 24, True)
    assert not [name for name, *shapes in done if (24, 5000) in shapes]
    recorder.done.clear()
    with FakeTensorMode(), recorder:  # planted: the output of a separate head
        torch.mm(torch.empty(24, 32, device="cuda"), torch.empty(32, 5000, device="cuda"))
    assert [name for name, *shapes in recorder.done if (24, 5000) in shapes]
