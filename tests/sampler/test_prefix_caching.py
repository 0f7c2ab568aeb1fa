"""Test that prompts reuse the keys and values of others that begin with the same tokens, and that
the samples are those of an engine without this.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from sampler_models import (
    add_lora,
    check_logprobs,
    check_same,
    crowded_engines,  # noqa: F401
    multistep_engine,
    one_thread,  # noqa: F401
    paged_engine,
    random_prompts,
    run_requests,
    tiny_model,
)

from rl.sampler import (
    Engine,
    IdleKVCachePool,
    MultiAdapterDecoder,
    SamplingRequest,
    make_base_decoder,
    make_decoder,
    prefix_attention,
)
from rl.sampler.prefix_cache import CHUNK_SIZE, hash_chunks
from rl.types import SamplingParams

KINDS = {
    "contiguous": (Engine, {}),
    "blocks of 4": (paged_engine, {"page": 4, "kv_cache_tokens": 2048}),
    "blocks of 16": (paged_engine, {"page": 16, "kv_cache_tokens": 2048}),
    "blocks of 64": (paged_engine, {"page": 64, "kv_cache_tokens": 4096}),
    "device steps": (multistep_engine, {"page": 32, "kv_cache_tokens": 4096}),
}
PARAMS = SamplingParams(max_tokens=8, stop=[])
BEGINNING, *TAILS = random_prompts([64, 3, 9, 1, 6, 12])


def make(kind, decoder, **settings):
    engine, cache = KINDS[kind]
    return engine(decoder, (), **(cache | settings))


def make_requests(**more):
    return [
        SamplingRequest(
            prompt=[*BEGINNING, *tail], num_samples=1 + i % 2, problem=i, params=PARAMS, **more
        )
        for i, tail in enumerate(TAILS)
    ]


def run_in_turn(engine, requests):
    """Run each request after the one before has ended, as a server does."""
    responses = []
    for request in requests:
        engine.add(request)
        while engine.busy:
            responses += [done.result() for done in engine.step()]
    return responses


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3")


@pytest.fixture(scope="module")
def decoder(model):
    return make_decoder(model, kind="fast")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("play", [run_requests, run_in_turn])
def test_prompts_of_the_same_beginning_compute_it_once(kind, play, decoder):
    requests = make_requests()
    expected = play(make(kind, decoder, enable_prefix_caching=False), requests)
    engine = make(kind, decoder)
    responses = play(engine, requests)
    check_same(responses, expected, 1e-4)
    total = sum(len(request.prompt) for request in requests)
    assert engine.counters.prefix_cached_tokens == 4 * 64
    assert engine.counters.prefill_tokens == total - 4 * 64
    hits = [response.prompt_cache_hit_tokens for response in responses]
    assert sorted(hits) == [0, 64, 64, 64, 64]
    assert all(response.prompt_cache_hit_tokens == 0 for response in expected)


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_of_prompts_that_are_asked_for_are_all_computed(kind, decoder):
    """Such a request reuses nothing, so its prompt logprobs have the same bits; others reuse it."""
    scored = [make_requests(include_prompt_logprobs=True)[i] for i in (1, 2)]
    alone = run_in_turn(make(kind, decoder, enable_prefix_caching=False), scored)
    engine = make(kind, decoder)
    responses = run_in_turn(engine, scored)
    assert engine.counters.prefix_cached_tokens == 0
    assert [r.prompt_logprobs for r in responses] == [r.prompt_logprobs for r in alone]
    run_in_turn(engine, make_requests()[4:])
    assert engine.counters.prefix_cached_tokens == 64


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_request_leaves_its_prompt_to_others(kind, decoder):
    first, *others = make_requests()
    engine = make(kind, decoder)
    number = engine.add(first)
    engine.max_steps = 1
    engine.step()
    engine.cancel(number)
    engine.max_steps = None
    responses = run_in_turn(engine, others)
    expected = run_in_turn(make(kind, decoder, enable_prefix_caching=False), others)
    check_same(responses, expected, 1e-4)
    assert engine.counters.prefix_cached_tokens == 4 * 64


@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_reuse_nothing_of_the_old(kind, decoder):
    """The conversation's first prompt is of the old weights, and its answer ends under the new."""
    other = decoder.fork()
    other.load_((name, decoder.weights.view(name) * 1.2) for name in decoder.weights.slices)
    first, second, third, *_ = make_requests()
    second = replace(second, num_samples=1, conversation="talk")
    engine = make(kind, decoder)
    run_in_turn(engine, [first])
    engine.add(second)
    engine.max_steps = 2
    engine.step()
    engine.change_weights(other, 1)
    engine.max_steps = None
    (response,) = [done.result() for _ in range(20) for done in engine.step()]
    (answer,) = response.sequences
    assert set(answer.versions) == {0, 1}
    before = engine.counters.prefix_cached_tokens
    on = replace(second, prompt=[*second.prompt, *answer.tokens, 5, 9])
    responses = run_in_turn(engine, [on, third, first])
    expected = run_in_turn(make(kind, other, enable_prefix_caching=False), [on, third, first])
    check_same(responses, expected, 1e-4)
    assert [r.prompt_cache_hit_tokens for r in responses] == [0, 64, 64]
    assert engine.counters.prefix_cached_tokens - before == 2 * 64


@pytest.mark.parametrize("kind", ["contiguous", "blocks of 4", "blocks of 64"])
def test_adapters_share_nothing_with_each_other(kind, model):
    """The number of an adapter that was removed may name other weights later."""
    torch.manual_seed(0)
    models = [add_lora(copy.deepcopy(model), ["q_proj", "v_proj"], r=2 + i) for i in range(3)]
    base = make_base_decoder(model, None, None)
    decoders = [make_decoder(each, kind="fast", base=base) for each in models]
    mixed = MultiAdapterDecoder(base)
    for number in range(2):
        mixed.add_adapter(number, decoders[number], 0)
    engine = make(kind, mixed)
    texts = [[*BEGINNING, *tail] for tail in TAILS[:4]]

    def check(adapter_id, prompt, adapted, cached):
        before = engine.counters.prefix_cached_tokens
        request = SamplingRequest(prompt=prompt, params=PARAMS, adapter_id=adapter_id)
        (response,) = run_in_turn(engine, [request])
        check_logprobs(adapted, prompt, response.sequences[0])
        assert engine.counters.prefix_cached_tokens - before == cached

    check(0, texts[0], models[0], 0)
    check(1, texts[1], models[1], 0)
    check(0, texts[2], models[0], 64)
    mixed.add_adapter(0, decoders[0], 0)  # added again, as every request of a server does
    check(0, texts[3], models[0], 64)
    engine.keep_weights([1])
    mixed.add_adapter(0, decoders[2], 1)
    check(0, texts[1], models[2], 0)
    check(1, texts[2], models[1], 64)


@pytest.mark.parametrize("kind", ["contiguous", "blocks of 4", "blocks of 64"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3_text", "qwen3_moe"])
def test_long_suffixes_see_what_they_see_in_a_whole_prompt(kind, family, monkeypatch):
    """New tokens attend in blocks of queries, within windows that begin before and in them."""
    monkeypatch.setattr(prefix_attention, "_QUERY_BLOCK", 5)
    decoder = make_decoder(tiny_model(family), kind="fast")
    prompt = random_prompts([80])[0]
    requests = [
        SamplingRequest(prompt=prompt[:length], params=PARAMS, problem=length)
        for length in (34, 80, 66, 51)
    ]
    engine = make(kind, decoder)
    expected = run_in_turn(make(kind, decoder, enable_prefix_caching=False), requests)
    check_same(run_in_turn(engine, requests), expected, 1e-4)
    assert engine.counters.prefix_cached_tokens >= 32 + 64 + 48


@pytest.mark.parametrize("kind", ["contiguous", "blocks of 4", "device steps"])
def test_what_is_kept_gives_way_to_what_runs(kind, decoder):
    """The budget holds little more than one request: no request waits for what is only kept."""
    requests = [
        SamplingRequest(prompt=prompt, params=PARAMS, problem=i, conversation=f"talk {i}")
        for i, prompt in enumerate(random_prompts([60, 48, 33, 60, 20]) * 2)
    ]
    engine = make(kind, decoder, kv_cache_tokens=96)
    expected = run_in_turn(make(kind, decoder, enable_prefix_caching=False), requests)
    check_same(run_in_turn(engine, requests), expected, 1e-4)
    assert engine.counters.peak_cache_tokens <= 96


def test_an_answer_is_kept_if_its_conversation_goes_on(decoder):
    """A contiguous cache copies it for that, so an answer without a conversation is read again."""
    for conversation, kept in (("talk", 80), (None, 64)):
        engine = make("contiguous", decoder)
        params = SamplingParams(max_tokens=17, stop=[])
        first = SamplingRequest(prompt=BEGINNING, params=params, conversation=conversation)
        (response,) = run_in_turn(engine, [first])
        prompt = [*BEGINNING, *response.sequences[0].tokens, 4, 5]
        run_in_turn(engine, [SamplingRequest(prompt=prompt, params=PARAMS)])
        assert engine.counters.prefix_cached_tokens == kept


def test_a_hash_is_of_all_tokens_up_to_its_end_and_of_the_weights():
    tokens = list(range(3 * CHUNK_SIZE + 2))
    hashes = hash_chunks(tokens, "a", CHUNK_SIZE)
    assert len(hashes) == len(set(hashes)) == 3
    assert hash_chunks(tokens[: 2 * CHUNK_SIZE], "a", CHUNK_SIZE) == hashes[:2]
    changed = hash_chunks([*tokens[:20], 99, *tokens[21:]], "a", CHUNK_SIZE)
    assert [a == b for a, b in zip(changed, hashes, strict=True)] == [True, False, False]
    assert not set(hash_chunks(tokens, "b", CHUNK_SIZE)) & set(hashes)


def test_reuse_does_not_depend_on_the_pool_of_an_earlier_engine():
    """Prompts with six beginnings take turns in few blocks, in a run and in a resumed run."""
    decoder, idle = make_decoder(tiny_model("qwen3"), kind="fast"), IdleKVCachePool()
    beginnings = random_prompts([64] * 6)
    requests = [
        SamplingRequest(prompt=[*beginnings[i // 2 % 6], 5, 6 + i], problem=i, params=PARAMS)
        for i in range(24)
    ]
    sizes = [(len(request.prompt), 1, PARAMS.max_tokens) for request in requests]
    results = []
    for pool in (IdleKVCachePool(), idle, idle):
        settings = {"page": 16, "kv_cache_tokens": 4096, "max_rows": 2, "idle_pool": pool}
        if len(results) == 1:  # leave a large pool
            large = paged_engine(decoder, (), **settings)
            run_requests(large, requests[:1])
            large.close()
        engine = paged_engine(decoder, (), sizes=sizes, **settings)
        responses = run_requests(engine, requests)
        results.append((engine.counters, [s.logprobs for r in responses for s in r.sequences]))
        engine.close()
    assert results[0] == results[1] == results[2] and results[0][0].prefix_cached_tokens
