"""`discounted_scan` and `gae`: returns and advantages over packed sequences, from the last token of each to its first.

    scan  y_t = x_t + discount y_next
    gae   A_t = delta_t + gamma lam A_next,  delta_t = r_t + gamma V_next - V_t        arXiv 1506.02438, equation 16
"next" is the next active token of the same sequence; tokens out of the mask (tool output, padding) are stepped over: they
get 0, discount nothing, and what stands there, NaN included, changes nothing.

Both are one recurrence. Let u_t be what token t hands to the token before it: u_t = b_t + c_t u_{t+1}, with
    active      b = gamma V_t + gamma lam (r_t - V_t),  c = gamma lam      (scan: V = 0, gamma = discount, lam = 1)
    not active  b = 0, c = 1;    after the end  u = gamma times the bootstrap value
and A_t = r_t - V_t + u_{t+1}. Nothing in it needs to look for the next active token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common import check_same_device, check_sequences, check_tokens, on_device, triton_works

NAME = "discounted_scan"

# -------------------------------------------------------------------------------------------------------- torch path


def _affine_scan(b_T: Tensor, c_T: Tensor, longest: int) -> Tensor:
    """u_t = b_t + c_t u_{t+1} by doubling: log2(longest) passes over all tokens. c is 0 at the last token of a sequence."""
    step = 1
    while step < longest:
        ahead = torch.where(c_T[:-step] != 0, c_T[:-step] * b_T[step:], 0.0)
        b_T = torch.cat((b_T[:-step] + ahead, b_T[-step:]))
        c_T = torch.cat((c_T[:-step] * c_T[step:], c_T[-step:]))
        step *= 2
    return b_T


def _torch_scan(
    x: Tensor, v: Tensor | None, cu: Tensor, mask: Tensor | None, after: Tensor | None, gamma: float, lam: float
) -> Tensor:
    cu = cu.long()
    active = torch.ones_like(x, dtype=torch.bool) if mask is None else mask != 0
    x = x.float().where(active, 0.0)
    v = torch.zeros_like(x) if v is None else v.float().where(active, 0.0)
    b = gamma * v + gamma * lam * (x - v)
    c = torch.where(active, gamma * lam, 1.0)
    filled = cu.diff() > 0
    last = cu[1:][filled] - 1
    u_end = torch.zeros_like(last, dtype=torch.float32) if after is None else gamma * after.float()[filled]
    b[last] += c[last] * u_end
    c[last] = 0.0
    u = _affine_scan(b, c, int(cu.diff().max()) if len(cu) > 1 else 0)
    u_next = torch.cat((u[1:], u[:1]))
    u_next[last] = u_end
    return (x - v + u_next).where(active, 0.0)


def _flipped(cu: Tensor, tokens: int) -> Tensor:
    return tokens - cu.flip(0)


# -------------------------------------------------------------------------------------------------------- custom ops


@torch.library.custom_op("whetstone::discounted_scan", mutates_args=())
def scan_op(x: Tensor, cu_seqlens: Tensor, discount: float, mask: Tensor | None, from_start: bool) -> Tensor:
    """The scan, float32 [T]; `from_start` runs from the first token to the last, which is the transpose of the usual one."""
    if x.numel() == 0:
        return x.new_empty(0, dtype=torch.float32)
    if triton_works(x):
        from kernels.discounted_scan_triton import scan

        with on_device(x):
            return scan(x, None, cu_seqlens, mask, None, discount, 1.0, from_start)
    if not from_start:
        return _torch_scan(x, None, cu_seqlens, mask, None, discount, 1.0)
    flipped_mask = None if mask is None else mask.flip(0)
    return _torch_scan(x.flip(0), None, _flipped(cu_seqlens, len(x)), flipped_mask, None, discount, 1.0).flip(0)


@scan_op.register_fake
def _(x, cu_seqlens, discount, mask, from_start):
    return x.new_empty(x.shape, dtype=torch.float32)


@torch.library.custom_op("whetstone::gae", mutates_args=())
def gae_op(
    reward: Tensor, value: Tensor, cu_seqlens: Tensor, gamma: float, lam: float, mask: Tensor | None, bootstrap: Tensor | None
) -> Tensor:
    """Advantages, float32 [T]."""
    if reward.numel() == 0:
        return reward.new_empty(0, dtype=torch.float32)
    if triton_works(reward):
        from kernels.discounted_scan_triton import scan

        with on_device(reward):
            return scan(reward, value, cu_seqlens, mask, bootstrap, gamma, lam, False)
    return _torch_scan(reward, value, cu_seqlens, mask, bootstrap, gamma, lam)


@gae_op.register_fake
def _(reward, value, cu_seqlens, gamma, lam, mask, bootstrap):
    return reward.new_empty(reward.shape, dtype=torch.float32)


# ---------------------------------------------------------------------------------------------------------- autograd


def _setup(ctx, inputs, output) -> None:
    x, cu_seqlens, discount, mask, from_start = inputs
    ctx.save_for_backward(cu_seqlens, mask)
    ctx.settings = (discount, from_start, x.dtype)


def _backward(ctx, g):
    # The scan is linear; its transpose is the same scan in the other direction.
    cu_seqlens, mask = ctx.saved_tensors
    discount, from_start, dtype = ctx.settings
    return scan_op(g, cu_seqlens, discount, mask, not from_start).to(dtype), None, None, None, None


scan_op.register_autograd(_backward, setup_context=_setup)


def _no_gradient(ctx, g):
    raise RuntimeError("gae: advantages are constants of a loss; detach rewards and values (the public function does)")


gae_op.register_autograd(_no_gradient)

# --------------------------------------------------------------------------------------------------- public functions


def discounted_scan(
    value_T: Tensor, cu_seqlens: Tensor, discount: float, mask_T: Tensor | None = None, *, from_start: bool = False
) -> Tensor:
    """Discounted sums to the end of each sequence (`from_start`: from its beginning), float32 [T]; gradients reach value_T.

    Args: value_T [T]; cu_seqlens integers [S + 1], where sequences begin and end; mask_T [T], nonzero at active tokens.
    """
    check_tokens(NAME, value_T.numel(), value_T=value_T, mask_T=mask_T)
    check_same_device(NAME, value_T=value_T, cu_seqlens=cu_seqlens, mask_T=mask_T)
    check_sequences(NAME, cu_seqlens, value_T.numel())
    return scan_op(value_T, cu_seqlens, float(discount), mask_T, from_start)


def gae(
    reward_T: Tensor, value_T: Tensor, cu_seqlens: Tensor, gamma: float = 1.0, lam: float = 0.95,
    mask_T: Tensor | None = None, bootstrap_S: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Advantages and returns (advantage + value, 0 off the mask), both float32 [T] and without gradient.

    bootstrap_S: the value after each sequence's last token, for sequences that were cut off; None means 0 (they ended).
    """
    check_tokens("gae", reward_T.numel(), reward_T=reward_T, value_T=value_T, mask_T=mask_T)
    check_same_device("gae", reward_T=reward_T, value_T=value_T, cu_seqlens=cu_seqlens, mask_T=mask_T, bootstrap_S=bootstrap_S)
    check_sequences("gae", cu_seqlens, reward_T.numel())
    if bootstrap_S is not None:
        check_tokens("gae", len(cu_seqlens) - 1, bootstrap_S=bootstrap_S)
        bootstrap_S = bootstrap_S.detach()
    reward_T, value_T = reward_T.detach(), value_T.detach()
    advantage_T = gae_op(reward_T, value_T, cu_seqlens, float(gamma), float(lam), mask_T, bootstrap_S)
    return_T = advantage_T + value_T
    return advantage_T, return_T if mask_T is None else return_T.where(mask_T != 0, 0.0)


# ---------------------------------------------------------------------------------------------------- plain reference


def gae_reference(
    reward_T: Tensor, value_T: Tensor, cu_seqlens: Tensor, gamma: float, lam: float, mask_T: Tensor | None = None,
    bootstrap_S: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Advantages by the definition, a Python loop over the active tokens of each sequence, last to first."""
    advantage_T = torch.zeros_like(reward_T)
    ends = cu_seqlens.tolist()
    for s, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        next_value = 0.0 if bootstrap_S is None else float(bootstrap_S[s])
        running = 0.0
        for t in reversed(range(start, end)):
            if mask_T is None or mask_T[t] != 0:
                delta = float(reward_T[t]) + gamma * next_value - float(value_T[t])
                running = delta + gamma * lam * running
                advantage_T[t], next_value = running, float(value_T[t])
    return advantage_T
