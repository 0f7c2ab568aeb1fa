"""Store the KV cache of the fast decoder in blocks of a fixed pool.

Memory is proportional to the tokens that exist, not to the longest row times all rows. The samples
equal those of `contiguous_state`. block_manager.py decides which rows share blocks, block_tables.py
builds the block tables of a step. When no blocks are free, rows are preempted (see scheduler.py).
Shapes: P prompts, N rows, K key heads, S positions of a block, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from kernels import compute_paged_attention
from kernels.decode_ops import append_to_cache
from rl.sampler.block_manager import BlockManager, PromptBlockTable
from rl.sampler.block_tables import make_block_tables
from rl.sampler.decode_state import BatchSize, Prompt, pad_right, send_to_device
from rl.sampler.fast_state import FastState, StoreSuffixes
from rl.sampler.forward_fast import Attend, FastForward, StoreKeyValues
from rl.sampler.prefix_attention import SuffixBatch
from rl.sampler.prefix_cache import Hashes

BLOCK_SIZE = 256  # positions: the block size of torch's varlen attention


class PagedState(FastState):
    """Store `kv` [2, blocks + 1, S, K, D] for each layer: keys, then values.

    The blocks belong to `rl.sampler.kv_cache_pool.KVCachePool`. The last block belongs to no row.
    Only the first `num_blocks` are used (None: all others): what is reused must not depend on how
    large a pool an earlier engine has left.
    """

    caches_rows_without_copy = True

    def __init__(self, decoder: FastForward, kv: list[Tensor], num_blocks: int | None = None):
        super().__init__(decoder)
        self.kv, self.block_size = kv, kv[0].shape[2]
        most = kv[0].shape[1] - 1
        count = most if num_blocks is None else min(num_blocks, most)
        self.block_manager = BlockManager(count, self.block_size)
        self.chunk_size = self.block_manager.chunk_size
        self._copies: list[tuple[int, int]] = []  # blocks to copy (source, target)

    def cost(self, size: BatchSize) -> int:
        """Return the cost of a batch in positions.

        The cost of 1 row is its maximum. The cost of several rows is what they take when they are
        admitted, because rows are preempted when no blocks are free.
        """
        count = self.block_manager.num_blocks_for
        whole = count(size.longest_prompt + size.longest_response)
        several = count(size.longest_prompt) * size.prompts + size.rows
        return self.block_size * (whole if size.rows <= 1 else several)

    def used_tokens(self, size: BatchSize) -> int:
        """Return the positions of the blocks in use."""
        pool = self.block_manager.pool
        return (len(pool.ref_counts) - pool.num_free) * self.block_size

    def _prefill(self, prompts: Sequence[Prompt]) -> Tensor:
        for prompt in prompts:
            prompt.target = PromptBlockTable(len(prompt.tokens))
            self.block_manager.prompts.append(prompt.target)
        return self._fill(prompts)

    def _store_prompts(self, prompts: Sequence[Prompt]) -> StoreKeyValues:
        # the members of a batch are consecutive: it has prompts of similar length (`batch_prompts`)
        ordered = sorted(prompts, key=lambda prompt: -len(prompt.tokens))
        slots = self._locate_slots(ordered)
        rows = {id(prompt): row for row, prompt in enumerate(ordered)}

        def store(layer: int, members: list[Prompt], k: Tensor, v: Tensor) -> None:
            row = rows[id(members[0])]
            members_slots = slots[row : row + len(members), : k.shape[2]]
            append_to_cache(k.transpose(1, 2), v.transpose(1, 2), self.kv[layer], members_slots)

        return store

    def _count_cached(self, hashes: Hashes) -> int:
        return self.block_manager.count_cached(hashes)

    def _start_prompt(self, prompt: Prompt, hashes: Hashes) -> None:
        allocation = self.block_manager.allocate_table(len(prompt.tokens), hashes)
        prompt.target.block_table = allocation.block_table
        prompt.reused, prompt.experts = allocation.positions, allocation.experts
        self._copies += [] if allocation.copy is None else [allocation.copy]

    def _copy_prefixes(self) -> None:
        self.copy_blocks(self._copies)
        self._copies = []

    def _register(self, prompt: Prompt) -> None:
        self.block_manager.register(prompt.target.block_table, prompt.hashes, prompt.experts)

    def cache_row(self, row: int, hashes: Hashes) -> None:
        table = self.block_manager.row_table(row)
        self.block_manager.register(table, hashes, self.experts_of_row(row))

    def forget_prefixes(self) -> None:
        self.block_manager.pool.forget_all()

    def _locate_slots(self, prompts: list[Prompt]) -> Tensor:
        """Return the places of the prompts' positions in the cache, as `append_to_cache` takes
        them, on the device in a single copy: [prompts, longest].
        """
        lengths = [len(prompt.tokens) for prompt in prompts]
        slots = np.full((len(lengths), max(lengths)), -1, np.int64)
        for i, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
            pages = np.array(prompt.target.block_table, np.int64)[:, None] * self.block_size
            slots[i, :length] = (pages + np.arange(self.block_size)).flatten()[:length]
        return send_to_device(torch.from_numpy(slots), self.decoder.device)

    def add_rows(self, prompt_of_row: np.ndarray) -> None:
        for slot, run in groupby(prompt_of_row.tolist()):
            self.block_manager.add_rows(slot, len(list(run)))
        super().add_rows(prompt_of_row)

    def _store_suffixes(
        self, targets: Sequence[PromptBlockTable], batch: SuffixBatch
    ) -> StoreSuffixes:
        """Implement `FastState._store_suffixes`. The cached positions are gathered from their
        blocks.
        """
        tables = [target.block_table for target in targets]
        table_BP = pad_right(tables).to(self.decoder.device)
        position_X = batch.position_X
        page_X = table_BP[batch.row_index_X, position_X // self.block_size]
        place_X = position_X % self.block_size

        def store(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            kv = self.kv[layer]
            kv[0, page_X, place_X], kv[1, page_X, place_X] = k, v
            keys, values = (
                x.flatten(1, 2)[:, : batch.max_positions].transpose(1, 2) for x in kv[:, table_BP]
            )
            return keys, values

        return store

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy shared blocks (origin, target) before a row writes to the target."""
        if copies:
            origin, target = torch.tensor(copies, device=self.decoder.device).unbind(1)
            for kv in self.kv:
                kv[:, target] = kv[:, origin]

    def resume_row(
        self,
        slot: int,
        fed: Sequence[int],
        prompt: Prompt,
        experts: np.ndarray | None = None,
        hashes: Hashes = (),
    ) -> None:
        """Resume a preempted row: prefill prompt and response so far (all fed tokens) into blocks
        of the row. `slot`: that of its prompt. If it is the first free slot, `prompt` is added
        there, without blocks. `experts`: those with which the tokens were sampled. `hashes`: of the
        tokens' chunks.
        """
        manager = self.block_manager
        if slot == len(self.prompts):
            prompt.target = PromptBlockTable(len(prompt.tokens))
            manager.prompts.append(prompt.target)
            self._append_prompts([prompt])
        row = PromptBlockTable(len(fed))
        self._fill([Prompt(fed, adapter_id=prompt.adapter_id, hashes=hashes, target=row)])
        manager.add_resumed_row(slot, row.length, row.block_table)
        super().add_rows(np.array([slot]))
        self.response_lengths[-1] = len(fed) - len(prompt.tokens)
        if experts is not None:
            self._row_experts[-1] = list(experts[len(prompt.tokens) :])

    def _make_attention(self, positions: np.ndarray, rows: np.ndarray | None = None) -> Attend:
        decoder, device, manager = self.decoder, self.decoder.device, self.block_manager
        rows = np.arange(len(manager.rows)) if rows is None else rows
        self.copy_blocks(manager.append_positions(np.bincount(rows, minlength=len(manager.rows))))
        tables = manager.tables[rows]
        page_N, place_N = (
            torch.from_numpy(index).to(device)
            for index in (
                tables[np.arange(len(rows)), positions // self.block_size],
                positions % self.block_size,
            )
        )
        group, skip = (values[rows] for values in manager.shared_prefixes())
        table, length, shared = make_block_tables(
            tables, positions + 1, group, skip, self.block_size, device
        )
        rope = decoder.rope(torch.from_numpy(positions).to(device), int(positions.max()) + 1)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = decoder.split_qkv(layer, qkv, rope)
            self.kv[layer][0, page_N, place_N] = k
            self.kv[layer][1, page_N, place_N] = v
            bounds = decoder.layers[layer].bounds
            return compute_paged_attention(
                q, self.kv[layer], table, length, shared, bounds
            ).flatten(1)

        return attend

    def drop_newest(self, counts: np.ndarray) -> None:
        super().drop_newest(counts)
        self.block_manager.drop_positions(counts)

    def replace_non_finite(self) -> None:
        self.forget_prefixes()
        for kv in self.kv:
            kv.nan_to_num_(0.0, 0.0, 0.0)

    def _move_rows(self, source: np.ndarray) -> None:
        self.block_manager.retain_rows(source)

    def _move_prompts(self, source: np.ndarray) -> None:
        self.block_manager.retain_prompts(source)
