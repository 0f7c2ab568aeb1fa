"""Implement `sample_tokens` in Triton: sums of exp over slices of the vocabulary, then the slice
that a uniform number falls into, then the token in that slice.

A slice has SLICE_COLUMNS columns. The chosen slice of a row is computed a second time from SUB rows
of W: at D = 4096 this reads half a megabyte for each row, whereas writing and reading logits would
take four passes over 2 V bytes. Sums within a slice are float32, sums over slices float64. The
random numbers come from the host (rl/sampler/running_rows.py).

Of a sharded vocabulary each process computes the slices of its shard, gets those of all others, and
searches in the chosen slice if that is its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import LOG2E
from kernels.linear_logprob_triton import FLOOR, GROUP, TO_NATS, _item, _products
from kernels.matmul_operands import align_operand, build_matmul_options
from kernels.tile_config import TileConfig, get_gpu_info, select_tile_sizes
from kernels.vocab_shard import VocabShard

SLICE_COLUMNS = 64
MAX_PICK_SLICES = 4096
BATCH = ("N", "tiles", "slices")


@triton.jit(do_not_specialize=BATCH)
def _slices_kernel(
    x,
    w,
    scale_ptr,
    max_ptr,
    sum_ptr,
    N,
    V,
    tiles,
    slices,
    stride_x,
    stride_w,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SUB: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Store max[row, slice] of z = x w' scale (logits / log 2) and sum[row, slice] of 2^(z - max),
    for every slice of SLICE_COLUMNS columns.
    """
    block, split = _item(N, SPLITS, GROUP, BM)
    rows = block * BM + tl.arange(0, BM)
    inside = rows < N
    scale = tl.load(scale_ptr + rows, mask=inside, other=0.0)
    for tile in tl.range(split, tiles, SPLITS):
        acc = _products(
            x,
            w,
            block * BM,
            tile * BN,
            N,
            V,
            stride_x,
            stride_w,
            D,
            BM,
            BN,
            BK,
            DESCRIPTORS,
            UPCAST,
            PRECISION,
        )
        cols = tile * BN + tl.arange(0, BN)
        z = tl.where((cols < V)[None, :], acc * scale[:, None], FLOOR)
        z = tl.reshape(z, (BM, BN // SUB, SUB))
        top = tl.max(z, 2)
        e = tl.sum(tl.exp2(z - top[:, :, None]), 2)
        index = tile * (BN // SUB) + tl.arange(0, BN // SUB)
        at = rows.to(tl.int64)[:, None] * slices + index[None, :]
        tl.store(max_ptr + at, top, mask=inside[:, None])
        # A slice past V has FLOOR everywhere and a sum that is not 0.
        tl.store(sum_ptr + at, tl.where((index * SUB < V)[None, :], e, 0.0), mask=inside[:, None])


@triton.jit
def _weights(max_ptr, sum_ptr, index, rows, inside, top, slices):
    """Return the weights of slices in units of 2^top, float64; 0 past the end.

    `index` and `rows` broadcast to [slices, rows].
    """
    mask = (index < slices) & inside[None, :]
    at = rows[None, :] * slices + index
    largest = tl.load(max_ptr + at, mask=mask, other=FLOOR)
    return (tl.exp2(largest - top[None, :]) * tl.load(sum_ptr + at, mask=mask, other=0.0)).to(
        tl.float64
    )


@triton.jit
def _largest_slices(max_ptr, rows, inside, slices, BM: tl.constexpr, BS: tl.constexpr):
    """Return each row's largest z and the first slice that holds it."""
    place = tl.arange(0, BS)[:, None]
    top = tl.full((BM,), FLOOR, tl.float32)
    largest = tl.zeros((BM,), tl.int32)
    for first in range(0, slices, BS):
        mask = (first + place < slices) & inside[None, :]
        m = tl.load(max_ptr + rows[None, :] * slices + first + place, mask=mask, other=FLOOR)
        block_top = tl.max(m, 0)
        lowest = tl.min(tl.where(m == block_top[None, :], first + place, 2147483647), 0)
        largest = tl.where(block_top > top, lowest, largest)
        top = tl.maximum(top, block_top)
    return top, largest


@triton.jit
def _choose_blocks(
    max_ptr, sum_ptr, target, rows, inside, top, slices, BM: tl.constexpr, BS: tl.constexpr
):
    """Return the first slice of the block of BS slices in which the cumulative weight passes the
    target, and the weight before this block.
    """
    place = tl.arange(0, BS)[:, None]
    running = tl.zeros((BM,), tl.float64)
    before = tl.zeros((BM,), tl.float64)  # the sum of blocks that end at or below the target
    chosen = tl.zeros((BM,), tl.int32)
    # the last block with a sum above 0, used where rounding brings the target up to the total
    last = tl.zeros((BM,), tl.int32)
    last_before = tl.zeros((BM,), tl.float64)
    for first in range(0, slices, BS):
        block = tl.sum(_weights(max_ptr, sum_ptr, first + place, rows, inside, top, slices), 0)
        below = running + block <= target
        last = tl.where(block > 0.0, first, last)
        last_before = tl.where(block > 0.0, running, last_before)
        running += block
        before = tl.where(below, running, before)
        chosen = tl.where(below, first + BS, chosen)
    past = chosen > last
    chosen = tl.where(past, last, chosen)
    before = tl.where(past, last_before, before)
    return chosen, before


@triton.jit
def _first_above(weight, rest, place, AXIS: tl.constexpr, SIZE: tl.constexpr):
    """Return the first place along an axis at which the cumulative weight passes the rest.

    The sum rises at this place, so its weight is not 0.
    """
    below = tl.cumsum(weight, AXIS) <= rest
    first = tl.min(tl.where(below | (weight <= 0.0), SIZE, place), AXIS)
    return tl.minimum(first, tl.max(tl.where(weight > 0.0, place, 0), AXIS))


@triton.jit(do_not_specialize=BATCH)
def _pick_kernel(
    max_ptr, sum_ptr, uniform_ptr, greedy_ptr, slice_ptr, rest_ptr, top_ptr, lse_ptr, N, slices,
    HAS_GREEDY: tl.constexpr, BM: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Store each row's chosen slice, the rest of u times the total for that slice, its largest z,
    and log2 of the total.
    """
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = rows < N
    place = tl.arange(0, BS)[:, None]
    top, largest = _largest_slices(max_ptr, rows, inside, slices, BM, BS)
    total = tl.zeros((BM,), tl.float64)
    for first in range(0, slices, BS):
        total += tl.sum(_weights(max_ptr, sum_ptr, first + place, rows, inside, top, slices), 0)
    target = tl.load(uniform_ptr + rows, mask=inside, other=0.0) * total
    chosen, before = _choose_blocks(max_ptr, sum_ptr, target, rows, inside, top, slices, BM, BS)
    weight = _weights(max_ptr, sum_ptr, chosen[None, :] + place, rows, inside, top, slices)
    offset = _first_above(weight, (target - before)[None, :], place, 0, BS)
    before += tl.sum(tl.where(place < offset[None, :], weight, 0.0), 0)
    chosen += offset
    if HAS_GREEDY:
        greedy = tl.load(greedy_ptr + rows, mask=inside, other=0) != 0
        chosen = tl.where(greedy, largest, chosen)
    tl.store(slice_ptr + rows, chosen, mask=inside)
    tl.store(rest_ptr + rows, target - before, mask=inside)
    tl.store(top_ptr + rows, top, mask=inside)
    tl.store(lse_ptr + rows, top + tl.log2(total.to(tl.float32)), mask=inside)


@triton.jit
def _slice_products(
    x_ptr, w_ptr, rows, cols, inside, real, stride_x, stride_w,
    D: tl.constexpr, BM: tl.constexpr, SUB: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Return the products of each row and the columns `cols` [rows, SUB] of its slice."""
    z = tl.zeros((BM, SUB), tl.float32)
    for k in range(0, D, BK):
        depth = k + tl.arange(0, BK)
        x = tl.load(
            x_ptr + rows[:, None] * stride_x + depth[None, :],
            mask=inside[:, None] & (depth < D)[None, :],
            other=0.0,
        )
        at = w_ptr + cols[:, :, None] * stride_w + depth[None, None, :]
        w = tl.load(at, mask=real[:, :, None] & (depth < D)[None, None, :], other=0.0)
        z += tl.sum(x.to(tl.float32)[:, None, :] * w.to(tl.float32), 2)
    return z


@triton.jit(do_not_specialize=BATCH)
def _search_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    slice_ptr,
    rest_ptr,
    top_ptr,
    lse_ptr,
    greedy_ptr,
    token_ptr,
    logp_ptr,
    N,
    V,
    stride_x,
    stride_w,
    D: tl.constexpr,
    BM: tl.constexpr,
    SUB: tl.constexpr,
    BK: tl.constexpr,
    HAS_GREEDY: tl.constexpr,
):
    """Store the first token of the row's slice at which the cumulative sum passes the rest, and its
    logprob; for a greedy row, the token with the largest logit.
    """
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    inside = rows < N
    cols = (
        tl.load(slice_ptr + rows, mask=inside, other=0)[:, None].to(tl.int64) * SUB
        + tl.arange(0, SUB)[None, :]
    )
    real = inside[:, None] & (cols < V)
    z = _slice_products(x_ptr, w_ptr, rows, cols, inside, real, stride_x, stride_w, D, BM, SUB, BK)
    z = tl.where(real, z * tl.load(scale_ptr + rows, mask=inside, other=0.0)[:, None], FLOOR)
    top = tl.load(top_ptr + rows, mask=inside, other=0.0)
    weight = tl.where(real, tl.exp2(z - top[:, None]), 0.0).to(tl.float64)
    rest = tl.load(rest_ptr + rows, mask=inside, other=0.0)[:, None]
    place = tl.arange(0, SUB)[None, :]
    index = _first_above(weight, rest, place, 1, SUB)
    if HAS_GREEDY:
        greedy = tl.load(greedy_ptr + rows, mask=inside, other=0) != 0
        index = tl.where(
            greedy, tl.min(tl.where(z == tl.max(z, 1)[:, None], place, SUB - 1), 1), index
        )
    chosen = tl.sum(tl.where(place == index[:, None], z, 0.0), 1)
    start = tl.load(slice_ptr + rows, mask=inside, other=0).to(tl.int64) * SUB
    tl.store(token_ptr + rows, tl.minimum(start + index, V - 1), mask=inside)
    tl.store(
        logp_ptr + rows,
        (chosen - tl.load(lse_ptr + rows, mask=inside, other=0.0)) * TO_NATS,
        mask=inside,
    )


# ------------------------------------------------------------------------------------------- launch


def _sum_slices(
    x: Tensor,
    w: Tensor,
    scale: Tensor,
    tiles: TileConfig,
    splits: int,
    columns: int,
    width: int,
) -> Tensor:
    """Return the largest z of every slice and the sum of 2^(z - largest), [2, N, slices]. `width`:
    columns that the slices cover, at least V.
    """
    N, V = len(x), len(w)
    count = triton.cdiv(width, tiles.columns)
    slices = count * (tiles.columns // columns)
    stats = torch.empty((2, N, slices), dtype=torch.float32, device=x.device)
    slice_max, total = stats.unbind(0)
    x_arg, w_arg, options = build_matmul_options(x, w, tiles)
    splits = min(splits, count)
    _slices_kernel[(triton.cdiv(N, tiles.rows) * splits,)](
        x_arg, w_arg, scale, slice_max, total, N, V, count, slices, x.stride(0), w.stride(0),
        SUB=columns, SPLITS=splits, GROUP=GROUP, **options,
    )  # fmt: skip
    return stats


def _pick_slices(
    stats: Tensor, uniform_N: Tensor, greedy_N: Tensor | None, pick: tuple[int, int] | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return of each row the chosen slice, the rest of u times the total for it, the largest z and
    the log2 of the total; and `greedy_N` as the kernels take it. `stats`: see `_sum_slices`.
    """
    (slice_max, total), (_, N, slices) = stats.unbind(0), stats.shape
    dtypes = torch.int32, torch.float64, torch.float32, torch.float32
    choice = tuple(torch.empty(N, dtype=dtype, device=stats.device) for dtype in dtypes)
    greedy = choice[0] if greedy_N is None else greedy_N.to(torch.uint8)
    rows, block = pick or (1, min(max(triton.next_power_of_2(slices), 16), MAX_PICK_SLICES))
    _pick_kernel[(triton.cdiv(N, rows),)](
        slice_max, total, uniform_N.contiguous(), greedy, *choice, N, slices,
        HAS_GREEDY=greedy_N is not None, BM=rows, BS=block,
        num_warps=16 if block > 2048 else 8 if block > 1024 else 4,  # 8 spill on sm_100
    )  # fmt: skip
    return choice, greedy


def sample_tokens(
    x_ND: Tensor,
    w_VD: Tensor,
    temperature_N: Tensor,
    uniform_N: Tensor,
    greedy_N: Tensor | None,
    shard: VocabShard | None = None,
    *,
    tiles: TileConfig | None = None,
    splits: int = 132,
    pick: tuple[int, int] | None = None,
    search: tuple[int, int] = (1, 64),
) -> tuple[Tensor, Tensor]:
    """Launch the sampling kernels; arguments and result as in kernels/sample_tokens.py.

    `pick`: rows and slices at a time of a program of _pick_kernel; None: a row, and all slices up
    to MAX_PICK_SLICES, so that a program waits for memory few times. `search`: rows and depth per
    program of _search_kernel.
    """
    tiles = tiles or select_tile_sizes(x_ND.shape[1], x_ND.dtype, get_gpu_info(x_ND))
    x, w, N, V = align_operand(x_ND), align_operand(w_VD), len(x_ND), len(w_VD)
    # from a product to logits in units of log 2
    scale = (LOG2E / temperature_N.float()).contiguous()
    columns = min(SLICE_COLUMNS, tiles.columns)

    width = V if shard is None else shard.widest
    stats = _sum_slices(x, w, scale, tiles, splits, columns, width)
    local_slices = stats.shape[2]
    stats = stats if shard is None else shard.concatenate(stats)
    choice, greedy = _pick_slices(stats, uniform_N, greedy_N, pick)
    if shard is not None:
        local, here = shard.find_local(choice[0], local_slices)
        choice = (local, *choice[1:])
    dtypes = torch.int64, torch.float32
    token, logp = (torch.empty(N, dtype=dtype, device=x.device) for dtype in dtypes)
    _search_kernel[(triton.cdiv(N, search[0]),)](
        x, w, scale, *choice, greedy, token, logp, N, V, x.stride(0), w.stride(0), D=x.shape[1],
        BM=search[0], SUB=columns, BK=search[1], HAS_GREEDY=greedy_N is not None, num_warps=4,
    )  # fmt: skip
    return (token, logp) if shard is None else shard.combine(token, logp, here)
