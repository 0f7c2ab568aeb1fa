"""Implement `add_lora_` and `add_row_lora_` in Triton: a kernel for x A^T of all adapters of a
layer, a kernel for the products with every B, which adds them to the output.

The sum over the inputs is split among programs, and the second kernel adds the parts in a fixed
order. Sums are float32 (tf32x3 on tensor cores for float32 adapters), rounded where torch rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adapter_table import MAX_PARTS, TILE_ROWS, AdapterTable
from kernels.matmul_operands import is_interpreting

BATCH = ("N",)
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _lora_down(
    x_ptr, a_ptr, low_ptr, split, rows, is_row, ranks, N, count, stride_x, stride_a,
    D: tl.constexpr, R: tl.constexpr, EACH: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store low[split, row, rank] of some rows and ranks below `count`: the sum of x[row, k]
    A[rank, k] over EACH inputs of a split.
    """
    acc = tl.zeros((BM, BR), tl.float32)
    for k in tl.range(split * EACH, tl.minimum(split * EACH + EACH, D), BK):
        depth = k + tl.arange(0, BK)
        within = (depth < D) & (depth < split * EACH + EACH)
        x = tl.load(
            x_ptr + rows.to(tl.int64)[:, None] * stride_x + depth[None, :],
            mask=is_row[:, None] & within[None, :],
            other=0.0,
        )
        a = tl.load(
            a_ptr + ranks[None, :] * stride_a + depth[:, None],
            mask=(ranks < count)[None, :] & within[:, None],
            other=0.0,
        )
        x = x.to(a.dtype)
        if UPCAST:  # the interpreter multiplies bfloat16 wrongly
            x = x.to(tl.float32)
            a = a.to(tl.float32)
        acc = tl.dot(x, a, acc, input_precision=PRECISION)
    at = (split * N + rows).to(tl.int64)[:, None] * R + ranks[None, :]
    tl.store(low_ptr + at, acc, mask=is_row[:, None] & (ranks < count)[None, :])


@triton.jit(do_not_specialize=BATCH)
def _lora_down_kernel(
    x_ptr, a_ptr, low_ptr, N, stride_x, stride_a,
    D: tl.constexpr, R: tl.constexpr, EACH: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute x A^T of all rows (`_lora_down`)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    ranks = tl.program_id(1) * BR + tl.arange(0, BR)
    _lora_down(x_ptr, a_ptr, low_ptr, tl.program_id(2), rows, rows < N, ranks, N, R, stride_x,
               stride_a, D, R, EACH, BM, BR, BK, UPCAST, PRECISION)  # fmt: skip


@triton.jit(do_not_specialize=BATCH)
def _row_lora_down_kernel(
    x_ptr, address_ptr, tile_ptr, low_ptr, N, stride_x,
    D: tl.constexpr, R: tl.constexpr, EACH: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, FIELDS: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Compute x A^T of the rows of a tile with the A of its slot (`_lora_down`)."""
    tile_ptr += tl.program_id(0) * (1 + BM)
    slot = tl.load(tile_ptr)
    if slot > 0:
        address_ptr += slot * FIELDS
        address, count = tl.load(address_ptr), tl.load(address_ptr + 1).to(tl.int32)
        if tl.program_id(1) * BR < count:
            rows = tl.load(tile_ptr + 1 + tl.arange(0, BM))
            ranks = tl.program_id(1) * BR + tl.arange(0, BR)
            a_ptr = address.to(tl.pointer_type(KIND))
            _lora_down(x_ptr, a_ptr, low_ptr, tl.program_id(2), rows, rows >= 0, ranks, N, count,
                       stride_x, D, D, R, EACH, BM, BR, BK, UPCAST, PRECISION)  # fmt: skip


@triton.jit(do_not_specialize=BATCH)
def _row_lora_embed_kernel(
    id_ptr, address_ptr, tile_ptr, low_ptr, N, D: tl.constexpr, R: tl.constexpr, BM: tl.constexpr,
    BR: tl.constexpr, FIELDS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Store low[0, row, rank], the column of the row's token in the A [ranks, D] of its slot."""
    tile_ptr += tl.program_id(0) * (1 + BM)
    slot = tl.load(tile_ptr)
    if slot > 0:
        address_ptr += slot * FIELDS
        address, count = tl.load(address_ptr), tl.load(address_ptr + 1)
        rows = tl.load(tile_ptr + 1 + tl.arange(0, BM))
        ranks = tl.program_id(1) * BR + tl.arange(0, BR)
        mask = (rows >= 0)[:, None] & (ranks < count)[None, :]
        ids = tl.load(id_ptr + rows, mask=rows >= 0, other=0)
        a_ptr = address.to(tl.pointer_type(KIND))
        at = ranks.to(tl.int64)[None, :] * D + ids[:, None]
        low = tl.load(a_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(low_ptr + rows.to(tl.int64)[:, None] * R + ranks[None, :], low, mask=mask)


@triton.jit
def _lora_up(
    b_ptr, low_ptr, y_ptr, scale, block, rows, N, first_column, columns, first_rank, ranks,
    stride_y, R: tl.constexpr, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the product of some rows (-1: none) and a block of columns of an adapter to y."""
    is_row = (rows >= 0) & (rows < N)
    cols = block * BN + tl.arange(0, BN)
    place = tl.arange(0, BR)
    kind = b_ptr.dtype.element_ty
    inside = is_row[:, None] & (place < ranks)[None, :]
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
    mask = is_row[:, None] & (cols < columns)[None, :]
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
        rows = row_block * BM + tl.arange(0, BM)
        _lora_up(b0_ptr, low_ptr, y_ptr, scale_0, block, rows, N, column_0, columns_0, rank_0,
                 ranks_0, stride_y, R, SPLITS, BM, BN, BR, UPCAST, PRECISION)  # fmt: skip
    elif PARTS > 1:
        if block < end_1:
            rows = row_block * BM + tl.arange(0, BM)
            _lora_up(b1_ptr, low_ptr, y_ptr, scale_1, block - end_0, rows, N, column_1, columns_1,
                     rank_1, ranks_1, stride_y, R, SPLITS, BM, BN, BR, UPCAST,
                     PRECISION)  # fmt: skip
        elif PARTS > 2:
            rows = row_block * BM + tl.arange(0, BM)
            _lora_up(b2_ptr, low_ptr, y_ptr, scale_2, block - end_1, rows, N, column_2, columns_2,
                     rank_2, ranks_2, stride_y, R, SPLITS, BM, BN, BR, UPCAST,
                     PRECISION)  # fmt: skip


@triton.jit(do_not_specialize=BATCH)
def _row_lora_up_kernel(
    low_ptr, y_ptr, address_ptr, scale_ptr, tile_ptr, N, stride_y,
    end_0, column_0, columns_0, end_1, column_1, columns_1, end_2, column_2, columns_2,
    R: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BR: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    FIELDS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Add the products of the adapters of a tile's slot: a program for each tile and block of
    columns of a module, `end_i` blocks of columns up to the end of module i.
    """
    tile_ptr += tl.program_id(0) * (1 + BM)
    block, slot = tl.program_id(1), tl.load(tile_ptr)
    if slot > 0:
        module = (block >= end_0).to(tl.int32) + (block >= end_1).to(tl.int32)
        is_first, is_last = block < end_0, block >= end_1
        first = tl.where(is_first, 0, tl.where(is_last, end_1, end_0))
        column = tl.where(is_first, column_0, tl.where(is_last, column_2, column_1))
        columns = tl.where(is_first, columns_0, tl.where(is_last, columns_2, columns_1))
        address_ptr += slot * FIELDS + 2 + 3 * module
        address = tl.load(address_ptr)
        if address != 0:
            rank = tl.load(address_ptr + 1).to(tl.int32)
            ranks = tl.load(address_ptr + 2).to(tl.int32)
            scale = tl.load(scale_ptr + slot * PARTS + module)
            rows = tl.load(tile_ptr + 1 + tl.arange(0, BM))
            b_ptr = address.to(tl.pointer_type(KIND))
            _lora_up(b_ptr, low_ptr, y_ptr, scale, block - first, rows, N, column, columns,
                     rank, ranks, stride_y, R, SPLITS, BM, BN, BR, UPCAST,
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


def add_row_lora_(y: Tensor, x: Tensor, table: AdapterTable, tiles: Tensor) -> None:
    """Launch the kernels of kernels.lora_ops.add_row_lora_."""
    N, is_embedding = len(y), x.dim() == 1
    columns, width = choose_columns(table.dtype), len(table.modules) * table.max_rank
    splits = 1 if is_embedding else choose_splits(x.shape[1])
    low = torch.empty((splits, N, width), dtype=torch.float32, device=y.device)
    rank_block = min(max(table.max_rank, 16), 32)
    grid = len(tiles), triton.cdiv(width, rank_block), splits
    places = {"FIELDS": table.addresses.shape[1], "KIND": KINDS[table.dtype], "BM": TILE_ROWS}
    precision = "tf32x3" if table.dtype == torch.float32 else "ieee"
    options = {"R": width, "UPCAST": is_interpreting(), "PRECISION": precision, "num_warps": 4}
    if is_embedding:
        _row_lora_embed_kernel[grid](
            x, table.addresses, tiles, low, N, D=table.inputs, R=width, BR=rank_block, **places
        )
    else:
        x = x if x.stride(1) == 1 else x.contiguous()
        each = triton.cdiv(triton.cdiv(x.shape[1], splits), 64) * 64
        _row_lora_down_kernel[grid](
            x, table.addresses, tiles, low, N, x.stride(0), D=x.shape[1], EACH=each,
            BR=rank_block, BK=32, **options, **places,
        )  # fmt: skip
    arguments, end = list[int](), 0
    for module in table.modules:
        end += triton.cdiv(module.stop - module.start, columns)
        arguments += [end, module.start, module.stop - module.start]
    arguments += [end, 0, 0] * (MAX_PARTS - len(table.modules))
    _row_lora_up_kernel[(len(tiles), end)](
        low, y, table.addresses, table.scales, tiles, N, y.stride(0), *arguments, SPLITS=splits,
        PARTS=MAX_PARTS, BN=columns, BR=max(table.max_rank, 16), **options, **places,
    )  # fmt: skip
