"""`distill_kl`: divergence between a teacher's and a student's next-token distributions, from hidden states and heads.

With p the teacher's distribution and q the student's, both at one temperature, for each token:
    forward   KL(p || q)                                         gradient of a student's logit: q - p
    reverse   KL(q || p)                                         q (log(q / p) - KL)
    mixture   beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q      (1 - beta) q (log(q / m) - KL(q || m))
The mixture is the generalised Jensen-Shannon divergence of arXiv 2306.13649, equation 1. The teacher gets no gradient.
Neither model's logits exist as a whole: blocks of both are made side by side, and again in the backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common import (
    LN2,
    LOW,
    WAITS,
    Head,
    check_head,
    check_matmul,
    check_same_device,
    on_device,
    put,
    rows_of,
    take,
    triton_works,
    under_autocast,
    without_autocast,
)  # fmt: skip
from kernels.linear_logprob_torch import Blocks

NAME = "distill_kl"
KINDS = ("forward", "reverse", "mixture")

# -------------------------------------------------------------------------------------------------------- torch path


class Pair:
    """Blocks of a student's and a teacher's logits / log 2 for the same rows and columns."""

    def __init__(self, xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, student: Head, teacher: Head) -> None:
        self.heads = Blocks(xs, ws, None, student), Blocks(xt, wt, None, teacher)
        self.scaled = xs.float() * student.in_scale, xt.float() * teacher.in_scale
        self.rows, self.columns, self.N, self.V = self.heads[0].rows, self.heads[0].columns, len(xs), len(ws)

    def logits(self, at: int, lo: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Student's and teacher's logits, the student's tanh slope (None without softcap) and the student's columns."""
        rows = slice(at, at + self.rows)
        ws, wt = (head.weight(lo, lo + self.columns) for head in self.heads)
        zs, slope = self.heads[0].logits(self.scaled[0][rows], ws, lo)
        zt, _ = self.heads[1].logits(self.scaled[1][rows], wt, lo)
        return zs, zt, slope, ws


def log2_mixture(log2p: Tensor, log2q: Tensor, beta: float) -> Tensor:
    """log2(beta p + (1 - beta) q)."""
    high = torch.maximum(log2p, log2q)
    return high + torch.log2(beta * torch.exp2(log2p - high) + (1.0 - beta) * torch.exp2(log2q - high))


def forward(
    xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, student: Head, teacher: Head, kind: str, beta: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The divergence in nats, both log-sum-exps / log 2, and what the backward subtracts, / log 2: [N] each."""
    pair = Pair(xs, ws, xt, wt, student, teacher)
    out = torch.empty((4, pair.N, 1), dtype=torch.float32, device=xs.device)
    for at in range(0, pair.N, pair.rows):
        size = min(pair.rows, pair.N - at)
        m_s, m_t = torch.full((2, size, 1), LOW, dtype=torch.float32, device=xs.device).unbind(0)
        sum_s, sum_t, cross = torch.zeros((3, size, 1), dtype=torch.float32, device=xs.device).unbind(0)
        for lo in range(0, pair.V, pair.columns):
            zs, zt, _, _ = pair.logits(at, lo)
            new_s, new_t = torch.maximum(m_s, zs.amax(1, keepdim=True)), torch.maximum(m_t, zt.amax(1, keepdim=True))
            es, et = torch.exp2(zs - new_s), torch.exp2(zt - new_t)
            lead = et.mul(zt - zs) if kind == "forward" else es.mul(zs - zt)
            cross = cross * torch.exp2(m_t - new_t if kind == "forward" else m_s - new_s) + lead.sum(1, keepdim=True)
            sum_s = sum_s * torch.exp2(m_s - new_s) + es.sum(1, keepdim=True)
            sum_t = sum_t * torch.exp2(m_t - new_t) + et.sum(1, keepdim=True)
            m_s, m_t = new_s, new_t
        lse_s, lse_t = m_s + torch.log2(sum_s), m_t + torch.log2(sum_t)
        rows = slice(at, at + size)
        if kind == "mixture":
            kl, rest = _mixture_value(pair, at, lse_s, lse_t, beta)
        else:
            kl = cross / sum_t - lse_t + lse_s if kind == "forward" else cross / sum_s - lse_s + lse_t
            rest = kl
        out[0, rows], out[1, rows], out[2, rows], out[3, rows] = kl * LN2, lse_s, lse_t, rest
    kl, lse_s, lse_t, rest = out.squeeze(2).unbind(0)
    return kl.clone(), lse_s.clone(), lse_t.clone(), rest.clone()


def _mixture_value(pair: Pair, at: int, lse_s: Tensor, lse_t: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """beta KL(p || m) + (1 - beta) KL(q || m) and KL(q || m), / log 2, for the rows from `at` on."""
    kl_p, kl_q = torch.zeros_like(lse_s), torch.zeros_like(lse_s)
    for lo in range(0, pair.V, pair.columns):
        zs, zt, _, _ = pair.logits(at, lo)
        log2q, log2p = zs.sub_(lse_s), zt.sub_(lse_t)
        log2m = log2_mixture(log2p, log2q, beta)
        kl_p += (torch.exp2(log2p) * (log2p - log2m)).sum(1, keepdim=True)
        kl_q += (torch.exp2(log2q) * (log2q - log2m)).sum(1, keepdim=True)
    return beta * kl_p + (1.0 - beta) * kl_q, kl_q


def backward(
    xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, student: Head, teacher: Head, kind: str, beta: float, g: Tensor,
    lse_s: Tensor, lse_t: Tensor, rest: Tensor, *, need_x: bool, need_w: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of the student's hidden states and head, from scores computed again."""
    pair = Pair(xs, ws, xt, wt, student, teacher)
    dx = torch.zeros_like(pair.scaled[0]) if need_x else None
    dw = torch.empty_like(ws, memory_format=torch.contiguous_format) if need_w else None
    factor = (g * student.grad_scale).unsqueeze(1)
    for lo in range(0, pair.V, pair.columns):
        columns = min(pair.columns, pair.V - lo)
        dw_slab = torch.zeros((columns, ws.shape[1]), dtype=torch.float32, device=ws.device) if need_w else None
        for at in range(0, pair.N, pair.rows):
            rows = slice(at, at + pair.rows)
            zs, zt, slope, w = pair.logits(at, lo)
            log2q, log2p = zs.sub_(lse_s[rows].unsqueeze(1)), zt.sub_(lse_t[rows].unsqueeze(1))
            if kind == "forward":
                dz = torch.exp2(log2q).sub_(torch.exp2(log2p)).mul_(factor[rows])
            else:
                other = log2p if kind == "reverse" else log2_mixture(log2p, log2q, beta)
                share = LN2 if kind == "reverse" else LN2 * (1.0 - beta)
                dz = (log2q - other).sub_(rest[rows].unsqueeze(1)).mul_(torch.exp2(log2q)).mul_(factor[rows] * share)
            dz = dz if slope is None else dz.mul_(slope)
            if dx is not None:
                dx[rows].addmm_(dz, w)
            if dw_slab is not None:
                dw_slab.addmm_(dz.t(), pair.scaled[0][rows], alpha=1.0 / student.in_scale)
        if dw is not None and dw_slab is not None:
            dw[lo : lo + pair.columns] = dw_slab
    return None if dx is None else dx.to(xs.dtype), dw


# -------------------------------------------------------------------------------------------------------- custom ops


@torch.library.custom_op("whetstone::distill_kl", mutates_args=(), tags=WAITS)
def forward_op(
    xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, mask: Tensor | None, temperature: float, student_softcap: float | None,
    teacher_softcap: float | None, kind: str, beta: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The divergence [T] (0 off the mask) and three numbers a token for the backward."""
    rows = None if mask is None else rows_of(mask != 0)
    if len(xs) == 0 or (rows is not None and len(rows) == 0):
        zeros = xs.new_zeros(len(xs), dtype=torch.float32)
        return zeros, zeros.clone(), zeros.clone(), zeros.clone()
    student, teacher = Head(temperature, student_softcap), Head(temperature, teacher_softcap)
    work = forward
    if triton_works(xs):
        from kernels.distill_kl_triton import forward as work  # type: ignore[no-redef]
    with on_device(xs):
        kl, lse_s, lse_t, rest = work(take(xs, rows), ws, take(xt, rows), wt, student, teacher, kind, beta)
    return put(kl, rows, len(xs)), put(lse_s, rows, len(xs)), put(lse_t, rows, len(xs)), put(rest, rows, len(xs))


@forward_op.register_fake
def _(xs, *_):
    kl, lse_s, lse_t, rest = (xs.new_empty(xs.shape[0], dtype=torch.float32) for _ in range(4))
    return kl, lse_s, lse_t, rest


@torch.library.custom_op("whetstone::distill_kl_backward", mutates_args=(), tags=WAITS)
def backward_op(
    g: Tensor, xs: Tensor, ws: Tensor, xt: Tensor, wt: Tensor, mask: Tensor | None, lse_s: Tensor, lse_t: Tensor, rest: Tensor,
    temperature: float, student_softcap: float | None, teacher_softcap: float | None, kind: str, beta: float, need: list[bool],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of xs and ws (size 0 where not needed). Rows without upstream gradient cost nothing."""
    active = g != 0 if mask is None else (g != 0) & (mask != 0)
    rows = rows_of(active)
    empty = xs.new_empty(0)
    if len(xs) == 0 or (rows is not None and len(rows) == 0):
        return torch.zeros_like(xs) if need[0] else empty, torch.zeros_like(ws) if need[1] else empty.clone()
    student, teacher = Head(temperature, student_softcap), Head(temperature, teacher_softcap)
    work = backward
    if triton_works(xs):
        from kernels.distill_kl_triton import backward as work  # type: ignore[no-redef]
    scalars = (take(t, rows) for t in (g, lse_s, lse_t, rest))
    with on_device(xs):
        dx, dw = work(
            take(xs, rows), ws, take(xt, rows), wt, student, teacher, kind, beta, *scalars, need_x=need[0], need_w=need[1]
        )  # fmt: skip
    return empty if dx is None else put(dx, rows, len(xs)), empty.clone() if dw is None else dw


@backward_op.register_fake
def _(g, xs, ws, xt, wt, mask, lse_s, lse_t, rest, temperature, student_softcap, teacher_softcap, kind, beta, need):
    return tuple(t.new_empty(t.shape) if wanted else xs.new_empty(0) for t, wanted in zip((xs, ws), need, strict=True))


# ---------------------------------------------------------------------------------------------------------- autograd


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.settings = inputs[5:]
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx, g, *_):
    need = [ctx.needs_input_grad[0], ctx.needs_input_grad[1]]
    with without_autocast(g):
        dx, dw = backward_op(g, *ctx.saved_tensors, *ctx.settings, need)
    return dx if need[0] else None, dw if need[1] else None, *[None] * 8


forward_op.register_autograd(_backward, setup_context=_setup)

# ---------------------------------------------------------------------------------------------------- public function


def distill_kl(
    student_hidden: Tensor, student_weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor, *, kind: str = "reverse",
    beta: float = 0.5, temperature: float = 1.0, mask: Tensor | None = None, student_softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """The divergence of the module's table for each token, in nats, float32 [...].

    Args:
        student_hidden [..., D], student_weight [V, D]; teacher_hidden [..., E], teacher_weight [V, E]: one vocabulary.
        kind: "forward", "reverse" or "mixture" (beta weighs the teacher, 0 < beta < 1).
        mask: [...], nonzero where a token takes part; elsewhere the result is 0 and what stands there changes nothing.
    Returns: gradients reach the student's two tensors alone, for any upstream gradient.
    """
    if kind not in KINDS:
        raise ValueError(f"{NAME}: kind is {kind!r}; expected one of {', '.join(KINDS)}")
    if kind == "mixture" and not 0.0 < beta < 1.0:
        raise ValueError(f"{NAME}: beta is {beta}; expected 0 < beta < 1 (its ends are kind='reverse' and kind='forward')")
    check_head(NAME, temperature, student_softcap)
    check_head(NAME, temperature, teacher_softcap)
    xs, ws = under_autocast(student_hidden, student_weight)
    xt, wt = under_autocast(teacher_hidden.detach(), teacher_weight.detach())
    assert xs is not None and ws is not None and xt is not None and wt is not None
    check_matmul(f"{NAME} (student)", xs, ws, None)
    check_matmul(f"{NAME} (teacher)", xt, wt, None)
    if xs.shape[:-1] != xt.shape[:-1] or len(ws) != len(wt) or (mask is not None and mask.shape != xs.shape[:-1]):
        shapes = [None if t is None else tuple(t.shape) for t in (xs, ws, xt, wt, mask)]
        given = f"student {shapes[:2]}, teacher {shapes[2:4]}, mask {shapes[4]}"
        raise ValueError(f"{NAME}: {given}; expected the same tokens and one V")
    check_same_device(NAME, student_hidden=xs, student_weight=ws, teacher_hidden=xt, teacher_weight=wt, mask=mask)
    flat_mask = None if mask is None else mask.reshape(-1)
    xs_TD, xt_TE = xs.reshape(-1, xs.shape[-1]), xt.reshape(-1, xt.shape[-1])
    with without_autocast(xs):
        kl, *_ = forward_op(xs_TD, ws, xt_TE, wt, flat_mask, temperature, student_softcap, teacher_softcap, kind, beta)
    return kl.view(xs.shape[:-1])


# ---------------------------------------------------------------------------------------------------- plain reference


def distill_kl_reference(student_logits: Tensor, teacher_logits: Tensor, kind: str, beta: float, temperature: float) -> Tensor:
    """The same from whole logits."""
    log_q, log_p = (student_logits / temperature).log_softmax(-1), (teacher_logits / temperature).log_softmax(-1)
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward":
        return (p * (log_p - log_q)).sum(-1)
    if kind == "reverse":
        return (q * (log_q - log_p)).sum(-1)
    log_m = (beta * p + (1 - beta) * q).log()
    return beta * (p * (log_p - log_m)).sum(-1) + (1 - beta) * (q * (log_q - log_m)).sum(-1)
