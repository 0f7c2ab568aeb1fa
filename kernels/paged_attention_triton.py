"""Implement `compute_paged_attention` in Triton: all query heads of a key head together, so that a
key is read once for all of them.

The positions of a sequence are divided among a fixed number of splits. This number depends on the
number of rows only, and each split is an even share of the sequence's length, so a row's bits do
not depend on the lengths of other rows. A third kernel merges the outputs and log-sum-exps of the
splits and of the group's pages; with a single split and no group, the first kernel writes the
output directly. Sums are float32, in units of log 2. The structure is that of flash-decoding (Dao
et al., 2023); the part of a group is its prompt, read once for all queries of the group.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_inputs import UNBOUNDED, AttentionBounds, SharedPages
from kernels.common import LOG2E
from kernels.matmul_operands import is_interpreting

FLOOR = tl.constexpr(-1e30)
TWO_LOG2E = tl.constexpr(2 * LOG2E)
# The least number of programs of a launch, eight for each of an H100's 132 SMs, and the most
# splits. More than 32 splits cost more in merging than they save.
MIN_PROGRAMS, MAX_SPLITS = 1056, 32
WINDOW_QUERIES = 64  # queries (rows times heads) of a window of a group's rows
# Arguments that depend on the number of rows: without do_not_specialize, a variant of each would be
# compiled in the middle of a run.
BATCH = ("R", "splits", "first", "parts")

# ------------------------------------------------------------------------------------------ kernels


@triton.jit
def _share(length, split, splits, BN: tl.constexpr):
    """Return the positions [begin, end) of a split: whole blocks; the last splits have fewer or
    none.
    """
    each = tl.cdiv(tl.cdiv(length, BN), splits) * BN
    begin = tl.minimum(split * each, length)
    return begin, tl.minimum(begin + each, length)


@triton.jit
def _share_window(length, split, splits, BN: tl.constexpr, SLIDING_WINDOW: tl.constexpr):
    """Return `_share` of the positions from the block in which the last one's window starts."""
    skipped = 0
    if SLIDING_WINDOW:
        skipped = tl.maximum(length - SLIDING_WINDOW, 0) // BN * BN
    begin, end = _share(length - skipped, split, splits, BN)
    return begin + skipped, end + skipped


@triton.jit
def _start_windows(
    length, private_length_ptr, row, member, begin, BN: tl.constexpr, SLIDING_WINDOW: tl.constexpr
):
    """Return the first position in the window of each query [BM] that stands after `length` shared
    positions, and `begin`, moved to the first block that a query sees.
    """
    start = length + tl.load(private_length_ptr + row, mask=member, other=0) - SLIDING_WINDOW
    lowest = tl.maximum(tl.min(tl.where(member, start, length), 0), 0)
    return start, tl.maximum(begin, lowest // BN * BN)


@triton.jit
def _cap_scores(score, SOFTCAP: tl.constexpr):
    """Return SOFTCAP * tanh(score / SOFTCAP), or the scores if SOFTCAP is 0."""
    if SOFTCAP > 0.0:  # tanh(x) = 1 - 2 / (e^2x + 1)
        score = SOFTCAP - 2 * SOFTCAP / (tl.exp2(score * (TWO_LOG2E / SOFTCAP)) + 1.0)
    return score


@triton.jit
def _load_queries(q_ptr, cols, mask, UPCAST: tl.constexpr):
    """Return queries [BM, BLOCK], each from its pointer in `q_ptr` [BM]."""
    q = tl.load(q_ptr[:, None] + cols[None, :], mask=mask, other=0.0)
    if UPCAST:  # the interpreter multiplies bfloat16 wrongly
        q = q.to(tl.float32)
    return q


@triton.jit
def _over_pages(
    q,
    m,
    total,
    acc,
    seen,
    window_start,
    k_ptr,
    v_ptr,
    table_ptr,
    begin,
    end,
    stride_page,
    stride_place,
    scale,
    S: tl.constexpr,
    D: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Update maximum, sum and weighted values of queries q [BM, BLOCK] with positions [begin, end),
    for the rows marked in `seen` [BM].

    With a SLIDING_WINDOW, a query sees no position before `window_start` [BM].
    """
    cols = tl.arange(0, BLOCK)
    for start in tl.range(begin, end, BN):
        n = start + tl.arange(0, BN)
        inside = n < end
        if S % BN == 0:  # `begin` is a multiple of BN, so a block lies in a single page
            at = (
                tl.load(table_ptr + start // S).to(tl.int64) * stride_page
                + (start % S + tl.arange(0, BN)) * stride_place
            )
        else:
            at = (
                tl.load(table_ptr + n // S, mask=inside, other=0).to(tl.int64) * stride_page
                + (n % S) * stride_place
            )
        where = at[:, None] + cols[None, :]
        mask = inside[:, None] & (cols < D)[None, :]
        k = tl.load(k_ptr + where, mask=mask, other=0.0)
        v = tl.load(v_ptr + where, mask=mask, other=0.0)
        if UPCAST:  # the interpreter multiplies bfloat16 wrongly
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        score = _cap_scores(score, SOFTCAP)
        here = seen[:, None] & inside[None, :]
        if SLIDING_WINDOW:
            here = here & (n[None, :] >= window_start[:, None])
        new_m = tl.maximum(m, tl.max(tl.where(here, score, FLOOR), 1))
        p = tl.where(here, tl.exp2(score - new_m[:, None]), 0.0)
        decay = tl.exp2(m - new_m)
        total = total * decay + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        m = new_m
    return m, total, acc


@triton.jit
def _empty_sums(BM: tl.constexpr, BLOCK: tl.constexpr):
    """Return maximum, sum and weighted values of queries without positions."""
    return (
        tl.full((BM,), FLOOR, tl.float32),
        tl.zeros((BM,), tl.float32),
        tl.zeros((BM, BLOCK), tl.float32),
    )


@triton.jit
def _divisor(total):
    """Return the sum of each query, or 1 for a query without positions."""
    return tl.where(total > 0.0, total, 1.0)


@triton.jit
def _window_rows(
    order_ptr, group_ptr, shares_ptr, window, R, BM: tl.constexpr, HEADS: tl.constexpr
):
    """Return the row of each query of a window, its group (-1: none), and whether it exists."""
    i = window * (BM // HEADS) + tl.arange(0, BM) // HEADS
    row = tl.load(order_ptr + i, mask=i < R, other=0)
    member = tl.load(shares_ptr + row, mask=i < R, other=0).to(tl.int32) > 0
    group = tl.where(member, tl.load(group_ptr + i, mask=i < R, other=0).to(tl.int32), -1)
    return row, group, i < R


@triton.jit
def _group_range(group):
    """Return the range [first, end) of the groups of some queries; -1 is no group."""
    end = tl.max(group, 0) + 1
    return tl.min(tl.where(group < 0, end, group), 0), end


@triton.jit(do_not_specialize=BATCH)
def _private_pages_kernel(
    q_ptr,
    kv_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    lse_ptr,
    splits,
    parts,
    stride_row,
    stride_head,
    plane,
    stride_page,
    stride_place,
    stride_table,
    scale,
    K: tl.constexpr,
    REPEAT: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PARTIAL: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with a row's query heads of a key head over a split of the row's private pages.

    PARTIAL: store to out[row, head, split] and lse; otherwise store the final output.
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + row)
    window_start = tl.zeros((BM,), tl.int32) + (length - SLIDING_WINDOW)
    begin, end = _share_window(length, split, splits, BN, SLIDING_WINDOW)
    j, cols = tl.arange(0, BM), tl.arange(0, BLOCK)
    inside = j < REPEAT
    mask = inside[:, None] & (cols < D)[None, :]
    heads = head * REPEAT + j
    q = _load_queries(q_ptr + row * stride_row + heads * stride_head, cols, mask, UPCAST)
    m, total, acc = _empty_sums(BM, BLOCK)
    k_ptr = kv_ptr + head * D
    m, total, acc = _over_pages(
        q,
        m,
        total,
        acc,
        inside,
        window_start,
        k_ptr,
        k_ptr + plane,
        table_ptr + row * stride_table,
        begin,
        end,
        stride_page,
        stride_place,
        scale,
        S,
        D,
        BN,
        BLOCK,
        SLIDING_WINDOW,
        SOFTCAP,
        UPCAST,
        PRECISION,
    )
    acc = acc / _divisor(total)[:, None]
    at = (row * (K * REPEAT) + heads) * parts + split
    tl.store(out_ptr + at[:, None] * D + cols[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
    if PARTIAL:
        tl.store(lse_ptr + at, m + tl.log2(_divisor(total)), mask=inside)


@triton.jit(do_not_specialize=BATCH)
def _shared_pages_kernel(
    q_ptr,
    kv_ptr,
    order_ptr,
    group_ptr,
    shares_ptr,
    table_ptr,
    length_ptr,
    private_length_ptr,
    out_ptr,
    lse_ptr,
    R,
    splits,
    first,
    parts,
    stride_row,
    stride_head,
    plane,
    stride_page,
    stride_place,
    stride_table,
    scale,
    K: tl.constexpr,
    REPEAT: tl.constexpr,
    HEADS: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BLOCK: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend with a window of rows, consecutive in `order`, over a split of the pages of each group
    in the window.

    Of HEADS heads, REPEAT exist.
    """
    window, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    j, cols = tl.arange(0, BM) % HEADS, tl.arange(0, BLOCK)
    row, group, inside = _window_rows(order_ptr, group_ptr, shares_ptr, window, R, BM, HEADS)
    inside = inside & (j < REPEAT)
    heads = head * REPEAT + j
    mask = inside[:, None] & (cols < D)[None, :]
    q = _load_queries(q_ptr + row * stride_row + heads * stride_head, cols, mask, UPCAST)
    m, total, acc = _empty_sums(BM, BLOCK)
    k_ptr = kv_ptr + head * D
    first_group, end_group = _group_range(group)
    for number in range(first_group, end_group):
        length = tl.load(length_ptr + number)
        begin, end = _share(length, split, splits, BN)
        member = inside & (group == number)
        window_start = tl.zeros((BM,), tl.int32)
        if SLIDING_WINDOW:
            window_start, begin = _start_windows(
                length, private_length_ptr, row, member, begin, BN, SLIDING_WINDOW
            )
        m, total, acc = _over_pages(
            q,
            m,
            total,
            acc,
            member,
            window_start,
            k_ptr,
            k_ptr + plane,
            table_ptr + number * stride_table,
            begin,
            end,
            stride_page,
            stride_place,
            scale,
            S,
            D,
            BN,
            BLOCK,
            SLIDING_WINDOW,
            SOFTCAP,
            UPCAST,
            PRECISION,
        )
    acc = acc / _divisor(total)[:, None]
    at = (row * (K * REPEAT) + heads) * parts + first + split
    tl.store(out_ptr + at[:, None] * D + cols[None, :], acc, mask=mask)
    tl.store(lse_ptr + at, m + tl.log2(_divisor(total)), mask=inside)


@triton.jit(do_not_specialize=BATCH)
def _merge_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    parts,
    D: tl.constexpr,
    MOST: tl.constexpr,
    SOME: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the parts of a head of a row, always in the same order. A part without positions has a
    log-sum-exp of FLOOR.
    """
    at = tl.program_id(0).to(tl.int64)
    every, cols = tl.arange(0, MOST), tl.arange(0, BLOCK)
    lse = tl.load(lse_ptr + at * parts + every, mask=every < parts, other=FLOOR)
    top = tl.max(lse, 0)
    total = tl.sum(tl.where(every < parts, tl.exp2(lse - top), 0.0), 0)
    acc = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, parts, SOME):
        some = begin + tl.arange(0, SOME)
        inside = some < parts
        weight = tl.exp2(tl.load(lse_ptr + at * parts + some, mask=inside, other=FLOOR) - top)
        mask = inside[:, None] & (cols < D)[None, :]
        acc += tl.sum(
            tl.load(
                part_ptr + (at * parts + some)[:, None] * D + cols[None, :], mask=mask, other=0.0
            )
            * weight[:, None],
            0,
        )
    tl.store(out_ptr + at * D + cols, (acc / total).to(out_ptr.dtype.element_ty), mask=cols < D)


# ------------------------------------------------------------------------------------------- launch


def choose_splits(programs: int) -> int:
    """Return the number of splits for each sequence, a power of two, for a launch that would have
    this many programs without splits.
    """
    return min(1 << max((MIN_PROGRAMS // programs).bit_length() - 1, 0), MAX_SPLITS)


def choose_launch_sizes(width: int, itemsize: int, repeat: int) -> tuple[dict[str, int], int, int]:
    """Choose tile and pipeline by the bytes of a key, so that they fit any GPU's shared memory and
    registers.

    Returns (options, BM, BM of a window).
    """
    block, heads = max(triton.next_power_of_2(width), 16), triton.next_power_of_2(repeat)
    # 2 for float32, which needs three products each, and for 256 numbers of bfloat16
    wide = max(block * itemsize // 256, itemsize // 2)
    options = {
        "D": width,
        "BLOCK": block,
        "BN": max(64 // wide, 16),
        "num_warps": 4,
        "num_stages": 3 if block * itemsize <= 128 else 2,
    }
    window = max(WINDOW_QUERIES // wide // heads, 1)
    return options, max(heads, 16), max(window * heads, 16)


def compute_paged_attention(
    q: Tensor,
    kv: Tensor,
    table: Tensor,
    length: Tensor,
    shared: SharedPages | None,
    bounds: AttentionBounds = UNBOUNDED,
) -> Tensor:
    """Launch the kernels; arguments and result as in paged_attention.py."""
    (R, H, D), (_, _, S, K, _) = q.shape, kv.shape
    q = q if q.stride(2) == 1 else q.contiguous()
    repeat, heads = H // K, triton.next_power_of_2(H // K)
    tile, row_block, window_block = choose_launch_sizes(D, q.element_size(), repeat)
    windows = triton.cdiv(R, window_block // heads)
    row_splits = choose_splits(R * K)
    shared_splits = 0 if shared is None else choose_splits(windows * K)
    parts = row_splits + shared_splits
    out = q.new_empty((R, H, D))
    part = lse = out
    if parts > 1:
        part = q.new_empty((R, H, parts, D), dtype=torch.float32)
        lse = part.new_empty((R, H, parts))
    strides = (*q.stride()[:2], *kv.stride()[:3])
    options: dict[str, Any] = {
        "K": K,
        "REPEAT": repeat,
        "S": S,
        "SLIDING_WINDOW": bounds.window,
        "SOFTCAP": bounds.softcap * LOG2E,  # as the scores, in units of log 2
        "UPCAST": is_interpreting(),
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "ieee",
        **tile,
    }
    scale = D**-0.5 * LOG2E
    if shared is not None:
        _shared_pages_kernel[(windows, K, shared_splits)](
            q,
            kv,
            shared.order,
            shared.group,
            shared.shares,
            shared.table,
            shared.length,
            length,
            part,
            lse,
            R,
            shared_splits,
            row_splits,
            parts,
            *strides,
            shared.table.stride(0),
            scale,
            HEADS=heads,
            BM=window_block,
            **options,
        )
    _private_pages_kernel[(R, K, row_splits)](
        q,
        kv,
        table,
        length,
        part,
        lse,
        row_splits,
        parts,
        *strides,
        table.stride(0),
        scale,
        BM=row_block,
        PARTIAL=parts > 1,
        **options,
    )
    if parts > 1:
        _merge_kernel[(R * H,)](
            part,
            lse,
            out,
            parts,
            D=D,
            MOST=2 * MAX_SPLITS,
            SOME=8,
            BLOCK=options["BLOCK"],
            num_warps=1,
        )
    return out
