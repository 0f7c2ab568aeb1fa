"""Pass the KV cache pool of a paged engine to the next, with its step buffers and CUDA graphs.

A graph contains addresses. While pool, buffers and decoder stay in place, it is captured once, not
once for each call to sample. Weights that are loaded in place take effect in the next replay. At
most 1 pool is idle. Memory that a learner on the same device needs is freed before the learner
runs; the pool is kept only if enough memory remained for it in earlier updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rl.sampler.cuda_graphs import CUDAGraphRunner, row_buckets
from rl.sampler.forward_fast import FastForward
from rl.sampler.step_buffers import StepBuffers
from rl.sampler.tensor_parallel import all_ranks_agree
from rl.sampler.token_counts import MAX_COUNTS

_INITIAL_STOP_CONDITIONS = 16  # initial number of stop conditions
_INITIAL_COUNTED = 16  # initial number of rows with penalties, when the first comes
_MAX_MEMORY_FRACTION = 0.85  # maximum fraction of device memory for learning and the kept pool


def _find_shape(decoder: FastForward, count: int, block_size: int) -> tuple[int, ...]:
    """Return the shape of a layer of a pool of `count` blocks."""
    a = decoder.architecture
    return 2, count + 1, block_size, a.key_heads, a.head_width


class KVCachePool:
    """Hold a pool of `count` blocks of `block_size` positions, for decoders of the same shape.

    `kv` has shape [2, count + 1, size, K, D] for each layer. Ended rows write to the extra block.
    `get_step_graphs` holds the graphs by decoder, for the lifetime of the decoder, all over the
    same blocks and buffers.
    """

    def __init__(self, decoder: FastForward, count: int, block_size: int):
        shape = _find_shape(decoder, count, block_size)
        self.kv: list[Tensor] = [
            torch.zeros(shape, dtype=decoder.dtype, device=decoder.device) for _ in decoder.layers
        ]
        self.kept_during_learning = False  # the pool was kept while a learner ran
        # decoder of several adapters (without any) whose graphs the pool holds, for the next engine
        self.mixed_decoder: FastForward | None = None
        self._buffers: StepBuffers | None = None
        self._sizes: tuple[int, ...] = ()  # of the buffers
        self._steps: WeakKeyDictionary[FastForward, CUDAGraphRunner] = WeakKeyDictionary()

    @property
    def bytes(self) -> int:
        """Return the size of the pool in bytes, with the token counts of rows with penalties."""
        counts = 0 if self._buffers is None else self._buffers.counts.nbytes
        return sum(tensor.nbytes for tensor in self.kv) + counts

    def fits(self, decoder: FastForward, min_blocks: int, max_blocks: int, block_size: int) -> bool:
        """Return whether the pool has the decoder's shape and enough blocks, but not too many."""
        first, count = self.kv[0], self.kv[0].shape[1] - 1
        return (
            min_blocks <= count <= max_blocks
            and len(self.kv) == len(decoder.layers)
            and tuple(first.shape) == _find_shape(decoder, count, block_size)
            and (first.dtype, first.device) == (decoder.dtype, decoder.device)
        )

    def get_step_graphs(
        self,
        decoder: FastForward,
        max_rows: int,
        table_width: int,
        steps_per_sync: int,
        conditions: int,
        choices: int = 0,
        counted: int = 0,
    ) -> CUDAGraphRunner:
        """Return the step graphs of the decoder.

        If the sizes differ from the present buffers, or exceed their room for stop conditions or
        penalties, the buffers and the graphs of all decoders are rebuilt. `max_rows`: rows,
        `table_width`: blocks of a table, `steps_per_sync`: steps per host sync, `conditions`:
        number of stop conditions, `choices`: recorded experts of a token, `counted`: rows with
        penalties.
        """
        rows, vocab = row_buckets(max_rows)[-1], decoder.vocab_size
        sizes = (rows, table_width, steps_per_sync, vocab, choices)
        b = self._buffers if sizes == self._sizes else None
        if b is None or len(b.stops) < conditions or len(b.counts) <= counted:
            room, count_rows = _INITIAL_STOP_CONDITIONS, _INITIAL_COUNTED if counted else 0
            if b is not None:  # what has grown stays, so that the next engine finds room too
                room, count_rows = len(b.stops), max(count_rows, len(b.counts) - 1)
            while room < conditions:
                room *= 2
            while count_rows < counted:
                count_rows *= 4
            self._steps.clear()
            b = StepBuffers.allocate(
                rows, table_width, steps_per_sync, room, vocab, decoder.device, choices,
                min(count_rows, rows, max(MAX_COUNTS // vocab, counted)),
            )  # fmt: skip
            self._buffers, self._sizes = b, sizes
        runner = self._steps.get(decoder)
        if runner is None:
            runner = self._steps[decoder] = CUDAGraphRunner(decoder, self.kv, b, max_rows)
        return runner


def has_free_memory(device: torch.device, size: int) -> bool:
    """Return whether `size` bytes are free beyond the peak allocation of this process.

    Always False on a host: its memory is not queried.
    """
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    available = free + torch.cuda.memory_reserved(device)  # other processes use the rest
    return torch.cuda.max_memory_allocated(device) + size <= _MAX_MEMORY_FRACTION * available


class IdleKVCachePool:
    """Hold the idle pool of a process that runs its engines in sequence."""

    def __init__(self) -> None:
        self._idle: KVCachePool | None = None
        self._has_learned = False

    def take(
        self, decoder: FastForward, min_blocks: int, max_blocks: int, block_size: int
    ) -> KVCachePool:
        """Return the idle pool if it has this shape and `min_blocks` to `max_blocks` blocks.

        Otherwise free the idle pool and return a new pool of `min_blocks` blocks. Ranks that split
        the decoder all reuse their pools, or none does: all capture the same graphs.
        """
        idle, self._idle = self._idle, None
        fits = idle is not None and idle.fits(decoder, min_blocks, max_blocks, block_size)
        if all_ranks_agree(decoder.tp_group, fits, decoder.device):
            assert idle is not None
            return idle
        del idle
        return KVCachePool(decoder, min_blocks, block_size)

    def take_mixed_decoder(self, base: Any) -> Any:
        """Return the decoder of several adapters on this base whose graphs the idle pool holds, or
        None.
        """
        decoder: Any = None if self._idle is None else self._idle.mixed_decoder
        if self._idle is None or decoder is None or decoder.base_decoder is not base:
            return None
        self._idle.mixed_decoder = None
        return decoder

    def store(self, pages: KVCachePool) -> None:
        """Store an idle pool for the next engine."""
        self._idle = pages

    def release(self) -> None:
        """Free the idle pool."""
        self._idle = None

    def reset(self) -> None:
        """Free the idle pool and reset the measurement of learning.

        For another learner, or a learner that ran out of memory.
        """
        self._idle, self._has_learned = None, False

    @contextmanager
    def yield_to_learner(self) -> Iterator[None]:
        """Wrap the work of a learner on this device. Resets the measurement if the device is out of
        memory.
        """
        self.free_for_learner()
        try:
            yield
        except torch.OutOfMemoryError:  # the failed allocation is not part of the measured peak
            self.reset()
            raise

    def record_update(self) -> None:
        """Record that an update was made: from now on the memory peak includes learning."""
        self._has_learned = True

    def free_for_learner(self) -> None:
        """Free the idle pool before a learner runs, unless earlier updates had enough memory
        besides it.

        A pool that was kept during earlier work is already part of the measured peak.
        """
        idle = self._idle
        if idle is None:
            return
        more = 0 if idle.kept_during_learning else idle.bytes
        if self._has_learned and has_free_memory(idle.kv[0].device, more):
            idle.kept_during_learning = True
        else:
            self._idle = None
