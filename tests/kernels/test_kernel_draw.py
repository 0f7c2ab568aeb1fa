"""Test `sample_tokens`: its torch path, and its kernels in Triton's interpreter, must draw the same
tokens as sampling from whole logits with the same random numbers.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from interpreting import INTERPRETED, mark_interpreted
from sampler_models import row_settings

from kernels import VocabShard, sample_tokens
from rl.sampler.running_rows import philox_uniforms
from rl.sampler.token_sampling import sample_tokens as from_logits
from rl.types import SamplingParams

pytest.importorskip("triton", reason="triton is not installed")


def stream(count: int, seed: int = 0) -> torch.Tensor:
    names = (np.full(count, seed, np.uint64), np.full(count, 7, np.uint64))
    numbers = np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64)
    return torch.from_numpy(philox_uniforms(*names, *numbers))


def kernels(x, w, temperature, uniform, greedy=None, shard=None, pick=(1024, 16)):
    """Run the launches at sizes that the interpreter handles quickly."""
    from interpreting import patch_once

    from kernels.sample_tokens_triton import sample_tokens as launch
    from kernels.tile_config import TileConfig

    patch_once()

    tiles = TileConfig(64 if len(x) < 500 else 1024, 64 if len(w) < 500 else 1024, 16, 4, 1)
    return launch(
        x, w, temperature, uniform, greedy, shard, tiles=tiles, splits=2, pick=pick,
        search=(512, 16),
    )  # fmt: skip


WAYS = {"torch": sample_tokens, "kernels": kernels}
WAY = "kernels" if INTERPRETED else "torch"


SIZES = [(200, 16, 700), (300, 7, 130), (64, 24, 64), (1, 8, 9), (5, 3, 1)]


@pytest.mark.parametrize(("N", "D", "V"), SIZES)
def test_equal_tokens_to_the_path_from_logits(N, D, V):
    """Sampling agrees with the logits path in float32: per-row temperatures, greedy rows, and a
    vocabulary of several slices whose last slice is partial.
    """
    seed = SIZES.index((N, D, V))
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g)
    temperatures = np.where(np.arange(N) % 5 == 3, 0.0, 0.3 + np.arange(N) % 4 * 0.4)
    params = [SamplingParams(temperature=float(number)) for number in temperatures]
    settings = row_settings(params, V, x.device)
    expected = from_logits(x @ w.t(), stream(N, seed), settings)
    greedy = torch.from_numpy(temperatures == 0)
    temperature = torch.where(greedy, 1.0, torch.from_numpy(temperatures).float())
    token, logp = WAYS[WAY](x, w, temperature, stream(N, seed), greedy)
    assert torch.equal(token, expected[0])
    torch.testing.assert_close(logp, expected[1], atol=2e-5, rtol=1e-5)


@mark_interpreted
@pytest.mark.parametrize("pick", [None, (1, 16), (2, 32)])
def test_a_program_for_each_row_picks_the_same_slice(pick):
    """The slice is the same whether all slices are read at once, as on a GPU, or block by block (35
    slices of 64).
    """
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(7, 12, generator=g), torch.randn(2200, 12, generator=g)
    greedy = torch.arange(7) == 3
    settings = (x, w, torch.full((7,), 0.9), stream(7, 5), greedy)
    expected = sample_tokens(*settings)
    token, logp = kernels(*settings, pick=pick)
    assert torch.equal(token, expected[0])
    torch.testing.assert_close(logp, expected[1], atol=2e-5, rtol=1e-5)


class Team:
    """Ranks that are threads, of which one computes at a time: the interpreter has global state."""

    def __init__(self, size):
        self.lock, self.barrier, self.parts = (
            threading.Lock(),
            threading.Barrier(size),
            [None] * size,
        )

    def shards(self, w):
        """Return the rows of each rank, and their shard."""
        size, results = len(self.parts), []
        for rank in range(size):
            first, end = (i * len(w) // size for i in (rank, rank + 1))

            def gather(x, rank=rank):
                self.parts[rank] = x.clone()
                self.lock.release()
                self.barrier.wait(60)
                parts = list(self.parts)
                self.barrier.wait(60)
                self.lock.acquire()
                return parts

            def reduce_(x, gather=gather):
                return x.copy_(sum(gather(x)))

            shard = VocabShard(rank, first, -(-len(w) // size), gather, reduce_)
            results.append((w[first:end], shard))
        return results

    def run(self, way, x, w, *settings):
        """Return the tokens and logprobs of each rank."""

        def work(rows, shard):
            with self.lock:
                return way(x, rows, *settings, shard)

        with ThreadPoolExecutor(len(self.parts)) as pool:
            futures = [pool.submit(work, *shard) for shard in self.shards(w)]
            return [future.result(120) for future in futures]


@pytest.mark.parametrize(("size", "V"), [(2, 700), (3, 130), (4, 2201), (4, 5)])
def test_ranks_that_hold_parts_of_the_vocabulary_draw_the_same(size, V):
    """Shards of unequal sizes, some of less than a slice; greedy rows. A number of 0 and the largest
    below 1 draw the first and the last token.
    """
    N, g = 40, torch.Generator().manual_seed(V)
    x, w = torch.randn(N, 12, generator=g), torch.randn(V, 12, generator=g)
    uniform, greedy = stream(N, size), torch.arange(N) % 5 == 3
    uniform[0], uniform[1] = 0.0, 1.0 - 2.0**-53
    settings = (torch.rand(N, generator=g) + 0.4, uniform, greedy)
    expected = sample_tokens(x, w, *settings)
    assert expected[0][:2].tolist() == [0, V - 1] and (V < 9 or len(expected[0].unique()) > 20)
    for token, logp in Team(size).run(WAYS[WAY], x, w, *settings):
        assert torch.equal(token, expected[0])
        torch.testing.assert_close(logp, expected[1], atol=2e-5, rtol=1e-5)
    w[V // 2] = float("nan")
    for token, logp in Team(size).run(WAYS[WAY], x, w, *settings):
        assert logp.isnan().all() and ((token >= 0) & (token < V)).all()


@pytest.mark.parametrize("size", [2, 3])
def test_ties_between_ranks_are_the_lowest_token_everywhere(size):
    """Every logit occurs on each rank, several times; whole numbers are exact in any order."""
    N, V, g = 16, 301, torch.Generator().manual_seed(size)
    x = torch.randint(-3, 4, (N, 12), generator=g).float()
    w = torch.randint(-3, 4, (7, 12), generator=g).float()[torch.arange(V) % 7]
    expected = (x @ w[:7].T).argmax(1)
    settings = (torch.ones(N), stream(N, size), torch.ones(N, dtype=torch.bool))
    for token, _ in Team(size).run(WAYS[WAY], x, w, *settings):
        assert torch.equal(token, expected)


def test_blocks_of_the_torch_path_are_shared_too(monkeypatch):
    """Several blocks on each rank; the last rank has one less than the widest."""
    monkeypatch.setattr(sys.modules["kernels.sample_tokens"], "COLUMNS", 16)
    g = torch.Generator().manual_seed(5)
    x, w = torch.randn(40, 12, generator=g), torch.randn(97, 12, generator=g)
    settings = (torch.ones(40), stream(40, 3), torch.arange(40) % 5 == 3)
    expected = sample_tokens(x, w, *settings)
    for token, logp in Team(3).run(sample_tokens, x, w, *settings):
        assert torch.equal(token, expected[0])
        torch.testing.assert_close(logp, expected[1], atol=2e-5, rtol=1e-5)


def test_where_the_number_is_at_an_end():
    """The number 0 draws the first possible token, and the largest number below 1 the last.
    Impossible tokens are never drawn.
    """
    w = torch.tensor([[-1e4], [0.0], [0.0], [-1e4]])
    uniform = torch.tensor([0.0, 1.0 - 2.0**-53, 0.4999, 0.5001], dtype=torch.float64)
    token, logp = WAYS[WAY](torch.ones(4, 1), w, torch.ones(4), uniform)
    assert token.tolist() == [1, 2, 1, 2]
    torch.testing.assert_close(logp, torch.full((4,), -np.log(2.0)).float())


def test_nan_weights_show_in_the_logprob():
    """The engine checks the logprob for NaN and reports that the weights have diverged."""
    x, w = torch.ones(2, 4), torch.randn(30, 4)
    w[7] = float("nan")
    token, logp = WAYS[WAY](x, w, torch.ones(2), torch.tensor([0.1, 0.9], dtype=torch.float64))
    assert logp.isnan().all() and ((token >= 0) & (token < 30)).all()


@mark_interpreted
@pytest.mark.slow
def test_a_hundred_random_cases_against_float64():
    """Draws agree with float64 for random sizes, dtypes, temperatures and greedy rows. The token is
    where float64's cumulative sum passes the number, or a neighbor within rounding of that point;
    the logprob is float64's.
    """
    rng = np.random.default_rng(1)
    for _ in range(100):
        N, D, V = int(rng.integers(1, 40)), int(rng.integers(1, 40)), int(rng.integers(1, 300))
        dtype = [torch.float32, torch.float16, torch.bfloat16][int(rng.integers(3))]
        g = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
        x = torch.randn(N, D, generator=g).to(dtype)
        w = (torch.randn(V, D, generator=g) * 0.7).to(dtype)
        temperature = torch.rand(N, generator=g) + 0.2
        uniform = torch.rand(N, generator=g, dtype=torch.float64)
        greedy = torch.rand(N, generator=g) < 0.2
        token, logp = kernels(x, w, temperature, uniform, greedy)
        exact = (x.double() @ w.double().t() / temperature.double()[:, None]).log_softmax(-1)
        torch.testing.assert_close(
            logp.double(), exact.gather(1, token[:, None])[:, 0], atol=1e-4, rtol=1e-4
        )
        after = exact.exp().cumsum(-1).gather(1, token[:, None])[:, 0]
        before = after - exact.gather(1, token[:, None])[:, 0].exp()
        drawn = ~greedy
        assert ((before <= uniform + 1e-5) & (uniform <= after + 1e-5))[drawn].all()
        assert (exact.gather(1, token[:, None])[:, 0] >= exact.amax(1) - 1e-5)[greedy].all()
