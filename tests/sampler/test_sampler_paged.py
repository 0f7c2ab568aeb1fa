"""Test the paged cache: the block tables, its attention against a single softmax, and the engine
against the plain engine.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from sampler_models import add_prompt, crowded_engines, make_request, one_thread, paged_engine  # noqa: F401

from rl.models import load_model
from rl.sampler import Engine, SamplingRequest, make_decoder
from rl.sampler.block_manager import BlockManager, BlockPool, OutOfBlocks


def check(tables: BlockManager) -> None:
    """Check that the reference counts match the tables, and that at most 1.1 times the tokens plus
    a page per row are allocated.

    A prompt that waits for rows counts as a row.
    """
    held = [0] * len(tables.pool.ref_counts)
    for page in itertools.chain(
        *(row.block_table for row in tables.rows),
        *(prompt.block_table for prompt in tables.prompts),
    ):
        held[page] += 1
    assert held == tables.pool.ref_counts
    assert tables.pool.num_free == held.count(0)
    full = {
        page for row in tables.rows for page in row.block_table[: row.length // tables.block_size]
    }
    ends = sum(row.length % tables.block_size for row in tables.rows)
    single = [prompt for prompt in tables.prompts if prompt.rows == 0]
    tokens = (
        len(full) * tables.block_size
        + ends
        + sum(prompt.length for prompt in single if prompt.block_table)
    )
    used = len(held) - tables.pool.num_free
    assert used * tables.block_size <= 1.1 * tokens + tables.block_size * (
        len(tables.rows) + len(single)
    )


@pytest.mark.parametrize("size", [1, 4, 7, 256])
def test_a_thousand_random_workloads_leak_no_page(size):
    """Prompts are admitted, shared and copied at the first write, and rows end, wait and return, in
    any order. Each row reads what was written for it. Rows grow by a token at a time; with large
    pages also by as many as fit between two syncs or more.
    """
    rng = np.random.default_rng(size)
    for _ in range(1000 // 4):
        tables = BlockManager(int(rng.integers(8, 40)), size)
        content = np.full(
            (len(tables.pool.ref_counts), size), -1
        )  # the token at each position of each page
        expected: list[list[int]] = []  # of each row, in order
        prompts: list[list[int]] = []
        for step in range(25):
            what = rng.random()
            if what < 0.25 and tables.pool.num_free:
                length = int(rng.integers(1, 3 * size + 2))
                if tables.num_blocks_for(length) <= tables.pool.num_free:
                    prompt = add_prompt(tables, length)
                    prompts.append([1000 * step + i for i in range(length)])
                    for i, token in enumerate(prompts[-1]):
                        content[prompt.block_table[i // size], i % size] = token
            elif what < 0.5 and tables.prompts:
                slot = int(rng.integers(len(tables.prompts)))
                if tables.prompts[slot].rows or tables.prompts[slot].block_table:
                    tables.add_row(slot)
                    expected.append(list(prompts[slot]))
            elif what < 0.85 and tables.rows:
                counts = rng.integers(1, size if size > 10 else 2, len(tables.rows)).tolist()
                if tables.blocks_needed(counts) > tables.pool.num_free:
                    continue
                for row, messages, count in zip(tables.rows, expected, counts, strict=True):
                    copy = tables.append_positions(row, count)
                    if copy is not None:
                        content[copy[1]] = content[copy[0]]
                    messages += rng.integers(1 << 30, size=count).tolist()
                    for at in range(row.length - count, row.length):
                        content[row.block_table[at // size], at % size] = messages[at]
            elif what < 0.95 and tables.rows:
                gone = int(rng.integers(len(tables.rows)))
                tables.drop_row(tables.rows.pop(gone))
                expected.pop(gone)
            elif tables.prompts:
                idle = [i for i, prompt in enumerate(tables.prompts) if prompt.rows == 0]
                for slot in idle[:1]:
                    tables.drop_prompt(tables.prompts.pop(slot))
                    prompts.pop(slot)
            check(tables)
            for row, messages in zip(tables.rows, expected, strict=True):
                assert content[row.block_table].ravel()[: row.length].tolist() == messages
        while tables.rows:
            tables.drop_row(tables.rows.pop())
        for prompt in tables.prompts:
            tables.drop_prompt(prompt)
        assert tables.pool.num_free == len(tables.pool.ref_counts)
        assert not any(tables.pool.ref_counts)


def test_a_pool_says_when_it_is_empty():
    pool = BlockPool(2)
    pages = [pool.allocate(), pool.allocate()]
    with pytest.raises(OutOfBlocks):
        pool.allocate()
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.num_free == 1


def perturbed_decoder():
    model = load_model("tiny:addition", seed=0).model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(
                0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            )
    return make_decoder(model, kind="fast")


@pytest.fixture(scope="module")
def decoder():
    return perturbed_decoder()


def make_workload(rng: np.random.Generator) -> list[SamplingRequest]:
    prompts = [rng.integers(0, 14, int(rng.integers(1, 14))).tolist() for _ in range(3)]
    return [
        make_request(
            prompts[int(rng.integers(3))],
            int(rng.integers(1, 5)),
            max_tokens=int(rng.integers(1, 12)),
            temperature=float(rng.choice([0.7, 1.0])),
            stop=[5] if i % 3 == 0 else None,
            problem=i,
            seed=4,
        )
        for i in range(int(rng.integers(1, 6)))
    ]


def run_requests(
    engine: Engine, requests: list[SamplingRequest]
) -> list[list[tuple[list[int], list[float]]]]:
    for request in requests:
        engine.add(request)
    return [[(s.tokens, s.logprobs) for s in response.sequences] for response in engine.run()]


def same_samples(decoder, seeds: range) -> int:
    """Run random workloads through both engines. Return the number of preemptions."""
    waited = 0
    for seed in seeds:
        rng = np.random.default_rng(seed)
        requests, page = make_workload(rng), int(rng.choice([2, 4, 8]))
        most = max(-(-(len(r.prompt) + r.params.max_tokens) // page) for r in requests)
        paged = paged_engine(
            decoder,
            kv_cache_tokens=page * (most + int(rng.integers(0, 8))),
            max_rows=int(rng.integers(1, 12)),
            page=page,
        )
        result = run_requests(paged, requests)
        expected = run_requests(Engine(decoder, kv_cache_tokens=100_000, max_rows=64), requests)
        for mine, plain in zip(itertools.chain(*result), itertools.chain(*expected), strict=True):
            assert mine[0] == plain[0]
            np.testing.assert_allclose(mine[1], plain[1], atol=1e-4)
        tables = paged._state.block_manager
        assert tables.pool.num_free == len(tables.pool.ref_counts) and not tables.rows
        waited += paged.preemptions
    return waited


def test_the_same_samples_as_the_plain_engine(decoder):
    """Holds for any number of pages; some rows of these workloads are preempted and resumed."""
    assert same_samples(decoder, range(6)) > 0


@pytest.mark.slow
def test_the_same_samples_as_the_plain_engine_in_many_workloads(decoder):
    assert same_samples(decoder, range(100, 140)) > 20


@pytest.mark.campaign
def test_the_same_samples_as_the_plain_engine_in_a_thousand_workloads(decoder):
    assert same_samples(decoder, range(1000, 2000)) > 500
