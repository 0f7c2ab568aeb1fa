"""Implement `add_lora_` in Triton: a kernel for x A^T of all adapters of a layer, a kernel for the
products with every B, which adds them to the output.

The sum over the inputs is split among programs, and the second kernel adds the parts in a fixed
order. Sums are float32 (tf32x3 on tensor cores for float32 adapters), rounded where torch rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.matmul_operands import is_interpreting

BATCH = ("N",)
MAX_PARTS = 3  # adapters of a fused layer: q, k and v


@triton.jit(do_not_specialize=BATCH)
def _lora_down_kernel(
    x_ptr, a_ptr, low_ptr, N, stride_x, stride_a,
    D: tl.constexpr, R: tl.constexpr, EACH: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store low[split, row, rank], the sum of x[row, k] A[rank, k] over EACH inputs of a split."""
    split = tl.program_id(2)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ranks = tl.program_id(1) * BR + tl.arange(0, BR)
    acc = tl.zeros((BM, BR), tl.float32)
    for k in tl.range(split * EACH, tl.minimum(split * EACH + EACH, D), BK):
        depth = k + tl.arange(0, BK)
        within = (depth < D) & (depth < split * EACH + EACH)
        x = tl.load(
            x_ptr + rows.to(tl.int64)[:, None] * stride_x + depth[None, :],
            mask=(rows < N)[:, None] & within[None, :],
            other=0.0,
        )
        a = tl.load(
            a_ptr + ranks[None, :] * stride_a + depth[:, None],
            mask=(ranks < R)[None, :] & within[:, None],
            other=0.0,
        )
        x = x.to(a.dtype)
        if UPCAST:  # the interpreter multiplies bfloat16 wrongly
            x = x.to(tl.float32)
            a = a.to(tl.float32)
        acc = tl.dot(x, a, acc, input_precision=PRECISION)
    at = (split * N + rows).to(tl.int64)[:, None] * R + ranks[None, :]
    tl.store(low_ptr + at, acc, mask=(rows < N)[:, None] & (ranks < R)[None, :])


@triton.jit
def _lora_up(
    b_ptr, low_ptr, y_ptr, scale, block, row_block, N, first_column, columns, first_rank, ranks,
    stride_y, R: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the product of a block of rows and a block of columns of an adapter to y."""
    rows = row_block * BM + tl.arange(0, BM)
    cols = block * BN + tl.arange(0, BN)
    place = tl.arange(0, BR)
    kind = b_ptr.dtype.element_ty
    inside = (rows < N)[:, None] & (place < ranks)[None, :]
    low = tl.zeros((BM, BR), tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * N + rows).to(tl.int64)[:, None] * R + first_rank + place[None, :]
        low += tl.load(low_ptr + at, mask=inside, other=0.0)
    b = tl.load(
        b_ptr + cols[None, :] * ranks + place[:, None],
        mask=(cols < columns)[None, :] & (place < ranks)[:, None],
        other=0.0,
    )
    low = low.to(kind)
    if UPCAST:
        low = low.to(tl.float32)
        b = b.to(tl.float32)
    delta = tl.dot(low, b, input_precision=PRECISION).to(kind).to(tl.float32)
    delta = (delta * scale).to(kind).to(y_ptr.dtype.element_ty).to(tl.float32)
    mask = (rows < N)[:, None] & (cols < columns)[None, :]
    to = y_ptr + rows.to(tl.int64)[:, None] * stride_y + first_column + cols[None, :]
    y = tl.load(to, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, (y + delta).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=BATCH)
def _lora_up_kernel(
    low_ptr, y_ptr, N, stride_y,
    b0_ptr, scale_0, end_0, column_0, columns_0, rank_0, ranks_0,
    b1_ptr, scale_1, end_1, column_1, columns_1, rank_1, ranks_1,
    b2_ptr, scale_2, end_2, column_2, columns_2, rank_2, ranks_2,
    R: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products of all adapters: a program for each block of rows and block of columns of an
    adapter, `end_i` blocks of columns up to the end of adapter i.
    """
    row_block, block = tl.program_id(0), tl.program_id(1)
    if block < end_0:
        _lora_up(b0_ptr, low_ptr, y_ptr, scale_0, block, row_block, N, column_0, columns_0, rank_0,
                 ranks_0, stride_y, R, SPLITS, BM, BN, BR, UPCAST, PRECISION)  # fmt: skip
    elif PARTS > 1:
        if block < end_1:
            _lora_up(b1_ptr, low_ptr, y_ptr, scale_1, block - end_0, row_block, N, column_1,
                     columns_1, rank_1, ranks_1, stride_y, R, SPLITS, BM, BN, BR, UPCAST,
                     PRECISION)  # fmt: skip
        elif PARTS > 2:
            _lora_up(b2_ptr, low_ptr, y_ptr, scale_2, block - end_1, row_block, N, column_2,
                     columns_2, rank_2, ranks_2, stride_y, R, SPLITS, BM, BN, BR, UPCAST,
                     PRECISION)  # fmt: skip


# ------------------------------------------------------------------------------------------- launch


def choose_splits(inputs: int) -> int:
    """Return the number of parts into which the sum over the inputs is split; it depends on their
    number only, so that a row's bits do not depend on the batch.
    """
    return min(-(-inputs // 1024), 8)


def choose_columns(adapter: torch.dtype) -> int:
    """Return the outputs of a program: with more, float32 adapters spill registers on sm_80."""
    return 32 if adapter == torch.float32 else 64


def add_lora_(
    y: Tensor,
    x: Tensor,
    a_RI: Tensor,
    parts: Sequence[tuple[Tensor, float, slice, slice]],
) -> None:
    """Launch the kernels of kernels.lora_ops.add_lora_."""
    (N, inputs), ranks = x.shape, len(a_RI)
    columns = choose_columns(a_RI.dtype)
    x = x if x.stride(1) == 1 else x.contiguous()
    splits = choose_splits(inputs)
    low = torch.empty((splits, N, ranks), dtype=torch.float32, device=x.device)
    rows = 16 if N <= 16 else 32
    options = {
        "R": ranks,
        "BM": rows,
        "UPCAST": is_interpreting(),
        "PRECISION": "tf32x3" if a_RI.dtype == torch.float32 else "ieee",
        "num_warps": 4,
    }
    each = triton.cdiv(triton.cdiv(inputs, splits), 64) * 64
    rank_block = min(max(triton.next_power_of_2(ranks), 16), 32)
    _lora_down_kernel[(triton.cdiv(N, rows), triton.cdiv(ranks, rank_block), splits)](
        x, a_RI, low, N, x.stride(0), a_RI.stride(0), D=inputs, EACH=each, BR=rank_block, BK=32,
        **options,
    )  # fmt: skip
    arguments, end = [], 0
    for b_OR, scale, outputs, part_ranks in parts:
        width, depth = b_OR.shape
        end += triton.cdiv(width, columns)
        arguments += [
            b_OR.contiguous(), scale, end, outputs.start, width, part_ranks.start, depth
        ]  # fmt: skip
    arguments += arguments[:7] * (MAX_PARTS - len(parts))
    most = max(b_OR.shape[1] for b_OR, *_ in parts)
    _lora_up_kernel[(triton.cdiv(N, rows), end)](
        low, y, N, y.stride(0), *arguments, SPLITS=splits, PARTS=len(parts), BN=columns,
        BR=max(triton.next_power_of_2(most), 16), **options,
    )  # fmt: skip
