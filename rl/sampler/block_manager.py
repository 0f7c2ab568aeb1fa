"""Manage the blocks of the paged KV cache: a reference-counted pool and the block tables of prompts
and rows.

A row's table covers its prompt and its response, position by position. Rows of a prompt share its
blocks. Each row copies the prompt's last, partly filled block at its first write, except the last
row that holds it, which writes in place. A prompt without rows holds its blocks itself. So at most
one block of each row is not full, whatever the lengths. Sequences that begin with the same tokens
share blocks too (`BlockManager.allocate_table`), also with sequences that have ended, as long as
their blocks are not needed.

`make_block_tables` builds the tables of a step: private blocks of each row, and blocks that a
prefix group shares, which `kernels.compute_paged_attention` reads once for all rows of a group.
Shapes: R rows (N in a state), B blocks of a table, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from kernels import SharedPages
from rl.sampler.prefix_cache import CHUNK_SIZE, Hashes


def max_blocks(requests: Iterable[tuple[int, int, int]], size: int, max_rows: int) -> int:
    """Return the most blocks of `size` positions that requests can hold at once, with at most
    `max_rows` rows.

    requests: (length of the prompt, samples, most tokens of each). The full blocks of a prompt are
    held once for all its rows; each row holds its copy of the prompt's last block and the following
    blocks. A prompt may hold its blocks in addition while its other samples wait.
    """
    per_request = [
        (
            prompt // size,
            count,
            -(-(prompt + most - 1) // size) - prompt // size,
            -(-prompt // size),
        )
        for prompt, count, most in requests
    ]
    if not per_request:
        return 1
    whole = sum(shared + count * private for shared, count, private, _ in per_request)
    shared, _, private, waits = (max(column) for column in zip(*per_request, strict=True))
    return max(min(whole, min(len(per_request), max_rows) * shared + max_rows * private) + waits, 1)


def choose_pool_size(budget: int, need: int | None) -> int:
    """Return the size of a pool in blocks: the budget, or the need rounded up by at most an eighth.

    Rounding gives calls with a similar need the same pool size.
    """
    step = 1 << max(((need or 1) - 1).bit_length() - 4, 0)
    return budget if need is None else min(budget, -(-need // step) * step)


class OutOfBlocks(Exception):
    """Signal that no block is free; the caller preempts rows."""


class BlockPool:
    """Count the references of blocks 0..count-1, and find blocks by the hashes of their chunks
    (prefix_cache.py).

    A block without references is free. If it has hashes, it can be found until it is allocated
    again; the least recently used is allocated first.
    """

    def __init__(self, count: int):
        self.ref_counts = [0] * count
        self._unhashed = list(range(count - 1, -1, -1))  # free blocks without hashes
        self._reusable: dict[int, None] = {}  # free blocks with hashes, least recently used first
        self._block_of: dict[bytes, int] = {}  # by chunk
        # the chunks by which a block is found, each with the position in the block that it ends at
        self._chunks: dict[int, list[tuple[bytes, int]]] = {}
        self.hashed_positions = [0] * count  # of each block, the first positions
        self.experts: dict[int, np.ndarray] = {}  # of each position of hashed blocks, if recorded

    @property
    def num_free(self) -> int:
        """Return the number of free blocks."""
        return len(self._unhashed) + len(self._reusable)

    def allocate(self) -> int:
        """Take a free block with a reference count of 1. Raises OutOfBlocks if no block is free."""
        if self._unhashed:
            block = self._unhashed.pop()
        elif self._reusable:
            block = next(iter(self._reusable))
            del self._reusable[block]
            self.forget(block)
        else:
            raise OutOfBlocks
        self.ref_counts[block] = 1
        return block

    def share(self, blocks: list[int]) -> list[int]:
        """Add a reference to each block; return them as a new list."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._reusable[block]
            self.ref_counts[block] += 1
        return list(blocks)

    def release(self, blocks: list[int]) -> None:
        """Drop a reference of each block; blocks without references become free."""
        for block in reversed(blocks):  # the end of a sequence is allocated before its beginning
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if block in self._chunks:
                    self._reusable[block] = None
                else:
                    self._unhashed.append(block)

    def find(self, chunk: bytes) -> int | None:
        """Return the block that contains this chunk; None if there is none."""
        return self._block_of.get(chunk)

    def add_chunk(self, chunk: bytes, block: int, end: int) -> None:
        """Let a block be found by a chunk that ends at its position `end`, unless another block
        is.
        """
        if chunk not in self._block_of:
            self._block_of[chunk] = block
            self._chunks.setdefault(block, []).append((chunk, end))
            self.hashed_positions[block] = max(self.hashed_positions[block], end)

    def forget(self, block: int, start: int = 0) -> None:
        """Remove the chunks of a block that end after its position `start`."""
        chunks = self._chunks.pop(block)
        for chunk, end in chunks:
            if end > start:
                del self._block_of[chunk]
        if remaining := [(chunk, end) for chunk, end in chunks if end <= start]:
            self._chunks[block] = remaining
        self.hashed_positions[block] = max((end for _, end in remaining), default=0)
        if not remaining:
            self.experts.pop(block, None)
        elif block in self.experts:
            self.experts[block] = self.experts[block][: self.hashed_positions[block]]

    def forget_all(self) -> None:
        """Remove all chunks."""
        for block in list(self._chunks):
            self.forget(block)
        self._unhashed += self._reusable
        self._reusable.clear()
        self.experts.clear()


@dataclass(frozen=True, slots=True)
class Allocation:
    """Hold the blocks of a sequence, whose first `positions` positions need not be computed.

    `copy`: the blocks (source, target) to copy before anything else is written. `experts`
    [positions, B * K], if recorded.
    """

    block_table: list[int]
    positions: int = 0
    copy: tuple[int, int] | None = None
    experts: np.ndarray | None = None


@dataclass(slots=True)
class PromptBlockTable:
    """Hold the length of a prompt and, while it has no rows, its blocks."""

    length: int
    block_table: list[int] = field(default_factory=list)
    rows: int = 0


@dataclass(slots=True)
class RowBlockTable:
    """Hold the block table of a row, of which `length` positions are written."""

    prompt: PromptBlockTable
    length: int
    block_table: list[int] = field(default_factory=list)


class BlockManager:
    """Keep the block tables of a running batch over a single pool, in the order of the state's
    slots.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.pool, self.block_size = BlockPool(num_blocks), block_size
        self.chunk_size = math.gcd(block_size, CHUNK_SIZE)
        self.prompts: list[PromptBlockTable] = []
        self.rows: list[RowBlockTable] = []

    def num_blocks_for(self, positions: int) -> int:
        """Return the number of blocks for `positions` positions."""
        return -(-positions // self.block_size)

    def count_cached(self, hashes: Hashes) -> int:
        """Return how many chunks of a sequence are in the cache."""
        blocks, partial = self._find_blocks(hashes)
        per_block = self.block_size // self.chunk_size
        return len(blocks) * per_block + (0 if partial is None else partial[1])

    def _find_blocks(self, hashes: Hashes) -> tuple[list[int], tuple[int, int] | None]:
        """Return the full blocks of a sequence that are in the cache, and a block that contains the
        next chunks, with their number.
        """
        per_block, find = self.block_size // self.chunk_size, self.pool.find
        blocks = list[int]()
        while (end := (len(blocks) + 1) * per_block) <= len(hashes):
            if (block := find(hashes[end - 1])) is None:
                break
            blocks.append(block)
        first = len(blocks) * per_block
        for count in range(min(per_block - 1, len(hashes) - first), 0, -1):
            if (block := find(hashes[first + count - 1])) is not None:
                return blocks, (block, count)
        return blocks, None

    def allocate_table(self, length: int, hashes: Hashes = ()) -> Allocation:
        """Take the blocks of a sequence of `length` positions.

        Full blocks with its first tokens are shared. A block that holds some of the next tokens is
        copied. Raises OutOfBlocks, without taking any.
        """
        shared_blocks, partial = self._find_blocks(hashes)
        positions, recorded = len(shared_blocks) * self.block_size, self.pool.experts
        experts = [recorded[block] for block in shared_blocks] if recorded else []
        if partial is not None:
            positions += partial[1] * self.chunk_size
            if recorded:
                experts.append(recorded[partial[0]][: partial[1] * self.chunk_size])
        blocks = self.pool.share(shared_blocks)
        try:
            blocks += self._allocate(self.num_blocks_for(length) - len(blocks))
        except OutOfBlocks:
            self.pool.release(blocks)
            raise
        # the source may be one of the new blocks: its content is still there
        copy = None if partial is None else (partial[0], blocks[len(shared_blocks)])
        return Allocation(blocks, positions, copy, np.concatenate(experts) if experts else None)

    def register(
        self, block_table: Sequence[int], hashes: Hashes, experts: np.ndarray | None = None
    ) -> None:
        """Let the blocks of a sequence be found by the hashes of its chunks.

        `experts` [positions, B * K]: of all its positions, if recorded.
        """
        per_block, pool = self.block_size // self.chunk_size, self.pool
        for i, chunk in enumerate(hashes):
            pool.add_chunk(
                chunk, block_table[i // per_block], (i % per_block + 1) * self.chunk_size
            )
        if experts is None:
            return
        for i, block in enumerate(block_table):
            hashed = pool.hashed_positions[block]
            if hashed > len(pool.experts.get(block, ())):
                start = i * self.block_size
                pool.experts[block] = experts[start : start + hashed].copy()

    def _allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises OutOfBlocks, without taking any, if fewer are free."""
        if count > self.pool.num_free:
            raise OutOfBlocks
        return [self.pool.allocate() for _ in range(count)]

    def add_row(self, slot: int) -> RowBlockTable:
        """Append a row of the prompt in `slot`."""
        prompt = self.prompts[slot]
        if prompt.rows == 0:  # the first row takes over the prompt's blocks
            row = RowBlockTable(prompt, prompt.length, prompt.block_table)
            prompt.block_table = []
        else:
            other = next(row for row in self.rows if row.prompt is prompt)
            row = RowBlockTable(
                prompt,
                prompt.length,
                self.pool.share(other.block_table[: self.num_blocks_for(prompt.length)]),
            )
        prompt.rows += 1
        self.rows.append(row)
        return row

    def add_resumed_row(self, slot: int, length: int) -> RowBlockTable:
        """Append a preempted row that resumes, with `length` positions. Its blocks are still to be
        allocated.
        """
        prompt = self.prompts[slot]
        row = RowBlockTable(prompt, length)
        if prompt.rows == 0:
            self.pool.release(prompt.block_table)
            prompt.block_table = []
        prompt.rows += 1
        self.rows.append(row)
        return row

    def blocks_needed(self, counts: Sequence[int] | None = None) -> int:
        """Return the number of new blocks for the next token of every row, or for `counts` tokens
        of each row.
        """
        new, writers = 0, dict[int, int]()
        for row, count in zip(self.rows, counts or [1] * len(self.rows), strict=True):
            index = row.length // self.block_size
            new += max(self.num_blocks_for(row.length + count) - len(row.block_table), 0)
            if index < len(row.block_table):
                writers[row.block_table[index]] = writers.get(row.block_table[index], 0) + 1
        return new + sum(
            min(count, self.pool.ref_counts[block] - 1) for block, count in writers.items()
        )

    def fits(self, counts: Sequence[int]) -> bool:
        """Return whether blocks are free for `counts` tokens of each row (`blocks_needed`)."""
        # a row takes at most its tokens' blocks and a copy: with much room no row is looked at
        most = len(self.rows) * (self.num_blocks_for(max(counts, default=0)) + 1)
        return most <= self.pool.num_free or self.blocks_needed(counts) <= self.pool.num_free

    def append_positions(
        self, table: PromptBlockTable | RowBlockTable, count: int
    ) -> tuple[int, int] | None:
        """Make room for `count` more positions of a row, or of a prompt without rows.

        Returns (source, target) if its last block has to be copied first, else None. Raises
        OutOfBlocks.
        """
        # on the critical path of the device: the common case is two comparisons
        blocks, index, copy = table.block_table, table.length // self.block_size, None
        end = table.length + count
        if index < len(blocks):
            block, place = blocks[index], table.length % self.block_size
            if self.pool.ref_counts[block] > 1:
                blocks[index] = self.pool.allocate()
                copy = (block, blocks[index])
                self.pool.release([block])
            elif self.pool.hashed_positions[block] > place:
                self.pool.forget(block, place)  # these positions are written again
        if end > len(blocks) * self.block_size:
            blocks += self._allocate(self.num_blocks_for(end) - len(blocks))
        table.length = end
        return copy

    def drop_positions(self, row: RowBlockTable, count: int) -> None:
        """Drop the newest `count` positions of a row, which it has written itself."""
        row.length -= count
        end = self.num_blocks_for(row.length)
        self.pool.release(row.block_table[end:])
        del row.block_table[end:]

    def drop_row(self, row: RowBlockTable) -> None:
        """Release the blocks of a row before its slot is removed.

        The last row of a prompt returns the prompt's blocks to the prompt.
        """
        prompt = row.prompt
        prompt.rows -= 1
        if prompt.rows == 0:
            prompt.block_table = self.pool.share(
                row.block_table[: self.num_blocks_for(prompt.length)]
            )
        self.pool.release(row.block_table)
        row.block_table = []

    def drop_prompt(self, prompt: PromptBlockTable) -> None:
        """Release the blocks of a prompt."""
        self.pool.release(prompt.block_table)
        prompt.block_table = []

    def shared_prefixes(self) -> list[tuple[list[int], list[int]]]:
        """Return (rows, full blocks) of each group of rows with tables that begin with the same
        blocks.

        Attention reads these blocks once for the whole group.
        """
        # Keyed by blocks: a resumed row may have separate blocks.
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, row in enumerate(self.rows):
            if row.prompt.rows > 1 and (full := row.prompt.length // self.block_size):
                groups.setdefault(tuple(row.block_table[:full]), []).append(i)
        return [(rows, list(blocks)) for blocks, rows in groups.items() if len(rows) > 1]


def split_block_tables(
    tables: Sequence[Sequence[int]],
    lengths: np.ndarray,
    shared: list[tuple[list[int], list[int]]],
    block_size: int,
    rows: int,
    groups: int,
    table_width: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Split block tables into private and shared parts.

    Returns a tuple: the positions of each row that are in shared blocks [R], the private table of
    each row [R, B], the positions of each row in its private blocks [R], and the fields of
    `SharedPages`.

    The output has `rows` rows, `groups` groups and tables that are `table_width` blocks wide. Rows
    past `tables` are padding. `lengths` holds the positions of each row.
    """
    skip, shares, group = (
        np.zeros(rows, np.int64),
        np.zeros(rows, np.bool_),
        np.zeros(rows, np.int64),
    )
    shared_table = np.zeros((groups, table_width), np.int32)
    shared_length = np.zeros(groups, np.int32)
    for number, (members, pages) in enumerate(shared):
        skip[members], shares[members], group[members] = len(pages) * block_size, True, number
        shared_table[number, : len(pages)], shared_length[number] = pages, len(pages) * block_size
    table = private_tables(tables, skip // block_size, rows, table_width)
    order = np.argsort(np.where(shares, group, groups), kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(group[shares], minlength=groups))]).astype(
        np.int32
    )
    length = np.pad(lengths, (0, rows - len(lengths)), constant_values=1) - skip
    shared_fields = {
        "order": order,
        "place": np.argsort(order),
        "group": group[order],
        "shares": shares,
    }
    return (
        skip,
        table,
        length.astype(np.int32),
        shared_fields | {"starts": starts, "table": shared_table, "length": shared_length},
    )


def private_tables(
    tables: Sequence[Sequence[int]], first: np.ndarray, rows: int, table_width: int
) -> np.ndarray:
    """Return the table of each row [R, B] from its block `first` [R] on, padded with zeros."""
    starts = first.tolist()
    row_tables = [pages[starts[i] :] if starts[i] else pages for i, pages in enumerate(tables)]
    counts = np.array([len(pages) for pages in row_tables], np.int64)
    table = np.zeros((rows, table_width), np.int32)
    filled = np.zeros((rows, table_width), np.bool_)
    filled[: len(row_tables)] = np.arange(table_width) < counts[:, None]
    table[filled] = np.fromiter(chain.from_iterable(row_tables), np.int32, int(counts.sum()))
    return table


def make_block_tables(
    tables: Sequence[Sequence[int]],
    lengths: np.ndarray,
    shared: list[tuple[list[int], list[int]]],
    block_size: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, SharedPages | None]:
    """Return the arguments of `kernels.compute_paged_attention` besides queries and blocks, without
    padded rows or groups.
    """
    width = max(len(pages) for pages in tables)
    _, table, length, shared_fields = split_block_tables(
        tables, lengths, shared, block_size, len(tables), len(shared), width
    )

    def to_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    groups = (
        SharedPages(
            **{field.name: to_device(shared_fields[field.name]) for field in fields(SharedPages)}
        )
        if shared
        else None
    )
    return to_device(table), to_device(length), groups
