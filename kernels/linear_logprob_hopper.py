"""Implement the two matrix product kernels for Hopper with warp specialization, for heads without
bias and softcap.

A producer warp issues copies. Two groups of four warps multiply 64 x 256 each, so that the epilogue
of either group runs during the products of the other (`warp_specialize` on the loop over tiles).
For that, descriptors must be made in the kernel, the loop must not be flattened, and nothing of a
tile's size may come out of a branch in the loop.

The forward's epilogue touches an element five times: a multiply-add for the scale and the mask of
columns past V, maximum, difference, exp2, sum; a sixth time for the entropy. The target is searched
only in the few tiles that hold it, and is a term of its row's sum: computed by a separate dot
product it could exceed that sum. device_checks.py compares both kernels once per device with the
other branch, which all other cases use.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.linear_logprob_triton import (
    BATCH,
    FLOOR,
    TO_NATS,
    _add_tile,
    _empty_statistics,
    _item,
    _item_of,
    _products,
    _store_statistics,
    _store_target,
    _store_tile,
    _tile_range,
)


@triton.jit
def _store_exponents(exp_ptr, k, rows, N, tile, exps, stride_exp, HALVES: tl.constexpr):
    """Store k HALVES times, for each of the narrower tiles of the readers."""
    for half in tl.static_range(HALVES):
        tl.store(
            exp_ptr + (tile * HALVES + half) * stride_exp + rows,
            k,
            mask=(rows < N) & (tile * HALVES + half < exps),
        )


@triton.jit(do_not_specialize=BATCH)
def _forward_ws_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    part_ptr,
    target_ptr,
    kept_ptr,
    exp_ptr,
    N,
    V,
    tiles,
    parts,
    exps,
    stride_x,
    stride_w,
    stride_kept,
    stride_exp,
    in_scale,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    ENTROPY: tl.constexpr,
    KEEP: tl.constexpr,
    HALVES: tl.constexpr,
    WS: tl.constexpr,
):
    """Compute _forward_kernel over all columns; V and the strides describe rows that begin at
    multiples of 16 bytes.

    KEEP: also store 2^(z-k) to kept[row, column] and k, the tile's maximum rounded up, to exp[..,
    row]. k is stored HALVES times, as the readers' tiles are narrower by that factor. The copy
    engine stores the values: a store through pointers spilled 1.5 KB of registers for each thread.
    """
    x = tl.make_tensor_descriptor(x_ptr, [N, D], [stride_x, 1], [BM, BK])
    w = tl.make_tensor_descriptor(w_ptr, [V, D], [stride_w, 1], [BN, BK])
    if KEEP:
        to = tl.make_tensor_descriptor(kept_ptr, [N, V], [stride_kept, 1], [BM, BN])
    block, split = _item(N, SPLITS, GROUP, BM)
    begin, end = _tile_range(split, tiles, SPLITS)
    row0 = block * BM
    rows = row0 + tl.arange(0, BM)
    y = tl.load(y_ptr + rows, mask=rows < N, other=-1)
    m, total, spread = _empty_statistics(BM)
    for tile in tl.range(begin, end, warp_specialize=WS):
        col0 = tile * BN
        cols = col0 + tl.arange(0, BN)
        acc = _products(
            x, w, row0, col0, N, V, stride_x, stride_w, D, BM, BN, BK, True, UPCAST, PRECISION
        )
        z = acc * in_scale + tl.where(cols < V, 0.0, FLOOR)[None, :]
        _store_target(target_ptr, rows, y, col0, cols, z, BN)
        tile_m = tl.max(z, 1)
        m, total, spread = _add_tile(m, total, spread, z, tile_m, ENTROPY)
        if KEEP:
            k = tl.ceil(tile_m)
            to.store([row0, col0], tl.exp2(z - k[:, None]).to(kept_ptr.dtype.element_ty))
            _store_exponents(exp_ptr, k, rows, N, tile, exps, stride_exp, HALVES)
    out = part_ptr + split * N.to(tl.int64) + rows
    _store_statistics(out, N, parts, m, total, spread, rows < N)


@triton.jit(do_not_specialize=BATCH)
def _dlogits_ws_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    lse2_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    out_ptr,
    N,
    V,
    col_base,
    col_end,
    tiles,
    stride_x,
    stride_w,
    stride_out,
    in_scale,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_C: tl.constexpr,
    WS: tl.constexpr,
):
    """Compute _dlogits_kernel of a slab with as many programs as SMs.

    Each program takes every num_programs-th (row block, tile), so that no program waits for the end
    of a split. The numbers do not depend on the assignment.
    """
    x = tl.make_tensor_descriptor(x_ptr, [N, D], [stride_x, 1], [BM, BK])
    w = tl.make_tensor_descriptor(w_ptr, [V, D], [stride_w, 1], [BN, BK])
    for item in tl.range(
        tl.program_id(0), tl.cdiv(N, BM) * tiles, tl.num_programs(0), warp_specialize=WS
    ):
        block, tile = _item_of(item, N, tiles, GROUP, BM)
        row0 = block * BM
        rows = row0 + tl.arange(0, BM)
        inside = rows < N
        col0 = col_base + tile * BN
        cols = col0 + tl.arange(0, BN)
        acc = _products(
            x, w, row0, col0, N, V, stride_x, stride_w, D, BM, BN, BK, True, UPCAST, PRECISION
        )
        log2p = acc * in_scale - tl.load(lse2_ptr + rows, mask=inside, other=0.0)[:, None]
        factor = tl.load(b_ptr + rows, mask=inside, other=0.0)[:, None]
        if HAS_C:
            factor = (
                factor + (tl.load(c_ptr + rows, mask=inside, other=0.0) * TO_NATS)[:, None] * log2p
            )
        dz = tl.exp2(log2p) * factor
        a = tl.load(a_ptr + rows, mask=inside, other=0.0)
        dz += tl.where(
            cols[None, :] == tl.load(y_ptr + rows, mask=inside, other=-1)[:, None], a[:, None], 0.0
        )
        _store_tile(out_ptr, rows, tile, stride_out, dz, inside, cols, col_end, BN)
