"""Running batches without padding, for models whose cache is more (or less) than keys and values of
attention.

`EqualState` keeps each batch of prompts of one length, and the rows that answer it, in a cache of
the model's own; rows of different lengths never meet in a forward, so nothing is padded, masked or
merged. `RecomputeState` keeps no cache at all: every token reads its whole sequence again, as a
learner does. Slow and exact.
Shapes: P prompts, N rows, T positions, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.sampler.cache import DecodeState, LogitsReader
from rl.sampler.forward_hf import HFForward
from rl.types import PlacedImage


class _Plain(DecodeState):
    def __init__(self, decoder: HFForward):
        super().__init__()
        self.decoder = decoder

    def cost(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> int:
        return prompts * longest_prompt + rows * (longest_prompt + longest_response)

    def reserve(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> None:
        """Nothing to do: what is kept grows by itself, within the cost."""

    def _note_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        self.prompt_lengths = np.concatenate(
            [self.prompt_lengths, [len(prompt) for prompt in prompts]]
        ).astype(np.int64)


@dataclass(slots=True)
class _Read:
    """Prompts of one length that were read together: their cache, which rows copy."""

    cache: Any


class EqualState(_Plain):
    """`sources` says for each prompt which batch it was read in and where; a group is the rows that
    entered from one of them.
    """

    def __init__(self, decoder: HFForward):
        super().__init__(decoder)
        self.sources: list[tuple[_Read, int]] = []  # by prompt
        self.caches: list[Any] = []  # by group
        self.group_of_row = np.zeros(0, np.int64)
        self.place_of_row = np.zeros(0, np.int64)  # in its group's batch

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        readers: Sequence[LogitsReader | None],
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> Tensor:
        last: list[Tensor] = [torch.empty(0)] * len(prompts)
        sources: list[tuple[_Read, int] | None] = [None] * len(prompts)
        for batch in self.decoder.equal_batches([len(prompt) for prompt in prompts]):
            read = _Read(self.decoder.new_cache())
            wanted = any(readers[i] is not None for i in batch)
            logits = self.decoder.cached_forward(
                [prompts[i] for i in batch], read.cache, last_only=not wanted
            )
            for place, i in enumerate(batch):
                last[i], sources[i] = logits[place, -1].float(), (read, place)
                if (reader := readers[i]) is not None:
                    reader(0, logits[place])
        self.sources.extend(source for source in sources if source is not None)
        self._note_prompts(prompts)
        return torch.stack(last)

    def enter(self, prompt_of_row: np.ndarray) -> None:
        super().enter(prompt_of_row)
        group, place = (
            np.zeros(len(prompt_of_row), np.int64),
            np.zeros(len(prompt_of_row), np.int64),
        )
        members: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompt_of_row.tolist()):
            members.setdefault(id(self.sources[prompt][0]), []).append(row)
        for rows in members.values():
            read = self.sources[prompt_of_row[rows[0]]][0]
            cache = copy.deepcopy(read.cache)
            cache.reorder_cache(self._index([self.sources[prompt_of_row[row]][1] for row in rows]))
            group[rows], place[rows] = len(self.caches), np.arange(len(rows))
            self.caches.append(cache)
        self.group_of_row = np.concatenate([self.group_of_row, group])
        self.place_of_row = np.concatenate([self.place_of_row, place])

    def decode(self, tokens: np.ndarray) -> Tensor:
        logits = torch.empty(
            len(tokens), self.decoder.vocab_size, dtype=torch.float32, device=self.decoder.device
        )
        for g, cache in enumerate(self.caches):
            rows = np.flatnonzero(self.group_of_row == g)
            rows = rows[np.argsort(self.place_of_row[rows])]
            found = self.decoder.cached_forward(
                [[token] for token in tokens[rows].tolist()], cache, last_only=True
            )
            logits[torch.from_numpy(rows).to(logits.device)] = found[:, -1].float()
        self.response_lengths = self.response_lengths + 1
        return logits

    def _index(self, places: Sequence[int]) -> Tensor:
        return torch.tensor(places, device=self.decoder.device)

    def _move_rows(self, source: np.ndarray) -> None:
        group, place = self.group_of_row[source], self.place_of_row[source]
        before = np.bincount(self.group_of_row, minlength=len(self.caches))
        kept: list[Any] = []
        for g, cache in enumerate(self.caches):
            rows = np.flatnonzero(group == g)
            if not len(rows):
                continue
            if len(rows) < before[g]:
                cache.reorder_cache(self._index(place[rows].tolist()))
                place[rows] = np.arange(len(rows))
            group[rows] = len(kept)  # never more than g, so no group is met twice
            kept.append(cache)
        self.caches, self.group_of_row, self.place_of_row = kept, group, place

    def _move_prompts(self, source: np.ndarray) -> None:
        self.sources = [self.sources[slot] for slot in source]


class RecomputeState(_Plain):
    """The tokens of prompts and of rows; every step reads them from the beginning."""

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
        self._note_prompts(prompts)
        last: list[Tensor] = [torch.empty(0)] * len(prompts)
        for batch in self.decoder.equal_batches([len(prompt) for prompt in prompts]):
            wanted = any(readers[i] is not None for i in batch)
            logits = self.decoder.plain_forward([prompts[i] for i in batch], last_only=not wanted)
            for place, i in enumerate(batch):
                last[i] = logits[place, -1].float()
                if (reader := readers[i]) is not None:
                    reader(0, logits[place])
        return torch.stack(last)

    def enter(self, prompt_of_row: np.ndarray) -> None:
        super().enter(prompt_of_row)
        self.rows.extend(list(self.prompts[prompt]) for prompt in prompt_of_row)

    def decode(self, tokens: np.ndarray) -> Tensor:
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            row.append(token)
        self.response_lengths = self.response_lengths + 1
        logits = torch.empty(
            len(tokens), self.decoder.vocab_size, dtype=torch.float32, device=self.decoder.device
        )
        for batch in self.decoder.equal_batches([len(row) for row in self.rows]):
            found = self.decoder.plain_forward([self.rows[i] for i in batch], last_only=True)
            logits[torch.tensor(batch, device=logits.device)] = found[:, -1].float()
        return logits

    def _move_rows(self, source: np.ndarray) -> None:
        self.rows = [self.rows[row] for row in source]

    def _move_prompts(self, source: np.ndarray) -> None:
        self.prompts = [self.prompts[slot] for slot in source]
