"""Run the engine over a paged KV cache: admit the rows that are expected to fit until they end, and
preempt the newest if they take more.

A preempted row keeps its sampled tokens and its position in its random stream. Its keys and values
are freed. It is resumed before any new request is admitted: prompt and response are prefilled
again, and sampling continues with the same samples. The oldest row is never preempted, and it fits
without any other row (`add` rejects requests that would not), so every request finishes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.sampler.block_manager import choose_pool_size, max_blocks
from rl.sampler.decode_state import compact_slots
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.kv_cache_pool import IdleKVCachePool
from rl.sampler.length_estimator import LengthEstimator, RowTable
from rl.sampler.paged_state import BLOCK_SIZE, PagedState
from rl.sampler.sampling_engine import Engine
from rl.sampler.sampling_requests import CachedPrompt, FinishedRequest, SequenceGroup
from rl.types import SampledSequence


@dataclass(frozen=True, slots=True)
class _PreemptedRow:
    """Hold a preempted row: its fields (a single row), its prompt, the prompt's length, all fed
    tokens.
    """

    fields: dict[str, np.ndarray]
    prompt: CachedPrompt
    prompt_length: int  # prompt tokens
    fed_tokens: list[int]
    experts: np.ndarray | None  # of the fed tokens, if recorded

    @property
    def age(self) -> tuple[int, int]:
        """Return (request id, sample index), which orders rows from oldest to newest."""
        return int(self.fields["job"][0]), int(self.fields["sample"][0])


class PagedEngine(Engine):
    """Run `Engine` over a pool of `kv_cache_tokens` positions in blocks of `page`; for the fast
    decoder.

    `kept` provides the pool, and receives it when the engine is closed. `sizes`: the sizes of all
    expected requests (`max_blocks`); the pool is smaller than the budget if they need less.
    None: unknown.
    """

    # whether rows are admitted only if all are expected to end without a preemption; if not, as
    # soon as blocks are free
    expects_lengths = True

    def __init__(
        self,
        decoder: FastDecoder,
        *args: Any,
        page: int = BLOCK_SIZE,
        kept: IdleKVCachePool | None = None,
        sizes: Iterable[tuple[int, int, int]] | None = None,
        **settings: Any,
    ):
        super().__init__(decoder, *args, **settings)
        self._idle_pool = kept or IdleKVCachePool()
        budget = max(self.kv_cache_tokens // page, 1)
        need = None if sizes is None else max_blocks(sizes, page, self.max_rows)
        self._pool = self._idle_pool.take(decoder, choose_pool_size(budget, need), budget, page)
        self._state: PagedState = PagedState(decoder, self._pool.kv)
        self._state.records_experts = self.records_experts
        self._preempted: list[_PreemptedRow] = []  # oldest first
        self._lengths = LengthEstimator()
        self.preemptions = 0
        self._has_non_finite = False

    def close(self) -> None:
        """Release the pool to the next engine, unless it holds NaN or infinity.

        Attention multiplies masked values by 0, and 0 times NaN is NaN. No request may follow.
        """
        if self._state.kv:
            self._state.kv = []
            if not self._has_non_finite:
                self._idle_pool.store(self._pool)

    @torch.inference_mode()
    def step(self) -> list[FinishedRequest]:
        self._resume()
        self._preempt_newest()
        return super().step()

    def _handle_non_finite(self, tokens: np.ndarray, non_finite: np.ndarray) -> None:
        self._has_non_finite = True
        super()._handle_non_finite(tokens, non_finite)

    def _admit(self) -> list[Tensor]:
        return [] if self._preempted else super()._admit()

    def _used_cache_tokens(self, *batch: int) -> int:
        """Return the positions of the blocks in use."""
        pool = self._state.block_manager.pool
        return (len(pool.ref_counts) - pool.num_free) * self._state.block_size

    def _count_admissible(
        self,
        group: SequenceGroup,
        prompts: int,
        longest_prompt: int,
        rows: int,
        longest_response: int,
    ) -> int:
        """Return the number of the group's waiting samples that fit now, in blocks.

        Counts the blocks of the new prompts, a block for each new row, and the next blocks of the
        running rows.
        """
        tables = self._state.block_manager
        count = min(group.request.num_samples - group.num_admitted, self.max_rows - rows)
        reads = prompts - len(self._prompts)
        if any(prompt.conversation is not None for prompt in self._prompts):
            # each new row may extend a conversation, which copies a block or allocates new blocks
            reads += rows - len(self._rows) + 1
        prompt_blocks = reads * tables.num_blocks_for(longest_prompt)
        planned = rows - len(self._rows)
        room = tables.pool.num_free - prompt_blocks - planned - tables.blocks_needed()
        count = min(count, room)
        if count > 0 and self.expects_lengths:
            count = self._count_expected(group, count, planned, prompt_blocks, longest_prompt)
        if rows == 0 and prompts <= 1:
            count = max(count, 1)  # a single row fits
        return max(count, 0)

    def _count_expected(
        self, group: SequenceGroup, count: int, planned: int, prompt_blocks: int, prompt: int
    ) -> int:
        """Return how many of `count` samples of the group fit with what all rows are expected to
        take until they end.

        `planned`: rows that are to be admitted before them, `prompt_blocks`: blocks of the prompts
        that are to be prefilled, `prompt`: length of the longest of them.
        """
        tables, rows, size = self._state.block_manager, self._rows, self._state.block_size
        sampled, remaining = rows["drawn"], rows["max_tokens"] - rows["drawn"]
        written = np.array([row.length for row in tables.rows], np.int64)
        shared = np.array(
            [row.prompt.length // size * (row.prompt.rows > 1) for row in tables.rows], np.int64
        )
        longest = max(int(remaining.max(initial=0)), group.max_tokens)
        running = self._lengths.blocks(
            RowTable(written, sampled, remaining, shared), size, sampled, longest
        )
        sample = RowTable(
            *(np.array([number]) for number in (prompt, 0, group.max_tokens, prompt // size))
        )
        candidates = planned + np.arange(1, count + 1)
        peak = running.upper(self._lengths.blocks(sample, size, sampled, longest), candidates)
        # blocks of prompts; rows that have not written yet still share the last of them
        pool, prompts = tables.pool, tables.prompts
        in_prompts = sum(
            len(slot.block_table) if slot.rows == 0 else slot.length // size * (slot.rows > 1)
            for slot in prompts
        )
        used = len(pool.ref_counts) - pool.num_free
        held = max(in_prompts, used - int(running.most[0]))
        return int((held + prompt_blocks + peak <= len(pool.ref_counts)).sum())

    def _retire(self, ended: np.ndarray, stopped: np.ndarray) -> list[FinishedRequest]:
        if ended.any():
            self._lengths.record(self._rows["drawn"][ended], stopped[ended])
        return super()._retire(ended, stopped)

    # ---------------------------------------------------------------------------- between two steps

    @torch.inference_mode()
    def change_weights(self, decoder: Decoder, version: int) -> None:
        """Change the weights as `Engine.change_weights`.

        Preempted rows are prefilled with the new weights when they are resumed.
        """
        self._rows.record_version(self.version, [row.fields for row in self._preempted])
        preempted_prompts = {
            id(row.prompt): row.prompt
            for row in self._preempted
            if not any(row.prompt is prompt for prompt in self._prompts)
        }
        super().change_weights(decoder, version)
        # The cached logits are of the old weights: no new row may start from them.
        for number, prompt in enumerate(preempted_prompts.values()):
            prompt.key = ("of other weights", "away", number, prompt.key)

    @torch.inference_mode()
    def cancel(self, request_id: int) -> None:
        dropped = [row for row in self._preempted if row.age[0] == request_id]
        self._preempted = [row for row in self._preempted if row.age[0] != request_id]
        super().cancel(request_id)
        running = len(self._rows)
        for row in dropped:
            self._rows.restore(row.fields)
        self._rows.keep_rows(np.arange(running))

    def partial_samples(
        self, request_ids: Collection[int] | None = None
    ) -> dict[int, dict[int, SampledSequence]]:
        running = len(self._rows)
        for row in self._preempted:
            self._rows.restore(row.fields)
        partial = super().partial_samples(request_ids)
        self._rows.reorder(np.arange(running))
        return partial

    def _get_experts(self, row: int) -> np.ndarray | None:
        """Return the experts of a row; those of preempted rows follow in `partial_samples`."""
        running = len(self._state.prompt_of_row)
        if row >= running:
            return self._preempted[row - running].experts
        return super()._get_experts(row)

    # -------------------------------------------------------------------------------------- waiting

    def _preempt_newest(self) -> None:
        """Preempt the newest rows until the next tokens of the remaining rows have blocks."""
        tables = self._state.block_manager
        while len(self._rows) and tables.blocks_needed() > tables.pool.num_free:
            ages = list(zip(self._rows["job"].tolist(), self._rows["sample"].tolist(), strict=True))
            idle = [slot for slot, prompt in enumerate(tables.prompts) if prompt.rows == 0]
            if idle:
                # Evict prompts without running rows. They are prefilled again when needed.
                self._keep_rows(np.ones(len(ages), np.bool_))
                continue
            if len(ages) == 1:
                raise RuntimeError(
                    f"a row needs more than {len(tables.pool.ref_counts)} blocks of the cache: "
                    "`add` should have rejected it"
                )
            newest = max(range(len(ages)), key=ages.__getitem__)
            self._preempt(newest)

    def _preempt(self, row: int) -> None:
        """Preempt a row."""
        prompt, group = (
            self._prompts[int(self._state.prompt_of_row[row])],
            self._running[int(self._rows["job"][row])],
        )
        fed_tokens = self._rows.response(row)[0][:-1].tolist()  # the next step feeds the last token
        keep = np.ones(len(self._rows), np.bool_)
        keep[row] = False
        preempted = _PreemptedRow(
            self._rows.preempt(np.array([row])),
            prompt,
            len(group.key[0]),
            [*group.request.prompt, *fed_tokens],
            self._state.experts_of_row(row),
        )
        self._preempted = sorted([*self._preempted, preempted], key=lambda item: item.age)
        self._keep_rows(keep)
        self.preemptions += 1

    def _keep_rows(self, keep: np.ndarray) -> None:
        """Keep the rows of the mask and their prompts; remove all other rows and prompts."""
        source = compact_slots(keep)
        if not keep.all():
            self._rows.reorder(source)
        used = np.zeros(len(self._prompts), np.bool_)
        used[self._state.prompt_of_row[source]] = True
        prompt_source = compact_slots(used)
        self._prompts = [self._prompts[slot] for slot in prompt_source]
        self._state.retain(source, prompt_source)
        self._settings = None

    def _resume(self) -> None:
        """Resume preempted rows, oldest first, while they and the next token of each row have
        blocks.
        """
        tables = self._state.block_manager
        while self._preempted and len(self._rows) < self.max_rows:
            first = self._preempted[0]
            if (
                tables.num_blocks_for(len(first.fed_tokens)) + 1 + tables.blocks_needed()
                > tables.pool.num_free
            ):
                if len(self._rows):
                    return
                # A single row fits if prompts without running rows are evicted. They are prefilled
                # again when needed.
                self._keep_rows(np.ones(0, np.bool_))
            self._preempted.pop(0)
            slot = self._find_slot(first.prompt)
            if slot is None:
                slot = len(self._prompts)
                self._prompts.append(first.prompt)
                length, experts = first.prompt_length, first.experts
                prompt_experts = None if experts is None else experts[:length]
                self._state.add_prompt_slot(length, first.prompt.adapter_id, prompt_experts)
            self._state.resume_row(slot, first.fed_tokens, first.experts)
            self._rows.restore(first.fields)
            self._settings = None

    def _find_slot(self, prompt: CachedPrompt) -> int | None:
        """Return the slot of a prompt with this key, or None."""
        keys: Sequence[tuple] = [candidate.key for candidate in self._prompts]
        return keys.index(prompt.key) if prompt.key in keys else None
