"""Implement the CUDA kernels of `linear_logprob`: same functions as linear_logprob_torch.py, same
formula, units of log 2.

Reasons for these tiles (H100: 132 SMs, 2048 bf16 multiply-adds per clock and SM, 227 KiB of shared
memory, 64K registers; other GPUs: kernels/tile_config.py):
- A 128 x 256 tile takes 16 D clocks of tensor core. Its epilogue takes about 2048 clocks of exp2
  (16 per clock) and as many of other arithmetic, during which the tensor cores idle. At D = 4096
  that is 6%, at D = 896 it would be 25%.
- Large D therefore uses 128 x 256 x 64, 8 warps, 4 stages (192 KiB), the best ratio of operations
  to bytes loaded (85 per byte). Small D uses 128 x 128 x 64, 4 warps, 3 stages (96 KiB): two
  programs then share an SM, and the epilogue of either runs during the products of the other, at
  the price of a third more loads from L2.
- Work items are (128 rows) x (1/132 of the vocabulary), so that any multiple of 128 rows fills a
  GPU of 132 SMs; within a slab of 16384 columns they are (128 rows) x (1/33 of the slab), about two
  tiles. Items are ordered 16 row blocks at a time: at D = 4096, 2048 rows of hidden states (16 MiB)
  stay in L2 while W streams by.
- The loops over tiles are flattened into the loops over D, so that loads of the next tile start
  before the epilogue of the current tile. The split of the vocabulary depends only on V, like the
  tiles: a token's logprob has the same bits in every batch, with and without [T, V] saved.
  Exception: `expected`, where sums are computed slab by slab.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.common import LN2

# Number of splits of the vocabulary for a launch over all of it, and for a launch over a slab of
# 16384 columns.
SPLITS = 132
CHUNK_SPLITS = 33
GROUP = 16
# Arguments that change from batch to batch. Without do_not_specialize, Triton would compile a
# variant for each argument that is 1 or a multiple of 16, in the middle of a run.
BATCH = (
    "N",
    "col_base",
    "col_end",
    "tiles",
    "tile_base",
    "split_base",
    "parts",
    "stride_exp",
    "exps",
)
FLOOR = tl.constexpr(-1e30)
TO_NATS = tl.constexpr(LN2)


# ------------------------------------------------------------------------------------------ kernels


@triton.jit
def _item_of(pid, N, SPLITS, GROUP: tl.constexpr, BM: tl.constexpr):
    """Return the (row block, split) of an item: GROUP row blocks in turn, then the next split of
    the same rows.
    """
    blocks = tl.cdiv(N, BM)
    group = pid // (GROUP * SPLITS)
    width = tl.minimum(blocks - group * GROUP, GROUP)
    rest = pid - group * GROUP * SPLITS
    return group * GROUP + rest % width, rest // width


@triton.jit
def _item(N, SPLITS: tl.constexpr, GROUP: tl.constexpr, BM: tl.constexpr):
    """Return this program's (row block, split)."""
    return _item_of(tl.program_id(0), N, SPLITS, GROUP, BM)


@triton.jit
def _tile_range(split, tiles, SPLITS: tl.constexpr):
    """Return the tiles [begin, end) of a split; if the split is uneven, the first splits have an
    extra tile.
    """
    each = tiles // SPLITS
    extra = tiles - each * SPLITS
    begin = split * each + tl.minimum(split, extra)
    return begin, begin + each + (split < extra).to(tl.int32)


@triton.jit
def _products(
    x,
    w,
    row0,
    col0,
    N,
    V,
    stride_x,
    stride_w,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return x[row0 : row0 + BM] @ w[col0 : col0 + BN].T in float32; rows and columns outside are
    zeros.
    """
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, D, BK):
        if DESCRIPTORS:
            a = x.load([row0, k])
            b = w.load([col0, k])
        else:
            # int64: N * stride exceeds 2^31 at 32k tokens of a large model.
            rows = (row0 + tl.arange(0, BM)).to(tl.int64)[:, None]
            cols = (col0 + tl.arange(0, BN)).to(tl.int64)[:, None]
            depth = k + tl.arange(0, BK)[None, :]
            a = tl.load(x + rows * stride_x + depth, mask=(rows < N) & (depth < D), other=0.0)
            b = tl.load(w + cols * stride_w + depth, mask=(cols < V) & (depth < D), other=0.0)
        if UPCAST:  # the interpreter multiplies bfloat16 wrongly
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _logits(
    acc, bias_ptr, cols, V, in_scale, out_scale, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr
):
    """Return logits / log 2 from raw products, and the slope of the tanh (not computed without
    softcap).
    """
    z = acc * in_scale
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < V, other=0.0).to(tl.float32) * in_scale
        # a bias of -inf bans a token; 0 * -inf would be NaN
        z += tl.where(bias < FLOOR, FLOOR, bias)[None, :]
    slope = z
    if SOFTCAP:
        t = 1.0 - 2.0 / (tl.exp2(z * (2.0 / TO_NATS)) + 1.0)
        slope = 1.0 - t * t
        z = t * out_scale
    return z, slope


@triton.jit
def _store_target(target_ptr, rows, y, col0, cols, z, BN: tl.constexpr):
    """Store z at the target of each row whose target lies in this tile.

    Only a single tile of V / BN holds a row's target; the others skip the search.
    """
    hit = (y >= col0) & (y < col0 + BN)
    if tl.max(hit.to(tl.int32), 0) > 0:
        tl.store(
            target_ptr + rows, tl.sum(tl.where(cols[None, :] == y[:, None], z, 0.0), 1), mask=hit
        )


@triton.jit
def _add_tile(m, total, spread, z, tile_max, ENTROPY: tl.constexpr):
    """Return the statistics m, total and spread of each row with the scores of another tile."""
    new_m = tl.maximum(m, tile_max)
    decay = tl.exp2(m - new_m)
    shifted = z - new_m[:, None]
    e = tl.exp2(shifted)
    if ENTROPY:
        spread = decay * (spread + (m - new_m) * total) + tl.sum(shifted * e, 1)
    total = decay * total + tl.sum(e, 1)
    return new_m, total, spread


@triton.jit
def _store_statistics(out, N, parts, m, total, spread, mask):
    """Store the statistics of each row to the three planes of the partial statistics."""
    plane = parts * N.to(tl.int64)
    tl.store(out, m, mask=mask)
    tl.store(out + plane, total, mask=mask)
    tl.store(out + 2 * plane, spread, mask=mask)


@triton.jit
def _empty_statistics(BM: tl.constexpr):
    """Return the statistics m, total and spread of rows without scores."""
    zeros = tl.zeros((BM,), tl.float32)
    return tl.full((BM,), FLOOR, tl.float32), zeros, zeros


@triton.jit
def _store_tile(out_ptr, rows, tile, stride, value, inside, cols, col_end, BN: tl.constexpr):
    """Store the rows `inside` and the columns before `col_end` of a tile of a slab, in the slab's
    dtype.
    """
    where = out_ptr + rows.to(tl.int64)[:, None] * stride + (tile * BN + tl.arange(0, BN))[None, :]
    tl.store(
        where,
        value.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (cols < col_end)[None, :],
    )


@triton.jit
def _keep_tile(
    kept_ptr, exp_ptr, z, k, rows, N, tile, cols, col_end, stride_kept, stride_exp, out_scale,
    KEEP_SLOPE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Store 2^(z-k), times the slope of the tanh if KEEP_SLOPE, and k."""
    kept = tl.exp2(z - k[:, None])
    # from z, so that the slope need not stay alive in registers since the tanh
    if KEEP_SLOPE:
        t = z * (1.0 / out_scale)
        kept *= 1.0 - t * t
    _store_tile(kept_ptr, rows, tile, stride_kept, kept, rows < N, cols, col_end, BN)
    tl.store(exp_ptr + tile * stride_exp + rows, k, mask=rows < N)


@triton.jit(do_not_specialize=BATCH)
def _forward_kernel(
    x,
    w,
    bias_ptr,
    y_ptr,
    part_ptr,
    target_ptr,
    kept_ptr,
    exp_ptr,
    ref_ptr,
    N,
    V,
    col_base,
    col_end,
    tiles,
    split_base,
    parts,
    stride_x,
    stride_w,
    stride_kept,
    stride_exp,
    in_scale,
    out_scale,
    headroom,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    KEEP: tl.constexpr,
    KEEP_SLOPE: tl.constexpr,
):
    """Process this split's tiles: store maximum m, sum 2^(z-m), sum (z-m) 2^(z-m) to part[:, split,
    row], and the target's z to target[row].

    KEEP: also store 2^(z-k) (times the slope of the tanh if KEEP_SLOPE) to kept[row, column -
    col_base] and k to exp[tile, row]. k is the row's reference if the tile's maximum is at most
    `headroom` above it, else that maximum, rounded up.
    """
    block, split = _item(N, SPLITS, GROUP, BM)
    begin, end = _tile_range(split, tiles, SPLITS)
    row0 = block * BM
    rows = row0 + tl.arange(0, BM)
    y = tl.load(y_ptr + rows, mask=rows < N, other=-1)
    ref = tl.zeros((BM,), tl.float32)
    if KEEP:
        ref = tl.load(ref_ptr + rows, mask=rows < N, other=0.0)
    m, total, spread = _empty_statistics(BM)
    for tile in tl.range(begin, end, flatten=True):
        col0 = col_base + tile * BN
        cols = col0 + tl.arange(0, BN)
        acc = _products(
            x,
            w,
            row0,
            col0,
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
        z, slope = _logits(acc, bias_ptr, cols, V, in_scale, out_scale, HAS_BIAS, SOFTCAP)
        # Columns past the end exist only in the tile: they lie below every real logit before the
        # maximum, and are exactly 0 after it.
        z = tl.where((cols < col_end)[None, :], z, FLOOR)
        _store_target(target_ptr, rows, y, col0, cols, z, BN)
        tile_max = tl.max(z, 1)
        m, total, spread = _add_tile(m, total, spread, z, tile_max, ENTROPY)
        # after the sums and from z: this needs a second exp2, but keeping both z and e alive would
        # spill registers
        if KEEP:
            k = tl.where(tile_max <= ref + headroom, ref, tl.ceil(tile_max))
            _keep_tile(
                kept_ptr,
                exp_ptr,
                z,
                k,
                rows,
                N,
                tile,
                cols,
                col_end,
                stride_kept,
                stride_exp,
                out_scale,
                KEEP_SLOPE,
                BN,
            )
    out = part_ptr + (split_base + split) * N + rows
    _store_statistics(out, N, parts, m, total, spread, rows < N)


@triton.jit(do_not_specialize=BATCH)
def _combine_kernel(
    part_ptr,
    target_ptr,
    logp_ptr,
    entropy_ptr,
    lse_ptr,
    N,
    parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combine the statistics of a row's splits, always in the same order, to logp, entropy and lse
    in nats.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    plane = parts * N.to(tl.int64)
    m = tl.full((BLOCK,), FLOOR, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    spread = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & (rows < N)[None, :]
        at = part_ptr + part.to(tl.int64)[:, None] * N + rows[None, :]
        part_m = tl.load(at, mask=mask, other=FLOOR)
        part_total = tl.load(at + plane, mask=mask, other=0.0)
        part_spread = tl.load(at + 2 * plane, mask=mask, other=0.0)
        new_m = tl.maximum(m, tl.max(part_m, 0))
        old, new = tl.exp2(m - new_m), tl.exp2(part_m - new_m[None, :])
        spread = old * (spread + (m - new_m) * total) + tl.sum(
            new * (part_spread + (part_m - new_m[None, :]) * part_total), 0
        )
        total = old * total + tl.sum(new * part_total, 0)
        m = new_m
    log_total = tl.log2(total)
    at_target = tl.load(target_ptr + rows, mask=rows < N, other=0.0)
    tl.store(logp_ptr + rows, (at_target - m - log_total) * TO_NATS, mask=rows < N)
    tl.store(entropy_ptr + rows, (log_total - spread / total) * TO_NATS, mask=rows < N)
    tl.store(lse_ptr + rows, (m + log_total) * TO_NATS, mask=rows < N)


@triton.jit
def _gradient(log2p, p, cols, y, a, b, c, HAS_C: tl.constexpr):
    """Return a [i = y] + p (b + c log p); a, b, c already include the factor from logit to raw
    score.
    """
    factor = b[:, None]
    if HAS_C:
        factor = factor + (c * TO_NATS)[:, None] * log2p
    return p * factor + tl.where(cols[None, :] == y[:, None], a[:, None], 0.0)


@triton.jit(do_not_specialize=BATCH)
def _dlogits_kernel(
    x,
    w,
    bias_ptr,
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
    out_scale,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_C: tl.constexpr,
):
    """Compute the scores of a slab of columns again, and from them the gradient of the raw scores
    in the operands' dtype.
    """
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
    for tile in tl.range(begin, end, flatten=True):
        col0 = col_base + tile * BN
        cols = col0 + tl.arange(0, BN)
        acc = _products(
            x,
            w,
            row0,
            col0,
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
        z, slope = _logits(acc, bias_ptr, cols, V, in_scale, out_scale, HAS_BIAS, SOFTCAP)
        log2p = z - lse2[:, None]
        dz = _gradient(log2p, tl.exp2(log2p), cols, y, a, b, c, HAS_C)
        if SOFTCAP:
            dz *= slope
        _store_tile(out_ptr, rows, tile, stride_out, dz, inside, cols, col_end, BN)


@triton.jit
def _saved_slope(kept, k, hit, at_target, out_scale):
    """Return the slope of the tanh from 2^(z-k); `at_target`: z of each row's target."""
    # A score so low that 2^(z-k) is 0 adds nothing, unless it is the target's; any finite
    # substitute for its logarithm is sufficient.
    z = tl.log2(tl.where(kept > 0.0, kept, 1.0)) + tl.where(kept > 0.0, k[:, None], FLOOR)
    t = tl.maximum(tl.where(hit, at_target[:, None], z) / out_scale, -1.0)
    return 1.0 - t * t


@triton.jit(do_not_specialize=BATCH)
def _saved_dlogits_kernel(
    kept_ptr, exp_ptr, at_ptr, y_ptr, logp2_ptr, lse2_ptr, a_ptr, b_ptr, out_ptr,
    N, col_base, col_end, tile_base, tiles, stride_kept, stride_exp, stride_out, out_scale,
    BM: tl.constexpr, BN: tl.constexpr, SOFTCAP: tl.constexpr, HAS_AT: tl.constexpr,
):  # fmt: skip
    """Compute the gradient (without an entropy gradient) from the saved 2^(z-k) and k: a single
    read and write of a slab.

    `at` maps a row to its saved row. The target's log p comes from the forward: the saved value may
    have underflowed, and its rounding would show in a - p b.
    """
    tile = tl.program_id(0) % tiles
    rows = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    inside = rows < N
    cols = col_base + tile * BN + tl.arange(0, BN)
    mask = inside[:, None] & (cols < col_end)[None, :]
    source = rows.to(tl.int64)
    if HAS_AT:
        source = tl.load(at_ptr + rows, mask=inside, other=0)
    kept = tl.load(
        kept_ptr + source[:, None] * stride_kept + cols.to(tl.int64)[None, :], mask=mask, other=0.0
    ).to(tl.float32)
    k = tl.load(exp_ptr + (tile_base + tile) * stride_exp + source, mask=inside, other=0.0)
    y = tl.load(y_ptr + rows, mask=inside, other=-1)
    lse2 = tl.load(lse2_ptr + rows, mask=inside, other=0.0)
    logp2 = tl.load(logp2_ptr + rows, mask=inside, other=0.0)
    a = tl.load(a_ptr + rows, mask=inside, other=0.0)
    b = tl.load(b_ptr + rows, mask=inside, other=0.0)
    hit = cols[None, :] == y[:, None]
    p = tl.where(hit, tl.exp2(logp2)[:, None], kept * tl.exp2(k - lse2)[:, None])
    dz = p * b[:, None] + tl.where(hit, a[:, None], 0.0)
    if SOFTCAP:
        dz *= _saved_slope(kept, k, hit, logp2 + lse2, out_scale)
    _store_tile(out_ptr, rows, tile, stride_out, dz, inside, cols, col_end, BN)


@triton.jit(do_not_specialize=BATCH)
def _align_kernel(
    kept_ptr,
    exp_ptr,
    new_ptr,
    N,
    columns,
    tiles,
    stride_kept,
    stride_exp,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """Convert a tile of saved values from the tile's exponents to the rows' common exponents.
    Usually the exponents are equal and nothing changes.
    """
    tile = tl.program_id(0) % tiles
    rows = tl.program_id(0) // tiles * BM + tl.arange(0, BM)
    old = tl.load(exp_ptr + tile * stride_exp + rows, mask=rows < N, other=0.0)
    new = tl.load(new_ptr + rows, mask=rows < N, other=0.0)
    if tl.max((old != new).to(tl.int32), 0) > 0:
        cols = tile * BN + tl.arange(0, BN)
        mask = (rows < N)[:, None] & (cols < columns)[None, :]
        at = kept_ptr + rows.to(tl.int64)[:, None] * stride_kept + cols[None, :]
        kept = tl.load(at, mask=mask, other=0.0).to(tl.float32) * tl.exp2(old - new)[:, None]
        tl.store(at, kept.to(kept_ptr.dtype.element_ty), mask=mask)
