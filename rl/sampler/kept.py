"""What one engine over pages leaves to the next: the pool of pages, the buffers of its steps, and
the graphs over both.

A graph knows addresses, so as long as these three and a decoder stay where they are it is captured
once, not once for each call to sample; weights that are loaded in place are those of its next
replay. One pool lies idle at most. Memory that a learner on the same device needs is given back
before it works, and kept only where learning has been seen to leave room for it.
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

_CONDITIONS = 16  # kinds of stops there is room for at first
_SHARE = 0.85  # of a device's memory that learning and what is kept may come to


class Pages:
    """A pool of `count` pages of `size` positions, for decoders of one shape. `kv` [2, count + 1,
    size, K, D] of each layer.

    One page more than there are: rows that have ended write to it. `steps`: by decoder, for as long
    as it is there, all over the same pages and buffers.
    """

    def __init__(self, decoder: FastForward, count: int, size: int):
        shape = self._shape(decoder, count, size)
        self.kv: list[Tensor] = [
            torch.zeros(shape, dtype=decoder.dtype, device=decoder.device) for _ in decoder.layers
        ]
        self.through = False  # it lay here while a learner worked
        self._buffers: StepBuffers | None = None
        self._steps: WeakKeyDictionary[FastForward, Steps] = WeakKeyDictionary()

    @staticmethod
    def _shape(decoder: FastForward, count: int, size: int) -> tuple[int, ...]:
        return (2, count + 1, size, decoder.architecture.key_heads, decoder.architecture.head_width)

    @property
    def bytes(self) -> int:
        return sum(one.nbytes for one in self.kv)

    def fit(self, decoder: FastForward, least: int, most: int, size: int) -> bool:
        """Whether it is of the decoder's shape, and `least` to `most` pages."""
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
        """Those of the decoder; made, with all others', anew where they are of other sizes.

        `most` rows, `pages` of a table, `look` steps between two looks, so many kinds of stops.
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
    """Whether `size` bytes more than were ever taken at once are there. Never of a host, whose
    memory is not asked for.
    """
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    mine = free + torch.cuda.memory_reserved(device)  # others' processes have the rest
    return torch.cuda.max_memory_allocated(device) + size <= _SHARE * mine


class Kept:
    """The idle pool of a process whose engines come one after the other."""

    def __init__(self, room: Callable[[torch.device, int], bool] = leaves_room):
        """`room`: whether a device has so many bytes beside what learning takes."""
        self._idle: Pages | None = None
        self._room, self._learned = room, False

    def take(self, decoder: FastForward, least: int, most: int, size: int) -> Pages:
        """The idle pool, if it is of this shape and has `least` to `most` pages; otherwise a new
        one of `least`, and the other's memory is given back before.
        """
        idle, self._idle = self._idle, None
        if idle is not None and idle.fit(decoder, least, most, size):
            return idle
        del idle
        return Pages(decoder, least, size)

    def back(self, pages: Pages) -> None:
        self._idle = pages

    def release(self) -> None:
        self._idle = None

    def forget(self) -> None:
        """As `release`, and what learning takes is to be seen anew: for another learner, or one
        that has not found enough.
        """
        self._idle, self._learned = None, False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Around a learner's work on this device."""
        self.make_room()
        try:
            yield
        except (
            torch.OutOfMemoryError
        ):  # what could not be had is not part of the most that was ever taken
            self.forget()
            raise

    def learned(self) -> None:
        """An update has been made: from now on it is known what learning takes."""
        self._learned = True

    def make_room(self) -> None:
        """A learner is about to work on this device: what lies here goes, unless learning has left
        room for it before.

        What lay here through earlier work is part of the most that was ever taken.
        """
        idle = self._idle
        if idle is None:
            return
        more = 0 if idle.through else idle.bytes
        if self._learned and self._room(idle.kv[0].device, more):
            idle.through = True
        else:
            self._idle = None
