"""Test temperature, top-k, top-p and the sampling step against plain Python over single rows."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampler_models import row_settings

from rl.sampler.running_rows import make_param_columns
from rl.sampler.token_sampling import (
    RowSamplingSettings,
    sample_inverse_cdf,
    sample_next_tokens,
    sample_tokens,
    truncate_logits,
)
from rl.types import SamplingParams


def settings_of(rows: list[tuple], vocab: int) -> RowSamplingSettings:
    """Return settings for rows (temperature, top_k, top_p)."""
    return row_settings([make_params(row) for row in rows], vocab)


def make_params(row: tuple) -> SamplingParams:
    """Return the parameters of a row (temperature, top_k, top_p[, min_p])."""
    names = ("temperature", "top_k", "top_p", "min_p")
    return SamplingParams(**dict(zip(names, row, strict=False)))


def compute_brute_distribution(
    logits: list[float], temperature: float, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """Return the probabilities after truncation: rank by (-logit, id), drop those below min_p times
    the largest, keep k, keep until the mass before a token reaches p.
    """
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    ranked = [i for i in ranked if weights[i] >= min_p][: top_k if top_k > 0 else None]
    total, before, kept = sum(weights[i] for i in ranked), 0.0, []
    for i in ranked:
        if before >= top_p and kept:
            break
        kept.append(i)
        before += weights[i] / total
    mass = sum(weights[i] for i in kept)
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(logits))]


CUTS = [
    *((-1, 1.0), (3, 1.0), (-1, 0.7), (5, 0.6), (1, 1.0), (-1, 1e-9), (100, 0.999)),
    *(cut + (min_p,) for cut in ((-1, 1.0), (4, 1.0), (-1, 0.6)) for min_p in (0.05, 0.5, 1.0)),
]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_cuts_and_logprobs_against_brute_force(temperature, cut):
    torch.manual_seed(0)
    logits = torch.randn(40, 12) * 2
    logits[0, 3] = logits[0, 7]  # a tie
    uniform = torch.rand(40, dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, uniform, settings_of([(temperature, *cut)] * 40, 12))
    for row in range(40):
        expected = compute_brute_distribution(logits[row].tolist(), temperature, *cut)
        cumulative = np.cumsum(expected)
        number = uniform[row].item() * cumulative[-1]
        assert tokens[row] == int(np.searchsorted(cumulative, number, side="right"))
        assert math.isclose(logprobs[row], math.log(expected[tokens[row]]), abs_tol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
def test_logprobs_of_the_whole_distribution_beside_cuts(temperature):
    """The tokens equal those with truncated logprobs, and rows with both kinds of logprobs share a
    batch.
    """
    torch.manual_seed(2)
    cuts = [(3, 1.0), (-1, 0.7), (5, 0.6), (1, 1.0), (-1, 1.0)]
    params = [make_params((temperature, *cut)) for cut in cuts for _ in range(2)]
    both = [replace(p, untruncated_logprobs=i % 2 == 0) for i, p in enumerate(params)]
    logits, uniform = torch.randn(10, 12) * 2, torch.rand(10, dtype=torch.float64)
    columns = make_param_columns(both) | {"num_sampled": np.zeros(10, np.int64)}
    settings = row_settings(params, 12)
    tokens, logprobs = sample_next_tokens(logits, uniform, settings, columns, {})
    usual_tokens, usual = sample_tokens(logits, uniform, settings)
    assert tokens.tolist() == usual_tokens.tolist()
    assert torch.equal(logprobs[1::2], usual[1::2])
    for i in range(0, 10, 2):
        expected = compute_brute_distribution(logits[i].tolist(), temperature or 1.0)
        assert math.isclose(logprobs[i], math.log(expected[tokens[i]]), abs_tol=1e-5)


def test_rows_with_their_own_settings_do_not_disturb_each_other():
    torch.manual_seed(1)
    rows = [(1.0, -1, 1.0), (0.0, -1, 1.0), (0.7, 3, 1.0), (2.0, -1, 0.5), (0.0, 2, 0.3)]
    logits, uniform = torch.randn(5, 30), torch.rand(5, dtype=torch.float64)
    tokens, logprobs = sample_tokens(logits, uniform, settings_of(rows, 30))
    for i, row in enumerate(rows):
        token, logprob = sample_tokens(
            logits[i : i + 1], uniform[i : i + 1], settings_of([row], 30)
        )
        assert token[0] == tokens[i] and abs(logprob[0] - logprobs[i]) < 1e-6


def test_greedy_takes_the_lowest_of_equal_logits_and_reports_the_untempered_logprob():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    tokens, logprobs = sample_tokens(
        logits, torch.tensor([0.99], dtype=torch.float64), settings_of([(0.0, -1, 1.0)], 4)
    )
    assert tokens.tolist() == [1]
    assert abs(logprobs[0] - (2 - math.log(1 + 2 * math.e**2 + math.e))) < 1e-6


def test_top_k_ties_keep_the_lowest_ids():
    cut = truncate_logits(
        torch.tensor([[1.0, 1.0, 1.0, 0.0]]),
        torch.tensor([2]),
        torch.tensor([1.0], dtype=torch.float64),
    )
    assert cut.isfinite().tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("top_p", [1.0, 0.9999])
def test_a_top_p_of_1_keeps_every_token(top_p):
    """The float64 sum of float32 probabilities may exceed 1 before the last tokens."""
    torch.manual_seed(0)
    logits = torch.randn(8, 20_000) * 2
    probability = logits.sort(-1, descending=True)[0].softmax(-1).double()
    assert (probability.cumsum(-1) - probability >= 1).any()
    cut = truncate_logits(logits, torch.full((8,), 20_000), torch.full((8,), top_p).double())
    assert torch.equal(cut, logits) == (top_p == 1)


@pytest.mark.parametrize("vocab", [7, 512, 513, 5000, 151_936])
def test_inverse_cdf_equals_exact_sums_and_never_takes_weight_zero(vocab):
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(6, vocab, generator=generator) ** 8
    weights[:, torch.rand(vocab, generator=generator) < 0.5] = 0
    weights[:, vocab // 2] = 0.25
    weights[5] = 0
    weights[5, vocab - 2] = 1e-30  # a single tiny weight, near the end
    uniform = torch.tensor([0.0, 1 - 2**-53, 0.5, 0.123456, 0.999999, 0.7], dtype=torch.float64)
    tokens, totals = sample_inverse_cdf(weights, uniform)
    for row in range(6):
        exact = np.cumsum(weights[row].numpy().astype(np.longdouble))
        assert weights[row, tokens[row]] > 0
        expected = int(
            np.searchsorted(exact, np.longdouble(uniform[row].item()) * exact[-1], side="right")
        )
        # at 1 - 2^-53 the last few tokens lie within rounding; only a weight above zero is required
        if row != 1:
            assert tokens[row] == expected
        assert math.isclose(totals[row], float(exact[-1]), rel_tol=1e-12)


def test_half_precision_logits_are_normalised_in_float32():
    torch.manual_seed(0)
    logits = (torch.randn(3, 2000) * 3).bfloat16()
    tokens, logprobs = sample_tokens(
        logits, torch.rand(3, dtype=torch.float64), RowSamplingSettings()
    )
    expected = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    assert (logprobs - expected).abs().max() < 1e-5
