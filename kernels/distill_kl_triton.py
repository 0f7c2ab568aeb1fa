"""The kernels of `distill_kl`: two products for the same tile of rows and columns, and an epilogue that needs both.

Two 128 x 128 float32 tiles over 8 warps are the same 128 accumulators a thread as one 128 x 256 tile of linear_logprob; the
products are 2 (D + E) clocks per row and column against about 60 of epilogue, so overlapping it matters less than there.
Sizes: 3 stages of (128 + 128) x 64 in bfloat16, for one product at a time, are 96 KiB.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.common import LN2, Head
from kernels.linear_logprob_triton import BATCH, FLOOR, GROUP, TO_NATS, _item, _logits, _products, _tile_range
from kernels.linear_logprob_triton import SLAB_SPLITS as SPLITS
from kernels.operands import add_mm_, matmul_options, operand
from kernels.slabs import chunk_rows, slabs
from kernels.tiles import Tiles, device_of, pair_tiles_for

FORWARD, REVERSE, MIXTURE = (tl.constexpr(i) for i in range(3))
MODES = {"forward": 0, "reverse": 1, "mixture": 2}



@triton.jit
def _both(
    xs, ws, xt, wt, row0, col0, N, V, stride_xs, stride_ws, stride_xt, stride_wt, in_s, out_s, in_t, out_t,
    D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DESC_S: tl.constexpr,
    DESC_T: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, CAP_S: tl.constexpr, CAP_T: tl.constexpr,
):  # fmt: skip
    """Student's and teacher's logits / log 2 of one tile (FLOOR past V), and the student's tanh slope."""
    cols = col0 + tl.arange(0, BN)
    acc_t = _products(xt, wt, row0, col0, N, V, stride_xt, stride_wt, E, BM, BN, BK, DESC_T, UPCAST, PRECISION)
    zt, _ = _logits(acc_t, N, cols, V, in_t, out_t, False, CAP_T)
    acc_s = _products(xs, ws, row0, col0, N, V, stride_xs, stride_ws, D, BM, BN, BK, DESC_S, UPCAST, PRECISION)
    zs, slope = _logits(acc_s, N, cols, V, in_s, out_s, False, CAP_S)
    inside = (cols < V)[None, :]
    return tl.where(inside, zs, FLOOR), tl.where(inside, zt, FLOOR), slope


@triton.jit
def _log2_mixture(log2p, log2q, beta):
    high = tl.maximum(log2p, log2q)
    return high + tl.log2(beta * tl.exp2(log2p - high) + (1.0 - beta) * tl.exp2(log2q - high))


@triton.jit(do_not_specialize=BATCH)
def _stats_kernel(
    xs, ws, xt, wt, part_ptr, N, V, tiles, stride_xs, stride_ws, stride_xt, stride_wt, in_s, out_s, in_t, out_t,
    MODE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DESC_S: tl.constexpr, DESC_T: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, CAP_S: tl.constexpr,
    CAP_T: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """To part[:, split, row]: both maxima, both sums, and the leading side's sum of (z - z of the other) 2^(z - maximum)."""
    block, split = _item(N, SPLITS, GROUP, BM)
    begin, end = _tile_range(split, tiles, SPLITS)
    rows = block * BM + tl.arange(0, BM)
    m_s = tl.full((BM,), FLOOR, tl.float32)
    m_t = tl.full((BM,), FLOOR, tl.float32)
    sum_s = tl.zeros((BM,), tl.float32)
    sum_t = tl.zeros((BM,), tl.float32)
    cross = tl.zeros((BM,), tl.float32)
    for tile in range(begin, end):
        zs, zt, _ = _both(
            xs, ws, xt, wt, block * BM, tile * BN, N, V, stride_xs, stride_ws, stride_xt, stride_wt, in_s, out_s, in_t, out_t,
            D, E, BM, BN, BK, DESC_S, DESC_T, UPCAST, PRECISION, CAP_S, CAP_T,
        )  # fmt: skip
        new_s = tl.maximum(m_s, tl.max(zs, 1))
        new_t = tl.maximum(m_t, tl.max(zt, 1))
        es = tl.exp2(zs - new_s[:, None])
        et = tl.exp2(zt - new_t[:, None])
        if MODE == FORWARD:
            cross = cross * tl.exp2(m_t - new_t) + tl.sum(et * (zt - zs), 1)
        elif MODE == REVERSE:
            cross = cross * tl.exp2(m_s - new_s) + tl.sum(es * (zs - zt), 1)
        sum_s = sum_s * tl.exp2(m_s - new_s) + tl.sum(es, 1)
        sum_t = sum_t * tl.exp2(m_t - new_t) + tl.sum(et, 1)
        m_s = new_s
        m_t = new_t
    at = part_ptr + split * N + rows
    tl.store(at, m_s, mask=rows < N)
    tl.store(at + SPLITS * N, sum_s, mask=rows < N)
    tl.store(at + 2 * SPLITS * N, m_t, mask=rows < N)
    tl.store(at + 3 * SPLITS * N, sum_t, mask=rows < N)
    tl.store(at + 4 * SPLITS * N, cross, mask=rows < N)


@triton.jit(do_not_specialize=BATCH)
def _mixture_kernel(
    xs, ws, xt, wt, lse_s_ptr, lse_t_ptr, part_ptr, beta, N, V, tiles, stride_xs, stride_ws, stride_xt, stride_wt, in_s,
    out_s, in_t,
    out_t, D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, DESC_S: tl.constexpr,
    DESC_T: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, CAP_S: tl.constexpr, CAP_T: tl.constexpr,
    SPLITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """To part[:, split, row]: this split's share of KL(p || m) and of KL(q || m), / log 2."""
    block, split = _item(N, SPLITS, GROUP, BM)
    begin, end = _tile_range(split, tiles, SPLITS)
    rows = block * BM + tl.arange(0, BM)
    lse_s = tl.load(lse_s_ptr + rows, mask=rows < N, other=0.0)
    lse_t = tl.load(lse_t_ptr + rows, mask=rows < N, other=0.0)
    kl_p = tl.zeros((BM,), tl.float32)
    kl_q = tl.zeros((BM,), tl.float32)
    for tile in range(begin, end):
        zs, zt, _ = _both(
            xs, ws, xt, wt, block * BM, tile * BN, N, V, stride_xs, stride_ws, stride_xt, stride_wt, in_s, out_s, in_t, out_t,
            D, E, BM, BN, BK, DESC_S, DESC_T, UPCAST, PRECISION, CAP_S, CAP_T,
        )  # fmt: skip
        log2q = zs - lse_s[:, None]
        log2p = zt - lse_t[:, None]
        log2m = _log2_mixture(log2p, log2q, beta)
        kl_p += tl.sum(tl.exp2(log2p) * (log2p - log2m), 1)
        kl_q += tl.sum(tl.exp2(log2q) * (log2q - log2m), 1)
    tl.store(part_ptr + split * N + rows, kl_p, mask=rows < N)
    tl.store(part_ptr + (SPLITS + split) * N + rows, kl_q, mask=rows < N)


@triton.jit(do_not_specialize=BATCH)
def _dlogits_kernel(
    xs, ws, xt, wt, lse_s_ptr, lse_t_ptr, rest_ptr, g_ptr, out_ptr, beta, col_base, stride_out, N, V, tiles, stride_xs,
    stride_ws,
    stride_xt, stride_wt, in_s, out_s, in_t, out_t, MODE: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, DESC_S: tl.constexpr, DESC_T: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr, CAP_S: tl.constexpr, CAP_T: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The gradient of the student's raw scores for one slab of columns; `g` holds the upstream gradient and every factor."""
    block, split = _item(N, SPLITS, GROUP, BM)
    begin, end = _tile_range(split, tiles, SPLITS)
    rows = block * BM + tl.arange(0, BM)
    inside = rows < N
    lse_s = tl.load(lse_s_ptr + rows, mask=inside, other=0.0)
    lse_t = tl.load(lse_t_ptr + rows, mask=inside, other=0.0)
    rest = tl.load(rest_ptr + rows, mask=inside, other=0.0)
    g = tl.load(g_ptr + rows, mask=inside, other=0.0)
    for tile in range(begin, end):
        col0 = col_base + tile * BN
        zs, zt, slope = _both(
            xs, ws, xt, wt, block * BM, col0, N, V, stride_xs, stride_ws, stride_xt, stride_wt, in_s, out_s, in_t, out_t,
            D, E, BM, BN, BK, DESC_S, DESC_T, UPCAST, PRECISION, CAP_S, CAP_T,
        )  # fmt: skip
        log2q = zs - lse_s[:, None]
        log2p = zt - lse_t[:, None]
        if MODE == FORWARD:
            dz = tl.exp2(log2q) - tl.exp2(log2p)
        elif MODE == REVERSE:
            dz = tl.exp2(log2q) * (log2q - log2p - rest[:, None]) * TO_NATS
        else:
            dz = tl.exp2(log2q) * (log2q - _log2_mixture(log2p, log2q, beta) - rest[:, None]) * (TO_NATS * (1.0 - beta))
        dz *= g[:, None]
        if CAP_S:
            dz *= slope
        where = out_ptr + rows.to(tl.int64)[:, None] * stride_out + (tile * BN + tl.arange(0, BN))[None, :]
        tl.store(where, dz.to(out_ptr.dtype.element_ty), mask=inside[:, None] & ((col0 + tl.arange(0, BN)) < V)[None, :])


# ------------------------------------------------------------------------------------------------------------ launch


class Pair:
    """Both heads' products: what every launch over them has in common."""

    def __init__(
        self, xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, student: Head, teacher: Head, tiles: Tiles | None
    ) -> None:
        self.tiles, self.D = tiles or pair_tiles_for(xs.dtype, device_of(xs)), xs.shape[1]
        self.xs, self.ws, xt, wt = operand(xs), operand(ws), operand(xt), operand(wt)
        self.N, self.V, self.student = len(xs), len(ws), student
        arg_xs, arg_ws, options_s = matmul_options(self.xs, self.ws, self.tiles)
        arg_xt, arg_wt, options_t = matmul_options(xt, wt, self.tiles)
        self.tensors = (arg_xs, arg_ws, arg_xt, arg_wt)
        strides = (t.stride(0) for t in (self.xs, self.ws, xt, wt))
        self.numbers = (*strides, student.in_scale, student.out_scale, teacher.in_scale, teacher.out_scale)
        self.options: dict[str, Any] = options_s | {"E": options_t["D"], "DESC_S": options_s["DESCRIPTORS"]}
        self.options |= {"DESC_T": options_t["DESCRIPTORS"], "CAP_S": student.softcap is not None}
        self.options |= {"CAP_T": teacher.softcap is not None, "SPLITS": SPLITS, "GROUP": GROUP}
        del self.options["DESCRIPTORS"]

    def grid(self) -> tuple[int]:
        return (triton.cdiv(self.N, self.tiles.rows) * SPLITS,)

    def tile_count(self, columns: int) -> int:
        return triton.cdiv(columns, self.tiles.columns)


def forward(
    xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, student: Head, teacher: Head, kind: str, beta: float,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As in distill_kl.py."""
    pair = Pair(xs, ws, xt, wt, student, teacher, tiles)
    part = torch.empty((5, SPLITS, pair.N), dtype=torch.float32, device=xs.device)
    count = pair.tile_count(pair.V)
    _stats_kernel[pair.grid()](*pair.tensors, part, pair.N, pair.V, count, *pair.numbers, MODE=MODES[kind], **pair.options)
    top = part[0].amax(0), part[2].amax(0)
    weight = torch.exp2(part[0] - top[0]), torch.exp2(part[2] - top[1])
    total_s, total_t = (part[1] * weight[0]).sum(0), (part[3] * weight[1]).sum(0)
    lse_s, lse_t = top[0] + torch.log2(total_s), top[1] + torch.log2(total_t)
    if kind == "mixture":
        shares = torch.empty((2, SPLITS, pair.N), dtype=torch.float32, device=xs.device)
        _mixture_kernel[pair.grid()](
            *pair.tensors, lse_s, lse_t, shares, beta, pair.N, pair.V, count, *pair.numbers, **pair.options
        )  # fmt: skip
        kl_p, rest = shares.sum(1).unbind(0)
        return (beta * kl_p + (1.0 - beta) * rest) * LN2, lse_s, lse_t, rest
    if kind == "forward":
        kl = (part[4] * weight[1]).sum(0) / total_t - lse_t + lse_s
    else:
        kl = (part[4] * weight[0]).sum(0) / total_s - lse_s + lse_t
    return kl * LN2, lse_s, lse_t, kl


def backward(
    xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, student: Head, teacher: Head, kind: str, beta: float, g: Tensor,
    lse_s: Tensor, lse_t: Tensor, rest: Tensor, *, need_x: bool, need_w: bool, tiles: Tiles | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """As in distill_kl.py: dlogits of a slab by the kernel, products with it by cuBLAS."""
    pair = Pair(xs, ws, xt, wt, student, teacher, tiles)
    spans, scaled = list(slabs(pair.V, pair.tiles.columns)), g * student.grad_scale
    step = chunk_rows(pair.N, spans[0][1], pair.tiles.rows)
    pieces = [slice(at, min(at + step, pair.N)) for at in range(0, pair.N, step)]
    pairs = [(rows, Pair(xs[rows], pair.ws[:, : pair.D], xt[rows], wt, student, teacher, pair.tiles)) for rows in pieces]
    buffer = pair.xs.new_empty(step * spans[0][1])
    dx = torch.zeros(pair.xs.shape, dtype=torch.float32, device=xs.device) if need_x else None
    dw = torch.empty(pair.ws.shape, dtype=ws.dtype, device=ws.device) if need_w else None
    for lo, hi in spans:
        sums = None if dw is None else torch.zeros((hi - lo, dw.shape[1]), dtype=torch.float32, device=ws.device)
        for rows, part in pairs:
            dz = buffer.narrow(0, 0, part.N * (hi - lo)).view(part.N, hi - lo)
            _dlogits_kernel[part.grid()](
                *part.tensors, lse_s[rows], lse_t[rows], rest[rows], scaled[rows], dz, beta, lo, dz.stride(0), part.N, part.V,
                part.tile_count(hi - lo), *part.numbers, MODE=MODES[kind], **part.options,
            )  # fmt: skip
            if sums is not None:
                add_mm_(sums, dz.t(), part.xs)
            if dx is not None:
                add_mm_(dx[rows], dz, pair.ws.narrow(0, lo, hi - lo))
        if dw is not None and sums is not None:
            dw.narrow(0, lo, hi - lo).copy_(sums)
    dx = None if dx is None else dx[:, : pair.D].to(xs.dtype)
    return dx, None if dw is None else dw[:, : pair.D].contiguous()
