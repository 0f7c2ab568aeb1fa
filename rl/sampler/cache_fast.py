"""The fast decoder's cache: per layer one block of prompts and one block of responses, allocated before they are filled.

A response starts at position 0 of its row's block, so rows are never padded by the length of their prompt.
Shapes: P prompts, N rows, K key heads, T positions, L longest so far, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rl.sampler.attention import Grid, decode_attention
from rl.sampler.cache import DecodeState, LogitsReader

if TYPE_CHECKING:
    from rl.sampler.decoder_fast import FastDecoder


class FastState(DecodeState):
    """Blocks [2, P, K, T, D] of prompts and [2, N, K, T, D] of rows for each layer: keys, then values."""

    def __init__(self, decoder: FastDecoder, kv_cache_tokens: int):
        super().__init__()
        self.decoder = decoder
        self.budget = kv_cache_tokens
        self.capacity = (0, 0, 0, 0)  # prompts, positions of each, rows, positions of each
        self.prompt_kv = [self._block(0, 0) for _ in decoder.layers]
        self.row_kv = [self._block(0, 0) for _ in decoder.layers]
        self._grid: Grid | None = None
        self._prompt_hidden_PL: Tensor | None = None

    def _block(self, slots: int, positions: int) -> Tensor:
        """Zeros: what is masked must be finite."""
        a = self.decoder.architecture
        shape = (2, slots, a.key_heads, positions, a.head_width)
        return torch.zeros(shape, dtype=self.decoder.dtype, device=self.decoder.device)

    def cost(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> int:
        return prompts * longest_prompt + rows * longest_response

    def reserve(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> None:
        """Allocate if the blocks are too small: half as much again where they grow, as far as the budget allows."""
        needed = (prompts, longest_prompt, rows, longest_response)
        if all(have >= need for have, need in zip(self.capacity, needed, strict=True)):
            return
        pairs = list(zip(self.capacity, needed, strict=True))
        grown = tuple(have if have >= need else max(need, have * 3 // 2) for have, need in pairs)
        kept = tuple(max(have, need) for have, need in pairs)
        self.capacity = next((c for c in (grown, kept) if self.cost(*c) <= self.budget), needed)
        prompts, prompt_positions, rows, row_positions = self.capacity
        live_prompt, live_row = self._live_lengths()
        for blocks, slots, positions, count, length in (
            (self.prompt_kv, prompts, prompt_positions, len(self.prompt_lengths), live_prompt),
            (self.row_kv, rows, row_positions, len(self.response_lengths), live_row),
        ):
            for layer, old in enumerate(blocks):
                blocks[layer] = self._block(slots, positions)
                blocks[layer][:, :count, :, :length] = old[:, :count, :, :length]

    def _live_lengths(self) -> tuple[int, int]:
        return int(self.prompt_lengths.max(initial=0)), int(self.response_lengths.max(initial=0))

    def prefill(self, prompts: Sequence[Sequence[int]], readers: Sequence[LogitsReader | None]) -> Tensor:
        first = len(self.prompt_lengths)

        def keep(layer: int, batch: list[int], k: Tensor, v: Tensor) -> None:
            slots = torch.tensor(batch, device=k.device) + first
            block = self.prompt_kv[layer]
            block[0, slots, :, : k.shape[2]] = k
            block[1, slots, :, : k.shape[2]] = v

        logits_PV = self.decoder.forward_prompts(prompts, readers, keep)
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        self.prompt_lengths = np.concatenate([self.prompt_lengths, lengths])
        return logits_PV

    def decode(self, tokens: np.ndarray) -> Tensor:
        decoder, device = self.decoder, self.decoder.device
        rows, written = len(tokens), self.response_lengths
        positions = self.prompt_lengths[self.prompt_of_row] + written
        longest = int(written.max())
        slot_N = torch.arange(rows, device=device)
        written_N = torch.from_numpy(written).to(device)
        hidden_NL = None
        if int(written.min()) < longest:
            hidden_NL = torch.arange(longest + 1, device=device) > written_N[:, None]
        a, grid, prompt_longest = decoder.architecture, self._current_grid(), self._live_lengths()[0]
        prompts = len(self.prompt_lengths)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            block = self.row_kv[layer]
            if hidden_NL is None:
                block[0, :rows, :, longest] = k
                block[1, :rows, :, longest] = v
            else:
                block[0, slot_N, :, written_N] = k
                block[1, slot_N, :, written_N] = v
            q_NHrD = (q * a.head_width**-0.5).unflatten(1, (a.key_heads, -1))
            prompt_kv = self.prompt_kv[layer][:, :prompts, :, :prompt_longest]
            row_kv = block[:, :rows, :, : longest + 1]
            return decode_attention(q_NHrD, prompt_kv, row_kv, grid, self._prompt_hidden_PL, hidden_NL).flatten(1)

        rope = decoder.rope(torch.from_numpy(positions).to(device), int(positions.max()) + 1)
        hidden = decoder.forward(torch.from_numpy(tokens).to(device), rope, attend)
        self.response_lengths = written + 1
        return decoder.head(hidden)

    def _current_grid(self) -> Grid:
        """The grid and the prompts' mask, made anew after rows entered or left."""
        if self._grid is None:
            device = self.decoder.device
            self._grid = Grid.of(self.prompt_of_row, len(self.prompt_lengths), device)
            longest = int(self.prompt_lengths.max())
            self._prompt_hidden_PL = None
            if int(self.prompt_lengths.min()) < longest:
                hidden = np.arange(longest) >= self.prompt_lengths[:, None]
                self._prompt_hidden_PL = torch.from_numpy(hidden).to(device)
        return self._grid

    def _rows_changed(self) -> None:
        self._grid = None

    def _move_rows(self, source: np.ndarray) -> None:
        self._move(self.row_kv, source, int(self.response_lengths.max(initial=0)))

    def _move_prompts(self, source: np.ndarray) -> None:
        self._move(self.prompt_kv, source, int(self.prompt_lengths.max(initial=0)))

    def _move(self, blocks: list[Tensor], source: np.ndarray, length: int) -> None:
        """Fill the holes; slots that stay in place are not touched."""
        to = np.flatnonzero(source != np.arange(len(source)))
        if not len(to):
            return
        device = self.decoder.device
        target, origin = torch.from_numpy(to).to(device), torch.from_numpy(source[to]).to(device)
        for block in blocks:
            block[:, target, :, :length] = block[:, origin, :, :length]
