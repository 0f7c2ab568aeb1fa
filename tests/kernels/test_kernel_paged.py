"""Test attention over pages: torch's gathered implementation and the kernels (in Triton's
interpreter) against each row's whole softmax in float64.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from interpreting import INTERPRETED, SLOW_INTERPRETED

from kernels import UNBOUNDED, AttentionBounds, compute_paged_attention
from kernels.paged_attention import make_trial_inputs
from rl.sampler.block_tables import make_block_tables
from rl.sampler.decode_state import pad_right

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = SLOW_INTERPRETED
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Relative to the largest value: the error of float32's sums, plus that of rounding the softmax
# weights and the output to the operands' dtype.
ROUNDING = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.2e-2}


@pytest.fixture
def implementation(monkeypatch):
    """Return the function under test with at most that many programs: each costs 10 ms in the
    interpreter.
    """
    if not INTERPRETED:
        return lambda programs=24: compute_paged_attention
    from interpreting import patch_once

    from kernels import paged_attention_triton

    patch_once()

    def sized(programs=24):
        monkeypatch.setattr(paged_attention_triton, "MIN_PROGRAMS", programs)
        return paged_attention_triton.compute_paged_attention

    return sized


def batch(rng, size, most):
    """Build tables, lengths and groups of a few rows. Pages are in any order, each group has
    separate first pages, and lengths are at and around page boundaries.
    """
    tables, lengths, shared = [], [], []
    pages = iter(rng.permutation(200).tolist())

    def take(count):
        return [next(pages) for _ in range(count)]

    for _ in range(int(rng.integers(1, 4))):
        members, first = int(rng.integers(1, most)), int(rng.integers(1, 4))
        begin = take(first) if members > 1 else []
        if begin:
            shared.append((list(range(len(tables), len(tables) + members)), begin))
        for _ in range(members):
            count = int(rng.integers(1, 3))
            reference = int(
                rng.choice([1, size, count * size, int(rng.integers(1, count * size + 1))])
            )
            tables.append(begin + take(-(-reference // size)))
            lengths.append(len(begin) * size + reference)
    order = rng.permutation(len(tables))  # a group's rows are not adjacent
    where = np.argsort(order)
    shared = [(sorted(where[rows].tolist()), begin) for rows, begin in shared]
    return [tables[i] for i in order], np.array(lengths)[order], shared


def exact(q, kv, tables, lengths, bounds=UNBOUNDED):
    """Compute each row's softmax over the visible part of its sequence, in float64."""
    repeat, results = q.shape[1] // kv.shape[3], []
    for i, (table, length) in enumerate(zip(tables, lengths.tolist(), strict=True)):
        start = max(length - bounds.window, 0) if bounds.window else 0
        k, v = (
            x[table].flatten(0, 1)[start:length].double().repeat_interleave(repeat, 1) for x in kv
        )
        score = torch.einsum("hd,lhd->hl", q[i].double(), k) * q.shape[-1] ** -0.5
        if bounds.softcap:
            score = bounds.softcap * torch.tanh(score / bounds.softcap)
        results.append(torch.einsum("hl,lhd->hd", score.softmax(-1), v))
    return torch.stack(results)


def check_batch(implementation, rng, dtype, size, width, bounds=UNBOUNDED):
    """Compare attention for a random batch with `exact`; return its lengths and groups. Key heads
    have every number of repeats, and scores are large enough for limits to show.
    """
    g = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    key_heads, repeat = int(rng.integers(1, 3)), int(rng.choice([1, 2, 3, 7, 20]))
    tables, lengths, shared = batch(rng, size, int(rng.choice([2, 4, 7])))
    kv = torch.randn(2, 200, size, key_heads, width, generator=g).to(dtype)
    whole = 2 * torch.randn(len(tables), key_heads * repeat + 2, width + 3, generator=g).to(dtype)
    q = whole[:, 1:-1, :width]  # rows and heads that are not contiguous
    kv[:, [page for page in range(200) if not any(page in t for t in tables)]] = torch.nan
    group, blocks = np.full(len(tables), -1), np.zeros(len(tables), np.int64)
    for number, (members, begin) in enumerate(shared):
        group[members], blocks[members] = number, len(begin)
    padded = pad_right(tables).numpy()
    block_tables = make_block_tables(padded, lengths, group, blocks, size, kv.device)
    inputs = (q, kv, *block_tables, bounds)
    result = implementation(int(rng.choice([1, 8, 40])))(*inputs)
    truth = exact(q, kv, tables, lengths, bounds)
    assert result.dtype == dtype and result.shape == truth.shape
    bound = ROUNDING[dtype] * (1.0 + float(truth.abs().max()))
    assert float((result.double() - truth).abs().max()) <= bound
    return lengths, shared


def test_against_whole_softmaxes(implementation):
    """Attention agrees for all 60 triples of dtype, page size and width, including widths that are
    no power of two, with groups of any rows.
    """
    rng = np.random.default_rng(0)
    with_groups, most_splits = 0, 0
    for case in itertools.product(DTYPES, (3, 16, 64, 128), (5, 16, 20, 64, 80)):
        lengths, shared = check_batch(implementation, rng, *case)
        with_groups += bool(shared)
        most_splits = max(most_splits, int(lengths.max()))
    assert with_groups > 30 and most_splits > 256


def test_windows_and_limited_scores_against_whole_softmaxes(implementation):
    """Attention agrees for all 27 triples of dtype, page size and width: windows of one position,
    of part of a page and of more than a sequence; groups whose pages only some rows see; score
    limits near the size of the scores.
    """
    rng = np.random.default_rng(1)
    hidden = 0
    for dtype, size, width in itertools.product(DTYPES, (3, 16, 64), (16, 20, 64)):
        window = int(rng.choice([0, 1, 2, size, size + 1, 3 * size, 1000]))
        bounds = AttentionBounds(window, float(rng.choice([0.0, 0.7])))
        lengths, shared = check_batch(implementation, rng, dtype, size, width, bounds)
        for rows, begin in shared:
            seen = lengths[rows] - window < len(begin) * size
            hidden += bool(window) and not seen.all()
    assert hidden > 5


def make_trial(dtype, heads, key_heads, width, size):
    """Return queries, keys and values, block tables, lengths and groups of seven rows."""
    return make_trial_inputs(torch.device("cpu"), dtype, heads, key_heads, width, size)


def test_a_rows_bits_in_a_window_do_not_hang_on_its_neighbours(implementation):
    """The other rows of the group are shorter and see more of the group's pages."""
    q, kv, table, length, shared = make_trial(torch.float32, 4, 2, 16, 64)
    bounds, row = AttentionBounds(window=100), 2  # of the first group
    result = implementation()(q, kv, table, length, shared, bounds)
    others = torch.ones(7, dtype=torch.int32)
    others[row] = length[row]
    assert torch.equal(implementation()(q, kv, table, others, shared, bounds)[row], result[row])


def test_what_lies_behind_a_sequence_says_nothing(implementation):
    """NaN and infinities in the rest of a page, in pages past the table's end and in other rows
    change nothing.
    """
    q, kv, table, length, shared = make_trial(torch.float32, 4, 2, 16, 8)
    clean = implementation()(q, kv, table, length, shared)
    for i in range(7):
        for at in range(int(length[i]), 16):
            kv[:, table[i, at // 8].long(), at % 8] = torch.nan if at % 2 else torch.inf
    assert torch.equal(implementation()(q, kv, table, length, shared), clean)
    q[3] = torch.nan
    result = implementation()(q, kv, table, length, shared)
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(result[others], clean[others]) and result[3].isnan().all()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_far_from_zero(implementation, sign):
    """Scores near -300 or 300, where a sum of exponentials without a subtracted maximum underflows
    or overflows.
    """
    q, kv, table, length, shared = make_trial(torch.float32, 4, 2, 16, 8)
    q, kv = sign * (300 + q), (kv / 10).add_(torch.tensor([0.25, 0.0]).view(2, 1, 1, 1, 1))
    tables, lengths = [], []
    for i, place in enumerate(shared.place.tolist()):
        group = int(shared.group[place])
        count = int(shared.length[group]) // 8 if shared.shares[i] else 0
        tables.append([*shared.table[group, :count].tolist(), *table[i].tolist()])
        lengths.append(8 * count + int(length[i]))
    truth = exact(q, kv, tables, np.array(lengths))
    result = implementation()(q, kv, table, length, shared)
    torch.testing.assert_close(result.double(), truth, atol=1e-4, rtol=0)


def test_a_rows_bits_do_not_hang_on_its_neighbours(implementation):
    """A row has the same bits when the queries, lengths and pages of all other rows change and the
    number of rows does not.
    """
    q, kv, table, length, shared = make_trial(torch.bfloat16, 6, 2, 32, 64)
    row = 4  # in no group
    result = implementation()(q, kv, table, length, shared)
    other = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(q.dtype)
    other[row] = q[row]
    lengths = torch.tensor([128, 3, 77, 128, int(length[row]), 1, 90], dtype=torch.int32)
    tables = table.flip(0)
    tables[row] = table[row]
    for groups in (shared, replace(shared, length=shared.length // 2)):
        assert torch.equal(implementation()(other, kv, tables, lengths, groups)[row], result[row])


def test_splits_hang_on_the_number_of_rows_alone():
    from kernels.paged_attention_triton import MAX_SPLITS, choose_splits

    splits = {1: 32, 8: 32, 33: 32, 64: 16, 528: 2, 529: 1, 1056: 1, 1057: 1, 32_768: 1}
    assert {rows: choose_splits(rows) for rows in splits} == splits and MAX_SPLITS == 32


def test_a_way_that_fails_or_differs_is_not_taken(monkeypatch):
    """As on a device, the first implementation that agrees with the gathered numbers is used. One
    that raises, differs or is unavailable is skipped with a warning.
    """
    from kernels import paged_attention as module

    inputs = make_trial(torch.bfloat16, 4, 2, 16, 8)
    monkeypatch.setattr(module, "make_trial_inputs", lambda device, *rest: inputs)
    right = module.attend_and_merge(module.attend_gathered, *inputs)

    def taken(triton, varlen, has_varlen=True):
        def by(way, *args):
            result = {"triton": triton, "varlen": varlen}[way]
            if isinstance(result, Exception):
                raise result
            return result

        monkeypatch.setattr(module, "_run_backend", by)
        monkeypatch.setattr(module, "varlen_supports_pages", lambda: has_varlen)
        module._first_correct_backend.cache_clear()
        try:
            return module._first_correct_backend(0, torch.bfloat16, 4, 2, 16, 8)
        finally:
            module._first_correct_backend.cache_clear()

    assert taken(right, right) == "triton"
    no_image = "by triton gives wrong results on this device .RuntimeError: no kernel image.; using"
    with pytest.warns(UserWarning, match=no_image):
        assert taken(RuntimeError("no kernel image\nand more"), right) == "varlen"
    for wrong in (right + 0.5, right * torch.nan):
        with pytest.warns(UserWarning, match="outputs are .* apart"):
            assert taken(wrong, right) == "varlen"
    with pytest.warns(UserWarning, match="by triton"):
        assert taken(right + 0.5, right, has_varlen=False) == "gathered"
    with pytest.warns(UserWarning, match="by varlen"):
        assert taken(right + 0.5, right + 0.5) == "gathered"
