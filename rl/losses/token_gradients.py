"""Compute the gradient of a loss by the logprob of each token, and the numbers that it comes from:
ratio and clip thresholds. For explanations; training does not use this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl.losses.loss_terms import (
    Inputs,
    average_per_datum,
    get_trained_mask,
    select_masked,
    with_proximal_logprobs,
)
from rl.losses.losses import LossSpec, gspo

# Settings of terms whose gradient does not pass through the logprob of the sampled token.
_OTHER_TERMS = ("entropy_coef", "value_coef", "value_clip", "temperature", "token_accuracy")


@dataclass(frozen=True)
class TokenGradients:
    """Hold the numbers of each token of a call, float64 [T].

    gradient_T: d loss / d logprob of the token, of the undivided sum
    ratio_T: the ratio that the loss uses; NaN at tokens that it leaves out. None: it uses none
    low_T, high_T: the clip thresholds. None: the loss does not clip
    """

    gradient_T: Tensor
    ratio_T: Tensor | None
    low_T: Tensor | None
    high_T: Tensor | None


def compute_token_gradients(
    loss: LossSpec,
    logp_T: Tensor,
    inputs: Inputs,
    cu_seqlens: Tensor,
    config: Mapping[str, Any],
) -> TokenGradients:
    """Return the gradient of a call's loss by the learner's logprobs `logp_T`, in float64.

    The KL term counts. Entropy and value terms do not: their gradients do not pass through the
    logprob of the sampled token.
    """
    config = {name: value for name, value in config.items() if name not in _OTHER_TERMS}
    fields = {name: value.double() for name, value in inputs.items()}
    live_T = logp_T.detach().double().requires_grad_(True)
    with torch.enable_grad():
        total, _ = loss.compute(live_T, torch.zeros_like(live_T), fields, cu_seqlens, config)
        gradient_T = (
            torch.autograd.grad(total, live_T, allow_unused=True)[0]
            if total.requires_grad
            else None
        )
    logp_T = live_T.detach()
    low_T = high_T = None
    if "clip_low_threshold" in loss.config:
        low_T, high_T = (
            fields.get(name, torch.full_like(logp_T, config.get(name, default)))
            for name, default in (("clip_low_threshold", 0.8), ("clip_high_threshold", 1.2))
        )
    return TokenGradients(
        torch.zeros_like(logp_T) if gradient_T is None else gradient_T,
        _compute_ratios(loss, logp_T, fields, cu_seqlens),
        low_T,
        high_T,
    )


def _compute_ratios(
    loss: LossSpec, logp_T: Tensor, fields: Inputs, cu_seqlens: Tensor
) -> Tensor | None:
    """Return the ratio of each token; of `gspo` that of its sequence."""
    if "logprobs" not in loss.known_fields or "advantages" not in fields:
        return None
    old_T = with_proximal_logprobs(logp_T, fields).get("logprobs", logp_T)
    active_T = get_trained_mask(fields)
    gap_T = select_masked(active_T, logp_T - old_T)
    if loss.fn is gspo:
        gap_T = average_per_datum(gap_T, active_T, cu_seqlens)
    return torch.where(active_T, gap_T.exp(), torch.nan)
