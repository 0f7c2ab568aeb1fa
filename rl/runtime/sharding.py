"""Distribute work over the ranks, and merge the ranks' results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.distributed import collectives


def merge_by_index(rank_results: Sequence[Mapping[int, Any]]) -> list[Any]:
    """Return the ranks' results in index order."""
    results = {i: value for table in rank_results for i, value in table.items()}
    return [results[i] for i in range(len(results))]


def sum_counters(rank_counters: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the sum of each counter over the ranks."""
    total: dict[str, float] = {}
    for table in rank_counters:
        for name, value in table.items():
            total[name] = total.get(name, 0) + value
    return total


def assign_indices(costs: Sequence[int], group_size: int = 1) -> list[int]:
    """Return the sorted indices of the items that this rank processes. Items are assigned in order
    of decreasing cost, each to the rank with the smallest load.

    `group_size`: number of consecutive ranks that get the same items.
    """
    world, rank = collectives.world() // group_size, collectives.rank() // group_size
    if world == 1:
        return list(range(len(costs)))
    loads = [0] * world
    indices = []
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        target = min(range(world), key=lambda r: (loads[r], r))
        loads[target] += costs[i]
        if target == rank:
            indices.append(i)
    return sorted(indices)
