"""Sizes of a program's tile, by what the GPU has: capability, shared memory a block may take, and
how rows can be read.

The tiles depend on the device, D and dtype alone, never on the number of rows: a token's logprob
has the same bits in every batch. The spills and shared memory that each choice compiles to are
bounded for sm_80, 86, 89, 90, 100 and 120 in tests/test_kernel_compile.py.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes of shared memory that one block may ask for, by compute capability (CUDA C++ Programming
# Guide, "Technical specifications").
SHARED = {
    75: 65_536,
    80: 166_912,
    86: 101_376,
    87: 166_912,
    89: 101_376,
    90: 232_448,
    100: 232_448,
    103: 232_448,
    120: 101_376,
}


class Device(NamedTuple):
    """A GPU as the kernels see it; `capability` is 90 for sm_90."""

    capability: int

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a block may take; of a GPU that is not in the table, what the
        one below it has.
        """
        return SHARED[max(known for known in SHARED if known <= max(self.capability, min(SHARED)))]

    @property
    def descriptors(self) -> bool:
        """Whether a copy engine reads tiles (TMA). Below Hopper descriptors compile to 20 KB of
        spills a thread.
        """
        return self.capability >= 90

    @property
    def warpgroups(self) -> bool:
        """Whether four warps multiply together from shared memory (Hopper's wgmma, Blackwell's
        tcgen05), which large tiles need.
        """
        return 90 <= self.capability < 120


HOPPER = Device(90)


@cache
def _device(index: int) -> Device:
    major, minor = torch.cuda.get_device_capability(index)
    return Device(10 * major + minor)


def device_of(tensor: Tensor) -> Device:
    """The tensor's GPU; off CUDA (the interpreter, tensors without memory) an H100, for which the
    numbers here were chosen.
    """
    if not tensor.is_cuda or not torch.cuda.is_available():
        return HOPPER
    return _device(
        torch.cuda.current_device() if tensor.device.index is None else tensor.device.index
    )


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(tensor: Tensor) -> int:
    """Of the tensor's GPU; an H100's 132 where there is none (see `device_of`)."""
    if not tensor.is_cuda or not torch.cuda.is_available():
        return 132
    return _multiprocessors(
        torch.cuda.current_device() if tensor.device.index is None else tensor.device.index
    )


class Tiles(NamedTuple):
    """Sizes of a program's tile, and how it is pipelined."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tiles_for(D: int, dtype: torch.dtype, device: Device = HOPPER) -> Tiles:
    """Of the kernels that multiply hidden states and a head."""
    if dtype == torch.float32:
        return Tiles(64, 128, 32, 4 if device.warpgroups else 8, 3)
    if not device.warpgroups:
        return Tiles(128, 128, 32, 8, 3)
    # 128 x 256 spills there, and what the keeping variant shares passes 227 KiB
    if device.capability >= 100:
        return Tiles(128, 128, 64, 8, 3)
    return Tiles(128, 256, 64, 8, 4) if D >= 1536 else Tiles(128, 128, 64, 4, 3)


# Of linear_logprob_ws.py on Hopper: one producing warp and two groups of four that multiply 64 x
# 256 each.
SPECIAL = Tiles(128, 256, 64, 4, 3)
