"""One decoder over several ranks of a machine: which part of each parameter a rank holds, and how
the parts are put together.

Attention heads, columns of the MLP and rows of the vocabulary are cut; norms, and the small side of
an adapter, are whole on every rank. All ranks of a team decode the same rows in the same order with
the same streams, each with its part of the arithmetic: a sum over the team after attention and
after the MLP of each layer (and after the embedding), the logits put side by side behind the head.
So hidden states, logits and samples are the same on all of them.
Shapes: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from rl.errors import UserError


class Team(Protocol):
    """Ranks that hold a decoder together (`rl.ranks`): all of them make each call, in the same
    order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum_(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in place, bit for bit the same on all of them."""
        ...

    def gather(self, x: Tensor) -> list[Tensor]:
        """All ranks' tensors, which are of one shape."""
        ...

    def first_(self, x: Tensor) -> Tensor:
        """The first rank's tensor, in place."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank holds of a parameter: from `start` to `stop` along `dim` (stop None: all of it).
    `empty`: zeros in its place.
    """

    dim: int = 0
    start: int = 0
    stop: int | None = None
    empty: bool = False

    def of(self, whole: Tensor) -> Tensor:
        if self.empty:
            return torch.zeros_like(whole)
        return (
            whole
            if self.stop is None
            else whole.narrow(self.dim, self.start, self.stop - self.start)
        )

    def rows(self, whole: Tensor) -> int:
        """The length of the first dimension of what is held."""
        return len(whole) if self.stop is None or self.dim else self.stop - self.start


WHOLE = Cut()


def span(total: int, team: Team, rank: int | None = None) -> tuple[int, int]:
    """(first, last but one) of so many for a rank of the team, by default this one: consecutive,
    their numbers differing by at most 1.
    """
    at = team.rank if rank is None else rank
    return at * total // team.size, (at + 1) * total // team.size


def cut(total: int, dim: int, team: Team | None) -> Cut:
    """This rank's part of a dimension of that length."""
    return WHOLE if team is None else Cut(dim, *span(total, team))


def once(team: Team | None) -> Cut:
    """Of what is added to a sum over the team: the first rank's alone."""
    return WHOLE if team is None or team.rank == 0 else Cut(empty=True)


def check_splits(config: Any, team: Team) -> None:
    """UserError where a model's heads or MLP columns cannot be dealt out evenly over the team."""
    check_counts(
        team.size, config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
    )


def check_counts(size: int, heads: int, key_heads: int, columns: int) -> None:
    """`check_splits` of numbers, and of a team of so many."""
    counts = {"query heads": heads, "key-value heads": key_heads, "MLP columns": columns}
    odd = [f"{count} {name}" for name, count in counts.items() if count % size]
    if odd:
        fitting = [k for k in range(1, size) if not any(count % k for count in counts.values())]
        raise UserError(
            f"sampler_tp {size} does not divide this model's {', '.join(odd)}: each rank holds as many as every other. "
            f"Smaller ones that do: {', '.join(map(str, fitting))}"
        )


def joined(team: Team, columns: Tensor, total: int) -> Tensor:
    """[.., V] in order from each rank's `span` of its columns. `total`: V."""
    widest = -(-total // team.size)
    parts = team.gather(F.pad(columns, (0, widest - columns.shape[-1])))
    widths = [
        last - first for first, last in (span(total, team, rank) for rank in range(team.size))
    ]
    return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)
