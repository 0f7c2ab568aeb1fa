"""Describe a vocabulary that a group of processes holds together, for `sample_tokens`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Describe the rows of an LM head that this process holds, if a group of processes holds it
    together (tensor parallelism).

    The rows are consecutive in the order of `rank`. `first`: the token of the first row here;
    `widest`: the most rows that a process holds. `all_gather` returns the tensors of all processes,
    in order, and `all_reduce_` their sum, in place. All processes have the same hidden states,
    temperatures and random numbers, and make the same calls.
    """

    rank: int
    first: int
    widest: int
    all_gather: Callable[[Tensor], list[Tensor]]
    all_reduce_: Callable[[Tensor], Tensor]

    def concatenate(self, x: Tensor) -> Tensor:
        """Return the tensors [.., X] of all processes along the last dimension."""
        return torch.cat(self.all_gather(x), dim=-1)

    def find_local(self, block_N: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the index here of each block of the whole vocabulary, and whether the block is
        here; another process's block has some index. `count`: blocks of each process.
        """
        index_N = block_N - self.rank * count
        return index_N.clamp(0, count - 1), (index_N >= 0) & (index_N < count)

    def combine(self, token_N: Tensor, logprob_N: Tensor, here_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's token and logprob from the process where it is `here`. Tokens are
        indices of rows there.
        """
        sampled = torch.stack([(token_N + self.first).double(), logprob_N.double()])
        token_N, logprob_N = self.all_reduce_(
            sampled.masked_fill_(here_N.logical_not(), 0.0)
        ).unbind(0)
        return token_N.long(), logprob_N.float()
