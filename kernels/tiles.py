"""Choose tile sizes by the properties of the GPU: capability, shared memory of a block, and row
loads.

The tiles depend only on the device, D and dtype, never on the number of rows: a token's logprob
has the same bits in every batch. tests/test_kernel_compile.py bounds the register spills and the
shared memory that each choice compiles to, for sm_80, 86, 89, 90, 100 and 120.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

# Bytes of shared memory that a block may request, by compute capability (CUDA C++ Programming
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
    """Hold the properties of a GPU that the kernels use; `capability` is 90 for sm_90."""

    capability: int

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory that a block may request; for a GPU missing in the
        table, those of the next lower entry.
        """
        return SHARED[max(known for known in SHARED if known <= max(self.capability, min(SHARED)))]

    @property
    def descriptors(self) -> bool:
        """Return whether a copy engine reads tiles (TMA). Below Hopper, descriptors compile to 20
        KB of spills for each thread.
        """
        return self.capability >= 90

    @property
    def warpgroups(self) -> bool:
        """Return whether four warps multiply together from shared memory (Hopper's wgmma,
        Blackwell's tcgen05), which large tiles need.
        """
        return 90 <= self.capability < 120


HOPPER = Device(90)


@cache
def _device(index: int) -> Device:
    """Return the `Device` of the GPU with this index."""
    major, minor = torch.cuda.get_device_capability(index)
    return Device(10 * major + minor)


def device_of(tensor: Tensor) -> Device:
    """Return the tensor's GPU; without CUDA (the interpreter, fake tensors) an H100, for which the
    sizes in this file were chosen.
    """
    if not tensor.is_cuda or not torch.cuda.is_available():
        return HOPPER
    return _device(
        torch.cuda.current_device() if tensor.device.index is None else tensor.device.index
    )


@cache
def _multiprocessors(index: int) -> int:
    """Return the number of multiprocessors of the GPU with this index."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def multiprocessors(tensor: Tensor) -> int:
    """Return the number of multiprocessors of the tensor's GPU; without CUDA an H100's 132 (see
    `device_of`).
    """
    if not tensor.is_cuda or not torch.cuda.is_available():
        return 132
    return _multiprocessors(
        torch.cuda.current_device() if tensor.device.index is None else tensor.device.index
    )


class Tiles(NamedTuple):
    """Hold the sizes of a program's tile and its pipeline: warps and stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def tiles_for(D: int, dtype: torch.dtype, device: Device = HOPPER) -> Tiles:
    """Return the tile sizes of the kernels that multiply hidden states and an LM head."""
    if dtype == torch.float32:
        return Tiles(64, 128, 32, 4 if device.warpgroups else 8, 3)
    if not device.warpgroups:
        return Tiles(128, 128, 32, 8, 3)
    # 128 x 256 spills on these GPUs, and the variant that saves probabilities needs more than 227
    # KiB of shared memory
    if device.capability >= 100:
        return Tiles(128, 128, 64, 8, 3)
    return Tiles(128, 256, 64, 8, 4) if D >= 1536 else Tiles(128, 128, 64, 4, 3)


# Tiles of kernels/linear_logprob_ws.py on Hopper: a producer warp and two warp groups of four that
# multiply 64 x 256 each.
SPECIAL = Tiles(128, 256, 64, 4, 3)
