"""The engine over pages: rows are let in as long as pages are free, and the newest wait when they
run out.

A row that waits keeps what it has drawn and its place in its random stream; its keys and values are
given up. It comes back before anything new is let in, by reading prompt and response again, and
goes on with the same samples. The oldest row never waits, and fits alone (`add` refuses what would
not), so every request ends.
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
    """A row without a place: its fields (one row), its prompt, that one's tokens, and all the
    tokens that had been fed.
    """

    fields: dict[str, np.ndarray]
    prompt: Prompt
    length: int  # of the prompt
    fed: list[int]

    @property
    def age(self) -> tuple[int, int]:
        return int(self.fields["job"][0]), int(self.fields["sample"][0])


class PagedEngine(Engine):
    """As `Engine`, over a pool of `kv_cache_tokens` positions in pages of `page`; for the fast
    decoder.

    `kept`: where the pool comes from, and goes when the engine is closed. `sizes`: of all that will
    be asked (`pages_at_most`), for which the pool has room, if that is less than the budget. None:
    whatever comes.
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
        """Nothing is asked of it any more: the next engine may have its pool, unless there are no
        numbers in it. What a step does not see is weighed with 0, and 0 times what is no number is
        none.
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
        """By pages: the new prompts', a page for each new row, and what the running rows take next."""
        tables = self._state.tables
        count = min(job.request.num_samples - job.entered, self.max_rows - rows)
        reads = prompts - len(self._prompts)
        if any(prompt.conversation is not None for prompt in self._prompts):
            # each may go on with a conversation, and copies a page or takes new ones
            reads += rows - len(self._rows) + 1
        planned = reads * tables.pages_for(longest_prompt) + rows - len(self._rows)
        room = tables.pool.free - planned - tables.needed()
        if rows == 0 and prompts <= 1:
            room = max(room, 1)  # alone it fits
        return max(min(count, room), 0)

    # ---------------------------------------------------------------------------- between two steps

    @torch.inference_mode()
    def change_weights(self, decoder: Decoder, version: int) -> None:
        """As `Engine.change_weights`; a row that waits reads what it has drawn again with the new
        weights.
        """
        self._rows.now_of(self.version, [one.fields for one in self._parked])
        away = {
            id(one.prompt): one.prompt
            for one in self._parked
            if not any(one.prompt is prompt for prompt in self._prompts)
        }
        super().change_weights(decoder, version)
        # its logits are of the weights of then: nobody new may begin from them
        for number, prompt in enumerate(away.values()):
            prompt.key = ("of other weights", "away", number, prompt.key)

    @torch.inference_mode()
    def drop(self, request_id: int) -> None:
        gone = [one for one in self._parked if one.age[0] == request_id]
        self._parked = [one for one in self._parked if one.age[0] != request_id]
        super().drop(request_id)
        running = len(self._rows)
        for one in gone:
            self._rows.unpark(one.fields)
        self._rows.keep(np.arange(running))

    def drawn(
        self, request_ids: Collection[int] | None = None
    ) -> dict[int, dict[int, SampledSequence]]:
        running = len(self._rows)
        for one in self._parked:
            self._rows.unpark(one.fields)
        found = super().drawn(request_ids)
        self._rows.reorder(np.arange(running))
        return found

    # -------------------------------------------------------------------------------------- waiting

    def _make_room(self) -> None:
        """Let the newest rows wait until the others' next tokens have pages."""
        tables = self._state.tables
        while len(self._rows) and tables.needed() > tables.pool.free:
            ages = list(zip(self._rows["job"].tolist(), self._rows["sample"].tolist(), strict=True))
            idle = [slot for slot, prompt in enumerate(tables.prompts) if prompt.rows == 0]
            if idle:
                # prompts that wait for rows are read again when these come
                self._keep_rows(np.ones(len(ages), np.bool_))
                continue
            if len(ages) == 1:
                raise RuntimeError(
                    f"one row needs more than {len(tables.pool.held)} pages of the cache: `add` should have refused it"
                )
            newest = max(range(len(ages)), key=ages.__getitem__)
            self._park(newest)

    def _park(self, row: int) -> None:
        prompt, job = (
            self._prompts[int(self._state.prompt_of_row[row])],
            self._jobs[int(self._rows["job"][row])],
        )
        drawn = self._rows.response(row)[0][:-1].tolist()  # the last one is fed by the next step
        keep = np.ones(len(self._rows), np.bool_)
        keep[row] = False
        waiting = _Waiting(
            self._rows.park(np.array([row])), prompt, len(job.key[0]), [*job.request.prompt, *drawn]
        )
        self._parked = sorted([*self._parked, waiting], key=lambda one: one.age)
        self._keep_rows(keep)
        self.evictions += 1

    def _keep_rows(self, keep: np.ndarray) -> None:
        """The rows of the mask, and the prompts that they answer."""
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
        """Rows that wait, the oldest first, as long as there are pages for them and for everyone's
        next token.
        """
        tables = self._state.tables
        while self._parked and len(self._rows) < self.max_rows:
            first = self._parked[0]
            if tables.pages_for(len(first.fed)) + 1 + tables.needed() > tables.pool.free:
                if len(self._rows):
                    return
                # alone it fits: prompts that wait for rows are read again when these come
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
        keys: Sequence[tuple] = [one.key for one in self._prompts]
        return keys.index(prompt.key) if prompt.key in keys else None
