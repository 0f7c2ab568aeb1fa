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

from kernels.common import LARGE_NEGATIVE, LOG2E, HeadConfig
from kernels.device_checks import check_kernels_agree
from kernels.linear_logprob_hopper import _dlogits_ws_kernel, _forward_ws_kernel
from kernels.linear_logprob_torch import ForwardOutput, GradientCoefficients, HeadGradients
from kernels.linear_logprob_triton import (
    CHUNK_SPLITS,
    GROUP,
    SPLITS,
    _align_kernel,
    _combine_kernel,
    _dlogits_kernel,
    _forward_kernel,
    _saved_dlogits_kernel,
)
from kernels.matmul_operands import (
    add_matmul_,
    align_operand,
    build_matmul_options,
    is_interpreting,
    narrow_rows,
)
from kernels.tile_config import (
    HOPPER_TILES,
    TileConfig,
    count_multiprocessors,
    get_gpu_info,
    select_tile_sizes,
)
from kernels.vocab_chunks import align_columns, iter_vocab_chunks, rows_per_chunk


def select_hopper_tiles(x: Tensor) -> TileConfig | None:
    """Return the tiles of the warp-specialized kernels for these hidden states.

    Returns None if the kernels do not support the dtype or GPU, or give wrong numbers on this
    device.
    """
    if not (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and 90 <= get_gpu_info(x).capability < 100
    ):
        return None
    return HOPPER_TILES if check_kernels_agree(_run_trial, x.device.index or 0, x.dtype) else None


def _run_trial(use_hopper: bool, index: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Run the trial on a GPU, as `check_kernels_agree` calls it."""
    return run_trial(use_hopper, torch.device("cuda", index), dtype)


def run_trial(use_hopper: bool, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Run forward and dlogits of a small head by either branch, at sizes that end within a tile.

    Returns the statistics of each row, what the launches wrote outside of their slabs (zeros if
    nothing), and the slabs.
    """
    rows, vocab = 300, 5001
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, 328, generator=g, device=device).to(dtype)
    w = (torch.randn(vocab, 328, generator=g, device=device) / 8).to(dtype)
    y, a = (
        torch.randint(0, vocab, (rows,), generator=g, device=device),
        torch.randn(rows, generator=g, device=device),
    )
    tiles = select_tile_sizes(328, dtype, get_gpu_info(x))
    scores = ScoreLauncher(
        x, w, y, None, HeadConfig(0.8), tiles, HOPPER_TILES if use_hopper else None
    )
    out = scores.combine(scores.statistics(True))
    kept, exponents = (
        x.new_zeros(rows, align_columns(vocab)).narrow(1, 0, vocab),
        a.new_zeros(triton.cdiv(vocab, tiles.columns), rows),
    )
    resaved = scores.combine(scores.statistics(True, (kept, exponents)))
    ones, zeros = torch.ones_like(a), torch.zeros_like(a)
    slabs, outside = [], []
    # a slab of an odd number of narrow tiles, as slabs are cut, and the vocabulary's last columns
    for lo, hi in ((4096 - 3 * tiles.columns, 4096), (4096, vocab)):
        # a row after the last one shows a write past the end
        line = align_columns(hi - lo)
        buffers = [x.new_zeros(rows + 1, line) for _ in range(2)]
        dz, p = (buffer.narrow(0, 0, rows).narrow(1, 0, hi - lo) for buffer in buffers)
        scores.dlogits(dz, lo, hi, out.lse * LOG2E, GradientCoefficients(a, -a, a.flip(0)))
        logp2, lse2 = resaved.logp * LOG2E, resaved.lse * LOG2E
        scores.saved_dlogits(p, lo, hi, kept, exponents, None, logp2, lse2, zeros, ones)
        slabs += [dz.flatten().float(), p.flatten().float()]
        dz.zero_()
        p.zero_()
        outside += [buffer.flatten().float() for buffer in buffers]
    statistics = (out.logp, out.entropy, out.lse, resaved.logp, resaved.entropy)
    return *statistics, torch.cat(outside), torch.cat(slabs)


def _allocate_scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocate the scratch memory that a launch requests: it holds descriptors that are made in a
    kernel.
    """
    return torch.empty(size, dtype=torch.int8, device="cuda")


class ScoreLauncher:
    """Hold the operands, tiles and options that all launches over the scores of a head share."""

    def __init__(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        bias: Tensor | None,
        head: HeadConfig,
        tiles: TileConfig | None,
        hopper_tiles: TileConfig | None = None,
    ) -> None:
        """Prepare the operands and options.

        `hopper_tiles`: tiles for the kernels of kernels/linear_logprob_hopper.py, used by the
        launches that these kernels support; None: the result of `select_hopper_tiles`.
        """
        self.tiles = tiles or select_tile_sizes(x.shape[1], x.dtype, get_gpu_info(x))
        self.D = x.shape[1]  # before `align_operand`, which may pad with zeros
        self.x, self.w, self.y, self.bias, self.head = (
            align_operand(x),
            align_operand(w),
            y.contiguous(),
            bias,
            head,
        )
        self.N, self.V = x.shape[0], w.shape[0]
        self.x_arg, self.w_arg, self.options = build_matmul_options(self.x, self.w, self.tiles)
        self.options |= {
            "GROUP": GROUP,
            "HAS_BIAS": bias is not None,
            "SOFTCAP": head.softcap is not None,
        }
        self.bias_arg = self.y if bias is None else bias.contiguous()
        self.at_target = torch.empty(self.N, dtype=torch.float32, device=x.device)
        plain = bias is None and head.softcap is None and tiles is None
        self.hopper_tiles = hopper_tiles or (select_hopper_tiles(self.x) if plain else None)

    def row_chunks(self, width: int) -> list[tuple[slice, ScoreLauncher]]:
        """Return (rows, scores) pairs that cover all rows.

        This is `self` for all rows, unless a slab of `width` columns would be too large for them;
        then each pair covers a chunk of rows.
        """
        step = rows_per_chunk(self.N, width, self.tiles.rows)
        if step >= self.N:
            return [(slice(0, self.N), self)]
        pieces = [slice(at, min(at + step, self.N)) for at in range(0, self.N, step)]
        cut = [(rows, narrow_rows(self.x, rows), narrow_rows(self.y, rows)) for rows in pieces]
        return [
            (rows, ScoreLauncher(x, self.w, y, self.bias, self.head, self.tiles, self.hopper_tiles))
            for rows, x, y in cut
        ]

    def num_row_blocks(self) -> int:
        """Return the number of row blocks."""
        return triton.cdiv(self.N, self.tiles.rows)

    def empty_partials(self, splits: int, count: int) -> Tensor:
        """Return an empty tensor for the partial statistics of `count` launches over some columns:
        [3, splits * count, N].
        """
        return torch.empty((3, splits * count, self.N), dtype=torch.float32, device=self.x.device)

    def num_vocab_splits(self) -> int:
        """Return the number of splits of a launch over the full vocabulary: at most a split per
        tile.
        """
        return min(SPLITS, triton.cdiv(self.V, (self.hopper_tiles or self.tiles).columns))

    def hopper_options(self, tiles: TileConfig) -> dict[str, Any]:
        """Return the options of a warp-specialized launch, which must follow at once.

        The function also sets Triton's allocator: the allocator is local to the thread, and
        autograd launches from its worker threads.
        """
        triton.set_allocator(_allocate_scratch)
        sizes = {
            "D": self.x.shape[1],
            "BM": tiles.rows,
            "BN": tiles.columns,
            "BK": tiles.depth,
            "GROUP": GROUP,
            "WS": not is_interpreting(),
        }
        sizes |= {"num_warps": tiles.warps, "num_stages": tiles.stages}
        return sizes | {name: self.options[name] for name in ("UPCAST", "PRECISION")}

    def statistics(self, entropy: bool, saved: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """Launch over all scores; return the partial statistics of every row and fill `at_target`.

        `saved`: the tensors (2^(z-k), k) that the saved plan fills.
        """
        splits, tiles, x = self.num_vocab_splits(), self.hopper_tiles, self.x
        part = self.empty_partials(splits, 1)
        kept, exponents = saved or (part, part)
        if tiles is None:
            reference = (
                None
                if saved is None
                else torch.full((self.N,), LARGE_NEGATIVE, dtype=torch.float32, device=x.device)
            )
            kwargs: dict[str, Any] = (
                {} if saved is None else {"kept": kept, "exponents": exponents, "ref": reference}
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
                KEEP=saved is not None,
                HALVES=tiles.columns // self.tiles.columns,
                **self.hopper_options(tiles),
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
        _forward_kernel[(self.num_row_blocks() * splits,)](
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
            hi,
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

    def combine(self, part: Tensor) -> ForwardOutput:
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
        return ForwardOutput(logp, entropy, lse, None)

    def dlogits(
        self, out: Tensor, lo: int, hi: int, lse2: Tensor, co: GradientCoefficients
    ) -> None:
        """Launch the kernel that recomputes the scores of columns [lo, hi) and writes their
        gradient to `out`.
        """
        tiles, c = self.hopper_tiles, co.b if co.c is None else co.c
        if tiles is not None:
            count = triton.cdiv(hi - lo, tiles.columns)
            _dlogits_ws_kernel[
                (min(count_multiprocessors(self.x), triton.cdiv(self.N, tiles.rows) * count),)
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
                hi,
                count,
                self.x.stride(0),
                self.w.stride(0),
                out.stride(0),
                self.head.in_scale,
                HAS_C=co.c is not None,
                **self.hopper_options(tiles),
            )
            return
        # for few rows, a program for each tile
        splits = CHUNK_SPLITS if self.num_row_blocks() >= GROUP else SPLITS
        _dlogits_kernel[(self.num_row_blocks() * splits,)](
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
            hi,
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
            lo,
            hi,
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
        fill: FillDlogits,
        need_x: bool,
        need_w: bool,
        need_bias: bool,
        first_column: int = 0,
        one_chunk: bool = False,
    ) -> HeadGradients:
        """Compute dX, dW and dbias from `fill(scores, rows, dlogits, lo, hi)`, slab by slab.

        Each dW[slab] is rounded once; dX adds up in float32. dW of the columns before
        `first_column` is 0. `one_chunk`: process all columns and rows at once, as a single [N, V]
        tensor that two products use.
        """
        spans = [(0, self.V)] if one_chunk else list(iter_vocab_chunks(self.V, self.tiles.columns))
        chunks = [(slice(0, self.N), self)] if one_chunk else self.row_chunks(spans[0][1])
        buffer = self.x.new_empty(chunks[0][1].N * align_columns(spans[0][1] - spans[0][0]))
        dx = (
            torch.zeros(self.x.shape, dtype=torch.float32, device=self.x.device)
            if need_x and not one_chunk
            else None
        )
        dw = (
            (torch.zeros if first_column else torch.empty)(
                self.w.shape, dtype=self.w.dtype, device=self.w.device
            )
            if need_w
            else None
        )
        learns = None if dw is None else dw.narrow(1, first_column, dw.shape[1] - first_column)
        db = torch.zeros(self.V, dtype=torch.float32, device=self.w.device) if need_bias else None
        for lo, hi in spans:
            direct = len(chunks) == 1 and first_column == 0
            sums = (
                None
                if learns is None or direct
                else learns.new_zeros((hi - lo, learns.shape[1]), dtype=torch.float32)
            )
            for rows, part in chunks:
                line = align_columns(hi - lo)
                dz = buffer.narrow(0, 0, part.N * line).view(part.N, line).narrow(1, 0, hi - lo)
                fill(part, rows, dz, lo, hi)
                if sums is not None:
                    add_matmul_(sums, dz.t(), part.x.narrow(1, first_column, sums.shape[1]))
                elif dw is not None:
                    torch.mm(dz.t(), part.x, out=dw.narrow(0, lo, hi - lo))
                if need_x and one_chunk:
                    dx = torch.mm(dz, self.w)
                elif dx is not None:
                    add_matmul_(narrow_rows(dx, rows), dz, self.w.narrow(0, lo, hi - lo))
                if db is not None:
                    db.narrow(0, lo, hi - lo).add_(torch.sum(dz, 0, dtype=torch.float32))
            if sums is not None and learns is not None:
                # no Python indexing, as in cut_rows
                torch.ops.aten.copy_(learns.narrow(0, lo, hi - lo), sums)
        dx = None if dx is None else dx.narrow(1, 0, self.D).to(self.x.dtype)
        dw = dw if dw is None or dw.shape[1] == self.D else dw.narrow(1, 0, self.D).contiguous()
        return HeadGradients(
            dx, dw, None if db is None or self.bias is None else db.to(self.bias.dtype)
        )


FillDlogits: TypeAlias = Callable[[ScoreLauncher, slice, Tensor, int, int], None]


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

    return scores.gradients(fill, need_x, need_w, need_bias, frozen_columns)


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

    return scores.gradients(fill, need_x, need_w, need_bias, frozen_columns, whole)
