"""Store the KV cache of the fast decoder in blocks of a fixed pool.

Memory is proportional to the tokens that exist, not to the longest row times all rows. The samples
equal those of `contiguous_state`. block_manager.py decides which rows share blocks, and builds the
block tables of a step. When no blocks are free, rows are preempted (see paged_engine.py). Shapes: P
prompts, N rows, K key heads, S positions of a block, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels import compute_paged_attention
from kernels.decode_ops import append_to_cache
from rl.sampler.block_manager import BlockManager, PromptBlockTable, make_block_tables
from rl.sampler.decode_state import DecodeState, LogitsReader
from rl.sampler.expert_layers import copy_choices
from rl.sampler.forward_fast import FastForward
from rl.sampler.prefix_attention import SuffixBatch
from rl.types import PlacedImage

BLOCK_SIZE = 256  # positions: the block size of torch's varlen attention


class PagedState(DecodeState):
    """Store `kv` [2, blocks + 1, S, K, D] for each layer: keys, then values.

    The blocks belong to `rl.sampler.kv_cache_pool.KVCachePool`. The last block belongs to no row.
    """

    def __init__(self, decoder: FastForward, kv: list[Tensor]):
        super().__init__()
        self.decoder, self.kv, self.block_size = decoder, kv, kv[0].shape[2]
        self.block_manager = BlockManager(kv[0].shape[1] - 1, self.block_size)
        self._copied_tokens: dict[tuple[int, ...], Tensor] = {}

    def cost(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> int:
        """Return the cost of a batch in positions.

        The cost of 1 row is its maximum. The cost of several rows is what they take when they are
        admitted, because rows are preempted when no blocks are free.
        """
        whole = self.block_manager.num_blocks_for(longest_prompt + longest_response)
        return self.block_size * (
            whole
            if rows <= 1
            else self.block_manager.num_blocks_for(longest_prompt) * prompts + rows
        )

    def reserve(self, prompts: int, longest_prompt: int, rows: int, longest_response: int) -> None:
        """Do nothing: the pool is allocated in advance."""

    def num_free_blocks(self) -> int:
        """Return the number of free blocks."""
        return self.block_manager.pool.num_free

    def copy_ahead(self, sequences: Sequence[tuple[int, ...]]) -> None:
        """Copy tokens that are likely to be prefilled next to the device, without waiting.

        Earlier copies of other sequences are discarded.
        """
        before, self._copied_tokens = self._copied_tokens, {}
        for tokens in sequences:
            self._copied_tokens[tokens] = (
                before[tokens] if tokens in before else copy_to_device(tokens, self.decoder.device)
            )

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
        tables = [self.block_manager.add_prompt(len(prompt)).block_table for prompt in prompts]
        experts = self._new_prompt_experts()
        logits_PV = self._prefill_into(prompts, readers, tables, weights, experts)
        self._record_prompts(experts or {})
        self.prompt_adapters = [*self.prompt_adapters, *weights]
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        self.prompt_lengths = np.concatenate([self.prompt_lengths, lengths])
        return logits_PV

    def _prefill_into(
        self,
        prompts: Sequence[Sequence[int]],
        readers: Sequence[LogitsReader | None],
        tables: Sequence[Sequence[int]],
        adapter_ids: Sequence[int] = (),
        experts: dict[int, np.ndarray] | None = None,
    ) -> Tensor:
        """Prefill sequences and write their keys and values to the blocks of the tables."""
        device_tokens = [self._copied_tokens.get(tuple(prompt)) for prompt in prompts]
        slots: dict[int, Tensor] = {}  # by the first prompt of a batch, equal in all layers

        def keep(layer: int, batch: list[int], k: Tensor, v: Tensor) -> None:
            if batch[0] not in slots:
                slots[batch[0]] = self._locate_slots(
                    [len(prompts[i]) for i in batch], [tables[i] for i in batch]
                )
            append_to_cache(k.transpose(1, 2), v.transpose(1, 2), self.kv[layer], slots[batch[0]])

        return self.decoder.forward_prompts(
            prompts, readers, keep, adapter_ids, device_tokens, experts
        )

    def _locate_slots(self, lengths: list[int], tables: Sequence[Sequence[int]]) -> Tensor:
        """Return the places of the prompts' positions in the cache, as `append_to_cache` takes
        them, on the device: [prompts, longest].
        """
        slots = np.full((len(lengths), max(lengths)), -1, np.int64)
        for i, (length, table) in enumerate(zip(lengths, tables, strict=True)):
            pages = np.array(table, np.int64)[:, None] * self.block_size
            slots[i, :length] = (pages + np.arange(self.block_size)).flatten()[:length]
        return send_to_device(torch.from_numpy(slots), self.decoder.device)

    def add_rows(self, prompt_of_row: np.ndarray) -> None:
        for slot in prompt_of_row.tolist():
            self.block_manager.add_row(slot)
        super().add_rows(prompt_of_row)

    supports_extend = True

    def cache_row(self, row: int) -> None:
        length = int(self.prompt_lengths[self.prompt_of_row[row]] + self.response_lengths[row])
        self.block_manager.cache_row(self.block_manager.rows[row], length)
        self.prompt_lengths = np.append(self.prompt_lengths, length)
        if self.prompt_adapters:
            adapter_id = self.prompt_adapters[self.prompt_of_row[row]]
            self.prompt_adapters = [*self.prompt_adapters, adapter_id]
        self._record_cached_row(row)

    def extend_prompts(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Prefill all suffixes in a single forward, padded on the right, as
        `ContiguousState.extend_prompts`.

        The cached positions are gathered from their blocks.
        """
        decoder, device = self.decoder, self.decoder.device
        batch = SuffixBatch.pad(self.prompt_lengths[list(slots)], tokens, device)
        self.copy_blocks(
            [
                self.block_manager.extend_prompt(slot, len(suffix))
                for slot, suffix in zip(slots, tokens, strict=True)
            ]
        )
        tables = [self.block_manager.prompts[slot].block_table for slot in slots]
        width = max(map(len, tables))
        table_BP = torch.tensor([[*row, *[0] * (width - len(row))] for row in tables]).to(device)
        position_X = batch.position_X
        page_X = table_BP[batch.row_index_X, position_X // self.block_size]
        place_X = position_X % self.block_size

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv = self.kv[layer]
            kv[0, page_X, place_X] = batch.select(k)
            kv[1, page_X, place_X] = batch.select(v)
            keys, values = (
                x.flatten(1, 2)[:, : batch.max_positions].transpose(1, 2) for x in kv[:, table_BP]
            )
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
        return decoder.head(hidden, row_adapters).float()

    def copy_blocks(self, copies: Sequence[tuple[int, int] | None]) -> None:
        """Copy shared blocks (origin, target) before a row writes to the target."""
        page_pairs = [copy for copy in copies if copy is not None]
        if page_pairs:
            origin, target = torch.tensor(page_pairs, device=self.decoder.device).unbind(1)
            for kv in self.kv:
                kv[:, target] = kv[:, origin]

    def add_prompt_slot(
        self, length: int, adapter_id: int | None = None, experts: np.ndarray | None = None
    ) -> None:
        """Add a prompt slot that no row reads from: resumed rows have private blocks. `experts`: of
        the prompt's tokens.
        """
        if experts is not None:
            self._prompt_experts.append(experts)
        if adapter_id is not None:
            self.prompt_adapters = [*self.prompt_adapters, adapter_id]
        self.block_manager.prompts.append(PromptBlockTable(length))
        self.prompt_lengths = np.concatenate([self.prompt_lengths, [length]])

    def resume_row(self, slot: int, fed: Sequence[int], experts: np.ndarray | None = None) -> None:
        """Resume a preempted row: prefill prompt and response so far (all fed tokens) into private
        blocks. `experts`: those with which the tokens were sampled.
        """
        row = self.block_manager.add_resumed_row(slot, len(fed))
        adapter_ids = [self.prompt_adapters[slot]] if self.prompt_adapters else []
        self._prefill_into([fed], [None], [row.block_table], adapter_ids)
        super().add_rows(np.array([slot]))
        self.response_lengths[-1] = len(fed) - self.prompt_lengths[slot]
        if experts is not None:
            self._row_experts[-1] = list(experts[self.prompt_lengths[slot] :])

    def decode(self, tokens: np.ndarray) -> Tensor:
        decoder, device = self.decoder, self.decoder.device
        places = [self.block_manager.append_position(row) for row in self.block_manager.rows]
        self.copy_blocks([copy for _, _, copy in places])
        page_N = torch.tensor([page for page, _, _ in places], device=device)
        place_N = torch.tensor([place for _, place, _ in places], device=device)
        lengths = np.array([row.length for row in self.block_manager.rows])
        table, length, shared = make_block_tables(
            [row.block_table for row in self.block_manager.rows],
            lengths,
            self.block_manager.shared_prefixes(),
            self.block_size,
            device,
        )

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.kv[layer][0, page_N, place_N] = k
            self.kv[layer][1, page_N, place_N] = v
            bounds = decoder.layers[layer].bounds
            return compute_paged_attention(
                q, self.kv[layer], table, length, shared, bounds
            ).flatten(1)

        positions = self.prompt_lengths[self.prompt_of_row] + self.response_lengths
        rope = decoder.rope(torch.from_numpy(positions).to(device), int(positions.max()) + 1)
        row_adapters = self._get_row_adapters()
        choices, ids = self._new_choices(), torch.from_numpy(tokens).to(device)
        hidden = decoder.forward(ids, rope, attend, row_adapters, choices=choices)
        self.response_lengths = self.response_lengths + 1
        logits_NV = decoder.head(hidden, row_adapters)
        self.record_experts(copy_choices(choices))  # waits for the device
        return logits_NV

    def replace_non_finite(self) -> None:
        """Replace NaN and infinity in the blocks, after rows with such values were removed.

        Otherwise they would affect the rows that reuse these blocks (0 times NaN is NaN).
        """
        for kv in self.kv:
            kv.nan_to_num_(0.0, 0.0, 0.0)

    def _move_rows(self, source: np.ndarray) -> None:
        surviving = set(source.tolist())
        for i, row in enumerate(self.block_manager.rows):
            if i not in surviving:
                self.block_manager.drop_row(row)
        self.block_manager.rows = [self.block_manager.rows[i] for i in source]

    def _move_prompts(self, source: np.ndarray) -> None:
        surviving = set(source.tolist())
        for i, prompt in enumerate(self.block_manager.prompts):
            if i not in surviving:
                self.block_manager.drop_prompt(prompt)
        self.block_manager.prompts = [self.block_manager.prompts[i] for i in source]


def copy_to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Copy integers to a device as int64, as `send_to_device`."""
    return send_to_device(torch.tensor(numbers, dtype=torch.int64), device)


def send_to_device(host: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device.

    On CUDA the copy from pinned memory is asynchronous: kernels that read the tensor wait for it,
    the host does not.
    """
    return (
        host.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else host.to(device)
    )
