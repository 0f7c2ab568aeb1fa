"""Define the decoder interface of the engine: load and fork weights, and create a decode state."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from rl.images import without_reader
from rl.sampler.cache import DecodeState, LogitsReader
from rl.sampler.lengths import LengthSwitch
from rl.types import PlacedImage

NamedTensors = Iterable[tuple[str, Tensor]]


class Decoder(abc.ABC):
    """Hold a copy of a model's weights for generation; training the model does not change it.

    `vocab_size` is the width of the logits, `max_positions` the number of positions that can be fed
    (None: unbounded), `length_switch` the length at which the rotary frequencies change (None: they
    do not change), `dtype` the dtype of the matrices.
    """

    vocab_size: int
    max_positions: int | None
    length_switch: LengthSwitch | None = None
    device: torch.device
    dtype: torch.dtype
    # The decoder of the model without adapters, if this decoder shares all memory but the adapters
    # with it.
    base: Decoder | None = None

    @abc.abstractmethod
    def load_(self, named_tensors: NamedTensors) -> None:
        """Copy tensors of any dtype and device into the weights, one by one, by the model's
        parameter names.

        Raises ValueError for an unknown name, a wrong shape, or a different value for a frozen
        weight that forks share.
        """

    def held_in(self, name: str) -> torch.dtype | None:
        """Return the dtype of a parameter in this decoder; None if the decoder has no parameter of
        that name.
        """
        return None

    @abc.abstractmethod
    def fork(self) -> Self:
        """Return a decoder for another version of the weights.

        It shares the frozen weights and copies the trainable weights.
        """

    @abc.abstractmethod
    def new_state(self, kv_cache_tokens: int) -> DecodeState:
        """Return an empty batch to decode in.

        The engine keeps its cache within the budget (see `cost`).
        """

    @abc.abstractmethod
    def read_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        readers: Sequence[LogitsReader],
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> None:
        """Pass the logits of every position of each prompt to its reader. Nothing is cached.

        `images` holds the images of each prompt, if any prompt has images.
        """

    def agreed(self, drawn: Tensor) -> Tensor:
        """Return the sampled tokens; if several ranks split the decoder, those of the first rank,
        on all ranks.
        """
        return drawn

    def check_images(self, prompt: Sequence[int], images: Sequence[PlacedImage]) -> None:
        """Raise UserError for images that this decoder cannot read."""
        if images:
            raise without_reader("this sampler")


def check_length(decoder: Decoder, prompt: int, wanted: int) -> None:
    """Check that the rotary frequencies do not change within a sequence.

    Raises ValueError if a sequence of `wanted` tokens, of which `prompt` are the prompt, has no
    single set of rotary frequencies.
    """
    switch = decoder.length_switch
    if switch is not None and (most := switch.most(prompt)) is not None and wanted > most:
        raise ValueError(switch.refusal(prompt, wanted))


def prompt_batches(
    lengths: Sequence[int], max_tokens: int, sees: Sequence[bool] | np.ndarray = ()
) -> list[list[int]]:
    """Partition prompts into batches that are padded to their longest prompt.

    A batch has prompts of similar length and at most `max_tokens` padded tokens. Its shortest
    prompt has at least three quarters of the length of its longest (or differs by at most 16
    tokens), so little of it is padding. `sees`: which prompts have images; these form separate
    batches.
    """
    if any(sees):
        sides = [
            [i for i in range(len(lengths)) if bool(sees[i]) == side] for side in (False, True)
        ]
        return [
            [members[i] for i in batch]
            for members in sides
            for batch in prompt_batches([lengths[i] for i in members], max_tokens)
        ]
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
