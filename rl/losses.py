"""Losses: pure functions `loss(logp_T, entropy_T, inputs, cu_seqlens, config) -> (sum, metrics)`.

logp_T      the learner's logprob of each target, fp32 [T] ([T, K] for soft targets), attached to the graph
entropy_T   the learner's entropy at each position, fp32 [T]
inputs      the datums' fields, one value a token: {"advantages": [T], "logprobs": [T], ...}
cu_seqlens  int64 [D + 1], where each datum begins; T is the sum over datums
config      numbers from `loss_fn_config`

Every loss is a SUM over tokens and datums (as Tinker's are); who wants a mean passes a divisor to `forward_backward`.
Metrics are sums too (":sum"), so that they add over micro-batches and ranks. With lp = learner logprob,
q = sampler logprob, r = exp(lp - q), A = advantage, w = weight. Thresholds are absolute ratios (0.8, 1.2).
Masked positions are selected away, never multiplied by zero: a NaN there changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]
Metrics = dict[str, Tensor]
LossFn = Callable[[Tensor, Tensor, Inputs, Tensor, Config], tuple[Tensor, Metrics]]


def _where(mask: Tensor, value: Tensor) -> Tensor:
    return torch.where(mask, value, torch.zeros((), dtype=value.dtype, device=value.device))


def _log_ratio(logp_T: Tensor, inputs: Inputs, active_T: Tensor) -> Tensor:
    """lp - q at active tokens, 0 elsewhere. Without sampler logprobs q = sg(lp), so r = 1: REINFORCE."""
    old_T = inputs.get("logprobs", logp_T.detach())
    return _where(active_T, logp_T) - _where(active_T, old_T)


def _clip_bounds(inputs: Inputs, config: Config) -> tuple[Tensor | float, Tensor | float]:
    low = inputs.get("clip_low_threshold", config.get("clip_low_threshold", 0.8))
    high = inputs.get("clip_high_threshold", config.get("clip_high_threshold", 1.2))
    return low, high


def _clip(ratio_T: Tensor, low: Tensor | float, high: Tensor | float) -> Tensor:
    low_t = torch.as_tensor(low, dtype=ratio_T.dtype, device=ratio_T.device)
    high_t = torch.as_tensor(high, dtype=ratio_T.dtype, device=ratio_T.device)
    return torch.minimum(torch.maximum(ratio_T, low_t), high_t)


def _clip_metrics(ratio_T: Tensor, low: Tensor | float, high: Tensor | float, active_T: Tensor) -> Metrics:
    ratio = ratio_T.detach()
    return {
        "clipped_low:sum": (active_T & (ratio < low)).sum(),
        "clipped_high:sum": (active_T & (ratio > high)).sum(),
        "active_tokens:sum": active_T.sum(),
    }


def cross_entropy(logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config) -> tuple[Tensor, Metrics]:
    """-sum w lp; soft targets: -sum_k w_tk lp(x_tk). Weights default to 1."""
    weights = inputs["weights"] if "weights" in inputs else torch.ones_like(logp_T)
    loss = -(_where(weights != 0, logp_T) * weights).sum()
    return loss, {"weights:sum": weights.sum()}


def importance_sampling(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """-sum r A. Without sampler logprobs this is REINFORCE (r = 1, its gradient A grad lp)."""
    advantages_T = inputs["advantages"]
    active_T = advantages_T != 0
    ratio_T = _log_ratio(logp_T, inputs, active_T).exp()
    return -(ratio_T * advantages_T).sum(), {"active_tokens:sum": active_T.sum()}


def ppo(logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config) -> tuple[Tensor, Metrics]:
    """-sum min(r A, clip(r, lo, hi) A) (PPO, arXiv 1707.06347, equation 7). Thresholds may come per token in the datum."""
    advantages_T = inputs["advantages"]
    active_T = advantages_T != 0
    ratio_T = _log_ratio(logp_T, inputs, active_T).exp()
    low, high = _clip_bounds(inputs, config)
    objective_T = torch.minimum(ratio_T * advantages_T, _clip(ratio_T, low, high) * advantages_T)
    return -objective_T.sum(), _clip_metrics(ratio_T, low, high, active_T)


def cispo(logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config) -> tuple[Tensor, Metrics]:
    """-sum sg(clip(r, lo, hi)) lp A (CISPO, arXiv 2506.13585, equation 4): clipped tokens keep a gradient."""
    advantages_T = inputs["advantages"]
    active_T = advantages_T != 0
    ratio_T = _log_ratio(logp_T, inputs, active_T).exp().detach()
    low, high = _clip_bounds(inputs, config)
    loss = -(_clip(ratio_T, low, high) * _where(active_T, logp_T) * advantages_T).sum()
    return loss, _clip_metrics(ratio_T, low, high, active_T)


def one_pass(
    kind: str, logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """The loss called `kind` in one pass over the tokens, gradient and metrics included (kernels.policy_loss).

    The same numbers as the plain function, which is its definition and the path off a GPU.
    """
    from kernels import policy_loss

    advantages_T = inputs["advantages"]
    low, high = _clip_bounds(inputs, config)
    value, sums = policy_loss(
        logp_T,
        inputs.get("logprobs", logp_T.detach()),
        advantages_T,
        kind=kind,
        mask_T=advantages_T != 0,
        cu_seqlens=cu_seqlens,
        clip_low=low,
        clip_high=high,
    )
    metrics = {"active_tokens:sum": sums["tokens"]}
    if kind != "importance_sampling":
        metrics |= {"clipped_low:sum": sums["clipped_low"], "clipped_high:sum": sums["clipped_high"]}
    return value, metrics


@dataclass(frozen=True)
class LossSpec:
    """A loss with the datum fields it needs and may have, and the keys of its config. `fused`: its form for a GPU."""

    fn: LossFn
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    soft_targets: bool = False
    fused: LossFn | None = None
    as_sampled: bool = False  # scored at the temperature last sampled with, unless one is given

    def on(self, device: torch.device, *, fused: bool) -> LossFn:
        """The function to call there: one kernel on a GPU where there is one, the plain formula elsewhere."""
        return self.fused if fused and self.fused is not None and device.type == "cuda" else self.fn


_CLIP = ("clip_low_threshold", "clip_high_threshold")
_RL = ("target_tokens", "advantages")
LOSSES: dict[str, LossSpec] = {
    "cross_entropy": LossSpec(cross_entropy, ("target_tokens",), ("weights",), soft_targets=True),
    "importance_sampling": LossSpec(
        importance_sampling, _RL, ("logprobs", "mask"), fused=partial(one_pass, "importance_sampling"), as_sampled=True
    ),
    "ppo": LossSpec(ppo, (*_RL, "logprobs"), ("mask", *_CLIP), _CLIP, fused=partial(one_pass, "ppo"), as_sampled=True),
    "cispo": LossSpec(cispo, (*_RL, "logprobs"), ("mask", *_CLIP), _CLIP, fused=partial(one_pass, "cispo"), as_sampled=True),
}
CUSTOM = replace(LOSSES["cross_entropy"], as_sampled=True)  # what forward_backward_custom runs


def get_loss(name: str) -> LossSpec:
    """The loss of that name, or an error that lists what exists."""
    if name == "stable_reinforce":
        raise ValueError("the formula of 'stable_reinforce' is not published; use loss_fn='importance_sampling' instead")
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}: one of {', '.join(LOSSES)}, or a function with forward_backward_custom")
    return LOSSES[name]
