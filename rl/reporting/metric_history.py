"""Summarize a stage's training rows for its alarms, in space and time that do not grow with the
number of rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]

KEPT_ROWS = 5  # number of last rows that are kept: enough for a level
LOW, HIGH, MIXED = "env/all/reward/min", "env/all/reward/max", "env/all/by_group/frac_mixed"


def read_metric(row: Row, name: str) -> float:
    """Return the metric; NaN if it is absent, or null because it was not finite."""
    value = row.get(name)
    return math.nan if value is None else float(value)


def read_column(rows: Iterable[Row], name: str) -> list[float]:
    """Return the metric of each row."""
    return [read_metric(row, name) for row in rows]


class FirstAndLast:
    """Keep a metric's first and last `count` values. Rows without the metric (NaN) do not count."""

    def __init__(self, count: int):
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=count)
        self._num_values, self._count = 0, count

    def add(self, value: float) -> None:
        """Add a value, unless it is NaN."""
        if math.isnan(value):
            return
        if len(self._first) < self._count:
            self._first.append(value)
        self._last.append(value)
        self._num_values += 1

    def windows(self) -> tuple[list[float], list[float]] | None:
        """Return the first and the last `count` values; None until they do not overlap (2 * `count`
        values).
        """
        return (self._first, list(self._last)) if self._num_values >= 2 * self._count else None


class MetricHistory:
    """Summarize a stage's rows: the last five rows, the first and last values of trends, the range
    of rewards.
    """

    def __init__(self, metric_names: Iterable[str], trends: Mapping[str, int]) -> None:
        """Initialize the summary. `metric_names`: metrics that the last rows keep. `trends`:
        metrics with a comparison of first and last values, and the number of values compared.
        """
        self._metric_names = frozenset(metric_names)
        self.last_rows: deque[Row] = deque(maxlen=KEPT_ROWS)
        self.first_mixed: list[float] = []  # share of mixed groups in each of the first five rows
        self.lowest = self.highest = math.nan  # lowest and highest reward of any answer
        self._has_rows = False
        self._trends = {name: FirstAndLast(count) for name, count in trends.items()}

    def add(self, row: Row) -> None:
        """Add a row."""
        self.last_rows.append(
            {name: value for name, value in row.items() if name in self._metric_names}
        )
        if len(self.first_mixed) < KEPT_ROWS:
            self.first_mixed.append(read_metric(row, MIXED))
        low, high = read_metric(row, LOW), read_metric(row, HIGH)
        # Same as min and max over a list: NaN stays if it is the first value, and is ignored
        # otherwise.
        self.lowest = low if not self._has_rows or low < self.lowest else self.lowest
        self.highest = high if not self._has_rows or high > self.highest else self.highest
        self._has_rows = True
        for name, ends in self._trends.items():
            ends.add(read_metric(row, name))

    @property
    def newest(self) -> Row:
        """Return the newest row."""
        return self.last_rows[-1]

    def newest_rows(self, count: int) -> list[Row]:
        """Return the last `count` rows (at most five); fewer if fewer exist."""
        return list(self.last_rows)[-count:]

    def trend_windows(self, name: str) -> tuple[list[float], list[float]] | None:
        """Return the first and the last values of a trend; None until there are enough."""
        return self._trends[name].windows()
