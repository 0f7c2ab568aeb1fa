"""Sample a token and its logprob for each row from hidden states and an LM head.

The full logits [N, V] are never stored. The sampled token is the first at which the cumulative
probability of softmax(x W' / T) passes a uniform number (inverse CDF). The result equals sampling
from full logits with the same number, except where rounding decides.
kernels/sample_tokens_triton.py implements this for CUDA; elsewhere torch processes the vocabulary
block by block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.common import (
    can_run_triton,
    check_matmul,
    check_same_device,
    check_tokens,
    device_context,
)

NAME = "sample_tokens"
COLUMNS = 4096  # columns of a vocabulary block in the torch path

# --------------------------------------------------------------------------------------- torch path


def _block_statistics(x: Tensor, w: Tensor, temperature_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return each block's largest logit and its sum of exp(logit - largest), both [N, blocks]."""
    tops, sums = [], []
    for lo in range(0, len(w), COLUMNS):
        z = (x @ w[lo : lo + COLUMNS].float().t()).div_(temperature_N[:, None])
        tops.append(z.amax(1))
        sums.append(z.sub_(tops[-1][:, None]).exp_().sum(1, dtype=torch.float64))
    return torch.stack(tops, 1), torch.stack(sums, 1)


def _choose_blocks(
    top_NB: Tensor, top_N: Tensor, sum_NB: Tensor, uniform_N: Tensor, greedy_N: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return each row's block of the sampled token, the rest of u times the total for that block,
    and the total, in units of exp(top), where top is the row's largest logit.
    """
    cumulative_NB = (sum_NB * (top_NB - top_N[:, None]).double().exp()).cumsum(1)
    total_N = cumulative_NB[:, -1]
    target_N = torch.minimum(
        uniform_N * total_N, torch.nextafter(total_N, torch.zeros_like(total_N))
    )
    block_N = (
        torch.searchsorted(cumulative_NB, target_N[:, None], right=True)
        .squeeze(1)
        .clamp_max(cumulative_NB.shape[1] - 1)
    )
    if greedy_N is not None:
        block_N = torch.where(greedy_N, top_NB.argmax(1), block_N)
    before_N = torch.where(
        block_N > 0, cumulative_NB.gather(1, (block_N - 1).clamp_min(0)[:, None])[:, 0], 0.0
    )
    return block_N, target_N - before_N, total_N


def _search_block(z: Tensor, top_N: Tensor, rest_N: Tensor) -> Tensor:
    """Return the first column of a block at which the sum of exp(z - top) passes the rest."""
    cumulative = (z - top_N[:, None]).exp_().cumsum(1, dtype=torch.float64)
    total = cumulative[:, -1]
    rest = torch.minimum(rest_N, torch.nextafter(total, torch.zeros_like(total)))
    column = torch.searchsorted(cumulative, rest[:, None], right=True)[:, 0]
    return column.clamp_max(z.shape[1] - 1)


def _sample_torch(
    x: Tensor, w: Tensor, temperature_N: Tensor, uniform_N: Tensor, greedy_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Sample a token (int64) and its logprob (float32) for each row in plain torch."""
    x, V = x.float(), len(w)
    top_NB, sum_NB = _block_statistics(x, w, temperature_N)
    top_N = top_NB.amax(1)
    block_N, rest_N, total_N = _choose_blocks(top_NB, top_N, sum_NB, uniform_N, greedy_N)
    token_N, logit_N = torch.zeros_like(block_N), torch.zeros_like(top_N)
    for block in block_N.unique().tolist():
        rows, lo = (block_N == block).nonzero()[:, 0], block * COLUMNS
        z = (x[rows] @ w[lo : lo + COLUMNS].float().t()).div_(temperature_N[rows, None])
        column = _search_block(z, top_N[rows], rest_N[rows])
        column = column if greedy_N is None else torch.where(greedy_N[rows], z.argmax(1), column)
        token_N[rows], logit_N[rows] = lo + column, z.gather(1, column[:, None])[:, 0]
    return token_N.clamp_max(V - 1), logit_N - top_N - total_N.log().float()


# ---------------------------------------------------------------------------------- public function


def sample_tokens(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    temperature_N: Tensor,
    uniform_N: Tensor,
    greedy_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample a token (int64) and return it with its logprob (float32), both [N].

    No gradient, no top-k, no top-p.

    Args:
        hidden_ND, weight_VD: of the same dtype.
        temperature_N: above 0; 1 for a greedy row.
        uniform_N: float64 in [0, 1).
        greedy_N: bool, True for rows that choose their largest logit (ties: the lowest id) and
            report its logprob.
    Raises:
        ValueError, TypeError: shapes, dtypes or devices that do not fit.
    """
    check_matmul(NAME, hidden_ND, weight_VD, None)
    check_tokens(
        NAME, len(hidden_ND), temperature_N=temperature_N, uniform_N=uniform_N, greedy_N=greedy_N
    )
    check_same_device(
        NAME,
        hidden_ND=hidden_ND,
        weight_VD=weight_VD,
        temperature_N=temperature_N,
        uniform_N=uniform_N,
        greedy_N=greedy_N,
    )
    if len(hidden_ND) == 0:
        return uniform_N.new_empty(0, dtype=torch.int64), uniform_N.new_empty(
            0, dtype=torch.float32
        )
    with torch.no_grad(), device_context(hidden_ND):
        if can_run_triton(hidden_ND):
            from kernels.sample_tokens_triton import sample_tokens as sample
        else:
            sample = _sample_torch  # type: ignore[assignment]
        return sample(hidden_ND, weight_VD, temperature_N, uniform_N, greedy_N)
