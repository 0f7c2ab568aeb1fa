"""Estimate how many blocks the running rows will take, from the lengths of the finished samples.

The chance that a sample ends within a span of SPAN tokens, if it reaches the span, is estimated as
by Kaplan and Meier (1958): the samples that stopped in it divided by those that reached it, where
samples that still run or reached their limit count as half. Spans that few samples have reached
take the mean chance of all spans. Chances are lowered by two standard deviations. Until a sample
has stopped, every sample is expected to reach its limit. Shapes: N rows, T points in time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rl.sampler.block_manager import BlockManager
from rl.sampler.running_rows import RunningRows

SPAN = 64  # tokens
_MIN_EXPOSURE = 8  # samples that must have reached a span
_MAX_POINTS = 32  # points in time of a forecast
_DEVIATIONS = 2.0  # standard deviations on the safe side, of a forecast and of each chance


class RowTable(NamedTuple):
    """Hold what is known of rows, all int64 [N]."""

    written: np.ndarray  # positions
    sampled: np.ndarray  # tokens
    remaining: np.ndarray  # tokens until the limit
    shared: np.ndarray  # full blocks that are shared with the group


class BlockRequirement(NamedTuple):
    """Hold the blocks that rows take at the points in time of a forecast, all [T]."""

    mean: np.ndarray
    variance: np.ndarray
    most: np.ndarray  # if no row stops before its limit

    def upper(self, more: BlockRequirement, counts: np.ndarray) -> np.ndarray:
        """Return the blocks to reserve for these rows and `counts` [C] times the rows of `more`, at
        the worst point in time, [C].
        """
        times = counts[:, None]
        mean, variance = self.mean + times * more.mean, self.variance + times * more.variance
        reserved = np.minimum(mean + _DEVIATIONS * variance**0.5, self.most + times * more.most)
        return reserved.max(1)


class LengthEstimator:
    """Hold the lengths of the finished samples of an engine."""

    def __init__(self) -> None:
        self._stopped = np.zeros(1, np.int64)  # by span, samples that stopped
        self._cut = np.zeros(1, np.int64)  # by span, samples that reached their limit

    def record(self, lengths: np.ndarray, stopped: np.ndarray) -> None:
        """Add finished samples: their tokens, and whether they stopped before their limit."""
        spans = (lengths - 1) // SPAN
        size = max(len(self._stopped), int(spans.max(initial=0)) + 1)
        counts = [np.bincount(spans[chosen], minlength=size) for chosen in (stopped, ~stopped)]
        for count, before in zip(counts, (self._stopped, self._cut), strict=True):
            count[: len(before)] += before
        self._stopped, self._cut = counts

    def log_survival(self, running: np.ndarray, spans: int) -> np.ndarray:
        """Return the log of the chance to reach the end of each of the first `spans` spans,
        [spans + 1]; the first entry is 0. `running`: the tokens of the samples that still run.
        """
        size = max(spans, len(self._stopped), int(running.max(initial=0)) // SPAN + 1)
        stopped, cut = (np.pad(n, (0, size - len(n))) for n in (self._stopped, self._cut))
        censored = cut + np.bincount(running // SPAN, minlength=size)
        reached = np.cumsum((stopped + censored)[::-1])[::-1]
        exposed = np.maximum(reached - 0.5 * censored, stopped)
        certain, all_certain = (
            np.maximum(count - _DEVIATIONS * count**0.5, 0) for count in (stopped, stopped.sum())
        )
        chance = np.where(
            exposed >= _MIN_EXPOSURE,
            certain / np.maximum(exposed, 1),
            all_certain / max(exposed.sum(), 1),
        )
        logs = np.log1p(-np.minimum(chance, 0.999))
        return np.concatenate([[0.0], np.cumsum(logs)])[: spans + 1]

    def count_expected(
        self,
        block_manager: BlockManager,
        rows: RunningRows,
        max_tokens: int,
        count: int,
        planned: int,
        prompt_blocks: int,
        prompt: int,
    ) -> int:
        """Return how many of `count` new samples of `max_tokens` fit with what all `rows` are
        expected to take until they end.

        `planned`: rows that are to be admitted before them, `prompt_blocks`: blocks of the prompts
        that are to be prefilled, `prompt`: length of the longest of them.
        """
        pool, size = block_manager.pool, block_manager.block_size
        sampled, remaining = rows["num_sampled"], rows["max_tokens"] - rows["num_sampled"]
        written, shared = block_manager.rows["length"], block_manager.count_shared()
        longest = max(int(remaining.max(initial=0)), max_tokens)
        running = self.blocks(RowTable(written, sampled, remaining, shared), size, sampled, longest)
        sample = RowTable(
            *(np.array([number]) for number in (prompt, 0, max_tokens, prompt // size))
        )
        candidates = planned + np.arange(1, count + 1)
        peak = running.upper(self.blocks(sample, size, sampled, longest), candidates)
        # blocks of prompts; rows that have not written yet still share the last of them
        in_prompts = sum(
            len(slot.block_table) if slot.rows == 0 else slot.length // size * (slot.rows > 1)
            for slot in block_manager.prompts
        )
        used = len(pool.ref_counts) - pool.num_free
        held = max(in_prompts, used - int(running.most[0]))
        return int((held + prompt_blocks + peak <= len(pool.ref_counts)).sum())

    def blocks(
        self, rows: RowTable, block_size: int, running: np.ndarray, longest: int
    ) -> BlockRequirement:
        """Return the private blocks of rows from now until `longest` more tokens. `running`: the
        tokens of all running samples.
        """
        written, sampled, remaining, shared = rows
        stride = -(-max(longest // SPAN + 1, 1) // _MAX_POINTS)  # spans between two points
        times = np.arange(0, longest + stride * SPAN, stride * SPAN)
        spans = sampled // SPAN
        chances = self.log_survival(running, int(spans.max(initial=0)) + len(times) * stride)
        later = spans[:, None] + stride * np.arange(len(times))
        alive = np.exp(chances[later] - chances[spans][:, None])
        # a row whose limit lies between two points still counts at the later one
        reaches = times - stride * SPAN < remaining[:, None]
        positions = written[:, None] + np.minimum(times, remaining[:, None])
        blocks = (-(-positions // block_size) - shared[:, None]) * reaches
        mean = alive * blocks
        return BlockRequirement(
            mean.sum(0), (mean * (1 - alive) * blocks).sum(0), blocks.sum(0).astype(np.float64)
        )
