"""Store the KV cache of the fast decoder in contiguous blocks, allocated in advance.

Each layer has a block of prompts and a block of responses. A response starts at position 0 of its
row in the block, so rows are never padded by the length of their prompt. If every prompt has
exactly 1 row, the two blocks are parts of a joint tensor, and attention reads it in a single call.
Shapes: P prompts, N rows, K key heads, T positions, L longest so far, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kernels import UNBOUNDED
from rl.sampler.cpu_kernels import CpuKernels
from rl.sampler.decode_state import DecodeState, LogitsReader
from rl.sampler.expert_layers import copy_choices
from rl.sampler.forward_fast import FastForward
from rl.sampler.prefix_attention import (
    PromptBand,
    SuffixBatch,
    make_bands,
    row_attention,
    shared_attention,
)
from rl.types import PlacedImage

CacheAttention = Callable[[int, Tensor], Tensor]
_CACHE_LINE_BYTES = 64  # bytes of a cache line


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """Hold the number of slots and the positions of each slot."""

    prompts: int = 0
    prompt_positions: int = 0
    rows: int = 0
    row_positions: int = 0

    @property
    def tokens(self) -> int:
        """Return the total number of positions."""
        return self.prompts * self.prompt_positions + self.rows * self.row_positions


class ContiguousState(DecodeState):
    """Store `prompt_kv` [2, P, K, T, D] and `row_kv` [2, N, K, T, D] for each layer: keys, then
    values.

    `joint_kv` [2, N, K, T, D] holds both, the positions of the prompt first, if prompts and rows
    are allocated in pairs.
    """

    def __init__(self, decoder: FastForward, kv_cache_tokens: int):
        super().__init__()
        self.decoder = decoder
        self.budget = kv_cache_tokens
        self.capacity = CacheCapacity()
        empty = self._zeros(0, 0)
        self.prompt_kv = [empty for _ in decoder.layers]
        self.row_kv = [empty for _ in decoder.layers]
        self.joint_kv: list[Tensor] = []
        self._bands: list[PromptBand] | None = None  # rebuilt after rows were added or removed

    def _zeros(self, slots: int, positions: int) -> Tensor:
        """Return zeros, because masked keys and values must be finite."""
        a = self.decoder.architecture
        shape = (2, slots, a.key_heads, positions, a.head_width)
        if self.decoder.device.type == "cpu":
            return lazy_zeros(shape, self.decoder.dtype)
        return torch.zeros(shape, dtype=self.decoder.dtype, device=self.decoder.device)

    def cost(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> int:
        return CacheCapacity(prompts, longest_prompt, rows, longest_response).tokens

    def reserve(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> None:
        """Allocate larger blocks if the present blocks are too small.

        A dimension that grows becomes 1.5 times as large, as far as the budget allows.
        """
        needed = (prompts, longest_prompt, rows, longest_response)
        c = self.capacity
        have = (c.prompts, c.prompt_positions, c.rows, c.row_positions)
        if all(h >= n for h, n in zip(have, needed, strict=True)):
            return
        grown = (h if h >= n else max(n, h * 3 // 2) for h, n in zip(have, needed, strict=True))
        enlarged = (max(h, n) for h, n in zip(have, needed, strict=True))
        options = (CacheCapacity(*grown), CacheCapacity(*enlarged))
        self.capacity = next(
            (option for option in options if option.tokens <= self.budget), CacheCapacity(*needed)
        )
        self._allocate()

    def _allocate(self) -> None:
        """Allocate new blocks of the present capacity, one layer at a time.

        The running batch is copied.
        """
        c = self.capacity
        prompts, prompt_length = len(self.prompt_lengths), int(self.prompt_lengths.max(initial=0))
        rows, row_length = len(self.response_lengths), int(self.response_lengths.max(initial=0))
        joint: list[Tensor] = []
        for layer in range(len(self.row_kv)):
            old_prompt, old_row = self.prompt_kv[layer], self.row_kv[layer]
            if c.prompts == c.rows:
                joint.append(self._zeros(c.rows, c.prompt_positions + c.row_positions))
                prompt, row = joint[-1].split([c.prompt_positions, c.row_positions], dim=3)
            else:
                prompt, row = (
                    self._zeros(c.prompts, c.prompt_positions),
                    self._zeros(c.rows, c.row_positions),
                )
            prompt[:, :prompts, :, :prompt_length] = old_prompt[:, :prompts, :, :prompt_length]
            row[:, :rows, :, :row_length] = old_row[:, :rows, :, :row_length]
            self.prompt_kv[layer], self.row_kv[layer] = prompt, row
        self.joint_kv = joint

    def prefill(
        self,
        prompts: Sequence[Sequence[int]],
        readers: Sequence[LogitsReader | None],
        images: Sequence[Sequence[PlacedImage]] = (),
        weights: Sequence[int] = (),
    ) -> Tensor:
        """Implement `DecodeState.prefill`. `weights`: the model index of each prompt, if the
        decoder mixes.
        """
        first = len(self.prompt_lengths)

        def keep(layer: int, batch: list[int], k: Tensor, v: Tensor) -> None:
            slots = torch.tensor(batch, device=k.device) + first
            block = self.prompt_kv[layer]
            block[0, slots, :, : k.shape[2]] = k
            block[1, slots, :, : k.shape[2]] = v

        experts = self._new_prompt_experts()
        logits_PV = self.decoder.forward_prompts(prompts, readers, keep, weights, experts=experts)
        self._record_prompts(experts or {})
        self.prompt_adapters = [*self.prompt_adapters, *weights]
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        self.prompt_lengths = np.concatenate([self.prompt_lengths, lengths])
        return logits_PV

    supports_extend = True

    def cache_row(self, row: int) -> None:
        slot, prompt = len(self.prompt_lengths), int(self.prompt_of_row[row])
        length, written = int(self.prompt_lengths[prompt]), int(self.response_lengths[row])
        for block, rows in zip(self.prompt_kv, self.row_kv, strict=True):
            block[:, slot, :, :length] = block[:, prompt, :, :length]
            block[:, slot, :, length : length + written] = rows[:, row, :, :written]
        self.prompt_lengths = np.append(self.prompt_lengths, length + written)
        self.prompt_adapters = [
            *self.prompt_adapters,
            *([self.prompt_adapters[prompt]] if self.prompt_adapters else []),
        ]
        self._record_cached_row(row)
        self._bands = None

    def extend_prompts(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Prefill all suffixes in a single forward, padded on the right.

        Keys and values are written to their final positions and read together with the cached
        positions.
        """
        decoder, device = self.decoder, self.decoder.device
        batch = SuffixBatch.pad(self.prompt_lengths[list(slots)], tokens, device)
        slot_B = torch.tensor(list(slots)).to(device)
        slot_X, position_X = slot_B[batch.row_index_X], batch.position_X

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            block = self.prompt_kv[layer]
            for which, new in enumerate((k, v)):
                block[which, slot_X, :, position_X] = batch.select(new)
            keys, values = (block[which, slot_B, :, : batch.max_positions] for which in (0, 1))
            return batch.attend(q, keys, values, decoder.layers[layer].bounds)

        row_adapters = (
            decoder.group_by_adapter([self.prompt_adapters[slot] for slot in slots])
            if decoder.multi_adapter
            else None
        )
        rope = decoder.rope(batch.position_BT, batch.rope_positions)
        choices = self._new_choices()
        hidden = decoder.forward(batch.ids_BT, rope, attend, row_adapters, batch.last_B, choices)
        self._extend_prompt_experts(slots, tokens, choices)
        self.prompt_lengths = self.prompt_lengths.copy()
        self.prompt_lengths[list(slots)] += [len(suffix) for suffix in tokens]
        self._bands = None
        return decoder.head(hidden, row_adapters).float()

    def decode(self, tokens: np.ndarray) -> Tensor:
        if self.decoder.cpu_kernels is not None:
            return self._decode_step(self.decoder.cpu_kernels, tokens)
        decoder, device, a = self.decoder, self.decoder.device, self.decoder.architecture
        rows, written = len(tokens), self.response_lengths
        longest = int(written.max())
        even = int(written.min()) == longest
        slot_N = torch.arange(rows, device=device)
        written_N = torch.from_numpy(written).to(device)
        read = self._select_attention(written_N, longest, even)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            block = self.row_kv[layer]
            if even:
                block[0, :rows, :, longest] = k
                block[1, :rows, :, longest] = v
            else:
                block[0, slot_N, :, written_N] = k
                block[1, slot_N, :, written_N] = v
            return read(layer, q.unflatten(1, (a.key_heads, -1))).flatten(1)

        positions = self.prompt_lengths[self.prompt_of_row] + written
        rope = decoder.rope(torch.from_numpy(positions).to(device), int(positions.max()) + 1)
        row_adapters = self._get_row_adapters()
        choices, ids = self._new_choices(), torch.from_numpy(tokens).to(device)
        hidden = decoder.forward(ids, rope, attend, row_adapters, choices=choices)
        self.response_lengths = written + 1
        logits_NV = decoder.head(hidden, row_adapters)
        self.record_experts(copy_choices(choices))  # waits for the device
        return logits_NV

    def _decode_step(self, kernels: CpuKernels, tokens: np.ndarray) -> Tensor:
        """Implement `decode` on a CPU.

        Rows may have any lengths. Each row reads its prompt in place, so neither bands nor masks
        are needed.
        """
        decoder, heads, eps = (
            self.decoder,
            self.decoder.architecture.heads,
            self.decoder.architecture.eps,
        )
        positions = self.prompt_lengths[self.prompt_of_row] + self.response_lengths
        ropes = decoder.rope_tables(int(positions.max()) + 1)
        position_N, written_N = torch.from_numpy(positions), torch.from_numpy(self.response_lengths)
        prompt_of_row_N, prompt_length_P = (
            torch.from_numpy(self.prompt_of_row),
            torch.from_numpy(self.prompt_lengths),
        )

        def attend(layer: int, qkv: Tensor, norm_qk: Tensor | None) -> Tensor:
            return kernels.attend(
                qkv,
                norm_qk,
                eps,
                ropes[decoder.layers[layer].rope],
                position_N,
                self.prompt_kv[layer],
                prompt_of_row_N,
                prompt_length_P,
                self.row_kv[layer],
                written_N,
                heads,
                decoder.layers[layer].bounds,
            )

        row_adapters = self._get_row_adapters()
        choices, ids = self._new_choices(), torch.from_numpy(tokens)
        hidden = decoder.forward_step(kernels, ids, attend, row_adapters, choices)
        self.response_lengths = self.response_lengths + 1
        logits_NV = decoder.head(hidden, row_adapters)
        self.record_experts(copy_choices(choices))  # waits for the device
        return logits_NV

    def _select_attention(self, written_N: Tensor, longest: int, even: bool) -> CacheAttention:
        """Return the attention function of this step: (layer, queries [N, K, r, D]) to outputs of
        that shape.
        """
        rows = len(written_N)
        if self._bands is None:
            self._bands = make_bands(self.prompt_of_row, self.prompt_lengths, self.decoder.device)
        bands = self._bands
        columns = torch.arange(longest + 1, device=written_N.device)
        row_hidden_NL = None if even else columns > written_N[:, None]
        if any(layer.bounds != UNBOUNDED for layer in self.decoder.layers):
            return self._bounded_attention(bands, written_N, columns)
        one_to_one = np.array_equal(self.prompt_of_row, np.arange(len(self.prompt_lengths)))
        if self.joint_kv and one_to_one and len(bands) == 1:
            hidden_NL = self._joint_mask(bands[0], row_hidden_NL, rows, longest)
            end = self.capacity.prompt_positions + longest + 1
            return lambda layer, q: row_attention(
                q, self.joint_kv[layer][:, :rows, :, :end], hidden_NL
            )
        return lambda layer, q: shared_attention(
            q,
            self.prompt_kv[layer],
            self.row_kv[layer][:, :rows, :, : longest + 1],
            bands,
            row_hidden_NL,
        )

    def _bounded_attention(
        self, bands: list[PromptBand], written_N: Tensor, columns: Tensor
    ) -> CacheAttention:
        """Return the attention function of layers with windows or limited scores. `columns`: the
        indices of the responses' positions.
        """
        lengths = torch.from_numpy(self.prompt_lengths[self.prompt_of_row])
        prompt_length_N1 = lengths.to(written_N.device)[:, None]
        prompt_columns = torch.arange(max(band.length for band in bands), device=written_N.device)
        unwritten_NL = columns > written_N[:, None]

        @cache
        def hidden(window: int) -> tuple[Tensor | None, Tensor]:
            """Return the hidden positions of responses and prompts, the same in all layers of a
            window.
            """
            if not window:
                return None, unwritten_NL
            first_N1 = prompt_length_N1 + written_N[:, None] + 1 - window
            return prompt_columns < first_N1, unwritten_NL | (prompt_length_N1 + columns < first_N1)

        def attend(layer: int, q: Tensor) -> Tensor:
            bounds = self.decoder.layers[layer].bounds
            prompt_hidden_NL, row_hidden_NL = hidden(bounds.window)
            row_kv = self.row_kv[layer][:, : len(q), :, : len(columns)]
            return shared_attention(
                q, self.prompt_kv[layer], row_kv, bands, row_hidden_NL, prompt_hidden_NL,
                bounds.softcap,
            )  # fmt: skip

        return attend

    def _joint_mask(
        self, band: PromptBand, row_hidden_NL: Tensor | None, rows: int, longest: int
    ) -> Tensor | None:
        """Return the mask over a joint block.

        Prompts end before the responses start; the positions between are masked.
        """
        start = self.capacity.prompt_positions
        if row_hidden_NL is None and band.hidden_PL is None and band.length == start:
            return None
        hidden_NL = torch.zeros(
            rows, start + longest + 1, dtype=torch.bool, device=self.decoder.device
        )
        hidden_NL[:, band.length : start] = True
        if band.hidden_PL is not None:
            hidden_NL[:, : band.length] = band.hidden_PL
        if row_hidden_NL is not None:
            hidden_NL[:, start:] = row_hidden_NL
        return hidden_NL

    def _rows_changed(self) -> None:
        super()._rows_changed()
        self._bands = None

    def replace_non_finite(self) -> None:
        """Replace NaN and infinity in the cache, after rows with such values were removed.

        Otherwise they would affect the rows that reuse these slots (0 times NaN is NaN).
        """
        for block in (*self.prompt_kv, *self.row_kv):
            block.nan_to_num_(0.0, 0.0, 0.0)

    def _move_rows(self, source: np.ndarray) -> None:
        self._move_slots(self.row_kv, source, int(self.response_lengths.max(initial=0)))

    def _move_prompts(self, source: np.ndarray) -> None:
        self._move_slots(self.prompt_kv, source, int(self.prompt_lengths.max(initial=0)))

    def _move_slots(self, blocks: list[Tensor], source: np.ndarray, length: int) -> None:
        """Fill the holes. Slots that stay in place are not touched."""
        to = np.flatnonzero(source != np.arange(len(source)))
        if not len(to):
            return
        device = self.decoder.device
        target, origin = torch.from_numpy(to).to(device), torch.from_numpy(source[to]).to(device)
        for block in blocks:
            block[:, target, :, :length] = block[:, origin, :, :length]


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros on the CPU that the operating system allocates page by page at the first write.

    numpy requests this, and huge pages if available. torch's zeros write every page immediately.
    """
    size = math.prod(shape) * dtype.itemsize
    buffer = torch.from_numpy(np.zeros(size + _CACHE_LINE_BYTES - 1, np.uint8))
    start = -buffer.data_ptr() % _CACHE_LINE_BYTES
    return buffer[start : start + size].view(dtype).view(*shape)
