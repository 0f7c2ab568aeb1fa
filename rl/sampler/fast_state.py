"""Share what the two KV caches of the fast decoder have in common (contiguous_state.py,
paged_state.py).

Shapes: P prompts, N rows, V vocabulary.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rl.sampler.decode_state import DecodeState
from rl.sampler.expert_layers import copy_choices
from rl.sampler.forward_fast import Attend, FastForward, make_ops
from rl.sampler.linear_layers import RowAdapters, group_rows_by_adapter
from rl.sampler.prefix_attention import SuffixBatch

# Takes (layer, new keys [X, K, D], new values), stores them; keys and values of whole prompts,
# [B, K, positions, D].
StoreSuffixes = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class FastState(DecodeState):
    """Feed tokens to the fast decoder. Subclasses store and read the keys and values."""

    decoder: FastForward
    supports_extend = True
    uses_cpu_kernels = False  # whether the attention of a step reads qkv by the CPU kernels

    def __init__(self, decoder: FastForward):
        super().__init__(decoder)
        self._row_adapters: RowAdapters | None = None  # rebuilt after rows were added or removed

    def decode(self, tokens: np.ndarray) -> Tensor:
        decoder, positions = self.decoder, self.lengths()
        if self._row_adapters is None:
            self._row_adapters = self._group_by_adapter(self.prompt_of_row)
        choices: list[Tensor] | None = [] if self.records_experts else None
        kernels = decoder.cpu_kernels if self.uses_cpu_kernels else None
        hidden = decoder.forward(
            torch.from_numpy(tokens).to(decoder.device),
            self._make_attention(positions),
            self._row_adapters,
            None,
            choices,
            make_ops(kernels, decoder.cpu_kernels),
        )
        self.response_lengths = self.response_lengths + 1
        logits_NV = decoder.head(hidden, self._row_adapters)
        self.record_experts(copy_choices(choices))  # waits for the device
        return logits_NV

    @abc.abstractmethod
    def _make_attention(self, positions: np.ndarray) -> Attend:
        """Return the attention of a step, which stores the keys and values of the rows' tokens at
        `positions` [N].
        """

    def cache_row(self, row: int) -> None:
        prompt, experts = int(self.prompt_of_row[row]), self.experts_of_row(row)
        length = int(self.prompt_lengths[prompt] + self.response_lengths[row])
        self._copy_row(row, length)
        adapter_ids = self.prompt_adapters[prompt : prompt + 1]
        self._append_prompts([length], adapter_ids, [] if experts is None else [experts])
        self._rows_changed()

    @abc.abstractmethod
    def _copy_row(self, row: int, length: int) -> None:
        """Store the `length` positions of a row as the prompt after the present prompts."""

    def extend_prompts(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Prefill all suffixes in a single forward, padded on the right.

        Keys and values are written to their final positions and read together with the cached
        positions.
        """
        decoder = self.decoder
        batch = SuffixBatch.pad(self.prompt_lengths[list(slots)], tokens, decoder.device)
        store = self._store_suffixes(slots, tokens, batch)
        rope = decoder.rope(batch.position_BT, batch.rope_positions)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = decoder.split_qkv(layer, qkv, rope)
            keys, values = store(layer, batch.select(k), batch.select(v))
            return batch.attend(q, keys, values, decoder.layers[layer].bounds)

        row_adapters = self._group_by_adapter(slots)
        choices: list[Tensor] | None = [] if self.records_experts else None
        hidden = decoder.forward(batch.ids_BT, attend, row_adapters, batch.last_B, choices)
        if (experts := copy_choices(choices)) is not None:  # [slots, T, B * K], padded as the ids
            for i, slot in enumerate(slots):
                parts = (self._prompt_experts[slot], experts[i, : len(tokens[i])])
                self._prompt_experts[slot] = np.concatenate(parts)
        self.prompt_lengths = self.prompt_lengths.copy()
        self.prompt_lengths[list(slots)] += [len(suffix) for suffix in tokens]
        self._rows_changed()
        return decoder.head(hidden, row_adapters).float()

    @abc.abstractmethod
    def _store_suffixes(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], batch: SuffixBatch
    ) -> StoreSuffixes:
        """Return the function that stores and reads the keys and values of extended prompts."""

    @abc.abstractmethod
    def replace_non_finite(self) -> None:
        """Replace NaN and infinity in the cache, after rows with such values were removed.

        Otherwise they would affect the rows that reuse their memory (0 times NaN is NaN).
        """

    def _rows_changed(self) -> None:
        self._row_adapters = None

    def _group_by_adapter(self, slots: Sequence[int] | np.ndarray) -> RowAdapters | None:
        """Group the prompts in these slots, or their rows, by adapter; None if the decoder does not
        mix adapters.
        """
        if not self.decoder.multi_adapter:
            return None
        adapter_ids = [self.prompt_adapters[slot] for slot in slots]
        return group_rows_by_adapter(adapter_ids, self.decoder.device)
