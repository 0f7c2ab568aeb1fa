"""Define `Mixture`: several data sets, sampled in fixed proportions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import numpy as np

from rl.data.problem_set import ProblemSet, concatenate_sets
from rl.types import Problem

_CYCLE = 1000  # rows within which the share of each set is exact


class Mixture(ProblemSet):
    """Mix the problems of several sets in the proportions of `weights` instead of their sizes.

    Each cycle of 1000 rows, from a multiple of 1000, holds exactly the share of each set, rounded
    to a row. The order of the sets within a cycle is sampled from (seed, cycle). Each set has
    separate endless shuffled epochs. A batch depends only on (step, seed).
    """

    def __init__(self, sets: Sequence[ProblemSet], weights: Sequence[float]):
        whole = concatenate_sets(sets)
        super().__init__(list(whole), name=whole.name, variant=whole._variant)
        self.sets, self.weights = list(sets), list(weights)
        self._firsts = list(accumulate((len(part) for part in sets), initial=0))
        self._counts = _rows_per_cycle(self.weights)
        self._set_indices = lru_cache(maxsize=4)(self._sample_set_indices)

    def _locate(self, position: int, seed: int) -> tuple[int, int]:
        cycle, offset = divmod(position, _CYCLE)
        owners = self._set_indices(seed, cycle)
        part = int(owners[offset])
        place = cycle * self._counts[part] + int((owners[:offset] == part).sum())
        epoch, row = divmod(place, len(self.sets[part]))
        return self._firsts[part] + int(self.sets[part]._order(seed, epoch)[row]), epoch

    def epoch(self, step: int, batch_size: int) -> float:
        """Return the number of epochs of the set that has completed the most."""
        cycles = step * batch_size / _CYCLE
        return max(
            cycles * count / len(part) for count, part in zip(self._counts, self.sets, strict=True)
        )

    def subset(self, indices: Sequence[int]) -> ProblemSet:
        parts, weights = [], []
        for first, part, weight in zip(self._firsts, self.sets, self.weights, strict=False):
            chosen = [i - first for i in indices if first <= i < first + len(part)]
            if chosen:
                parts.append(part.subset(chosen))
                weights.append(weight)
        return Mixture(parts, weights)

    def first(self, count: int) -> ProblemSet:
        return self.subset(range(min(count, len(self))))

    def with_rows(self, rows: Mapping[int, Problem]) -> ProblemSet:
        parts = []
        for first, part in zip(self._firsts, self.sets, strict=False):
            part_rows = {
                i - first: replace(row, index=i - first)
                for i, row in rows.items()
                if first <= i < first + len(part)
            }
            parts.append(part.with_rows(part_rows) if part_rows else part)
        return Mixture(parts, self.weights)

    def _sample_set_indices(self, seed: int, cycle: int) -> np.ndarray:
        """Return the set index of each of the 1000 rows of a cycle, shape (1000,)."""
        owners = np.repeat(np.arange(len(self._counts)), self._counts)
        return np.random.Generator(np.random.Philox([seed, cycle + (1 << 40)])).permutation(owners)


def _rows_per_cycle(weights: Sequence[float]) -> list[int]:
    """Return each set's rows per _CYCLE: rounded by largest remainders, at least 1 row."""
    exact = [weight / sum(weights) * _CYCLE for weight in weights]
    counts = [max(1, int(share)) for share in exact]
    order = sorted(range(len(exact)), key=lambda i: int(exact[i]) - exact[i])
    for i in order[: max(0, _CYCLE - sum(counts))]:
        counts[i] += 1
    while sum(counts) > _CYCLE:
        counts[counts.index(max(counts))] -= 1
    return counts
