"""What is kept of a stage's training rows for its alarms, in a space and a time that do not grow
with the number of rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]

SOME = 5  # rows whose values are kept whole: enough for a level
LOW, HIGH, MIXED = "env/all/reward/min", "env/all/reward/max", "env/all/by_group/frac_mixed"


def number(row: Row, name: str) -> float:
    """The metric; NaN where it is absent, or null because it was not finite."""
    value = row.get(name)
    return math.nan if value is None else float(value)


def column(rows: Iterable[Row], name: str) -> list[float]:
    return [number(row, name) for row in rows]


class Ends:
    """A metric's first and last `count` values, whatever lies between; rows without it (NaN) do not
    count.
    """

    def __init__(self, count: int):
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=count)
        self._seen, self._count = 0, count

    def add(self, value: float) -> None:
        if math.isnan(value):
            return
        if len(self._first) < self._count:
            self._first.append(value)
        self._last.append(value)
        self._seen += 1

    def both(self) -> tuple[list[float], list[float]] | None:
        """They do not overlap; None before there are as many."""
        return (self._first, list(self._last)) if self._seen >= 2 * self._count else None


class History:
    """What is kept of a stage's rows: the last five, the first and last values of trends, the range
    of rewards.
    """

    def __init__(self, kept: Iterable[str], trends: Mapping[str, int]) -> None:
        """`kept`: the metrics whose last values are asked for; `trends`: of which the first and
        last are compared, and how many.
        """
        self._kept = frozenset(kept)
        self.last: deque[Row] = deque(maxlen=SOME)
        self.first_mixed: list[float] = []  # of the first five rows
        self.lowest = self.highest = math.nan  # reward of any answer
        self._began = False
        self._ends = {name: Ends(count) for name, count in trends.items()}

    def add(self, row: Row) -> None:
        self.last.append({name: value for name, value in row.items() if name in self._kept})
        if len(self.first_mixed) < SOME:
            self.first_mixed.append(number(row, MIXED))
        low, high = number(row, LOW), number(row, HIGH)
        # As min and max over a list do it: NaN stays where it came first, and is passed over
        # elsewhere.
        self.lowest = low if not self._began or low < self.lowest else self.lowest
        self.highest = high if not self._began or high > self.highest else self.highest
        self._began = True
        for name, ends in self._ends.items():
            ends.add(number(row, name))

    @property
    def newest(self) -> Row:
        return self.last[-1]

    def newest_few(self, count: int) -> list[Row]:
        """The last `count` rows (at most five), fewer where there are not as many."""
        return list(self.last)[-count:]

    def ends(self, name: str) -> tuple[list[float], list[float]] | None:
        return self._ends[name].both()
