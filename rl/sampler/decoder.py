"""Define the decoder interface of the engine: load and fork weights, and create a decode state."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from rl.images import make_no_images_error
from rl.sampler.decode_state import DecodeState, Prompt
from rl.sampler.rope_switch import RopeLengthSwitch
from rl.types import PlacedImage

NamedTensors = Iterable[tuple[str, Tensor]]

MAX_LOGITS_PER_SLICE = 1 << 25  # numbers in the prompt logits that exist at a time for readers


class Decoder(abc.ABC):
    """Hold a copy of a model's weights for generation; training the model does not change it.

    `vocab_size` is the width of the logits, `max_positions` the number of positions that can be fed
    (None: unbounded), `length_switch` the length at which the rotary frequencies change (None: they
    do not change), `dtype` the dtype of the matrices.
    """

    vocab_size: int
    max_positions: int | None
    length_switch: RopeLengthSwitch | None = None
    device: torch.device
    dtype: torch.dtype
    name = "this sampler"  # in errors
    multi_adapter = False  # whether rows may use different adapters (`MultiAdapterDecoder`)
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

    def dtype_of(self, name: str) -> torch.dtype | None:
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
    def read_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Pass the logits of every position of each prompt to its reader. Nothing is cached."""

    def weights_name(self, adapter_id: int | None) -> str:
        """Return the name of the weights of `adapter_id`; two weights never have the same."""
        return ""

    def broadcast_tokens(self, sampled: Tensor) -> Tensor:
        """Return the sampled tokens; if several ranks split the decoder, those of the first rank,
        on all ranks.
        """
        return sampled

    def check_images(self, prompt: Sequence[int], images: Sequence[PlacedImage]) -> None:
        """Raise UserError for images that this decoder cannot read."""
        if images:
            raise make_no_images_error(self.name)


def batch_prompts(
    lengths: Sequence[int], max_tokens: int, kinds: Sequence[Any] = ()
) -> list[list[int]]:
    """Partition prompts into batches that are padded to their longest prompt.

    A batch has prompts of similar length and at most `max_tokens` padded tokens. Its shortest
    prompt has at least three quarters of the length of its longest (or differs by at most 16
    tokens), so little of it is padding. `kinds`: a value for each prompt. Only prompts with equal
    values share a batch, and the batches are in ascending order of it.
    """
    kinds = kinds if len(kinds) else [0] * len(lengths)
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (kinds[i], -lengths[i])):
        batch = batches[-1] if batches else []
        longest = lengths[batch[0]] if batch else 0
        fits = batch and kinds[i] == kinds[batch[0]] and (len(batch) + 1) * longest <= max_tokens
        if fits and (lengths[i] * 4 >= longest * 3 or lengths[i] >= longest - 16):
            batch.append(i)
        else:
            batches.append([i])
    return batches
