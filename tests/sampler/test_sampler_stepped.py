"""Test steps over static buffers: the samples equal those of the plain engine, and steps run
without the host.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampler_models import (  # noqa: F401
    add_lora,
    check_same,
    crowded_engines,
    make_request,
    multistep_engine,
    one_thread,
    paged_engine,
    random_prompts,
    run_requests,
    tiny_model,
)

from rl.sampler import (
    Engine,
    MultiAdapterDecoder,
    SamplingRequest,
    cuda_graphs,
    make_decoder,
    token_sampling,
)
from rl.sampler.cuda_graphs import CUDAGraphRunner, row_buckets
from rl.sampler.device_steps import DeviceSteps
from rl.sampler.paged_state import PagedState
from rl.sampler.step_buffers import NO_PROCESSING, ProcessedRows
from rl.sampler.token_counts import TokenCountTable
from rl.sampler.token_sampling import MAX_BIASES
from rl.types import SamplingParams

LORA = [
    *("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("qkv_proj", "gate_up_proj"),
]


def make_workload(rng: np.random.Generator, vocab: int) -> list[SamplingRequest]:
    """Return groups on prompts of any length, with greedy rows, temperatures, several kinds of
    stops, and sometimes top-k, top-p, min-p, biases, penalties or a minimum length.
    """
    prompts = [rng.integers(0, vocab, int(rng.integers(1, 20))).tolist() for _ in range(3)]
    requests = []
    for i in range(int(rng.integers(2, 7))):
        stop = [None, [5], [], [7, 9, 11]][int(rng.integers(4))]
        options = dict(
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=3 if rng.random() < 0.2 else -1,
            top_p=0.8 if rng.random() < 0.2 else 1.0,
            min_p=0.1 if rng.random() < 0.2 else 0.0,
            untruncated_logprobs=bool(rng.random() < 0.3),
            stop=stop,
            max_tokens=int(rng.integers(1, 25)),
        )
        if rng.random() < 0.3:
            options["logit_bias"] = {int(rng.integers(vocab)): 2.5, 0: -1.0}
        if rng.random() < 0.3:
            options |= {"presence_penalty": 0.9, "frequency_penalty": -0.5}
            options["repetition_penalty"] = float(rng.choice([1.0, 1.4]))
        if rng.random() < 0.3:
            options["min_tokens"] = int(rng.integers(1, options["max_tokens"] + 1))
        params = SamplingParams(**options)
        prompt = prompts[int(rng.integers(3))]
        requests.append(
            make_request(prompt, int(rng.integers(1, 5)), problem=i, seed=4, params=params)
        )
    return requests


def make_tight_engine(rng: np.random.Generator, decoder) -> tuple[Engine, list[SamplingRequest]]:
    """Return an engine with few pages and few rows, and requests for it."""
    requests, page = make_workload(rng, decoder.vocab_size), int(rng.choice([2, 4, 8]))
    most = max(-(-(len(r.prompt) + r.params.max_tokens) // page) for r in requests)
    limits = dict(
        kv_cache_tokens=page * (most + int(rng.integers(0, 12))), max_rows=int(rng.integers(1, 12))
    )
    return multistep_engine(
        decoder, (3,), page=page, steps_per_sync=int(rng.integers(1, 10)), **limits
    ), requests


@pytest.fixture(scope="module")
def decoder():
    return make_decoder(tiny_model("qwen3"), kind="fast")


KINDS = (
    *("qwen2", "llama", "mistral", "granite", "gemma", "hyperclovax", "olmo2", "phi3", "smollm3"),
    *("gemma2", "gemma3_text", "olmo3", "exaone4", "gemma3_text with adapters"),
    *("granite with adapters", "olmo2 with adapters", "phi3 with adapters", "qwen3 with adapters"),
    *("qwen3 with an adapter on the head", "qwen3, 1500 words"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_and_adapters_by_every_look(kind):
    """Covers biases, untied heads, unmerged adapters and large vocabularies; groups that share
    pages, and prompts that end within a page.
    """
    name, _, more = kind.partition(" with ")
    model = tiny_model(name.split(",")[0], **({"vocab_size": 1500} if "1500" in kind else {}))
    if more:
        model = add_lora(model, ["lm_head", "q_proj"] if "head" in more else LORA)
    decoder = make_decoder(model, kind="fast")
    requests = [
        make_request(prompt, n, max_tokens=14, temperature=0.9, problem=i)
        for i, (prompt, n) in enumerate(
            zip(random_prompts([5, 17, 12, 9]), (4, 3, 1, 5), strict=True)
        )
    ]
    expected = run_requests(Engine(decoder, (3, 4)), requests)
    for look in (1, 7):
        engine = multistep_engine(decoder, (3, 4), page=4, steps_per_sync=look, max_rows=9)
        check_same(run_requests(engine, requests), expected, 1e-4)
        assert engine._device_steps.num_syncs <= engine.counters.steps
        assert look == 1 or engine._device_steps.num_syncs < engine.counters.steps / 2


def test_in_bfloat16_too():
    """The same path in half precision: the residual, the norms and the head round as in the plain
    path. Tokens are compared until rounding makes them differ.
    """
    decoder = make_decoder(tiny_model("qwen3"), dtype=torch.bfloat16, kind="fast")
    requests = [
        make_request(prompt, 3, problem=i, max_tokens=12)
        for i, prompt in enumerate(random_prompts([5, 17]))
    ]
    mine, plain = (
        [s for response in run_requests(engine, requests) for s in response.sequences]
        for engine in (multistep_engine(decoder, page=4), Engine(decoder))
    )
    together = 0
    for first, other in zip(mine, plain, strict=True):
        pairs = zip(first.tokens, other.tokens, strict=True)
        n = next((i for i, (a, b) in enumerate(pairs) if a != b), len(first.tokens))
        np.testing.assert_allclose(first.logprobs[:n], other.logprobs[:n], atol=0.1)
        together += n
    assert together > 36  # of 72


def test_weights_that_are_loaded_in_place_are_the_next_steps():
    """Nothing is reallocated for new weights: the buffers that a captured graph would read were
    written.
    """
    model = tiny_model("qwen3")
    decoder = make_decoder(model, kind="fast")
    engine = multistep_engine(decoder, page=4)
    requests = [make_request([4, 9, 2], 2, max_tokens=10)]
    run_requests(engine, requests)
    steps = engine._device_steps.runner
    before = {key: buffer.data_ptr() for key, buffer in decoder.weights.buffers.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    decoder.load_(model.named_parameters())
    expected = run_requests(Engine(make_decoder(model, kind="fast")), requests)
    check_same(run_requests(engine, requests), expected, 1e-4)
    assert engine._device_steps.runner is steps
    assert before == {key: buffer.data_ptr() for key, buffer in decoder.weights.buffers.items()}


def test_rows_that_ended_write_to_no_page_of_another(decoder):
    """Half of the rows stop early, between two syncs. The pages of other rows hold the same as with
    a sync after every step.
    """
    results = []
    for look in (1, 16):
        engine = multistep_engine(
            decoder, (3, 4, 5, 6, 7, 8), page=4, steps_per_sync=look, kv_cache_tokens=400
        )
        first = [
            make_request(prompt, 4, max_tokens=30, problem=i)
            for i, prompt in enumerate(random_prompts([6, 11, 9]))
        ]
        run_requests(engine, first)
        last = make_request(random_prompts([13])[0], max_tokens=18, stop=[])
        results.append(run_requests(engine, [last]))
    check_same(*results)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_is_not_a_number_is_an_error_within_a_look(ahead):
    decoder = make_decoder(tiny_model("qwen3"), kind="fast")
    engine = multistep_engine(decoder, page=4)
    engine.add(make_request([3, 4], max_tokens=20))
    engine.step()
    decoder.load_([("model.norm.weight", torch.full((32,), torch.nan))])
    engine.runs_ahead, engine.max_steps = ahead, 16
    with pytest.raises(FloatingPointError, match="diverged"):
        while engine.busy:
            engine.step()
    assert engine._in_flight is None  # a chunk that was launched ahead


def test_buckets_hold_every_number_of_rows():
    assert row_buckets(1) == [1]
    assert row_buckets(3) == [1, 2, 4]
    assert row_buckets(24) == [1, 2, 4, 8, 16, 24]
    assert row_buckets(1024)[-3:] == [512, 768, 1024]
    for most in range(1, 70):
        sizes = row_buckets(most)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] >= most
        assert len(sizes) == 1 or sizes[-2] < most


def test_ends_are_found_where_the_steps_are_made(decoder, monkeypatch):
    """The buffers are read before the host syncs: an ended row stays at its last token."""
    engine, ended = multistep_engine(decoder, tuple(range(3, 12)), page=4, steps_per_sync=12), 0
    for i, prompt in enumerate(random_prompts([6, 11])):
        engine.add(make_request(prompt, 6, max_tokens=7 + 9 * i, problem=i))
    engine.step()
    rows = {name: engine._rows[name].copy() for name in ("max_tokens", "num_sampled")}
    run = engine._device_steps._start_copy
    written = (
        engine._state.prompt_lengths[engine._state.prompt_of_row] + engine._state.response_lengths
    )

    def seen(count, *rest_of_inputs):
        nonlocal ended
        chunk = run(count, *rest_of_inputs)
        tokens = chunk.read()[0]
        b, rest = engine._device_steps.runner.buffers, rows["max_tokens"] - rows["num_sampled"]
        for row in range(len(rest)):
            stops = [i + 1 for i, token in enumerate(tokens[:, row].tolist()) if 3 <= token < 12]
            fed = min([count, int(rest[row]), *stops[:1]])
            over = fed == rest[row] or stops[:1] == [fed]
            assert b.remaining[row] == (0 if over else rest[row] - fed)
            assert b.position[row] == written[row] + fed and b.token[row] == tokens[fed - 1, row]
            assert (tokens[fed:, row] == tokens[fed - 1, row]).all() if over else True
            ended += bool(over and fed < count)
        assert not b.remaining[len(rest) : engine._device_steps.runner.bucket_for(len(rest))].any()
        return chunk

    monkeypatch.setattr(engine._device_steps, "_start_copy", seen)
    engine.step()
    assert ended > 3


def test_running_rows_decode_on_the_device_while_requests_wait_and_rows_are_preempted(
    decoder, monkeypatch
):
    """No step uses `PagedState.decode`: new prompts get their first token and join, also if rows
    truncate their distribution, have biases or penalties, or may not end yet.
    """
    waiting = preempted = 0
    for seed in range(6):
        engine, requests = make_tight_engine(np.random.default_rng(seed), decoder)
        expected = run_requests(Engine(decoder, (3,)), requests)
        with monkeypatch.context() as patch:
            patch.setattr(PagedState, "decode", None)
            check_same(run_requests(engine, requests), expected, 1e-4)
        waiting += sum(r.num_samples for r in requests) > engine.max_rows
        preempted += engine.preemptions
    assert waiting and preempted


def test_the_next_steps_are_launched_before_the_last_ones_are_read(decoder, monkeypatch):
    """With `run`, while no request can be admitted: the samples equal those of the plain engine,
    and pages are freed.
    """
    launched = ahead = 0
    launch = DeviceSteps.launch_next

    def launch_next(self, *args):
        nonlocal launched, ahead
        result = launch(self, *args)
        launched, ahead = launched + 1, ahead + (result is not None)
        return result

    monkeypatch.setattr(DeviceSteps, "launch_next", launch_next)
    for seed in range(12):
        engine, requests = make_tight_engine(np.random.default_rng(seed), decoder)
        engine.runs_ahead = True
        if seed % 2:  # rows for all requests, so that none wait
            engine = multistep_engine(decoder, (3,), page=4, steps_per_sync=1 + seed % 5)
            engine.runs_ahead = True
        expected = run_requests(Engine(decoder, (3,)), requests)
        check_same(run_requests(engine, requests), expected, 1e-4)
        tables = engine._state.block_manager
        assert tables.pool.num_free == len(tables.pool.ref_counts) and not len(tables.rows)
        assert engine._in_flight is None
    assert ahead > 20 and launched > ahead


@pytest.mark.parametrize(
    "processing",
    [{}, {"top_p": 0.9}, {"logit_bias": {4: 1.0}}, {"frequency_penalty": 0.4}],
)
def test_rows_that_do_not_fill_a_bucket_are_launched_ahead_too(decoder, monkeypatch, processing):
    """Three rows in a bucket of four, 33 tokens: the prefill samples 1, four launches 8 each."""
    chunks, launch = [], DeviceSteps.launch_next
    monkeypatch.setattr(
        DeviceSteps, "launch_next", lambda *args: chunks.append(launch(*args)) or chunks[-1]
    )
    engine = multistep_engine(decoder)
    engine.runs_ahead = True
    run_requests(engine, [make_request([4, 9, 2], 3, max_tokens=33, **processing)])
    assert [chunk is not None for chunk in chunks] == [True, True, True, False]


def make_two_lengths() -> list[SamplingRequest]:
    """Return requests that end in the fifth and in the eighth chunk of 8 steps."""
    sizes = zip(random_prompts([5, 9]), (40, 60), strict=True)
    return [
        make_request(prompt, 3, max_tokens=size, problem=i)
        for i, (prompt, size) in enumerate(sizes)
    ]


def test_a_run_that_was_interrupted_continues_with_the_same_samples(decoder):
    """The chunk in flight is dropped; the blocks of its tokens are free again."""
    requests = make_two_lengths()
    expected = run_requests(Engine(decoder), requests)
    engine, dropped = multistep_engine(decoder, page=4), []

    def interrupt(done):
        dropped.append(engine._in_flight)
        raise KeyboardInterrupt

    engine.runs_ahead = True
    for request in requests:
        engine.add(request)
    with pytest.raises(KeyboardInterrupt):
        engine.run(interrupt)
    assert dropped != [None] and engine._in_flight is None
    manager = engine._state.block_manager
    assert manager.rows["length"].tolist() == engine._state.lengths().tolist()
    check_same(engine.run(), expected[1:], 1e-4)
    assert manager.pool.num_free == len(manager.pool.ref_counts)


def test_a_request_is_cancelled_while_a_chunk_is_in_flight(decoder):
    """Its rows have left the device when the next chunk is launched: other rows take their blocks."""
    requests = make_two_lengths()
    expected = run_requests(Engine(decoder), requests)
    engine = multistep_engine(decoder, page=4)
    engine.runs_ahead, engine.max_steps = True, 100
    cancelled, _ = map(engine.add, requests)
    while engine._in_flight is None:
        assert engine.step() == []
    engine.cancel(cancelled)
    engine.step()
    live = engine._device_steps.runner.buffers.first_rows(4).remaining > 0
    assert live.tolist() == [True, True, True, False]
    check_same(engine.run(), expected[1:], 1e-4)


SCENARIOS = ("full weights", "LoRA", "tight pool", "new weights", "logits processing")
SCENARIOS += ("adapters of rows", "penalties", "penalties, tight pool", "penalties, new weights")
PROCESSING = (
    {"top_k": 5, "top_p": 0.9, "logit_bias": {4: 3.0, 0: -2.0}},
    {"min_p": 0.1, "min_tokens": 12, "untruncated_logprobs": True},
    {},
    {"temperature": 0.0, "logit_bias": {5: 6.0}, "min_tokens": 20},
    {"min_tokens": 25},
    {"logit_bias": {3: 5.0}, "min_tokens": 9, "untruncated_logprobs": True},
)


PENALTIES = (
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 0.7, "presence_penalty": -0.4},
    {},
    {"repetition_penalty": 0.7, "presence_penalty": 1.2},
    {"frequency_penalty": -1.1},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "presence_penalty": 0.3},
)


def make_processing(scenario, i):
    """Return the parameters of request i that truncate its distribution or adjust its logits, and
    the number of its adapter in `mix_adapters`.
    """
    if scenario == "adapters of rows":
        return {"adapter_id": i % 3} | (PROCESSING[i] if i > 3 else {})
    if scenario.startswith("penalties"):
        return PENALTIES[i] | (PROCESSING[i] if i > 2 else {})
    return PROCESSING[i] if scenario == "logits processing" else {}


def mix_adapters(make_model, **settings):
    """Return a decoder of a model (0) and two adapters on it. `make_model`: builds the same model at
    each call. `settings`: of `make_decoder`.
    """
    base = make_decoder(make_model(), kind="fast", **settings)
    decoder = MultiAdapterDecoder(base)
    decoder.add_adapter(0, base, 0)
    for number, targets in enumerate((LORA, ["q_proj", "down_proj"]), 1):
        torch.manual_seed(number)
        model = add_lora(make_model(), targets, r=4 * number)
        decoder.add_adapter(number, make_decoder(model, kind="fast", base=base, **settings), 0)
    return decoder


def play_scenario(scenario, engine, requests, decoder, steps):
    """Return tokens, logprobs and versions of each sample. "new weights": those of `decoder` after
    `steps` steps; "tight pool": requests wait, and rows are preempted.
    """
    for request in requests:
        engine.add(request)
    finished, count, waited = {}, 0, False
    while engine.busy:
        if scenario.endswith("new weights") and count == steps:
            engine.change_weights(decoder, 1)
        finished |= {done.request_id: done.result() for done in engine.step()}
        count, waited = count + 1, waited or bool(engine._waiting)
    assert bool(engine.preemptions) == waited == scenario.endswith("tight pool")
    samples = [s for _, response in sorted(finished.items()) for s in response.sequences]
    assert any(s.versions for s in samples) == scenario.endswith("new weights")
    return [(s.tokens, s.logprobs, s.versions) for s in samples]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_steps_of_the_device_draw_what_those_of_the_host_do(scenario):
    """Equivalent test on a GPU: test_sampler_gpu.py."""
    models = [tiny_model("qwen3") for _ in range(2)]
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.mul_(1.1)
    if scenario == "LoRA":
        models[0] = add_lora(models[0], LORA)
    decoder, new = (make_decoder(model, kind="fast") for model in models)
    if scenario == "adapters of rows":
        decoder = mix_adapters(lambda: tiny_model("qwen3"))
    requests = [
        make_request(prompt, 4, max_tokens=30, problem=i, **make_processing(scenario, i))
        for i, prompt in enumerate(random_prompts([5, 9, 12, 7, 4, 10]))
    ]
    # the same tokens before the new weights: a step admits and samples 1, each other step 8 or 1
    limits = {"kv_cache_tokens": 128, "max_rows": 7} if scenario.endswith("tight pool") else {}
    kinds = ((multistep_engine, 3), (paged_engine, 17))
    mine, plain = (
        play_scenario(scenario, make(decoder, (3,), page=4, **limits), requests, new, steps)
        for make, steps in kinds
    )
    for sample, expected in zip(mine, plain, strict=True):
        assert (sample[0], sample[2]) == (expected[0], expected[2])
        np.testing.assert_allclose(sample[1], expected[1], atol=1e-4)


def test_a_row_needs_no_processing_when_its_minimum_is_reached(decoder, monkeypatch):
    """The first token comes from the prefill, and each launch samples 4. Also if the next steps are
    launched before the last ones are read.
    """
    processed, run = [], CUDAGraphRunner.run
    monkeypatch.setattr(
        CUDAGraphRunner, "run", lambda *args: processed.append(args[5]) or run(*args)
    )
    stops = tuple(range(20))
    request = make_request([4, 9, 2], 4, max_tokens=40, min_tokens=11)
    expected = run_requests(Engine(decoder, stops), [request])
    lengths = [len(s.tokens) for s in expected[0].sequences]
    assert min(lengths) == 12 and max(lengths) > 13  # half of the vocabulary stops
    for ahead in (False, True):
        engine = multistep_engine(decoder, stops, steps_per_sync=4)
        engine.runs_ahead = ahead
        check_same(run_requests(engine, [request]), expected, 1e-4)
        # before tokens 2, 6 and 10
        assert processed[:3] == [ProcessedRows(4, False)] * 3
        assert set(processed[3:]) == {NO_PROCESSING}
        processed.clear()


@pytest.mark.parametrize("count", [MAX_BIASES, MAX_BIASES + 1])
def test_rows_with_more_biases_than_the_buffers_hold_run_on_the_host(count, monkeypatch):
    decodes, decode = [], PagedState.decode
    monkeypatch.setattr(PagedState, "decode", lambda *args: decodes.append(1) or decode(*args))
    decoder = make_decoder(tiny_model("qwen3", vocab_size=1500), kind="fast")
    bias = dict(zip(range(count), np.linspace(-9, 9, count).tolist(), strict=True))
    requests = [
        make_request([4, 9, 2], 2, max_tokens=12, logit_bias=bias),
        make_request([5, 7], 2, max_tokens=12, logit_bias={1499: 4.0, 0: 7.0}, problem=1),
    ]
    expected = run_requests(Engine(decoder, (3,)), requests)
    check_same(run_requests(multistep_engine(decoder, (3,)), requests), expected, 1e-4)
    assert bool(decodes) == (count > MAX_BIASES)


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_rows_with_penalties_in_parts_and_in_a_table_that_grows(decoder, at_once, monkeypatch):
    """7 rows of three requests in a bucket of 16, whose last part repeats a row of the first; then
    26 rows, which the first table does not hold. Their logits are processed `at_once` rows at once.
    """
    monkeypatch.setattr(cuda_graphs, "_LOGITS_AT_ONCE", at_once * decoder.vocab_size)
    monkeypatch.setattr(PagedState, "decode", None)
    engine, shapes = multistep_engine(decoder, (3,), page=4), []
    for samples in (1, 1, 6):
        requests = [
            make_request(prompt, samples + 2 * i, max_tokens=20, problem=i, **PENALTIES[i])
            for i, prompt in enumerate(random_prompts([5, 9, 12, 6]))
        ]
        responses = run_requests(engine, requests)
        with monkeypatch.context() as patch:
            patch.undo()
            expected = run_requests(Engine(decoder, (3,)), requests)
        check_same(responses, expected, 2e-6)
        shapes.append(engine._device_steps.runner.buffers.counts.shape[0])
    assert shapes == [17, 17, 65]


@pytest.mark.parametrize(
    ("limit", "value", "fits"),
    [("MAX_COUNTS", 41 * 4, True), ("MAX_COUNTS", 41 * 4 - 1, False), ("MAX_COUNT", 11, False)],
)
def test_penalties_that_exceed_the_table_are_applied_on_the_host(
    decoder, limit, value, fits, monkeypatch
):
    """Four rows with penalties in a vocabulary of 41, of up to 12 tokens."""
    decodes, decode = [], PagedState.decode
    monkeypatch.setattr(PagedState, "decode", lambda *args: decodes.append(1) or decode(*args))
    monkeypatch.setattr(token_sampling, limit, value)
    requests = [
        make_request([4, 9, 2], 4, max_tokens=12, **PENALTIES[5]),
        make_request([5, 7], 2, max_tokens=12, problem=1),
    ]
    expected = run_requests(Engine(decoder, (3,)), requests)
    check_same(run_requests(multistep_engine(decoder, (3,)), requests), expected, 2e-6)
    assert bool(decodes) != fits


def test_counts_are_written_when_a_row_starts_or_sampled_elsewhere(monkeypatch):
    """Three launches count by themselves. A row that only the host samples joins for a few tokens;
    after it the counts of the others are written anew.
    """
    decoder = make_decoder(tiny_model("qwen3", vocab_size=1500), kind="fast")
    written, write = [], TokenCountTable._write_rows
    monkeypatch.setattr(
        TokenCountTable, "_write_rows", lambda *args: written.append(len(args[-1])) or write(*args)
    )
    engine, finished = multistep_engine(decoder, page=4), {}
    requests = [make_request([4, 9, 2], 3, max_tokens=60, **PENALTIES[5], temperature=0.5)]
    engine.add(requests[0])
    for _ in range(4):
        engine.step()
    assert written == [3]
    bias = dict.fromkeys(range(MAX_BIASES + 1), 0.5)
    requests.append(make_request([5, 7], max_tokens=5, logit_bias=bias, problem=1))
    engine.add(requests[1])
    while engine.busy:
        finished |= {done.request_id: done.result() for done in engine.step()}
    assert written == [3, 3]
    expected = run_requests(Engine(decoder), requests)
    # the rounding of a logit is divided by the temperature
    check_same([finished[0], finished[1]], expected, 2e-6 / 0.5)


def test_counts_of_a_preempted_row_are_not_those_that_others_sample(decoder, monkeypatch):
    """A row with penalties is preempted while the device samples 8 tokens of another row, and then
    samples 8 on the host: as many as if the device had counted its own.
    """
    engine = multistep_engine(decoder, page=4)
    requests = [
        make_request([4, 9, 2], max_tokens=60),
        make_request([5, 7], max_tokens=60, problem=1, **PENALTIES[5]),
    ]
    for request in requests:
        engine.add(request)
    for _ in range(2):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_resume", lambda self: None)
        engine._preempt(engine._rows["request_id"].tolist().index(1))
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(DeviceSteps, "can_run", lambda self: False)
        for _ in range(8):
            engine.step()
    assert engine.preemptions == 1 and len(engine._rows) == 2
    check_same(engine.run(), run_requests(Engine(decoder), requests))


def test_temperatures_of_rows_beyond_a_bucket_stay_above_zero(decoder):
    """A later capture of a larger bucket divides by them."""
    engine = multistep_engine(decoder)
    run_requests(engine, [make_request([4, 9, 2], 2, max_tokens=6, temperature=0.5)])
    temperature = engine._device_steps.runner.buffers.temperature
    assert temperature[:2].tolist() == [0.5, 0.5] and (temperature[2:] == 1).all()


@pytest.fixture
def late_device(monkeypatch):
    """Simulate a device whose launched steps run only when the host waits for them. Return the
    events in order: "launched", and "waited" for a sync.
    """
    results, queue = [], []
    run, wait = CUDAGraphRunner.run, DeviceSteps._start_copy

    def launch(*inputs):
        results.append("launched")
        queue.append(inputs)

    def waited(*inputs):
        results.append("waited")
        while queue:
            run(*queue.pop(0))
        return wait(*inputs)

    monkeypatch.setattr(CUDAGraphRunner, "run", launch)
    monkeypatch.setattr(DeviceSteps, "_start_copy", waited)
    return results


@pytest.mark.parametrize("seed", range(6))
def test_the_samples_are_the_same_however_late_the_device_is(decoder, late_device, seed):
    """A sync that is too early would return the tokens of the previous sync."""
    engine, requests = make_tight_engine(np.random.default_rng(seed), decoder)
    expected = run_requests(Engine(decoder, (3,)), requests)
    check_same(run_requests(engine, requests), expected, 1e-4)
    launched, waited = (late_device.count(event) for event in ("launched", "waited"))
    assert engine._device_steps.num_syncs == launched == waited
