"""Test the low-rank products of a decode step against float64: torch's path, and the kernels in
Triton's interpreter.
"""

import numpy as np
import pytest
import torch
from interpreting import INTERPRETED

from kernels import lora_ops

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
    (torch.float32, torch.bfloat16, 8e-3),
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
