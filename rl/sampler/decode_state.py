"""Define the decode state: the KV cache of the prompts and of the response of each running row.

A prompt is stored once, however many rows respond to it. A row stores only its response. Rows and
prompts are compact (slots 0..n-1): when some are removed, survivors from the end move into the
holes. Subclasses store the keys and values. This base class tracks the lengths and decides which
slots move.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl.sampler.prefix_cache import Hashes
from rl.types import PlacedImage

# Called with (first position, logits [positions, V]), slice after slice, as a prompt is read.
LogitsReader = Callable[[int, Tensor], None]


def compact_slots(keep: np.ndarray) -> np.ndarray:
    """Return the source slot of each slot after compaction.

    A survivor moves only if it must fill a hole.

    >>> compact_slots(np.array([True, False, True, False, True])).tolist()
    [0, 4, 2]
    """
    count = int(keep.sum())
    source = np.arange(count)
    source[~keep[:count]] = count + np.flatnonzero(keep[count:])
    return source


def find_missing(source: np.ndarray, count: int) -> np.ndarray:
    """Return the slots below `count` that are not in `source`, ascending.

    >>> find_missing(np.array([0, 4, 2]), 5).tolist()
    [1, 3]
    """
    missing = np.ones(count, np.bool_)
    missing[source] = False
    return np.flatnonzero(missing)


def index_in_row(rows: np.ndarray) -> np.ndarray:
    """Return the index of each entry among the entries of its row; `rows` [X] ascend.

    >>> index_in_row(np.array([0, 0, 0, 2, 3, 3])).tolist()
    [0, 1, 2, 0, 0, 1]
    """
    return np.arange(len(rows)) - np.searchsorted(rows, rows)


def pad_right(rows: Sequence[Sequence[int]]) -> Tensor:
    """Return rows of numbers as a tensor [rows, longest], padded with zeros on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


def send_to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device.

    On CUDA the copy from pinned memory is asynchronous: kernels that read the tensor wait for it,
    the host does not.
    """
    return (
        host.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else host.to(device)
    )


class BatchSize(NamedTuple):
    """Hold the numbers of prompts and rows of a batch, and the positions of the longest of each."""

    prompts: int = 0
    longest_prompt: int = 0
    rows: int = 0
    longest_response: int = 0


@dataclass(eq=False, slots=True)
class Prompt:
    """Hold a prompt to read, and what is known of it while it is in a batch.

    `reader` receives the logits of all positions in slices. `images`: see `Decoder.check_images`.
    `adapter_id`: of its model, if the decoder mixes. `hashes`: of its chunks, if cached prefixes
    may be reused. `key`: requests with this key share the prompt.

    The prefill sets the others. `target`: what the state holds of it, such as its slot or its block
    table. `reused`: number of tokens that were not computed. `experts`: of all tokens, int16
    [tokens, B * K], if recorded. `logits_V`: after the last token, set by the engine.
    """

    tokens: Sequence[int]
    reader: LogitsReader | None = None
    images: Sequence[PlacedImage] = ()
    adapter_id: int = 0
    hashes: Hashes = ()
    key: tuple = ()
    target: Any = None
    reused: int = 0
    experts: np.ndarray | None = None
    logits_V: Tensor | None = None


def store_experts(prompts: Sequence[Prompt], chosen: np.ndarray | None) -> None:
    """Append to the experts of each prompt's reused tokens those that were `chosen` for its other
    tokens [prompts, T, B * K], padded on the right. None: none are recorded.
    """
    if chosen is None:
        return
    for prompt, experts in zip(prompts, chosen, strict=True):
        before = [] if prompt.experts is None else [prompt.experts]
        count = len(prompt.tokens) - prompt.reused
        # a copy, so that the padded array is freed
        prompt.experts = np.concatenate([*before, experts[:count]])


class DecodeState(abc.ABC):
    """Hold the running batch of an engine, as the decoder sees it.

    `decoder` holds the weights. It may be replaced by another version of the weights between two
    steps. Lengths are numpy int64 arrays [prompts] and [rows].
    """

    chunk_size: int | None = None  # positions of a hash; None: cached prefixes are not reused
    caches_rows_without_copy = False  # whether `cache_row` copies nothing

    def __init__(self, decoder: Any) -> None:
        self.decoder = decoder
        self.prompts: list[Prompt] = []  # by slot
        self.prompt_lengths = np.zeros(0, np.int64)
        self.prompt_of_row = np.zeros(0, np.int64)
        # tokens fed so far: 1 less than the sampled tokens
        self.response_lengths = np.zeros(0, np.int64)
        self.records_experts = False  # set by the engine before the first prompt
        # first chunks of the prompts to come, set by the engine; None: unknown
        self.waiting_prefixes: Collection[bytes] | None = None
        # recorded experts [B * K] of each response token of each row; empty if none are recorded
        self._row_experts: list[list[np.ndarray]] = []

    def cost(self, size: BatchSize) -> int:
        """Return the cache tokens that a batch of this size takes; compared with the configured
        budget.
        """
        longest = size.longest_prompt + size.longest_response
        return size.prompts * size.longest_prompt + size.rows * longest

    def reserve(self, size: BatchSize) -> None:  # noqa: B027  (nothing, by default)
        """Reserve memory for a batch of this size, if the cache does not grow by itself. The
        running batch is copied.
        """

    def used_tokens(self, size: BatchSize) -> int:
        """Return the part of the budget that a batch of this size takes (see `cost`)."""
        return self.cost(size)

    def prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        """Prefill new prompts into the slots after the present slots.

        Returns the logits of the last positions, [prompts, V].
        """
        logits_PV = self._prefill(prompts)
        self._append_prompts(prompts)
        return logits_PV

    @abc.abstractmethod
    def _prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        """Store new prompts and return the logits of their last positions."""

    def _append_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Append slots of prompts."""
        lengths = np.array([len(prompt.tokens) for prompt in prompts], np.int64)
        self.prompt_lengths = np.concatenate([self.prompt_lengths, lengths])
        self.prompts += prompts

    def add_rows(self, prompt_of_row: np.ndarray) -> None:
        """Add rows after the present rows, each with an empty response to the prompt in the
        specified slot.
        """
        self.prompt_of_row = np.concatenate([self.prompt_of_row, prompt_of_row])
        self.response_lengths = np.concatenate(
            [self.response_lengths, np.zeros(len(prompt_of_row), np.int64)]
        )
        if self.records_experts:
            self._row_experts += [[] for _ in prompt_of_row]
        self._rows_changed()

    def lengths(self) -> np.ndarray:
        """Return the cached positions of each row, prompt and response."""
        return self.prompt_lengths[self.prompt_of_row] + self.response_lengths

    def experts_of_row(self, row: int) -> np.ndarray | None:
        """Return the experts of the tokens of a row, prompt and response, [tokens fed, B * K].

        Returns None if experts are not recorded.
        """
        prompt = self.prompts[self.prompt_of_row[row]].experts
        if prompt is None:
            return None
        return np.concatenate([prompt, *(step[None] for step in self._row_experts[row])])

    def record_experts(
        self, step_experts: np.ndarray | None, rows: np.ndarray | None = None
    ) -> None:
        """Append the experts of the tokens of a step, [N, B * K], or of the tokens of `rows`."""
        if step_experts is not None and self.records_experts:
            for row, experts in zip(
                range(len(step_experts)) if rows is None else rows, step_experts, strict=True
            ):
                # a view would keep the experts of all rows
                self._row_experts[row].append(experts.copy())

    @abc.abstractmethod
    def decode(self, tokens: np.ndarray) -> Tensor:
        """Feed each row its last token and return the logits of its next token, [rows, V]."""

    def cache_row(self, row: int, hashes: Hashes) -> None:  # noqa: B027
        """Keep the tokens that a row has been fed (prompt and response) for prompts that begin with
        them, as far as there is room.
        """

    def forget_prefixes(self) -> None:  # noqa: B027
        """Remove all cached prefixes: the weights have changed."""

    def retain(self, row_source: np.ndarray, prompt_source: np.ndarray) -> None:
        """Keep only the rows and prompts of the sources, in that order (see `compact_slots`)."""
        self._move_rows(row_source)
        self.prompt_of_row = self.prompt_of_row[row_source]
        if len(prompt_source) < len(self.prompts):  # otherwise no prompt moves
            self._move_prompts(prompt_source)
            new_slot = np.full(len(self.prompt_lengths), -1, np.int64)
            new_slot[prompt_source] = np.arange(len(prompt_source))
            self.prompts = [self.prompts[slot] for slot in prompt_source]
            self.prompt_lengths = self.prompt_lengths[prompt_source]
            self.prompt_of_row = new_slot[self.prompt_of_row]
        self.response_lengths = self.response_lengths[row_source]
        if self.records_experts:
            self._row_experts = [self._row_experts[row] for row in row_source]
        self._rows_changed()

    def _rows_changed(self) -> None:  # noqa: B027
        """Handle a change of the rows or prompts. Called after it."""

    @abc.abstractmethod
    def _move_rows(self, source: np.ndarray) -> None: ...

    def _move_prompts(self, source: np.ndarray) -> None:  # noqa: B027
        """Move what is held of prompts beside `prompts`. Called before these move."""
