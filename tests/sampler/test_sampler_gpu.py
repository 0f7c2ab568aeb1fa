"""Test the sampler's kernels and its paged attention on a CUDA device.

Equivalent tests on a CPU: test_kernel_draw.py, test_kernel_step.py, test_kernel_paged.py.
"""

import gc

import numpy as np
import pytest
import torch
from sampler_models import (
    add_lora,
    make_request,
    multistep_engine,
    paged_engine,
    row_settings,
    run_requests,
)
from test_sampler_stepped import LORA, SCENARIOS, make_processing, mix_adapters, play_scenario
from transformers import AutoConfig, AutoModelForCausalLM

from kernels import decode_ops, sample_tokens
from kernels.adapter_table import AdapterTable
from kernels.lora_ops import add_lora_, add_row_lora_
from rl.sampler import Engine, IdleKVCachePool, make_decoder
from rl.sampler.cuda_graphs import CUDAGraphRunner, decode_step
from rl.sampler.engine_selection import compare_engines
from rl.sampler.step_buffers import NO_PROCESSING
from rl.sampler.token_sampling import sample_tokens as from_logits
from rl.types import SamplingParams

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("N", "D", "V"), [(1, 896, 151_936), (64, 2048, 50_257), (257, 100, 1001)])
def test_equal_tokens_to_the_path_from_logits(N, D, V):
    """float32 with the same uniform numbers. Tokens differ only if the number lies on the boundary
    between the two.
    """
    g = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(N, D, generator=g, device="cuda")
    w = torch.randn(V, D, generator=g, device="cuda") * 2 / D**0.5
    u = torch.rand(N, generator=g, device="cuda", dtype=torch.float64)
    temperatures = np.where(np.arange(N) % 5 == 3, 0.0, 0.8)
    params = [SamplingParams(temperature=float(number)) for number in temperatures]
    z = x.double() @ w.double().t()
    expected = from_logits(z.float(), u, row_settings(params, V, x.device))
    greedy = torch.from_numpy(temperatures == 0).cuda()
    temperature = torch.where(greedy, 1.0, torch.from_numpy(temperatures).float().cuda())
    token, logp = sample_tokens(x, w, temperature, u, greedy)
    p = (z / torch.where(greedy, 1.0, 0.8)[:, None]).softmax(-1)
    after, mine = p.cumsum(-1).gather(1, token[:, None])[:, 0], p.gather(1, token[:, None])[:, 0]
    drawn, same = ~greedy, token == expected[0]
    assert ((after - mine <= u + 1e-5) & (u <= after + 1e-5))[drawn].all()
    assert same[greedy].all() and same.sum() >= N - 1
    torch.testing.assert_close(logp[same], expected[1][same], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_kernels_are_torchs_path(dtype):
    g = torch.Generator().manual_seed(0)
    x, residual = torch.randn(5, 896, generator=g), torch.randn(5, 896, generator=g)
    weight = torch.rand(896, generator=g)
    gate_up, qkv = torch.randn(5, 2 * 4864, generator=g), torch.randn(5, 18, 64, generator=g)
    norm, rope = torch.rand(2, 64, generator=g) + 0.5, torch.rand(2, 20, 64, generator=g)
    tensors = (x, residual, weight, gate_up, qkv, norm, rope, torch.zeros(2, 9, 16, 2, 64))
    position = torch.randint(0, 20, (5,), generator=g)
    page = torch.randperm(9, generator=g)[:5]
    place = torch.randint(0, 16, (5,), generator=g)
    results = []
    for device in ("cpu", "cuda"):
        x, residual, weight, gate_up, qkv, norm, rope, kv = (
            t.to(dtype).to(device, copy=True) for t in tensors
        )
        normed = decode_ops.fused_add_rms_norm(x, residual, weight, 1e-6)
        at = (position.to(device), kv, page.to(device), place.to(device))
        q = decode_ops.rope_to_cache(qkv, norm, 1e-6, rope, *at, 14)
        outputs = (normed, residual, decode_ops.silu_mul(gate_up), q, kv)
        results.append([t.float().cpu() for t in outputs])
    for mine, plain in zip(*results, strict=True):
        tolerance = 1e-5 if dtype == torch.float32 else 4e-2
        torch.testing.assert_close(mine, plain, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "heads",
    [(14, 2, 64), (16, 8, 128), (32, 8, 128), (4, 4, 80), (6, 2, 96), (8, 4, 256), (32, 1, 64)],
)
def test_attention_over_pages_is_the_gathered_one(heads, dtype):
    """Covers our kernels, and torch's varlen attention if it supports pages. The bits of a row do
    not depend on its neighbours.
    """
    from kernels import paged_attention as module

    inputs = module.make_trial_inputs(torch.device("cuda"), dtype, *heads, 256)
    q, kv, table, length, shared = inputs
    exact = module.attend_and_merge(
        module.attend_gathered, q.double(), kv.double(), table, length, shared
    ).float()
    ways = ["triton"] + ["varlen"] * (
        module.varlen_supports_pages() and dtype != torch.float32 and heads[2] <= 256
    )
    for way in ways:
        result = module._run_backend(way, *inputs)
        torch.testing.assert_close(
            result.float(), exact, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=0
        )
        other = torch.randn_like(q).index_copy(0, torch.tensor([4], device="cuda"), q[4:5])
        assert torch.equal(module._run_backend(way, other, kv, table, length, shared)[4], result[4])
    module._first_correct_backend.cache_clear()
    assert module._first_correct_backend(0, dtype, *heads, 256) == "triton"


@pytest.mark.parametrize(("rows", "context"), [(1, 9000), (3, 1200), (64, 700), (600, 300)])
def test_attention_over_pages_at_every_number_of_splits(rows, context):
    """Covers 32 splits of each sequence to a single split, with and without a group over half of
    the rows.
    """
    from kernels import paged_attention as module
    from rl.sampler.block_tables import make_block_tables

    g, pages = torch.Generator("cuda").manual_seed(0), -(-context // 256)
    kv = torch.randn(2, rows * pages + 1, 256, 2, 64, generator=g, device="cuda").bfloat16()
    q = torch.randn(rows, 8, 64, generator=g, device="cuda").bfloat16()
    tables = np.arange(rows * pages).reshape(rows, pages)
    tables[::2, 0] = 0
    lengths = np.random.default_rng(0).integers(257, context + 1, rows)
    shares = (np.arange(rows) % 2 == 0) & (rows > 1)
    for shared in (shares.astype(np.int64), np.zeros(rows, np.int64)):
        inputs = (q, kv, *make_block_tables(tables, lengths, shared - 1, shared, 256, kv.device))
        exact = module.attend_and_merge(module.attend_gathered, *inputs)
        torch.testing.assert_close(module._run_backend("triton", *inputs), exact, atol=2e-2, rtol=0)


def small_model(kind="qwen3", layers=3):
    sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=layers)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    torch.manual_seed(0)
    sizes |= dict(vocab_size=1000, tie_word_embeddings=kind == "qwen3")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads))
    return model.bfloat16().cuda()


def small_decoder(kind="qwen3", layers=3, lora=()):
    model = small_model(kind, layers)
    model = add_lora(model, lora).bfloat16().cuda() if lora else model
    return make_decoder(model, kind="fast")


def run(engine, count, samples, length, step=0, max_tokens=60):
    """Return the sequences of `count` requests. `step`: by which each prompt is longer than the one
    before.
    """
    requests = [
        make_request(list(range(1, length + step * i)), samples, max_tokens=max_tokens, problem=i)
        for i in range(count)
    ]
    return [s for response in run_requests(engine, requests) for s in response.sequences]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_the_engine_over_pages_samples_what_the_plain_one_does(kind):
    """bf16: the tokens agree until rounding makes them differ; the logprobs before that agree.
    Qwen2 has biases and no norm of queries and keys.
    """
    decoder = small_decoder(kind, layers=2)
    engines = (
        paged_engine(decoder, kv_cache_tokens=256 * 12, max_rows=8),
        Engine(decoder, kv_cache_tokens=100_000),
    )
    answers = [run(engine, 3, 3, 300, 1, max_tokens=40) for engine in engines]
    for mine, plain in zip(*answers, strict=True):
        pairs = zip(mine.tokens, plain.tokens, strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(mine.tokens))
        assert same > 0
        np.testing.assert_allclose(mine.logprobs[:same], plain.logprobs[:same], atol=0.05)


def test_this_device_samples_over_pages_with_graphs():
    """The trial finds no failure on this device. CPU equivalent: test_sampler_choice.py."""
    assert compare_engines(small_decoder()) is None


def run_eagerly(self, rows, width, shared, count, processed=NO_PROCESSING):
    """Replace `CUDAGraphRunner.run`: the same steps, without a graph."""
    self.buffers.at.zero_()
    state, shared = (self.model, self.kv, self.ropes, self.buffers), shared and rows > 1
    for _ in range(count):
        decode_step(*state, rows, self.max_blocks, shared, processed)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_graphs_draw_what_the_same_steps_draw_in_each_scenario(scenario, monkeypatch):
    """Results are equal to the bit. Equivalent test on a CPU: test_sampler_stepped.py."""
    decoder = small_decoder(lora=LORA if scenario == "LoRA" else ())
    new, results = decoder.fork(), []
    if scenario == "adapters of rows":
        decoder = mix_adapters(small_model)
    if scenario.endswith("new weights"):
        name = "model.layers.1.mlp.down_proj.weight"
        new.load_([(name, decoder.weights.view(name) * 1.05)])
    requests = [
        make_request(
            list(range(1, 250 + 20 * i)),
            4,
            max_tokens=60,
            problem=i,
            **make_processing(scenario, i),
        )
        for i in range(6)
    ]
    limits = {"kv_cache_tokens": 256 * 60, "max_rows": 24}
    if scenario.endswith("tight pool"):
        limits = {"kv_cache_tokens": 256 * 14, "max_rows": 12}
    for eager in (False, True):
        if eager:
            monkeypatch.setattr(CUDAGraphRunner, "run", run_eagerly)
            monkeypatch.setattr(CUDAGraphRunner, "prepare", lambda *inputs: None)
        engine = multistep_engine(decoder, (5, 6, 7), **limits)
        engine.expects_lengths = False
        results.append(play_scenario(scenario, engine, requests, new, 3))
    assert results[0] == results[1]


def test_graphs_draw_what_the_same_step_draws_without_one(monkeypatch):
    """Results are equal to the bit, including rows that move through the buckets and weights that
    were loaded in place.
    """
    decoder, results = small_decoder(), []
    engines = [
        multistep_engine(decoder, (5, 6, 7), kv_cache_tokens=256 * 60, max_rows=24)
        for _ in range(2)
    ]
    ways = (CUDAGraphRunner.run, CUDAGraphRunner.prepare), (run_eagerly, lambda *inputs: None)
    for change in (1.0, 1.05):
        name = "model.layers.1.mlp.down_proj.weight"
        decoder.load_([(name, decoder.weights.view(name) * change)])
        for engine, (step, prepare) in zip(engines, ways, strict=True):
            monkeypatch.setattr(CUDAGraphRunner, "run", step)
            monkeypatch.setattr(CUDAGraphRunner, "prepare", prepare)
            results.append([(s.tokens, s.logprobs) for s in run(engine, 6, 4, 250, 20)])
    assert results[0] == results[1] and results[2] == results[3] and results[0] != results[2]
    graphs = [engine._device_steps.runner._graphs for engine in engines]
    assert len(graphs[0]) > 2 and not graphs[1]


def test_steps_between_two_looks_wait_for_nothing():
    """torch's sync debug mode is on while a captured batch is replayed."""
    engine = multistep_engine(small_decoder(), kv_cache_tokens=256 * 20, max_rows=8)
    engine.add(make_request([1, 2, 3], 8, max_tokens=60))
    for _ in range(3):
        engine.step()
    steps, before = engine._device_steps.runner, torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():  # as the engine's steps, which made the buffers
            steps.run(8, 2, False, 4)
        after = torch.cuda.memory_allocated()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert after == before


@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_lora_ops_are_torchs(adapter):
    """Equivalent test on a CPU: test_kernel_lora.py."""
    g = torch.Generator().manual_seed(0)
    for rows, inputs in ((1, 896), (64, 4864), (600, 896)):
        x = torch.randn(rows, inputs, generator=g).bfloat16()
        a = (torch.randn(96, inputs, generator=g) / inputs**0.5).to(adapter)
        widths, parts = (896, 128, 128), []
        for i, width in enumerate(widths):
            columns = slice(sum(widths[:i]), sum(widths[: i + 1]))
            b = (torch.randn(width, 32, generator=g) / 32**0.5).to(adapter)
            parts.append((b, 1.0 + i, columns, slice(32 * i, 32 * i + 32)))
        y, results = torch.randn(rows, sum(widths), generator=g).bfloat16(), []
        for device in ("cpu", "cuda"):
            out = y.to(device, copy=True)
            present = [(b.to(device), *rest) for b, *rest in parts]
            add_lora_(out, x.to(device), a.to(device), present)
            results.append(out.float().cpu())
        torch.testing.assert_close(*results, atol=4e-2, rtol=2e-2)


@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("embeds", [False, True])
def test_adapters_of_rows_are_torchs(adapter, embeds):
    """Equivalent test on a CPU: test_kernel_lora.py. Weights that are not finite reach no other
    row.
    """
    g = torch.Generator().manual_seed(0)
    for rows, inputs in ((1, 896), (40, 4864), (600, 896)):
        modules = (slice(0, 896),) if embeds else (slice(0, 896), slice(896, 1024))
        adapters = []
        for _ in range(2):
            a = (torch.randn(32 * len(modules), inputs, generator=g) / inputs**0.5).to(adapter)
            parts = []
            for i, module in enumerate(modules):
                b = torch.randn(module.stop - module.start, 32, generator=g) / 32**0.5
                parts.append((b.to(adapter), 1.0 + i, module, slice(32 * i, 32 * i + 32)))
            adapters.append((a, parts))
        slots = torch.randint(0, 3, (rows,), generator=g)
        tiles = torch.full((rows // 16 + 3, 17), -1, dtype=torch.int32)
        tiles[:, 0], place = 0, 0
        for slot in (1, 2):
            for part in (slots == slot).nonzero().squeeze(1).split(16):
                tiles[place, 0], tiles[place, 1 : 1 + len(part)] = slot, part.int()
                place += len(part) > 0
        x = torch.randint(0, inputs, (rows,), generator=g)
        x = x if embeds else torch.randn(rows, inputs, generator=g).bfloat16()
        y, results = torch.randn(rows, modules[-1].stop, generator=g).bfloat16(), []
        for device in ("cpu", "cuda"):
            table = AdapterTable.allocate(3, modules, inputs, 32, adapter, torch.device(device))
            for slot, (a, parts) in enumerate(adapters, 1):
                table.write(
                    slot, a.to(device, copy=True), [(b.to(device), *rest) for b, *rest in parts]
                )
            out = y.to(device, copy=True)
            add_row_lora_(out, x.to(device), table, tiles.to(device))
            results.append(out.float().cpu())
            table.adapters[2][0].fill_(torch.nan)
            broken = y.to(device, copy=True)
            add_row_lora_(broken, x.to(device), table, tiles.to(device))
            assert torch.equal(broken.cpu()[slots != 2], out.cpu()[slots != 2])
        torch.testing.assert_close(*results, atol=4e-2, rtol=2e-2)


def test_keys_and_values_of_prompts_go_to_their_slots():
    """Equivalent test on a CPU: test_kernel_step.py."""
    g = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 300, 18, 64, generator=g).bfloat16()
    slots = torch.randperm(12 * 256, generator=g)[:1500].view(5, 300)
    slots[2, 100:] = -1
    results = []
    for device in ("cpu", "cuda"):
        kv = torch.zeros(2, 12, 256, 2, 64, dtype=torch.bfloat16, device=device)
        _, k, v = qkv.to(device).split([14, 2, 2], dim=2)
        decode_ops.append_to_cache(k, v, kv, slots.to(device))
        results.append(kv.cpu())
    assert torch.equal(*results)


def test_a_second_call_with_new_weights_captures_nothing(monkeypatch):
    """Samples are equal to the bit to those of an engine that captured its graphs for these
    weights.

    Equivalent test on a CPU: test_sampler_kept.py.
    """
    captured, capture = [], CUDAGraphRunner._capture
    monkeypatch.setattr(
        CUDAGraphRunner,
        "_capture",
        lambda self, *key: captured.append(key) or capture(self, *key),
    )

    def drawn(kept):
        settings = {"kv_cache_tokens": 256 * 60, "max_rows": 24, "idle_pool": kept}
        engine = multistep_engine(decoder, (5, 6, 7), **settings)
        results = [(s.tokens, s.logprobs) for s in run(engine, 6, 4, 250, 20)]
        engine.close()
        return results

    decoder, between, counts = small_decoder(), IdleKVCachePool(), []
    for _ in range(3):
        name = "model.layers.1.mlp.down_proj.weight"
        decoder.load_([(name, decoder.weights.view(name) * 1.05)])
        mine = drawn(between)
        counts.append(len(captured))
        assert mine == drawn(None)
        del captured[counts[0] :]
    assert counts[0] > 3 and counts[1] == counts[2] == counts[0]


def test_graphs_outlive_those_of_another_decoder():
    """The graphs of the first decoder must not hold memory of cuBLAS that those of the second use
    (pytorch#193402). The freed memory is overwritten before the second decoder samples again.
    """

    def sample(decoder):
        engine = multistep_engine(decoder, kv_cache_tokens=256 * 20, max_rows=8, idle_pool=between)
        results = [(s.tokens, s.logprobs) for s in run(engine, 1, 8, 4, max_tokens=40)]
        engine.close()
        return results

    first, between = small_decoder(), IdleKVCachePool()
    second = first.fork()
    expected = [sample(first), sample(second)]
    assert expected[0] == expected[1]
    del first
    gc.collect()
    torch.cuda.empty_cache()
    full = [torch.full((1 << 24,), float("nan"), device="cuda") for _ in range(16)]
    assert sample(second) == expected[1] and all(bool(t.isnan().all()) for t in full)
