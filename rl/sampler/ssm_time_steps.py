"""Apply the time step limits of state-space layers to single-token steps, which transformers leaves
out.

A Mamba-2 layer discretises with dt = softplus(d + bias), clamped to [low, high] (`time_step_limit`;
Dao & Gu 2024, arXiv:2405.21060, their `dt_limit`). The scan over a sequence clamps, the single step
of a cached decode does not (transformers 5, as `mamba_ssm`'s kernel for a step). So a token's
logits would depend on the way it was read: for Zamba2 and Nemotron-H, with a lower limit of 0.001,
by 1e-4 nats and more. Softplus is increasing, so clamping d itself to softplus^-1(limit) - bias is
equivalent, and this module does so to the output of the projection.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class TimeStepLimit:
    """Clamp d in the output of a mixer's `in_proj`, as a forward hook.

    The last columns of the output are d, a column for each head. The hook is an object, so that a
    copied model gets a separate hook.
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
    """Return the x with log(1 + exp(x)) = value, for a value of 0 (minus infinity) to infinity."""
    return -math.inf if value <= 0 else value + math.log(-math.expm1(-value))


def limit_time_steps_(model: nn.Module) -> None:
    """Make single-token steps apply the same limits as a scan over a sequence.

    Repeated calls for a model have no effect; copies of the model keep the hooks.
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
