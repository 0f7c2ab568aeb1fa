"""Define the losses: pure functions `loss(logp_T, entropy_T, inputs, cu_seqlens, config) -> (sum,
metrics)`.

logp_T      the learner's logprob of each target, fp32 [T] ([T, K] for soft targets), attached to
            the graph
entropy_T   the learner's entropy at each position, fp32 [T]
inputs      the datums' fields, a value per token: {"advantages": [T], "logprobs": [T], ...}; for a
            learner with a value head also "values" [T], attached to the graph
cu_seqlens  int64 [D + 1], the start of each datum; T is the sum over datums
config      from `loss_fn_config`

Every loss is a SUM over tokens and datums, as in Tinker; to get a mean, pass a divisor to
`forward_backward`. Metrics are also sums (":sum"), so that they add up over micro-batches and
ranks. A loss reads no result on the host: a GPU would have to finish all earlier work first.

With lp = learner logprob, q = behavior logprob (of the sampler), r = exp(lp - q), A = advantage, w
= weight. Thresholds are absolute ratios (0.8, 1.2).

A datum's `mask` (or `sequence_ratio_mask`), if it has a mask, selects the tokens that a policy loss
trains and counts: tokens with a nonzero mask, for any advantage. Without a mask these are the
tokens with a nonzero advantage. Some losses must know the actions exactly (`dro`, `gspo`, entropy,
KL, values); rl.client.check_arguments adds a mask to their datums beforehand. Masked positions are
selected away, never multiplied by zero: a NaN at a masked position changes nothing. Ratios at an
advantage of 0 are selected away likewise: they may overflow.

rl.losses.loss_terms holds what is added to a policy-gradient loss: entropy, KL to a reference,
value loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rl.errors import BadRequestError
from rl.losses import ilql as q_losses
from rl.losses import preference_losses
from rl.losses.loss_terms import (
    MASK_FIELDS,
    TERM_CONFIG,
    TERM_FIELDS,
    Config,
    Inputs,
    Metrics,
    average_per_datum,
    compute_terms,
    get_required_fields,
    get_trained_mask,
    list_enabled_terms,
    select_masked,
    sum_value_loss,
    with_proximal_logprobs,
)

LossFn = Callable[[Tensor, Tensor, Inputs, Tensor, Config], tuple[Tensor, Metrics]]


def _select_trained(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return (the trained tokens, bool [T]; their advantages, 0 elsewhere, [T])."""
    active_T = get_trained_mask(inputs)
    return active_T, select_masked(active_T, inputs["advantages"])


def _log_ratio(logp_T: Tensor, inputs: Inputs, active_T: Tensor) -> Tensor:
    """Return lp - q at active tokens, 0 elsewhere.

    Without behavior logprobs q = sg(lp), so r = 1: REINFORCE.
    """
    old_T = inputs.get("logprobs", logp_T.detach())
    return select_masked(active_T, logp_T) - select_masked(active_T, old_T)


def _clip_bounds(inputs: Inputs, config: Config) -> tuple[Tensor | float, Tensor | float]:
    """Return the clip thresholds (low, high): of each token if the datums have them, else of the
    config.
    """
    low = inputs.get("clip_low_threshold", config.get("clip_low_threshold", 0.8))
    high = inputs.get("clip_high_threshold", config.get("clip_high_threshold", 1.2))
    return low, high


def _clip(
    ratio_T: Tensor, gap_T: Tensor, active_T: Tensor, inputs: Inputs, config: Config
) -> tuple[Tensor, Metrics]:
    """Return (the ratio clipped to the thresholds; the counts of active tokens and of those with a
    ratio e^gap outside the thresholds).
    """
    low, high = _clip_bounds(inputs, config)
    low_t, high_t = (
        bound.to(ratio_T.dtype) if isinstance(bound, Tensor) else ratio_T.new_full((), bound)
        for bound in (low, high)
    )
    ratio = gap_T.detach().exp()
    return torch.minimum(torch.maximum(ratio_T, low_t), high_t), {
        "clipped_low:sum": (active_T & (ratio < low)).sum(),
        "clipped_high:sum": (active_T & (ratio > high)).sum(),
        "active_tokens:sum": active_T.sum(),
    }


def cross_entropy(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """Compute -sum w lp; soft targets: -sum_k w_tk lp(x_tk). Weights default to 1.

    `token_accuracy` (only in a forward) counts the weighted tokens that are the most likely;
    entropy_T then marks these tokens.
    """
    weights = inputs["weights"] if "weights" in inputs else torch.ones_like(logp_T)
    metrics = {"weights:sum": weights.sum()}
    if config.get("token_accuracy"):
        metrics["argmax_match:sum"] = select_masked(weights != 0, entropy_T).sum()
    return -(select_masked(weights != 0, logp_T) * weights).sum(), metrics


def importance_sampling(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """Compute -sum r A. Without behavior logprobs this is REINFORCE (r = 1, its gradient A grad
    lp).
    """
    active_T, advantages_T = _select_trained(inputs)
    ratio_T = _log_ratio(logp_T, inputs, advantages_T != 0).exp()
    return -(ratio_T * advantages_T).sum(), {"active_tokens:sum": active_T.sum()}


def ppo(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """Compute -sum min(r A, clip(r, lo, hi) A) (PPO, arXiv 1707.06347, equation 7).

    The datum may hold a threshold per token.
    """
    active_T, advantages_T = _select_trained(inputs)
    gap_T = _log_ratio(logp_T, inputs, active_T)
    ratio_T = select_masked(advantages_T != 0, gap_T).exp()
    clipped_T, metrics = _clip(ratio_T, gap_T, active_T, inputs, config)
    return -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T).sum(), metrics


def cispo(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """Compute -sum sg(clip(r, lo, hi)) lp A (CISPO, arXiv 2506.13585, equation 4): clipped tokens
    keep a gradient.
    """
    active_T, advantages_T = _select_trained(inputs)
    gap_T = _log_ratio(logp_T, inputs, active_T).detach()
    ratio_T = select_masked(advantages_T != 0, gap_T).exp()
    clipped_T, metrics = _clip(ratio_T, gap_T, active_T, inputs, config)
    return -(clipped_T * select_masked(active_T, logp_T) * advantages_T).sum(), metrics


def dro(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """Compute -sum [lp A - beta/2 (lp - q)^2] over actions (DRO, arXiv 2405.19107): no ratio, a
    quadratic pull to the behavior policy.

    The pull acts on every action, for any advantage; hence the loss needs the mask.
    """
    active_T, advantages_T = _select_trained(inputs)
    gap_T = _log_ratio(logp_T, inputs, active_T)
    loss = (
        0.5 * config.get("beta", 0.05) * gap_T * gap_T
        - select_masked(active_T, logp_T) * advantages_T
    ).sum()
    return loss, {"active_tokens:sum": active_T.sum()}


def gspo(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """Compute `ppo` with a ratio per sequence, s = exp(mean over its actions of lp - q), as s_t =
    sg(s) p / sg(p).

    GSPO-token, arXiv 2507.18071, equations 7 and 14. The mean is used and not the sum: exp(sum)
    would clip long sequences only because of noise.
    """
    active_T, advantages_T = _select_trained(inputs)
    gap_T = _log_ratio(logp_T, inputs, active_T).detach()
    mean_T = average_per_datum(gap_T, active_T, cu_seqlens)
    live_T = select_masked(active_T, logp_T)
    ratio_T = select_masked(advantages_T != 0, mean_T).exp() * (live_T - live_T.detach()).exp()
    clipped_T, metrics = _clip(ratio_T, mean_T, active_T, inputs, config)
    return -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T).sum(), metrics


def value(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """Compute sum (V - R)^2 / 2 over actions, for a separate critic; `value_clip` limits the
    distance of V from `values_old`.
    """
    return sum_value_loss(inputs, config)


def custom(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """Compute a loss whose gradient by logprobs is `weights` times -1, and by values
    `value_weights` times -1.

    This is the learner's side of a loss that the user computes.
    """
    total = select_masked(torch.zeros((), dtype=torch.bool, device=logp_T.device), logp_T).sum()
    if "weights" in inputs:
        total = cross_entropy(logp_T, entropy_T, inputs, cu_seqlens, config)[0]
    if "value_weights" in inputs:
        weights_T = inputs["value_weights"]
        total = total - (select_masked(weights_T != 0, inputs["values"]) * weights_T).sum()
    return total, {}


def fused_policy_loss(
    kind: str,
    logp_T: Tensor,
    entropy_T: Tensor,
    inputs: Inputs,
    cu_seqlens: Tensor,
    config: Config,
) -> tuple[Tensor, Metrics]:
    """Compute the loss that the kernel calls `kind` in a single pass over the tokens, with gradient
    and metrics (kernels.policy_loss).

    The numbers equal those of the plain function, which is the definition and is used without a
    GPU.
    """
    from kernels import policy_loss

    low, high = _clip_bounds(inputs, config)
    value, sums = policy_loss(
        logp_T,
        inputs.get("logprobs", logp_T.detach()),
        inputs["advantages"],
        kind=kind,
        mask_T=get_trained_mask(inputs),
        cu_seqlens=cu_seqlens,
        clip_low=low,
        clip_high=high,
        beta=config.get("beta", 0.05),
    )
    metrics = {"active_tokens:sum": sums["tokens"]}
    if kind in ("ppo", "cispo", "gspo"):
        metrics |= {f"{name}:sum": sums[name] for name in ("clipped_low", "clipped_high")}
    return value, metrics


@dataclass(frozen=True)
class LossSpec:
    """Describe a loss: the datum fields it needs and may have, the keys of its config, and its
    properties. A loss of the setting `loss` is also an entry of
    rl.algorithms.grpo.POLICY_LOSSES.

    soft_targets      accepts several targets a position, each with a weight
    fused_kind        name of the loss in kernels.policy_loss, its implementation on a GPU; None: no
                      kernel exists and a GPU uses the plain formula
    needs_advantages  the gradient is proportional to the advantages: if all are 0, only an added
                      term has a gradient
    needs_weights     the gradient is proportional to the weights of the tokens, which are 1 where a
                      datum has none
    terms             accepts the terms of rl.losses.loss_terms: their fields and config keys are
                      also valid
    needs_mask        needs to know which tokens are actions
    gradient_fields   the first of these fields that a datum has is 0 at each token whose logprob
                      and entropy get no gradient. Without one of them any token may get one. Empty:
                      it is unknown, and a GPU's backward waits to find these tokens
    values            reads the learner's values, so it needs a value head
    logprobs          False: the loss reads no logprobs, so they are not computed
    group             number of consecutive datums that belong together (2: pairs) and are never
                      split
    unit              what the loss is a sum over: "token", "group" (of answers: single answers or
                      pairs), or "own" for a custom loss, for which it is unknown
    at_sampling_temperature  evaluated at the temperature of the last sampling, unless the config
                             sets a temperature
    """

    fn: LossFn
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    soft_targets: bool = False
    fused_kind: str | None = None
    needs_advantages: bool = False
    needs_weights: bool = False
    at_sampling_temperature: bool = False
    terms: bool = False
    needs_mask: bool = False
    gradient_fields: tuple[str, ...] = ()
    values: bool = False
    logprobs: bool = True
    group: int = 1
    unit: Literal["token", "group", "own"] = "token"

    @property
    def fused_function(self) -> LossFn | None:
        """Return the kernel implementation, or None if no kernel exists."""
        return None if self.fused_kind is None else partial(fused_policy_loss, self.fused_kind)

    def select_function(self, device: torch.device, *, fused: bool) -> LossFn:
        """Return the function to call on `device`: the kernel on a GPU if it exists, else the plain
        formula.
        """
        return (self.fused_function if fused and device.type == "cuda" else None) or self.fn

    def compute(
        self,
        logp_T: Tensor,
        entropy_T: Tensor,
        inputs: Inputs,
        cu_seqlens: Tensor,
        config: Config,
        *,
        fused: bool = False,
    ) -> tuple[Tensor, Metrics]:
        """Return the sum of the loss and the terms that `config` adds, and the metrics of both."""
        if self.terms:
            inputs = with_proximal_logprobs(logp_T, inputs)
        total, metrics = self.select_function(logp_T.device, fused=fused)(
            logp_T, entropy_T, inputs, cu_seqlens, config
        )
        if self.terms and list_enabled_terms(config):
            term_loss, term_metrics = compute_terms(logp_T, entropy_T, inputs, config)
            metrics = {**metrics, "policy_loss:sum": total.detach(), **term_metrics}
            total = total + term_loss
        return total, metrics

    @property
    def known_fields(self) -> tuple[str, ...]:
        """Return the names of the valid datum fields."""
        return (*self.required, *self.optional, *(TERM_FIELDS if self.terms else ()))

    @property
    def known_config(self) -> tuple[str, ...]:
        """Return the valid keys of the config."""
        return (*self.config, "temperature", *(TERM_CONFIG if self.terms else ()))

    def find_gradient_tokens(
        self, fields: Mapping[str, np.ndarray], config: Config
    ) -> np.ndarray | None:
        """Return the tokens whose logprob or entropy may get a gradient, bool [T], from the fields
        [T] or [T, K] of datums. Returns None if `gradient_fields` does not tell.
        """
        if not self.gradient_fields:
            return None
        names = [name for name in self.gradient_fields if name in fields][:1]
        if self.needs_advantages and not (self.terms and list_enabled_terms(config)):
            names.append("advantages")
        active_T = np.ones(len(fields["target_tokens"]), dtype=bool)
        for name in names:
            active_T &= (fields[name] != 0).reshape(len(active_T), -1).any(1)
        return active_T

    def needs_entropy(self, config: Config) -> bool:
        """Return whether the loss reads the entropy under this config."""
        return self.terms and bool(config.get("entropy_coef", 0.0))

    def needs_values(self, config: Config) -> bool:
        """Return whether the loss reads the learner's values under this config."""
        return self.values or (self.terms and bool(config.get("value_coef", 0.0)))

    def check_terms(self, index: int, fields: Mapping[str, object], config: Config) -> None:
        """Check that datum `index` has the fields that `config` requires.

        Raises BadRequestError (a ValueError) naming the datum and the missing field, with the way
        to add it.
        """
        enabled = list_enabled_terms(config) if self.terms else []
        if (self.needs_mask or enabled) and not any(name in fields for name in MASK_FIELDS):
            raise BadRequestError(
                f"datum {index} lacks loss_fn_inputs['mask'], which "
                f"{' and '.join(enabled) or 'this loss'} needs to know the actions: "
                "1.0 at each target that the policy sampled, 0.0 elsewhere, e.g. [0.0] * (prompt "
                "length - 1) + [1.0] * response length"
            )
        needed = {"values_old": "value_clip"} if config.get("value_clip") is not None else {}
        if self.terms:
            needed = get_required_fields(config)
            if "proximal_share" in fields:
                needed["logprobs"] = "proximal_share"
        for name, setting in needed.items():
            if name not in fields:
                raise BadRequestError(
                    f"datum {index} lacks loss_fn_inputs[{name!r}], which {setting} needs (it has "
                    f"{sorted(fields)})"
                )


_CLIP_FIELDS = ("clip_low_threshold", "clip_high_threshold")
_POLICY_FIELDS = ("target_tokens", "advantages", "logprobs")
_ANSWER_FIELDS = ("target_tokens", "mask")

# a loss with advantages, to which terms may be added
_policy_gradient_spec = partial(
    LossSpec,
    at_sampling_temperature=True,
    terms=True,
    gradient_fields=(*MASK_FIELDS, "advantages"),
)
# one that clips ratios
_clipped_spec = partial(
    _policy_gradient_spec,
    required=_POLICY_FIELDS,
    optional=_CLIP_FIELDS,
    config=_CLIP_FIELDS,
    needs_advantages=True,
)
# a loss on the logprobs of pairs
_pair_spec = partial(
    LossSpec, required=_ANSWER_FIELDS, gradient_fields=MASK_FIELDS, group=2, unit="group"
)


LOSSES: dict[str, LossSpec] = {
    "cross_entropy": LossSpec(
        cross_entropy,
        ("target_tokens",),
        ("weights",),
        ("token_accuracy",),
        soft_targets=True,
        needs_weights=True,
        gradient_fields=("weights",),
    ),
    "importance_sampling": _policy_gradient_spec(
        importance_sampling,
        _POLICY_FIELDS[:2],
        ("logprobs",),
        needs_advantages=True,
        fused_kind="importance_sampling",
    ),
    "ppo": _clipped_spec(ppo, fused_kind="ppo"),
    "cispo": _clipped_spec(cispo, fused_kind="cispo"),
    "dro": _policy_gradient_spec(
        dro, _POLICY_FIELDS, config=("beta",), needs_mask=True, fused_kind="dro"
    ),
    "gspo": _clipped_spec(gspo, needs_mask=True, fused_kind="gspo"),
    "value": LossSpec(
        value,
        ("target_tokens", "returns"),
        ("advantages", "logprobs", *(name for name in TERM_FIELDS if name != "returns")),
        ("value_clip",),
        needs_mask=True,
        values=True,
        logprobs=False,
    ),
    "dpo": _pair_spec(
        preference_losses.dpo,
        optional=("ref_logprobs",),
        config=("beta", "label_smoothing", "length_normalise"),
    ),
    "ipo": _pair_spec(
        preference_losses.ipo, optional=("ref_logprobs",), config=("beta", "length_normalise")
    ),
    "orpo": _pair_spec(preference_losses.orpo, config=("beta",)),
    "simpo": _pair_spec(preference_losses.simpo, config=("beta", "gamma")),
    "kto": LossSpec(
        preference_losses.kto,
        (*_ANSWER_FIELDS, "ref_logprobs", "labels"),
        config=("beta", "kl", "desirable_weight", "undesirable_weight"),
        gradient_fields=MASK_FIELDS,
        unit="group",
    ),
    "bradley_terry": _pair_spec(
        preference_losses.bradley_terry,
        config=("centre_coef",),
        gradient_fields=(),
        values=True,
        logprobs=False,
    ),
    "ilql": LossSpec(
        q_losses.ilql,
        (*_ANSWER_FIELDS, "logprobs", "advantages", "returns"),
        config=("tau", "cql_coef", "value_coef", "expectile"),
        needs_mask=True,
        gradient_fields=MASK_FIELDS,
        values=True,
    ),
}
# the loss that forward_backward_custom runs
CUSTOM_LOSS = LossSpec(
    custom,
    ("target_tokens",),
    ("weights", "value_weights"),
    soft_targets=True,
    at_sampling_temperature=True,
    gradient_fields=("weights",),
    unit="own",
)
CUSTOM_VALUE_LOSS = replace(CUSTOM_LOSS, logprobs=False)  # the same loss on values only


def get_loss(name: str) -> LossSpec:
    """Return the loss of that name. Raises BadRequestError listing the known losses if the name is
    unknown.
    """
    if name == "stable_reinforce":
        raise BadRequestError(
            "the formula of 'stable_reinforce' is not published; use loss_fn='importance_sampling' "
            "instead"
        )
    if name not in LOSSES:
        raise BadRequestError(
            f"unknown loss {name!r}: expected {', '.join(LOSSES)}, or a function with "
            "forward_backward_custom"
        )
    return LOSSES[name]
