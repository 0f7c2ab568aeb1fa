"""Define `StreamedProblemSet`, which reads rows on access, for data larger than memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl.data.length_limits import RowTooLong
from rl.data.problem_set import ProblemSet
from rl.data.row_formats import RowFormat
from rl.data.row_parser import RowParser
from rl.data.row_readers import BadRow, Row
from rl.data.table_readers import Table
from rl.errors import UserError
from rl.types import Problem

logger = logging.getLogger(__name__)

_WINDOW = 8  # blocks (of a file that is read in blocks) whose rows are shuffled together
_LOGGED_ROWS = 20  # skipped rows that are logged by name; further rows are only counted


class StreamedProblemSet(ProblemSet):
    """Read the problems of a table (rl.data.table_readers) on access, without keeping them.

    The order is a function of (seed, epoch), as in `ProblemSet`. For a file that is read in blocks
    (.parquet) the blocks are shuffled, and the rows within each 8 consecutive shuffled blocks. A
    bad row is detected when it is read: it ends the run, or the next good row replaces it
    (on_bad_row, on_too_long). The replacement depends only on the row. A row is a single problem.
    """

    is_lazy = True

    def __init__(
        self,
        table: Table,
        reader: RowFormat,
        parser: RowParser,
        *,
        name: str,
        on_bad_row: str,
        part: range | None = None,
        check: Callable[[Problem], Problem] | None = None,
    ):
        self._part = range(len(table)) if part is None else part
        super().__init__(self._part, name=name)  # type: ignore[arg-type]  # `at` reads the rows
        self._table, self._reader, self._parser, self._check = table, reader, parser, check
        self.on_bad_row = on_bad_row
        self.skipped_rows: set[int] = set()

    @property
    def tags(self) -> list[str]:
        return [self._parser.tag]

    def _select(self, part: range, name: str = "") -> StreamedProblemSet:
        """Return a set of the rows `part` of the same table, with the same check."""
        return StreamedProblemSet(
            self._table,
            self._reader,
            self._parser,
            name=name or self.name,
            on_bad_row=self.on_bad_row,
            part=part,
            check=self._check,
        )

    def first(self, count: int) -> StreamedProblemSet:
        return self._select(self._part[:count])

    def last(self, count: int) -> StreamedProblemSet:
        """Return the last `count` problems."""
        return self._select(self._part[-count:], f"{self.name}, held out")

    def with_check(self, check: Callable[[Problem], Problem], on_bad_row: str) -> ProblemSet:
        """Return a set that applies `check` to each problem on access. Raises UserError if no row
        passes the check.
        """
        checked_set = self._select(self._part)
        checked_set._check, checked_set.on_bad_row = check, on_bad_row
        checked_set.at(0)
        return checked_set

    def at(self, index: int, epoch: int = 0) -> Problem:
        for offset in range(len(self)):
            place = (index + offset) % len(self)
            row = self._table.row(self._part[place])
            try:
                return self._parse_row(row, index)
            except UserError as error:
                self._skip_row(
                    place,
                    f"{row.place}: {error}",
                    isinstance(error, RowTooLong) and error.skip,
                    error,
                )
        raise UserError(f"no row of {self.name} can be used; the last row tried is {row.place}")

    def _parse_row(self, row: Row, index: int) -> Problem:
        try:
            problems = self._parser.parse(row, self._reader, index)
        except BadRow as error:
            raise UserError(str(error)) from error
        if len(problems) > 1:
            raise UserError(
                f"it holds {len(problems)} instances, and a row of a stream is a single problem: "
                "write each as a row, or leave out stream"
            )
        return problems[0] if self._check is None else self._check(problems[0])

    def _skip_row(self, place: int, text: str, skip: bool, error: UserError) -> None:
        """Log a bad row that is skipped. Raises UserError if bad rows are errors."""
        if self.on_bad_row == "error" and not skip:
            raise UserError(
                f"{text}\nCorrect it, or leave such rows out with on_bad_row skip."
            ) from error
        if place not in self.skipped_rows:
            self.skipped_rows.add(place)
            if len(self.skipped_rows) <= _LOGGED_ROWS:
                logger.warning(
                    "left out row %d of %s so far: %s", len(self.skipped_rows), self.name, text
                )

    def with_rows(self, rows: Any) -> ProblemSet:
        raise NotImplementedError(
            "the rows of a stream cannot be replaced: they are created when they are read"
        )

    def subset(self, indices: Sequence[int]) -> ProblemSet:
        raise NotImplementedError(
            "a stream has no subset by index: its rows are chosen when they are read"
        )

    def _make_order(self, seed: int, epoch: int) -> np.ndarray:
        if not self._table.blocks:
            return super()._make_order(seed, epoch)
        rng = np.random.Generator(np.random.Philox([seed, epoch]))
        ends = np.cumsum(self._table.blocks)
        starts = ends - np.asarray(self._table.blocks)
        low, high = self._part.start, self._part.stop
        blocks = [
            np.arange(max(a, low), min(b, high)) - low
            for a, b in zip(starts, ends, strict=True)
            if max(a, low) < min(b, high)
        ]
        shuffled = [blocks[i] for i in rng.permutation(len(blocks))]
        windows = [
            np.concatenate(shuffled[i : i + _WINDOW]) for i in range(0, len(shuffled), _WINDOW)
        ]
        return np.concatenate([rng.permutation(window) for window in windows])
