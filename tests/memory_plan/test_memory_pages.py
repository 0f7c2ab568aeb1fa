"""Test the size that `--plan` computes for a paged cache against the engine's pool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sampler_models import multistep_engine, one_thread, paged_engine, random_prompts, tiny_model  # noqa: F401
from test_memory_plan import SHAPE

from rl.algorithms import METHODS
from rl.config import RunSettings, read_run
from rl.memory_plan import LaunchShape, compute_concurrent_rows, count_pool_pages, shapes
from rl.memory_plan.shapes import count_admitted_rows
from rl.models import load_model
from rl.sampler import (
    BLOCK_SIZE,
    Engine,
    SamplingRequest,
    choose_pool_size,
    make_decoder,
    max_blocks,
)
from rl.trainer.memory_requirements import _uses_paged_cache, compute_stage_needs
from rl.types import SamplingParams

REPO = Path(__file__).resolve().parents[2]
HERE, GPU = LaunchShape(cuda=False, bf16=False), LaunchShape(cuda=True, bf16=True)
LINE = "grpo --dataset addition --batch-size 8 --group-size 4 --max-tokens 24".split()


def read_config(*words):
    return read_run([*LINE, *words], METHODS, REPO / "recipes" / "addition.yaml", RunSettings)


def cache_of(launch, *words, prompt=20):
    return next(
        item.sample
        for item in compute_stage_needs(read_config(*words), launch, prompt)[0].plan.items
        if item.name == "KV cache"
    )


def test_the_rows_of_a_step_are_those_that_the_engine_lets_in(monkeypatch):
    """For random groups, lengths, pools and bounds, the prompts and rows equal those after the
    engine's first step.
    """
    decoder = make_decoder(tiny_model("qwen3"), kind="fast")
    rng = np.random.default_rng(0)
    short = 0
    for _ in range(60):
        page = int(rng.choice([2, 4, 8]))
        group = int(rng.integers(1, 7))
        groups = int(rng.integers(1, 6))
        prompt = int(rng.integers(1, 20))
        answer = int(rng.integers(2, 20))
        most = int(rng.integers(1, 30))
        pages = -(-(prompt + answer) // page) + int(rng.integers(0, 20))
        engine = paged_engine(
            decoder,
            kv_cache_tokens=pages * page + int(rng.integers(page)),
            max_rows=most,
            page=page,
        )
        for i, tokens in enumerate(random_prompts([prompt] * groups)):
            params = SamplingParams(max_tokens=answer, stop=[])
            engine.add(
                SamplingRequest(
                    prompt=[i, *tokens[1:]], num_samples=group, problem=i, params=params
                )
            )
        # This is the most that an engine admits: it expects no sample to be shorter than its limit.
        engine.expects_lengths = False
        engine.step()
        monkeypatch.setattr(shapes, "BLOCK_SIZE", page)
        lengths = {"groups": groups, "group": group, "prompt": prompt, "answer": answer}
        limits = {"kv_cache_tokens": engine.kv_cache_tokens, "max_rows": most, "world": 1}
        assert compute_concurrent_rows(**lengths, **limits, paged=True) == (
            len(engine._state.prompts),
            len(engine._rows),
        )
        short += len(engine._rows) < min(groups * group, most)
    assert short > 10  # bounded by pages


def test_the_rows_without_pages_are_those_that_the_engine_lets_in():
    """As above, with a budget in tokens that need not hold a whole group."""
    decoder = make_decoder(tiny_model("qwen3"), kind="fast")
    rng = np.random.default_rng(1)
    partial = 0
    for _ in range(60):
        group, groups = int(rng.integers(1, 7)), int(rng.integers(1, 6))
        prompt, answer = int(rng.integers(1, 20)), int(rng.integers(2, 20))
        most = int(rng.integers(1, 30))
        tokens = prompt + answer - 1 + int(rng.integers(0, 100))
        engine = Engine(decoder, kv_cache_tokens=tokens, max_rows=most)
        for i, words in enumerate(random_prompts([prompt] * groups)):
            params = SamplingParams(max_tokens=answer, stop=[])
            engine.add(
                SamplingRequest(prompt=[i, *words[1:]], num_samples=group, problem=i, params=params)
            )
        engine.step()
        lengths = {"groups": groups, "group": group, "prompt": prompt, "answer": answer}
        prompts, rows = compute_concurrent_rows(
            **lengths, kv_cache_tokens=tokens, max_rows=most, world=1
        )
        assert (prompts, rows) == (len(engine._state.prompts), len(engine._rows))
        partial += rows % group != 0 and rows < most
    assert partial > 10  # bounded by tokens, in the middle of a group


def test_rows_let_in_by_hand():
    """Prompts take 2 pages, and a group of 3 takes 5. 12 pages hold two groups and a third prompt
    without a row; 13 also hold its first row.
    """
    assert [
        count_admitted_rows(pages, 2, 3, 1) for pages in (1, 2, 3, 4, 5, 10, 12, 13, 14, 15)
    ] == [1, 1, 1, 2, 3, 6, 6, 7, 8, 9]


def test_requests_never_hold_more_pages_than_were_counted_for_them():
    """With random groups, lengths and bounds, a pool of exactly the computed size suffices: no
    request is preempted, and at most times a page is free.
    """
    decoder = make_decoder(tiny_model("qwen3"), kind="fast")
    rng = np.random.default_rng(1)
    tight = 0
    for _ in range(40):
        page, most = int(rng.choice([2, 4, 8])), int(rng.integers(1, 12))
        read_config = [
            (int(rng.integers(1, 20)), int(rng.integers(1, 5)), int(rng.integers(1, 20)))
            for _ in range(int(rng.integers(1, 6)))
        ]
        need = max_blocks(read_config, page, most)
        engine = paged_engine(decoder, kv_cache_tokens=need * page, max_rows=most, page=page)
        for i, (prompt, count, answer) in enumerate(read_config):
            tokens = random_prompts([prompt], seed=i)[0]
            params = SamplingParams(max_tokens=answer, stop=[])
            engine.add(SamplingRequest(prompt=tokens, num_samples=count, problem=i, params=params))
        least = need
        while engine.busy:
            engine.step()
            least = min(least, engine._state.block_manager.pool.num_free)
        assert engine.preemptions == 0
        tight += least <= 0.4 * need
    assert tight > 10  # the pool is tight enough to test the bound


def test_pages_of_requests_by_hand():
    """Pages hold 4 tokens. A prompt of 10 with 3 answers of 6 shares 2 full pages; each row takes 4
    pages minus 2; a waiting prompt takes 3.
    """
    assert max_blocks([(10, 3, 6)], 4, 8) == 2 + 3 * 2 + 3
    assert max_blocks([(10, 3, 6)], 4, 2) == 2 + 2 * 2 + 3
    assert max_blocks([(10, 3, 6), (3, 1, 1)], 4, 8) == 2 + 3 * 2 + 1 + 3
    assert max_blocks([], 4, 8) == 1
    sizes = [choose_pool_size(100, need) for need in (None, 1, 5, 64, 65, 1000)]
    assert sizes == [100, 1, 5, 64, 72, 100]


@pytest.mark.parametrize("tokens", [256, 1000, 5000])
def test_the_pool_is_counted_as_the_engine_takes_it(tokens):
    """The pool of a call holds what its requests need plus the unassigned page; the pool of a
    stream holds all that `kv_cache_tokens` allows.
    """
    decoder = make_decoder(load_model("tiny:addition", seed=0).model, kind="fast")
    words = ["--base-model", "tiny:addition", "--kv-cache-tokens", str(tokens), "--eval-limit", "2"]
    paged = [*words, "--sampler-cache", "paged"]
    for more, sizes in (([], [(20, 4, 24)] * 8), (["--rollout-mode", "async"], None)):
        engine = multistep_engine(decoder, kv_cache_tokens=tokens, sizes=sizes)
        counted = cache_of(HERE, *paged, *more)
        assert counted == sum(kv.nbytes for kv in engine._state.kv)
        assert cache_of(HERE, *words, *more) < counted  # a plain cache follows what is sampled
        assert cache_of(GPU, *words, *more) == counted / 2  # "auto" is pages there, in bf16


def test_a_larger_call_has_a_larger_pool_up_to_the_budget():
    limits = {"prompt": 300, "answer": 500, "max_rows": 1024, "world": 2, "streams": False}
    results = [
        count_pool_pages(groups=n, group=8, kv_cache_tokens=262_144, **limits)
        for n in (1, 4, 16, 64, 256)
    ]
    assert results == [28, 52, 208, 832, 1024]
    assert max_blocks([(300, 8, 500)], BLOCK_SIZE, 1024) == 1 + 8 * 3 + 2


def test_where_the_engine_keeps_no_pages_none_are_counted():
    """The choice is that of `make_engine` and `engine_of`."""
    stage = read_config("--base-model", "tiny:addition").stages[0].settings
    sampling, shape = stage.sampling, replace(SHAPE, layers=1)
    assert _uses_paged_cache(sampling, shape, GPU)
    assert not _uses_paged_cache(sampling, shape, HERE)
    assert not _uses_paged_cache(replace(sampling, sampler_cache="plain"), shape, GPU)
    assert not _uses_paged_cache(replace(sampling, sampler="hf"), shape, GPU)
    assert not _uses_paged_cache(replace(sampling, num_speculative_tokens=3), shape, GPU)
    assert not _uses_paged_cache(sampling, replace(shape, fast=False), GPU)
