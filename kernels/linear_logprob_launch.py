"""Compute forward and backward on CUDA with the launches of score_launcher.py, by the same function
names as linear_logprob_torch.py.

Every [N, V] quantity exists for a single slab of columns at a time: the extra memory does not grow
with V.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import triton
from torch import Tensor

from kernels.common import LARGE_NEGATIVE, LOG2E, HeadConfig
from kernels.linear_logprob_torch import ForwardOutput, GradientCoefficients, HeadGradients
from kernels.linear_logprob_triton import CHUNK_SPLITS
from kernels.matmul_operands import add_matmul_, narrow_rows
from kernels.score_launcher import ScoreLauncher
from kernels.tile_config import TileConfig
from kernels.vocab_chunks import align_columns, iter_vocab_chunks

# (scores, rows, dlogits, lo, hi): writes the gradient of columns [lo, hi) of some rows' scores
FillDlogits: TypeAlias = Callable[[ScoreLauncher, slice, Tensor, int, int], None]


def _compute_gradients(
    scores: ScoreLauncher,
    fill: FillDlogits,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
    first_column: int = 0,
    one_chunk: bool = False,
) -> HeadGradients:
    """Compute dX, dW and dbias from the dlogits that `fill` writes, slab by slab.

    Each dW[slab] is rounded once; dX adds up in float32. dW of the columns before `first_column` is
    0. `one_chunk`: process all columns and rows at once, as a single [N, V] tensor that two
    products use.
    """
    x, w, V = scores.x, scores.w, scores.V
    spans = [(0, V)] if one_chunk else list(iter_vocab_chunks(V, scores.tiles.columns))
    chunks = [(slice(0, scores.N), scores)] if one_chunk else scores.row_chunks(spans[0][1])
    buffer = x.new_empty(chunks[0][1].N * align_columns(spans[0][1] - spans[0][0]))
    dx = x.new_zeros(x.shape, dtype=torch.float32) if need_x and not one_chunk else None
    dw = (torch.zeros_like if first_column else torch.empty_like)(w) if need_w else None
    db = w.new_zeros(V, dtype=torch.float32) if need_bias else None
    trained = x.shape[1] - first_column
    for lo, hi in spans:
        size, line, sums = hi - lo, align_columns(hi - lo), None
        slab = None if dw is None else dw.narrow(1, first_column, trained).narrow(0, lo, size)
        if slab is not None and (len(chunks) > 1 or first_column):
            sums = slab.new_zeros(slab.shape, dtype=torch.float32)
        for rows, part in chunks:
            dz = buffer.narrow(0, 0, part.N * line).view(part.N, line).narrow(1, 0, size)
            fill(part, rows, dz, lo, hi)
            _add_weight_product(part, dz, slab, sums)
            if dx is not None:
                add_matmul_(narrow_rows(dx, rows), dz, w.narrow(0, lo, size))
            elif need_x:
                dx = torch.mm(dz, w)
            if db is not None:
                db.narrow(0, lo, size).add_(torch.sum(dz, 0, dtype=torch.float32))
        if slab is not None and sums is not None:
            # no Python indexing, as in narrow_rows
            torch.ops.aten.copy_(slab, sums)
    return _convert_sums(scores, dx, dw, db)


def _add_weight_product(
    part: ScoreLauncher, dz: Tensor, slab: Tensor | None, sums: Tensor | None
) -> None:
    """Add dlogits times hidden states to the `sums` of dW's slab. If `sums` is None, write the
    product to the slab: it is the slab's only one.
    """
    if sums is not None:
        first = part.x.shape[1] - sums.shape[1]
        add_matmul_(sums, dz.t(), part.x.narrow(1, first, sums.shape[1]))
    elif slab is not None:
        torch.mm(dz.t(), part.x, out=slab)


def _convert_sums(
    scores: ScoreLauncher, dx: Tensor | None, dw: Tensor | None, db: Tensor | None
) -> HeadGradients:
    """Return the gradients in the dtypes of their inputs, without the columns that `align_operand`
    added.
    """
    x, bias, D = scores.x, scores.bias, scores.D
    if dw is not None and dw.shape[1] != D:
        dw = dw.narrow(1, 0, D).contiguous()
    return HeadGradients(
        None if dx is None else dx.narrow(1, 0, D).to(x.dtype),
        dw,
        None if db is None or bias is None else db.to(bias.dtype),
    )


def _scale_coefficients(co: GradientCoefficients, scale: float) -> GradientCoefficients:
    """Return contiguous coefficients multiplied by `scale`."""
    a, b, c = ((t if scale == 1.0 or t is None else t * scale) for t in co)
    assert a is not None and b is not None
    return GradientCoefficients(
        a.contiguous(), b.contiguous(), None if c is None else c.contiguous()
    )


def _slice_coefficients(co: GradientCoefficients, rows: slice) -> GradientCoefficients:
    """Return the coefficients of a slice of rows."""
    return GradientCoefficients(
        narrow_rows(co.a, rows),
        narrow_rows(co.b, rows),
        None if co.c is None else narrow_rows(co.c, rows),
    )


def forward(
    x_ND: Tensor,
    w_VD: Tensor,
    y_N: Tensor,
    bias_V: Tensor | None,
    head: HeadConfig,
    *,
    entropy: bool = True,
    expected: bool = False,
    tiles: TileConfig | None = None,
) -> ForwardOutput:
    """Compute the forward as in linear_logprob_torch.py.

    A single launch processes all scores. With `expected`, each slab has a launch followed by a
    matrix product.
    """
    scores = ScoreLauncher(x_ND, w_VD, y_N, bias_V, head, tiles)
    if not expected:
        return scores.combine(scores.statistics(entropy))
    spans = list(iter_vocab_chunks(scores.V, scores.tiles.columns))
    pieces = [
        _forward_expected(piece, spans, entropy) for _, piece in scores.row_chunks(spans[0][1])
    ]
    logp, ent, lse, mean = (
        torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*pieces, strict=True)
    )
    return ForwardOutput(logp, ent, lse, mean.narrow(1, 0, scores.D))


def _forward_expected(
    scores: ScoreLauncher, spans: list[tuple[int, int]], entropy: bool
) -> ForwardOutput:
    """Compute the forward and E_p[slope W] [N, D]: sums of 2^(z-k) of a slab times W[slab], at the
    rows' current exponents k.

    k starts from the target's score. This score never exceeds the row's maximum, so no relevant
    term underflows. For tokens sampled from the model it is seldom far below the maximum, so k
    seldom changes and the align kernel seldom has work.
    """
    x, w, head, tile = scores.x, scores.w, scores.head, scores.tiles.columns
    part, width = scores.empty_partials(CHUNK_SPLITS, len(spans)), spans[0][1] - spans[0][0]
    buffer = x.new_empty(scores.N * align_columns(width))
    exponents = torch.empty(
        (triton.cdiv(width, tile), scores.N), dtype=torch.float32, device=x.device
    )
    mean = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    ref = _target_exponent(scores)
    # float16 overflows at 2^16; 2^40 is far below bfloat16's limit
    headroom = 14.0 if x.dtype == torch.float16 else 40.0
    for index, (lo, hi) in enumerate(spans):
        line = align_columns(hi - lo)
        kept = buffer.narrow(0, 0, scores.N * line).view(scores.N, line).narrow(1, 0, hi - lo)
        exps = exponents.narrow(0, 0, triton.cdiv(hi - lo, tile))
        scores.forward(
            part,
            lo,
            hi,
            index,
            CHUNK_SPLITS,
            entropy=entropy,
            kept=kept,
            exponents=exps,
            ref=ref,
            headroom=headroom,
            keep_slope=head.softcap is not None,
        )
        common = exps.amax(0)
        scores.align(kept, exps, common)
        add_matmul_(
            mean.mul_(torch.exp2(ref - common).unsqueeze(1)), kept, w.narrow(0, lo, hi - lo)
        )
        ref = common
    out = scores.combine(part)
    return out._replace(expected=mean.mul_(torch.exp2(ref - out.lse * LOG2E).unsqueeze(1)))


def _target_exponent(scores: ScoreLauncher) -> Tensor:
    """Return the target's logit / log 2, rounded up, float32 [N].

    The value is accurate to a percent, which is enough for a reference exponent.
    """
    head = scores.head
    raw = (
        torch.bmm(scores.x.unsqueeze(1), scores.w.index_select(0, scores.y).unsqueeze(2))
        .flatten()
        .float()
    )
    raw = (
        raw
        if scores.bias is None
        else raw + scores.bias[scores.y].float().clamp(min=LARGE_NEGATIVE)
    )
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
    head: HeadConfig,
    kept_NV: Tensor,
    exponents: Tensor,
    *,
    entropy: bool,
    tiles: TileConfig | None = None,
) -> ForwardOutput:
    """Compute `forward`, and write 2^(z-k) of every score to `kept_NV` and k to `exponents` [tiles,
    N].

    In bfloat16 this saves probabilities to 2^-9 relative, whereas bfloat16 logits near 20 would
    give them to 2^-4.
    """
    scores = ScoreLauncher(x_ND, w_VD, y_N, bias_V, head, tiles)
    if kept_NV.stride(0) * kept_NV.element_size() % 16:
        scores.hopper_tiles = None  # its copies need rows aligned to 16 bytes
    return scores.combine(scores.statistics(entropy, (kept_NV, exponents)))


def backward(
    x_ND: Tensor,
    w_VD: Tensor,
    y_N: Tensor,
    bias_V: Tensor | None,
    head: HeadConfig,
    co: GradientCoefficients,
    lse_N: Tensor,
    *,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
    frozen_columns: int = 0,
    tiles: TileConfig | None = None,
) -> HeadGradients:
    """Compute the gradients from scores that are computed again, a slab at a time."""
    scores = ScoreLauncher(x_ND, w_VD, y_N, bias_V, head, tiles)
    scaled, lse2 = _scale_coefficients(co, head.grad_scale), lse_N * LOG2E

    def fill(part: ScoreLauncher, rows: slice, dz: Tensor, lo: int, hi: int) -> None:
        part.dlogits(dz, lo, hi, narrow_rows(lse2, rows), _slice_coefficients(scaled, rows))

    return _compute_gradients(scores, fill, need_x, need_w, need_bias, frozen_columns)


def saved_backward(
    x_ND: Tensor,
    w_VD: Tensor,
    y_N: Tensor,
    bias_V: Tensor | None,
    head: HeadConfig,
    co: GradientCoefficients,
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
    tiles: TileConfig | None = None,
) -> HeadGradients:
    """Compute the gradients from what `saved_forward` saved; row i of x is row at_N[i] of the saved
    tensors (None: row i).

    The gradient of the entropy is not supported: it would multiply log p by the rounding of the
    saved values, 2^-9 in bfloat16, and a confident token's gradient is next to nothing. `whole`:
    use another [N, V] tensor and two products of it, instead of slabs that add up dX in float32.
    """
    assert co.c is None, "the gradient of the entropy needs scores that are computed again"
    scores = ScoreLauncher(x_ND, w_VD, y_N, bias_V, head, tiles)
    scaled, lse2, logp2 = _scale_coefficients(co, head.grad_scale), lse_N * LOG2E, logp_N * LOG2E

    def fill(part: ScoreLauncher, rows: slice, dz: Tensor, lo: int, hi: int) -> None:
        a, b, _ = _slice_coefficients(scaled, rows)
        # without at_N the saved rows are the rows of x, so take them from the chunk's first row on
        first = 0 if at_N is not None else rows.start
        kept, exps = (
            kept_TV.narrow(0, first, kept_TV.shape[0] - first),
            exponents.narrow(1, first, exponents.shape[1] - first),
        )
        at = None if at_N is None else narrow_rows(at_N, rows)
        part.saved_dlogits(
            dz, lo, hi, kept, exps, at, narrow_rows(logp2, rows), narrow_rows(lse2, rows), a, b
        )

    return _compute_gradients(scores, fill, need_x, need_w, need_bias, frozen_columns, whole)
