"""What a decoder remembers between steps: the prompts and, for each running row, its response.

A prompt is stored once, however many rows answer it; a row holds its response alone. Rows and
prompts are kept compact (slots
0..n-1): when some leave, survivors from the end move into the holes. Subclasses store the keys and
values; this base keeps the lengths and says who moves.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rl.types import PlacedImage

# Called with (first position, logits [positions, V]), slice after slice, as a prompt is read.
LogitsReader = Callable[[int, Tensor], None]


def compaction(keep: np.ndarray) -> np.ndarray:
    """For each slot after compaction the slot it comes from; survivors stay where they are unless a
    hole must be filled.

    >>> compaction(np.array([True, False, True, False, True])).tolist()
    [0, 4, 2]
    """
    kept = int(keep.sum())
    source = np.arange(kept)
    source[~keep[:kept]] = kept + np.flatnonzero(keep[kept:])
    return source


class DecodeState(abc.ABC):
    """The running batch of one engine, as the decoder sees it. Lengths are numpy int64: [prompts]
    and [rows].
    """

    # whose weights it decodes with; another version of them may take its place between two steps
    decoder: Any

    def __init__(self) -> None:
        self.prompt_lengths = np.zeros(0, np.int64)
        self.prompt_of_row = np.zeros(0, np.int64)
        # tokens fed so far, so one less than tokens drawn
        self.response_lengths = np.zeros(0, np.int64)
        # where a batch is of several models: whose read each prompt, and draw its rows
        self.prompt_weights: list[int] = []
        # where experts are noted: [tokens, B * K] of each prompt,
        self._prompt_experts: list[np.ndarray] = []
        # and [B * K] of each token of each row's response
        self._row_experts: list[list[np.ndarray]] = []

    @abc.abstractmethod
    def cost(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> int:
        """Tokens of cache that such a batch takes: what the configured budget is compared with."""

    @abc.abstractmethod
    def reserve(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> None:
        """Make room for a batch of this size; the running one moves along."""

    @abc.abstractmethod
    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        readers: Sequence[LogitsReader | None],
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> Tensor:
        """Read new prompts into the slots after the present ones. Logits of the last positions
        back, [prompts, V].

        A prompt whose reader is not None has the logits of all its positions shown to it, in
        slices. `images`: of each prompt, where any has some (see `Decoder.check_images`).
        """

    def enter(self, prompt_of_row: np.ndarray) -> None:
        """Add rows after the present ones, each with an empty response to the prompt in the given
        slot.
        """
        self.prompt_of_row = np.concatenate([self.prompt_of_row, prompt_of_row])
        self.response_lengths = np.concatenate(
            [self.response_lengths, np.zeros(len(prompt_of_row), np.int64)]
        )
        self._row_experts += [[] for _ in prompt_of_row]
        self._rows_changed()

    def experts(self, row: int) -> np.ndarray | None:
        """Those that the tokens of a row went to, prompt and response, [tokens fed, B * K]; None
        where they are not noted.
        """
        if not self._prompt_experts:
            return None
        prompt = self._prompt_experts[self.prompt_of_row[row]]
        return np.concatenate([prompt, *(step[None] for step in self._row_experts[row])])

    def _note_experts(self, found: np.ndarray | None) -> None:
        """Of the tokens of one step, [N, 1, B * K]."""
        if found is not None:
            for row, experts in zip(self._row_experts, found[:, 0], strict=True):
                row.append(experts)

    @abc.abstractmethod
    def decode(self, tokens: np.ndarray) -> Tensor:
        """Feed each row its last token; logits [rows, V] for its next."""

    extends = False  # whether `keep_row` and `extend` are there

    def keep_row(self, row: int) -> None:
        """A new prompt after the present ones: what a row has read and been fed. There is room for
        it (`reserve`).
        """
        raise NotImplementedError

    def extend(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Reads these tokens at the end of the prompts in these slots. Logits of the last positions
        back, [slots, V].
        """
        raise NotImplementedError

    def leave(self, row_source: np.ndarray, prompt_source: np.ndarray) -> None:
        """Keep the rows and prompts of the sources, in that order (see `compaction`)."""
        self._move_rows(row_source)
        self._move_prompts(prompt_source)
        new_slot = np.full(len(self.prompt_lengths), -1, np.int64)
        new_slot[prompt_source] = np.arange(len(prompt_source))
        self.prompt_lengths = self.prompt_lengths[prompt_source]
        self.prompt_of_row = new_slot[self.prompt_of_row[row_source]]
        self.response_lengths = self.response_lengths[row_source]
        self.prompt_weights = (
            [self.prompt_weights[slot] for slot in prompt_source] if self.prompt_weights else []
        )
        self._row_experts = [self._row_experts[row] for row in row_source]
        if self._prompt_experts:
            self._prompt_experts = [self._prompt_experts[slot] for slot in prompt_source]
        self._rows_changed()

    def _rows_changed(self) -> None:  # noqa: B027  (a hook; most states need nothing)
        """Called after rows entered or left."""

    @abc.abstractmethod
    def _move_rows(self, source: np.ndarray) -> None: ...

    @abc.abstractmethod
    def _move_prompts(self, source: np.ndarray) -> None: ...
