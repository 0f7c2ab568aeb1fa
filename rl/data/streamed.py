"""`Streamed`: problems whose rows are read when they are asked for, for data larger than memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl.data.formats import RowFormat
from rl.data.images import RowImages
from rl.data.problem_set import ProblemSet
from rl.data.prompts import Dress
from rl.data.rows import BadRow
from rl.data.tables import Table
from rl.data.too_long import TooLong
from rl.errors import UserError
from rl.types import Problem

logger = logging.getLogger(__name__)

_WINDOW = 8  # blocks (of a file that is read in blocks) among whose rows an epoch's order is drawn
_NAMED = 20  # rows left out that are named; the others are counted


class _Rows(Sequence[Any]):
    """The rows from `start` to `stop` of a table, as the places of a ProblemSet."""

    def __init__(self, table: Table, start: int, stop: int):
        self.table, self.start, self.stop = table, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, index: Any) -> Any:
        return self.table.row(self.start + index)


class Streamed(ProblemSet):
    """Problems of a table (rl.data.tables), none of which is held.

    The order is a function of (seed, epoch) as elsewhere; of a file that is read in blocks
    (.parquet) the blocks are shuffled, and the rows within each eight of them. A bad row is found
    when it is read: it ends the run, or the next good row stands in for it (on_bad_row,
    on_too_long), which depends on the row alone.
    """

    is_lazy = True

    def __init__(
        self,
        table: Table,
        reader: RowFormat,
        dress: Dress,
        tag: str,
        *,
        name: str,
        on_bad_row: str,
        part: range | None = None,
        images: RowImages | None = None,
    ):
        rows = range(len(table)) if part is None else part
        super().__init__(_Rows(table, rows.start, rows.stop), name=name)
        self._table, self._reader, self._dress, self._tag, self._part = (
            table,
            reader,
            dress,
            tag,
            rows,
        )
        self.on_bad_row, self._images = on_bad_row, images or RowImages()
        self._check: Callable[[Problem], Problem] | None = None
        self.left_out: set[int] = set()

    @property
    def tags(self) -> list[str]:
        return [self._tag]

    def _narrowed(self, part: range, name: str) -> Streamed:
        found = Streamed(
            self._table,
            self._reader,
            self._dress,
            self._tag,
            name=name,
            on_bad_row=self.on_bad_row,
            part=part,
            images=self._images,
        )
        found._check = self._check
        return found

    def first(self, count: int) -> Streamed:
        return self._narrowed(
            range(self._part.start, min(self._part.stop, self._part.start + count)), self.name
        )

    def last(self, count: int) -> Streamed:
        """The last `count` problems."""
        return self._narrowed(
            range(self._part.stop - count, self._part.stop), f"{self.name}, held out"
        )

    def checked(self, check: Callable[[Problem], Problem], on_bad_row: str) -> ProblemSet:
        found = self._narrowed(self._part, self.name)
        found._check, found.on_bad_row = check, on_bad_row
        found.at(0)  # what no row would pass is found now
        return found

    def at(self, index: int, epoch: int = 0) -> Problem:
        for further in range(len(self)):
            place = (index + further) % len(self)
            row = self._table.row(self._part.start + place)
            try:
                return self._problem(row.columns, row.place, index)
            except UserError as error:
                self._leave_out(
                    place, f"{row.place}: {error}", isinstance(error, TooLong) and error.skip, error
                )
        raise UserError(f"no row of {self.name} can be used, the last because: {row.place}")

    def _problem(self, columns: Any, place: str, index: int) -> Problem:
        try:
            if isinstance(columns, BadRow):
                raise columns
            messages, meta, response, rejected = self._reader.read(columns)
            asked, shown = (
                self._images(self._dress(messages, columns), columns),
                self._images.of_the_column(columns),
            )
        except BadRow as error:
            raise UserError(str(error)) from error
        meta = {key: value for key, value in meta.items() if key not in shown} if shown else meta
        problem = Problem(asked, meta, response, self._tag, index, rejected, place=place)
        return problem if self._check is None else self._check(problem)

    def _leave_out(self, place: int, text: str, skip: bool, error: UserError) -> None:
        if self.on_bad_row == "error" and not skip:
            raise UserError(
                f"{text}\nMend it, or leave such rows out with on_bad_row skip."
            ) from error
        if place not in self.left_out:
            self.left_out.add(place)
            if len(self.left_out) <= _NAMED:
                logger.warning(
                    "left out row %d of %s so far: %s", len(self.left_out), self.name, text
                )

    def with_rows(self, rows: Any) -> ProblemSet:
        raise NotImplementedError("the rows of a stream are made when they are read")

    def subset(self, indices: Sequence[int]) -> ProblemSet:
        raise NotImplementedError("the rows of a stream are chosen when they are read")

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        if not self._table.blocks or (seed, epoch) in self._orders:
            return super()._order(seed, epoch)
        draw = np.random.Generator(np.random.Philox([seed, epoch]))
        ends = np.cumsum(self._table.blocks)
        starts = ends - np.asarray(self._table.blocks)
        low, high = self._part.start, self._part.stop
        blocks = [
            np.arange(max(a, low), min(b, high)) - low
            for a, b in zip(starts, ends, strict=True)
            if max(a, low) < min(b, high)
        ]
        shuffled = [blocks[i] for i in draw.permutation(len(blocks))]
        windows = [
            np.concatenate(shuffled[i : i + _WINDOW]) for i in range(0, len(shuffled), _WINDOW)
        ]
        while len(self._orders) >= 4:
            del self._orders[next(iter(self._orders))]
        self._orders[(seed, epoch)] = np.concatenate(
            [draw.permutation(window) for window in windows]
        )
        return self._orders[(seed, epoch)]
