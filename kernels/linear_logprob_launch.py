"""Launch the kernels of linear_logprob_triton.py, with the same function names as
linear_logprob_torch.py.

Every [N, V] quantity exists for a single slab of columns at a time: the extra memory does not grow
with V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

from kernels.common import LOG2E, LOW, Head
from kernels.device_checks import branches_agree
from kernels.linear_logprob_torch import Coefficients, Forward, Gradients
from kernels.linear_logprob_triton import (
    GROUP,
    SLAB_SPLITS,
    SPLITS,
    _align_kernel,
    _combine_kernel,
    _dlogits_kernel,
    _forward_kernel,
    _saved_dlogits_kernel,
)
from kernels.linear_logprob_ws import _dlogits_ws_kernel, _forward_ws_kernel
from kernels.operands import add_mm_, cut_rows, interpreting, matmul_options, operand
from kernels.slabs import chunk_rows, slabs, whole_lines
from kernels.tiles import SPECIAL, Tiles, device_of, multiprocessors, tiles_for


def special_tiles(x: Tensor) -> Tiles | None:
    """Return the tiles of the warp-specialized kernels for these hidden states.

    Returns None if the kernels do not support the dtype or GPU, or give wrong numbers on this
    device.
    """
    if not (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and 90 <= device_of(x).capability < 100
    ):
        return None
    return SPECIAL if branches_agree(_trial, x.device.index or 0, x.dtype) else None


def _trial(special: bool, index: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Run forward and dlogits of a small head by either branch, at sizes that end within a tile."""
    device = torch.device("cuda", index)
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(300, 328, generator=g, device=device).to(dtype)
    w = (torch.randn(5001, 328, generator=g, device=device) / 8).to(dtype)
    y, a = (
        torch.randint(0, 5001, (300,), generator=g, device=device),
        torch.randn(300, generator=g, device=device),
    )
    scores = Scores(
        x, w, y, None, Head(0.8), tiles_for(328, dtype, device_of(x)), SPECIAL if special else None
    )
    out = scores.combine(scores.statistics(True))
    dz = torch.zeros(300, 905, dtype=dtype, device=device)
    scores.dlogits(dz, 4096, 5001, out.lse * LOG2E, Coefficients(a, -a, a.flip(0)))
    kept, exponents = (
        dz.new_zeros(300, 5008).narrow(1, 0, 5001),
        a.new_zeros(triton.cdiv(5001, scores.tiles.columns), 300),
    )
    resaved = scores.combine(scores.statistics(True, (kept, exponents)))
    p = torch.empty_like(dz)
    ones, zeros = torch.ones_like(a), torch.zeros_like(a)
    scores.saved_dlogits(
        p, 0, 905, kept, exponents, None, resaved.logp * LOG2E, resaved.lse * LOG2E, zeros, ones
    )
    return out.logp, out.entropy, out.lse, resaved.logp, resaved.entropy, torch.cat((p, dz)).float()


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate the scratch memory that a launch requests: it holds descriptors that are made in a
    kernel.
    """
    return torch.empty(size, dtype=torch.int8, device="cuda")


class Scores:
    """Hold the operands, tiles and options that all launches over the scores of a head share."""

    def __init__(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        head: Head,
        tiles: Tiles | None,
        special: Tiles | None = None,
    ) -> None:
        """Prepare the operands and options.

        `special`: tiles for the kernels of kernels/linear_logprob_ws.py, used by the launches that
        these kernels support; None: the result of `special_tiles`.
        """
        self.tiles = tiles or tiles_for(x.shape[1], x.dtype, device_of(x))
        self.D = x.shape[1]  # before `operand`, which may pad with zeros
        self.x, self.w, self.y, self.bias, self.head = (
            operand(x),
            operand(w),
            y.contiguous(),
            bias,
            head,
        )
        self.N, self.V = x.shape[0], w.shape[0]
        self.x_arg, self.w_arg, self.options = matmul_options(self.x, self.w, self.tiles)
        self.options |= {
            "GROUP": GROUP,
            "HAS_BIAS": bias is not None,
            "SOFTCAP": head.softcap is not None,
        }
        self.bias_arg = self.y if bias is None else bias.contiguous()
        self.at_target = torch.empty(self.N, dtype=torch.float32, device=x.device)
        plain = bias is None and head.softcap is None and tiles is None
        self.special = special or (special_tiles(self.x) if plain else None)

    def chunks(self, width: int) -> list[tuple[slice, Scores]]:
        """Return (rows, scores) pairs that cover all rows.

        This is `self` for all rows, unless a slab of `width` columns would be too large for them;
        then each pair covers a chunk of rows.
        """
        step = chunk_rows(self.N, width, self.tiles.rows)
        if step >= self.N:
            return [(slice(0, self.N), self)]
        pieces = [slice(at, min(at + step, self.N)) for at in range(0, self.N, step)]
        cut = [(rows, cut_rows(self.x, rows), cut_rows(self.y, rows)) for rows in pieces]
        return [
            (rows, Scores(x, self.w, y, self.bias, self.head, self.tiles, self.special))
            for rows, x, y in cut
        ]

    def blocks(self) -> int:
        """Return the number of row blocks."""
        return triton.cdiv(self.N, self.tiles.rows)

    def parts(self, splits: int, count: int) -> Tensor:
        """Return an empty tensor for the partial statistics of `count` launches over some columns:
        [3, splits * count, N].
        """
        return torch.empty((3, splits * count, self.N), dtype=torch.float32, device=self.x.device)

    def whole_splits(self) -> int:
        """Return the number of splits of a launch over the full vocabulary: at most a split per
        tile.
        """
        return min(SPLITS, triton.cdiv(self.V, (self.special or self.tiles).columns))

    def special_options(self, tiles: Tiles) -> dict[str, Any]:
        """Return the options of a warp-specialized launch, which must follow at once.

        The function also sets Triton's allocator: the allocator is local to the thread, and
        autograd launches from its worker threads.
        """
        triton.set_allocator(_scratch)
        sizes = {
            "D": self.x.shape[1],
            "BM": tiles.rows,
            "BN": tiles.columns,
            "BK": tiles.depth,
            "GROUP": GROUP,
            "WS": not interpreting(),
        }
        sizes |= {"num_warps": tiles.warps, "num_stages": tiles.stages}
        return sizes | {name: self.options[name] for name in ("UPCAST", "PRECISION")}

    def statistics(self, entropy: bool, keep: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Launch over all scores; return the partial statistics of every row and fill `at_target`.

        `keep`: the tensors (2^(z-k), k) that the saved plan fills.
        """
        splits, tiles, x = self.whole_splits(), self.special, self.x
        part = self.parts(splits, 1)
        kept, exponents = keep or (part, part)
        if tiles is None:
            reference = (
                None
                if keep is None
                else torch.full((self.N,), LOW, dtype=torch.float32, device=x.device)
            )
            kwargs: dict[str, Any] = (
                {} if keep is None else {"kept": kept, "exponents": exponents, "ref": reference}
            )
            self.forward(part, 0, self.V, 0, splits, entropy=entropy, **kwargs)
        else:
            _forward_ws_kernel[(triton.cdiv(self.N, tiles.rows) * splits,)](
                x,
                self.w,
                self.y,
                part,
                self.at_target,
                kept,
                exponents,
                self.N,
                self.V,
                triton.cdiv(self.V, tiles.columns),
                splits,
                exponents.shape[0],
                x.stride(0),
                self.w.stride(0),
                kept.stride(0),
                exponents.stride(0),
                self.head.in_scale,
                SPLITS=splits,
                ENTROPY=entropy,
                KEEP=keep is not None,
                HALVES=tiles.columns // self.tiles.columns,
                **self.special_options(tiles),
            )
        return part

    def forward(
        self,
        part: Tensor,
        lo: int,
        hi: int,
        index: int,
        splits: int,
        *,
        entropy: bool,
        kept: Tensor | None = None,
        exponents: Tensor | None = None,
        ref: Tensor | None = None,
        headroom: float = 0.0,
        keep_slope: bool = False,
    ) -> None:
        """Launch the forward kernel over columns [lo, hi) and write the partial statistics from
        index * splits on.
        """
        keep = kept is not None and exponents is not None
        _forward_kernel[(self.blocks() * splits,)](
            self.x_arg,
            self.w_arg,
            self.bias_arg,
            self.y,
            part,
            self.at_target,
            kept if keep else part,
            exponents if keep else part,
            ref if keep else part,
            self.N,
            self.V,
            lo,
            triton.cdiv(hi - lo, self.tiles.columns),
            index * splits,
            part.shape[1],
            self.x.stride(0),
            self.w.stride(0),
            kept.stride(0) if kept is not None else 0,
            exponents.stride(0) if exponents is not None else 0,
            self.head.in_scale,
            self.head.out_scale,
            headroom,
            ENTROPY=entropy,
            KEEP=keep,
            KEEP_SLOPE=keep_slope,
            SPLITS=splits,
            **self.options,
        )

    def combine(self, part: Tensor) -> Forward:
        """Combine the partial statistics to logp, entropy and lse, float32 [N]."""
        logp, entropy, lse = (
            torch.empty(self.N, dtype=torch.float32, device=self.x.device) for _ in range(3)
        )
        _combine_kernel[(triton.cdiv(self.N, 32),)](
            part,
            self.at_target,
            logp,
            entropy,
            lse,
            self.N,
            part.shape[1],
            PARTS=32,
            BLOCK=32,
            num_warps=4,
        )
        return Forward(logp, entropy, lse, None)

    def dlogits(self, out: Tensor, lo: int, hi: int, lse2: Tensor, co: Coefficients) -> None:
        """Launch the kernel that recomputes the scores of columns [lo, hi) and writes their
        gradient to `out`.
        """
        tiles, c = self.special, co.b if co.c is None else co.c
        if tiles is not None:
            count = triton.cdiv(hi - lo, tiles.columns)
            _dlogits_ws_kernel[
                (min(multiprocessors(self.x), triton.cdiv(self.N, tiles.rows) * count),)
            ](
                self.x,
                self.w,
                self.y,
                lse2,
                co.a,
                co.b,
                c,
                out,
                self.N,
                self.V,
                lo,
                count,
                self.x.stride(0),
                self.w.stride(0),
                out.stride(0),
                self.head.in_scale,
                HAS_C=co.c is not None,
                **self.special_options(tiles),
            )
            return
        # for few rows, a program for each tile
        splits = SLAB_SPLITS if self.blocks() >= GROUP else SPLITS
        _dlogits_kernel[(self.blocks() * splits,)](
            self.x_arg,
            self.w_arg,
            self.bias_arg,
            self.y,
            lse2,
            co.a,
            co.b,
            c,
            out,
            self.N,
            self.V,
            lo,
            triton.cdiv(hi - lo, self.tiles.columns),
            self.x.stride(0),
            self.w.stride(0),
            out.stride(0),
            self.head.in_scale,
            self.head.out_scale,
            HAS_C=co.c is not None,
            SPLITS=splits,
            **self.options,
        )

    def saved_dlogits(
        self,
        out: Tensor,
        lo: int,
        hi: int,
        kept: Tensor,
        exponents: Tensor,
        at: Tensor | None,
        logp2: Tensor,
        lse2: Tensor,
        a: Tensor,
        b: Tensor,
    ) -> None:
        """Write the gradient of columns [lo, hi) to `out`, from what `statistics` saved.

        Row i is row at[i] of the saved tensors (None: row i).
        """
        BM, BN = 32, self.tiles.columns
        count = triton.cdiv(hi - lo, BN)
        _saved_dlogits_kernel[(triton.cdiv(self.N, BM) * count,)](
            kept,
            exponents,
            self.y if at is None else at,
            self.y,
            logp2,
            lse2,
            a,
            b,
            out,
            self.N,
            self.V,
            lo,
            lo // BN,
            count,
            kept.stride(0),
            exponents.stride(0),
            out.stride(0),
            self.head.out_scale,
            BM=BM,
            BN=BN,
            SOFTCAP=self.head.softcap is not None,
            HAS_AT=at is not None,
            num_warps=8,
        )

    def gradients(
        self,
        fill: Fill,
        need_x: bool,
        need_w: bool,
        need_bias: bool,
        first: int = 0,
        whole: bool = False,
    ) -> Gradients:
        """Compute dX, dW and dbias from `fill(scores, rows, dlogits, lo, hi)`, slab by slab.

        Each dW[slab] is rounded once; dX adds up in float32. dW of the columns before `first` is 0.
        `whole`: process all columns and rows at once, as a single [N, V] tensor that two products
        use.
        """
        spans = [(0, self.V)] if whole else list(slabs(self.V, self.tiles.columns))
        chunks = [(slice(0, self.N), self)] if whole else self.chunks(spans[0][1])
        buffer = self.x.new_empty(chunks[0][1].N * whole_lines(spans[0][1] - spans[0][0]))
        dx = (
            torch.zeros(self.x.shape, dtype=torch.float32, device=self.x.device)
            if need_x and not whole
            else None
        )
        dw = (
            (torch.zeros if first else torch.empty)(
                self.w.shape, dtype=self.w.dtype, device=self.w.device
            )
            if need_w
            else None
        )
        learns = None if dw is None else dw.narrow(1, first, dw.shape[1] - first)
        db = torch.zeros(self.V, dtype=torch.float32, device=self.w.device) if need_bias else None
        for lo, hi in spans:
            direct = len(chunks) == 1 and first == 0
            sums = (
                None
                if learns is None or direct
                else learns.new_zeros((hi - lo, learns.shape[1]), dtype=torch.float32)
            )
            for rows, part in chunks:
                line = whole_lines(hi - lo)
                dz = buffer.narrow(0, 0, part.N * line).view(part.N, line).narrow(1, 0, hi - lo)
                fill(part, rows, dz, lo, hi)
                if sums is not None:
                    add_mm_(sums, dz.t(), part.x.narrow(1, first, sums.shape[1]))
                elif dw is not None:
                    torch.mm(dz.t(), part.x, out=dw.narrow(0, lo, hi - lo))
                if need_x and whole:
                    dx = torch.mm(dz, self.w)
                elif dx is not None:
                    add_mm_(cut_rows(dx, rows), dz, self.w.narrow(0, lo, hi - lo))
                if db is not None:
                    db.narrow(0, lo, hi - lo).add_(torch.sum(dz, 0, dtype=torch.float32))
            if sums is not None and learns is not None:
                # no Python indexing, as in cut_rows
                torch.ops.aten.copy_(learns.narrow(0, lo, hi - lo), sums)
        dx = None if dx is None else dx.narrow(1, 0, self.D).to(self.x.dtype)
        dw = dw if dw is None or dw.shape[1] == self.D else dw.narrow(1, 0, self.D).contiguous()
        return Gradients(
            dx, dw, None if db is None or self.bias is None else db.to(self.bias.dtype)
        )


Fill: TypeAlias = Callable[[Scores, slice, Tensor, int, int], None]


def _scaled(co: Coefficients, scale: float) -> Coefficients:
    """Return contiguous coefficients multiplied by `scale`."""
    a, b, c = ((t if scale == 1.0 or t is None else t * scale) for t in co)
    assert a is not None and b is not None
    return Coefficients(a.contiguous(), b.contiguous(), None if c is None else c.contiguous())


def _rows(co: Coefficients, rows: slice) -> Coefficients:
    """Return the coefficients of a slice of rows."""
    return Coefficients(
        cut_rows(co.a, rows), cut_rows(co.b, rows), None if co.c is None else cut_rows(co.c, rows)
    )


def forward(
    x_ND: Tensor,
    w_VD: Tensor,
    y_N: Tensor,
    bias_V: Tensor | None,
    head: Head,
    *,
    entropy: bool = True,
    expected: bool = False,
    tiles: Tiles | None = None,
) -> Forward:
    """Compute the forward as in linear_logprob_torch.py.

    A single launch processes all scores. With `expected`, each slab has a launch followed by a
    matrix product.
    """
    scores = Scores(x_ND, w_VD, y_N, bias_V, head, tiles)
    if not expected:
        return scores.combine(scores.statistics(entropy))
    spans = list(slabs(scores.V, scores.tiles.columns))
    pieces = [_forward_expected(piece, spans, entropy) for _, piece in scores.chunks(spans[0][1])]
    logp, ent, lse, mean = (
        torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True)
    )
    return Forward(logp, ent, lse, mean.narrow(1, 0, scores.D))


def _forward_expected(scores: Scores, spans: list[tuple[int, int]], entropy: bool) -> Forward:
    """Compute the forward and E_p[slope W] [N, D]: sums of 2^(z-k) of a slab times W[slab], at the
    rows' current exponents k.

    k starts from the target's score. This score never exceeds the row's maximum, so no relevant
    term underflows. For tokens sampled from the model it is seldom far below the maximum, so k
    seldom changes and the align kernel seldom has work.
    """
    x, w, head, tile = scores.x, scores.w, scores.head, scores.tiles.columns
    part, width = scores.parts(SLAB_SPLITS, len(spans)), spans[0][1] - spans[0][0]
    buffer = x.new_empty(scores.N * whole_lines(width))
    exponents = torch.empty(
        (triton.cdiv(width, tile), scores.N), dtype=torch.float32, device=x.device
    )
    mean = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    ref = _target_exponent(scores)
    # float16 overflows at 2^16; 2^40 is far below bfloat16's limit
    headroom = 14.0 if x.dtype == torch.float16 else 40.0
    for index, (lo, hi) in enumerate(spans):
        line = whole_lines(hi - lo)
        kept = buffer.narrow(0, 0, scores.N * line).view(scores.N, line).narrow(1, 0, hi - lo)
        exps = exponents.narrow(0, 0, triton.cdiv(hi - lo, tile))
        scores.forward(
            part,
            lo,
            hi,
            index,
            SLAB_SPLITS,
            entropy=entropy,
            kept=kept,
            exponents=exps,
            ref=ref,
            headroom=headroom,
            keep_slope=head.softcap is not None,
        )
        common = exps.amax(0)
        _align_kernel[(triton.cdiv(scores.N, 32) * exps.shape[0],)](
            kept,
            exps,
            common,
            scores.N,
            hi - lo,
            exps.shape[0],
            kept.stride(0),
            exps.stride(0),
            BM=32,
            BN=tile,
            num_warps=8,
        )
        add_mm_(mean.mul_(torch.exp2(ref - common).unsqueeze(1)), kept, w.narrow(0, lo, hi - lo))
        ref = common
    out = scores.combine(part)
    return out._replace(expected=mean.mul_(torch.exp2(ref - out.lse * LOG2E).unsqueeze(1)))


def _target_exponent(scores: Scores) -> Tensor:
    """Return the target's logit / log 2, rounded up, float32 [N].

    The value is accurate to a percent, which is enough for a reference exponent.
    """
    head = scores.head
    raw = (
        torch.bmm(scores.x.unsqueeze(1), scores.w.index_select(0, scores.y).unsqueeze(2))
        .flatten()
        .float()
    )
    raw = raw if scores.bias is None else raw + scores.bias[scores.y].float().clamp(min=LOW)
    z = (
        raw * head.in_scale
        if head.softcap is None
        else torch.tanh(raw * head.in_scale) * head.out_scale
    )
    return z.ceil()


def saved_forward(
    x_ND: Tensor,
    w_VD: Tensor,
    y_N: Tensor,
    bias_V: Tensor | None,
    head: Head,
    kept_NV: Tensor,
    exponents: Tensor,
    *,
    entropy: bool,
    tiles: Tiles | None = None,
) -> Forward:
    """Compute `forward`, and write 2^(z-k) of every score to `kept_NV` and k to `exponents` [tiles,
    N].

    In bfloat16 this saves probabilities to 2^-9 relative, whereas bfloat16 logits near 20 would
    give them to 2^-4.
    """
    scores = Scores(x_ND, w_VD, y_N, bias_V, head, tiles)
    if kept_NV.stride(0) * kept_NV.element_size() % 16:
        scores.special = None  # its copies need rows aligned to 16 bytes
    return scores.combine(scores.statistics(entropy, (kept_NV, exponents)))


def backward(
    x_ND: Tensor,
    w_VD: Tensor,
    y_N: Tensor,
    bias_V: Tensor | None,
    head: Head,
    co: Coefficients,
    lse_N: Tensor,
    *,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
    frozen_columns: int = 0,
    tiles: Tiles | None = None,
) -> Gradients:
    """Compute the gradients from scores that are computed again, a slab at a time."""
    scores = Scores(x_ND, w_VD, y_N, bias_V, head, tiles)
    scaled, lse2 = _scaled(co, head.grad_scale), lse_N * LOG2E

    def fill(part: Scores, rows: slice, dz: Tensor, lo: int, hi: int) -> None:
        part.dlogits(dz, lo, hi, cut_rows(lse2, rows), _rows(scaled, rows))

    return scores.gradients(fill, need_x, need_w, need_bias, frozen_columns)


def saved_backward(
    x_ND: Tensor,
    w_VD: Tensor,
    y_N: Tensor,
    bias_V: Tensor | None,
    head: Head,
    co: Coefficients,
    lse_N: Tensor,
    kept_TV: Tensor,
    exponents: Tensor,
    logp_N: Tensor,
    at_N: Tensor | None,
    *,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
    frozen_columns: int = 0,
    whole: bool = False,
    tiles: Tiles | None = None,
) -> Gradients:
    """Compute the gradients from what `saved_forward` saved; row i of x is row at_N[i] of the saved
    tensors (None: row i).

    The gradient of the entropy is not supported: it would multiply log p by the rounding of the
    saved values, 2^-9 in bfloat16, and a confident token's gradient is next to nothing. `whole`:
    use another [N, V] tensor and two products of it, instead of slabs that add up dX in float32.
    """
    assert co.c is None, "the gradient of the entropy needs scores that are computed again"
    scores = Scores(x_ND, w_VD, y_N, bias_V, head, tiles)
    scaled, lse2, logp2 = _scaled(co, head.grad_scale), lse_N * LOG2E, logp_N * LOG2E

    def fill(part: Scores, rows: slice, dz: Tensor, lo: int, hi: int) -> None:
        a, b, _ = _rows(scaled, rows)
        # without at_N the saved rows are the rows of x, so take them from the chunk's first row on
        first = 0 if at_N is not None else rows.start
        kept, exps = (
            kept_TV.narrow(0, first, kept_TV.shape[0] - first),
            exponents.narrow(1, first, exponents.shape[1] - first),
        )
        at = None if at_N is None else cut_rows(at_N, rows)
        part.saved_dlogits(
            dz, lo, hi, kept, exps, at, cut_rows(logp2, rows), cut_rows(lse2, rows), a, b
        )

    return scores.gradients(fill, need_x, need_w, need_bias, frozen_columns, whole)
