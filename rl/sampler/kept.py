"""Pass the KV cache pool of a paged engine to the next, with its step buffers and CUDA graphs.

A graph contains addresses. While pool, buffers and decoder stay in place, it is captured once, not
once for each call to sample. Weights that are loaded in place take effect in the next replay. At
most 1 pool is idle. Memory that a learner on the same device needs is freed before the learner
runs; the pool is kept only if enough memory remained for it in earlier updates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rl.sampler.forward_fast import FastForward
from rl.sampler.step_buffers import StepBuffers
from rl.sampler.step_graphs import Steps, buckets

_CONDITIONS = 16  # initial number of stop conditions
_SHARE = 0.85  # maximum fraction of device memory for learning and the kept pool


class Pages:
    """Hold a pool of `count` blocks of `size` positions, for decoders of the same shape.

    `kv` has shape [2, count + 1, size, K, D] for each layer. Ended rows write to the extra block.
    `steps` holds the graphs by decoder, for the lifetime of the decoder, all over the same blocks
    and buffers.
    """

    def __init__(self, decoder: FastForward, count: int, size: int):
        shape = self._shape(decoder, count, size)
        self.kv: list[Tensor] = [
            torch.zeros(shape, dtype=decoder.dtype, device=decoder.device) for _ in decoder.layers
        ]
        self.through = False  # the pool was kept while a learner ran
        self._buffers: StepBuffers | None = None
        self._steps: WeakKeyDictionary[FastForward, Steps] = WeakKeyDictionary()

    @staticmethod
    def _shape(decoder: FastForward, count: int, size: int) -> tuple[int, ...]:
        """Return the shape of the KV cache of a layer."""
        return (2, count + 1, size, decoder.architecture.key_heads, decoder.architecture.head_width)

    @property
    def bytes(self) -> int:
        """Return the size of the pool in bytes."""
        return sum(tensor.nbytes for tensor in self.kv)

    def fit(self, decoder: FastForward, least: int, most: int, size: int) -> bool:
        """Return whether the pool has the decoder's shape and `least` to `most` blocks."""
        count = self.kv[0].shape[1] - 1
        shape, kind = (
            self._shape(decoder, max(min(count, most), least), size),
            (decoder.dtype, decoder.device),
        )
        return len(self.kv) == len(decoder.layers) and all(
            tuple(t.shape) == shape and (t.dtype, t.device) == kind for t in self.kv
        )

    def steps(
        self, decoder: FastForward, most: int, pages: int, look: int, conditions: int
    ) -> Steps:
        """Return the step graphs of the decoder.

        If the sizes differ from the present buffers, the buffers and the graphs of all decoders are
        rebuilt. `most`: rows, `pages`: blocks of a table, `look`: steps per host sync,
        `conditions`: number of stop conditions.
        """
        b, rows = self._buffers, buckets(most)[-1]
        words = decoder.vocab_size
        if b is None or (len(b.token), b.table.shape[1], len(b.tokens), b.stops.shape[1]) != (
            rows,
            pages,
            look,
            words,
        ):
            b = None
        if b is None or len(b.stops) < conditions:
            room = _CONDITIONS
            while room < conditions:
                room *= 2
            self._steps.clear()
            b = self._buffers = StepBuffers.make(rows, pages, look, room, words, decoder.device)
        if decoder not in self._steps:
            self._steps[decoder] = Steps(decoder, self.kv, b, most)
        return self._steps[decoder]


def leaves_room(device: torch.device, size: int) -> bool:
    """Return whether `size` bytes are free beyond the peak allocation of this process.

    Always False on a host: its memory is not queried.
    """
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    available = free + torch.cuda.memory_reserved(device)  # other processes use the rest
    return torch.cuda.max_memory_allocated(device) + size <= _SHARE * available


class Kept:
    """Hold the idle pool of a process that runs its engines in sequence."""

    def __init__(self, room: Callable[[torch.device, int], bool] = leaves_room):
        """Set `room`, which checks whether a device has a number of bytes besides what learning
        takes.
        """
        self._idle: Pages | None = None
        self._room, self._learned = room, False

    def take(self, decoder: FastForward, least: int, most: int, size: int) -> Pages:
        """Return the idle pool if it has this shape and `least` to `most` blocks.

        Otherwise free the idle pool and return a new pool of `least` blocks.
        """
        idle, self._idle = self._idle, None
        if idle is not None and idle.fit(decoder, least, most, size):
            return idle
        del idle
        return Pages(decoder, least, size)

    def back(self, pages: Pages) -> None:
        """Store an idle pool for the next engine."""
        self._idle = pages

    def release(self) -> None:
        """Free the idle pool."""
        self._idle = None

    def forget(self) -> None:
        """Free the idle pool and reset the measurement of learning.

        For another learner, or a learner that ran out of memory.
        """
        self._idle, self._learned = None, False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Wrap the work of a learner on this device. Resets the measurement if the device is out of
        memory.
        """
        self.make_room()
        try:
            yield
        except torch.OutOfMemoryError:  # the failed allocation is not part of the measured peak
            self.forget()
            raise

    def learned(self) -> None:
        """Record that an update was made: from now on the memory peak includes learning."""
        self._learned = True

    def make_room(self) -> None:
        """Free the idle pool before a learner runs, unless earlier updates had enough memory
        besides it.

        A pool that was kept during earlier work is already part of the measured peak.
        """
        idle = self._idle
        if idle is None:
            return
        more = 0 if idle.through else idle.bytes
        if self._learned and self._room(idle.kv[0].device, more):
            idle.through = True
        else:
            self._idle = None
