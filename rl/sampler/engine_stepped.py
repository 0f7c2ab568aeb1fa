"""The engine over pages with several steps between two looks of the host: the device feeds, draws
and ends by itself.

The samples are those of the other engines, since each token's random number is known before. A step
that lets requests in, and rows whose distribution is cut or biased, go the way of `PagedEngine`;
stop strings, which only the host can read, cut what was drawn past them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.sampler.attention_paged import own_and_shared
from rl.sampler.biases import biased_rows
from rl.sampler.cache import compaction
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.engine_paged import PagedEngine
from rl.sampler.requests import Finished
from rl.sampler.step_buffers import StepBuffers
from rl.sampler.step_graphs import Steps

LOOK = 8  # steps between two looks
_AHEAD = 8192  # tokens that are brought to the device for what comes in next, and a prompt


class SteppedEngine(PagedEngine):
    """As `PagedEngine`, with up to `look` tokens of each row in one `step`."""

    def __init__(self, decoder: FastDecoder, *args: Any, look: int = LOOK, **settings: Any):
        if decoder.team is not None:
            raise ValueError(
                "steps that run by themselves are of one rank, and several hold this decoder together: take the plain Engine"
            )
        super().__init__(decoder, *args, **settings)
        if look < 1:
            raise ValueError(f"look={look}: the host looks after 1 step or more")
        self.look = look
        # a bound for the next `step`, where it matters to the caller how far it goes
        self.most: int | None = None
        self._steps: Steps | None = None
        # which of them know how many rows of the stop table
        self._told: tuple[StepBuffers | None, int] = (None, 0)
        # which of the rows before the last step looked at are there after it
        self._stayed = np.zeros(0, np.int64)
        self.looks = 0

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        self._come_back()
        count = 0 if self._lets_in() or not self._without_cuts() else self._steps_ahead()
        if count < 1:
            return super().step()
        tokens, logprobs = self._run(count)
        finished: list[Finished] = []
        columns = np.arange(len(self._rows))
        for token_R, logprob_R in zip(tokens, logprobs, strict=True):
            if len(columns):
                finished += self._look_at(token_R[columns], logprob_R[columns])
                columns = columns[self._stayed]
        return finished

    def _look_at(self, tokens: np.ndarray, logprobs: np.ndarray) -> list[Finished]:
        """What one step of the device gave the rows that were there: as the end of `Engine.step`."""
        tokens, bad = tokens.copy(), np.isnan(logprobs)
        if bad.any():
            self._no_numbers(tokens, bad)
        counters, rows = self.counters, len(self._rows)
        self._rows.record(tokens, logprobs)
        self._state.response_lengths = self._state.response_lengths + 1
        counters.fed_tokens += rows
        counters.steps += 1
        counters.decoded_rows += rows
        ended, stopped = self._ended(tokens)
        self._stayed = compaction(~ended)
        return self._retire(ended, stopped)

    # ------------------------------------------------------------------------- whether, and how far

    def _lets_in(self) -> bool:
        """Whether a request may come in now; with conversations in the cache, which make room for
        one, it is tried.
        """
        if not len(self._rows):
            return True
        if not self._waiting or self._parked or len(self._rows) >= self.max_rows:
            return False
        if any(prompt.conversation is not None for prompt in self._prompts):
            return True
        job, keys = self._waiting[0], [prompt.key for prompt in self._prompts]
        fresh = job.key not in keys
        longest = max(int(self._state.prompt_lengths.max(initial=0)), len(job.key[0]))
        return self._how_many(job, len(keys) + fresh, longest, len(self._rows), job.max_tokens) > 0

    def _without_cuts(self) -> bool:
        rows, vocab = self._rows, self.decoder.vocab_size
        whole = (
            ((rows["top_k"] < 1) | (rows["top_k"] >= vocab))
            & (rows["top_p"] >= 1)
            & (rows["min_p"] <= 0)
        )
        return bool((whole | (rows["temperature"] == 0)).all() and not biased_rows(rows).any())

    def _left(self) -> np.ndarray:
        return self._rows["max_tokens"] - self._rows["drawn"]

    def _steps_ahead(self) -> int:
        """How many steps have pages; 0: some row has to wait first."""
        tables, left = self._state.tables, self._left()
        count = min(self.look, self.most or self.look, int(left.max()))
        while count and tables.needed(np.minimum(left, count).tolist()) > tables.pool.free:
            count //= 2
        return count

    # ----------------------------------------------------------------------------------- the device

    def _run(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`count` steps of all rows: tokens and logprobs [count, rows]. One wait."""
        steps, rows, state = self._made(), len(self._rows), self._state
        left, written = (
            self._left(),
            state.prompt_lengths[state.prompt_of_row] + state.response_lengths,
        )
        state.copy_pages(
            [
                state.tables.grow(row, int(n))
                for row, n in zip(state.tables.rows, np.minimum(left, count), strict=True)
            ]
        )
        size, bucket = state.page, steps.bucket(rows)
        shared = state.tables.shared_pages()
        self._say_rows(steps.buffers, bucket, left, written, shared, size)
        self._say(steps.buffers.uniform[:count, :rows], self._rows.ahead(count))
        width = max(len(row.pages) for row in state.tables.rows)
        steps.run(bucket, min(width, steps.pages), bool(shared), count)
        self.looks += 1
        self._state.bring(self._who_is_next())  # while the device works: the wait comes below
        return self._wait(steps.buffers, count, rows)

    @staticmethod
    def _wait(b: StepBuffers, count: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        both = (
            torch.stack(
                [one.double() for one in (b.tokens[:count, :rows], b.logprobs[:count, :rows])]
            )
            .cpu()
            .numpy()
        )
        return both[0].astype(np.int64), both[1]

    def _who_is_next(self) -> list[tuple[int, ...]]:
        """What may be read after these steps, since any row may stop in them: of rows that wait,
        then prompts of who is next in line.
        """
        known, found, positions, room = (
            {prompt.key for prompt in self._prompts},
            list[tuple[int, ...]](),
            0,
            self.max_rows,
        )
        for one in self._parked:
            if positions < _AHEAD:
                found.append(tuple(one.fed))
                positions += len(one.fed)
                room -= 1
        for job in self._waiting:
            if room < 1 or positions >= _AHEAD:
                break
            room -= job.request.num_samples - job.entered
            if job.key not in known and job.request.conversation is None:
                known.add(job.key)
                found.append(job.key[0])
                positions += len(job.key[0])
        return found

    def _made(self) -> Steps:
        """Of the weights as they are now: a graph reads those that it was captured with."""
        table, state = self._stops.table, self._state
        limit = (
            self.kv_cache_tokens
            if self.max_context is None
            else min(self.max_context, self.kv_cache_tokens)
        )
        # a row that has ended stands one position past its last
        pages = state.tables.pages_for(limit) + 1
        steps = self._steps = self._pages.steps(
            state.decoder, self.max_rows, pages, self.look, len(table)
        )
        buffers, told = self._told
        if buffers is not steps.buffers or told < len(table):
            self._say(steps.buffers.stops[: len(table)], table)
            self._told = (steps.buffers, len(table))
        return steps

    def _say_rows(
        self,
        b: StepBuffers,
        bucket: int,
        left: np.ndarray,
        written: np.ndarray,
        shared: list[tuple[list[int], list[int]]],
        size: int,
    ) -> None:
        """The rows as they are now; those of the bucket that are nobody's have ended."""
        rows, tables = self._rows, [row.pages for row in self._state.tables.rows]
        groups = max(bucket // 2, 1)
        width = max(len(pages) for pages in tables)  # what lies behind it nobody reads
        skip, table, _, together = own_and_shared(
            tables, written + 1, shared, size, bucket, groups, width
        )
        greedy = rows["temperature"] == 0
        padded: dict[str, np.ndarray] = {
            "token": rows.last_tokens(),
            "position": written,
            "left": left,
            "stop_row": rows["stop_row"],
        }
        for name, values in padded.items():
            self._say(getattr(b, name)[:bucket], _filled(values, bucket))
        by_row = {"skip": skip} | {
            name: together[name] for name in ("order", "place", "group", "shares")
        }
        for name, values in by_row.items():
            self._say(getattr(b, name)[:bucket], values)
        self._say(b.greedy[:bucket], _filled(greedy, bucket))
        self._say(
            b.temperature[:bucket],
            _filled(np.where(greedy, 1.0, rows["temperature"]).astype(np.float32), bucket, 1.0),
        )
        self._say(b.starts[: groups + 1], together["starts"])
        self._say(b.table[:bucket, :width], table)
        self._say(b.shared_table[:groups, :width], together["table"])
        self._say(b.shared_length[:groups], together["length"])

    @staticmethod
    def _say(to: Tensor, values: np.ndarray) -> None:
        to.copy_(torch.from_numpy(np.ascontiguousarray(values)), non_blocking=True)


def _filled(values: np.ndarray, count: int, rest: float = 0) -> np.ndarray:
    """`count` of them, the last ones `rest`. numpy's pad takes ten times as long, for which the
    device would wait.
    """
    found = np.full(count, rest, values.dtype)
    found[: len(values)] = values
    return found
