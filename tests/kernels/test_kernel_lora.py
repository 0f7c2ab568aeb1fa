"""Test the low-rank products of a decode step against float64: torch's path, and the kernels in
Triton's interpreter.
"""

import numpy as np
import pytest
import torch
from interpreting import INTERPRETED, SLOW_INTERPRETED

from kernels import lora_ops
from kernels.adapter_table import AdapterTable
from kernels.device_checks import outputs_agree

pytest.importorskip("triton", reason="triton is not installed")


def get_implementation():
    if not INTERPRETED:
        return lora_ops.add_lora_
    from interpreting import patch_once

    from kernels import lora_ops_triton

    patch_once()
    return lora_ops_triton.add_lora_


def case(rng, g, adapter, kind):
    """Build a random case: one to three adapters of different ranks on some of a layer's
    outputs.
    """
    rows, inputs = int(rng.integers(1, 40)), int(rng.choice([7, 64, 100, 1500, 2049]))
    x = torch.randn(rows, inputs, generator=g).to(kind)
    ranks = rng.integers(1, 40, int(rng.integers(1, 4))).tolist()
    a = (torch.randn(sum(ranks), inputs, generator=g) / inputs**0.5).to(adapter)
    parts, column, rank = [], int(rng.integers(0, 5)), 0
    for depth in ranks:
        width = int(rng.integers(1, 140))
        b = (torch.randn(width, depth, generator=g) / depth**0.5).to(adapter)
        columns, rows_of_a = slice(column, column + width), slice(rank, rank + depth)
        parts.append((b, float(rng.choice([0.5, 1.0, 2.0])), columns, rows_of_a))
        column, rank = column + width + int(rng.integers(0, 4)), rank + depth
    return x, a, parts, torch.randn(rows, column + 3, generator=g).to(kind)


DTYPES = [
    (torch.float32, torch.float32, 2e-6),
    pytest.param(torch.float32, torch.bfloat16, 8e-3, marks=SLOW_INTERPRETED),
    (torch.bfloat16, torch.bfloat16, 3e-2),
]


@pytest.mark.parametrize(("adapter", "kind", "rounding"), DTYPES)
def test_every_adapter_adds_its_product_to_its_columns(adapter, kind, rounding):
    rng, g = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for _ in range(8):
        x, a, parts, y = case(rng, g, adapter, kind)
        exact = y.double()
        for b, scale, columns, ranks in parts:
            exact[:, columns] += scale * (x.double() @ a[ranks].double().T) @ b.double().T
        get_implementation()(y, x, a, parts)
        assert y.dtype == kind
        assert float((y.double() - exact).abs().max()) <= rounding * (1 + float(exact.abs().max()))


def get_row_implementation():
    if not INTERPRETED:
        return lora_ops.add_row_lora_
    get_implementation()
    from kernels import lora_ops_triton

    return lora_ops_triton.add_row_lora_


def make_table(g, inputs, modules, adapter, present):
    """Build a table of three slots: the first is empty, the second has adapters on some of the
    modules, the third on all. `present`: whether the second has any.
    """
    device = torch.device("cpu")
    table = AdapterTable.allocate(3, modules, inputs, 16, adapter, device)
    for slot, of_slot in ((1, modules[::2] if present else ()), (2, modules)):
        parts, rank = [], 0
        for i, module in enumerate(of_slot):
            depth, width = (1, 5, 16)[(i + slot) % 3], module.stop - module.start
            b = (torch.randn(width, depth, generator=g) / depth**0.5).to(adapter)
            parts.append((b, 0.5 * slot + 0.25 * i, module, slice(rank, rank + depth)))
            rank += depth
        a = (torch.randn(rank, inputs, generator=g) / inputs**0.5).to(adapter)
        if parts:
            table.write(slot, a, parts)
    return table


@pytest.mark.parametrize("embeds", [False, True])
@pytest.mark.parametrize(("adapter", "kind", "rounding"), DTYPES)
def test_each_row_gets_the_products_of_its_slot(adapter, kind, rounding, embeds):
    """Rows without an adapter, and those in no tile, keep their bits. The weights of a slot that
    are not finite reach its rows only.
    """
    rng, g = np.random.default_rng(0), torch.Generator().manual_seed(0)
    for case_number in range(6):
        count, inputs = int(rng.integers(1, 45)), int(rng.choice([7, 100, 1500]))
        widths = rng.integers(1, 140, 1 if embeds else int(rng.integers(1, 4))).tolist()
        ends = np.cumsum(widths).tolist()
        modules = tuple(slice(end - width, end) for end, width in zip(ends, widths, strict=True))
        table = make_table(g, inputs, modules, adapter, case_number % 3 > 0)
        slots = rng.integers(0, 3, count)
        tiles = torch.full((count // 16 + 3, 17), -1, dtype=torch.int32)
        tiles[:, 0], at = 0, 0
        for slot in (2, 1):
            rows = torch.from_numpy(np.flatnonzero(slots == slot))
            for part in rows.split(16):
                tiles[at, 0], tiles[at, 1 : 1 + len(part)], at = slot, part.int(), at + 1
        if embeds:
            x = torch.randint(0, inputs, (count,), generator=g)
            one_hot = torch.nn.functional.one_hot(x, inputs).double()
        else:
            x = torch.randn(count, inputs, generator=g).to(kind)
            one_hot = x.double()
        y = torch.randn(count, ends[-1], generator=g).to(kind)
        exact = y.double()
        for row, slot in enumerate(slots):
            for b, scale, columns, ranks in (table.adapters[slot] or (0, ()))[1]:
                low = table.adapters[slot][0][ranks].double() @ one_hot[row]
                exact[row, columns] += scale * b.double() @ low
        result = y.clone()
        get_row_implementation()(result, x, table, tiles)
        assert float((result.double() - exact).abs().max()) <= rounding * (
            1 + float(exact.abs().max())
        )
        table.adapters[2][0].fill_(torch.nan)
        table.adapters[2][1][0][0].fill_(torch.inf)
        broken = y.clone()
        get_row_implementation()(broken, x, table, tiles)
        others = torch.from_numpy(slots != 2)
        assert torch.equal(broken[others], result[others])
        assert bool(broken[~others].isnan().any(1).all())
        assert torch.equal(broken[slots == 0], y[slots == 0])


def test_the_trial_compares_the_kernels_with_torch():
    """Rows 37 to 39 are in no tile. A planted fault is seen."""
    device, dtype = torch.device("cpu"), torch.float32
    expected = lora_ops.run_row_lora_trial(False, device, dtype)
    assert outputs_agree(expected, expected) and len(expected) == 3
    if INTERPRETED:
        get_implementation()
        assert outputs_agree(lora_ops.run_row_lora_trial(True, device, dtype), expected)
    wrong = [y.clone() for y in expected]
    wrong[0][40, 3] += 0.01
    assert not outputs_agree(tuple(wrong), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_trial_allows_the_rounding_of_other_sums_and_no_more(dtype, monkeypatch):
    """Sums that differ by some 1e-6 round to other numbers now and then, as those of another kernel
    do. Wrong rows or columns are seen in each case.
    """
    device, linear = torch.device("cpu"), torch.nn.functional.linear
    g = torch.Generator().manual_seed(0)
    expected = lora_ops.run_row_lora_trial(False, device, dtype)

    def sum_otherwise(x, weight):
        y = linear(x.double(), weight.double())
        return (y * (1 + 1e-6 * torch.randn(y.shape, generator=g))).to(x.dtype)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", sum_otherwise)
        outputs = lora_ops.run_row_lora_trial(False, device, dtype)
    assert all(not torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
    assert outputs_agree(outputs, expected)
    cases = [*expected[:2], *expected[2]]
    for i, case in enumerate(cases):
        for dim in (0, 1):
            wrong = [*cases[:i], case.roll(1, dim), *cases[i + 1 :]]
            assert not outputs_agree((*wrong[:2], torch.stack(wrong[2:])), expected)
