"""`ProblemSet`: problems in an order that is a function of the seed and the step alone."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import overload

import numpy as np

from rl.types import Problem

Variant = Callable[[Problem, int], Problem]


class ProblemSet(Sequence[Problem]):
    """Problems with an endless, shuffled order: each epoch is a permutation of all of them, drawn
    from (seed, epoch).

    `variant(problem, epoch)`, where given, makes the problem's form in an epoch (noise, for
    instance); indexing and iterating give that of epoch 0.
    """

    is_lazy = False  # whether rows are read when they are asked for

    def __init__(
        self, problems: Sequence[Problem], *, name: str = "problems", variant: Variant | None = None
    ):
        if not len(problems):
            raise ValueError(f"data set {name!r} holds no problem; at least one is needed")
        self.name = name
        self._problems: Sequence[Problem] = problems if self.is_lazy else list(problems)
        self._variant = variant
        self._orders: dict[tuple[int, int], np.ndarray] = {}

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

    def at(self, index: int, epoch: int = 0) -> Problem:
        """Problem `index` as it is in `epoch`."""
        problem = self._problems[index]
        return self._variant(problem, epoch) if self._variant is not None else problem

    @property
    def tags(self) -> list[str]:
        """The names of the data sets that its problems are from."""
        return sorted({problem.tag for problem in self._problems})

    def first(self, count: int) -> ProblemSet:
        """The first `count` problems (all, if there are fewer), with the same variants."""
        return ProblemSet(self._problems[:count], name=self.name, variant=self._variant)

    def subset(self, indices: Sequence[int]) -> ProblemSet:
        """The problems at these places, with the same variants."""
        return ProblemSet(
            [self._problems[i] for i in indices], name=self.name, variant=self._variant
        )

    def with_rows(self, rows: Mapping[int, Problem]) -> ProblemSet:
        """The same with other problems at some places."""
        return ProblemSet(
            [rows.get(i, p) for i, p in enumerate(self._problems)],
            name=self.name,
            variant=self._variant,
        )

    def checked(self, check: Callable[[Problem], Problem], on_bad_row: str) -> ProblemSet:
        """Of rows that are read when they are asked for: the same, each put through `check` then."""
        raise NotImplementedError(
            f"the rows of {self.name} are all there: rl.data.good_rows checks them"
        )

    def batch(self, step: int, batch_size: int, seed: int) -> list[Problem]:
        """The problems of step `step` (from 0): positions step * batch_size and on of the chained
        epochs.

        Nothing is dropped at an epoch's end: the batch goes on into the next one (so there it may
        hold a problem twice). Resuming needs the step and nothing else.
        """
        if step < 0 or batch_size < 1 or seed < 0:
            raise ValueError(
                f"step and seed are at least 0, batch_size at least 1; got {step=}, {seed=}, {batch_size=}"
            )
        problems = []
        for position in range(step * batch_size, (step + 1) * batch_size):
            epoch, offset = divmod(position, len(self))
            problems.append(self.at(int(self._order(seed, epoch)[offset]), epoch))
        return problems

    def epoch(self, step: int, batch_size: int) -> float:
        """How many epochs lie before step `step`."""
        return step * batch_size / len(self)

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        key = (seed, epoch)
        if key not in self._orders:
            # two neighbouring epochs, for training and for one other use
            while len(self._orders) >= 4:
                del self._orders[next(iter(self._orders))]
            self._orders[key] = np.random.Generator(np.random.Philox([seed, epoch])).permutation(
                len(self)
            )
        return self._orders[key]


def joined(sets: Sequence[ProblemSet]) -> ProblemSet:
    """All problems of several sets as one, numbered on; their tags still tell where each is from.
    One set is itself.
    """
    if len(sets) == 1:
        return sets[0]
    firsts = list(accumulate((len(part) for part in sets), initial=0))

    def variant(problem: Problem, epoch: int) -> Problem:
        part = bisect_right(firsts, problem.index) - 1
        if sets[part]._variant is None:
            return problem
        return dataclasses.replace(
            sets[part].at(problem.index - firsts[part], epoch), index=problem.index
        )

    problems = [
        dataclasses.replace(problem, index=i)
        for i, problem in enumerate(p for part in sets for p in part)
    ]
    any_variant = any(part._variant is not None for part in sets)
    return ProblemSet(
        problems,
        name=" + ".join(part.name for part in sets),
        variant=variant if any_variant else None,
    )
