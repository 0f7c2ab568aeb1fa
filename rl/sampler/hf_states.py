"""Hold the caches of the HF decoder, one class for each `BatchingPlan.rows`.

`RecurrentState` decodes rows of any lengths in a single batch. Keys and values are padded on the
left; a recurrent state (of a convolution, of linear attention, of a state space) has the same size
whatever the length of its sequence. Prompts are prefilled with others of equal length, unpadded.
`PaddedState` prefills prompts of any lengths and images, for models without recurrent states.
`EqualLengthState` keeps rows of equal length in the model's native cache; nothing is padded, masked
or merged. `RecomputeState` has no cache: every token recomputes its whole sequence, as a learner
does. It is slow and exact. Shapes: P prompts, N rows, H key heads, L cached positions, D head
width, T positions, V vocabulary. The first dimension of a recurrent state is the row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rl.sampler.decode_state import DecodeState, Prompt
from rl.sampler.decoder import batch_prompts
from rl.sampler.forward_hf import HFForward
from rl.types import PlacedImage

Images = Sequence[Sequence[PlacedImage]]


class HFState(DecodeState):
    """Share the prefill of the caches, in batches of prompts of equal length.

    The target of a prompt is what is cached of it (`_read_prompt`).
    """

    decoder: HFForward

    def _prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        last: list[Tensor] = [torch.empty(0)] * len(prompts)
        max_tokens = self.decoder.max_batch_tokens(any(prompt.reader for prompt in prompts))
        for indices in self._batch_prompts(prompts, max_tokens):
            members = [prompts[i] for i in indices]
            with self.decoder.slice_logits(members) as sliced:
                logits, cache = self._forward_prompts(
                    [prompt.tokens for prompt in members],
                    [prompt.images for prompt in members],
                    not any(prompt.reader for prompt in members),
                )
            for row, (i, prompt) in enumerate(zip(indices, members, strict=True)):
                length = len(prompt.tokens)
                last[i] = logits[row, -1].float()
                prompt.target = self._read_prompt(cache, row, prompt.tokens)
                if self.records_experts and self.decoder.experts is not None:
                    prompt.experts = self.decoder.experts[row, -length:]
                if prompt.reader is not None and not sliced:
                    prompt.reader(0, logits[row, -length:])
        return torch.stack(last)

    def _batch_prompts(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        """Return batches of indices of prompts that share a forward, of at most `max_tokens` tokens
        if it is several.
        """
        return self.decoder.batch_by_length([len(prompt.tokens) for prompt in prompts], max_tokens)

    def _new_cache(self) -> Any:
        """Return an empty cache for a forward."""
        return self.decoder.new_cache()

    def _forward_prompts(
        self, prompts: Sequence[Sequence[int]], images: Images, last_only: bool
    ) -> tuple[Tensor, Any]:
        """Return the logits [P, T or 1, V] of a batch, the last position of each prompt last, and
        the filled cache.
        """
        cache = self._new_cache()
        return self.decoder.cached_forward(prompts, cache, last_only), cache

    def _read_prompt(self, cache: Any, row: int, prompt: Sequence[int]) -> Any:
        """Return what is kept of a prompt, which is row `row` of a filled cache."""
        return cache, row

    def _new_logits(self, rows: int) -> Tensor:
        """Return memory for the logits of a step, [N, V]."""
        size = (rows, self.decoder.vocab_size)
        return torch.empty(size, dtype=torch.float32, device=self.decoder.device)


@dataclass(slots=True)
class _LayerCache:
    """Hold the cache of some rows in a layer.

    `keys`: keys and values [N, H, L, D], or empty. `states`: the states [N, ...] by name.
    """

    keys: tuple[Tensor, ...] = ()
    states: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def rows(self, index: Tensor | slice, longest: int) -> _LayerCache:
        """Return the selected rows, with the last `longest` positions of each."""
        keys = tuple(tensor[index, :, tensor.shape[2] - longest :] for tensor in self.keys)
        return _LayerCache(keys, {name: state[index] for name, state in self.states.items()})


@dataclass(slots=True)
class _CachedPrompt:
    """Hold the cache of a prompt (a batch of 1 row), by layer.

    `position_shift`: offset of the positions after the prompt from the count of its tokens, which
    images change.
    """

    layers: list[_LayerCache]
    position_shift: int = 0
    has_images: bool = False


class RecurrentState(HFState):
    """Store the cache of each prompt and of the running rows (`cache`).

    The cache of the rows is the model's native kind and persists from step to step; it is rebuilt
    when rows are added or removed. Windows are masked, not cut: their layers keep all keys, so that
    rows of any length align.
    """

    def __init__(self, decoder: HFForward):
        super().__init__(decoder)
        self.cache: Any = None

    def _new_cache(self) -> Any:
        return self.decoder.new_full_cache()

    def _read_prompt(self, cache: Any, row: int, prompt: Sequence[int]) -> _CachedPrompt:
        index = slice(row, row + 1)
        return _CachedPrompt(
            [_read_layer(layer).rows(index, len(prompt)) for layer in cache.layers]
        )

    def _caches_keys(self) -> bool:
        """Return whether any layer caches keys, of which the padding is masked."""
        return self.decoder.layers.num_kv_layers > 0

    def add_rows(self, prompt_of_row: np.ndarray) -> None:
        super().add_rows(prompt_of_row)
        longest = int(self.lengths().max())
        running = None if self.cache is None else [_read_layer(x) for x in self.cache.layers]
        self.cache = self._new_cache()
        prompts = np.unique(prompt_of_row)
        at = torch.from_numpy(np.searchsorted(prompts, prompt_of_row)).to(self.decoder.device)
        for number in range(len(self.prompts[prompts[0]].target.layers)):
            read = [self.prompts[prompt].target.layers[number] for prompt in prompts]
            before = [running[number]] if running is not None else []
            caches = [*before, *read]
            keys = tuple(
                _append_rows([_pad_left(cached.keys[i], longest) for cached in caches], before, at)
                for i in range(len(read[0].keys))
            )
            states = {
                name: _append_rows([cached.states[name] for cached in caches], before, at)
                for name in read[0].states
            }
            _fill_layer(self.cache, number, _LayerCache(keys, states))

    def decode(self, tokens: np.ndarray) -> Tensor:
        lengths = torch.from_numpy(self.lengths())
        longest = int(lengths.max())
        mask = (
            (torch.arange(longest + 1) >= longest - lengths[:, None]).long()
            if self._caches_keys()
            else None
        )
        prompts = [self.prompts[slot].target for slot in self.prompt_of_row]
        positions = lengths + torch.tensor([prompt.position_shift for prompt in prompts])
        ids = self.decoder.replace_image_tokens(
            torch.from_numpy(tokens)[:, None],
            torch.tensor([prompt.has_images for prompt in prompts]),
        )
        logits = self.decoder.padded_forward(
            ids, mask, positions[:, None], self.cache, last_only=True
        )
        experts = self.decoder.experts
        self.record_experts(None if experts is None else experts[:, 0])
        self.response_lengths = self.response_lengths + 1
        return logits[:, -1]

    def _move_rows(self, source: np.ndarray) -> None:
        if self.cache is None:
            return
        cache, self.cache = self.cache, None
        if not len(source):
            return
        longest = int(self.lengths()[source].max())
        index = torch.from_numpy(source).to(self.decoder.device)
        self.cache = self._new_cache()
        for number, layer in enumerate(cache.layers):
            _fill_layer(self.cache, number, _read_layer(layer).rows(index, longest))


class PaddedState(RecurrentState):
    """Store rows as `RecurrentState`; prompts of similar lengths are prefilled in a left-padded
    batch, with their images.
    """

    def _batch_prompts(self, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
        lengths = [len(prompt.tokens) for prompt in prompts]
        return batch_prompts(lengths, max_tokens, [bool(prompt.images) for prompt in prompts])

    def _caches_keys(self) -> bool:
        return True

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache()

    def _forward_prompts(
        self, prompts: Sequence[Sequence[int]], images: Images, last_only: bool
    ) -> tuple[Tensor, Any]:
        longest = max(len(prompt) for prompt in prompts)
        starts = [longest - len(prompt) for prompt in prompts]
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for i, prompt in enumerate(prompts):
            ids[i, starts[i] :] = torch.tensor(prompt)
            mask[i, starts[i] :] = 1
        cache = self._new_cache()
        inputs = self.decoder.model_inputs(ids, images, starts, list(map(len, prompts)))
        positions = inputs.pop("position_ids", (mask.cumsum(-1) - 1).clamp_min(0))
        ids = inputs.pop("input_ids")
        logits = self.decoder.padded_forward(ids, mask, positions, cache, last_only, **inputs)
        ends = [int(positions[..., row, :].max()) + 1 for row in range(len(prompts))]
        return logits, (cache, ends, images)

    def _read_prompt(self, cache: Any, row: int, prompt: Sequence[int]) -> _CachedPrompt:
        filled, ends, images = cache
        read = super()._read_prompt(filled, row, prompt)
        if not all(layer.keys for layer in read.layers):
            raise NotImplementedError(
                "the model caches more than keys and values of attention between tokens"
            )
        read.position_shift, read.has_images = ends[row] - len(prompt), bool(images[row])
        return read


class EqualLengthState(HFState):
    """Store batches of rows of equal length in the model's native cache.

    The target of a prompt is the cache of its prefill batch, which rows copy, and its index in that
    batch. A group consists of the rows that were added together from the same prefill batch.
    """

    def __init__(self, decoder: HFForward):
        super().__init__(decoder)
        self.caches: list[Any] = []  # by group
        self.group_of_row = np.zeros(0, np.int64)
        self.index_in_group = np.zeros(0, np.int64)  # in the batch of its group

    def add_rows(self, prompt_of_row: np.ndarray) -> None:
        super().add_rows(prompt_of_row)
        group, place = np.zeros((2, len(prompt_of_row)), np.int64)
        members: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompt_of_row.tolist()):
            members.setdefault(id(self.prompts[prompt].target[0]), []).append(row)
        for rows in members.values():
            targets = [self.prompts[prompt_of_row[row]].target for row in rows]
            cache = copy.deepcopy(targets[0][0])
            cache.reorder_cache(self._index([index for _, index in targets]))
            group[rows], place[rows] = len(self.caches), np.arange(len(rows))
            self.caches.append(cache)
        self.group_of_row = np.concatenate([self.group_of_row, group])
        self.index_in_group = np.concatenate([self.index_in_group, place])

    def decode(self, tokens: np.ndarray) -> Tensor:
        logits = self._new_logits(len(tokens))
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


class RecomputeState(HFState):
    """Store the tokens of prompts and rows; every step recomputes them from the first token."""

    def __init__(self, decoder: HFForward):
        super().__init__(decoder)
        self.rows: list[list[int]] = []  # prompt and response

    def _forward_prompts(
        self, prompts: Sequence[Sequence[int]], images: Images, last_only: bool
    ) -> tuple[Tensor, Any]:
        return self.decoder.plain_forward(prompts, last_only), None

    def add_rows(self, prompt_of_row: np.ndarray) -> None:
        super().add_rows(prompt_of_row)
        self.rows.extend(list(self.prompts[prompt].tokens) for prompt in prompt_of_row)

    def decode(self, tokens: np.ndarray) -> Tensor:
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            row.append(token)
        self.response_lengths = self.response_lengths + 1
        logits = self._new_logits(len(tokens))
        max_tokens = self.decoder.max_batch_tokens(reads_all=False)
        for batch in self.decoder.batch_by_length([len(row) for row in self.rows], max_tokens):
            batch_logits = self.decoder.plain_forward([self.rows[i] for i in batch], last_only=True)
            logits[torch.tensor(batch, device=logits.device)] = batch_logits[:, -1].float()
        return logits

    def _move_rows(self, source: np.ndarray) -> None:
        self.rows = [self.rows[row] for row in source]


def _append_rows(tensors: list[Tensor], before: Sequence[Any], at: Tensor) -> Tensor:
    """Return the first `len(before)` tensors, followed by the rows `at` of the others together."""
    return torch.cat([*tensors[: len(before)], torch.cat(tensors[len(before) :])[at]])


def _pad_left(keys: Tensor, longest: int) -> Tensor:
    """Return keys or values [N, H, L, D], padded on the left to `longest` positions."""
    return F.pad(keys, (0, 0, longest - keys.shape[2], 0))


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
        return _LayerCache((), known)
    if type(layer).__name__ not in ("DynamicLayer", "LinearAttentionAndFullAttentionLayer"):
        raise NotImplementedError(
            f"a layer of the cache is a {type(layer).__name__}, "
            "which holds more than keys and values"
        )
    return _LayerCache((keys, layer.values), known)


def _fill_layer(cache: Any, number: int, rows: _LayerCache) -> None:
    """Fill the empty layer `number` of a cache."""
    if rows.keys:
        cache.update(*rows.keys, number)
    for (kind, i), state in rows.states.items():
        layer = cache.layers[number]
        getattr(layer, f"{kind}_states")[i] = state
        getattr(layer, f"is_{kind}_states_initialized")[i] = True
        layer.has_previous_state[i] = True
        if kind == "conv":
            layer.conv_kernel_size[i] = state.shape[-1]
        layer.dtype, layer.device = state.dtype, state.device
