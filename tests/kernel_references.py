"""Definitions of kernel results in plain torch, with which the tests compare."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_logprob_reference(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the results of `linear_logprob` in plain torch with full logits, in the dtype of the
    inputs.
    """
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    logp_all = logits.log_softmax(-1)
    used = target != ignore_index
    logp = logp_all.gather(-1, target.long().where(used, 0).unsqueeze(-1)).squeeze(-1)
    # a banned token's p log p is 0
    entropy = -(logp_all.exp() * logp_all.clamp(min=torch.finfo(logp_all.dtype).min)).sum(-1)
    return logp.where(used, 0.0), entropy.where(used, 0.0), logits.logsumexp(-1).where(used, 0.0)


def policy_loss_reference(
    logp_T: Tensor,
    old_T: Tensor,
    advantage_T: Tensor,
    *,
    kind: str = "ppo",
    mask_T: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    clip_low: float | Tensor = 0.8,
    clip_high: float | Tensor = 1.2,
    beta: float = 0.05,
) -> Tensor:
    """Compute the loss as the formulas read, sequence by sequence, differentiated by autograd."""
    ends = [0, len(logp_T)] if cu_seqlens is None else cu_seqlens.tolist()
    total = (logp_T * 0.0).nan_to_num().sum()
    for start, end in zip(ends, ends[1:], strict=False):
        keep = (
            torch.ones(end - start, dtype=torch.bool) if mask_T is None else mask_T[start:end] != 0
        )
        lp, q, a = (t[start:end][keep] for t in (logp_T, old_T, advantage_T))
        lo, hi = (
            b[start:end][keep] if isinstance(b, Tensor) else torch.full_like(lp, b)
            for b in (clip_low, clip_high)
        )
        r = (lp - q).exp()
        if kind == "gspo" and len(lp):
            r = (lp - q).mean().exp().detach() * (lp - lp.detach()).exp()
        clipped = torch.minimum(torch.maximum(r, lo), hi)
        if kind == "importance_sampling":
            total = total - (r * a).sum()
        elif kind == "cispo":
            total = total - (clipped.detach() * lp * a).sum()
        elif kind == "dro":
            total = total - (lp * a - beta / 2 * (lp - q) ** 2).sum()
        else:
            total = total - torch.minimum(r * a, clipped * a).sum()
    return total
