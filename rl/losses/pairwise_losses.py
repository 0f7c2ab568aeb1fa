"""Define losses on pairs: two consecutive datums, the preferred response first, then the rejected
response.

The functions have the same form as in rl.losses. lp = learner logprob, ref = reference logprob
(field `ref_logprobs`; without it the loss is reference-free, ref = 0), both summed over the tokens
of `mask`. For a pair (w, l) of preferred and rejected responses:
    delta = (lp_w - ref_w) - (lp_l - ref_l)
    implicit rewards: beta (lp - ref)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Config = Mapping[str, float]


def sum_per_datum(value_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the sum over each datum, [D]."""
    lengths = cu_seqlens.diff()
    owner_T = torch.repeat_interleave(torch.arange(len(lengths), device=value_T.device), lengths)
    return value_T.new_zeros(len(lengths)).index_add(0, owner_T, value_T)


def _pair_deltas(
    logp_T: Tensor,
    inputs: Mapping[str, Tensor],
    cu_seqlens: Tensor,
    config: Config,
    *,
    per_token: bool,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the delta of each pair (attached to the graph) and the metric sums.

    `per_token`: lp - ref is averaged over tokens, not summed.
    """
    mask_T = inputs["mask"] != 0
    zeros_T = torch.zeros_like(logp_T)
    policy_T = torch.where(mask_T, logp_T, zeros_T)
    ref_T = (
        torch.where(mask_T, inputs["ref_logprobs"], zeros_T)
        if "ref_logprobs" in inputs
        else zeros_T
    )
    # Subtract token by token before the sum: if policy and reference are the same model, the
    # difference is exactly 0.
    ratios_D = sum_per_datum(policy_T - ref_T, cu_seqlens)
    rewards_D = config.get("beta", 0.1) * ratios_D.detach()
    logps_D = sum_per_datum(policy_T.detach(), cu_seqlens)
    metrics = {
        "pairs:sum": torch.tensor(len(ratios_D) // 2, device=logp_T.device),
        "chosen_rewards:sum": rewards_D[0::2].sum(),
        "rejected_rewards:sum": rewards_D[1::2].sum(),
        # a tie, as if policy and reference are the same model, counts as half right
        "ranked_right:sum": ((rewards_D[0::2] - rewards_D[1::2]).sign() + 1).sum() / 2,
        "chosen_logps:sum": logps_D[0::2].sum(),
        "rejected_logps:sum": logps_D[1::2].sum(),
    }
    if per_token:
        ratios_D = ratios_D / sum_per_datum(mask_T.to(logp_T.dtype), cu_seqlens).clamp(min=1)
    return ratios_D[0::2] - ratios_D[1::2], metrics


def dpo(
    logp_T: Tensor,
    entropy_T: Tensor,
    inputs: Mapping[str, Tensor],
    cu_seqlens: Tensor,
    config: Config,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -sum over pairs of (1 - eps) log sigmoid(beta delta) + eps log sigmoid(-beta delta).

    DPO (Rafailov et al., arXiv 2305.18290, equation 7). With `label_smoothing` eps > 0, the
    probability that a label is wrong, it is conservative DPO (Mitchell, "A note on DPO with noisy
    preferences", 2023). `length_normalise` 1: delta uses means over tokens.
    """
    delta, metrics = _pair_deltas(
        logp_T, inputs, cu_seqlens, config, per_token=bool(config.get("length_normalise", 0))
    )
    scaled, eps = config.get("beta", 0.1) * delta, config.get("label_smoothing", 0.0)
    loss = -((1 - eps) * F.logsigmoid(scaled) + eps * F.logsigmoid(-scaled)).sum()
    return loss, metrics


def ipo(
    logp_T: Tensor,
    entropy_T: Tensor,
    inputs: Mapping[str, Tensor],
    cu_seqlens: Tensor,
    config: Config,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute sum over pairs of (delta - 1 / (2 beta))^2 (IPO, Azar et al., arXiv 2310.12036,
    equation 17, with tau = beta).

    `length_normalise` 0 sums over tokens as in the equation. By default (1) delta uses means over
    tokens, as in other trainers: the target then stays within reach of short and long responses
    alike.
    """
    delta, metrics = _pair_deltas(
        logp_T, inputs, cu_seqlens, config, per_token=bool(config.get("length_normalise", 1))
    )
    return (delta - 1 / (2 * config.get("beta", 0.1))).square().sum(), metrics


def bradley_terry(
    logp_T: Tensor,
    entropy_T: Tensor,
    inputs: Mapping[str, Tensor],
    cu_seqlens: Tensor,
    config: Config,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -sum over pairs of log sigmoid(r_w - r_l), where r is the value at a datum's last
    position, after all tokens.

    P(w preferred to l) = sigmoid(r_w - r_l) (Bradley and Terry 1952; as a reward model: Ouyang et
    al., arXiv 2203.02155, equation 1). `centre_coef` c adds c (r_w + r_l)^2, which fixes the
    constant that the model leaves undetermined (Eisenstein et al., arXiv 2312.09244, section 2.2).
    """
    scores_D = inputs["values"][cu_seqlens[1:] - 1]
    chosen, rejected = scores_D[0::2], scores_D[1::2]
    loss = -F.logsigmoid(chosen - rejected).sum()
    if coefficient := config.get("centre_coef", 0.0):
        loss = loss + coefficient * (chosen + rejected).square().sum()
    scores_D = scores_D.detach()
    metrics = {
        "pairs:sum": torch.tensor(len(scores_D) // 2, device=scores_D.device),
        "chosen_rewards:sum": scores_D[0::2].sum(),
        "rejected_rewards:sum": scores_D[1::2].sum(),
        "ranked_right:sum": ((scores_D[0::2] - scores_D[1::2]).sign() + 1).sum() / 2,
    }
    return loss, metrics
