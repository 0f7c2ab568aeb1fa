"""Decide which samples run. A sample is waiting, running, preempted or finished.

Requests are admitted in the order in which they were added, as far as the KV cache has room. Over a
contiguous cache a row is admitted if its longest response fits. Over a paged cache
(block_manager.py) rows are admitted that are expected to fit until they end, and the newest are
preempted if they take more. A preempted row keeps its sampled tokens and its position in its random
stream. Its keys and values are freed. It is resumed before any new request is admitted: prompt and
response are prefilled again, and sampling continues with the same samples. The oldest row is never
preempted, and it fits without any other row (`Engine.add` rejects requests that would not), so
every request finishes.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.errors import ContextLengthError, UserError
from rl.sampler.block_manager import BlockManager, choose_pool_size, max_blocks
from rl.sampler.decode_state import BatchSize, Prompt, compact_slots
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.kv_cache_pool import IdleKVCachePool, KVCachePool
from rl.sampler.length_estimator import LengthEstimator
from rl.sampler.paged_state import PagedState
from rl.sampler.prefix_cache import hash_chunks
from rl.sampler.running_rows import RunningRows
from rl.sampler.sampling_requests import (
    EngineCounters,
    SamplingRequest,
    SequenceGroup,
    make_prompt_reader,
)


@dataclass(frozen=True, slots=True)
class _PreemptedRow:
    """Hold a preempted row: its fields (a single row), its prompt, all fed tokens."""

    fields: dict[str, np.ndarray]
    prompt: Prompt
    fed_tokens: list[int]
    experts: np.ndarray | None  # of the fed tokens, if recorded

    @property
    def age(self) -> tuple[int, int]:
        """Return (request id, sample index), which orders rows from oldest to newest."""
        return int(self.fields["request_id"][0]), int(self.fields["sample"][0])


def _add_group(size: BatchSize, group: SequenceGroup, fresh: bool) -> BatchSize:
    """Return the size of a batch with the positions of a waiting group and, if `fresh`, its prompt,
    without its rows.
    """
    return BatchSize(
        size.prompts + fresh,
        max(size.longest_prompt, len(group.key[0])),
        size.rows,
        max(size.longest_response, group.max_tokens - 1 - group.num_resumed),
    )


class Scheduler:
    """Hold the samples of an engine and its KV cache, and prefill what it admits: the base class of
    `Engine`.

    `block_size`, `idle_pool`, `sizes`: see `Engine`. Keys and values are also kept of prompts and
    rows that have ended, for prompts that begin with the same tokens (prefix_cache.py). They take
    only room that nothing else needs.
    """

    # whether rows are admitted only if all are expected to end without a preemption; if not, as
    # soon as blocks are free
    expects_lengths = True
    max_context: int | None  # most fed tokens of a sequence, set by the engine

    def __init__(
        self,
        decoder: Decoder,
        kv_cache_tokens: int,
        max_rows: int,
        block_size: int | None,
        idle_pool: IdleKVCachePool | None,
        sizes: Iterable[tuple[int, int, int]] | None,
        enable_prefix_caching: bool,
    ):
        self.decoder, self.kv_cache_tokens, self.max_rows = decoder, kv_cache_tokens, max_rows
        self.counters = EngineCounters()
        self.preemptions = 0
        self._waiting: deque[SequenceGroup] = deque()
        self._running: dict[int, SequenceGroup] = {}  # running or preempted, by id
        self._preempted: list[_PreemptedRow] = []  # oldest first
        self._rows = RunningRows()
        self._lengths = LengthEstimator()
        self.enable_prefix_caching = enable_prefix_caching
        self._runs_to_end = False  # `run` is active: nothing happens between two steps
        self._idle_pool = idle_pool or IdleKVCachePool()
        self._pool: KVCachePool | None = None
        self._blocks: BlockManager | None = None  # None over a contiguous cache
        self._state: Any  # a `DecodeState`
        if block_size is None:
            self._state = decoder.new_state(kv_cache_tokens)
            return
        assert isinstance(decoder, FastDecoder), "only the fast decoder reads a paged cache"
        budget = max(kv_cache_tokens // block_size, 1)
        need = None if sizes is None else max_blocks(sizes, block_size, max_rows)
        count = choose_pool_size(budget, need)
        self._pool = self._idle_pool.take(decoder, count, budget, block_size)
        self._state = PagedState(decoder, self._pool.kv, count)
        self._blocks = self._state.block_manager

    def _resolve_max_tokens(self, prompt_length: int, max_tokens: int | None) -> int:
        """Return the maximum number of tokens to sample.

        The last token is never fed, so prompt + max_tokens may exceed the context by 1. Raises
        ValueError if the prompt or the response can never fit.
        """
        switch, max_context = self.decoder.length_switch, self.max_context
        if max_tokens is None:
            if max_context is None:
                raise ValueError(
                    "max_tokens=None means up to the context limit, and the model has no limit: "
                    "set max_tokens or max_context"
                )
            longest = switch.max_length(prompt_length) if switch else None
            most = max_context if longest is None else min(max_context, longest)
            max_tokens = max(most + 1 - prompt_length, 0)
        fed = prompt_length + max(max_tokens, 1) - 1
        if max_context is not None and fed > max_context:
            raise ContextLengthError(
                f"a prompt of {prompt_length} tokens and max_tokens={max_tokens} exceed the "
                f"context of {max_context} tokens: shorten the prompt, lower max_tokens, "
                "or raise max_context up to the model's limit"
            )
        if switch is not None:
            switch.check(prompt_length, fed)
        cost = self._state.cost(BatchSize(1, prompt_length, 1, max_tokens - 1))
        if cost > self.kv_cache_tokens:
            raise UserError(
                f"one sample of a {prompt_length}-token prompt with max_tokens={max_tokens} takes "
                f"{cost} tokens of KV cache, kv_cache_tokens is {self.kv_cache_tokens}: raise "
                "kv_cache_tokens or lower max_tokens"
            )
        return max_tokens

    # ------------------------------------------------------------------------------------ admission

    def _admit(self) -> list[Tensor]:
        """Move samples from the waiting to the running queue, first come first served, within the
        budget.

        Returns the logits of their first tokens, from the last position of the prompt. Raises
        RuntimeError if nothing runs and nothing is admitted: the engine would wait forever.
        """
        if self._preempted or not self._waiting or len(self._rows) >= self.max_rows:
            return []
        entering, prefills, size = self._select_waiting()
        if not entering:
            if not len(self._rows):
                raise RuntimeError(
                    f"no request runs and none of the {len(self._waiting)} waiting fits in "
                    f"kv_cache_tokens={self.kv_cache_tokens}: `add` should have rejected the first"
                )
            return []
        # Sort prompts by length (see `make_bands`). The order does not change any sample.
        prefills.sort(key=lambda group: len(group.key[0]))
        self._state.reserve(size)
        self._prefill(prefills)
        self.counters.peak_cache_tokens = max(
            self.counters.peak_cache_tokens, self._state.used_tokens(size)
        )
        slots = {prompt.key: slot for slot, prompt in enumerate(self._state.prompts)}
        rows = [(slots[group.key], group, count) for group, count in entering]
        return [self._add_rows(sorted(rows, key=lambda row: row[0]))]

    def _prefill(self, groups: list[SequenceGroup]) -> None:
        """Prefill the prompts of these groups, one prompt per group."""
        if not groups:
            return
        prompts = [
            Prompt(
                group.key[0],
                make_prompt_reader(group.request),
                group.request.images,
                group.request.adapter_id or 0,
                group.hashes,
                group.key,
            )
            for group in groups
        ]
        logits_PV = self._state.prefill(prompts)
        for group, prompt, logits_V in zip(groups, prompts, logits_PV, strict=True):
            prompt.logits_V, group.cached_tokens = logits_V, prompt.reused
            self.counters.prefix_cached_tokens += prompt.reused
            self.counters.prefill_tokens += len(prompt.tokens) - prompt.reused
        self.counters.prefill_prompts += len(groups)

    def _add_rows(self, entering: list[tuple[int, SequenceGroup, int]]) -> Tensor:
        """Add rows for samples: (slot of the prompt, request, number). Return the logits of their
        first tokens, [new rows, V].
        """
        counts = [count for _, _, count in entering]
        self._rows.add([group for _, group, _ in entering], counts)
        first = len(self._rows) - sum(counts)
        for slot, group, count in entering:
            if group.request.resume_from is not None and group.num_resumed:
                self._rows.resume(first, group.request.resume_from)
            first += count
            self._running[group.request_id] = group
            group.reader = self._state.prompts[slot].reader
            group.num_admitted += count
        slots = np.repeat([slot for slot, _, _ in entering], counts)
        self._state.add_rows(slots)
        return torch.stack([self._state.prompts[slot].logits_V for slot in slots])

    def _select_waiting(
        self,
    ) -> tuple[list[tuple[SequenceGroup, int]], list[SequenceGroup], BatchSize]:
        """Take samples from the waiting queue, first come first served, as long as the budget holds
        them. Return the requests with their numbers of samples, the requests whose prompts are to
        be prefilled, and the size of the batch with them.
        """
        keys, size = {prompt.key for prompt in self._state.prompts}, self._running_size()
        entering, prefills = list[tuple[SequenceGroup, int]](), list[SequenceGroup]()
        while self._waiting:
            group = self._waiting[0]
            fresh = group.key not in keys
            if not (fresh or group.num_admitted):
                group.cached_tokens = len(group.key[0])
            with_prompt = _add_group(size, group, fresh)
            count = self._count_admissible(group, with_prompt)
            if count == 0:
                break
            if fresh:
                keys.add(group.key)
                prefills.append(group)
            size = with_prompt._replace(rows=size.rows + count)
            entering.append((group, count))
            if group.num_admitted + count < group.request.num_samples:
                break
            self._waiting.popleft()
        return entering, prefills, size

    def _used_stop_rows(self) -> set[int]:
        """Return the rows of the stop table that unfinished requests read."""
        return {group.stop_row for group in (*self._running.values(), *self._waiting)}

    def _running_size(self) -> BatchSize:
        """Return the size of the running batch."""
        return BatchSize(
            len(self._state.prompts),
            int(self._state.prompt_lengths.max(initial=0)),
            len(self._rows),
            int(self._rows["max_tokens"].max(initial=1)) - 1,
        )

    def _count_admissible(self, group: SequenceGroup, size: BatchSize) -> int:
        """Return the number of the group's waiting samples that fit now. `size`: of the batch with
        the group's prompt, without its new rows.

        Over a paged cache this counts the blocks of the new prompts, a block for each new row, and
        the next blocks of the running rows.
        """
        count = min(group.request.num_samples - group.num_admitted, self.max_rows - size.rows)
        # `add` checked that a single row fits
        min_count = int(size.rows == 0 and size.prompts <= 1)
        blocks = self._blocks
        if blocks is None:  # the cost grows with the rows
            fitting = bisect.bisect_right(
                range(1, count + 1),
                self.kv_cache_tokens,
                key=lambda more: self._state.cost(size._replace(rows=size.rows + more)),
            )
            return max(fitting, min_count)
        planned, new_prompts = size.rows - len(self._rows), size.prompts - len(self._state.prompts)
        prompt_blocks = new_prompts * blocks.num_blocks_for(size.longest_prompt)
        room = blocks.pool.num_free - prompt_blocks - planned - blocks.blocks_needed()
        count = min(count, room)
        if count > 0 and self.expects_lengths:
            count = self._lengths.count_expected(
                blocks,
                self._rows,
                group.max_tokens,
                count,
                planned,
                prompt_blocks,
                size.longest_prompt,
            )
        return max(count, min_count)

    def _may_admit(self) -> bool:
        """Return whether a request may be admitted now."""
        if not len(self._rows):
            return True
        if not self._waiting or self._preempted or len(self._rows) >= self.max_rows:
            return False
        group = self._waiting[0]
        size = _add_group(self._running_size(), group, self._find_slot(group.key) is None)
        return self._count_admissible(group, size) > 0

    def _plan_graphs(self) -> tuple[int, bool]:
        """Return the most rows that the present requests can run at once, and whether some of the
        waiting ones may share blocks.
        """
        waiting = sum(group.request.num_samples - group.num_admitted for group in self._waiting)
        rows = len(self._rows) + len(self._preempted) + waiting
        may_share = any(
            group.request.num_samples > 1 and len(group.key[0]) >= self._state.block_size
            for group in self._waiting
        )
        return min(rows, self.max_rows), may_share

    def _find_slot(self, key: tuple) -> int | None:
        """Return the slot of the prompt with this key, or None."""
        return next(
            (slot for slot, prompt in enumerate(self._state.prompts) if prompt.key == key), None
        )

    # ------------------------------------------------------------------------------ prefix caching

    def _hash_tokens(
        self,
        tokens: Sequence[int] | np.ndarray,
        request: SamplingRequest,
        known: Sequence[bytes] = (),
    ) -> list[bytes]:
        """Return the hashes of a sequence's chunks; an empty list if no prefix is cached for the
        request. `known`: the hashes of the chunks before `tokens`.
        """
        chunk_size = self._state.chunk_size
        if chunk_size is None or not self.enable_prefix_caching or request.images:
            return []
        weights = self.decoder.weights_name(request.adapter_id)
        return hash_chunks(tokens, weights, chunk_size, known)

    def _may_continue(self, group: SequenceGroup) -> bool:
        """Return whether a later prompt may begin with a sample of the group.

        A contiguous cache would have to copy it: then only if it is part of a conversation.
        """
        named = group.request.conversation is not None
        if not self._state.caches_rows_without_copy:
            return named and group.request.num_samples == 1
        return named or not self._runs_to_end or bool(self._waiting)

    def _cache_row(self, row: int, group: SequenceGroup, fed: int) -> None:
        """Keep the keys and values of a row that is about to be removed: those of its prompt and of
        the first `fed` tokens of its response.
        """
        if self._state.prompts[int(self._state.prompt_of_row[row])].key[0] == "of other weights":
            return  # the weights changed during sampling: the cached keys are of the old weights
        prompt, response = group.request.prompt, self._rows.response(row)[0][:fed]
        first = len(group.hashes) * (self._state.chunk_size or 0)
        # without the chunks that are hashed already, which may end in a resumed response
        unhashed = np.array(prompt[first:], np.int64)
        rest = np.concatenate([unhashed, response[max(first - len(prompt), 0) :]])
        self._state.cache_row(row, self._hash_tokens(rest, group.request, group.hashes))

    # ------------------------------------------------------------------------ removing and resuming

    def _remove_rows(self, ended: np.ndarray) -> None:
        """Remove the ended rows and the unused prompts from the batch."""
        source = compact_slots(~ended)
        self._rows.keep_rows(source)
        # the remaining samples of the first waiting group need its prompt
        first = self._waiting[0].key if self._waiting and self._waiting[0].num_admitted else None
        self._retain(source, first)

    def _retain(self, row_source: np.ndarray, kept_key: tuple | None = None) -> None:
        """Keep only these rows, the prompts that they read, and the prompt of `kept_key`. A dropped
        prompt is prefilled again when needed.
        """
        used = np.array([prompt.key == kept_key for prompt in self._state.prompts], np.bool_)
        used[self._state.prompt_of_row[row_source]] = True
        if self._runs_to_end and self._blocks is None:  # the paged cache keeps what has room
            self._state.waiting_prefixes = {g.hashes[0] for g in self._waiting if g.hashes}
        else:
            self._state.waiting_prefixes = None
        prompt_source = compact_slots(used)
        self._state.retain(row_source, prompt_source)

    def _preempt_newest(self) -> None:
        """Preempt the newest rows until the next tokens of the remaining rows have blocks."""
        blocks = self._blocks
        if blocks is None:
            return
        while len(self._rows) and blocks.blocks_needed() > blocks.pool.num_free:
            rows = np.arange(len(self._rows))
            if any(prompt.rows == 0 for prompt in blocks.prompts):
                self._retain(rows)
                continue
            if len(rows) == 1:
                raise RuntimeError(
                    f"a row needs more than {len(blocks.pool.ref_counts)} blocks of the cache: "
                    "`add` should have rejected it"
                )
            newest = np.lexsort((self._rows["sample"], self._rows["request_id"]))[-1]
            self._preempt(int(newest))

    def _preempt(self, row: int) -> None:
        """Preempt a row."""
        group = self._running[int(self._rows["request_id"][row])]
        response = self._rows.response(row)[0][:-1].tolist()  # the next step feeds the last token
        fed_tokens = [*group.request.prompt, *response]
        self._cache_row(row, group, len(response))
        preempted = _PreemptedRow(
            self._rows.select(np.array([row])),
            self._state.prompts[int(self._state.prompt_of_row[row])],
            fed_tokens,
            self._state.experts_of_row(row),
        )
        self._preempted = sorted([*self._preempted, preempted], key=lambda item: item.age)
        source = compact_slots(np.arange(len(self._rows)) != row)
        self._rows.reorder(source)
        self._retain(source)
        self.preemptions += 1

    def _resume(self) -> None:
        """Resume preempted rows, oldest first, while they and the next token of each row have
        blocks.
        """
        while self._preempted and len(self._rows) < self.max_rows:
            first, blocks = self._preempted[0], self._blocks
            assert blocks is not None
            if (
                blocks.num_blocks_for(len(first.fed_tokens)) + 1 + blocks.blocks_needed()
                > blocks.pool.num_free
            ):
                if len(self._rows):
                    return
                # a single row fits if the prompts without running rows are evicted
                self._retain(np.arange(0))
            self._preempted.pop(0)
            group = self._running[first.age[0]]
            slot = self._find_slot(first.prompt.key)
            if slot is None:
                slot = len(self._state.prompts)
            hashes = self._hash_tokens(first.fed_tokens, group.request)
            self._state.resume_row(slot, first.fed_tokens, first.prompt, first.experts, hashes)
            self._rows.restore(first.fields)
