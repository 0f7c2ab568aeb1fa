"""Define losses on preferences: on pairs with a reference (DPO, IPO), on pairs without a reference
(ORPO, SimPO) or of scores (Bradley-Terry), and on answers labeled good or bad (KTO).

The functions have the same form as in rl.losses. lp = learner logprob, ref = reference logprob
(field `ref_logprobs`), over the tokens of `mask`; |y| = number of these tokens. Pairs are two
consecutive datums, the preferred response first, then the rejected response.

For a pair (w, l) of preferred and rejected responses, with lp and ref summed over the tokens (DPO
and IPO without `ref_logprobs` are reference-free, ref = 0):
    delta = (lp_w - ref_w) - (lp_l - ref_l)
    implicit rewards: beta (lp - ref)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl.losses.loss_terms import (
    Config,
    Inputs,
    Metrics,
    count_per_datum,
    get_action_mask,
    select_masked,
    sum_per_datum,
)


def _pair_metrics(rewards_D: Tensor, logps_D: Tensor | None = None) -> Metrics:
    """Return the metric sums of pairs."""
    chosen_P, rejected_P = rewards_D.detach()[0::2], rewards_D.detach()[1::2]
    metrics = {
        "pairs:sum": torch.full((), len(rewards_D) // 2, device=rewards_D.device),
        "chosen_rewards:sum": chosen_P.sum(),
        "rejected_rewards:sum": rejected_P.sum(),
        # a tie, as if policy and reference are the same model, counts as half right
        "ranked_right:sum": ((chosen_P - rejected_P).sign() + 1).sum() / 2,
    }
    if logps_D is not None:
        metrics["chosen_logps:sum"] = logps_D.detach()[0::2].sum()
        metrics["rejected_logps:sum"] = logps_D.detach()[1::2].sum()
    return metrics


def _pair_deltas(
    logp_T: Tensor,
    inputs: Inputs,
    cu_seqlens: Tensor,
    config: Config,
    *,
    per_token: bool,
) -> tuple[Tensor, Metrics]:
    """Return the delta of each pair (attached to the graph) and the metric sums.

    `per_token`: lp - ref is averaged over tokens, not summed.
    """
    mask_T = get_action_mask(inputs)
    policy_T = select_masked(mask_T, logp_T)
    ref_T = (
        select_masked(mask_T, inputs["ref_logprobs"])
        if "ref_logprobs" in inputs
        else torch.zeros_like(logp_T)
    )
    # Subtract token by token before the sum: if policy and reference are the same model, the
    # difference is exactly 0.
    ratios_D = sum_per_datum(policy_T - ref_T, cu_seqlens)
    rewards_D = config.get("beta", 0.1) * ratios_D.detach()
    metrics = _pair_metrics(rewards_D, sum_per_datum(policy_T.detach(), cu_seqlens))
    if per_token:
        ratios_D = ratios_D / count_per_datum(mask_T, cu_seqlens)
    return ratios_D[0::2] - ratios_D[1::2], metrics


def dpo(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
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
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
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
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
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
    return loss, _pair_metrics(scores_D)


def _sum_answers(logp_T: Tensor, inputs: Inputs, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return (the sum of lp, |y|) of each datum, each [D]."""
    mask_T = get_action_mask(inputs)
    sums_D = sum_per_datum(select_masked(mask_T, logp_T), cu_seqlens)
    return sums_D, count_per_datum(mask_T, cu_seqlens)


def orpo(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """Compute sum over pairs of -m_w - beta log sigmoid(log odds_w - log odds_l), odds = P / (1 -
    P), P = e^m, m = mean of lp over y.

    ORPO (Hong et al., arXiv 2403.07691, equations 6 and 7; beta is their lambda). The loss trains
    the answer, not the prompt.
    """
    sums_D, counts_D = _sum_answers(logp_T, inputs, cu_seqlens)
    means_D = sums_D / counts_D
    # log(1 - e^m), also exact for m near 0; the clamp covers m = 0, a certain answer with infinite
    # odds
    log_odds_D = means_D - torch.log(-torch.expm1(means_D.clamp(max=-1e-6)))
    beta = config.get("beta", 0.1)
    loss = -(means_D[0::2] + beta * F.logsigmoid(log_odds_D[0::2] - log_odds_D[1::2])).sum()
    nll = {"nll:sum": -means_D[0::2].detach().sum()}
    return loss, {**_pair_metrics(beta * means_D, sums_D), **nll}


def simpo(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """Compute -sum over pairs of log sigmoid(beta m_w - beta m_l - gamma), m = mean of lp over y.

    SimPO (Meng et al., arXiv 2405.14734, equation 6).
    """
    sums_D, counts_D = _sum_answers(logp_T, inputs, cu_seqlens)
    rewards_D = config.get("beta", 2.0) * sums_D / counts_D
    loss = -F.logsigmoid(rewards_D[0::2] - rewards_D[1::2] - config.get("gamma", 1.0)).sum()
    return loss, _pair_metrics(rewards_D, sums_D)


def kto(
    logp_T: Tensor, entropy_T: Tensor, inputs: Inputs, cu_seqlens: Tensor, config: Config
) -> tuple[Tensor, Metrics]:
    """Compute sum over answers of w (1 - sigmoid(beta (r - z))) of good answers, w (1 -
    sigmoid(beta (z - r))) of bad answers, r = sum of lp - ref.

    KTO (Ethayarajh et al., arXiv 2402.01306, equations 7 and 8). z, `kl`, is the batch's estimate
    of the KL to the reference, without a gradient; w is `desirable_weight` or `undesirable_weight`.
    `labels`: 1 throughout a good answer's datum, -1 throughout a bad answer's datum.
    """
    mask_T = get_action_mask(inputs)
    policy_T, ref_T = (
        select_masked(mask_T, logp_T),
        select_masked(mask_T, inputs["ref_logprobs"]),
    )
    ratios_D = sum_per_datum(policy_T - ref_T, cu_seqlens)
    signs_D = inputs["labels"][cu_seqlens[1:] - 1].to(ratios_D.dtype)
    good_D = signs_D > 0
    beta = config.get("beta", 0.1)
    weights_D = torch.where(
        good_D, config.get("desirable_weight", 1.0), config.get("undesirable_weight", 1.0)
    ).to(ratios_D.dtype)
    gains_D = torch.sigmoid(beta * signs_D * (ratios_D - config.get("kl", 0.0)))
    loss = (weights_D * (1 - gains_D)).sum()
    rewards_D = beta * ratios_D.detach()
    return loss, {
        "answers:sum": torch.full((), len(ratios_D), device=logp_T.device),
        "good:sum": good_D.sum(),
        "good_rewards:sum": select_masked(good_D, rewards_D).sum(),
        "bad_rewards:sum": select_masked(~good_D, rewards_D).sum(),
    }
