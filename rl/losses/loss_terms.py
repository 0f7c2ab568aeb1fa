"""Define the terms that a policy-gradient loss can include: entropy bonus, KL to a reference, value
loss.

A nonzero coefficient in `loss_fn_config` enables a term. Each term is, like the losses, a SUM over
action tokens. The datum's `mask` (or `sequence_ratio_mask`) marks the action tokens: an advantage
of 0 does not distinguish an observation from an action. A mask with values other than 0 and 1
weights entropy and KL at its tokens (for a sequence's mean: 1 over its number of action tokens).

    entropy_coef  c   - c sum H            H: the policy's entropy at each action, at the
                                           temperature of the samples
    kl_coef       c   + c sum KL estimate  needs `ref_logprobs`, reads `behavior_logprobs`, else
                                           `logprobs`; the estimator is `kl_kind`
    value_coef    c   + c sum value loss   needs `returns` and a value head; `value_clip` also needs
                                           `values_old`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl.errors import BadRequestError

Inputs = Mapping[str, Tensor]
Config = Mapping[str, Any]
Metrics = dict[str, Tensor]

_MAX_K3_EXPONENT = 60.0
# beyond which k3_pathwise continues as a straight line, so that its gradients have a finite norm
_MAX_PATHWISE_EXPONENT = 20.0
KL_KINDS = ("k1", "k2", "k3", "k3_pathwise")
TERM_CONFIG = ("entropy_coef", "kl_coef", "kl_kind", "value_coef", "value_clip")
MASK_FIELDS = ("mask", "sequence_ratio_mask")
TERM_FIELDS = (
    *MASK_FIELDS,
    "ref_logprobs",
    "returns",
    "values_old",
    "behavior_logprobs",
    "versions",
    "proximal_share",
)


def select_masked(mask: Tensor, value: Tensor) -> Tensor:
    """Return `value` where the mask is True, 0 elsewhere.

    The values are selected, never multiplied, so that a NaN elsewhere changes nothing.
    """
    return torch.where(mask, value, torch.zeros((), dtype=value.dtype, device=value.device))


def sum_per_datum(value_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the sum over each datum, [D]."""
    lengths = cu_seqlens.diff()
    owner_T = torch.repeat_interleave(
        torch.arange(len(lengths), device=value_T.device), lengths, output_size=len(value_T)
    )
    return value_T.new_zeros(len(lengths)).index_add(0, owner_T, value_T)


def count_per_datum(active_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the number of active tokens of each datum, at least 1, fp32 [D]."""
    return sum_per_datum(active_T.float(), cu_seqlens).clamp(min=1)


def average_per_datum(value_T: Tensor, active_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return at each token the mean of its datum's values at active tokens, [T]. Values elsewhere
    are 0.
    """
    means_D = sum_per_datum(value_T, cu_seqlens) / count_per_datum(active_T, cu_seqlens)
    return torch.repeat_interleave(means_D, cu_seqlens.diff(), output_size=len(value_T))


def get_action_weights(inputs: Inputs) -> Tensor:
    """Return the mask that marks the actions, [T]."""
    return inputs["mask"] if "mask" in inputs else inputs["sequence_ratio_mask"]


def get_action_mask(inputs: Inputs) -> Tensor:
    """Return which tokens are actions, bool [T]."""
    return get_action_weights(inputs) != 0


def get_trained_mask(inputs: Inputs) -> Tensor:
    """Return the trained tokens, bool [T]: the actions if a mask marks them, else the tokens with a
    nonzero advantage.
    """
    if any(name in inputs for name in MASK_FIELDS):
        return get_action_mask(inputs)
    return inputs["advantages"] != 0


def estimate_kl(
    logp_T: Tensor, ref_T: Tensor, kind: str, behavior_T: Tensor | None = None
) -> Tensor:
    """Return an estimate of KL(policy || reference) at each sampled token, [T]. Schulman 2020,
    joschu.net/blog/kl-approx.html.

    With g = lp - ref: k1 = g, k2 = g^2 / 2, k3 = e^-g - 1 + g. On policy the gradient of the KL is
    E[g grad lp], which is the gradient of k2 as written. k1 as written has expected gradient 0, and
    k3 has the gradient of KL(reference || policy) (arXiv 2512.21852). This function therefore gives
    all three the gradient g grad lp; they differ in the reported value.

    `behavior_T`: the behavior logprobs q of the tokens, if the sampling policy differs from the
    current policy (a later epoch, older samples). The three are then weighted by r = e^(lp - q),
    held constant, and r g grad lp is again the gradient of the KL in expectation (the gradient of
    DeepSeek-V3.2's unbiased estimate r k3, arXiv 2512.02556, section 3.1, differentiated with its
    r). On policy r is 1.

    `k3_pathwise` is k3 differentiated as written and not weighted, as in GRPO (arXiv 2402.03300,
    equation 4), linear below g = -20: for comparisons. Raises ValueError if the kind is unknown.
    """
    gap_T = logp_T - ref_T
    k2_T = 0.5 * gap_T * gap_T
    match kind:
        case "k2":
            value_T = k2_T
        case "k1":
            value_T = gap_T
        case "k3":  # the value has no gradient and must not overflow
            value_T = torch.expm1((-gap_T).clamp(max=_MAX_K3_EXPONENT)) + gap_T
        case "k3_pathwise":
            capped_T = (-gap_T).clamp(max=_MAX_PATHWISE_EXPONENT)
            beyond_T = torch.relu(-gap_T - _MAX_PATHWISE_EXPONENT)
            value_T = torch.expm1(capped_T) + math.exp(_MAX_PATHWISE_EXPONENT) * beyond_T + gap_T
        case _:
            raise ValueError(f"unknown kl_kind {kind!r}: expected {', '.join(KL_KINDS)}")
    if kind == "k3_pathwise":
        return value_T
    estimate_T = value_T.detach() + (k2_T - k2_T.detach())
    return estimate_T if behavior_T is None else (logp_T - behavior_T).detach().exp() * estimate_T


def value_loss(
    values_T: Tensor, returns_T: Tensor, old_T: Tensor | None, clip: float | None
) -> Tensor:
    """Return (V - R)^2 / 2 at each token; with `clip` the larger of that and the same of V clipped
    to within `clip` of the old value.

    PPO, arXiv 1707.06347, equation 9 (L^VF); the clipped form is that of OpenAI's baselines, arXiv
    2005.12729, section 2.
    """
    plain_T = 0.5 * (values_T - returns_T) ** 2
    if clip is None:
        return plain_T
    assert old_T is not None
    clipped_T = old_T + (values_T - old_T).clamp(-clip, clip)
    return torch.maximum(plain_T, 0.5 * (clipped_T - returns_T) ** 2)


def get_required_fields(config: Config) -> dict[str, str]:
    """Return the datum fields (except the mask) that the enabled terms need, each with the setting
    that requires it.
    """
    needed: dict[str, str] = {}
    if config.get("kl_coef", 0.0):
        needed["ref_logprobs"] = "kl_coef"
    if config.get("value_coef", 0.0):
        needed["returns"] = "value_coef"
        if config.get("value_clip") is not None:
            needed["values_old"] = "value_clip"
    return needed


def check_term_config(config: Config) -> None:
    """Check the settings of the terms.

    Raises BadRequestError (a ValueError) for an unknown kl_kind or a value_clip that is not
    positive.
    """
    if config.get("kl_kind", "k3") not in KL_KINDS:
        raise BadRequestError(
            f"loss_fn_config has kl_kind {config['kl_kind']!r}: expected {', '.join(KL_KINDS)}"
        )
    if config.get("value_clip") is not None and not config["value_clip"] > 0:
        raise BadRequestError(
            "value_clip must be positive (the largest distance of a value from values_old), or "
            f"omitted; got {config['value_clip']}"
        )


def list_enabled_terms(config: Config) -> list[str]:
    """Return the names of the coefficients that are not 0."""
    return [name for name in ("entropy_coef", "kl_coef", "value_coef") if config.get(name, 0.0)]


def sum_value_loss(inputs: Inputs, config: Config) -> tuple[Tensor, Metrics]:
    """Return the sum of the value loss over actions, and its metrics."""
    active_T, clip = get_action_mask(inputs), config.get("value_clip")
    values_T, returns_T = (
        select_masked(active_T, inputs["values"]),
        select_masked(active_T, inputs["returns"]),
    )
    old_T = select_masked(active_T, inputs["values_old"]) if clip is not None else None
    total = value_loss(values_T, returns_T, old_T, clip).sum()
    metrics = {"value_loss:sum": total.detach(), "action_tokens:sum": active_T.sum()}
    if old_T is not None and clip is not None:
        metrics["value_clipped:sum"] = ((values_T.detach() - old_T).abs() > clip).sum()
    return total, metrics


def with_proximal_logprobs(logp_T: Tensor, inputs: Inputs) -> Inputs:
    """Return the fields with `logprobs` of a proximal policy, if a datum has `proximal_share`.

    `proximal_share` is the position of the proximal policy between the behavior logprobs q and the
    current learner's lp: q + share (lp - q), held constant (AReaL's log-linear approximation of
    decoupled PPO's proximal policy). Ratios are then e^((1 - share) (lp - q)). `behavior_logprobs`
    keeps the behavior logprobs, for a KL.
    """
    if "proximal_share" not in inputs:
        return inputs
    active_T = get_trained_mask(inputs)
    q_T = inputs["logprobs"]
    moved_T = select_masked(
        active_T,
        inputs["proximal_share"]
        * (select_masked(active_T, logp_T.detach()) - select_masked(active_T, q_T)),
    )
    return {
        **inputs,
        "logprobs": q_T + moved_T,
        "behavior_logprobs": inputs.get("behavior_logprobs", q_T),
    }


def compute_terms(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, config: Config
) -> tuple[Tensor, Metrics]:
    """Return the sum of the enabled terms (the config must enable any), and their metrics."""
    active_T, weight_T = get_action_mask(inputs), get_action_weights(inputs)
    total, metrics = logp_T.new_zeros(()), {"action_tokens:sum": active_T.sum()}
    if coefficient := config.get("entropy_coef", 0.0):
        active_entropy_T = select_masked(active_T, entropy_T)
        total = total - coefficient * (weight_T * active_entropy_T).sum()
        metrics["entropy:sum"] = active_entropy_T.detach().sum()
    if coefficient := config.get("kl_coef", 0.0):
        ref_T = select_masked(active_T, inputs["ref_logprobs"])
        behavior_key = next(
            (name for name in ("behavior_logprobs", "logprobs") if name in inputs), None
        )
        behavior_T = None if behavior_key is None else select_masked(active_T, inputs[behavior_key])
        kl_T = estimate_kl(
            select_masked(active_T, logp_T), ref_T, config.get("kl_kind", "k3"), behavior_T
        )
        total = total + coefficient * (weight_T * kl_T).sum()
        metrics["kl_ref:sum"] = kl_T.detach().sum()
    if coefficient := config.get("value_coef", 0.0):
        loss, value_metrics = sum_value_loss(inputs, config)
        total, metrics = total + coefficient * loss, metrics | value_metrics
    return total, metrics
