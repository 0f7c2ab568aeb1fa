"""What the engine asks of a decoder: weights that can be loaded and forked, and a state to decode
in.
"""

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
    """A copy of a model's weights that generates; training the model does not change it.

    `vocab_size` is the width of its logits, `max_positions` the number of positions it can be fed
    (None: unbounded), `length_switch` where its rotary frequencies change with the length (None:
    nowhere), `dtype` that of its matrices.
    """

    vocab_size: int
    max_positions: int | None
    length_switch: LengthSwitch | None = None
    device: torch.device
    dtype: torch.dtype
    # of the bare model under its adapters, where all but these is that one's memory
    base: Decoder | None = None

    @abc.abstractmethod
    def load_(self, named_tensors: NamedTensors) -> None:
        """Copy tensors of any dtype and device into the weights, one at a time, by the model's own
        parameter names.

        Errors: an unknown name, a wrong shape, a different value for a frozen weight that forks
        share.
        """

    def held_in(self, name: str) -> torch.dtype | None:
        """The dtype that a parameter has here, by the model's own name; None where it has none of
        that name.
        """
        return None

    @abc.abstractmethod
    def fork(self) -> Self:
        """A decoder for another version of the weights: frozen ones are shared, trainable ones
        copied.
        """

    @abc.abstractmethod
    def new_state(self, kv_cache_tokens: int) -> DecodeState:
        """An empty batch to decode in, whose cache is to stay within the budget (the engine sees to
        it; see `cost`).
        """

    @abc.abstractmethod
    def read_prompts(
        self,
        prompts: Sequence[Sequence[int]],
        readers: Sequence[LogitsReader],
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> None:
        """Show the logits of every position of each prompt to its reader; nothing is kept.
        `images`: of each prompt, where any has some.
        """

    def agreed(self, drawn: Tensor) -> Tensor:
        """What was drawn from its logits; where several ranks hold the decoder, what the first of
        them drew, on all.
        """
        return drawn

    def check_images(self, prompt: Sequence[int], images: Sequence[PlacedImage]) -> None:
        """Raises UserError for images that this decoder cannot read."""
        if images:
            raise without_reader("this sampler")


def check_length(decoder: Decoder, prompt: int, wanted: int) -> None:
    """ValueError where a sequence of `wanted` tokens that starts with `prompt` of them has no one
    set of rotary frequencies.
    """
    switch = decoder.length_switch
    if switch is not None and (most := switch.most(prompt)) is not None and wanted > most:
        raise ValueError(switch.refusal(prompt, wanted))


def prompt_batches(
    lengths: Sequence[int], max_tokens: int, sees: Sequence[bool] | np.ndarray = ()
) -> list[list[int]]:
    """Prompts cut into batches for padding to their longest: similar lengths together, at most
    `max_tokens` padded tokens.

    `sees`: which have images; these are batches of their own.

    Each batch's shortest is at least three quarters of its longest (or within 16 tokens), so little
    of it is padding.
    """
    if any(sees):
        sides = [
            [i for i in range(len(lengths)) if bool(sees[i]) == side] for side in (False, True)
        ]
        return [
            [own[i] for i in batch]
            for own in sides
            for batch in prompt_batches([lengths[i] for i in own], max_tokens)
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
