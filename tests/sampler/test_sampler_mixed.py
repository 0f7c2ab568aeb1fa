"""Test batches with several adapters: each sample equals that of its model in a separate engine,
whichever other rows enter, leave or fail.
"""

from __future__ import annotations

import functools
from typing import Any

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

from rl.errors import UserError
from rl.sampler import Engine, MultiAdapterDecoder, SamplingRequest, make_decoder
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.paged_state import PagedState
from rl.types import SamplingParams

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# parameters of some requests
MORE: list[dict[str, Any]] = [
    {"top_k": 3, "untruncated_logprobs": True},
    {"top_p": 0.8, "logit_bias": {4: 3.0}},
    {"min_p": 0.1, "repetition_penalty": 1.3},
]
ADAPTERS: list[dict[str, Any]] = [
    {"targets": ALL, "r": 4, "lora_alpha": 10},
    {"targets": ["q_proj", "v_proj"], "r": 1, "lora_alpha": 7},
    {"targets": [*ALL, "lm_head"], "r": 7, "lora_alpha": 3},
    {"targets": ["down_proj", "embed_tokens"], "r": 3, "lora_alpha": 5},
]


@functools.cache
def make_family(kind: str, count: int = 4) -> tuple[FastDecoder, list[FastDecoder]]:
    """Return a base, and decoders of random adapters that share its memory. Callers fork them
    before changing them.
    """
    base = make_decoder(tiny_model(kind), kind="fast")
    decoders = []
    for i, first in enumerate(ADAPTERS[:count]):
        torch.manual_seed(i)
        settings = {name: value for name, value in first.items() if name != "targets"}
        decoders.append(
            make_decoder(
                add_lora(tiny_model(kind), first["targets"], **settings), kind="fast", base=base
            )
        )
    assert all(decoder.base is base for decoder in decoders)
    return base, decoders


def mixed(
    base: FastDecoder, decoders: list[FastDecoder], pages: bool | str = False, **settings: Any
) -> Engine:
    """Build an engine: number 0 is the base, 1, 2, ... the adapters. `pages`: use pages of four
    positions ("stepped": and several steps per host sync).
    """
    decoder = MultiAdapterDecoder(base)
    for number, first in enumerate([base, *decoders]):
        decoder.add_adapter(number, first, version=10 + number)
    if pages:
        make = multistep_engine if pages == "stepped" else paged_engine
        return make(decoder, eos_token_ids=(3,), page=4, **settings)
    return Engine(decoder, eos_token_ids=(3,), **settings)


def check(decoder: FastDecoder, request: SamplingRequest, response: Any) -> None:
    """Compare a response with that of the request alone in an engine of its model."""
    check_same([response], run_requests(Engine(decoder, eos_token_ids=(3,)), [request]))


def test_adapters_hold_nothing_of_the_base_but_themselves():
    base, decoders = make_family("qwen3")
    held = {buffer.data_ptr() for buffer in base.weights.buffers.values()}
    for decoder in decoders:
        buffers = decoder.weights.buffers.items()
        own = {key for key, buffer in buffers if buffer.data_ptr() not in held}
        assert own and all("lora" in key for key in own)
        with pytest.raises(ValueError, match=r"frozen and shared"):
            decoder.load_([("base_model.model.model.norm.weight", torch.full((32,), 9.0))])
        fork = decoder.fork()
        assert fork.base is base and fork.weights.buffers["norm"] is base.weights.buffers["norm"]


def test_weights_that_are_not_the_bases_are_not_shared():
    base = make_decoder(tiny_model("llama"), kind="fast")
    other = tiny_model("llama")
    with torch.no_grad():
        other.model.norm.weight.add_(1e-3)
    decoder = make_decoder(add_lora(other, ALL), kind="fast", base=base)
    assert decoder.base is None
    assert decoder.weights.buffers["norm"] is not base.weights.buffers["norm"]
    with pytest.raises(UserError, match=r"another base"):
        MultiAdapterDecoder(base).add_adapter(1, decoder, 0)


def test_weights_that_replace_others_keep_none_of_their_matrices():
    base, decoders = make_family("qwen3")
    request = make_request([5, 6, 7], max_tokens=8, stop=[], adapter_id=1)
    decoder = MultiAdapterDecoder(base)
    for version, weights in enumerate([decoders[0], decoders[1], base]):
        decoder.add_adapter(1, weights, version)
        engine = Engine(decoder, eos_token_ids=(3,))
        check(weights, request, run_requests(engine, [request])[0])


EACH = ("qwen3", "qwen2", "llama", "granite", "olmo2", "smollm3", "gemma2", "olmo3")


MODES = [(True, False), (False, True), (True, "stepped")]
# Every mode of one model and, in turn, one mode of each other model are quick.
CASES = [("qwen3", *mode) for mode in (*MODES, (True, True), (False, False))]
CASES += [("qwen2_moe", True, "stepped")]
CASES += [
    pytest.param(kind, *mode, marks=[pytest.mark.slow] * (i % 3 != j))
    for i, kind in enumerate(EACH[1:])
    for j, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("kind", "kernels", "pages"), CASES)
def test_each_model_draws_in_a_mixed_batch_what_it_draws_alone(kind, kernels, pages, monkeypatch):
    if not kernels:
        monkeypatch.setattr("rl.sampler.cpu_kernels.load_cpu_kernels", lambda: None)
    base, decoders = make_family(kind)
    engine = mixed(base, decoders, pages, max_rows=9)
    if pages == "stepped":
        monkeypatch.setattr(PagedState, "decode", None)
    prompts = random_prompts([5, 17, 9, 5, 12, 3, 30, 8, 11, 2])
    requests = []
    # a prompt shared by several models is prefilled by each
    for i, prompt in enumerate([*prompts, prompts[1], prompts[1]]):
        params = SamplingParams(
            max_tokens=4 + i, temperature=0.9 if i % 3 else 0.0, top_p=0.8 if i % 4 == 1 else 1.0
        )
        fields = dict(params=params, seed=3, problem=i, adapter_id=i % 5)
        requests.append(
            make_request(prompt, 1 + i % 3, include_prompt_logprobs=i % 2 == 0, **fields)
        )
    responses = run_requests(engine, requests)
    monkeypatch.undo()
    for request, response in zip(requests, responses, strict=True):
        check([base, *decoders][request.adapter_id], request, response)
        assert {s.version for s in response.sequences} == {10 + request.adapter_id}
    assert engine.counters.peak_rows == 9  # they ran together, and some waited


@pytest.mark.parametrize("pages", [False, True, "stepped"])
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]
)
def test_random_workloads(seed, pages):
    """Requests arrive at any step, some are cancelled, conversations continue from the cache, and
    models get new weights while others are sampled. With pages, rows also wait and are recomputed.
    """
    rng = np.random.default_rng(seed)
    base, decoders = make_family(["qwen3", "llama"][seed % 2])
    torch.manual_seed(seed + 20)  # for the changed weights
    max_rows = int(rng.integers(3, 12)) + (6 if pages else 0)
    tokens = 76 if pages else int(rng.integers(300, 1500))
    # few tokens of a step, so that rows are there when others arrive
    steps = {"steps_per_sync": 2} if pages == "stepped" else {}
    engine = mixed(base, decoders, pages, max_rows=max_rows, kv_cache_tokens=tokens, **steps)
    known = dict(enumerate([base, *decoders]))
    newest = dict(enumerate(known))  # the newest number of a model
    query: dict[int, SamplingRequest] = {}
    answers, dropped = {}, set()
    talks: dict[tuple[str, int], list[int]] = {}
    for step in range(60):
        for _ in range(int(rng.integers(0, 3)) if step < 40 else 0):
            model = int(rng.integers(0, 5))
            name = f"talk {rng.integers(0, 3)}" if rng.random() < 0.4 else None
            prompt = rng.integers(0, 41, int(rng.integers(1, 20))).tolist()
            if name is not None and (name, newest[model]) in talks:
                prompt = [*talks.pop((name, newest[model])), *prompt[:4]]
            params = SamplingParams(
                max_tokens=int(rng.integers(1, 12)),
                temperature=float(rng.choice([0.0, 0.7, 1.0])),
                **(MORE[int(rng.integers(len(MORE)))] if rng.random() < 0.5 else {}),
            )
            fields = dict(params=params, seed=seed, problem=len(query), conversation=name)
            several = 1 if name else int(rng.integers(1, 4))
            prompt = prompt[-60:] if name is None else prompt[:60]
            request = make_request(prompt, several, adapter_id=newest[model], **fields)
            query[engine.add(request)] = request
        if rng.random() < 0.15 and query:
            engine.cancel(gone := int(rng.choice(list(query))))
            dropped |= {gone} - answers.keys()
        if rng.random() < 0.2:
            model, number = int(rng.integers(1, 5)), len(known)
            known[number] = changed = known[newest[model]].fork()
            weights = changed.weights
            names = [name for name, piece in weights.slices.items() if piece.trainable]
            changed.load_((n, torch.randn(weights.view(n).shape) * 0.2) for n in names)
            engine.decoder.add_adapter(number, changed, 10 + number)
            newest[model] = number
            engine.keep_weights(newest.values())
        for done in engine.step():
            answers[done.request_id] = done.response
            request = query[done.request_id]
            if request.conversation is not None:
                text = [*request.prompt, *done.response.sequences[0].tokens]
                talks[request.conversation, request.adapter_id] = text
    while engine.busy:
        answers |= {done.request_id: done.response for done in engine.step()}
    assert pages is not True or engine.preemptions
    assert answers.keys() == query.keys() - dropped and len(answers) > 15
    for number, response in answers.items():
        check(known[query[number].adapter_id], query[number], response)
        versions = {s.version for s in response.sequences}
        assert versions == {10 + query[number].adapter_id}
    changed = [number for number in answers if query[number].adapter_id > 4]
    assert changed, "no changed weights were drawn from"


@pytest.mark.parametrize(
    "kernels, samples, pages",
    [(True, 2, False), (False, 2, False), (False, 1, False), (1, 2, 1), (1, 2, "stepped")],
)
def test_one_whose_weights_give_no_numbers_fails_alone_and_leaves_nothing_behind(
    kernels, samples, pages, monkeypatch
):
    if not kernels:
        monkeypatch.setattr("rl.sampler.cpu_kernels.load_cpu_kernels", lambda: None)
    base, decoders = make_family("qwen3")
    decoders = [decoder.fork() for decoder in decoders[:2]]
    for name, piece in decoders[0].weights.slices.items():
        if piece.trainable and "layers.0.self_attn.v_proj" in name:
            decoders[0].weights.view(name).fill_(float("nan"))
    engine = mixed(base, decoders, pages, max_rows=4, kv_cache_tokens=240 if pages else 10_000)
    # the broken adapter has long prompts: their cache entries are not overwritten
    prompts = random_prompts([20, 5, 19, 7, 20, 5, 18, 9, 20, 6, 20, 8])
    params = SamplingParams(max_tokens=10)
    requests = {}
    for i, prompt in enumerate(prompts):  # they enter repeatedly, and others take their slots
        request = make_request(
            prompt, samples, params=params, problem=i, adapter_id=(1, 0, 1, 2)[i % 4]
        )
        requests[engine.add(request)] = request
    results = {}
    while engine.busy:
        results |= {done.request_id: done.response for done in engine.step()}
    for number, request in requests.items():
        if request.adapter_id == 1:
            assert isinstance(results[number], FloatingPointError) and "NaN" in str(results[number])
        else:
            check([base, *decoders][request.adapter_id], request, results[number])


def test_weights_that_nobody_knows_are_refused_and_forgotten_ones_given_back():
    base, decoders = make_family("llama")
    engine = mixed(base, decoders)
    with pytest.raises(ValueError, match=r"unknown weights 7"):
        engine.add(SamplingRequest(prompt=[5], adapter_id=7))
    engine.add(make_request([5, 6], max_tokens=3, stop=[], adapter_id=1))
    engine.step()
    engine.keep_weights([2])
    assert sorted(engine.decoder.decoders) == [1, 2]  # a request still uses 1
    engine.run()
    engine.keep_weights([2])
    assert sorted(engine.decoder.decoders) == [2]
    assert all(set(part.row_lora) <= {2} for part in engine.decoder.iter_adaptable_modules())
