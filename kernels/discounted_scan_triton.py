"""The kernel of `discounted_scan` and `gae`: one program a sequence, blocks from its end, a carry between blocks.

A block is scanned with `associative_scan` over indices that already run backwards: with `reverse=True` Triton's scan gives
wrong results for operators that do not commute. Each lane loads the token *after* its own, so that the scan yields
u_{t+1} (see discounted_scan.py) and no value has to move between lanes afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# 2048 tokens are one block for most responses; a longer sequence takes one step of the carry per 2048 tokens.
BLOCK = 2048


@triton.jit
def _compose(c1, b1, c2, b2):
    """First u -> b1 + c1 u, then u -> b2 + c2 u."""
    return c1 * c2, b2 + c2 * b1


@triton.jit
def _scan_kernel(
    x_ptr, v_ptr, cu_ptr, mask_ptr, after_ptr, out_ptr, T, gamma, lam,
    HAS_VALUE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_AFTER: tl.constexpr, FROM_START: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    start = tl.maximum(tl.load(cu_ptr + seq).to(tl.int64), 0)
    end = tl.minimum(tl.load(cu_ptr + seq + 1).to(tl.int64), T)
    carry = 0.0
    if HAS_AFTER:
        carry = gamma * tl.load(after_ptr + seq).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    for done in range(0, end - start, BLOCK):
        step = done + lane
        if FROM_START:
            here = start + step
            there = here - 1
        else:
            here = end - 1 - step
            there = here + 1
        inside = step < end - start
        # The first token of all has none behind it: the identity, so that the carry reaches it unchanged.
        behind = inside & (step > 0)
        active = behind
        if HAS_MASK:
            active = active & (tl.load(mask_ptr + there, mask=behind, other=0) != 0)
        x = tl.load(x_ptr + there, mask=active, other=0.0).to(tl.float32)
        b = gamma * lam * x
        if HAS_VALUE:
            v = tl.load(v_ptr + there, mask=active, other=0.0).to(tl.float32)
            b += gamma * v - gamma * lam * v
        c = tl.where(active, gamma * lam, 1.0)
        c, b = tl.associative_scan((c, b), 0, _compose)
        u = b + c * carry
        carry = tl.sum(tl.where(lane == BLOCK - 1, u, 0.0), 0)
        mine = inside
        if HAS_MASK:
            mine = mine & (tl.load(mask_ptr + here, mask=inside, other=0) != 0)
        y = u + tl.load(x_ptr + here, mask=mine, other=0.0).to(tl.float32)
        if HAS_VALUE:
            y -= tl.load(v_ptr + here, mask=mine, other=0.0).to(tl.float32)
        tl.store(out_ptr + here, tl.where(mine, y, 0.0), mask=inside)


def scan(
    x: Tensor, v: Tensor | None, cu: Tensor, mask: Tensor | None, after: Tensor | None, gamma: float, lam: float,
    from_start: bool, block: int = BLOCK,
) -> Tensor:  # fmt: skip
    """y [T] float32 of the module discounted_scan; `v`, `mask`, `after` may be None."""
    # Zeros: the ends are not read here, and tokens behind a last end that is too low get no program.
    out = torch.zeros_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    given = [t if t is None else t.contiguous() for t in (x, v, mask, after)]
    pointers = [out if t is None else t for t in given]
    if len(cu) > 1:
        _scan_kernel[(len(cu) - 1,)](
            pointers[0], pointers[1], cu.contiguous(), pointers[2], pointers[3], out, x.numel(), gamma, lam,
            HAS_VALUE=v is not None, HAS_MASK=mask is not None, HAS_AFTER=after is not None, FROM_START=from_start,
            BLOCK=block, num_warps=8,
        )  # fmt: skip
    return out
