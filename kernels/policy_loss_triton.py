"""Implement `policy_loss` in Triton: a single launch over flat tokens (gspo: another for the
sequence means) and a small sum in a fixed order.

The kernel moves about 32 bytes for each token, 1 MB for 32k tokens: a third of a microsecond of an
H100's memory bandwidth, so launches dominate the cost. The loss kind is a compile-time constant; no
token branches on it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.policy_loss_kinds import KINDS, METRICS

# 1024 tokens for each program: 32 programs for 32k tokens, each a single wave of loads. Larger
# blocks leave SMs idle.
BLOCK = 1024
IMPORTANCE_SAMPLING, PPO, CISPO, DRO, GSPO = (tl.constexpr(i) for i in range(5))


@triton.jit(do_not_specialize=["T"])
def _sequence_mean_kernel(
    lp_ptr, old_ptr, mask_ptr, cu_ptr, out_ptr, T, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr
):
    """Store the mean of lp - q over a sequence's active tokens at each of its tokens; a program for
    each sequence.
    """
    start = tl.maximum(tl.load(cu_ptr + tl.program_id(0)).to(tl.int64), 0)
    end = tl.minimum(tl.load(cu_ptr + tl.program_id(0) + 1).to(tl.int64), T)
    total = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.float32)
    for at in range(start, end, BLOCK):
        offs = at + tl.arange(0, BLOCK)
        active = offs < end
        if HAS_MASK:
            active = active & (tl.load(mask_ptr + offs, mask=active, other=0) != 0)
        d = tl.load(lp_ptr + offs, mask=active, other=0.0).to(tl.float32)
        d -= tl.load(old_ptr + offs, mask=active, other=0.0).to(tl.float32)
        total += tl.where(active, d, 0.0)
        count += active.to(tl.float32)
    mean = tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1.0)
    for at in range(start, end, BLOCK):
        offs = at + tl.arange(0, BLOCK)
        tl.store(out_ptr + offs, mean + tl.zeros((BLOCK,), tl.float32), mask=offs < end)


@triton.jit
def _bound(at, active, value, HAS_TENSOR: tl.constexpr, BLOCK: tl.constexpr):
    """Return a bound of the ratio for each token: `value`, or what lies at the pointers `at`."""
    bound = tl.zeros((BLOCK,), tl.float32) + value
    if HAS_TENSOR:
        bound = tl.load(at, mask=active, other=0.0).to(tl.float32)
    return bound


@triton.jit
def _token_loss(lp, d, r, adv, lo, hi, beta, KIND: tl.constexpr):
    """Return each token's loss and its derivative by lp; d = lp - q, r is the ratio."""
    r = tl.where(adv != 0.0, r, 1.0)  # a ratio without an advantage may overflow
    # The device's default minimum and maximum drop a NaN, as would a comparison; the loss would
    # then hide the NaN.
    clipped = tl.minimum(
        tl.maximum(r, lo, propagate_nan=tl.PropagateNan.ALL), hi, propagate_nan=tl.PropagateNan.ALL
    )
    if KIND == IMPORTANCE_SAMPLING:
        grad = -r * adv
        loss = grad
    elif KIND == CISPO:
        grad = -clipped * adv
        loss = grad * lp
    elif KIND == DRO:
        grad = beta * d - adv
        loss = 0.5 * beta * d * d - lp * adv
    else:
        loss = -tl.minimum(r * adv, clipped * adv, propagate_nan=tl.PropagateNan.ALL)
        grad = tl.where(r * adv > clipped * adv, 0.0, -r * adv)
    return loss, grad


@triton.jit
def _store_sums(row, active, loss, r, lo, hi):
    """Store the sums of METRICS over a program's tokens."""
    tl.store(row + 0, tl.sum(tl.where(active, loss, 0.0), 0))
    tl.store(row + 1, tl.sum(active.to(tl.float32), 0))
    tl.store(row + 2, tl.sum((active & (r < lo)).to(tl.float32), 0))
    tl.store(row + 3, tl.sum((active & (r > hi)).to(tl.float32), 0))


@triton.jit(do_not_specialize=["T"])
def _policy_loss_kernel(
    lp_ptr, old_ptr, adv_ptr, mask_ptr, low_ptr, high_ptr, mean_ptr, grad_ptr, sums_ptr,
    T, low, high, beta,
    KIND: tl.constexpr, HAS_MASK: tl.constexpr, HAS_LOW: tl.constexpr, HAS_HIGH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offs < T
    active = inside
    if HAS_MASK:
        active = active & (tl.load(mask_ptr + offs, mask=inside, other=0) != 0)
    # Loads of inactive tokens return 0, so their NaN or infinity enters no arithmetic.
    lp = tl.load(lp_ptr + offs, mask=active, other=0.0).to(tl.float32)
    d = lp - tl.load(old_ptr + offs, mask=active, other=0.0).to(tl.float32)
    adv = tl.load(adv_ptr + offs, mask=active, other=0.0).to(tl.float32)
    lo = _bound(low_ptr + offs, active, low, HAS_LOW, BLOCK)
    hi = _bound(high_ptr + offs, active, high, HAS_HIGH, BLOCK)
    r = tl.exp(d)
    if KIND == GSPO:
        r = tl.exp(tl.load(mean_ptr + offs, mask=active, other=0.0))
    loss, grad = _token_loss(lp, d, r, adv, lo, hi, beta, KIND)
    tl.store(grad_ptr + offs, tl.where(active, grad, 0.0), mask=inside)
    row = sums_ptr + tl.program_id(0) * 4  # METRICS
    _store_sums(row, active, loss, r, lo, hi)


def launch_policy_loss(
    logp: Tensor,
    old: Tensor,
    advantage: Tensor,
    mask: Tensor | None,
    low_T: Tensor | None,
    high_T: Tensor | None,
    cu_seqlens: Tensor | None,
    kind: str,
    low: float,
    high: float,
    beta: float,
) -> tuple[Tensor, Tensor]:
    """Return the sums of METRICS (float32) and d loss / d logp (float32 [T])."""
    tokens = logp.numel()
    grad = torch.empty_like(logp, dtype=torch.float32, memory_format=torch.contiguous_format)
    if tokens == 0:
        return grad.new_zeros(len(METRICS)), grad
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    lp, old, advantage = logp.contiguous(), old.contiguous(), advantage.contiguous()
    mask, low_T, high_T = (t if t is None else t.contiguous() for t in (mask, low_T, high_T))
    mean = lp
    if kind == "gspo" and cu_seqlens is not None:
        mean = torch.zeros_like(grad)
        _sequence_mean_kernel[(len(cu_seqlens) - 1,)](
            lp,
            old,
            lp if mask is None else mask,
            cu_seqlens.contiguous(),
            mean,
            tokens,
            HAS_MASK=mask is not None,
            BLOCK=BLOCK,
        )
    programs = triton.cdiv(tokens, BLOCK)
    sums = grad.new_empty((programs, len(METRICS)))
    _policy_loss_kernel[(programs,)](
        lp,
        old,
        advantage,
        lp if mask is None else mask,
        lp if low_T is None else low_T,
        lp if high_T is None else high_T,
        mean,
        grad,
        sums,
        tokens,
        low,
        high,
        beta,
        KIND=KINDS.index(kind),
        HAS_MASK=mask is not None,
        HAS_LOW=low_T is not None,
        HAS_HIGH=high_T is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return sums.sum(0), grad
