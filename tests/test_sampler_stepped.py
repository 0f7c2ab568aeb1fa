"""Steps over static buffers: the same samples as the plain engine, and what a CUDA graph needs of a step, counted on fake tensors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sampler_models import add_lora, one_thread, random_prompts, reference_logprobs, tiny_model  # noqa: F401

from rl.sampler import Engine, Request, SteppedEngine, make_decoder
from rl.sampler.step_graphs import buckets
from rl.types import SamplingParams

LORA = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def answers(engine, requests):
    for request in requests:
        engine.add(request)
    return [[(s.tokens, s.logprobs, s.stop_reason) for s in response.sequences] for response in engine.run()]


def same(found, expected):
    for mine, plain in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert mine[0] == plain[0] and mine[2] == plain[2]
        np.testing.assert_allclose(mine[1], plain[1], atol=1e-4)


def workload(rng: np.random.Generator, vocab: int) -> list[Request]:
    """Groups on prompts of any length, greedy rows, temperatures, stops of several kinds, now and then top-k."""
    prompts = [rng.integers(0, vocab, int(rng.integers(1, 20))).tolist() for _ in range(3)]
    requests = []
    for i in range(int(rng.integers(2, 7))):
        stop = [None, [5], [], [7, 9, 11]][int(rng.integers(4))]
        how = dict(temperature=float(rng.choice([0.0, 0.7, 1.0])), top_k=3 if rng.random() < 0.1 else -1, stop=stop)
        params = SamplingParams(max_tokens=int(rng.integers(1, 25)), **how)
        prompt = prompts[int(rng.integers(3))]
        requests.append(Request(prompt=prompt, num_samples=int(rng.integers(1, 5)), problem=i, seed=4, params=params))
    return requests


def random_workloads(decoder, seeds) -> tuple[int, int, int]:
    """Through both engines; how often rows waited, how often the host looked, how many steps there were."""
    waited, looks, steps = 0, 0, 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        requests, page = workload(rng, decoder.vocab_size), int(rng.choice([2, 4, 8]))
        most = max(-(-(len(r.prompt) + r.params.max_tokens) // page) for r in requests)
        limits = dict(kv_cache_tokens=page * (most + int(rng.integers(0, 12))), max_rows=int(rng.integers(1, 12)))
        engine = SteppedEngine(decoder, (3,), page=page, look=int(rng.integers(1, 10)), **limits)
        same(answers(engine, requests), answers(Engine(decoder, (3,)), requests))
        tables = engine._state.tables
        assert tables.pool.free == len(tables.pool.held) and not tables.rows
        waited, looks, steps = waited + engine.evictions, looks + engine.looks, steps + engine.counters.steps
    return waited, looks, steps


@pytest.fixture(scope="module")
def decoder():
    return make_decoder(tiny_model("qwen3"), kind="fast")


def test_the_same_samples_as_the_plain_engine(decoder):
    waited, looks, steps = random_workloads(decoder, range(8))
    assert waited and looks and steps > 2 * looks


@pytest.mark.slow
def test_the_same_samples_as_the_plain_engine_in_many_workloads(decoder):
    waited, _, _ = random_workloads(decoder, range(100, 200))
    assert waited > 20
