"""Define losses on preferences without a reference (ORPO, SimPO), and on answers labeled good or
bad (KTO).

The functions have the same form as in rl.losses. lp = learner logprob, ref = reference logprob,
over the tokens of `mask`; |y| = number of these tokens. Pairs are two consecutive datums, the
preferred answer first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from rl.losses.pairwise_losses import sum_per_datum

Config = Mapping[str, float]


def _sum_answers(
    logp_T: Tensor, inputs: Mapping[str, Tensor], cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (the sum of lp, |y|) of each datum, each [D]."""
    mask_T = inputs["mask"] != 0
    sums_D = sum_per_datum(torch.where(mask_T, logp_T, torch.zeros_like(logp_T)), cu_seqlens)
    return sums_D, sum_per_datum(mask_T.to(logp_T.dtype), cu_seqlens).clamp(min=1)


def _pair_metrics(rewards_D: Tensor, sums_D: Tensor) -> dict[str, Tensor]:
    """Return the metric sums of pairs."""
    rewards_D, sums_D = rewards_D.detach(), sums_D.detach()
    return {
        "pairs:sum": torch.tensor(len(rewards_D) // 2, device=rewards_D.device),
        "chosen_rewards:sum": rewards_D[0::2].sum(),
        "rejected_rewards:sum": rewards_D[1::2].sum(),
        "ranked_right:sum": ((rewards_D[0::2] - rewards_D[1::2]).sign() + 1).sum() / 2,
        "chosen_logps:sum": sums_D[0::2].sum(),
        "rejected_logps:sum": sums_D[1::2].sum(),
    }


def orpo(
    logp_T: Tensor,
    entropy_T: Tensor,
    inputs: Mapping[str, Tensor],
    cu_seqlens: Tensor,
    config: Config,
) -> tuple[Tensor, dict[str, Tensor]]:
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
    logp_T: Tensor,
    entropy_T: Tensor,
    inputs: Mapping[str, Tensor],
    cu_seqlens: Tensor,
    config: Config,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute -sum over pairs of log sigmoid(beta m_w - beta m_l - gamma), m = mean of lp over y.

    SimPO (Meng et al., arXiv 2405.14734, equation 6).
    """
    sums_D, counts_D = _sum_answers(logp_T, inputs, cu_seqlens)
    rewards_D = config.get("beta", 2.0) * sums_D / counts_D
    loss = -F.logsigmoid(rewards_D[0::2] - rewards_D[1::2] - config.get("gamma", 1.0)).sum()
    return loss, _pair_metrics(rewards_D, sums_D)


def kto(
    logp_T: Tensor,
    entropy_T: Tensor,
    inputs: Mapping[str, Tensor],
    cu_seqlens: Tensor,
    config: Config,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute sum over answers of w (1 - sigmoid(beta (r - z))) of good answers, w (1 -
    sigmoid(beta (z - r))) of bad answers, r = sum of lp - ref.

    KTO (Ethayarajh et al., arXiv 2402.01306, equations 7 and 8). z, `kl`, is the batch's estimate
    of the KL to the reference, without a gradient; w is `desirable_weight` or `undesirable_weight`.
    `labels`: 1 throughout a good answer's datum, -1 throughout a bad answer's datum.
    """
    mask_T = inputs["mask"] != 0
    zeros_T = torch.zeros_like(logp_T)
    policy_T, ref_T = (
        torch.where(mask_T, logp_T, zeros_T),
        torch.where(mask_T, inputs["ref_logprobs"], zeros_T),
    )
    ratios_D = sum_per_datum(policy_T - ref_T, cu_seqlens)
    signs_D = inputs["labels"][cu_seqlens[1:] - 1].to(ratios_D.dtype)
    good_D = signs_D > 0
    beta = config.get("beta", 0.1)
    weights_D = torch.where(
        good_D, config.get("desirable_weight", 1.0), config.get("undesirable_weight", 1.0)
    ).to(ratios_D.dtype)
    loss = (
        weights_D * (1 - torch.sigmoid(beta * signs_D * (ratios_D - config.get("kl", 0.0))))
    ).sum()
    rewards_D = beta * ratios_D.detach()
    return loss, {
        "answers:sum": torch.tensor(len(ratios_D), device=logp_T.device),
        "good:sum": good_D.sum(),
        "good_rewards:sum": rewards_D[good_D].sum(),
        "bad_rewards:sum": rewards_D[~good_D].sum(),
    }
