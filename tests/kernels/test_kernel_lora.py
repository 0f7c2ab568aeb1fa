"""Test the low-rank products of a decode step: torch's path against float64, the kernels in
Triton's interpreter and compiled for every kind of GPU.
"""

import itertools

import numpy as np
import pytest
import torch
from interpreting import INTERPRETED, run_interpreted
from test_kernel_compile import build

from kernels import lora_ops

pytest.importorskip("triton", reason="triton is not installed")


def test_the_products_in_the_interpreter():
    run_interpreted(__file__, "not slow")


test_the_products_in_the_interpreter.__test__ = not INTERPRETED  # type: ignore[attr-defined]


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


MODELS = [(896, 96), (4096, 96), (14336, 32)]  # inputs of a layer, ranks of its adapters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "kind"), itertools.product([80, 86, 89, 90, 100, 120], ["fp32", "bf16"])
)
def test_the_products_compile_without_spills(capability, kind, tmp_path):
    import triton

    from kernels import lora_ops_triton as kernels

    for inputs, ranks in MODELS:
        splits = kernels.choose_splits(inputs)
        options = {
            "R": ranks, "BM": 32, "UPCAST": False,
            "PRECISION": "tf32x3" if kind == "fp32" else "ieee",
        }  # fmt: skip
        each = triton.cdiv(triton.cdiv(inputs, splits), 64) * 64
        down = options | {"D": inputs, "EACH": each, "BR": 32, "BK": 32}
        kinds = {"x_ptr": "*bf16", "a_ptr": f"*{kind}", "stride_a": "i32"}
        _, spilled = build(kernels._lora_down_kernel, down, (), 4, 3, kinds, tmp_path, capability)
        assert spilled == 0
        columns = kernels.choose_columns({"fp32": torch.float32, "bf16": torch.bfloat16}[kind])
        up = options | {"SPLITS": splits, "PARTS": 3, "BN": columns, "BR": 32}
        kinds = {"y_ptr": "*bf16", "stride_y": "i32"}
        for i in range(3):
            kinds |= {f"b{i}_ptr": f"*{kind}", f"scale_{i}": "fp32"}
            kinds |= {
                f"{name}_{i}": "i32" for name in ("end", "column", "columns", "rank", "ranks")
            }
        _, spilled = build(kernels._lora_up_kernel, up, (), 4, 3, kinds, tmp_path, capability)
        assert spilled == 0
