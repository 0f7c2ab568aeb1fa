"""Implement `linear_logprob` in plain torch, block by block: at most BLOCK scores at a time for any
T and V.

Scores are in units of log 2, because torch.exp2 is about three times as fast as torch.exp on a CPU.
The factor log2(e) costs nothing, since it is multiplied into the hidden states. Products and sums
are float32 for every input dtype.

The gradient with respect to a logit z_i of a token with target y, for upstream gradients of logp,
entropy H and lse:
    dz_i = a [i = y] + p_i (b + c log p_i)
    a = g_logp,   c = -g_entropy,   b = g_lse - g_logp - g_entropy H
`GradientCoefficients` holds a, b and c; the torch path and the kernels all use these three numbers
for each token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.common import LARGE_NEGATIVE, LN2, LOG2E, HeadConfig

# Scores of a block. 2M float32 are 8 MiB: the five passes over a block stay in a CPU's last-level
# cache, and the matrix products are still large enough (2048 columns x 1024 rows) to run at the
# speed of a single big product.
BLOCK = 1 << 21
COLUMNS = 2048
MIN_ROWS = 64


class GradientCoefficients(NamedTuple):
    """Hold a, b, c of the module's formula, float32 [N]; c is None if no gradient comes from the
    entropy.
    """

    a: Tensor
    b: Tensor
    c: Tensor | None


def compute_coefficients(
    g_logp: Tensor | None, g_entropy: Tensor | None, g_lse: Tensor | None, entropy: Tensor
) -> GradientCoefficients:
    """Compute the coefficients from upstream gradients (None: no gradient) and the entropy."""
    a = torch.zeros_like(entropy) if g_logp is None else g_logp
    b = -a if g_lse is None else g_lse - a
    if g_entropy is None:
        return GradientCoefficients(a, b, None)
    # Selected, not multiplied: the entropy of a row without gradient may be NaN.
    return GradientCoefficients(
        a, torch.where(g_entropy != 0, b - g_entropy * entropy, b), -g_entropy
    )


class ScoreBlocks:
    """Compute the scores of a head block by block, into buffers that are reused."""

    def __init__(self, x_ND: Tensor, w_VD: Tensor, bias_V: Tensor | None, head: HeadConfig) -> None:
        self.w, self.bias, self.head = w_VD, bias_V, head
        self.columns = min(w_VD.shape[0], COLUMNS)
        self.rows = max(MIN_ROWS, min(x_ND.shape[0], BLOCK // self.columns))
        self.scores = x_ND.new_empty(self.rows * self.columns, dtype=torch.float32)
        self.spare = torch.empty_like(self.scores)

    def weight(self, lo: int, hi: int) -> Tensor:
        """Return rows [lo, hi) of W in float32."""
        return self.w[lo:hi].float()

    def logits(self, x: Tensor, w: Tensor, lo: int) -> tuple[Tensor, Tensor | None]:
        """Return logits / log 2 of scaled hidden `x` and the columns `w` from `lo` on, and the
        slope of the tanh (None without softcap).
        """
        z = self.scores[: x.shape[0] * w.shape[0]].view(x.shape[0], w.shape[0])
        torch.mm(x, w.t(), out=z)
        if self.bias is not None:
            z += (self.bias[lo : lo + w.shape[0]].float() * self.head.in_scale).clamp_(
                min=LARGE_NEGATIVE
            )
        if self.head.softcap is None:
            return z, None
        z.tanh_()
        slope = 1.0 - z * z
        return z.mul_(self.head.out_scale), slope

    def spare_like(self, z: Tensor) -> Tensor:
        """Return the spare buffer in the shape of `z`."""
        return self.spare[: z.numel()].view_as(z)


class ForwardOutput(NamedTuple):
    """Hold logp, entropy and lse, float32 [N], and E_p[slope * W], float32 [N, D] (None if not
    computed).
    """

    logp: Tensor
    entropy: Tensor
    lse: Tensor
    expected: Tensor | None


def forward(
    x_ND: Tensor,
    w_VD: Tensor,
    y_N: Tensor,
    bias_V: Tensor | None,
    head: HeadConfig,
    *,
    entropy: bool = True,
    expected: bool = False,
) -> ForwardOutput:
    """Return logp, entropy and log-sum-exp, float32 [N]; with `expected` also E_p[slope * W],
    float32 [N, D].
    """
    blocks = ScoreBlocks(x_ND, w_VD, bias_V, head)
    parts = [
        _forward_rows(
            x_ND[lo : lo + blocks.rows].float() * head.in_scale,
            y_N[lo : lo + blocks.rows],
            blocks,
            entropy,
            expected,
        )
        for lo in range(0, x_ND.shape[0], blocks.rows)
    ]
    logp, ent, lse = (
        torch.cat([part[i] for part in parts]) if len(parts) > 1 else parts[0][i] for i in range(3)
    )
    return ForwardOutput(
        logp, ent, lse, torch.cat([part[3] for part in parts]) if expected else None
    )


def _forward_rows(
    x: Tensor, y: Tensor, blocks: ScoreBlocks, entropy: bool, expected: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Process a block of rows with running maximum m, total = sum 2^(z-m), spread = sum (z-m)
    2^(z-m).
    """
    m, total, spread = (
        x.new_full((len(x), 1), LARGE_NEGATIVE),
        x.new_zeros(len(x), 1),
        x.new_zeros(len(x), 1),
    )
    at_target = x.new_zeros(len(x))
    mean = x.new_zeros(x.shape if expected else 0)
    for lo in range(0, blocks.w.shape[0], blocks.columns):
        w = blocks.weight(lo, lo + blocks.columns)
        z, slope = blocks.logits(x, w, lo)
        inside = ((y >= lo) & (y < lo + len(w))).nonzero().squeeze(1)
        at_target[inside] = z[inside, y[inside] - lo]
        new_m = torch.maximum(m, z.amax(1, keepdim=True))
        decay = torch.exp2(m - new_m)
        spread = decay * (spread + (m - new_m) * total)
        z.sub_(new_m)
        e = torch.exp2(z, out=blocks.spare_like(z) if entropy else z)
        total = decay * total + e.sum(1, keepdim=True)
        if entropy:
            spread += z.mul_(e).sum(1, keepdim=True)
        if expected:
            mean.mul_(decay).addmm_(e if slope is None else e.mul_(slope), w)
        m = new_m
    log_total = torch.log2(total)
    lse = (m + log_total).squeeze(1)
    ent = (log_total - spread / total).squeeze(1) if entropy else x.new_zeros(len(x))
    return (at_target - lse) * LN2, ent * LN2, lse * LN2, mean.div_(total) if expected else mean


class HeadGradients(NamedTuple):
    """Hold the gradients of hidden, weight and bias; None if not requested."""

    x: Tensor | None
    w: Tensor | None
    bias: Tensor | None


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
) -> HeadGradients:
    """Compute the gradients from scores that are computed again, a slab of columns at a time.

    Each dW[slab] is rounded once; dX adds up in float32.
    """
    blocks = ScoreBlocks(x_ND, w_VD, bias_V, head)
    scaled = x_ND.float() * head.in_scale
    dx = torch.zeros_like(scaled) if need_x else None
    first = frozen_columns
    dw = torch.empty_like(w_VD, memory_format=torch.contiguous_format) if need_w else None
    if dw is not None and first:
        dw.zero_()
    db = w_VD.new_empty(w_VD.shape[0], dtype=torch.float32) if need_bias else None
    lse2 = (lse_N * LOG2E).unsqueeze(1)
    for lo in range(0, w_VD.shape[0], blocks.columns):
        w = blocks.weight(lo, lo + blocks.columns)
        cols = slice(lo, lo + len(w))
        direct = dw is not None and dw.dtype == torch.float32
        dw_slab = (
            None
            if dw is None
            else dw[cols, first:].zero_()
            if direct
            else torch.zeros_like(w[:, first:])
        )
        if db is not None:
            db[cols] = 0.0
        for at in range(0, len(x_ND), blocks.rows):
            rows = slice(at, at + blocks.rows)
            part = GradientCoefficients(
                co.a[rows], co.b[rows], None if co.c is None else co.c[rows]
            )
            dz = _block_gradient(blocks, scaled[rows], w, lo, y_N[rows], part, lse2[rows])
            if dx is not None:
                dx[rows].addmm_(dz, w)
            if dw_slab is not None:
                # scaled = in_scale * x; alpha removes this factor.
                dw_slab.addmm_(dz.t(), scaled[rows, first:], alpha=1.0 / head.in_scale)
            if db is not None:
                db[cols] += dz.sum(0)
        if dw is not None and dw_slab is not None and not direct:
            dw[cols, first:] = dw_slab
    return HeadGradients(
        None if dx is None else dx.to(x_ND.dtype),
        dw,
        None if db is None or bias_V is None else db.to(bias_V.dtype),
    )


def _block_gradient(
    blocks: ScoreBlocks,
    scaled: Tensor,
    w: Tensor,
    lo: int,
    y: Tensor,
    co: GradientCoefficients,
    lse2: Tensor,
) -> Tensor:
    """Return the gradient of the raw scores of some rows and the columns `w` from `lo` on."""
    z, slope = blocks.logits(scaled, w, lo)
    scale, spare = blocks.head.grad_scale, blocks.spare_like(z)
    dz = compute_logit_gradient(z.sub_(lse2), y - lo, co, scale, spare)
    return dz if slope is None else dz.mul_(slope)


def compute_logit_gradient(
    log2p: Tensor, y: Tensor, co: GradientCoefficients, scale: float, spare: Tensor
) -> Tensor:
    """Return a [i = y] + p_i (b + c log p_i), times `scale`. Overwrites `log2p` (log p / log 2, [N,
    C]).
    """
    inside = ((y >= 0) & (y < log2p.shape[1])).nonzero().squeeze(1)
    if co.c is None:
        dz = torch.exp2(log2p, out=log2p).mul_((co.b * scale).unsqueeze(1))
    else:
        p = torch.exp2(log2p, out=spare)
        dz = (
            log2p.mul_((co.c * (LN2 * scale)).unsqueeze(1))
            .add_((co.b * scale).unsqueeze(1))
            .mul_(p)
        )
    dz[inside, y[inside]] += co.a[inside] * scale
    return dz


def backward_frozen(
    w_VD: Tensor,
    y_N: Tensor,
    head: HeadConfig,
    co: GradientCoefficients,
    target_slope: Tensor | None,
    expected_ND: Tensor,
) -> Tensor:
    """Return dX of a head without gradient: a slope_y W[y] + b E, with E = E_p[slope * W] from the
    forward. No scores are needed.
    """
    a = co.a if target_slope is None else co.a * target_slope
    return (
        torch.mul(expected_ND, co.b.unsqueeze(1))
        .addcmul_(w_VD[y_N].float(), a.unsqueeze(1))
        .mul_(head.grad_scale)
    )


def saved_forward(
    x_ND: Tensor,
    w_VD: Tensor,
    y_N: Tensor,
    bias_V: Tensor | None,
    head: HeadConfig,
    kept_NV: Tensor,
    *,
    entropy: bool,
) -> ForwardOutput:
    """Compute `forward` for all columns at once, and write log p to `kept_NV`. For problems that
    fit the byte budget.
    """
    factor = head.out_scale * LN2 if head.softcap is not None else 1.0
    z = torch.mm(
        _scale_tensor(x_ND.float(), head.in_scale * (LN2 if head.softcap is None else 1.0)),
        w_VD.float().t(),
    )
    if bias_V is not None:
        z += (bias_V.float() * (1.0 / (head.softcap or head.temperature))).clamp_(
            min=LARGE_NEGATIVE
        )
    z = z if head.softcap is None else z.tanh_().mul_(factor)
    column = y_N.unsqueeze(1)
    at_target = z.gather(1, column)
    all_logp = torch.log_softmax(z, 1, out=kept_NV)
    logp = all_logp.gather(1, column)
    ent = (
        torch.exp2(torch.mul(all_logp, LOG2E, out=z), out=z).mul_(all_logp).sum(1).neg_()
        if entropy
        else z.new_zeros(len(z))
    )
    return ForwardOutput(logp.squeeze(1), ent, (at_target - logp).squeeze(1), None)


def _scale_tensor(tensor: Tensor, factor: float) -> Tensor:
    """Return the tensor times the factor, without a copy if the factor is 1."""
    return tensor if factor == 1.0 else tensor * factor


def saved_backward(
    x_ND: Tensor,
    w_VD: Tensor,
    y_N: Tensor,
    bias_V: Tensor | None,
    head: HeadConfig,
    co: GradientCoefficients,
    lse_N: Tensor,
    kept_TV: Tensor,
    at_N: Tensor | None,
    *,
    need_x: bool,
    need_w: bool,
    need_bias: bool,
    frozen_columns: int = 0,
) -> HeadGradients:
    """Compute the gradients from the log probabilities that the forward pass saved in `kept_TV`.

    Row i of x belongs to row at_N[i] of `kept_TV`, or to row i if `at_N` is None. The first
    `frozen_columns` columns of the weight's gradient are 0.
    """
    logp_NV = kept_TV[: len(x_ND)] if at_N is None else kept_TV[at_N]
    p = torch.exp2(logp_NV * LOG2E)
    slope = None
    if head.softcap is not None:
        slope = 1.0 - ((logp_NV + lse_N.unsqueeze(1)) * (head.temperature / head.softcap)).square_()
    if co.c is None:
        dz = p.mul_(_scale_tensor(co.b, head.grad_scale).unsqueeze(1))
    else:
        dz = (
            (logp_NV * (co.c * head.grad_scale).unsqueeze(1))
            .add_((co.b * head.grad_scale).unsqueeze(1))
            .mul_(p)
        )
    dz.scatter_add_(1, y_N.unsqueeze(1), _scale_tensor(co.a, head.grad_scale).unsqueeze(1))
    dz = dz if slope is None else dz.mul_(slope)
    dx = (dz @ w_VD.float()).to(x_ND.dtype) if need_x else None
    dw = None
    if need_w:
        dw = (dz.t() @ x_ND[:, frozen_columns:].float()).to(w_VD.dtype)
        dw = torch.nn.functional.pad(dw, (frozen_columns, 0)) if frozen_columns else dw
    return HeadGradients(
        dx, dw, dz.sum(0).to(bias_V.dtype) if need_bias and bias_V is not None else None
    )
