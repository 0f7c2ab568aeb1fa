"""Losses: pure functions `loss(logp_T, entropy_T, inputs, cu_seqlens, config) -> (sum, metrics)`.

logp_T      the learner's logprob of each target, fp32 [T] ([T, K] for soft targets), attached to
the graph entropy_T   the learner's entropy at each position, fp32 [T]
inputs      the datums' fields, one value a token: {"advantages": [T], "logprobs": [T], ...}; of a
learner with a value head
            also "values" [T], attached to the graph
cu_seqlens  int64 [D + 1], where each datum begins; T is the sum over datums
config      from `loss_fn_config`

Every loss is a SUM over tokens and datums (as Tinker's are); who wants a mean passes a divisor to
`forward_backward`. Metrics are sums too (":sum"), so that they add over micro-batches and ranks.
With lp = learner logprob, q = sampler logprob, r = exp(lp - q), A = advantage, w = weight.
Thresholds are absolute ratios (0.8, 1.2). A datum's `mask` (or `sequence_ratio_mask`), where it has
one, says which tokens a policy loss trains and counts: those where it is not 0, whatever their
advantages. Without one they are those whose advantage is not 0; a datum of a loss that has to know
its actions exactly (`dro`, `gspo`, entropy, KL, values) gets a mask before it comes here
(rl.clients.action_masks). Masked positions are selected away, never multiplied by zero: a NaN there
changes nothing. What is added to a policy-gradient loss (entropy, KL to a reference, value loss)
stands in rl.losses.terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rl.errors import BadRequestError
from rl.losses import pairs as pair_losses
from rl.losses import preferences as preference_losses
from rl.losses import q as q_losses
from rl.losses.terms import (
    MASKS,
    TERM_CONFIG,
    TERM_FIELDS,
    Config,
    Inputs,
    Metrics,
    actions,
    add_value_loss,
    against_proximal,
    needed_fields,
    switched_on,
    terms,
)
from rl.losses.terms import where as _where

LossFn = Callable[[Tensor, Tensor, Inputs, Tensor, Config], tuple[Tensor, Metrics]]


def _trained(inputs: Inputs) -> Tensor:
    """bool [T]: the actions where a mask says which they are, else the tokens with an advantage."""
    return actions(inputs) if any(name in inputs for name in MASKS) else inputs["advantages"] != 0


def _log_ratio(logp_T: Tensor, inputs: Inputs, active_T: Tensor) -> Tensor:
    """lp - q at active tokens, 0 elsewhere. Without sampler logprobs q = sg(lp), so r = 1:
    REINFORCE.
    """
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


def _clip_metrics(
    ratio_T: Tensor, low: Tensor | float, high: Tensor | float, active_T: Tensor
) -> Metrics:
    ratio = ratio_T.detach()
    return {
        "clipped_low:sum": (active_T & (ratio < low)).sum(),
        "clipped_high:sum": (active_T & (ratio > high)).sum(),
        "active_tokens:sum": active_T.sum(),
    }


def cross_entropy(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """-sum w lp; soft targets: -sum_k w_tk lp(x_tk). Weights default to 1.

    `token_accuracy` (in a forward alone) counts the tokens with a weight that are the likeliest;
    entropy_T then tells which are.
    """
    weights = inputs["weights"] if "weights" in inputs else torch.ones_like(logp_T)
    loss = -(_where(weights != 0, logp_T) * weights).sum()
    found = {"likeliest:sum": entropy_T[weights != 0].sum()} if config.get("token_accuracy") else {}
    return loss, {"weights:sum": weights.sum(), **found}


def importance_sampling(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """-sum r A. Without sampler logprobs this is REINFORCE (r = 1, its gradient A grad lp)."""
    active_T = _trained(inputs)
    advantages_T = _where(active_T, inputs["advantages"])
    ratio_T = _log_ratio(logp_T, inputs, active_T).exp()
    return -(ratio_T * advantages_T).sum(), {"active_tokens:sum": active_T.sum()}


def ppo(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """-sum min(r A, clip(r, lo, hi) A) (PPO, arXiv 1707.06347, equation 7). Thresholds may come per
    token in the datum.
    """
    active_T = _trained(inputs)
    advantages_T = _where(active_T, inputs["advantages"])
    ratio_T = _log_ratio(logp_T, inputs, active_T).exp()
    low, high = _clip_bounds(inputs, config)
    objective_T = torch.minimum(ratio_T * advantages_T, _clip(ratio_T, low, high) * advantages_T)
    return -objective_T.sum(), _clip_metrics(ratio_T, low, high, active_T)


def cispo(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """-sum sg(clip(r, lo, hi)) lp A (CISPO, arXiv 2506.13585, equation 4): clipped tokens keep a
    gradient.
    """
    active_T = _trained(inputs)
    advantages_T = _where(active_T, inputs["advantages"])
    ratio_T = _log_ratio(logp_T, inputs, active_T).exp().detach()
    low, high = _clip_bounds(inputs, config)
    loss = -(_clip(ratio_T, low, high) * _where(active_T, logp_T) * advantages_T).sum()
    return loss, _clip_metrics(ratio_T, low, high, active_T)


def dro(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """-sum [lp A - beta/2 (lp - q)^2] over actions (DRO, arXiv 2405.19107): no ratio, a quadratic
    pull to the behaviour.

    The pull acts on every action, whatever its advantage; hence the mask.
    """
    active_T = _trained(inputs)
    gap_T = _log_ratio(logp_T, inputs, active_T)
    advantages_T = _where(active_T, inputs["advantages"])
    loss = (
        0.5 * config.get("beta", 0.05) * gap_T * gap_T - _where(active_T, logp_T) * advantages_T
    ).sum()
    return loss, {"active_tokens:sum": active_T.sum()}


def gspo(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """`ppo` with one ratio a sequence, s = exp(mean over its actions of lp - q), as s_t = sg(s) p /
    sg(p).

    GSPO-token, arXiv 2507.18071, equations 7 and 14. The mean, not the sum: exp(sum) would clip
    long sequences by noise alone.
    """
    active_T = _trained(inputs)
    advantages_T = _where(active_T, inputs["advantages"])
    gap_T = _log_ratio(logp_T, inputs, active_T).detach()
    owner_T = torch.repeat_interleave(
        torch.arange(len(cu_seqlens) - 1, device=gap_T.device), cu_seqlens.diff()
    )
    zeros_D = gap_T.new_zeros(len(cu_seqlens) - 1)
    count_D = zeros_D.index_add(0, owner_T, active_T.to(gap_T.dtype)).clamp(min=1.0)
    mean_T = (zeros_D.index_add(0, owner_T, gap_T) / count_D)[owner_T]
    live_T = _where(active_T, logp_T)
    ratio_T = mean_T.exp() * (live_T - live_T.detach()).exp()
    low, high = _clip_bounds(inputs, config)
    objective_T = torch.minimum(ratio_T * advantages_T, _clip(ratio_T, low, high) * advantages_T)
    return -objective_T.sum(), _clip_metrics(ratio_T, low, high, active_T)


def value(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """sum (V - R)^2 / 2 over actions, for a critic of its own; `value_clip` holds V within that of
    `values_old`.
    """
    return add_value_loss(inputs, config)


def custom(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """The loss whose gradient is -`weights` by logprobs and -`value_weights` by values: a user's
    loss, seen from the learner.
    """
    total = _where(torch.zeros((), dtype=torch.bool, device=logp_T.device), logp_T).sum()
    if "weights" in inputs:
        total = cross_entropy(logp_T, entropy_T, inputs, cu_seqlens, config)[0]
    if "value_weights" in inputs:
        weights_T = inputs["value_weights"]
        total = total - (_where(weights_T != 0, inputs["values"]) * weights_T).sum()
    return total, {}


def one_pass(
    kind: str,
    logp_T: Tensor,
    entropy_T: Tensor,
    inputs: Inputs,
    cu_seqlens: Tensor,
    config: Config,
    *,
    clips: bool,
) -> tuple[Tensor, Metrics]:
    """The loss that the kernel calls `kind` in one pass over the tokens, gradient and metrics
    included (kernels.policy_loss).

    The same numbers as the plain function, which is its definition and the path off a GPU. `clips`:
    with its metrics of clipping.
    """
    from kernels import policy_loss

    low, high = _clip_bounds(inputs, config)
    value, sums = policy_loss(
        logp_T,
        inputs.get("logprobs", logp_T.detach()),
        inputs["advantages"],
        kind=kind,
        mask_T=_trained(inputs),
        cu_seqlens=cu_seqlens,
        clip_low=low,
        clip_high=high,
        beta=config.get("beta", 0.05),
    )
    metrics = {"active_tokens:sum": sums["tokens"]}
    if clips:
        metrics |= {
            "clipped_low:sum": sums["clipped_low"],
            "clipped_high:sum": sums["clipped_high"],
        }
    return value, metrics


@dataclass(frozen=True)
class LossSpec:
    """A loss with the datum fields it needs and may have, and the keys of its config.

    fused_kind   its name in kernels.policy_loss, which is its form for a GPU; None: it has no
    kernel, and is the plain formula there too needs_advantages   its gradient is that of its
    advantages: where all are 0, only a term added to it has one as_sampled   scored at the
    temperature last sampled with, unless one is given terms        may carry the terms of
    rl.losses.terms: their fields and config keys are known to it as well masked       needs to know
    which tokens are actions
    values       reads the learner's values, so it needs a value head
    logprobs     False: it reads nothing of the vocabulary, so that is not computed
    group        so many consecutive datums belong together (2: pairs) and are never torn apart
    unit         what it is a sum over: "token", "group" (of answers: single ones or pairs), or
    "own", which is not known
    """

    fn: LossFn
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: tuple[str, ...] = ()
    soft_targets: bool = False
    fused_kind: str | None = None
    needs_advantages: bool = False
    as_sampled: bool = False
    terms: bool = False
    masked: bool = False
    values: bool = False
    logprobs: bool = True
    group: int = 1
    unit: Literal["token", "group", "own"] = "token"

    @property
    def fused(self) -> LossFn | None:
        """Its form in one kernel; None where there is none."""
        return (
            None
            if self.fused_kind is None
            else partial(one_pass, self.fused_kind, clips="clip_low_threshold" in self.config)
        )

    def on(self, device: torch.device, *, fused: bool) -> LossFn:
        """The function to call there: one kernel on a GPU where there is one, the plain formula
        elsewhere.
        """
        return self.fused if fused and self.fused is not None and device.type == "cuda" else self.fn

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
        """The loss and the terms that `config` adds to it, summed; metrics of both."""
        if self.terms:
            inputs = against_proximal(logp_T, inputs)
        total, metrics = self.on(logp_T.device, fused=fused)(
            logp_T, entropy_T, inputs, cu_seqlens, config
        )
        if self.terms and switched_on(config):
            added, watched = terms(logp_T, entropy_T, inputs, config)
            total, metrics = (
                total + added,
                {**metrics, "policy_loss:sum": total.detach(), **watched},
            )
        return total, metrics

    @property
    def known_fields(self) -> tuple[str, ...]:
        return (*self.required, *self.optional, *(TERM_FIELDS if self.terms else ()))

    @property
    def known_config(self) -> tuple[str, ...]:
        return (*self.config, "temperature", *(TERM_CONFIG if self.terms else ()))

    def needs_entropy(self, config: Config) -> bool:
        return self.terms and bool(config.get("entropy_coef", 0.0))

    def needs_values(self, config: Config) -> bool:
        return self.values or (self.terms and bool(config.get("value_coef", 0.0)))

    def check_terms(self, index: int, fields: Mapping[str, object], config: Config) -> None:
        """Raises ValueError, naming datum `index`, where what `config` switches on lacks a field,
        and says how to give it.
        """
        asked = switched_on(config) if self.terms else []
        if (self.masked or asked) and not any(name in fields for name in MASKS):
            raise BadRequestError(
                f"datum {index} lacks loss_fn_inputs['mask'], which {' and '.join(asked) or 'this loss'} needs to know the actions: "
                "1.0 at each target the policy drew, 0.0 elsewhere, e.g. [0.0] * (prompt length - 1) + [1.0] * response length"
            )
        needed = (
            needed_fields(config)
            if self.terms
            else {"values_old": "value_clip"}
            if "value_clip" in config
            else {}
        )
        for name, setting in needed.items():
            if name not in fields:
                raise BadRequestError(
                    f"datum {index} lacks loss_fn_inputs[{name!r}], which {setting} needs (it has {sorted(fields)})"
                )


_CLIP = ("clip_low_threshold", "clip_high_threshold")
_RL = ("target_tokens", "advantages")
_PAIR = ("target_tokens", "mask"), ("ref_logprobs",)  # fields a loss on pairs needs, and may have


def _policy_gradient(
    fn: LossFn,
    *,
    needs_advantages: bool,
    fused_kind: str | None,
    logprobs: bool = True,
    fields: tuple[str, ...] = (),
    config: tuple[str, ...] = (),
    masked: bool = False,
) -> LossSpec:
    """Make the entry of a loss with advantages. `logprobs`: whether a datum must have the
    sampler's, or may.
    """
    required = (*_RL, "logprobs") if logprobs else _RL
    return LossSpec(
        fn, required, fields if logprobs else ("logprobs", *fields), config, fused_kind=fused_kind, needs_advantages=needs_advantages,
        as_sampled=True, terms=True, masked=masked,
    )  # fmt: skip


LOSSES: dict[str, LossSpec] = {
    "cross_entropy": LossSpec(cross_entropy, ("target_tokens",), ("weights",), ("token_accuracy",), soft_targets=True),
    "importance_sampling": _policy_gradient(
        importance_sampling, needs_advantages=True, fused_kind="importance_sampling", logprobs=False
    ),
    "ppo": _policy_gradient(ppo, needs_advantages=True, fused_kind="ppo", fields=_CLIP, config=_CLIP),
    "cispo": _policy_gradient(cispo, needs_advantages=True, fused_kind="cispo", fields=_CLIP, config=_CLIP),
    "dro": _policy_gradient(dro, needs_advantages=False, fused_kind="dro", config=("beta",), masked=True),
    "gspo": _policy_gradient(gspo, needs_advantages=True, fused_kind="gspo", fields=_CLIP, config=_CLIP, masked=True),
    "value": LossSpec(
        value, ("target_tokens", "returns"), ("advantages", "logprobs", *(name for name in TERM_FIELDS if name != "returns")),
        ("value_clip",), masked=True, values=True, logprobs=False,
    ),
    "dpo": LossSpec(pair_losses.dpo, *_PAIR, ("beta", "label_smoothing", "length_normalise"), group=2, unit="group"),
    "ipo": LossSpec(pair_losses.ipo, *_PAIR, ("beta", "length_normalise"), group=2, unit="group"),
    "orpo": LossSpec(preference_losses.orpo, ("target_tokens", "mask"), (), ("beta",), group=2, unit="group"),
    "simpo": LossSpec(preference_losses.simpo, ("target_tokens", "mask"), (), ("beta", "gamma"), group=2, unit="group"),
    "kto": LossSpec(
        preference_losses.kto, ("target_tokens", "mask", "ref_logprobs", "labels"), (),
        ("beta", "kl", "desirable_weight", "undesirable_weight"), unit="group",
    ),
    "bradley_terry": LossSpec(
        pair_losses.bradley_terry, ("target_tokens", "mask"), (), ("centre_coef",), group=2, values=True, logprobs=False, unit="group"
    ),
    "ilql": LossSpec(
        q_losses.ilql, ("target_tokens", "mask", "logprobs", "advantages", "returns"), (),
        ("tau", "cql_coef", "value_coef", "expectile"), masked=True, values=True,
    ),
}  # fmt: skip
# what forward_backward_custom runs
CUSTOM = LossSpec(
    custom,
    ("target_tokens",),
    ("weights", "value_weights"),
    soft_targets=True,
    as_sampled=True,
    unit="own",
)
VALUES = replace(CUSTOM, logprobs=False)  # the same of values alone


def get_loss(name: str) -> LossSpec:
    """The loss of that name, or an error that lists what exists."""
    if name == "stable_reinforce":
        raise BadRequestError(
            "the formula of 'stable_reinforce' is not published; use loss_fn='importance_sampling' instead"
        )
    if name not in LOSSES:
        raise BadRequestError(
            f"unknown loss {name!r}: one of {', '.join(LOSSES)}, or a function with forward_backward_custom"
        )
    return LOSSES[name]
