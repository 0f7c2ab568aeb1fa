"""Run the engine over a paged KV cache: admit rows while blocks are free, preempt the newest
otherwise.

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

from rl.sampler.cache import compaction
from rl.sampler.cache_paged import PAGE, PagedState
from rl.sampler.decoder import Decoder
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.engine import Engine
from rl.sampler.jobs import Job, Prompt
from rl.sampler.kept import Kept
from rl.sampler.pages import pages_at_most, pool_size
from rl.sampler.requests import Finished
from rl.types import SampledSequence


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Hold a preempted row: its fields (a single row), its prompt, the prompt's length, all fed
    tokens.
    """

    fields: dict[str, np.ndarray]
    prompt: Prompt
    length: int  # prompt tokens
    fed: list[int]

    @property
    def age(self) -> tuple[int, int]:
        """Return (request id, sample index), which orders rows from oldest to newest."""
        return int(self.fields["job"][0]), int(self.fields["sample"][0])


class PagedEngine(Engine):
    """Run `Engine` over a pool of `kv_cache_tokens` positions in blocks of `page`; for the fast
    decoder.

    `kept` provides the pool, and receives it when the engine is closed. `sizes`: the sizes of all
    expected requests (`pages_at_most`); the pool is smaller than the budget if they need less.
    None: unknown.
    """

    def __init__(
        self,
        decoder: FastDecoder,
        *args: Any,
        page: int = PAGE,
        kept: Kept | None = None,
        sizes: Iterable[tuple[int, int, int]] | None = None,
        **settings: Any,
    ):
        super().__init__(decoder, *args, **settings)
        self._place = kept or Kept()
        budget = max(self.kv_cache_tokens // page, 1)
        need = None if sizes is None else pages_at_most(sizes, page, self.max_rows)
        self._pages = self._place.take(decoder, pool_size(budget, need), budget, page)
        self._state: PagedState = PagedState(decoder, self._pages.kv)
        self._parked: list[_Waiting] = []  # oldest first
        self.evictions = 0
        self._without_numbers = False

    def close(self) -> None:
        """Release the pool to the next engine, unless it holds NaN or infinity.

        Attention multiplies masked values by 0, and 0 times NaN is NaN. No request may follow.
        """
        if self._state.kv:
            self._state.kv = []
            if not self._without_numbers:
                self._place.back(self._pages)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        self._come_back()
        self._make_room()
        return super().step()

    def _no_numbers(self, tokens: np.ndarray, bad: np.ndarray) -> None:
        self._without_numbers = True
        super()._no_numbers(tokens, bad)

    def _admit(self) -> list[Tensor]:
        return [] if self._parked else super()._admit()

    def _how_many(
        self, job: Job, prompts: int, longest_prompt: int, rows: int, longest_response: int
    ) -> int:
        """Return the number of the group's waiting samples that fit now, in blocks.

        Counts the blocks of the new prompts, a block for each new row, and the next blocks of the
        running rows.
        """
        tables = self._state.tables
        count = min(job.request.num_samples - job.entered, self.max_rows - rows)
        reads = prompts - len(self._prompts)
        if any(prompt.conversation is not None for prompt in self._prompts):
            # each new row may extend a conversation, which copies a block or allocates new blocks
            reads += rows - len(self._rows) + 1
        planned = reads * tables.pages_for(longest_prompt) + rows - len(self._rows)
        room = tables.pool.free - planned - tables.needed()
        if rows == 0 and prompts <= 1:
            room = max(room, 1)  # a single row fits
        return max(min(count, room), 0)

    # ---------------------------------------------------------------------------- between two steps

    @torch.inference_mode()
    def change_weights(self, decoder: Decoder, version: int) -> None:
        """Change the weights as `Engine.change_weights`.

        Preempted rows are prefilled with the new weights when they are resumed.
        """
        self._rows.now_of(self.version, [row.fields for row in self._parked])
        preempted_prompts = {
            id(row.prompt): row.prompt
            for row in self._parked
            if not any(row.prompt is prompt for prompt in self._prompts)
        }
        super().change_weights(decoder, version)
        # The cached logits are of the old weights: no new row may start from them.
        for number, prompt in enumerate(preempted_prompts.values()):
            prompt.key = ("of other weights", "away", number, prompt.key)

    @torch.inference_mode()
    def drop(self, request_id: int) -> None:
        dropped = [row for row in self._parked if row.age[0] == request_id]
        self._parked = [row for row in self._parked if row.age[0] != request_id]
        super().drop(request_id)
        running = len(self._rows)
        for row in dropped:
            self._rows.unpark(row.fields)
        self._rows.keep(np.arange(running))

    def drawn(
        self, request_ids: Collection[int] | None = None
    ) -> dict[int, dict[int, SampledSequence]]:
        running = len(self._rows)
        for row in self._parked:
            self._rows.unpark(row.fields)
        partial = super().drawn(request_ids)
        self._rows.reorder(np.arange(running))
        return partial

    # -------------------------------------------------------------------------------------- waiting

    def _make_room(self) -> None:
        """Preempt the newest rows until the next tokens of the remaining rows have blocks."""
        tables = self._state.tables
        while len(self._rows) and tables.needed() > tables.pool.free:
            ages = list(zip(self._rows["job"].tolist(), self._rows["sample"].tolist(), strict=True))
            idle = [slot for slot, prompt in enumerate(tables.prompts) if prompt.rows == 0]
            if idle:
                # Evict prompts without running rows. They are prefilled again when needed.
                self._keep_rows(np.ones(len(ages), np.bool_))
                continue
            if len(ages) == 1:
                raise RuntimeError(
                    f"a row needs more than {len(tables.pool.held)} blocks of the cache: "
                    "`add` should have rejected it"
                )
            newest = max(range(len(ages)), key=ages.__getitem__)
            self._park(newest)

    def _park(self, row: int) -> None:
        """Preempt a row."""
        prompt, group = (
            self._prompts[int(self._state.prompt_of_row[row])],
            self._jobs[int(self._rows["job"][row])],
        )
        fed_tokens = self._rows.response(row)[0][:-1].tolist()  # the next step feeds the last token
        keep = np.ones(len(self._rows), np.bool_)
        keep[row] = False
        preempted = _Waiting(
            self._rows.park(np.array([row])),
            prompt,
            len(group.key[0]),
            [*group.request.prompt, *fed_tokens],
        )
        self._parked = sorted([*self._parked, preempted], key=lambda item: item.age)
        self._keep_rows(keep)
        self.evictions += 1

    def _keep_rows(self, keep: np.ndarray) -> None:
        """Keep the rows of the mask and their prompts; remove all other rows and prompts."""
        source = compaction(keep)
        if not keep.all():
            self._rows.reorder(source)
        used = np.zeros(len(self._prompts), np.bool_)
        used[self._state.prompt_of_row[source]] = True
        prompt_source = compaction(used)
        self._prompts = [self._prompts[slot] for slot in prompt_source]
        self._state.leave(source, prompt_source)
        self._settings = None

    def _come_back(self) -> None:
        """Resume preempted rows, oldest first, while they and the next token of each row have
        blocks.
        """
        tables = self._state.tables
        while self._parked and len(self._rows) < self.max_rows:
            first = self._parked[0]
            if tables.pages_for(len(first.fed)) + 1 + tables.needed() > tables.pool.free:
                if len(self._rows):
                    return
                # A single row fits if prompts without running rows are evicted. They are prefilled
                # again when needed.
                self._keep_rows(np.ones(0, np.bool_))
            self._parked.pop(0)
            slot = self._slot(first.prompt)
            if slot is None:
                slot = len(self._prompts)
                self._prompts.append(first.prompt)
                self._state.add_slot(first.length)
            self._state.enter_again(slot, first.fed)
            self._rows.unpark(first.fields)
            self._settings = None

    def _slot(self, prompt: Prompt) -> int | None:
        """Return the slot of a prompt with this key, or None."""
        keys: Sequence[tuple] = [candidate.key for candidate in self._prompts]
        return keys.index(prompt.key) if prompt.key in keys else None
