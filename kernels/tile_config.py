"""Choose tile sizes by the properties of the GPU: capability, shared memory of a block, and row
loads.

The tiles depend only on the device, D and dtype, never on the number of rows: a token's logprob
has the same bits in every batch. tests/kernels/test_kernel_compile.py bounds the register spills
and the shared memory that each choice compiles to, for sm_80, 86, 89, 90, 100 and 120.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class GpuInfo(NamedTuple):
    """Hold the properties of a GPU that the kernels use; `capability` is 90 for sm_90."""

    capability: int
    multiprocessors: int = 132  # an H100's

    @property
    def has_tma(self) -> bool:
        """Return whether a copy engine reads tiles (TMA). Below Hopper, descriptors compile to 20
        KB of spills for each thread.
        """
        return self.capability >= 90

    @property
    def has_warpgroup_mma(self) -> bool:
        """Return whether four warps multiply together from shared memory (Hopper's wgmma,
        Blackwell's tcgen05), which large tiles need.
        """
        return 90 <= self.capability < 120


HOPPER = GpuInfo(90)


@cache
def _gpu_info(index: int) -> GpuInfo:
    """Return the `GpuInfo` of the GPU with this index."""
    major, minor = torch.cuda.get_device_capability(index)
    count = torch.cuda.get_device_properties(index).multi_processor_count
    return GpuInfo(10 * major + minor, count)


def get_gpu_info(tensor: Tensor) -> GpuInfo:
    """Return the tensor's GPU; without CUDA (the interpreter, fake tensors) an H100, for which the
    sizes in this file were chosen.
    """
    if not tensor.is_cuda or not torch.cuda.is_available():
        return HOPPER
    return _gpu_info(
        torch.cuda.current_device() if tensor.device.index is None else tensor.device.index
    )


class TileConfig(NamedTuple):
    """Hold the sizes of a program's tile and its pipeline: warps and stages."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def select_tile_sizes(D: int, dtype: torch.dtype, device: GpuInfo = HOPPER) -> TileConfig:
    """Return the tile sizes of the kernels that multiply hidden states and an LM head."""
    if dtype == torch.float32:
        return TileConfig(64, 128, 32, 4 if device.has_warpgroup_mma else 8, 3)
    if not device.has_warpgroup_mma:
        return TileConfig(128, 128, 32, 8, 3)
    # 128 x 256 spills on these GPUs, and the variant that saves probabilities needs more than 227
    # KiB of shared memory
    if device.capability >= 100:
        return TileConfig(128, 128, 64, 8, 3)
    return TileConfig(128, 256, 64, 8, 4) if D >= 1536 else TileConfig(128, 128, 64, 4, 3)


# Tiles of kernels/linear_logprob_hopper.py on Hopper: a producer warp and two warp groups of four
# that multiply 64 x 256 each.
HOPPER_TILES = TileConfig(128, 256, 64, 4, 3)
