"""Limits of a state space's time steps, which transformers heeds where it reads a sequence and
forgets where it reads one token.

A Mamba-2 layer discretises with dt = softplus(d + bias), cut to [low, high] (`time_step_limit`; Dao
& Gu 2024, arXiv:2405.21060, their `dt_limit`). The scan over a sequence cuts, the single step of a
cached decode does not (transformers 5, as `mamba_ssm`'s own kernel for a step), so a token's logits
would hang on how it was read: Zamba2 and Nemotron-H, whose lower limit is 0.001, by 1e-4 nats and
more. Softplus rises, so cutting d itself to softplus^-1(limit) - bias is the same cut, and is done
here to what the projection gives.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class TimeStepLimit:
    """A forward hook of a mixer's `in_proj`, whose last columns are d, one for each head. An
    object, so that a copied model has its own.
    """

    def __init__(self, mixer: Any):
        low, high = mixer.time_step_limit
        self.mixer = mixer
        self.low, self.high = inverse_softplus(low), inverse_softplus(high)

    def __call__(self, module: nn.Module, args: Any, projected: Tensor) -> Tensor:
        bias = self.mixer.dt_bias.to(projected.dtype)
        rest, d = projected.split([projected.shape[-1] - len(bias), len(bias)], dim=-1)
        return torch.cat([rest, d.clamp(self.low - bias, self.high - bias)], dim=-1)


def inverse_softplus(value: float) -> float:
    """The x with log(1 + exp(x)) = value, for a value of 0 (minus infinity) to infinity."""
    return -math.inf if value <= 0 else value + math.log(-math.expm1(-value))


def limit_time_steps_(model: nn.Module) -> None:
    """Makes one token's step heed the limits that a sequence's scan heeds. Once for each model;
    copies keep it.
    """
    for mixer in model.modules():
        limit = getattr(mixer, "time_step_limit", None)
        if (
            limit is None
            or tuple(limit) == (0.0, math.inf)
            or not isinstance(getattr(mixer, "dt_bias", None), Tensor)
        ):
            continue
        projection = getattr(mixer, "in_proj", None)
        if isinstance(projection, nn.Module) and not any(
            type(hook) is TimeStepLimit for hook in projection._forward_hooks.values()
        ):
            projection.register_forward_hook(TimeStepLimit(mixer))
