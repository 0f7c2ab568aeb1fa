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

from rl.sampler.block_manager import BlockManager, OutOfBlocks, PromptBlockTable
from rl.sampler.prefix_cache import hash_chunks


def check_blocks(tables: BlockManager) -> None:
    """Check that the reference counts match the holders, and that at most 1.1 times the tokens plus
    a page per row are allocated. A prompt that waits for rows counts as a row.
    """
    prompts, lengths = tables.prompts, tables.rows["length"].tolist()
    rows = [tables.row_table(row) for row in range(len(lengths))]
    held = Counter(itertools.chain(*rows, *(prompt.block_table for prompt in prompts)))
    counts = tables.pool.ref_counts.tolist()
    assert [held[page] for page in range(len(counts))] == counts
    assert tables.pool.num_free == counts.count(0)
    full = {
        page
        for row, length in zip(rows, lengths, strict=True)
        for page in row[: length // tables.block_size]
    }
    ends = sum(length % tables.block_size for length in lengths)
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
        self.reused = self.together = self.apart = 0
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
        count = int(self.rng.choice([1, 1, 3]))
        self.tables.add_rows(slot, count)
        self.rows += [list(self.prompts[slot]) for _ in range(count)]
        return True

    def come_back(self) -> bool:
        """Resume a preempted row: prefill its tokens again into fresh pages."""
        slot = self.pick(list(range(len(self.prompts))))
        if slot is None:
            return False
        values = [*self.prompts[slot], *self.numbers(int(self.rng.integers(0, 2 * self.size + 1)))]
        if self.tables.num_blocks_for(len(values)) > self.tables.pool.num_free:
            return False
        blocks = self.tables.allocate_table(len(values)).block_table
        self.tables.add_resumed_row(slot, len(values), blocks)
        self.write(blocks, 0, values)
        self.rows.append(values)
        return True

    def draw(self) -> bool:
        """Append a single token or several tokens to every row."""
        tables = self.tables
        most = 2 if self.rng.random() < 0.5 else 2 * self.size + 2
        counts = self.rng.integers(int(self.rng.integers(2)), most, len(tables.rows))
        if not len(counts) or tables.blocks_needed(counts) > tables.pool.num_free:
            return False
        before, copies = tables.pool.num_free, self.copies
        taken = tables.blocks_needed(counts)
        for move in tables.append_positions(counts):
            self.copy(move)
        for row, (values, count) in enumerate(zip(self.rows, counts.tolist(), strict=True)):
            new = self.numbers(count)
            self.write(tables.row_table(row), len(values), new)
            values += new
        assert before - tables.pool.num_free == taken, (before, taken, self.copies - copies)
        return True

    def drop(self) -> bool:
        """Drop the newest positions of every row that are not of its prompt, or some of them."""
        slots = self.tables.rows["prompt"].tolist()
        most = [
            len(row) - len(self.prompts[slot]) for row, slot in zip(self.rows, slots, strict=True)
        ]
        counts = self.rng.integers(0, np.array(most, np.int64) + 1)
        self.tables.drop_positions(counts)
        for row, count in zip(self.rows, counts.tolist(), strict=True):
            del row[len(row) - count :]
        return bool(counts.any())

    def end_rows(self) -> bool:
        """End some rows, or all rows of a prompt; the others move."""
        slots = self.tables.rows["prompt"]
        keeps = self.rng.random(len(slots)) < 0.8
        if self.rng.random() < 0.5:
            keeps = slots != self.rng.integers(len(self.prompts) + 1)
        source = self.rng.permutation(np.flatnonzero(keeps))
        self.tables.retain_rows(source)
        self.rows = [self.rows[row] for row in source]
        return not keeps.all()

    def end_prompts(self) -> bool:
        """End the prompts without rows, or some of them; the others move."""
        keeps = [p.rows > 0 or self.rng.random() < 0.5 for p in self.tables.prompts]
        source = self.rng.permutation(np.flatnonzero(keeps))
        self.tables.retain_prompts(source)
        self.prompts = [self.prompts[slot] for slot in source]
        return not all(keeps)

    def hashes(self, values: list[int]) -> list[bytes]:
        return hash_chunks(values, "", self.tables.chunk_size)

    def keep(self) -> bool:
        """Let later sequences begin with the tokens of a row, or with some of them."""
        index = self.pick(list(range(len(self.rows))))
        if index is None:
            return False
        text = self.rows[index][: int(self.rng.integers(1, len(self.rows[index]) + 1))]
        self.tables.register(self.tables.row_table(index), self.hashes(text))
        self.texts.append(text)
        return True

    def begin(self) -> bool:
        """Add a prompt that begins as an earlier sequence. Only the other tokens are written."""
        text = self.texts[int(self.rng.integers(len(self.texts)))] if self.texts else []
        shared = text[: int(self.rng.integers(0, len(text) + 1))]
        values = [*shared, *self.numbers(int(self.rng.integers(1, 2 * self.size + 2)))]
        tables, hashes = self.tables, self.hashes(values)
        offered = hashes[: (len(values) - 1) // tables.chunk_size]
        before = tables.pool.num_free, tables.pool.ref_counts.tolist()
        try:
            allocation = tables.allocate_table(len(values), offered)
        except OutOfBlocks:
            assert before == (tables.pool.num_free, tables.pool.ref_counts.tolist())
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

    def reads(self, blocks: list[int], length: int) -> list[int]:
        return self.pages[blocks].ravel()[:length].tolist()

    def check(self) -> None:
        tables, rows = self.tables, self.tables.rows
        check_blocks(tables)
        blocks = [tables.row_table(row) for row in range(len(rows))]
        assert rows["length"].tolist() == [len(values) for values in self.rows]
        for row, values in zip(blocks, self.rows, strict=True):
            assert self.reads(row, len(values)) == values
        for slot, (prompt, values) in enumerate(zip(tables.prompts, self.prompts, strict=True)):
            assert prompt.length == len(values)
            assert prompt.rows == np.count_nonzero(rows["prompt"] == slot)
            if prompt.rows == 0 and prompt.block_table:
                assert self.reads(prompt.block_table, len(values)) == values
        group, shared = (values.tolist() for values in tables.shared_prefixes())
        for number in range(max(group, default=-1) + 1):
            members = [row for row in range(len(rows)) if group[row] == number]
            assert len(members) > 1, "no number is left out, and no row is in a group alone"
            (count,) = {shared[row] for row in members}
            assert count > 0 and len({tuple(blocks[row][:count]) for row in members}) == 1
            for row in members:
                assert count * self.size <= len(self.prompts[rows["prompt"][row]])
        assert not any(count for count, number in zip(shared, group, strict=True) if number < 0)
        # rows of a prompt that have its blocks are together
        for row, other in itertools.combinations(range(len(rows)), 2):
            full = len(self.prompts[rows["prompt"][row]]) // self.size
            same = rows["prompt"][row] == rows["prompt"][other] and full
            if same and blocks[row][:full] == blocks[other][:full]:
                self.together += group[row] == group[other] >= 0
                self.apart += group[row] != group[other] or group[row] < 0


OPERATIONS = {
    "add_prompt": 3,
    "add_row": 5,
    "come_back": 1,
    "draw": 6,
    "drop": 1,
    "end_rows": 3,
    "end_prompts": 1,
    "keep": 4,
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
        done["together"] += memory.together
        done["apart"] += memory.apart
        memory.tables.retain_rows(np.arange(0))
        memory.tables.retain_prompts(np.arange(0))
        assert memory.tables.pool.num_free == len(memory.tables.pool.ref_counts), "a page was lost"
    return done


def test_random_operations_leave_every_reader_its_contents():
    done = check_population(range(150))
    assert min(done[name] for name in (*OPERATIONS, "copies", "reused")) > 100, done
    assert done["apart"] * 100 < done["together"], done


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
            counts = rng.integers(1, 12, len(tables.rows))
            fits = tables.blocks_needed(counts) <= tables.pool.num_free
            assert tables.fits(counts) == fits
            outcomes[fits] += len(tables.rows) > 1
    assert min(outcomes[True], outcomes[False]) > 50


def test_rows_that_differ_before_an_equal_block_do_not_share_it_as_a_group():
    """A block may be found after another block with the same tokens: here [0, 2], beside [1, 2]."""
    tables, hashes = BlockManager(8, 4), hash_chunks(range(9), "", 4)
    first, second = tables.allocate_table(4), tables.allocate_table(9)
    tables.register(first.block_table, hashes[:1])
    tables.register(second.block_table, hashes)
    third = tables.allocate_table(9, hashes)
    assert third.block_table[:2] == [first.block_table[0], second.block_table[1]]
    for slot, allocation in enumerate((second, third)):
        tables.prompts.append(PromptBlockTable(9, allocation.block_table))
        tables.add_rows(slot, 2)
    group, shared = tables.shared_prefixes()
    assert (group.tolist(), shared.tolist()) == ([0, 0, -1, -1], [2, 2, 0, 0])
