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
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.sampler.block_manager import BlockManager, choose_pool_size, max_blocks
from rl.sampler.decode_state import BatchSize, PromptBatch, compact_slots
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.kv_cache_pool import IdleKVCachePool, KVCachePool
from rl.sampler.length_estimator import LengthEstimator
from rl.sampler.paged_state import PagedState
from rl.sampler.prompt_logprobs import PromptLogprobs
from rl.sampler.running_rows import RunningRows
from rl.sampler.sampling_requests import CachedPrompt, EngineCounters, SequenceGroup
from rl.sampler.token_sampling import RowSamplingSettings


@dataclass(slots=True)
class _Admission:
    """Hold the samples that move to the running queue, and the batch's size with them."""

    slots: dict[Any, int]  # slot by key of a prompt
    size: BatchSize
    entering: list[tuple[SequenceGroup, int]] = field(default_factory=list)  # group, samples
    prefills: list[SequenceGroup] = field(default_factory=list)
    # groups of cached conversations, with their slots
    continued: list[tuple[SequenceGroup, int]] = field(default_factory=list)


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


class Scheduler:
    """Hold the samples of an engine and its KV cache, and prefill what it admits: the base class of
    `Engine`.

    `block_size`, `idle_pool`, `sizes`: see `Engine`. Cached conversations are stored among the
    prompts. They are evicted if a waiting request does not fit otherwise.
    """

    # whether rows are admitted only if all are expected to end without a preemption; if not, as
    # soon as blocks are free
    expects_lengths = True

    def __init__(
        self,
        decoder: Decoder,
        kv_cache_tokens: int,
        max_rows: int,
        block_size: int | None,
        idle_pool: IdleKVCachePool | None,
        sizes: Iterable[tuple[int, int, int]] | None,
    ):
        self.decoder, self.kv_cache_tokens, self.max_rows = decoder, kv_cache_tokens, max_rows
        self.counters = EngineCounters()
        self.preemptions = 0
        self._waiting: deque[SequenceGroup] = deque()
        self._running: dict[int, SequenceGroup] = {}  # running or preempted, by id
        self._preempted: list[_PreemptedRow] = []  # oldest first
        self._rows = RunningRows()
        self._prompts: list[CachedPrompt] = []  # by slot of the state
        self._settings: RowSamplingSettings | None = None  # of the rows, made when they are sampled
        self._lengths = LengthEstimator()
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
        self._state = PagedState(decoder, self._pool.kv)
        self._blocks = self._state.block_manager

    # ------------------------------------------------------------------------------------ admission

    def _admit(self) -> list[Tensor]:
        """Move samples from the waiting to the running queue, first come first served, within the
        budget.

        Returns the logits of their first tokens, from the last position of the prompt.
        """
        if self._preempted or not self._waiting or len(self._rows) >= self.max_rows:
            return []
        admission = self._select_waiting()
        if not admission.entering:
            return self._admit() if self._evict_conversations() else []
        # Sort prompts by length (see `make_bands`). The order does not change any sample.
        slots, prefills = admission.slots, admission.prefills
        prefills.sort(key=lambda group: len(group.key[0]))
        slots.update({group.key: len(self._prompts) + i for i, group in enumerate(prefills)})
        entering = sorted(admission.entering, key=lambda pair: slots[pair[0].key])
        self._state.reserve(admission.size)
        self._extend_conversations(admission.continued)
        self._prefill(prefills)
        self.counters.peak_cache_tokens = max(
            self.counters.peak_cache_tokens, self._state.used_tokens(admission.size)
        )
        return [self._add_rows([(group, slots[group.key], count) for group, count in entering])]

    def _prefill(self, groups: list[SequenceGroup]) -> None:
        """Prefill the prompts of these groups, one prompt per group."""
        if not groups:
            return
        readers = [
            PromptLogprobs(
                group.key[0],
                topk=group.request.topk_prompt_logprobs,
                targets=group.request.target_prompt_tokens,
            )
            if group.request.scores_prompt
            else None
            for group in groups
        ]
        images = [group.request.images for group in groups]
        mixes = self.decoder.multi_adapter
        batch = PromptBatch(
            [group.key[0] for group in groups],
            [reader.add_logits if reader else None for reader in readers],
            images if any(images) else (),
            [group.request.adapter_id or 0 for group in groups] if mixes else (),
        )
        logits_PV = self._state.prefill(batch)
        for group, reader, logits_V in zip(groups, readers, logits_PV, strict=True):
            self._prompts.append(
                CachedPrompt(group.key, logits_V, reader, group.request.adapter_id)
            )
            self.counters.prefill_tokens += len(group.key[0])
        self.counters.prefill_prompts += len(groups)

    def _add_rows(self, entering: list[tuple[SequenceGroup, int, int]]) -> Tensor:
        """Add rows for the samples and return the logits of their first tokens, [new rows, V]."""
        counts = [count for _, _, count in entering]
        self._rows.add([group for group, _, _ in entering], counts)
        first = len(self._rows) - sum(counts)
        for group, slot, count in entering:
            if group.request.resume_from is not None and group.num_resumed:
                self._rows.resume(first, group.request.resume_from)
            first += count
            self._running[group.request_id] = group
            group.reader = self._prompts[slot].reader
            group.num_admitted += count
        slots = np.repeat([slot for _, slot, _ in entering], counts)
        self._state.add_rows(slots)
        self._settings = None
        return torch.stack([self._prompts[slot].logits_V for slot in slots])

    def _select_waiting(self) -> _Admission:
        """Take samples from the waiting queue, first come first served, as long as the budget holds
        them.
        """
        admission = _Admission(
            {prompt.key: slot for slot, prompt in enumerate(self._prompts)}, self._running_size()
        )
        slots = admission.slots
        while self._waiting:
            group = self._waiting[0]
            fresh = group.key not in slots
            group.shares_prompt = group.shares_prompt or not (fresh or group.num_admitted)
            cached_slot = self._find_cached_slot(group) if fresh else None
            size = BatchSize(
                len(slots) + (fresh and cached_slot is None),
                max(admission.size.longest_prompt, len(group.key[0])),
                admission.size.rows,
                max(admission.size.longest_response, group.max_tokens - 1 - group.num_resumed),
            )
            count = self._count_admissible(group, size)
            if count == 0:
                break
            if cached_slot is not None:
                admission.continued.append((group, cached_slot))
                del slots[self._prompts[cached_slot].key]
                slots[group.key], self._prompts[cached_slot].key = cached_slot, group.key
            elif fresh:
                slots[group.key] = len(slots)
                admission.prefills.append(group)
            admission.size = size._replace(rows=size.rows + count)
            admission.entering.append((group, count))
            if group.num_admitted + count < group.request.num_samples:
                break
            self._waiting.popleft()
        return admission

    def _running_size(self) -> BatchSize:
        """Return the size of the running batch."""
        return BatchSize(
            len(self._prompts),
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
        tables = self._blocks
        if tables is None:  # the cost grows with the rows; mostly all samples fit
            if self._state.cost(size._replace(rows=size.rows + count)) <= self.kv_cache_tokens:
                return max(count, 0)
            return bisect.bisect_right(
                range(1, count + 1),
                self.kv_cache_tokens,
                key=lambda more: self._state.cost(size._replace(rows=size.rows + more)),
            )
        planned, reads = size.rows - len(self._rows), size.prompts - len(self._prompts)
        if any(prompt.conversation is not None for prompt in self._prompts):
            # each new row may extend a conversation, which copies a block or allocates new blocks
            reads += planned + 1
        prompt_blocks = reads * tables.num_blocks_for(size.longest_prompt)
        room = tables.pool.num_free - prompt_blocks - planned - tables.blocks_needed()
        count = min(count, room)
        if count > 0 and self.expects_lengths:
            count = self._lengths.count_expected(
                tables,
                self._rows,
                group.max_tokens,
                count,
                planned,
                prompt_blocks,
                size.longest_prompt,
            )
        if size.rows == 0 and size.prompts <= 1:
            count = max(count, 1)  # a single row fits
        return max(count, 0)

    def _may_admit(self) -> bool:
        """Return whether a request may be admitted now.

        Returns True if the cache holds conversations, because these can be evicted.
        """
        if not len(self._rows):
            return True
        if not self._waiting or self._preempted or len(self._rows) >= self.max_rows:
            return False
        if any(prompt.conversation is not None for prompt in self._prompts):
            return True
        group, size = self._waiting[0], self._running_size()
        size = size._replace(
            prompts=size.prompts + (self._find_slot(group.key) is None),
            longest_prompt=max(size.longest_prompt, len(group.key[0])),
        )
        return self._count_admissible(group, size) > 0

    def _find_slot(self, key: tuple) -> int | None:
        """Return the slot of the prompt with this key, or None."""
        return next((slot for slot, prompt in enumerate(self._prompts) if prompt.key == key), None)

    # -------------------------------------------------------------------------------- conversations

    @torch.inference_mode()
    def evict_conversation(self, conversation: str) -> None:
        """Evict a conversation that has no further turn."""
        self._evict_conversations(conversation)

    def _evict_conversations(self, name: str | None = None) -> bool:
        """Evict the conversation of that name, or all. Returns whether the cache held any."""
        dropped = [
            p.conversation is not None and name in (None, p.conversation) for p in self._prompts
        ]
        if any(dropped):
            self._retain(np.arange(len(self._rows)), ~np.array(dropped, np.bool_))
        return any(dropped)

    def _find_cached_slot(self, group: SequenceGroup) -> int | None:
        """Return the slot that holds the cached prefix of a group's conversation.

        Returns None if the conversation is not in the cache, or if its tokens differ from the
        prompt.
        """
        name = group.request.conversation
        if name is None or group.request.scores_prompt:
            return None
        for slot, prompt in enumerate(self._prompts):
            # Also compare the key: another request admitted now may have extended the conversation.
            same = (prompt.conversation, prompt.adapter_id, prompt.key) == (
                name,
                group.request.adapter_id,
                ("of", name),
            )
            if same and prompt.tokens == group.key[0][: len(prompt.tokens)] != group.key[0]:
                return slot
        return None

    def _extend_conversations(self, groups: list[tuple[SequenceGroup, int]]) -> None:
        """Prefill the new tokens of these conversations after their cached tokens."""
        if not groups:
            return
        suffixes = [group.key[0][len(self._prompts[slot].tokens) :] for group, slot in groups]
        logits_PV = self._state.extend_prompts([slot for _, slot in groups], suffixes)
        for (group, slot), suffix, logits_V in zip(groups, suffixes, logits_PV, strict=True):
            self.counters.kept_tokens += len(self._prompts[slot].tokens)
            self.counters.prefill_tokens += len(suffix)
            self._prompts[slot] = CachedPrompt(group.key, logits_V, None, group.request.adapter_id)
        self.counters.prefill_prompts += len(groups)

    def _cache_conversation(self, row: int, group: SequenceGroup, tokens: list[int]) -> None:
        """Cache the tokens of a finished row for the next turn of its conversation, if they fit."""
        name, state = group.request.conversation, self._state
        if name is None or not state.supports_extend or group.request.num_samples > 1:
            return
        if self._prompts[int(state.prompt_of_row[row])].key[0] == "of other weights":
            return  # the weights changed during sampling: the cached keys are of the old weights
        written = int(state.response_lengths[row])
        size = self._running_size()
        size = size._replace(
            prompts=size.prompts + 1,
            longest_prompt=max(size.longest_prompt, len(group.key[0]) + written),
        )
        if state.cost(size) > self.kv_cache_tokens:
            return
        self._evict_conversations(name)  # evict the earlier turn
        state.reserve(size)
        state.cache_row(row)
        cached_tokens = (*group.key[0], *tokens[group.num_resumed : group.num_resumed + written])
        self._prompts.append(
            CachedPrompt(
                ("of", name), torch.empty(0), None, group.request.adapter_id, name, cached_tokens
            )
        )

    # ------------------------------------------------------------------------ removing and resuming

    def _remove_rows(self, ended: np.ndarray) -> None:
        """Remove the ended rows and the unused prompts from the batch."""
        source = compact_slots(~ended)
        self._rows.keep_rows(source)
        # the remaining samples of the first waiting group need its prompt
        first = self._waiting[0].key if self._waiting and self._waiting[0].num_admitted else None
        kept = [p.conversation is not None or p.key == first for p in self._prompts]
        self._retain(source, self._find_used(source) | np.array(kept, np.bool_))

    def _find_used(self, row_source: np.ndarray) -> np.ndarray:
        """Return which prompts these rows read, bool [prompts]."""
        used = np.zeros(len(self._prompts), np.bool_)
        used[self._state.prompt_of_row[row_source]] = True
        return used

    def _retain(self, row_source: np.ndarray, used: np.ndarray) -> None:
        """Keep only these rows and prompts in the state, and these prompts here."""
        prompt_source = compact_slots(used)
        self._prompts = [self._prompts[slot] for slot in prompt_source]
        self._state.retain(row_source, prompt_source)
        self._settings = None

    def _preempt_newest(self) -> None:
        """Preempt the newest rows until the next tokens of the remaining rows have blocks."""
        tables = self._blocks
        if tables is None:
            return
        while len(self._rows) and tables.blocks_needed() > tables.pool.num_free:
            rows = np.arange(len(self._rows))
            if any(prompt.rows == 0 for prompt in tables.prompts):
                # Evict prompts without running rows. They are prefilled again when needed.
                self._retain(rows, self._find_used(rows))
                continue
            if len(rows) == 1:
                raise RuntimeError(
                    f"a row needs more than {len(tables.pool.ref_counts)} blocks of the cache: "
                    "`add` should have rejected it"
                )
            ages = zip(self._rows["job"].tolist(), self._rows["sample"].tolist(), strict=True)
            self._preempt(max(zip(ages, rows.tolist(), strict=True))[1])

    def _preempt(self, row: int) -> None:
        """Preempt a row."""
        group = self._running[int(self._rows["job"][row])]
        fed_tokens = self._rows.response(row)[0][:-1].tolist()  # the next step feeds the last token
        preempted = _PreemptedRow(
            self._rows.preempt(np.array([row])),
            self._prompts[int(self._state.prompt_of_row[row])],
            len(group.key[0]),
            [*group.request.prompt, *fed_tokens],
            self._state.experts_of_row(row),
        )
        self._preempted = sorted([*self._preempted, preempted], key=lambda item: item.age)
        source = compact_slots(np.arange(len(self._rows)) != row)
        self._rows.reorder(source)
        self._retain(source, self._find_used(source))
        self.preemptions += 1

    def _resume(self) -> None:
        """Resume preempted rows, oldest first, while they and the next token of each row have
        blocks.
        """
        while self._preempted and len(self._rows) < self.max_rows:
            first, tables = self._preempted[0], self._blocks
            assert tables is not None
            if (
                tables.num_blocks_for(len(first.fed_tokens)) + 1 + tables.blocks_needed()
                > tables.pool.num_free
            ):
                if len(self._rows):
                    return
                # A single row fits if prompts without running rows are evicted. They are prefilled
                # again when needed.
                self._retain(np.arange(0), np.zeros(len(self._prompts), np.bool_))
            self._preempted.pop(0)
            slot = self._find_slot(first.prompt.key)
            if slot is None:
                slot = len(self._prompts)
                self._prompts.append(first.prompt)
                length, experts = first.prompt_length, first.experts
                prompt_experts = None if experts is None else experts[:length]
                self._state.add_prompt_slot(length, first.prompt.adapter_id, prompt_experts)
            self._state.resume_row(slot, first.fed_tokens, first.experts)
            self._rows.restore(first.fields)
            self._settings = None
