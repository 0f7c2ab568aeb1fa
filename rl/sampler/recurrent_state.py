"""Decode rows of any lengths in a single batch, for models that carry a recurrent state.

Each row has a slot, next to the keys of its attention layers. A state (of a convolution, of linear
attention, of a state space) has the same size whatever the length of its sequence, so rows of
different lengths share the batch without change. Keys and values are padded on the left, as in
`padded_state`. Prompts are prefilled with others of equal length, unpadded, once for their group.
The cache is the model's native kind and persists from step to step; it is rebuilt when rows are
added. Windows are masked, not cut: their layers keep all keys, so that rows of any length align.
Shapes: P prompts, N rows, H key heads, L cached positions, D head width. The first dimension of a
state is the row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.sampler.decode_state import DecodeState, LogitsReader
from rl.sampler.forward_hf import HFForward
from rl.types import PlacedImage


@dataclass(slots=True)
class _LayerCache:
    """Hold the cache of some rows in a layer.

    `keys`: keys and values [N, H, L, D], or None. `states`: the states [N, ...] by name.
    """

    keys: tuple[Tensor, Tensor] | None = None
    states: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def rows(self, index: Tensor | slice, longest: int) -> _LayerCache:
        """Return the selected rows, with the last `longest` positions of each."""
        pair = (
            None
            if self.keys is None
            else tuple(tensor[index, :, tensor.shape[2] - longest :] for tensor in self.keys)
        )
        return _LayerCache(pair, {name: state[index] for name, state in self.states.items()})  # type: ignore[arg-type]


class RecurrentState(DecodeState):
    """Store the cache of each prompt (`prompts`, each a batch of 1 row) and of the running rows
    (`cache`).
    """

    def __init__(self, decoder: HFForward):
        super().__init__()
        self.decoder = decoder
        self.prompts: list[list[_LayerCache]] = []
        self.cache: Any = None

    def cost(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> int:
        return prompts * longest_prompt + rows * (longest_prompt + longest_response)

    def reserve(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> None:
        """Do nothing: the cache grows as needed and stays within `cost`."""

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        readers: Sequence[LogitsReader | None],
        images: Sequence[Sequence[PlacedImage]] = (),
    ) -> Tensor:
        last: list[Tensor] = [torch.empty(0)] * len(prompts)
        prompt_layers: list[list[_LayerCache]] = [[] for _ in prompts]
        experts: dict[int, np.ndarray] = {}
        for batch in self.decoder.batch_by_length([len(prompt) for prompt in prompts]):
            cache = self.decoder.new_full_cache()
            needs_all_logits = any(readers[i] is not None for i in batch)
            logits = self.decoder.cached_forward(
                [prompts[i] for i in batch], cache, last_only=not needs_all_logits
            )
            layers = [_read_layer(layer) for layer in cache.layers]
            for place, i in enumerate(batch):
                last[i] = logits[place, -1].float()
                if self.decoder.experts is not None:
                    experts[i] = self.decoder.experts[place]
                prompt_layers[i] = [
                    layer.rows(slice(place, place + 1), len(prompts[i])) for layer in layers
                ]
                if (reader := readers[i]) is not None:
                    reader(0, logits[place])
        self.prompts.extend(prompt_layers)
        self._record_prompts(experts)
        self.prompt_lengths = np.concatenate(
            [self.prompt_lengths, [len(prompt) for prompt in prompts]]
        ).astype(np.int64)
        return torch.stack(last)

    def lengths(self) -> np.ndarray:
        """Return the positions of each row, prompt and response."""
        return self.prompt_lengths[self.prompt_of_row] + self.response_lengths

    def add_rows(self, prompt_of_row: np.ndarray) -> None:
        super().add_rows(prompt_of_row)
        longest = int(self.lengths().max())
        running = (
            [_read_layer(layer) for layer in self.cache.layers] if self.cache is not None else None
        )
        self.cache = self.decoder.new_full_cache()
        prompts = np.unique(prompt_of_row)
        at = torch.from_numpy(np.searchsorted(prompts, prompt_of_row)).to(self.decoder.device)
        for number, layer in enumerate(self.cache.layers):
            read = [self.prompts[prompt][number] for prompt in prompts]
            before = [running[number]] if running is not None else []
            keys = _pad_and_stack(
                [cached.keys for cached in before], [cached.keys for cached in read], at, longest
            )
            states = {}
            for name, like in read[0].states.items():
                new = torch.cat([cached.states[name] for cached in read])[at]
                states[name] = torch.cat([*(cached.states[name] for cached in before), new])
                if states[name].shape[1:] != like.shape[1:]:
                    raise NotImplementedError(
                        f"states of shapes {states[name].shape} and {like.shape} cannot be "
                        "rows of the same batch"
                    )
            _fill_layer(layer, _LayerCache(keys, states))

    def decode(self, tokens: np.ndarray) -> Tensor:
        lengths = torch.from_numpy(self.lengths())
        longest = int(lengths.max())
        mask = (
            (torch.arange(longest + 1) >= longest - lengths[:, None]).long()
            if self.decoder.layers.num_kv_layers
            else None
        )
        logits = self.decoder.padded_forward(
            torch.from_numpy(tokens)[:, None], mask, lengths[:, None], self.cache, last_only=True
        )
        experts = self.decoder.experts
        self.record_experts(None if experts is None else experts[:, 0])
        self.response_lengths = self.response_lengths + 1
        return logits[:, -1]

    def _move_rows(self, source: np.ndarray) -> None:
        if not len(source):
            self.cache = None
            return
        if self.cache is None:
            return
        longest = int(self.lengths()[source].max())
        index = torch.from_numpy(source).to(self.decoder.device)
        moved = [_read_layer(layer).rows(index, longest) for layer in self.cache.layers]
        self.cache = self.decoder.new_full_cache()
        for layer, rows in zip(self.cache.layers, moved, strict=True):
            _fill_layer(layer, rows)

    def _move_prompts(self, source: np.ndarray) -> None:
        self.prompts = [self.prompts[slot] for slot in source]


def _pad_and_stack(
    running_kv: Sequence[Any], prompt_kv: Sequence[Any], prompt_of_row: Tensor, longest: int
) -> tuple[Tensor, Tensor] | None:
    """Return the keys and values of the running rows, followed by those of the new rows.

    The keys and values of a new row come from its prompt. All are padded on the left to `longest`.
    """
    if prompt_kv[0] is None:
        return None
    stacked = []
    for which in (0, 1):
        running = [pair[which] for pair in running_kv]
        like = prompt_kv[0][which]
        merged = like.new_zeros(
            sum(map(len, running)) + len(prompt_of_row), like.shape[1], longest, like.shape[3]
        )
        for tensor in running:
            merged[: len(tensor), :, longest - tensor.shape[2] :] = tensor
        first = len(merged) - len(prompt_of_row)
        for number, pair in enumerate(prompt_kv):
            source = pair[which]
            merged[
                first + torch.nonzero(prompt_of_row == number)[:, 0], :, longest - source.shape[2] :
            ] = source
        stacked.append(merged)
    return stacked[0], stacked[1]


def _iter_states(layer: Any) -> Iterator[tuple[str, int]]:
    """Yield the states that a layer of a cache may hold: kind and number."""
    for kind in ("conv", "recurrent"):
        for number in getattr(layer, f"{kind}_states", None) or {}:
            yield kind, number


def _read_layer(layer: Any) -> _LayerCache:
    """Return the contents of a layer of a cache.

    Raises NotImplementedError if the layer is of an unknown kind that holds more than keys and
    values.
    """
    states = {(kind, i): getattr(layer, f"{kind}_states")[i] for kind, i in _iter_states(layer)}
    known = {name: state for name, state in states.items() if isinstance(state, Tensor)}
    keys = getattr(layer, "keys", None)
    if not isinstance(keys, Tensor) or keys.dim() != 4:
        return _LayerCache(None, known)
    if type(layer).__name__ not in ("DynamicLayer", "LinearAttentionAndFullAttentionLayer"):
        raise NotImplementedError(
            f"a layer of the cache is a {type(layer).__name__}, "
            "which holds more than keys and values"
        )
    return _LayerCache((keys, layer.values), known)


def _fill_layer(layer: Any, rows: _LayerCache) -> None:
    """Fill an empty layer of a cache."""
    if rows.keys is not None:
        layer.update(*rows.keys)
    for (kind, number), state in rows.states.items():
        getattr(layer, f"{kind}_states")[number] = state
        getattr(layer, f"is_{kind}_states_initialized")[number] = True
        layer.has_previous_state[number] = True
        if kind == "conv":
            layer.conv_kernel_size[number] = state.shape[-1]
        layer.dtype, layer.device = state.dtype, state.device
