"""Work dealt out over the ranks, and the ranks' parts put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.ranks import distributed


def merged(tables: Sequence[Mapping[int, Any]]) -> list[Any]:
    """The ranks' results by index, in order."""
    together = {i: value for table in tables for i, value in table.items()}
    return [together[i] for i in range(len(together))]


def summed(tables: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    total: dict[str, float] = {}
    for table in tables:
        for name, value in table.items():
            total[name] = total.get(name, 0) + value
    return total


def share(costs: Sequence[int], together: int = 1) -> list[int]:
    """The indices this rank takes: the costliest first, each to the rank with the least so far,
    then in order.

    `together`: so many consecutive ranks take the same.
    """
    world, rank = distributed.world() // together, distributed.rank() // together
    if world == 1:
        return list(range(len(costs)))
    load = [0] * world
    mine = []
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        taker = min(range(world), key=lambda r: (load[r], r))
        load[taker] += costs[i]
        if taker == rank:
            mine.append(i)
    return sorted(mine)
