"""Decode without padding, for models that cache more (or less) than keys and values of attention.

`EqualLengthState` stores each batch of prompts of equal length, and the rows that respond to it, in
the model's native cache. Rows of different lengths never share a forward, so nothing is padded,
masked or merged. `RecomputeState` has no cache: every token recomputes its whole sequence, as a
learner does. It is slow and exact. Shapes: P prompts, N rows, T positions, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.sampler.decode_state import DecodeState, LogitsReader
from rl.sampler.forward_hf import HFForward
from rl.types import PlacedImage


class _UnpaddedState(DecodeState):
    """Share the cost and the prompt lengths of the states without padding."""

    def __init__(self, decoder: HFForward):
        super().__init__()
        self.decoder = decoder

    def cost(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> int:
        return prompts * longest_prompt + rows * (longest_prompt + longest_response)

    def reserve(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> None:
        """Do nothing: the cache grows as needed and stays within `cost`."""

    def _add_prompt_lengths(self, prompts: Sequence[Sequence[int]]) -> None:
        """Append the lengths of new prompts."""
        self.prompt_lengths = np.concatenate(
            [self.prompt_lengths, [len(prompt) for prompt in prompts]]
        ).astype(np.int64)


@dataclass(slots=True)
class _PrefillBatch:
    """Hold the cache of prompts of equal length that were prefilled together; rows copy it."""

    cache: Any


class EqualLengthState(_UnpaddedState):
    """Store batches of rows of equal length in the model's native cache.

    `prefill_batches` holds for each prompt its prefill batch and its index in that batch. A group
    consists of the rows that were added together from the same prefill batch.
    """

    def __init__(self, decoder: HFForward):
        super().__init__(decoder)
        self.prefill_batches: list[tuple[_PrefillBatch, int]] = []  # by prompt
        self.caches: list[Any] = []  # by group
        self.group_of_row = np.zeros(0, np.int64)
        self.index_in_group = np.zeros(0, np.int64)  # in the batch of its group

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        readers: Sequence[LogitsReader | None],
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> Tensor:
        last: list[Tensor] = [torch.empty(0)] * len(prompts)
        sources: list[tuple[_PrefillBatch, int] | None] = [None] * len(prompts)
        for batch in self.decoder.batch_by_length([len(prompt) for prompt in prompts]):
            read = _PrefillBatch(self.decoder.new_cache())
            needs_all_logits = any(readers[i] is not None for i in batch)
            logits = self.decoder.cached_forward(
                [prompts[i] for i in batch], read.cache, last_only=not needs_all_logits
            )
            for place, i in enumerate(batch):
                last[i], sources[i] = logits[place, -1].float(), (read, place)
                if (reader := readers[i]) is not None:
                    reader(0, logits[place])
        self.prefill_batches.extend(source for source in sources if source is not None)
        self._add_prompt_lengths(prompts)
        return torch.stack(last)

    def add_rows(self, prompt_of_row: np.ndarray) -> None:
        super().add_rows(prompt_of_row)
        group, place = (
            np.zeros(len(prompt_of_row), np.int64),
            np.zeros(len(prompt_of_row), np.int64),
        )
        members: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompt_of_row.tolist()):
            members.setdefault(id(self.prefill_batches[prompt][0]), []).append(row)
        for rows in members.values():
            read = self.prefill_batches[prompt_of_row[rows[0]]][0]
            cache = copy.deepcopy(read.cache)
            cache.reorder_cache(
                self._index([self.prefill_batches[prompt_of_row[row]][1] for row in rows])
            )
            group[rows], place[rows] = len(self.caches), np.arange(len(rows))
            self.caches.append(cache)
        self.group_of_row = np.concatenate([self.group_of_row, group])
        self.index_in_group = np.concatenate([self.index_in_group, place])

    def decode(self, tokens: np.ndarray) -> Tensor:
        logits = torch.empty(
            len(tokens), self.decoder.vocab_size, dtype=torch.float32, device=self.decoder.device
        )
        for g, cache in enumerate(self.caches):
            rows = np.flatnonzero(self.group_of_row == g)
            rows = rows[np.argsort(self.index_in_group[rows])]
            batch_logits = self.decoder.cached_forward(
                [[token] for token in tokens[rows].tolist()], cache, last_only=True
            )
            logits[torch.from_numpy(rows).to(logits.device)] = batch_logits[:, -1].float()
        self.response_lengths = self.response_lengths + 1
        return logits

    def _index(self, places: Sequence[int]) -> Tensor:
        return torch.tensor(places, device=self.decoder.device)

    def _move_rows(self, source: np.ndarray) -> None:
        group, place = self.group_of_row[source], self.index_in_group[source]
        before = np.bincount(self.group_of_row, minlength=len(self.caches))
        caches: list[Any] = []
        for g, cache in enumerate(self.caches):
            rows = np.flatnonzero(group == g)
            if not len(rows):
                continue
            if len(rows) < before[g]:
                cache.reorder_cache(self._index(place[rows].tolist()))
                place[rows] = np.arange(len(rows))
            group[rows] = len(caches)  # at most g, so no group is visited twice
            caches.append(cache)
        self.caches, self.group_of_row, self.index_in_group = caches, group, place

    def _move_prompts(self, source: np.ndarray) -> None:
        self.prefill_batches = [self.prefill_batches[slot] for slot in source]


class RecomputeState(_UnpaddedState):
    """Store the tokens of prompts and rows; every step recomputes them from the first token."""

    def __init__(self, decoder: HFForward):
        super().__init__(decoder)
        self.prompts: list[list[int]] = []
        self.rows: list[list[int]] = []  # prompt and response

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        readers: Sequence[LogitsReader | None],
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> Tensor:
        self.prompts.extend([list(prompt) for prompt in prompts])
        self._add_prompt_lengths(prompts)
        last: list[Tensor] = [torch.empty(0)] * len(prompts)
        for batch in self.decoder.batch_by_length([len(prompt) for prompt in prompts]):
            needs_all_logits = any(readers[i] is not None for i in batch)
            logits = self.decoder.plain_forward(
                [prompts[i] for i in batch], last_only=not needs_all_logits
            )
            for place, i in enumerate(batch):
                last[i] = logits[place, -1].float()
                if (reader := readers[i]) is not None:
                    reader(0, logits[place])
        return torch.stack(last)

    def add_rows(self, prompt_of_row: np.ndarray) -> None:
        super().add_rows(prompt_of_row)
        self.rows.extend(list(self.prompts[prompt]) for prompt in prompt_of_row)

    def decode(self, tokens: np.ndarray) -> Tensor:
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            row.append(token)
        self.response_lengths = self.response_lengths + 1
        logits = torch.empty(
            len(tokens), self.decoder.vocab_size, dtype=torch.float32, device=self.decoder.device
        )
        for batch in self.decoder.batch_by_length([len(row) for row in self.rows]):
            batch_logits = self.decoder.plain_forward([self.rows[i] for i in batch], last_only=True)
            logits[torch.tensor(batch, device=logits.device)] = batch_logits[:, -1].float()
        return logits

    def _move_rows(self, source: np.ndarray) -> None:
        self.rows = [self.rows[row] for row in source]

    def _move_prompts(self, source: np.ndarray) -> None:
        self.prompts = [self.prompts[slot] for slot in source]
