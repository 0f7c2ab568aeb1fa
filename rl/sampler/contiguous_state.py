"""Store the KV cache of the fast decoder in contiguous blocks, allocated in advance.

Each layer has a block of prompts and a block of responses. A response starts at position 0 of its
row in the block, so rows are never padded by the length of their prompt. If every prompt has
exactly 1 row, the two blocks are parts of a joint tensor, and attention reads it in a single call.
Shapes: P prompts, N rows, K key heads, T positions, L longest so far, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kernels import UNBOUNDED
from rl.sampler.cpu_kernels import CpuKernels
from rl.sampler.decode_state import BatchSize, Prompt
from rl.sampler.fast_state import FastState, StoreSuffixes
from rl.sampler.forward_fast import Attend, FastForward, StoreKeyValues
from rl.sampler.prefix_attention import (
    PromptBand,
    SuffixBatch,
    make_bands,
    row_attention,
    shared_attention,
)
from rl.sampler.prefix_cache import CachedSequence, Hashes, PrefixStore

CacheAttention = Callable[[int, Tensor], Tensor]
_CACHE_LINE_BYTES = 64  # bytes of a cache line


class ContiguousState(FastState):
    """Store `prompt_kv` [2, P, K, T, D] and `row_kv` [2, N, K, T, D] for each layer: keys, then
    values.

    `joint_kv` [2, N, K, T, D] holds both, the positions of the prompt first, if prompts and rows
    are allocated in pairs.
    """

    uses_cpu_kernels = True

    def __init__(self, decoder: FastForward, kv_cache_tokens: int):
        super().__init__(decoder)
        self.budget = kv_cache_tokens
        self.capacity = BatchSize()  # slots, and the positions of each
        empty = self._zeros(0, 0)
        self.prompt_kv = [empty for _ in decoder.layers]
        self.row_kv = [empty for _ in decoder.layers]
        self.joint_kv: list[Tensor] = []
        self._bands: list[PromptBand] | None = None  # rebuilt after rows were added or removed
        self._prefixes = PrefixStore()
        # slots that begin with a prefix of a number of positions, to be copied
        self._copies: dict[tuple[CachedSequence, int], list[int]] = {}

    def _zeros(self, slots: int, positions: int) -> Tensor:
        """Return zeros, because masked keys and values must be finite."""
        a = self.decoder.architecture
        shape = (2, slots, a.key_heads, positions, a.head_width)
        if self.decoder.device.type == "cpu":
            return lazy_zeros(shape, self.decoder.dtype)
        return torch.zeros(shape, dtype=self.decoder.dtype, device=self.decoder.device)

    def cost(self, size: BatchSize) -> int:
        return size.prompts * size.longest_prompt + size.rows * size.longest_response

    def reserve(self, size: BatchSize) -> None:
        """Allocate larger blocks if the present blocks are too small.

        A dimension that grows becomes 1.5 times as large, as far as the budget allows.
        """
        pairs = list(zip(self.capacity, size, strict=True))
        if all(present >= least for present, least in pairs):
            return
        grown = BatchSize(*(h if h >= n else max(n, h * 3 // 2) for h, n in pairs))
        enlarged = BatchSize(*map(max, pairs))
        options = (grown, enlarged, size)
        self.capacity = next((o for o in options if self.cost(o) <= self.budget), size)
        self._prefixes.shrink(self.budget - self.cost(self.capacity))
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
                joint.append(self._zeros(c.rows, c.longest_prompt + c.longest_response))
                prompt, row = joint[-1].split([c.longest_prompt, c.longest_response], dim=3)
            else:
                prompt, row = (
                    self._zeros(c.prompts, c.longest_prompt),
                    self._zeros(c.rows, c.longest_response),
                )
            prompt[:, :prompts, :, :prompt_length] = old_prompt[:, :prompts, :, :prompt_length]
            row[:, :rows, :, :row_length] = old_row[:, :rows, :, :row_length]
            self.prompt_kv[layer], self.row_kv[layer] = prompt, row
        self.joint_kv = joint

    def _prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        for slot, prompt in enumerate(prompts, len(self.prompts)):
            prompt.target = CachedSequence(prompt.hashes, slot)
        return self._fill(prompts)

    def _store_prompts(self, prompts: Sequence[Prompt]) -> StoreKeyValues:
        def store(layer: int, members: list[Prompt], k: Tensor, v: Tensor) -> None:
            slots = torch.tensor([prompt.target.slot for prompt in members], device=k.device)
            block = self.prompt_kv[layer]
            block[0, slots, :, : k.shape[2]] = k
            block[1, slots, :, : k.shape[2]] = v

        return store

    def _count_cached(self, hashes: Hashes) -> int:
        return self._prefixes.find(hashes)[1]

    def _start_prompt(self, prompt: Prompt, hashes: Hashes) -> None:
        prefix, count = self._prefixes.find(hashes)
        if prefix is None:
            return
        prompt.reused = count * self.chunk_size
        if prefix.experts is not None:
            prompt.experts = prefix.experts[: prompt.reused]
        self._copies.setdefault((prefix, prompt.reused), []).append(prompt.target.slot)

    def _copy_prefixes(self) -> None:
        for (prefix, positions), slots in self._copies.items():
            for layer, block in enumerate(self.prompt_kv):
                source = block[:, prefix.slot] if prefix.kv is None else prefix.kv[layer]
                block[:, slots, :, :positions] = source[:, None, :, :positions]
        self._copies = {}

    def _register(self, prompt: Prompt) -> None:
        prompt.target.experts = prompt.experts
        self._prefixes.add(prompt.target)

    def cache_row(self, row: int, hashes: Hashes) -> None:
        prompt = int(self.prompt_of_row[row])
        start, written = int(self.prompt_lengths[prompt]), int(self.response_lengths[row])
        if hashes and self._has_room(start + written):
            kv = [
                torch.cat([block[:, prompt, :, :start], rows[:, row, :, :written]], dim=2)
                for block, rows in zip(self.prompt_kv, self.row_kv, strict=True)
            ]
            experts = self.experts_of_row(row)
            self._prefixes.add(CachedSequence(hashes, kv=torch.stack(kv), experts=experts))

    def _has_room(self, positions: int) -> bool:
        """Return whether a copy of a prefix fits the budget; other copies are removed for it."""
        room = self.budget - self.cost(self.capacity) - positions
        if room >= 0:
            self._prefixes.shrink(room)
        return room >= 0

    def forget_prefixes(self) -> None:
        self._prefixes.clear()

    def _store_suffixes(
        self, targets: Sequence[CachedSequence], batch: SuffixBatch
    ) -> StoreSuffixes:
        slot_B = torch.tensor([target.slot for target in targets]).to(self.decoder.device)
        slot_X, position_X = slot_B[batch.row_index_X], batch.position_X

        def store(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = self.prompt_kv[layer]
            keys[slot_X, :, position_X], values[slot_X, :, position_X] = k, v
            return keys[slot_B, :, : batch.max_positions], values[slot_B, :, : batch.max_positions]

        return store

    def _make_attention(self, positions: np.ndarray, rows: np.ndarray | None = None) -> Attend:
        decoder, device, count = self.decoder, self.decoder.device, len(positions)
        slots = np.arange(count) if rows is None else rows
        prompts = self.prompt_of_row[slots]
        written = positions - self.prompt_lengths[prompts]
        if decoder.cpu_kernels is not None:
            kernels = decoder.cpu_kernels
            return self._make_kernel_attention(kernels, positions, written, slots, prompts)
        longest = int(written.max())
        even = rows is None and int(written.min()) == longest
        slot_N = torch.from_numpy(slots).to(device)
        written_N = torch.from_numpy(written).to(device)
        read = self._select_attention(written_N, longest, even, rows, prompts)
        rope = decoder.rope(torch.from_numpy(positions).to(device), int(positions.max()) + 1)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = decoder.split_qkv(layer, qkv, rope)
            block = self.row_kv[layer]
            if even:
                block[0, :count, :, longest] = k
                block[1, :count, :, longest] = v
            else:
                block[0, slot_N, :, written_N] = k
                block[1, slot_N, :, written_N] = v
            return read(layer, q.unflatten(1, (k.shape[1], -1))).flatten(1)

        return attend

    def _make_kernel_attention(
        self,
        kernels: CpuKernels,
        positions: np.ndarray,
        written: np.ndarray,
        slots: np.ndarray,
        prompts: np.ndarray,
    ) -> Attend:
        """Return the attention of a step on a CPU.

        Rows may have any lengths. Each row reads its prompt in place, so neither bands nor masks
        are needed.
        """
        decoder, a = self.decoder, self.decoder.architecture
        ropes = decoder.rope_tables(int(positions.max()) + 1)
        position_N, slot_N, written_N, prompt_of_row_N, prompt_length_P = map(
            torch.from_numpy, (positions, slots, written, prompts, self.prompt_lengths)
        )

        def attend(index: int, qkv: Tensor) -> Tensor:
            layer = decoder.layers[index]
            return kernels.attend(
                qkv,
                layer.norm_qk,
                a.eps,
                ropes[layer.rope],
                position_N,
                self.prompt_kv[index],
                prompt_of_row_N,
                prompt_length_P,
                self.row_kv[index],
                slot_N,
                written_N,
                a.heads,
                layer.bounds,
            )

        return attend

    def _select_attention(
        self,
        written_N: Tensor,
        longest: int,
        even: bool,
        rows: np.ndarray | None,
        prompt_of_row: np.ndarray,
    ) -> CacheAttention:
        """Return the attention function of this step: (layer, queries [N, K, r, D]) to outputs of
        that shape.
        """
        count, device, layers = len(written_N), written_N.device, self.decoder.layers
        bands = None if rows is not None else self._bands
        if bands is None:
            bands = make_bands(prompt_of_row, self.prompt_lengths, device)
        self._bands = bands if rows is None else None
        # the rows' slots of a block: a view, or a copy if a row has several tokens
        slots = slice(count) if rows is None else torch.from_numpy(rows).to(device)
        columns = torch.arange(longest + 1, device=device)
        unwritten_NL = None if even else columns > written_N[:, None]
        one_to_one = np.array_equal(prompt_of_row, np.arange(len(self.prompt_lengths)))
        unbounded = all(layer.bounds == UNBOUNDED for layer in layers)
        if self.joint_kv and one_to_one and len(bands) == 1 and unbounded:
            hidden_NL = self._joint_mask(bands[0], unwritten_NL, count, longest)
            end = self.capacity.longest_prompt + longest + 1
            return lambda layer, q: row_attention(
                q, self.joint_kv[layer][:, :count, :, :end], hidden_NL
            )
        lengths = torch.from_numpy(self.prompt_lengths[prompt_of_row])

        @cache
        def hide(window: int) -> tuple[Tensor | None, Tensor | None]:
            """Return the hidden positions of prompts and responses, the same in all layers of a
            window.
            """
            if not window:
                return None, unwritten_NL
            prompt_length_N1 = lengths.to(device)[:, None]
            prompt_columns = torch.arange(max(band.length for band in bands), device=device)
            first_N1 = prompt_length_N1 + written_N[:, None] + 1 - window
            outside_NL = prompt_length_N1 + columns < first_N1
            return (
                prompt_columns < first_N1,
                outside_NL if unwritten_NL is None else unwritten_NL | outside_NL,
            )

        def attend(layer: int, q: Tensor) -> Tensor:
            bounds = layers[layer].bounds
            prompt_hidden_NL, row_hidden_NL = hide(bounds.window)
            row_kv = self.row_kv[layer][:, slots, :, : longest + 1]
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
        start = self.capacity.longest_prompt
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
        self.forget_prefixes()
        for block in (*self.prompt_kv, *self.row_kv):
            block.nan_to_num_(0.0, 0.0, 0.0)

    def _move_rows(self, source: np.ndarray) -> None:
        self._move_slots(self.row_kv, source, int(self.response_lengths.max(initial=0)))

    def _move_prompts(self, source: np.ndarray) -> None:
        targets, kept = [prompt.target for prompt in self.prompts], source.tolist()
        for slot in sorted(set(range(len(targets))) - set(kept)):
            self._keep_prompt(targets[slot])
        for slot, old in enumerate(kept):
            targets[old].slot = slot
        self._move_slots(self.prompt_kv, source, int(self.prompt_lengths.max(initial=0)))

    def _keep_prompt(self, prefix: CachedSequence) -> None:
        """Copy a prompt that leaves the batch, if prompts to come may begin with it."""
        length = int(self.prompt_lengths[prefix.slot])
        is_reusable = (
            self._prefixes.owns_any(prefix)
            and (self.waiting_prefixes is None or prefix.hashes[0] in self.waiting_prefixes)
            and self._has_room(length)
        )
        self._prefixes.remove(prefix)
        if is_reusable:
            kv = torch.stack([block[:, prefix.slot, :, :length] for block in self.prompt_kv])
            self._prefixes.add(CachedSequence(prefix.hashes, kv=kv, experts=prefix.experts))

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
