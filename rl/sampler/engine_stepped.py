"""Run the paged engine with several decode steps per host sync.

The device feeds and samples tokens and ends rows by itself. The samples equal those of the other
engines, because the random number of each token is known in advance. A step that admits requests,
and steps with truncated (top_k, top_p, min_p) or biased distributions, run as in `PagedEngine`.
Only the host can check stop strings; tokens sampled past a stop string are discarded.
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

LOOK = 8  # steps per host sync
_AHEAD = 8192  # tokens copied to the device in advance for the next prefills, plus a prompt


class SteppedEngine(PagedEngine):
    """Run `PagedEngine` with up to `look` tokens of each row in each `step`.

    Raises ValueError if several ranks split the decoder, or if `look` is less than 1.
    """

    def __init__(self, decoder: FastDecoder, *args: Any, look: int = LOOK, **settings: Any):
        if decoder.team is not None:
            raise ValueError(
                "several steps per host sync need a decoder on a single rank, and several ranks "
                "split this decoder: use the plain Engine"
            )
        super().__init__(decoder, *args, **settings)
        if look < 1:
            raise ValueError(f"look={look}: the steps per host sync are at least 1")
        self.look = look
        # upper bound on the tokens per row of the next `step`; None: `look`
        self.most: int | None = None
        self._steps: Steps | None = None
        # step buffers that hold the stop table, and the number of its rows that they hold
        self._told: tuple[StepBuffers | None, int] = (None, 0)
        # rows before the last processed step that remain after it
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
        """Process the tokens of a device step for the rows that ran in it, as the end of
        `Engine.step`.
        """
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

    # --------------------------------------------------------------------------- planning the steps

    def _lets_in(self) -> bool:
        """Return whether a request may be admitted now.

        Returns True if the cache holds conversations, because these can be evicted.
        """
        if not len(self._rows):
            return True
        if not self._waiting or self._parked or len(self._rows) >= self.max_rows:
            return False
        if any(prompt.conversation is not None for prompt in self._prompts):
            return True
        group, keys = self._waiting[0], [prompt.key for prompt in self._prompts]
        fresh = group.key not in keys
        longest = max(int(self._state.prompt_lengths.max(initial=0)), len(group.key[0]))
        return (
            self._how_many(group, len(keys) + fresh, longest, len(self._rows), group.max_tokens) > 0
        )

    def _without_cuts(self) -> bool:
        """Return whether no row truncates or biases its distribution."""
        rows, vocab = self._rows, self.decoder.vocab_size
        whole = (
            ((rows["top_k"] < 1) | (rows["top_k"] >= vocab))
            & (rows["top_p"] >= 1)
            & (rows["min_p"] <= 0)
        )
        return bool((whole | (rows["temperature"] == 0)).all() and not biased_rows(rows).any())

    def _left(self) -> np.ndarray:
        """Return the number of tokens that each row may still sample."""
        return self._rows["max_tokens"] - self._rows["drawn"]

    def _steps_ahead(self) -> int:
        """Return the number of steps that have blocks; 0 if a row must be preempted first."""
        tables, remaining = self._state.tables, self._left()
        count = min(self.look, self.most or self.look, int(remaining.max()))
        while count and tables.needed(np.minimum(remaining, count).tolist()) > tables.pool.free:
            count //= 2
        return count

    # ----------------------------------------------------------------------------------- the device

    def _run(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Run `count` steps of all rows and return tokens and logprobs [count, rows], with a single
        sync.
        """
        steps, rows, state = self._made(), len(self._rows), self._state
        remaining, written = (
            self._left(),
            state.prompt_lengths[state.prompt_of_row] + state.response_lengths,
        )
        state.copy_pages(
            [
                state.tables.grow(row, int(n))
                for row, n in zip(state.tables.rows, np.minimum(remaining, count), strict=True)
            ]
        )
        size, bucket = state.page, steps.bucket(rows)
        shared = state.tables.shared_pages()
        self._say_rows(steps.buffers, bucket, remaining, written, shared, size)
        self._say(steps.buffers.uniform[:count, :rows], self._rows.ahead(count))
        width = max(len(row.pages) for row in state.tables.rows)
        steps.run(bucket, min(width, steps.pages), bool(shared), count)
        self.looks += 1
        self._state.bring(self._who_is_next())  # overlaps with the device; the sync is below
        return self._wait(steps.buffers, count, rows)

    @staticmethod
    def _wait(b: StepBuffers, count: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Copy the tokens and logprobs to the host, which waits for the device."""
        sampled = (
            torch.stack(
                [tensor.double() for tensor in (b.tokens[:count, :rows], b.logprobs[:count, :rows])]
            )
            .cpu()
            .numpy()
        )
        return sampled[0].astype(np.int64), sampled[1]

    def _who_is_next(self) -> list[tuple[int, ...]]:
        """Return the sequences that may be prefilled after these steps, since any row may stop in
        them.

        Preempted rows come first, then the prompts of waiting requests.
        """
        known, sequences, positions, room = (
            {prompt.key for prompt in self._prompts},
            list[tuple[int, ...]](),
            0,
            self.max_rows,
        )
        for row in self._parked:
            if positions < _AHEAD:
                sequences.append(tuple(row.fed))
                positions += len(row.fed)
                room -= 1
        for group in self._waiting:
            if room < 1 or positions >= _AHEAD:
                break
            room -= group.request.num_samples - group.entered
            if group.key not in known and group.request.conversation is None:
                known.add(group.key)
                sequences.append(group.key[0])
                positions += len(group.key[0])
        return sequences

    def _made(self) -> Steps:
        """Return the step graphs of the present weights: a graph reads the weights that it was
        captured with.
        """
        table, state = self._stops.table, self._state
        limit = (
            self.kv_cache_tokens
            if self.max_context is None
            else min(self.max_context, self.kv_cache_tokens)
        )
        # the position of an ended row is one past its last token
        pages = state.tables.pages_for(limit) + 1
        steps = self._steps = self._pages.steps(
            state.decoder, self.max_rows, pages, self.look, len(table)
        )
        buffers, known_stops = self._told
        if buffers is not steps.buffers or known_stops < len(table):
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
        """Copy the present rows to the device.

        The padding rows of the bucket are marked as ended.
        """
        rows, tables = self._rows, [row.pages for row in self._state.tables.rows]
        groups = max(bucket // 2, 1)
        width = max(len(pages) for pages in tables)  # no row reads the table past this width
        skip, table, _, shared_fields = own_and_shared(
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
            name: shared_fields[name] for name in ("order", "place", "group", "shares")
        }
        for name, values in by_row.items():
            self._say(getattr(b, name)[:bucket], values)
        self._say(b.greedy[:bucket], _filled(greedy, bucket))
        self._say(
            b.temperature[:bucket],
            _filled(np.where(greedy, 1.0, rows["temperature"]).astype(np.float32), bucket, 1.0),
        )
        self._say(b.starts[: groups + 1], shared_fields["starts"])
        self._say(b.table[:bucket, :width], table)
        self._say(b.shared_table[:groups, :width], shared_fields["table"])
        self._say(b.shared_length[:groups], shared_fields["length"])

    @staticmethod
    def _say(to: Tensor, values: np.ndarray) -> None:
        """Copy an array to a device tensor without waiting."""
        to.copy_(torch.from_numpy(np.ascontiguousarray(values)), non_blocking=True)


def _filled(values: np.ndarray, count: int, rest: float = 0) -> np.ndarray:
    """Pad an array to `count` entries with `rest`.

    np.pad takes ten times as long, and the device would wait for it.
    """
    padded = np.full(count, rest, values.dtype)
    padded[: len(values)] = values
    return padded
