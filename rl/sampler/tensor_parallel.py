"""Shard a decoder over several ranks of a machine (tensor parallelism), and combine the ranks'
results.

Attention heads, columns of MLPs and experts, and rows of the vocabulary are sharded; norms, routers
and the small side of an adapter are whole on every rank. All ranks of the tensor-parallel group
decode the same rows in the same order with the same random streams, and each computes with its
shard. The group sums after attention and after the MLP of each layer (and after the embedding), and
concatenates the logits after the head. So hidden states, logits and samples are the same on all
ranks, and so is every decision of their engines, which depends on samples and requests alone. What
depends on a rank's memory or device is decided together (`all_ranks_agree`). CUDA graphs contain
the sums: all ranks capture and replay the same graphs in the same order. Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import VocabShard
from rl.errors import UserError


class TensorParallelGroup(Protocol):
    """Describe the ranks that hold a decoder together (`rl.distributed`).

    All ranks make each call, in the same order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors, in place, bitwise identical on all ranks."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' tensors, which have the same shape."""
        ...

    def broadcast_(self, x: Tensor) -> Tensor:
        """Return the first rank's tensor, in place."""
        ...


@dataclass(frozen=True, slots=True)
class Shard:
    """Describe the shard of a parameter: `start` to `stop` along `dim` (stop None: the whole
    parameter), in each of the `parts` equal parts of that dimension.

    `empty`: zeros in place of the parameter.
    """

    dim: int = 0
    start: int = 0
    stop: int | None = None
    empty: bool = False
    parts: int = 1

    def apply(self, whole: Tensor) -> Tensor:
        """Return the shard of a whole tensor."""
        if self.empty:
            return torch.zeros_like(whole)
        if self.stop is None:
            return whole
        if self.parts > 1:
            split = whole.unflatten(self.dim, (self.parts, -1))
            shard = split.narrow(self.dim + 1, self.start, self.stop - self.start)
            return shard.flatten(self.dim, self.dim + 1)
        return whole.narrow(self.dim, self.start, self.stop - self.start)

    def num_rows(self, whole: Tensor) -> int:
        """Return the length of the shard's first dimension."""
        return len(whole) if self.stop is None or self.dim else self.stop - self.start


UNSHARDED = Shard()


def shard_range(
    total: int, tp_group: TensorParallelGroup, rank: int | None = None
) -> tuple[int, int]:
    """Return the range (first, last + 1) of `total` items that a rank of the group holds, by
    default this rank.

    The ranges are consecutive, and their lengths differ by at most 1.
    """
    at = tp_group.rank if rank is None else rank
    return at * total // tp_group.size, (at + 1) * total // tp_group.size


def shard_of(total: int, dim: int, tp_group: TensorParallelGroup | None, parts: int = 1) -> Shard:
    """Return this rank's shard of a dimension of length `total`, which consists of `parts` equal
    parts; the whole without a group.
    """
    if tp_group is None:
        return UNSHARDED
    return Shard(dim, *shard_range(total // parts, tp_group), parts=parts)


def find_mlp_divisor(config: Any) -> int:
    """Return the greatest common divisor of the widths of a model's MLPs and experts."""
    names = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
    return math.gcd(*(getattr(config, name, None) or 0 for name in names))


def check_shard_counts(size: int, heads: int, key_heads: int, columns: int) -> None:
    """Raise UserError if `size` ranks cannot share these numbers of heads and columns evenly."""
    counts = {"query heads": heads, "key-value heads": key_heads, "MLP columns": columns}
    odd = [f"{count} {name}" for name, count in counts.items() if count % size]
    if odd:
        fitting = [k for k in range(1, size) if not any(count % k for count in counts.values())]
        raise UserError(
            f"sampler_tp {size} does not divide this model's {', '.join(odd)}: every rank must "
            f"hold the same number. Smaller sizes that do: {', '.join(map(str, fitting))}"
        )


def all_ranks_agree(
    tp_group: TensorParallelGroup | None, value: bool, device: torch.device
) -> bool:
    """Return whether `value` is true on all ranks of the group; without a group, `value`."""
    if tp_group is None:
        return value
    dissenting = tp_group.all_reduce_(torch.tensor([0.0 if value else 1.0], device=device))
    return float(dissenting) == 0.0


def make_vocab_shard(tp_group: TensorParallelGroup | None, total: int) -> VocabShard | None:
    """Describe this rank's rows of a vocabulary of `total`; None without a group."""
    if tp_group is None:
        return None
    first, widest = shard_range(total, tp_group)[0], -(-total // tp_group.size)
    return VocabShard(tp_group.rank, first, widest, tp_group.all_gather, tp_group.all_reduce_)


def gather_columns(tp_group: TensorParallelGroup, columns: Tensor, total: int) -> Tensor:
    """Return [.., V] from each rank's columns, in the order of the ranks' `shard_range`. `total`:
    V.
    """
    widest = -(-total // tp_group.size)
    parts = tp_group.all_gather(F.pad(columns, (0, widest - columns.shape[-1])))
    widths = [
        last - first
        for first, last in (shard_range(total, tp_group, rank) for rank in range(tp_group.size))
    ]
    # `narrow`, since indexing queries the device even of fake tensors
    return torch.cat([p.narrow(-1, 0, w) for p, w in zip(parts, widths, strict=True)], dim=-1)
