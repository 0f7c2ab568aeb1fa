"""Define `ProblemSet`, problems in an order that depends only on the seed and the step, and
`Mixture`, several sets in fixed proportions.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import overload

import numpy as np

from rl.types import Problem

Variant = Callable[[Problem, int], Problem]
_CYCLE = 1000  # rows within which the share of each set is exact


class ProblemSet(Sequence[Problem]):
    """Hold problems in an endless, shuffled order.

    Each epoch is a permutation of all problems, generated from (seed, epoch).
    variant: if set, `variant(problem, epoch)` returns the problem's form in that epoch (with noise,
    for instance). Indexing and iteration return the form of epoch 0.
    """

    is_lazy = False  # whether rows are read on access

    def __init__(
        self, problems: Sequence[Problem], *, name: str = "problems", variant: Variant | None = None
    ):
        if not len(problems):
            raise ValueError(f"data set {name!r} holds no problem; at least 1 is required")
        self.name = name
        self._problems: Sequence[Problem] = problems if self.is_lazy else list(problems)
        self._variant = variant
        # two adjacent epochs, for training and for another use
        self._order = lru_cache(maxsize=4)(self._make_order)

    def __len__(self) -> int:
        return len(self._problems)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...

    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self.at(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"data set {self.name!r} has {len(self)} problems, no number {index}")
        return self.at(index % len(self))

    def __iter__(self) -> Iterator[Problem]:
        return (self.at(index) for index in range(len(self)))

    def _plain(self) -> Sequence[Problem]:
        """Return the problems without noise."""
        return self if self._variant is None else self._problems

    def at(self, index: int, epoch: int = 0) -> Problem:
        """Return problem `index` in its form of `epoch`."""
        problem = self._problems[index]
        return self._variant(problem, epoch) if self._variant is not None else problem

    @property
    def tags(self) -> list[str]:
        """Return the sorted names of the data sets that the problems come from."""
        return sorted({problem.tag for problem in self._problems})

    def first(self, count: int) -> ProblemSet:
        """Return the first `count` problems (at most all of them), with the same variants."""
        return self.subset(range(min(count, len(self))))

    def subset(self, indices: Sequence[int]) -> ProblemSet:
        """Return the problems at these indices, with the same variants."""
        return self._with_problems([self._problems[i] for i in indices])

    def with_rows(self, rows: Mapping[int, Problem]) -> ProblemSet:
        """Return a copy of the set with the problems at some indices replaced."""
        return self._with_problems([rows.get(i, p) for i, p in enumerate(self._problems)])

    def _with_problems(self, problems: Sequence[Problem]) -> ProblemSet:
        return ProblemSet(problems, name=self.name, variant=self._variant)

    def batch(self, step: int, batch_size: int, seed: int) -> list[Problem]:
        """Return the `batch_size` problems of step `step` (from 0).

        The batch covers the positions from step * batch_size of the concatenated epochs.
        No problem is dropped at the end of an epoch: the batch continues into the next epoch, and
        may then hold a problem twice. Resuming needs only the step.
        Raises ValueError if step or seed is negative or batch_size is below 1.
        """
        if step < 0 or batch_size < 1 or seed < 0:
            raise ValueError(
                f"step and seed must be at least 0, batch_size at least 1; "
                f"got {step=}, {seed=}, {batch_size=}"
            )
        positions = range(step * batch_size, (step + 1) * batch_size)
        return [self.at(*self._locate(position, seed)) for position in positions]

    def _locate(self, position: int, seed: int) -> tuple[int, int]:
        """Return (index, epoch) of the problem at a position of the concatenated epochs."""
        epoch, offset = divmod(position, len(self))
        return int(self._order(seed, epoch)[offset]), epoch

    def epoch(self, step: int, batch_size: int) -> float:
        """Return the number of epochs (a fraction) before step `step`."""
        return step * batch_size / len(self)

    def _make_order(self, seed: int, epoch: int) -> np.ndarray:
        """Return the permutation of an epoch, shape (len(self),)."""
        return np.random.Generator(np.random.Philox([seed, epoch])).permutation(len(self))


def concatenate_sets(sets: Sequence[ProblemSet]) -> ProblemSet:
    """Concatenate several sets, with consecutive indices; each problem keeps its tag.

    A single set is returned unchanged.
    """
    if len(sets) == 1:
        return sets[0]
    firsts = list(accumulate((len(part) for part in sets), initial=0))

    def variant(problem: Problem, epoch: int) -> Problem:
        part = bisect_right(firsts, problem.index) - 1
        if (make_variant := sets[part]._variant) is None:
            return problem
        original = sets[part]._problems[problem.index - firsts[part]]
        local = dataclasses.replace(problem, index=original.index)  # the noise depends on it
        return dataclasses.replace(make_variant(local, epoch), index=problem.index)

    problems = [
        dataclasses.replace(problem, index=i)
        for i, problem in enumerate(p for part in sets for p in part._plain())
    ]
    any_variant = any(part._variant is not None for part in sets)
    return ProblemSet(
        problems,
        name=" + ".join(part.name for part in sets),
        variant=variant if any_variant else None,
    )


class Mixture(ProblemSet):
    """Mix the problems of several sets in the proportions of `weights` instead of their sizes.

    Each cycle of 1000 rows, from a multiple of 1000, holds exactly the share of each set, rounded
    to a row. The order of the sets within a cycle is sampled from (seed, cycle). Each set has
    separate endless shuffled epochs. A batch depends only on (step, seed).
    """

    def __init__(self, sets: Sequence[ProblemSet], weights: Sequence[float]):
        whole = concatenate_sets(sets)
        super().__init__(whole._plain(), name=whole.name, variant=whole._variant)
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

    def with_rows(self, rows: Mapping[int, Problem]) -> ProblemSet:
        parts = []
        for first, part in zip(self._firsts, self.sets, strict=False):
            part_rows = {
                i - first: dataclasses.replace(row, index=i - first)
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
