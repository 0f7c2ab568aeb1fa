"""Test the forecast of the blocks that rows will need, and engines that admit rows by it."""

import numpy as np
import pytest
from sampler_models import multistep_engine, one_thread, paged_engine, random_prompts, tiny_model  # noqa: F401

from rl.sampler import Engine, SamplingRequest, make_decoder
from rl.sampler.length_estimator import SPAN, LengthEstimator, RowTable
from rl.types import SamplingParams


def forecast(lengths: LengthEstimator, sampled: np.ndarray, limit: int, written: int = 0):
    """Return the forecast for rows with these sampled lengths and the same limit, in pages of 16."""
    none = np.zeros_like(sampled)
    rows = RowTable(written + sampled, sampled, limit - sampled, none)
    return lengths.blocks(rows, 16, sampled, int(limit - sampled.min()))


def test_until_a_sample_has_stopped_every_row_takes_what_its_limit_allows():
    lengths, sampled = LengthEstimator(), np.array([0, 5, 100])
    lengths.record(np.array([300, 300]), np.array([False, False]))
    result = forecast(lengths, sampled, 300, written=10)
    assert np.array_equal(result.mean, result.most) and not result.variance.any()
    assert result.mean[0] == 1 + 1 + 7 and result.most[-1] == 2 * 20  # the last row ends earlier


@pytest.mark.parametrize("law", ["geometric", "uniform", "nearly equal"])
def test_the_mean_is_that_of_rows_that_go_on_by_the_same_law(law):
    """The reference is 4,000 simulated rows; the forecast must stay on the safe side."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> np.ndarray:
        lengths = {
            "geometric": rng.geometric(1 / 200, count),
            "uniform": rng.integers(1, 601, count),
            "nearly equal": rng.integers(380, 420, count),
        }[law]
        return np.minimum(lengths, 1024)

    lengths, done = LengthEstimator(), draw(20_000)
    lengths.record(done, done < 1024)
    sampled, ends = rng.integers(0, 300, 4000), draw(400_000)
    # The final length of a row with n sampled tokens is the next random length above n.
    place, final = 0, np.zeros(4000, np.int64)
    for i, n in enumerate(sampled):
        while ends[place % len(ends)] <= n:
            place += 1
        final[i], place = ends[place % len(ends)], place + 1
    result = forecast(lengths, sampled, 1024)
    for j in range(len(result.mean)):
        time = j * SPAN
        truth = np.where(final >= sampled + time, -(-(sampled + time) // 16), 0).sum()
        # A span is the resolution in time. The forecast does not resolve row ends within it.
        before = max(time - SPAN, 0)
        most = np.where(final >= sampled + before, -(-(sampled + time) // 16), 0).sum()
        slack = 0.05 * result.mean[0] + 100
        assert truth - slack <= result.mean[j] <= most * 1.2 + slack
    assert result.mean[-1] < 0.1 * result.most.max()


def requests(seed: int) -> list[SamplingRequest]:
    params = SamplingParams(max_tokens=60, temperature=1.0)
    return [
        SamplingRequest(prompt=prompt, num_samples=6, problem=i, seed=seed, params=params)
        for i, prompt in enumerate(random_prompts([5, 17, 12, 9, 3, 14, 6, 11]))
    ]


@pytest.mark.parametrize("kind", [paged_engine, multistep_engine])
def test_rows_that_are_admitted_by_expected_length_are_not_preempted(kind):
    """The samples equal the plain engine's. Without the forecast, rows are preempted, and all rows
    run sequentially if every sample reaches its limit.
    """
    decoder, preempted = make_decoder(tiny_model("qwen3"), kind="fast"), {}
    for expects in (True, False):
        preempted[expects] = 0
        for seed in range(2):
            engine = kind(decoder, (3, 4), page=4, kv_cache_tokens=400)
            engine.expects_lengths = expects
            plain = Engine(decoder, (3, 4))
            for request in requests(seed):
                engine.add(request)
                plain.add(request)
            mine, expected = engine.run(), plain.run()
            for a, b in zip(mine, expected, strict=True):
                assert [s.tokens for s in a.sequences] == [s.tokens for s in b.sequences]
            preempted[expects] += engine.preemptions
            assert engine.counters.peak_rows > 4
    assert preempted[True] == 0 < preempted[False]
