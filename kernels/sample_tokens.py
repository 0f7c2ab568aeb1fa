"""Sample a token and its logprob for each row from hidden states and an LM head.

The full logits [N, V] are never stored. The sampled token is the first at which the cumulative
probability of softmax(x W' / T) passes a uniform number (inverse CDF). The result equals sampling
from full logits with the same number, except where rounding decides.
kernels/sample_tokens_triton.py implements this for CUDA; elsewhere torch processes the vocabulary
block by block. Processes that hold an LM head together exchange the sums of these blocks
(`VocabShard`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.common import (
    can_run_triton,
    check_matmul,
    check_same_device,
    check_tokens,
    device_context,
)
from kernels.vocab_shard import VocabShard

NAME = "sample_tokens"
COLUMNS = 4096  # columns of a vocabulary block in the torch path

# --------------------------------------------------------------------------------------- torch path


def _sample_torch(
    x: Tensor,
    w: Tensor,
    temperature_N: Tensor,
    uniform_N: Tensor,
    greedy_N: Tensor | None,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample a token (int64) and its logprob (float32) for each row in plain torch."""
    x, tops, sums = x.float(), list[Tensor](), list[Tensor]()

    def compute_logits(lo: int, rows: slice | Tensor = slice(None)) -> Tensor:
        z = x[rows] @ w[lo : lo + COLUMNS].float().t()
        return z.div_(temperature_N[rows, None])

    for lo in range(0, len(w), COLUMNS):  # each block's largest logit, sum of exp(logit - largest)
        z = compute_logits(lo)
        tops.append(z.amax(1))
        sums.append(z.sub_(tops[-1][:, None]).exp_().sum(1, dtype=torch.float64))
    top_NB, sum_NB = _stack_blocks(tops, sums, shard)
    top_N = top_NB.amax(1)
    weight_NB = sum_NB * (top_NB - top_N[:, None]).double().exp()
    # the block of the token, and the rest of u times the total for it, in units of exp(top)
    block_N, rest_N, total_N = _search_cumulative(weight_NB, uniform_N * weight_NB.cumsum(1)[:, -1])
    if greedy_N is not None:
        block_N = torch.where(greedy_N, top_NB.argmax(1), block_N)
    if shard is not None:
        block_N, here_N = shard.find_local(block_N, -(-shard.widest // COLUMNS))
        block_N = block_N.clamp_max(len(tops) - 1)  # NaN may select the padding
    token_N, logit_N = torch.zeros_like(block_N), torch.zeros_like(top_N)
    for block in block_N.unique().tolist():
        rows, lo = (block_N == block).nonzero()[:, 0], block * COLUMNS
        z = compute_logits(lo, rows)
        column = _search_cumulative((z - top_N[rows, None]).exp_(), rest_N[rows])[0]
        column = column if greedy_N is None else torch.where(greedy_N[rows], z.argmax(1), column)
        token_N[rows], logit_N[rows] = lo + column, z.gather(1, column[:, None])[:, 0]
    logprob_N = logit_N - top_N - total_N.log().float()
    return (token_N, logprob_N) if shard is None else shard.combine(token_N, logprob_N, here_N)


def _stack_blocks(
    tops: list[Tensor], sums: list[Tensor], shard: VocabShard | None
) -> tuple[Tensor, Tensor]:
    """Return the largest logit and the sum of every block, [N, B] each, those of all processes that
    hold the vocabulary together.
    """
    stats_2NB = torch.stack([torch.stack(tops, 1).double(), torch.stack(sums, 1)])
    if shard is not None:
        missing = -(-shard.widest // COLUMNS) - len(tops)
        stats_2NB = shard.concatenate(F.pad(stats_2NB, (0, missing), value=-torch.inf))
    return stats_2NB[0].float(), stats_2NB[1].clamp_min(0.0)  # padding: -inf, sum 0


def _search_cumulative(weight_NX: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first index whose cumulative weight exceeds the target, the target minus the
    weight before that index, and the total weight. The target is kept below the total.
    """
    cumulative_NX = weight_NX.cumsum(1, dtype=torch.float64)
    total_N = cumulative_NX[:, -1]
    target_N = torch.minimum(target_N, torch.nextafter(total_N, torch.zeros_like(total_N)))
    index_N = torch.searchsorted(cumulative_NX, target_N[:, None], right=True)
    index_N = index_N.clamp_max(weight_NX.shape[1] - 1)
    before_N = cumulative_NX.gather(1, (index_N - 1).clamp_min(0)).masked_fill(index_N < 1, 0.0)
    return index_N[:, 0], target_N - before_N[:, 0], total_N


# ---------------------------------------------------------------------------------- public function


def sample_tokens(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    temperature_N: Tensor,
    uniform_N: Tensor,
    greedy_N: Tensor | None = None,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample a token (int64) and return it with its logprob (float32), both [N].

    No gradient, no top-k, no top-p.

    Args:
        hidden_ND, weight_VD: of the same dtype.
        temperature_N: above 0; 1 for a greedy row.
        uniform_N: float64 in [0, 1).
        greedy_N: bool, True for rows that choose their largest logit (ties: the lowest id) and
            report its logprob.
        shard: what `weight_VD` holds of the vocabulary; None: all of it. All processes of the group
            get the same tokens and logprobs.
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
        return sample(hidden_ND, weight_VD, temperature_N, uniform_N, greedy_N, shard)
