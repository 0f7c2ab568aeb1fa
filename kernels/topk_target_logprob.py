"""Compute the logprobs of K target tokens at each position from hidden states and an LM head,
without logits.

log p(y_k) = z_k - lse. The log-sum-exp and the entropy come from linear_logprob, with memory that
does not grow with the vocabulary. The K scores are products of a hidden state with K rows of W, a
block of positions at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common import cast_for_autocast, check_targets, disable_autocast
from kernels.linear_logprob import linear_logprob

NAME = "topk_target_logprob"
BLOCK = 1 << 24  # elements of W's rows gathered at a time, float32


class _TargetScores(torch.autograd.Function):
    """Compute the scores x_t . W[y_tk] in float32, [T, K], with their gradient."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, w_VD: Tensor, y_TK: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, w_VD, y_TK)
        parts = [
            torch.einsum("td,tkd->tk", x.float(), w_VD[y].float())
            for x, y in _iter_blocks(w_VD, y_TK, x_TD, y_TK)
        ]
        return torch.cat(parts) if parts else x_TD.new_zeros(y_TK.shape, dtype=torch.float32)

    @staticmethod
    def backward(ctx, g_TK: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TD, w_VD, y_TK = ctx.saved_tensors
        dx, dw = None, None
        if ctx.needs_input_grad[0]:
            parts = [
                torch.einsum("tk,tkd->td", g, w_VD[y].float())
                for g, y in _iter_blocks(w_VD, y_TK, g_TK, y_TK)
            ]
            dx = torch.cat(parts).to(x_TD.dtype) if parts else torch.zeros_like(x_TD)
        if ctx.needs_input_grad[1]:
            # The gradients of the selected rows of W add up in float32 and are rounded once.
            rows, at_TK = y_TK.unique(return_inverse=True)
            sums = torch.zeros(len(rows), w_VD.shape[1], dtype=torch.float32, device=w_VD.device)
            for x, g, at in _iter_blocks(w_VD, y_TK, x_TD, g_TK, at_TK):
                sums.index_add_(
                    0, at.flatten(), (g.unsqueeze(2) * x.float().unsqueeze(1)).flatten(0, 1)
                )
            dw = torch.zeros_like(w_VD).index_copy_(0, rows, sums.to(w_VD.dtype))
        return dx, dw, None


def _iter_blocks(w_VD: Tensor, y_TK: Tensor, *tensors: Tensor):
    """Iterate over the tensors in blocks of positions that gather at most BLOCK elements of W."""
    step = max(1, BLOCK // max(1, y_TK.shape[1] * w_VD.shape[1]))
    return zip(*(tensor.split(step) for tensor in tensors), strict=True) if len(y_TK) else ()


def topk_target_logprob(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    target_TK: Tensor,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    *,
    entropy: bool = True,
    checked: bool = False,
    **settings: object,
) -> tuple[Tensor, Tensor | None]:
    """Return the logprobs [T, K] of the targets and the entropies [T] (None if `entropy` is False),
    float32.

    Gradients are as in linear_logprob. `checked`: every target is known to lie in [0, V), which
    saves a wait for the GPU. `settings`: further arguments of linear_logprob. No position is
    ignored. If the head learns, the backward waits for the GPU once, for the number of distinct
    targets. Raises ValueError for other shapes, or naming the first target outside [0, V).
    """
    if (
        target_TK.dim() != 2
        or hidden_TD.shape[:-1] != target_TK.shape[:1]
        or not target_TK.shape[1]
    ):
        raise ValueError(
            f"{NAME}: hidden has shape {tuple(hidden_TD.shape)} and target "
            f"{tuple(target_TK.shape)}; expected [T, D] and [T, K] with K of 1 or more"
        )
    cast = cast_for_autocast(hidden_TD, weight_VD)
    hidden, weight = cast[0], cast[1]
    assert hidden is not None and weight is not None
    y = target_TK.long()
    if not checked:
        check_targets(
            NAME, y, len(weight),
            ", and this function ignores no position: check that targets come from this model's "
            "tokenizer; give an unused target any id in the range and a weight of 0",
        )  # fmt: skip
    _, entropies, lse = linear_logprob(
        hidden,
        weight,
        y[:, 0],
        bias=bias_V,
        temperature=temperature,
        softcap=softcap,
        entropy=entropy,
        checked=True,
        **settings,  # type: ignore[arg-type]
    )
    with disable_autocast(hidden):
        z = _TargetScores.apply(hidden, weight, y)
        z = z if bias_V is None else z + bias_V.float()[y]
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        return z / temperature - lse.unsqueeze(1), entropies
