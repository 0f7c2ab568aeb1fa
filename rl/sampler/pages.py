"""Who holds which page of the cache: a pool with counts of references, and the tables of prompts
and rows.

A row's table covers its prompt and its response, position by position. Rows of one prompt share its
pages; the page that the prompt ends in is copied by each row at its first write, but for the last
one that holds it, which writes in place. A prompt without rows holds its pages itself. So every
page but one a row is full, whatever lengths there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


def pages_at_most(asked: Iterable[tuple[int, int, int]], size: int, max_rows: int) -> int:
    """Pages of `size` positions that requests can come to hold at once, of at most `max_rows` rows.

    asked: (length of the prompt, samples, most tokens of each). A prompt's full pages are held once
    for its rows, each of which has the page that the prompt ends in and what follows for itself; a
    prompt may wait for its other samples beside them.
    """
    every = [
        (
            prompt // size,
            count,
            -(-(prompt + most - 1) // size) - prompt // size,
            -(-prompt // size),
        )
        for prompt, count, most in asked
    ]
    if not every:
        return 1
    whole = sum(shared + count * own for shared, count, own, _ in every)
    shared, _, own, waits = (max(column) for column in zip(*every, strict=True))
    return max(min(whole, min(len(every), max_rows) * shared + max_rows * own) + waits, 1)


def pool_size(budget: int, need: int | None) -> int:
    """Pages of a pool: the budget, or what is needed and up to an eighth more, so that calls that
    need about as much have one size.
    """
    step = 1 << max(((need or 1) - 1).bit_length() - 4, 0)
    return budget if need is None else min(budget, -(-need // step) * step)


class OutOfPages(Exception):
    """Nothing is free; the caller lets rows wait."""


class PagePool:
    """Pages 0..count-1. A page is free where nobody holds it."""

    def __init__(self, count: int):
        self.held = [0] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise OutOfPages
        page = self._free.pop()
        self.held[page] = 1
        return page

    def share(self, pages: list[int]) -> list[int]:
        for page in pages:
            self.held[page] += 1
        return list(pages)

    def release(self, pages: list[int]) -> None:
        for page in pages:
            self.held[page] -= 1
            if self.held[page] == 0:
                self._free.append(page)


@dataclass(slots=True)
class PromptPages:
    """A prompt's tokens and, while no row answers it, its pages."""

    length: int
    pages: list[int] = field(default_factory=list)
    rows: int = 0


@dataclass(slots=True)
class RowPages:
    """A row's table; `length` positions of it are written."""

    prompt: PromptPages
    length: int
    pages: list[int] = field(default_factory=list)


class Tables:
    """The tables of a running batch over one pool, in the slots of its state."""

    def __init__(self, pages: int, size: int):
        self.pool, self.size = PagePool(pages), size
        self.prompts: list[PromptPages] = []
        self.rows: list[RowPages] = []

    def pages_for(self, positions: int) -> int:
        return -(-positions // self.size)

    def add_prompt(self, length: int) -> PromptPages:
        """A prompt after the present ones, with pages to be written."""
        prompt = PromptPages(length, self._several(self.pages_for(length)))
        self.prompts.append(prompt)
        return prompt

    def _several(self, count: int) -> list[int]:
        if count > self.pool.free:
            raise OutOfPages
        return [self.pool.take() for _ in range(count)]

    def add_row(self, slot: int) -> RowPages:
        """A row after the present ones that answers the prompt in the slot."""
        prompt = self.prompts[slot]
        if prompt.rows == 0:  # from now on its rows hold the pages
            row = RowPages(prompt, prompt.length, prompt.pages)
            prompt.pages = []
        else:
            other = next(row for row in self.rows if row.prompt is prompt)
            row = RowPages(
                prompt, prompt.length, self.pool.share(other.pages[: self.pages_for(prompt.length)])
            )
        prompt.rows += 1
        self.rows.append(row)
        return row

    def add_whole(self, slot: int, length: int) -> RowPages:
        """A row that goes on after it waited: `length` positions, to be written anew into pages of
        its own.
        """
        prompt = self.prompts[slot]
        row = RowPages(prompt, length, self._several(self.pages_for(length)))
        if prompt.rows == 0:
            self.pool.release(prompt.pages)
            prompt.pages = []
        prompt.rows += 1
        self.rows.append(row)
        return row

    def keep_row(self, row: RowPages, length: int) -> None:
        """A prompt after the present ones: the first `length` positions of a row, whose pages both
        hold.
        """
        self.prompts.append(
            PromptPages(length, self.pool.share(row.pages[: self.pages_for(length)]))
        )

    def extend(self, slot: int, count: int) -> tuple[int, int] | None:
        """Room for `count` more positions at the end of a prompt without rows; (from, to) where its
        last page has to be copied first.
        """
        prompt, copy = self.prompts[slot], None
        if prompt.length % self.size and self.pool.held[prompt.pages[-1]] > 1:
            (mine,) = self._several(1)
            copy = (prompt.pages[-1], mine)
            self.pool.release(prompt.pages[-1:])
            prompt.pages[-1] = mine
        prompt.length += count
        prompt.pages += self._several(self.pages_for(prompt.length) - len(prompt.pages))
        return copy

    def needed(self, counts: Sequence[int] | None = None) -> int:
        """Pages that the next token of every row takes, or so many of each row."""
        new, writers = 0, dict[int, int]()
        for row, count in zip(self.rows, counts or [1] * len(self.rows), strict=True):
            at = row.length // self.size
            new += max(self.pages_for(row.length + count) - len(row.pages), 0)
            if at < len(row.pages):
                writers[row.pages[at]] = writers.get(row.pages[at], 0) + 1
        return new + sum(min(count, self.pool.held[page] - 1) for page, count in writers.items())

    def make_room(self, row: RowPages) -> tuple[int, int, tuple[int, int] | None]:
        """(page, place in it) of the row's next position, and (from, to) where a page has to be
        copied first.
        """
        at, place = divmod(row.length, self.size)
        copy = None
        if at == len(row.pages):
            row.pages.append(self.pool.take())
        elif self.pool.held[row.pages[at]] > 1:
            mine = self.pool.take()
            copy = (row.pages[at], mine)
            self.pool.release([row.pages[at]])
            row.pages[at] = mine
        row.length += 1
        return row.pages[at], place, copy

    def grow(self, row: RowPages, count: int) -> tuple[int, int] | None:
        """Room for `count` more positions of a row; (from, to) where a page has to be copied first."""
        at, end = row.length // self.size, row.length + count
        # nearly always: the device waits for this
        if end <= len(row.pages) * self.size and self.pool.held[row.pages[at]] == 1:
            row.length = end
            return None
        _, _, copy = self.make_room(row)
        row.length += count - 1
        row.pages += self._several(self.pages_for(row.length) - len(row.pages))
        return copy

    def drop_row(self, row: RowPages) -> None:
        """Before its slot goes: the last row of a prompt gives the prompt's pages back to it."""
        prompt = row.prompt
        prompt.rows -= 1
        if prompt.rows == 0:
            prompt.pages = self.pool.share(row.pages[: self.pages_for(prompt.length)])
        self.pool.release(row.pages)
        row.pages = []

    def drop_prompt(self, prompt: PromptPages) -> None:
        self.pool.release(prompt.pages)
        prompt.pages = []

    def shared_pages(self) -> list[tuple[list[int], list[int]]]:
        """(rows, full pages) of each group of rows whose tables begin with the same pages: these
        are read once for all of them.
        """
        # of a prompt and a first page: a row that came back has pages of its own
        groups: dict[tuple[int, int], list[int]] = {}
        for i, row in enumerate(self.rows):
            if row.prompt.rows > 1 and row.prompt.length >= self.size:
                groups.setdefault((id(row.prompt), row.pages[0]), []).append(i)
        found = []
        for rows in groups.values():
            full = self.rows[rows[0]].prompt.length // self.size
            if len(rows) > 1:
                found.append((rows, self.rows[rows[0]].pages[:full]))
        return found
