"""What the engine asks of a decoder: weights that can be loaded and forked, and a state to decode in."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Self

import torch
from torch import Tensor

from rl.sampler.cache import DecodeState, LogitsReader

NamedTensors = Iterable[tuple[str, Tensor]]


class Decoder(abc.ABC):
    """A copy of a model's weights that generates; training the model does not change it.

    `vocab_size` is the width of its logits, `max_positions` the number of positions it can be fed (None: unbounded).
    """

    vocab_size: int
    max_positions: int | None
    device: torch.device

    @abc.abstractmethod
    def load_(self, named_tensors: NamedTensors) -> None:
        """Copy tensors of any dtype and device into the weights, one at a time, by the model's own parameter names.

        Errors: an unknown name, a wrong shape, a different value for a frozen weight that forks share.
        """

    @abc.abstractmethod
    def fork(self) -> Self:
        """A decoder for another version of the weights: frozen ones are shared, trainable ones copied."""

    @abc.abstractmethod
    def new_state(self, kv_cache_tokens: int) -> DecodeState:
        """An empty batch to decode in, whose cache is to stay within the budget (the engine sees to it; see `cost`)."""

    @abc.abstractmethod
    def read_prompts(self, prompts: Sequence[Sequence[int]], readers: Sequence[LogitsReader]) -> None:
        """Show the logits of every position of each prompt to its reader; nothing is kept."""


def prompt_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Prompts cut into batches for padding to their longest: similar lengths together, at most `max_tokens` padded tokens.

    Each batch's shortest is at least three quarters of its longest (or within 16 tokens), so little of it is padding.
    """
    batches: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = batches and (len(batches[-1]) + 1) * longest <= max_tokens
        if fits and (lengths[i] * 4 >= longest * 3 or lengths[i] >= longest - 16):
            batches[-1].append(i)
        else:
            batches.append([i])
            longest = lengths[i]
    return batches
