"""Share what the two KV caches of the fast decoder have in common (contiguous_state.py,
paged_state.py).

Shapes: P prompts, N rows, V vocabulary.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.sampler.decode_state import DecodeState, Prompt, index_in_row, store_experts
from rl.sampler.decoder import batch_prompts
from rl.sampler.expert_layers import copy_choices
from rl.sampler.forward_fast import Attend, FastForward, StoreKeyValues, make_ops
from rl.sampler.linear_layers import RowAdapters
from rl.sampler.prefix_attention import SuffixBatch
from rl.sampler.prefix_cache import CHUNK_SIZE, Hashes, select_wave

_SUFFIX_TOKENS = 8192  # padded new tokens per forward
_GATHERED_POSITIONS = 32_768  # padded positions that a forward of suffixes reads
# Takes (layer, new keys [X, K, D], new values), stores them; keys and values of whole prompts,
# [B, K, positions, D].
StoreSuffixes = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class FastState(DecodeState):
    """Feed tokens to the fast decoder. Subclasses store and read the keys and values."""

    decoder: FastForward
    chunk_size: int = CHUNK_SIZE
    uses_cpu_kernels = False  # whether the norms of a step use the CPU kernels

    def __init__(self, decoder: FastForward):
        super().__init__(decoder)
        self._row_adapters: RowAdapters | None = None  # rebuilt after rows were added or removed

    def decode(self, tokens: np.ndarray, rows: np.ndarray | None = None) -> Tensor:
        """Feed each row its last token, or `rows` [X], ascending, several tokens in a row (X tokens
        in total). Return the logits after each token, [X, V].
        """
        decoder, positions = self.decoder, self.lengths()
        if rows is not None:
            positions = positions[rows] + index_in_row(rows)
        row_adapters = self._row_adapters
        if decoder.multi_adapter and (row_adapters is None or rows is not None):
            slots = self.prompt_of_row if rows is None else self.prompt_of_row[rows]
            row_adapters = decoder.group_rows([self.prompts[slot].adapter_id for slot in slots])
        if rows is None:
            self._row_adapters = row_adapters
        choices: list[Tensor] | None = [] if self.records_experts else None
        kernels = decoder.cpu_kernels if self.uses_cpu_kernels else None
        hidden = decoder.forward(
            torch.from_numpy(tokens).to(decoder.device),
            self._make_attention(positions, rows),
            row_adapters,
            None,
            choices,
            make_ops(kernels, decoder.cpu_kernels),
        )
        fed = 1 if rows is None else np.bincount(rows, minlength=len(self.response_lengths))
        self.response_lengths = self.response_lengths + fed
        logits_XV = decoder.head(hidden, row_adapters)
        self.record_experts(copy_choices(choices), rows)  # waits for the device
        return logits_XV

    def drop_newest(self, counts: np.ndarray) -> None:
        """Drop the newest `counts` [N] positions of the rows. They are written anew when they are
        fed again.
        """
        self.response_lengths = self.response_lengths - counts
        if self.records_experts:
            for experts, count in zip(self._row_experts, counts.tolist(), strict=True):
                del experts[len(experts) - count :]

    @abc.abstractmethod
    def _make_attention(self, positions: np.ndarray, rows: np.ndarray | None = None) -> Attend:
        """Return the attention of a step, which stores the keys and values of the tokens of `rows`
        (None: a token of each row) at `positions`.
        """

    def _fill(self, prompts: Sequence[Prompt]) -> Tensor:
        """Store the keys and values of prompts in their targets; return the logits of their last
        positions [P, V].

        Tokens whose keys and values are cached, or computed for another prompt of the batch, are
        not computed again, except for prompts with readers, which need all logits.
        """
        lengths = [len(prompt.tokens) for prompt in prompts]
        hashes: list[Hashes] = [() if prompt.reader else prompt.hashes for prompt in prompts]
        pending, size = list(range(len(prompts))), (len(prompts), self.decoder.vocab_size)
        logits_PV = torch.empty(size, dtype=torch.float32, device=self.decoder.device)
        while pending:
            wave, pending = select_wave(
                pending, hashes, lengths, self._count_cached, self.chunk_size
            )
            for i, chunks in wave.items():
                self._start_prompt(prompts[i], chunks)
            self._copy_prefixes()
            if whole := [i for i in wave if not prompts[i].reused]:
                self.decoder.forward_prompts(
                    prompts,
                    whole,
                    self._store_prompts([prompts[i] for i in whole]),
                    logits_PV,
                    self.records_experts,
                )
            rest = [i for i in wave if prompts[i].reused]
            for members in split_suffixes(lengths, [prompt.reused for prompt in prompts], rest):
                logits_PV[members] = self._extend([prompts[i] for i in members])
            for i in wave:
                self._register(prompts[i])
        return logits_PV

    def _extend(self, prompts: Sequence[Prompt]) -> Tensor:
        """Prefill prompts after their reused tokens in a single forward, padded on the right;
        return the logits of their last positions.

        Keys and values are written to their final positions and read together with those before.
        """
        decoder = self.decoder
        starts = np.array([prompt.reused for prompt in prompts], np.int64)
        suffixes = [prompt.tokens[prompt.reused :] for prompt in prompts]
        suffix_batch = SuffixBatch(starts, suffixes, decoder.device)
        store = self._store_suffixes([prompt.target for prompt in prompts], suffix_batch)
        rope = decoder.rope(suffix_batch.position_BT, suffix_batch.rope_positions)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            q, k, v = decoder.split_qkv(layer, qkv, rope)
            keys, values = store(layer, suffix_batch.select(k), suffix_batch.select(v))
            return suffix_batch.attend(q, keys, values, decoder.layers[layer].bounds)

        row_adapters = decoder.group_rows([prompt.adapter_id for prompt in prompts])
        choices: list[Tensor] | None = [] if self.records_experts else None
        ids, last_B = suffix_batch.ids_BT, suffix_batch.last_B
        hidden = decoder.forward(ids, attend, row_adapters, last_B, choices)
        store_experts(prompts, copy_choices(choices))
        return decoder.head(hidden, row_adapters).float()

    @abc.abstractmethod
    def _count_cached(self, hashes: Hashes) -> int:
        """Return how many chunks of a sequence are in the cache."""

    @abc.abstractmethod
    def _start_prompt(self, prompt: Prompt, hashes: Hashes) -> None:
        """Allocate the positions of a prompt, and let it begin with a cached prefix of these
        chunks. `_copy_prefixes` must follow.
        """

    @abc.abstractmethod
    def _copy_prefixes(self) -> None:
        """Copy the prefixes of the prompts that were started."""

    @abc.abstractmethod
    def _register(self, prompt: Prompt) -> None:
        """Let later prompts find a prompt whose keys and values are stored."""

    @abc.abstractmethod
    def _store_prompts(self, prompts: Sequence[Prompt]) -> StoreKeyValues:
        """Return the function that stores the keys and values of whole prompts, see
        `FastForward.forward_prompts`.
        """

    @abc.abstractmethod
    def _store_suffixes(self, targets: Sequence[Any], batch: SuffixBatch) -> StoreSuffixes:
        """Return the function that stores and reads the keys and values of extended prompts."""

    @abc.abstractmethod
    def replace_non_finite(self) -> None:
        """Replace NaN and infinity in the cache, after rows with such values were removed.

        Otherwise they would affect the rows that reuse their memory (0 times NaN is NaN).
        """

    def _rows_changed(self) -> None:
        self._row_adapters = None


def split_suffixes(
    lengths: Sequence[int], starts: Sequence[int], members: Sequence[int]
) -> Iterator[list[int]]:
    """Yield batches of `members` whose new tokens share a forward. `lengths` and `starts`: of all
    prompts.
    """
    suffixes = [lengths[i] - starts[i] for i in members]
    for indices in batch_prompts(suffixes, _SUFFIX_TOKENS):
        batch, longest = list[int](), 0
        for i in sorted((members[index] for index in indices), key=lambda i: -lengths[i]):
            longest = max(longest, lengths[i])
            if batch and (len(batch) + 1) * longest > _GATHERED_POSITIONS:
                yield batch
                batch, longest = [], lengths[i]
            batch.append(i)
        yield batch
