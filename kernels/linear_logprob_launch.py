"""Launches of the kernels in linear_logprob_triton.py, under the names that linear_logprob_torch.py has for its own.

Every [N, V] quantity exists for one slab of columns at a time: the extra memory does not grow with V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.common import LOG2E, LOW, Head
from kernels.linear_logprob_torch import Coefficients, Forward, Gradients
from kernels.linear_logprob_triton import (
    GROUP,
    SLAB_COLUMNS,
    SLAB_ELEMENTS,
    SPLITS,
    Tiles,
    _align_kernel,
    _combine_kernel,
    _dlogits_kernel,
    _forward_kernel,
    _saved_dlogits_kernel,
    tiles_for,
)

Operand: TypeAlias = Tensor | TensorDescriptor


def interpreting() -> bool:
    """Whether Triton runs its kernels in Python (TRITON_INTERPRET=1), for tests without a GPU."""
    return bool(triton.knobs.runtime.interpret)


def mm32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 from operands of lower precision, without rounding in between."""
    if a.dtype == torch.float32:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def operand(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def descriptors_fit(*tensors: Tensor) -> bool:
    """Whether the copy engine can read these: 16-byte aligned rows. Others are read through pointers."""
    return all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.shape[1] > 0 for t in tensors)


def matmul_options(x: Tensor, w: Tensor, tiles: Tiles) -> tuple[Operand, Operand, dict[str, Any]]:
    """x and w as the kernels take them, and the compile-time options of every kernel that multiplies."""
    fits = descriptors_fit(x, w)
    options = {
        "D": x.shape[1], "BM": tiles.rows, "BN": tiles.columns, "BK": tiles.depth, "DESCRIPTORS": fits,
        "UPCAST": interpreting(),
        # Three tf32 products keep float32's accuracy at a third of tf32's speed; "ieee" would not use the tensor cores.
        "PRECISION": "tf32x3" if x.dtype == torch.float32 else "ieee", "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip
    if not fits:
        return x, w, options
    x_rows, w_rows = [tiles.rows, tiles.depth], [tiles.columns, tiles.depth]
    return TensorDescriptor.from_tensor(x, x_rows), TensorDescriptor.from_tensor(w, w_rows), options


def slabs(rows: int, V: int, tile: int) -> Iterator[tuple[int, int]]:
    """(from, to) columns, a whole number of tiles: at most an eighth of V, SLAB_COLUMNS, and SLAB_ELEMENTS for all rows."""
    width = min(SLAB_COLUMNS, SLAB_ELEMENTS // max(rows, 1), V // 8) // tile * tile
    width = max(width, tile)
    return ((lo, min(lo + width, V)) for lo in range(0, V, width))


class Scores:
    """One head's matmul: what every launch over its scores has in common."""

    def __init__(self, x: Tensor, w: Tensor, y: Tensor, bias: Tensor | None, head: Head, tiles: Tiles | None) -> None:
        self.tiles = tiles or tiles_for(x.shape[1], x.dtype)
        self.x, self.w, self.y, self.bias, self.head = operand(x), operand(w), y.contiguous(), bias, head
        self.N, self.V = x.shape[0], w.shape[0]
        self.x_arg, self.w_arg, self.options = matmul_options(self.x, self.w, self.tiles)
        self.options |= {"SPLITS": SPLITS, "GROUP": GROUP, "HAS_BIAS": bias is not None, "SOFTCAP": head.softcap is not None}
        self.bias_arg = self.y if bias is None else bias.contiguous()
        self.at_target = torch.empty(self.N, dtype=torch.float32, device=x.device)

    def grid(self) -> tuple[int]:
        return (triton.cdiv(self.N, self.tiles.rows) * SPLITS,)

    def parts(self, count: int) -> Tensor:
        """Room for the partial numbers of `count` launches over some columns: [3, SPLITS * count, N]."""
        return torch.empty((3, SPLITS * count, self.N), dtype=torch.float32, device=self.x.device)

    def forward(
        self, part: Tensor, lo: int, hi: int, index: int, *, entropy: bool, kept: Tensor | None = None,
        exponents: Tensor | None = None, ref: Tensor | None = None, headroom: float = 0.0, keep_slope: bool = False,
    ) -> None:  # fmt: skip
        keep = kept is not None and exponents is not None
        _forward_kernel[self.grid()](
            self.x_arg, self.w_arg, self.bias_arg, self.y, part, self.at_target, kept if keep else part,
            exponents if keep else part, ref if keep else part,
            self.N, self.V, lo, triton.cdiv(hi - lo, self.tiles.columns), index * SPLITS, part.shape[1],
            self.x.stride(0), self.w.stride(0), kept.stride(0) if kept is not None else 0,
            exponents.stride(0) if exponents is not None else 0, self.head.in_scale, self.head.out_scale, headroom,
            ENTROPY=entropy, KEEP=keep, KEEP_SLOPE=keep_slope, **self.options,
        )  # fmt: skip

    def combine(self, part: Tensor) -> Forward:
        logp, entropy, lse = (torch.empty(self.N, dtype=torch.float32, device=self.x.device) for _ in range(3))
        _combine_kernel[(triton.cdiv(self.N, 128),)](
            part, self.at_target, logp, entropy, lse, self.N, part.shape[1], BLOCK=128, num_warps=4
        )  # fmt: skip
        return Forward(logp, entropy, lse, None)

    def dlogits(self, out: Tensor, lo: int, hi: int, lse2: Tensor, co: Coefficients) -> None:
        _dlogits_kernel[self.grid()](
            self.x_arg, self.w_arg, self.bias_arg, self.y, lse2, co.a, co.b, co.b if co.c is None else co.c, out, self.N,
            self.V,
            lo, triton.cdiv(hi - lo, self.tiles.columns), self.x.stride(0), self.w.stride(0), out.stride(0), self.head.in_scale,
            self.head.out_scale, HAS_C=co.c is not None, **self.options,
        )  # fmt: skip

    def gradients(self, fill: Callable[[Tensor, int, int], None], need_x: bool, need_w: bool, need_bias: bool) -> Gradients:
        """dX, dW and dbias from `fill(dlogits, lo, hi)`, slab by slab: dW[slab] is rounded once, dX adds up in float32."""
        x, w = self.x, self.w
        spans = list(slabs(self.N, self.V, self.tiles.columns))
        buffer = x.new_empty(self.N * (spans[0][1] - spans[0][0]))
        dx = torch.zeros(x.shape, dtype=torch.float32, device=x.device) if need_x else None
        dw = torch.empty(w.shape, dtype=w.dtype, device=w.device) if need_w else None
        db = torch.empty(self.V, dtype=torch.float32, device=w.device) if need_bias else None
        for lo, hi in spans:
            dz = buffer.narrow(0, 0, self.N * (hi - lo)).view(self.N, hi - lo)
            fill(dz, lo, hi)
            if dw is not None:
                torch.mm(dz.t(), x, out=dw.narrow(0, lo, hi - lo))
            if dx is not None:
                # Not addmm: with a float32 addend and bf16 factors it exists in some versions of torch alone.
                dx.add_(mm32(dz, w.narrow(0, lo, hi - lo)))
            if db is not None:
                torch.sum(dz, 0, dtype=torch.float32, out=db.narrow(0, lo, hi - lo))
        dx = None if dx is None else dx.to(x.dtype)
        return Gradients(dx, dw, None if db is None or self.bias is None else db.to(self.bias.dtype))


def _scaled(co: Coefficients, scale: float) -> Coefficients:
    a, b, c = ((t if scale == 1.0 or t is None else t * scale) for t in co)
    assert a is not None and b is not None
    return Coefficients(a.contiguous(), b.contiguous(), None if c is None else c.contiguous())


def forward(
    x_ND: Tensor, w_VD: Tensor, y_N: Tensor, bias_V: Tensor | None, head: Head, *, entropy: bool = True, expected: bool = False,
    tiles: Tiles | None = None,
) -> Forward:  # fmt: skip
    """As in linear_logprob_torch.py. One launch over all scores, or (for `expected`) one per slab with a product after it."""
    scores = Scores(x_ND, w_VD, y_N, bias_V, head, tiles)
    if expected:
        return _forward_expected(scores, entropy)
    part = scores.parts(1)
    scores.forward(part, 0, scores.V, 0, entropy=entropy)
    return scores.combine(part)


def _forward_expected(scores: Scores, entropy: bool) -> Forward:
    """Also E_p[slope W] [N, D]: kept values 2^(z-k) of a slab times W[slab], added up at the rows' current exponents.

    k starts from the target's score, which is never above the row's maximum (so nothing that counts underflows) and, for tokens
    drawn from the model, seldom far below it (so k seldom has to move, and the align kernel seldom has work).
    """
    x, w, head = scores.x, scores.w, scores.head
    spans, tile = list(slabs(scores.N, scores.V, scores.tiles.columns)), scores.tiles.columns
    part, width = scores.parts(len(spans)), spans[0][1] - spans[0][0]
    buffer = x.new_empty(scores.N * width)
    exponents = torch.empty((triton.cdiv(width, tile), scores.N), dtype=torch.float32, device=x.device)
    mean = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    ref = _target_exponent(scores)
    headroom = 14.0 if x.dtype == torch.float16 else 40.0  # float16 ends at 2^16; 2^40 is far from bfloat16's end
    for index, (lo, hi) in enumerate(spans):
        kept = buffer.narrow(0, 0, scores.N * (hi - lo)).view(scores.N, hi - lo)
        exps = exponents.narrow(0, 0, triton.cdiv(hi - lo, tile))
        scores.forward(
            part, lo, hi, index, entropy=entropy, kept=kept, exponents=exps, ref=ref, headroom=headroom,
            keep_slope=head.softcap is not None,
        )  # fmt: skip
        common = exps.amax(0)
        _align_kernel[(triton.cdiv(scores.N, 32) * exps.shape[0],)](
            kept, exps, common, scores.N, hi - lo, exps.shape[0], kept.stride(0), exps.stride(0), BM=32, BN=tile, num_warps=8
        )  # fmt: skip
        torch.addcmul(mm32(kept, w.narrow(0, lo, hi - lo)), mean, torch.exp2(ref - common).unsqueeze(1), out=mean)
        ref = common
    out = scores.combine(part)
    return out._replace(expected=mean.mul_(torch.exp2(ref - out.lse * LOG2E).unsqueeze(1)))


def _target_exponent(scores: Scores) -> Tensor:
    """The target's logit / log 2, rounded up; good to a per cent, which is all a reference exponent needs. float32 [N]."""
    head = scores.head
    raw = torch.bmm(scores.x.unsqueeze(1), scores.w.index_select(0, scores.y).unsqueeze(2)).flatten().float()
    raw = raw if scores.bias is None else raw + scores.bias[scores.y].float().clamp(min=LOW)
    z = raw * head.in_scale if head.softcap is None else torch.tanh(raw * head.in_scale) * head.out_scale
    return z.ceil()


def saved_forward(
    x_ND: Tensor, w_VD: Tensor, y_N: Tensor, bias_V: Tensor | None, head: Head, kept_NV: Tensor, exponents: Tensor, *,
    entropy: bool, tiles: Tiles | None = None,
) -> Forward:  # fmt: skip
    """`forward`, and 2^(z-k) of every score to `kept_NV`, k to `exponents` [tiles, N].

    In bfloat16 this keeps probabilities to 2^-9 relative, where bfloat16 logits near 20 would keep them to 2^-4.
    """
    scores = Scores(x_ND, w_VD, y_N, bias_V, head, tiles)
    part, own = scores.parts(1), torch.full((scores.N,), LOW, dtype=torch.float32, device=x_ND.device)
    scores.forward(part, 0, scores.V, 0, entropy=entropy, kept=kept_NV, exponents=exponents, ref=own)
    return scores.combine(part)


def backward(
    x_ND: Tensor, w_VD: Tensor, y_N: Tensor, bias_V: Tensor | None, head: Head, co: Coefficients, lse_N: Tensor, *,
    need_x: bool, need_w: bool, need_bias: bool, tiles: Tiles | None = None,
) -> Gradients:  # fmt: skip
    """Scores are computed again, a slab at a time."""
    scores = Scores(x_ND, w_VD, y_N, bias_V, head, tiles)
    scaled, lse2 = _scaled(co, head.grad_scale), lse_N * LOG2E
    return scores.gradients(lambda dz, lo, hi: scores.dlogits(dz, lo, hi, lse2, scaled), need_x, need_w, need_bias)


def saved_backward(
    x_ND: Tensor, w_VD: Tensor, y_N: Tensor, bias_V: Tensor | None, head: Head, co: Coefficients, lse_N: Tensor,
    kept_TV: Tensor,
    exponents: Tensor, at_N: Tensor | None, *, need_x: bool, need_w: bool, need_bias: bool, tiles: Tiles | None = None,
) -> Gradients:  # fmt: skip
    """`backward` from what `saved_forward` kept; row i of x was row at_N[i] there (None: i)."""
    scores = Scores(x_ND, w_VD, y_N, bias_V, head, tiles)
    scaled, lse2, BM, BN = _scaled(co, head.grad_scale), lse_N * LOG2E, 32, scores.tiles.columns

    def fill(dz: Tensor, lo: int, hi: int) -> None:
        count = triton.cdiv(hi - lo, BN)
        _saved_dlogits_kernel[(triton.cdiv(scores.N, BM) * count,)](
            kept_TV, exponents, scores.y if at_N is None else at_N, scores.y, lse2, scaled.a, scaled.b,
            scaled.b if scaled.c is None else scaled.c, dz, scores.N, scores.V, lo, lo // BN, count, kept_TV.stride(0),
            exponents.stride(0), dz.stride(0), head.out_scale, BM=BM, BN=BN, SOFTCAP=head.softcap is not None,
            HAS_C=scaled.c is not None, HAS_AT=at_N is not None, num_warps=8,
        )  # fmt: skip

    return scores.gradients(fill, need_x, need_w, need_bias)
