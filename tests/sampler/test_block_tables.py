"""Test block tables under random operations, with page contents: each row and each prompt reads
what was written for it, and reference counts match the holders.

The reference model is a list of written numbers for each row and prompt. The contents of a page are
the last numbers written to its positions.
"""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from sampler_models import add_prompt

from rl.sampler.block_manager import BlockManager, OutOfBlocks, PromptBlockTable, RowBlockTable
from rl.sampler.prefix_cache import hash_chunks


def check_blocks(tables: BlockManager) -> None:
    """Check that the reference counts match the holders, and that at most 1.1 times the tokens plus
    a page per row are allocated. A prompt that waits for rows counts as a row.
    """
    rows, prompts = tables.rows, tables.prompts
    held = Counter(itertools.chain.from_iterable(item.block_table for item in (*rows, *prompts)))
    counts = tables.pool.ref_counts
    assert [held[page] for page in range(len(counts))] == counts
    assert tables.pool.num_free == counts.count(0)
    full = {page for row in rows for page in row.block_table[: row.length // tables.block_size]}
    ends = sum(row.length % tables.block_size for row in rows)
    waiting = [prompt for prompt in prompts if prompt.rows == 0]
    tokens = len(full) * tables.block_size + ends
    tokens += sum(prompt.length for prompt in waiting if prompt.block_table)
    used = len(counts) - tables.pool.num_free
    spare = tables.block_size * (len(rows) + len(waiting))
    assert used * tables.block_size <= 1.1 * tokens + spare


class Memory:
    """Pages with contents, and the expected contents of every row and prompt."""

    def __init__(self, rng: np.random.Generator):
        self.rng, self.size = rng, int(rng.choice([1, 2, 3, 5, 8, 32]))
        self.tables = BlockManager(int(rng.integers(6, 40)), self.size)
        self.pages = np.full((len(self.tables.pool.ref_counts), self.size), -1, np.int64)
        self.rows: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.copies = 0
        self.texts: list[list[int]] = []  # sequences that later ones may begin with
        self.reused = 0
        self.fresh = itertools.count()

    def numbers(self, count: int) -> list[int]:
        return [next(self.fresh) for _ in range(count)]

    def write(self, pages: list[int], first: int, values: list[int]) -> None:
        for at, value in enumerate(values, start=first):
            self.pages[pages[at // self.size], at % self.size] = value

    def copy(self, move: tuple[int, int] | None) -> None:
        if move is not None:
            self.pages[move[1]] = self.pages[move[0]]
            self.copies += 1

    def pick(self, choices: list[int]) -> int | None:
        return int(self.rng.choice(choices)) if choices else None

    # operations; each returns whether it was possible

    def add_prompt(self) -> bool:
        length = int(self.rng.integers(1, 3 * self.size + 2))
        if self.tables.num_blocks_for(length) > self.tables.pool.num_free:
            with pytest.raises(OutOfBlocks):
                add_prompt(self.tables, length)
            return False
        prompt = add_prompt(self.tables, length)
        self.prompts.append(self.numbers(length))
        self.write(prompt.block_table, 0, self.prompts[-1])
        return True

    def add_row(self) -> bool:
        slot = self.pick([i for i, p in enumerate(self.tables.prompts) if p.rows or p.block_table])
        if slot is None:
            return False
        self.tables.add_row(slot)
        self.rows.append(list(self.prompts[slot]))
        return True

    def come_back(self) -> bool:
        """Resume a preempted row: prefill its tokens again into fresh pages."""
        slot = self.pick(list(range(len(self.prompts))))
        if slot is None:
            return False
        values = [*self.prompts[slot], *self.numbers(int(self.rng.integers(0, 2 * self.size + 1)))]
        if self.tables.num_blocks_for(len(values)) > self.tables.pool.num_free:
            return False
        row = self.tables.add_resumed_row(slot, len(values))
        row.block_table = self.tables.allocate_table(len(values)).block_table
        self.write(row.block_table, 0, values)
        self.rows.append(values)
        return True

    def draw(self) -> bool:
        """Append a single token or several tokens to every row."""
        tables = self.tables
        counts = self.rng.integers(
            1, 2 if self.rng.random() < 0.5 else 2 * self.size + 2, len(tables.rows)
        ).tolist()
        if not counts or tables.blocks_needed(counts) > tables.pool.num_free:
            return False
        before, copies = tables.pool.num_free, self.copies
        taken = tables.blocks_needed(counts)
        for row, values, count in zip(tables.rows, self.rows, counts, strict=True):
            first = row.length
            self.copy(tables.append_positions(row, count))
            new = self.numbers(count)
            self.write(row.block_table, first, new)
            values += new
        assert before - tables.pool.num_free == taken, (before, taken, self.copies - copies)
        return True

    def end_row(self) -> bool:
        index = self.pick(list(range(len(self.rows))))
        if index is None:
            return False
        self.tables.drop_row(self.tables.rows.pop(index))
        self.rows.pop(index)
        return True

    def end_prompt(self) -> bool:
        slot = self.pick([i for i, p in enumerate(self.tables.prompts) if p.rows == 0])
        if slot is None:
            return False
        self.tables.drop_prompt(self.tables.prompts.pop(slot))
        self.prompts.pop(slot)
        return True

    def hashes(self, values: list[int]) -> list[bytes]:
        return hash_chunks(values, "", self.tables.chunk_size)

    def keep(self) -> bool:
        """Let later sequences begin with the tokens of a row, or with some of them."""
        index = self.pick([i for i, row in enumerate(self.tables.rows) if row.length])
        if index is None:
            return False
        text = self.rows[index][: int(self.rng.integers(1, len(self.rows[index]) + 1))]
        self.tables.register(self.tables.rows[index].block_table, self.hashes(text))
        self.texts.append(text)
        return True

    def begin(self) -> bool:
        """Add a prompt that begins as an earlier sequence. Only the other tokens are written."""
        text = self.texts[int(self.rng.integers(len(self.texts)))] if self.texts else []
        shared = text[: int(self.rng.integers(0, len(text) + 1))]
        values = [*shared, *self.numbers(int(self.rng.integers(1, 2 * self.size + 2)))]
        tables, hashes = self.tables, self.hashes(values)
        offered = hashes[: (len(values) - 1) // tables.chunk_size]
        before = tables.pool.num_free, list(tables.pool.ref_counts)
        try:
            allocation = tables.allocate_table(len(values), offered)
        except OutOfBlocks:
            assert before == (tables.pool.num_free, tables.pool.ref_counts)
            return False
        self.copy(allocation.copy)
        assert allocation.positions <= len(shared)
        self.write(allocation.block_table, allocation.positions, values[allocation.positions :])
        tables.prompts.append(PromptBlockTable(len(values), allocation.block_table))
        tables.register(allocation.block_table, hashes)
        self.prompts.append(values)
        self.texts.append(values)
        self.reused += allocation.positions
        return True

    def forget(self) -> bool:
        """Change the weights: no sequence begins with an earlier one."""
        self.tables.pool.forget_all()
        assert not any(self.tables.count_cached(self.hashes(text)) for text in self.texts)
        self.texts = []
        return True

    def reads(self, holder: RowBlockTable | PromptBlockTable) -> list[int]:
        return self.pages[holder.block_table].ravel()[: holder.length].tolist()

    def check(self) -> None:
        tables = self.tables
        check_blocks(tables)
        for row, values in zip(tables.rows, self.rows, strict=True):
            assert row.length == len(values) and self.reads(row) == values
        for prompt, values in zip(tables.prompts, self.prompts, strict=True):
            assert prompt.length == len(values)
            assert prompt.rows == sum(row.prompt is prompt for row in tables.rows)
            if prompt.rows == 0 and prompt.block_table:
                assert self.reads(prompt) == values
        together: Counter[int] = Counter()
        for rows, pages in tables.shared_prefixes():
            together.update(rows)
            assert len(rows) > 1 and pages
            for row in rows:
                assert tables.rows[row].block_table[: len(pages)] == pages
                assert len(pages) * self.size <= tables.rows[row].prompt.length
        assert max(together.values(), default=1) == 1, "a row is read with one group alone"


OPERATIONS = {
    "add_prompt": 3,
    "add_row": 5,
    "come_back": 1,
    "draw": 6,
    "end_row": 3,
    "end_prompt": 1,
    "keep": 2,
    "begin": 4,
    "forget": 0.3,
}


def check_population(seeds: range, steps: int = 60) -> Counter:
    done: Counter[str] = Counter()
    weights = np.array(list(OPERATIONS.values())) / sum(OPERATIONS.values())
    for seed in seeds:
        memory = Memory(np.random.default_rng(seed))
        for name in memory.rng.choice(list(OPERATIONS), steps, p=weights).tolist():
            done[name] += getattr(memory, name)()
            memory.check()
        done["copies"] += memory.copies
        done["reused"] += memory.reused
        while memory.tables.rows:
            memory.end_row()
        while memory.tables.prompts:
            memory.end_prompt()
        assert memory.tables.pool.num_free == len(memory.tables.pool.ref_counts), "a page was lost"
    return done


def test_random_operations_leave_every_reader_its_contents():
    done = check_population(range(150))
    assert min(done[name] for name in (*OPERATIONS, "copies", "reused")) > 100, done


@pytest.mark.campaign
def test_random_operations_leave_every_reader_its_contents_in_many_runs():
    check_population(range(1000, 21_000))


def test_room_for_the_next_tokens_is_the_blocks_they_need():
    """The bound that avoids a loop over all rows never differs from the exact count."""
    outcomes = Counter()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        memory = Memory(rng)
        for _ in range(30):
            (memory.add_prompt if rng.random() < 0.3 else memory.add_row)()
            tables = memory.tables
            counts = rng.integers(1, 12, len(tables.rows)).tolist()
            fits = tables.blocks_needed(counts) <= tables.pool.num_free
            assert tables.fits(counts) == fits
            outcomes[fits] += len(tables.rows) > 1
    assert min(outcomes[True], outcomes[False]) > 50
