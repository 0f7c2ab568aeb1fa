"""Manage the blocks of the paged KV cache: a reference-counted pool and the block tables of prompts
and rows.

A row's table covers its prompt and its response, position by position. Rows of a prompt share its
blocks. Each row copies the prompt's last, partly filled block at its first write, except the last
row that holds it, which writes in place. A prompt without rows holds its blocks itself. So at most
one block of each row is not full, whatever the lengths. Sequences that begin with the same tokens
share blocks too (`BlockManager.allocate_table`), also with sequences that have ended, as long as
their blocks are not needed.

block_tables.py builds the tables of a step. Shapes: R rows (N in a state), B blocks of a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from rl.sampler.decode_state import find_missing, index_in_row
from rl.sampler.prefix_cache import CHUNK_SIZE, Hashes

Count = TypeVar("Count", int, np.ndarray)


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
        self.ref_counts = np.zeros(count, np.int64)
        self._unhashed = list(range(count - 1, -1, -1))  # free blocks without hashes
        self._reusable: dict[int, None] = {}  # free blocks with hashes, least recently used first
        self._block_of: dict[bytes, int] = {}  # by chunk
        # the chunks by which a block is found, each with the position in the block that it ends at
        self._chunks: dict[int, list[tuple[bytes, int]]] = {}
        self.hashed_positions = np.zeros(count, np.int64)  # of each block, the first positions
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

    def share(self, blocks: list[int], times: int = 1) -> None:
        """Add `times` references to each block."""
        if times == 0:
            return
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._reusable[block]
        self.ref_counts[blocks] += times

    def release(self, blocks: list[int]) -> None:
        """Drop a reference of each block; blocks without references become free."""
        self.ref_counts[blocks] -= 1
        for block in reversed(blocks):  # the end of a sequence is allocated before its beginning
            if self.ref_counts[block] == 0:
                if block in self._chunks:
                    self._reusable[block] = None
                else:
                    self._unhashed.append(block)

    def find(self, chunk: bytes) -> int | None:
        """Return the block that contains this chunk; None if there is none."""
        return self._block_of.get(chunk)

    def add_chunks(self, block: int, chunks: list[tuple[bytes, int]]) -> None:
        """Let a block be found by new chunks, each with the position in the block that it ends at,
        ascending.
        """
        self._block_of.update((chunk, block) for chunk, _ in chunks)
        self._chunks.setdefault(block, []).extend(chunks)
        self.hashed_positions[block] = max(self.hashed_positions[block], chunks[-1][1])

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


class BlockManager:
    """Keep the block tables of a running batch over a single pool, in the order of the state's
    slots.

    `rows` [R] holds for each row the slot of its prompt, its written positions (`length`) and its
    number of blocks. `tables` [R, B] holds its blocks, padded with zeros.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.pool, self.block_size = BlockPool(num_blocks), block_size
        self.chunk_size = math.gcd(block_size, CHUNK_SIZE)
        self.prompts: list[PromptBlockTable] = []
        self.rows = np.zeros(0, [(name, np.int64) for name in ("prompt", "length", "num_blocks")])
        self.tables = np.zeros((0, 0), np.int64)

    def num_blocks_for(self, positions: Count) -> Count:
        """Return the number of blocks for `positions` positions (a number, or an array)."""
        return -(-positions // self.block_size)

    def row_table(self, row: int) -> list[int]:
        """Return the blocks of a row."""
        return self.tables[row, : self.rows["num_blocks"][row]].tolist()

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
        self.pool.share(shared_blocks)
        try:
            new_blocks = self._allocate(self.num_blocks_for(length) - len(shared_blocks))
        except OutOfBlocks:
            self.pool.release(shared_blocks)
            raise
        # the source may be one of the new blocks: its content is still there
        copy = None if partial is None else (partial[0], new_blocks[0])
        all_experts = np.concatenate(experts) if experts else None
        return Allocation(shared_blocks + new_blocks, positions, copy, all_experts)

    def register(
        self, block_table: Sequence[int], hashes: Hashes, experts: np.ndarray | None = None
    ) -> None:
        """Let the blocks of a sequence be found by the hashes of its chunks.

        `experts` [positions, B * K]: of all its positions, if recorded.
        """
        per_block, pool, size = self.block_size // self.chunk_size, self.pool, self.chunk_size
        for i, block in enumerate(block_table):
            chunks = enumerate(hashes[i * per_block : (i + 1) * per_block], 1)
            if new := [(chunk, n * size) for n, chunk in chunks if pool.find(chunk) is None]:
                pool.add_chunks(block, new)
        if experts is None:
            return
        for i, block in enumerate(block_table):
            hashed = int(pool.hashed_positions[block])
            if hashed > len(pool.experts.get(block, ())):
                start = i * self.block_size
                pool.experts[block] = experts[start : start + hashed].copy()

    def _allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises OutOfBlocks, without taking any, if fewer are free."""
        if count > self.pool.num_free:
            raise OutOfBlocks
        return [self.pool.allocate() for _ in range(count)]

    def add_rows(self, slot: int, count: int = 1) -> None:
        """Append `count` rows of the prompt in `slot`."""
        prompt = self.prompts[slot]
        if prompt.rows == 0:  # the first row takes over the prompt's blocks
            blocks, prompt.block_table = prompt.block_table, []
            self.pool.share(blocks, count - 1)
        else:
            other = int(np.flatnonzero(self.rows["prompt"] == slot)[0])
            blocks = self.row_table(other)[: self.num_blocks_for(prompt.length)]
            self.pool.share(blocks, count)
        self._append_rows(slot, prompt.length, blocks, count)

    def add_resumed_row(self, slot: int, length: int, blocks: list[int]) -> None:
        """Append a preempted row that resumes, with `length` positions in these blocks."""
        prompt = self.prompts[slot]
        if prompt.rows == 0:
            self.drop_prompt(prompt)
        self._append_rows(slot, length, blocks)

    def _append_rows(self, slot: int, length: int, blocks: list[int], count: int = 1) -> None:
        self._widen(len(blocks))
        table = np.zeros((count, self.tables.shape[1]), np.int64)
        table[:, : len(blocks)] = blocks
        row = np.array((slot, length, len(blocks)), self.rows.dtype)
        self.rows = np.concatenate([self.rows, np.repeat(row, count)])
        self.tables = np.concatenate([self.tables, table])
        self.prompts[slot].rows += count

    def _widen(self, width: int) -> None:
        """Make the tables at least `width` blocks wide."""
        missing = width - self.tables.shape[1]
        if missing > 0:
            self.tables = np.pad(self.tables, ((0, 0), (0, missing)))

    def _next_places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows whose next position is in a block that they hold already, with this block
        and its place in their tables.
        """
        place = self.rows["length"] // self.block_size
        rows = np.flatnonzero(place < self.rows["num_blocks"])
        places = place[rows]
        return rows, self.tables.take(rows * self.tables.shape[1] + places), places

    def _count_new_blocks(self, counts: np.ndarray | int) -> np.ndarray:
        """Return the blocks that each row lacks for `counts` more positions, [R]."""
        end = self.num_blocks_for(self.rows["length"] + counts)
        return np.maximum(end - self.rows["num_blocks"], 0)

    def blocks_needed(self, counts: np.ndarray | int = 1) -> int:
        """Return the number of new blocks for `counts` [R] tokens of each row."""
        rows, blocks, _ = self._next_places()
        writes = np.broadcast_to(counts, len(self.rows))[rows] > 0
        writers = np.bincount(blocks[writes], minlength=len(self.pool.ref_counts))
        copies = np.minimum(writers, np.maximum(self.pool.ref_counts - 1, 0))
        return int(self._count_new_blocks(counts).sum() + copies.sum())

    def fits(self, counts: np.ndarray) -> bool:
        """Return whether blocks are free for `counts` tokens of each row (`blocks_needed`)."""
        # a row takes at most its tokens' blocks and a copy: with much room no row is looked at
        most = len(self.rows) * (self.num_blocks_for(int(counts.max(initial=0))) + 1)
        return most <= self.pool.num_free or self.blocks_needed(counts) <= self.pool.num_free

    def append_positions(self, counts: np.ndarray) -> list[tuple[int, int]]:
        """Make room for `counts` [R] more positions of the rows.

        Returns the blocks (source, target) that have to be copied first. Raises OutOfBlocks.
        """
        # on the critical path of the device: only rows that meet a block boundary, or a block that
        # is shared or can be found, are looked at one by one
        pool, copies = self.pool, list[tuple[int, int]]()
        rows, blocks, places = self._next_places()
        start = self.rows["length"][rows] % self.block_size
        special = (pool.ref_counts[blocks] > 1) | (pool.hashed_positions[blocks] > start)
        special &= counts[rows] > 0
        for i in np.flatnonzero(special).tolist():
            row, block, place, first = (int(column[i]) for column in (rows, blocks, places, start))
            if pool.ref_counts[block] > 1:
                target = self.tables[row, place] = pool.allocate()
                copies.append((block, target))
                pool.release([block])
            elif pool.hashed_positions[block] > first:
                pool.forget(block, first)  # these positions are written again
        if (new := self._count_new_blocks(counts)).any():
            held = self.rows["num_blocks"]
            self._widen(int((held + new).max()))
            growing = np.repeat(np.arange(len(new)), new)
            places = held[growing] + index_in_row(growing)
            self.tables[growing, places] = self._allocate(len(growing))
            self.rows["num_blocks"] += new
        self.rows["length"] += counts
        return copies

    def drop_positions(self, counts: np.ndarray) -> None:
        """Drop the newest `counts` [R] positions of the rows, which they wrote themselves."""
        self.rows["length"] -= counts
        end = self.num_blocks_for(self.rows["length"])
        for row in np.flatnonzero(end < self.rows["num_blocks"]).tolist():
            self.pool.release(self.row_table(row)[end[row] :])
            self.tables[row, end[row] :] = 0
            self.rows["num_blocks"][row] = end[row]

    def retain_rows(self, source: np.ndarray) -> None:
        """Keep only the rows of `source`, in that order, and release the blocks of the others.

        The last row of a prompt returns the prompt's blocks to the prompt.
        """
        for row in find_missing(source, len(self.rows)).tolist():
            prompt, blocks = self.prompts[self.rows["prompt"][row]], self.row_table(row)
            prompt.rows -= 1
            if prompt.rows == 0:
                prompt.block_table = blocks[: self.num_blocks_for(prompt.length)]
                self.pool.share(prompt.block_table)
            self.pool.release(blocks)
        # `take` is several times as fast as an index of rows
        self.rows = self.rows.take(source)
        self.tables = self.tables[:, : self.rows["num_blocks"].max(initial=0)].take(source, 0)

    def retain_prompts(self, source: np.ndarray) -> None:
        """Keep only the prompts of `source`, in that order. The others have no rows."""
        for slot in find_missing(source, len(self.prompts)).tolist():
            self.drop_prompt(self.prompts[slot])
        new_slot = np.zeros(len(self.prompts), np.int64)
        new_slot[source] = np.arange(len(source))
        self.rows["prompt"] = new_slot[self.rows["prompt"]]
        self.prompts = [self.prompts[slot] for slot in source]

    def drop_prompt(self, prompt: PromptBlockTable) -> None:
        """Release the blocks of a prompt."""
        self.pool.release(prompt.block_table)
        prompt.block_table = []

    def count_shared(self) -> np.ndarray:
        """Return the full blocks of each row's prompt, 0 if the prompt has no other rows, [R]."""
        full = [p.length // self.block_size * (p.rows > 1) for p in self.prompts]
        return np.array(full, np.int64)[self.rows["prompt"]]

    def shared_prefixes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the group of each row (-1: none) and the blocks that it shares with the group, the
        first of its table, both [R].

        Attention reads these blocks once for the whole group.
        """
        shared = self.count_shared()
        group, rows = np.full(len(shared), -1), np.flatnonzero(shared)
        if not len(rows):
            return group, shared
        counts, index = shared[rows], np.arange(len(rows))
        tables = self.tables.take(rows, 0)[:, : counts.max()]
        last = tables[index, counts - 1]
        # the first of `rows` with each last block
        leader_of = np.empty(len(self.pool.ref_counts), np.int64)
        leader_of[last[::-1]] = index[::-1]
        leader = leader_of[last]
        # a resumed row may have other blocks before an equal one
        differs = tables != tables.take(leader, 0)
        alike = ~(differs & (np.arange(tables.shape[1]) < counts[:, None])).any(1)
        several = np.bincount(leader[alike], minlength=len(rows)) > 1
        alike &= several[leader]
        group[rows[alike]] = (np.cumsum(several) - 1)[leader[alike]]
        return group, shared * (group >= 0)
