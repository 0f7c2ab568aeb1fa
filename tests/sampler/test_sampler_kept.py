"""Test the reuse of pages, buffers and CUDA graphs between paged engines: graphs are captured once,
not at every call.

Graphs are fake: each keeps the tensors it was captured with, as a real graph keeps addresses.
"""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from helpers import ADAM, call, random_datums
from sampler_models import (  # noqa: F401
    add_lora,
    check_same,
    make_request,
    multistep_engine,
    one_thread,
    random_prompts,
    run_requests,
    tiny_model,
)
from test_sampler_mixed import make_family

from rl import sampler
from rl.learner import ModelSpec
from rl.runtime import SamplerSettings, StepRequest, WorkerSettings
from rl.runtime.training_worker import TrainingWorker
from rl.sampler import Engine, IdleKVCachePool, SamplingRequest, kv_cache_pool
from rl.sampler.cuda_graphs import CUDAGraphRunner, decode_step, row_buckets
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.step_buffers import ProcessedRows
from rl.startup import use_expandable_segments

LORA = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class FakeCUDAGraph:
    """A fake graph: a step over the tensors that existed when it was captured."""

    def __init__(self, steps: CUDAGraphRunner, rows: int, shared: bool, processed: ProcessedRows):
        buffers = (steps.model, steps.kv, steps.ropes, steps.buffers)
        self.inputs = (*buffers, rows, steps.max_blocks, shared, processed)

    def replay(self) -> None:
        decode_step(*self.inputs)


@pytest.fixture
def captured(monkeypatch):
    """Return (decoder, rows, shared) of every capture, in order."""
    results = []

    def capture(steps, rows, shared, processed):
        results.append((id(steps.model), rows, shared))
        steps.buffers.remaining.zero_()  # a capture runs steps as well
        steps.buffers.at.fill_(3)
        return FakeCUDAGraph(steps, rows, shared, processed)

    monkeypatch.setattr(CUDAGraphRunner, "uses_graphs", True)
    monkeypatch.setattr(CUDAGraphRunner, "_capture", capture)
    return results


def requests(seed: int = 0, groups: tuple[int, ...] = (4, 1, 3)) -> list[SamplingRequest]:
    """Return groups and single rows that end at different times, so that a batch shrinks through
    the buckets.
    """
    prompts = random_prompts([9, 6, 13][: len(groups)])
    return [
        make_request(prompt, n, max_tokens=8 + 9 * i, stop=[5], problem=i, seed=seed)
        for i, (prompt, n) in enumerate(zip(prompts, groups, strict=True))
    ]


def make_decoder(kind: str = "qwen3") -> FastDecoder:
    return sampler.make_decoder(tiny_model(kind), kind="fast")


def make_engine(decoder, **settings) -> Engine:
    return multistep_engine(decoder, page=4, **{"kv_cache_tokens": 400, "max_rows": 16, **settings})


def list_tokens(responses) -> list[list[int]]:
    return [sequence.tokens for response in responses for sequence in response.sequences]


@pytest.mark.parametrize("kind", ["qwen3", "llama with adapters"])
def test_three_calls_with_new_weights_between_capture_once(captured, kind):
    """Weights are loaded into the buffers in place. Each call samples the tokens of a new engine
    with these weights.
    """
    name, _, more = kind.partition(" with ")
    model = add_lora(tiny_model(name), LORA) if more else tiny_model(name)
    decoder, between = sampler.make_decoder(model, kind="fast"), IdleKVCachePool()
    pages, seen = set(), []
    for seed in range(3):
        engine = make_engine(decoder, idle_pool=between)
        result = run_requests(engine, requests(seed))
        pages.add(engine._state.kv[0].data_ptr())
        engine.close()
        plain = Engine(sampler.make_decoder(model, kind="fast"))
        check_same(result, run_requests(plain, requests(seed)), 1e-4)
        seen.append(list_tokens(result))
        with torch.no_grad():
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.mul_(1.2).add_(0.01)
        decoder.load_((n, p) for n, p in model.named_parameters() if p.requires_grad)
    assert len(captured) == len(set(captured)) and len(pages) == 1 and seen[0] != seen[1] != seen[2]
    assert {(rows, shared) for _, rows, shared in captured} >= {(8, True), (4, True), (2, True)}


def test_a_batchs_graphs_are_captured_the_largest_first(captured):
    """All smaller buckets are captured in the same call, so that they reuse the memory pool of the
    largest graph.
    """
    engine = make_engine(make_decoder())
    run_requests(engine, requests(groups=(5,)))
    assert [(rows, shared) for _, rows, shared in captured][:3] == [(8, True), (4, True), (2, True)]
    before = len(captured)
    run_requests(engine, requests(groups=(5, 5)))
    assert [(rows, shared) for _, rows, shared in captured][before] == (16, True)


def test_all_graphs_of_the_present_requests_are_captured_before_the_first_step(captured):
    """The batch begins with few rows because pages are scarce, and grows when samples end."""
    engine = multistep_engine(make_decoder(), (3, 5), page=4, kv_cache_tokens=120, max_rows=32)
    for request in requests(groups=(5, 5, 5)) + requests(seed=1, groups=(5, 5, 5)):
        engine.add(request)
    while not captured:
        engine.step()
    rows, before = len(engine._rows), list(captured)
    assert rows <= 16 and [size for _, size, _ in captured] == [32, 24, 16, 8, 4, 2, 1]
    engine.run()
    assert engine.counters.peak_rows > rows and captured == before


@pytest.fixture
def captures(monkeypatch):
    """Replace torch's functions for captures. Return their calls in order: "clear" of cuBLAS's
    workspaces, and the stream and error mode of each capture.
    """
    calls, streams = [], []
    make_decoder()  # imports transformers' modules, which read these classes

    def make_stream():
        streams.append(SimpleNamespace(wait_stream=lambda other: None, number=len(streams)))
        return streams[-1]

    def capture(graph, pool, stream=None, capture_error_mode="global"):
        calls.append((stream and stream.number, capture_error_mode))
        return nullcontext()

    stand_ins = {
        "device": lambda device: nullcontext(),
        "Stream": make_stream,
        "current_stream": lambda: SimpleNamespace(wait_stream=lambda other: None),
        "stream": lambda stream: nullcontext(),
        "graph": capture,
        "CUDAGraph": lambda: SimpleNamespace(pool=lambda: None, replay=lambda: None),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: calls.append("clear"), raising=False)
    monkeypatch.setattr(CUDAGraphRunner, "uses_graphs", True)
    return calls


def test_graphs_of_two_decoders_share_no_workspace_of_cublas(captures):
    """torch frees the workspace of a stream with any graph that was captured on it: the graphs of
    the other decoder would write to freed memory. A capture in the mode "thread_local" lets other
    threads use the device. The tests on a device are in test_sampler_gpu.py.
    """
    first = make_decoder()
    for decoder in (first, first.fork()):
        engine = make_engine(decoder, max_rows=4)
        engine.add(requests()[0])
        engine.step(), engine.step()
    # all captures of a decoder are on one stream, with cleared workspaces before and after each
    expected = [["clear", (stream, "thread_local"), "clear"] * 3 for stream in (0, 1)]
    assert captures == expected[0] + expected[1]


def test_a_capture_after_a_larger_batch_reads_no_row_outside_of_its_bucket(captures, monkeypatch):
    """The step before a capture ran over the groups of the last batch. A kernel on a GPU wrote past
    the end of its outputs; torch's operations on a CPU raise an IndexError.
    """
    monkeypatch.setattr(CUDAGraphRunner, "uses_graphs", False)
    decoder = make_decoder()
    engine = make_engine(decoder)
    prompts = zip(random_prompts([6, 9]), (1, 7), strict=True)
    run_requests(engine, [make_request(p, n, max_tokens=9, stop=[], problem=n) for p, n in prompts])
    runner = engine._device_steps.runner
    names = {field.name for field in fields(runner.buffers)}
    before = {name: getattr(runner.buffers, name).clone() for name in names}
    # the rows of the group are before row 0, which has none
    assert [int(before["order"][:size].max()) for size in (2, 4)] == [2, 4]
    monkeypatch.setattr(CUDAGraphRunner, "uses_graphs", True)
    other = decoder.fork()
    with torch.inference_mode():
        CUDAGraphRunner(other, runner.kv, runner.buffers, 16).prepare(16, shared=True)
    assert captures.count("clear") == 2 * len(row_buckets(16))
    assert all(torch.equal(getattr(runner.buffers, name), before[name]) for name in names)


def mix_requests(adapters) -> list[SamplingRequest]:
    """Return groups on prompts, each from one of these adapters by its number."""
    prompts = random_prompts([9, 6, 13, 7])
    return [
        make_request(
            p, 4, max_tokens=8, stop=[5], problem=i, adapter_id=adapters[i % len(adapters)]
        )
        for i, p in enumerate(prompts)
    ]


def test_adapters_of_rows_are_captured_once(captured):
    """Each engine has other adapters, also more of them. Then one has a larger rank, and the graphs
    are captured again.
    """
    base, adapters = make_family("qwen3")
    between, seen = IdleKVCachePool(), []
    for first in (1, 2, 3, 0):
        engine = sampler.make_engine(
            adapters[1], "paged", between, features=["adapters per row"], kv_cache_tokens=256 * 24,
            max_rows=16,
        )  # fmt: skip
        decoders = {n: adapters[1].fork() for n in range(first)} | {9: base}
        decoders |= {7: adapters[0]} if first == 0 else {}
        for number, decoder in decoders.items():
            engine.decoder.add_adapter(number, decoder, 0)
        mine = mix_requests([*decoders])
        for request, response in zip(mine, run_requests(engine, mine), strict=True):
            plain = Engine(decoders[request.adapter_id])
            check_same([response], run_requests(plain, [request]), 1e-4)
        engine.close()
        assert not engine.decoder.decoders
        seen.append(len(captured))
    assert seen[0] == seen[1] == seen[2] < seen[3] and len({name for name, *_ in captured}) == 1


def test_a_capture_reads_no_adapter_of_a_row_outside_of_its_bucket(captures, monkeypatch):
    """The step before a capture ran over the tiles of a larger batch."""
    monkeypatch.setattr(CUDAGraphRunner, "uses_graphs", False)
    base, adapters = make_family("qwen3")
    decoder = sampler.MultiAdapterDecoder(base)
    for number, adapter in enumerate(adapters):
        decoder.add_adapter(number, adapter, 0)
    engine = make_engine(decoder)
    run_requests(engine, mix_requests([2, 1, 3, 0])[:3])
    slots, runner = decoder.adapter_slots, engine._device_steps.runner
    before = slots.tiles.clone()
    assert int(before.max()) > 6  # a row
    monkeypatch.setattr(CUDAGraphRunner, "uses_graphs", True)
    with torch.inference_mode():
        runner.prepare(16, shared=True)
    assert captures.count("clear") == 2 * len(row_buckets(16))
    assert torch.equal(slots.tiles, before)


@pytest.mark.parametrize("name", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_is_told_to_grow_its_segments_unless_it_is_told_otherwise(monkeypatch, name):
    monkeypatch.setattr(os, "environ", {name: "max_split_size_mb:64"} if name else {})
    use_expandable_segments()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == {
        "": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
    }.get(name)


def test_engines_that_leave_nothing_capture_anew(captured):
    """Control: without a pool between the calls, every call captures all of its graphs."""
    decoder = make_decoder()
    for _ in range(2):
        engine = make_engine(decoder)
        run_requests(engine, requests())
        engine.close()
    assert len(captured) == 2 * len(set(captured))


def test_another_decoder_has_graphs_of_its_own_over_the_same_pages(captured):
    """Two versions are sampled in turn, and a stream switches from the first to the second and
    back.
    """
    first = make_decoder()
    second, between = first.fork(), IdleKVCachePool()
    second.load_((name, first.weights.view(name) * 1.2) for name in first.weights.slices)
    expected = [run_requests(Engine(decoder), requests()) for decoder in (first, second)]
    for turn in (0, 1, 0, 1):
        engine = make_engine((first, second)[turn], idle_pool=between)
        check_same(run_requests(engine, requests()), expected[turn], 1e-4)
        engine.close()
    engine = make_engine(first, idle_pool=between)
    for turn in (0, 1, 0):
        engine.change_weights((first, second)[turn], turn)
        check_same(run_requests(engine, requests()), expected[turn], 1e-4)
    assert len(captured) == len(set(captured))
    assert {which for which, *_ in captured} == {id(first), id(second)}


def test_stops_of_another_engine_are_not_the_next_ones():
    """Both engines use the same buffer for the table of stops. More kinds of stops than fit need a
    new buffer.
    """
    decoder, between = make_decoder(), IdleKVCachePool()
    for stops in ([[5]], [[7, 9], [11]], [[k] for k in range(3, 25)]):
        queries = [
            make_request([4, 9, 2], 2, max_tokens=20, stop=stop, problem=i)
            for i, stop in enumerate(stops)
        ]
        engine = make_engine(decoder, kv_cache_tokens=4000, max_rows=64, idle_pool=between)
        check_same(run_requests(engine, queries), run_requests(Engine(decoder), queries), 1e-4)
        engine.close()


def test_room_for_stops_and_for_penalties_stays_when_the_other_grows(captured):
    """Engines with many kinds of stops alternate with engines with penalties. Both have room from
    the second engine on, so that nothing is captured anew.
    """
    decoder, between, seen = make_decoder(), IdleKVCachePool(), []
    many = [make_request([4, 9, 2], max_tokens=5, stop=[k], problem=k) for k in range(20)]
    penalized = [make_request([4, 9], 20, max_tokens=5, frequency_penalty=0.5)]
    for queries in (many, penalized) * 3:
        engine = make_engine(decoder, kv_cache_tokens=4000, max_rows=32, idle_pool=between)
        check_same(run_requests(engine, queries), run_requests(Engine(decoder), queries), 1e-4)
        engine.close()
        seen.append(len(captured))
    assert seen[0] < seen[1] <= seen[2] <= seen[3] == seen[4] == seen[5]


def test_what_a_decoder_captured_goes_with_it():
    decoder, between = make_decoder(), IdleKVCachePool()
    other = decoder.fork()
    for item in (decoder, other):
        engine = make_engine(item, idle_pool=between)
        run_requests(engine, requests())
        engine.close()
    gone = weakref.ref(other)
    del item, other, engine
    gc.collect()
    assert gone() is None and len(between._idle._steps) == 1


def test_one_pool_lies_idle_at_most_and_gives_way_before_another_is_made(monkeypatch):
    decoder, between, alive, pools = make_decoder(), IdleKVCachePool(), [], []
    make = kv_cache_pool.KVCachePool.__init__

    def counted(self, *inputs):
        gc.collect()
        alive.append(sum(first() is not None for first in pools))
        pools.append(weakref.ref(self))
        make(self, *inputs)

    monkeypatch.setattr(kv_cache_pool.KVCachePool, "__init__", counted)
    for tokens in (400, 400, 800, 400):
        engine = make_engine(decoder, kv_cache_tokens=tokens, idle_pool=between)
        run_requests(engine, requests())
        engine.close()
        engine.close()  # closing twice is a no-op
        del engine
    assert alive == [0, 0, 0]
    with_one, second = (make_engine(decoder, idle_pool=between) for _ in range(2))
    assert with_one._state.kv[0] is not second._state.kv[0]
    with_one.close()
    with pytest.raises(IndexError):
        run_requests(with_one, requests())  # its pages may belong to another engine by now


def test_a_learner_gets_the_memory_until_it_has_left_room(monkeypatch):
    """`room` is called with the idle bytes that the measured peak does not include: 0 once the pool
    was kept through an update.
    """
    decoder, queries, answer = make_decoder(), [], True
    assert not kv_cache_pool.has_free_memory(torch.device("cpu"), 0)

    def room(device, size):
        queries.append(size)
        return answer

    monkeypatch.setattr(kv_cache_pool, "has_free_memory", room)
    between = IdleKVCachePool()

    def sample():
        engine = make_engine(decoder, idle_pool=between)
        size = engine._pool.bytes
        engine.close()
        return size

    size = sample()
    between.free_for_learner()
    assert between._idle is None and not queries  # the memory that learning takes is not known yet
    between.record_update()
    sample()
    for _ in range(2):
        between.free_for_learner()
    assert between._idle is not None and queries == [size, 0]
    answer = False
    between.free_for_learner()
    assert between._idle is None and queries[2:] == [0]


def test_room_is_what_this_process_may_have_less_the_most_it_took(monkeypatch):
    """30 of 80 are free, this process holds 40 and others 10: 70 are available to it, and 85% of
    these may be used.
    """
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 35)
    fits = [kv_cache_pool.has_free_memory(torch.device("cuda"), size) for size in (24, 25)]
    assert fits == [True, False]


def make_sum_requests(seed: int = 0) -> list[SamplingRequest]:
    """Return requests like `requests`, with tokens and lengths that the smallest model supports."""
    return [
        make_request([3 + i, 4, 12], n, max_tokens=4 + 2 * i, stop=[5], problem=i, seed=seed)
        for i, n in enumerate((4, 1, 3))
    ]


@pytest.fixture
def worker():
    made = TrainingWorker(
        WorkerSettings(sampler=SamplerSettings(cache="paged", kv_cache_tokens=1024, max_rows=16))
    )
    made.create_model(0, ModelSpec("tiny:addition", seed=1), None, False)
    yield made
    made.free_all()


def learn(worker):
    arguments = (0, random_datums(4), "cross_entropy", {}, 4.0, True)
    call(worker, "forward_backward", *arguments)
    worker.optim_step(0, ADAM)


def sample_version(worker, version: int, seed: int = 0) -> None:
    """Check that a rank's samples of a version are those of a new plain engine."""
    responses, _ = worker.sample(version, make_sum_requests(seed))
    source = worker.versions[version]
    plain = Engine(source.decoder, source.eos_token_ids)
    expected = list_tokens(run_requests(plain, make_sum_requests(seed)))
    assert list_tokens(responses[i] for i in sorted(responses)) == expected


def diverge(worker, version: int) -> None:
    """Fill the weights of a norm with NaN."""
    weights = worker.versions[version].decoder.weights
    weights.view(next(n for n in weights.slices if n.endswith("norm.weight"))).fill_(torch.nan)


def test_a_rank_keeps_them_over_its_verbs(captured, worker, monkeypatch):
    """Sample, update and hand over the weights repeatedly: if memory suffices for both, the third
    and fourth call capture nothing.
    """
    monkeypatch.setattr(kv_cache_pool, "has_free_memory", lambda device, size: True)
    counts = []
    for version in range(4):
        worker.snapshot(0, version)
        sample_version(worker, version, version)
        counts.append(len(captured))
        learn(worker)
        worker.free_version(version)
    # the first update runs with no idle pool
    assert counts[0] > 0 and counts[1] == 2 * counts[0]
    assert counts[3] == counts[2] == counts[1]


def test_on_a_host_a_learner_finds_what_it_found_before(worker):
    worker.snapshot(0, 0)
    worker.sample(0, make_sum_requests())
    assert worker.kv_cache_pool._idle is not None
    learn(worker)
    assert worker.kv_cache_pool._idle is None
    worker.sample(0, make_sum_requests())
    worker.free_all()
    assert worker.kv_cache_pool._idle is None


def test_a_call_that_failed_leaves_nothing(worker):
    """Its pages may contain NaN, which would become the padding of another engine."""
    worker.snapshot(0, 0)
    diverge(worker, 0)
    with pytest.raises(FloatingPointError, match="diverged"):
        worker.sample(0, make_sum_requests())
    assert worker.kv_cache_pool._idle is None


def test_a_stream_that_is_closed_or_begun_anew_gives_its_pages_on(worker):
    worker.snapshot(0, 0)
    queries = [(ticket, 0, request) for ticket, request in enumerate(make_sum_requests())]
    worker.run_steps(7, 0, StepRequest(steps=3, new_requests=queries))
    pages = worker.streams[7].engine._pool
    done = worker.run_steps(7, 0, StepRequest(steps=1000, recompute=True))
    assert worker.streams[7].engine._pool is pages and sorted(done.finished) == [0, 1, 2]
    worker.close_stream(7)
    assert worker.kv_cache_pool._idle is pages


@pytest.mark.parametrize("remaining", ["closed", "begun anew"])
def test_a_stream_of_weights_that_diverged_leaves_nothing_to_those_that_have_not(worker, remaining):
    """The pages of the stream contain NaN; later rows end in pages that they fill only partly."""
    worker.snapshot(0, 0)
    worker.snapshot(0, 1)
    diverge(worker, 0)
    queries = [(ticket, 0, request) for ticket, request in enumerate(make_sum_requests())]
    with pytest.raises(FloatingPointError, match="diverged"):
        worker.run_steps(7, 0, StepRequest(steps=3, new_requests=queries))
    bad = worker.streams[7].engine._pool
    if remaining == "closed":
        worker.close_stream(7)
    else:
        worker.streams[7].move_to_new_engine(lambda _: Engine(worker.versions[1].decoder, ()))
    assert worker.kv_cache_pool._idle is None
    sample_version(worker, 1)
    assert not bad.kv[0].isfinite().all()


def test_what_lies_behind_a_rows_last_position_is_not_seen_whatever_it_is():
    decoder = make_decoder()
    engine = multistep_engine(decoder, page=16, kv_cache_tokens=640, max_rows=16)
    for block in engine._pool.kv:
        block.fill_(torch.nan)
    expected = run_requests(Engine(decoder), requests())
    check_same(run_requests(engine, requests()), expected, 1e-4)


def test_what_another_learner_takes_is_seen_anew(worker, monkeypatch):
    """The measurement also restarts after a learner runs out of memory: the failed allocation is
    not part of the measured peak.
    """
    monkeypatch.setattr(kv_cache_pool, "has_free_memory", lambda device, size: True)
    learn(worker)
    worker.snapshot(0, 0)
    worker.sample(0, make_sum_requests())
    learn(worker)
    assert worker.kv_cache_pool._idle is not None and worker.kv_cache_pool._has_learned
    worker.create_model(1, ModelSpec("tiny:addition", seed=2), None, False)
    worker.sample(0, make_sum_requests())
    arguments = (1, random_datums(4), "cross_entropy", {}, 4.0, True)
    call(worker, "forward_backward", *arguments)
    assert worker.kv_cache_pool._idle is None
    worker.optim_step(1, ADAM)
    worker.sample(0, make_sum_requests())
    for verb in ("run_share", "step"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(worker.learners[1]), verb, out_of_memory)
            worker.sample(0, make_sum_requests())
            with pytest.raises(torch.OutOfMemoryError):
                learn(worker)
        assert worker.kv_cache_pool._idle is None and not worker.kv_cache_pool._has_learned
        learn(worker)


def out_of_memory(*inputs, **named):
    raise torch.OutOfMemoryError("of 9 TiB")
