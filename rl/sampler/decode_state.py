"""Define the decode state: the KV cache of the prompts and of the response of each running row.

A prompt is stored once, however many rows respond to it. A row stores only its response. Rows and
prompts are compact (slots 0..n-1): when some are removed, survivors from the end move into the
holes. Subclasses store the keys and values. This base class tracks the lengths and decides which
slots move.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rl.sampler.expert_layers import copy_choices
from rl.sampler.linear_layers import RowAdapters
from rl.types import PlacedImage

# Called with (first position, logits [positions, V]), slice after slice, as a prompt is read.
LogitsReader = Callable[[int, Tensor], None]


def compact_slots(keep: np.ndarray) -> np.ndarray:
    """Return the source slot of each slot after compaction.

    A survivor moves only if it must fill a hole.

    >>> compaction(np.array([True, False, True, False, True])).tolist()
    [0, 4, 2]
    """
    count = int(keep.sum())
    source = np.arange(count)
    source[~keep[:count]] = count + np.flatnonzero(keep[count:])
    return source


class DecodeState(abc.ABC):
    """Hold the running batch of an engine, as the decoder sees it.

    Lengths are numpy int64 arrays [prompts] and [rows].
    """

    # Holds the weights. May be replaced by another version of the weights between two steps.
    decoder: Any

    def __init__(self) -> None:
        self.prompt_lengths = np.zeros(0, np.int64)
        self.prompt_of_row = np.zeros(0, np.int64)
        # tokens fed so far: 1 less than the sampled tokens
        self.response_lengths = np.zeros(0, np.int64)
        # The model index of each prompt and its rows, if the batch uses several models.
        self.prompt_adapters: list[int] = []
        self._row_adapters: RowAdapters | None = None  # rebuilt after rows were added or removed
        self.records_experts = False  # set by the engine before the first prompt
        # Recorded experts, if recording is on: [tokens, B * K] of each prompt,
        self._prompt_experts: list[np.ndarray] = []
        # and [B * K] of each response token of each row.
        self._row_experts: list[list[np.ndarray]] = []

    @abc.abstractmethod
    def cost(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> int:
        """Return the cache tokens that a batch of this size takes; compared with the configured
        budget.
        """

    @abc.abstractmethod
    def reserve(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> None:
        """Reserve memory for a batch of this size. The running batch is copied."""

    @abc.abstractmethod
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        readers: Sequence[LogitsReader | None],
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> Tensor:
        """Prefill new prompts into the slots after the present slots.

        Returns the logits of the last positions, [prompts, V]. If the reader of a prompt is not
        None, it receives the logits of all positions in slices. `images` holds the images of each
        prompt, if any prompt has images (see `Decoder.check_images`).
        """

    def add_rows(self, prompt_of_row: np.ndarray) -> None:
        """Add rows after the present rows, each with an empty response to the prompt in the
        specified slot.
        """
        self.prompt_of_row = np.concatenate([self.prompt_of_row, prompt_of_row])
        self.response_lengths = np.concatenate(
            [self.response_lengths, np.zeros(len(prompt_of_row), np.int64)]
        )
        self._row_experts += [[] for _ in prompt_of_row]
        self._rows_changed()

    def experts_of_row(self, row: int) -> np.ndarray | None:
        """Return the experts of the tokens of a row, prompt and response, [tokens fed, B * K].

        Returns None if experts are not recorded.
        """
        if not self._prompt_experts:
            return None
        prompt = self._prompt_experts[self.prompt_of_row[row]]
        return np.concatenate([prompt, *(step[None] for step in self._row_experts[row])])

    def record_experts(self, step_experts: np.ndarray | None) -> None:
        """Append the experts of the tokens of a step, [N, B * K]."""
        if step_experts is not None:
            for row, experts in zip(self._row_experts, step_experts, strict=True):
                row.append(experts.copy())  # a view would keep the experts of all rows

    def _new_choices(self) -> list[Tensor] | None:
        """Return a list for the experts of a forward; None if experts are not recorded."""
        return [] if self.records_experts else None

    def _new_prompt_experts(self) -> dict[int, np.ndarray] | None:
        """Return a dict for the experts of new prompts; None if experts are not recorded."""
        return {} if self.records_experts else None

    def _record_cached_row(self, row: int) -> None:
        """Append the experts of a row's tokens as those of a new prompt."""
        if (experts := self.experts_of_row(row)) is not None:
            self._prompt_experts.append(experts)

    def _extend_prompt_experts(
        self,
        slots: Sequence[int],
        tokens: Sequence[Sequence[int]],
        choices: list[Tensor] | None,
    ) -> None:
        """Append the experts of new tokens to those of the prompts in these slots.

        `choices`: the experts [slots, T, K] of each layer, padded on the right.
        """
        experts = copy_choices(choices)
        if experts is None:
            return
        for i, slot in enumerate(slots):
            parts = (self._prompt_experts[slot], experts[i, : len(tokens[i])])
            self._prompt_experts[slot] = np.concatenate(parts)

    def _record_prompts(self, experts: Mapping[int, np.ndarray]) -> None:
        """Append the experts of new prompts, [tokens, B * K] of each by its index."""
        self._prompt_experts += [experts[i] for i in sorted(experts)]

    @abc.abstractmethod
    def decode(self, tokens: np.ndarray) -> Tensor:
        """Feed each row its last token and return the logits of its next token, [rows, V]."""

    supports_extend = False  # whether `cache_row` and `extend_prompts` are implemented

    def cache_row(self, row: int) -> None:
        """Add the tokens that a row has been fed (prompt and response) as a new prompt.

        The caller has reserved the memory (`reserve`).
        """
        raise NotImplementedError

    def extend_prompts(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to the prompts in these slots and prefill them.

        Returns the logits of the last positions, [slots, V].
        """
        raise NotImplementedError

    def retain(self, row_source: np.ndarray, prompt_source: np.ndarray) -> None:
        """Keep only the rows and prompts of the sources, in that order (see `compact_slots`)."""
        self._move_rows(row_source)
        self._move_prompts(prompt_source)
        new_slot = np.full(len(self.prompt_lengths), -1, np.int64)
        new_slot[prompt_source] = np.arange(len(prompt_source))
        self.prompt_lengths = self.prompt_lengths[prompt_source]
        self.prompt_of_row = new_slot[self.prompt_of_row[row_source]]
        self.response_lengths = self.response_lengths[row_source]
        self.prompt_adapters = (
            [self.prompt_adapters[slot] for slot in prompt_source] if self.prompt_adapters else []
        )
        self._row_experts = [self._row_experts[row] for row in row_source]
        if self._prompt_experts:
            self._prompt_experts = [self._prompt_experts[slot] for slot in prompt_source]
        self._rows_changed()

    def _rows_changed(self) -> None:
        """Handle a change of the rows. Called after rows were added or removed."""
        self._row_adapters = None

    def _get_row_adapters(self) -> RowAdapters | None:
        """Return the rows grouped by adapter, or None if the decoder does not mix adapters."""
        if self._row_adapters is None and self.decoder.multi_adapter:
            self._row_adapters = self.decoder.group_by_adapter(
                [self.prompt_adapters[slot] for slot in self.prompt_of_row]
            )
        return self._row_adapters

    @abc.abstractmethod
    def _move_rows(self, source: np.ndarray) -> None: ...

    @abc.abstractmethod
    def _move_prompts(self, source: np.ndarray) -> None: ...
