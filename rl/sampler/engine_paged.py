"""The engine over pages: rows are let in as long as pages are free, and the newest wait when they run out.

A row that waits keeps what it has drawn and its place in its random stream; its keys and values are given up. It comes back before
anything new is let in, by reading prompt and response again, and goes on with the same samples. The oldest row never waits, and fits
alone (`add` refuses what would not), so every request ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.sampler.cache import compaction
from rl.sampler.cache_paged import PAGE, PagedState
from rl.sampler.decoder_fast import FastDecoder
from rl.sampler.engine import Engine
from rl.sampler.jobs import Job, Prompt
from rl.sampler.requests import Finished


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A row without a place: its fields (one row), its prompt, and all the tokens that had been fed."""

    fields: dict[str, np.ndarray]
    prompt: Prompt
    fed: list[int]

    @property
    def age(self) -> tuple[int, int]:
        return int(self.fields["job"][0]), int(self.fields["sample"][0])


class PagedEngine(Engine):
    """As `Engine`, over a pool of `kv_cache_tokens` positions in pages of `page`; for the fast decoder."""

    def __init__(self, decoder: FastDecoder, *args: Any, page: int = PAGE, **settings: Any):
        super().__init__(decoder, *args, **settings)
        self._state: PagedState = PagedState(decoder, self.kv_cache_tokens, page)
        self._parked: list[_Waiting] = []  # oldest first
        self.evictions = 0

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        self._come_back()
        self._make_room()
        return super().step()

    def _admit(self) -> list[Tensor]:
        return [] if self._parked else super()._admit()

    def _how_many(self, job: Job, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> int:
        """By pages: the new prompts', a page for each new row, and what the running rows take next."""
        tables = self._state.tables
        count = min(job.request.num_samples - job.entered, self.max_rows - rows)
        planned = (prompts - len(self._prompts)) * tables.pages_for(longest_prompt) + rows - len(self._rows)
        room = tables.pool.free - planned - tables.needed()
        if rows == 0 and prompts <= 1:
            room = max(room, 1)  # alone it fits
        return max(min(count, room), 0)

    # ------------------------------------------------------------------------------------------------------ waiting

    def _make_room(self) -> None:
        """Let the newest rows wait until the others' next tokens have pages."""
        tables = self._state.tables
        while len(self._rows) and tables.needed() > tables.pool.free:
            ages = list(zip(self._rows["job"].tolist(), self._rows["sample"].tolist(), strict=True))
            idle = [slot for slot, prompt in enumerate(tables.prompts) if prompt.rows == 0]
            if idle:
                self._keep_rows(np.ones(len(ages), np.bool_))  # prompts that wait for rows are read again when these come
                continue
            if len(ages) == 1:
                raise RuntimeError(f"one row needs more than {len(tables.pool.held)} pages of the cache: `add` should have refused it")
            newest = max(range(len(ages)), key=ages.__getitem__)
            self._park(newest)

    def _park(self, row: int) -> None:
        prompt = self._prompts[int(self._state.prompt_of_row[row])]
        drawn = self._rows.response(row)[0][:-1].tolist()  # the last one is fed by the next step
        keep = np.ones(len(self._rows), np.bool_)
        keep[row] = False
        waiting = _Waiting(self._rows.park(np.array([row])), prompt, [*prompt.key[0], *drawn])
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
        """Rows that wait, the oldest first, as long as there are pages for them and for everyone's next token."""
        tables = self._state.tables
        while self._parked and len(self._rows) < self.max_rows:
            first = self._parked[0]
            if tables.pages_for(len(first.fed)) + 1 + tables.needed() > tables.pool.free:
                if len(self._rows):
                    return
                self._keep_rows(np.ones(0, np.bool_))  # alone it fits: prompts that wait for rows are read again when these come
            self._parked.pop(0)
            slot = self._slot(first.prompt)
            if slot is None:
                slot = len(self._prompts)
                self._prompts.append(first.prompt)
                self._state.add_slot(len(first.prompt.key[0]))
            self._state.enter_again(slot, first.fed)
            self._rows.unpark(first.fields)
            self._settings = None

    def _slot(self, prompt: Prompt) -> int | None:
        keys: Sequence[tuple] = [one.key for one in self._prompts]
        return keys.index(prompt.key) if prompt.key in keys else None
