"""Hopper's branch of the two kernels that multiply, for heads without bias and softcap: warps with tasks of their own, a shorter epilogue.

One warp issues copies, two groups of four multiply 64 x 256 each and have an epilogue each, so that one's runs under the other's
products (`warp_specialize` on the loop over tiles; descriptors have to be made in the kernel for that, and the loop must not be
flattened). The scale and what hides columns past V are one multiply-add. device_checks.py tries it once on each device against the
other branch, which is what everything else uses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.linear_logprob_triton import BATCH, FLOOR, _gradient, _item, _products, _tile_range


@triton.jit(do_not_specialize=BATCH)
def _forward_ws_kernel(
    x_ptr, w_ptr, y_ptr, part_ptr, target_ptr, N, V, tiles, parts, stride_x, stride_w, in_scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, ENTROPY: tl.constexpr, WS: tl.constexpr,
):  # fmt: skip
    """_forward_kernel over all columns; V and the strides are those of rows that begin at 16 bytes."""
    x = tl.make_tensor_descriptor(x_ptr, [N, D], [stride_x, 1], [BM, BK])
    w = tl.make_tensor_descriptor(w_ptr, [V, D], [stride_w, 1], [BN, BK])
    block, split = _item(N, SPLITS, GROUP, BM)
    begin, end = _tile_range(split, tiles, SPLITS)
    row0 = block * BM
    rows = row0 + tl.arange(0, BM)
    y = tl.load(y_ptr + rows, mask=rows < N, other=-1)
    m = tl.full((BM,), FLOOR, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    spread = tl.zeros((BM,), tl.float32)
    for tile in tl.range(begin, end, warp_specialize=WS):
        col0 = tile * BN
        cols = col0 + tl.arange(0, BN)
        acc = _products(x, w, row0, col0, N, V, stride_x, stride_w, D, BM, BN, BK, True, UPCAST, PRECISION)
        z = acc * in_scale + tl.where(cols < V, 0.0, FLOOR)[None, :]
        hit = (y >= col0) & (y < col0 + BN)
        if tl.max(hit.to(tl.int32), 0) > 0:
            tl.store(target_ptr + rows, tl.sum(tl.where(cols[None, :] == y[:, None], z, 0.0), 1), mask=hit)
        new_m = tl.maximum(m, tl.max(z, 1))
        decay = tl.exp2(m - new_m)
        shifted = z - new_m[:, None]
        e = tl.exp2(shifted)
        if ENTROPY:
            spread = decay * (spread + (m - new_m) * total) + tl.sum(shifted * e, 1)
        total = decay * total + tl.sum(e, 1)
        m = new_m
    out = part_ptr + split * N.to(tl.int64) + rows
    plane = parts * N.to(tl.int64)
    tl.store(out, m, mask=rows < N)
    tl.store(out + plane, total, mask=rows < N)
    tl.store(out + 2 * plane, spread, mask=rows < N)


@triton.jit(do_not_specialize=BATCH)
def _dlogits_ws_kernel(
    x_ptr, w_ptr, y_ptr, lse2_ptr, a_ptr, b_ptr, c_ptr, out_ptr, N, V, col_base, tiles, stride_x, stride_w, stride_out, in_scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr, HAS_C: tl.constexpr, WS: tl.constexpr,
):  # fmt: skip
    """_dlogits_kernel of a slab; the store asks for columns past V, which no slab but the last has."""
    x = tl.make_tensor_descriptor(x_ptr, [N, D], [stride_x, 1], [BM, BK])
    w = tl.make_tensor_descriptor(w_ptr, [V, D], [stride_w, 1], [BN, BK])
    block, split = _item(N, SPLITS, GROUP, BM)
    begin, end = _tile_range(split, tiles, SPLITS)
    row0 = block * BM
    rows = row0 + tl.arange(0, BM)
    inside = rows < N
    y = tl.load(y_ptr + rows, mask=inside, other=-1)
    lse2 = tl.load(lse2_ptr + rows, mask=inside, other=0.0)
    a = tl.load(a_ptr + rows, mask=inside, other=0.0)
    b = tl.load(b_ptr + rows, mask=inside, other=0.0)
    c = b
    if HAS_C:
        c = tl.load(c_ptr + rows, mask=inside, other=0.0)
    for tile in tl.range(begin, end, warp_specialize=WS):
        col0 = col_base + tile * BN
        cols = col0 + tl.arange(0, BN)
        acc = _products(x, w, row0, col0, N, V, stride_x, stride_w, D, BM, BN, BK, True, UPCAST, PRECISION)
        log2p = acc * in_scale - lse2[:, None]
        dz = _gradient(log2p, tl.exp2(log2p), cols, y, a, b, c, HAS_C)
        where = out_ptr + rows.to(tl.int64)[:, None] * stride_out + (tile * BN + tl.arange(0, BN))[None, :]
        tl.store(where, dz.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (cols < V)[None, :])
