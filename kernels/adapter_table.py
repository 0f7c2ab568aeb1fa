"""Hold the adapters of a layer by slot, for kernels that add to each row those of its slot
(kernels.lora_ops.add_row_lora_).

Shapes: I inputs, O outputs, R ranks of all adapters, X slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# An adapter: B [outputs, ranks], its scale, its columns of the output, its rows of A.
LoraPart = tuple[Tensor, float, slice, slice]
MAX_PARTS = 3  # adapters of a fused layer: q, k and v
NUM_ADDRESSES = 2 + 3 * MAX_PARTS  # numbers of a slot
TILE_ROWS = 16  # rows of a tile, the fewest of a product on tensor cores


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """Hold the adapters of a layer by slot. Kernels read them through their addresses, so that a
    CUDA graph keeps working when a slot gets another adapter.

    `adapters` [X]: A [R, I] and the parts of each slot (None: the slot has no adapter on the
    layer); these tensors are contiguous and of the same dtype `dtype`. `addresses` int64 [X,
    NUM_ADDRESSES]: address and rows of A (0: none), then for each of `modules` the address of B (0:
    none), its first row of A, and its ranks. `scales` float32 [X, MAX_PARTS]. `modules`: the
    columns of the output that a part may have. `inputs`: I. `max_rank`: a power of two that no rank
    exceeds.
    """

    adapters: list[tuple[Tensor, Sequence[LoraPart]] | None]
    addresses: Tensor
    scales: Tensor
    modules: tuple[slice, ...]
    inputs: int
    max_rank: int
    dtype: torch.dtype

    @classmethod
    def allocate(
        cls,
        slots: int,
        modules: tuple[slice, ...],
        inputs: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> AdapterTable:
        """Return a table of empty slots."""
        addresses = torch.zeros(slots, NUM_ADDRESSES, dtype=torch.int64, device=device)
        scales = torch.zeros(slots, MAX_PARTS, device=device)
        return cls([None] * slots, addresses, scales, modules, inputs, max_rank, dtype)

    def write(self, slot: int, a_RI: Tensor, parts: Sequence[LoraPart]) -> None:
        """Put an adapter into a slot."""
        self.adapters[slot] = a_RI, parts
        addresses, scales = self.describe(slot)
        self.addresses[slot] = torch.tensor(addresses)
        self.scales[slot] = torch.tensor(scales)

    def describe(self, slot: int) -> tuple[list[int], list[float]]:
        """Return a slot's values of `addresses` and `scales`."""
        addresses, scales = [0] * NUM_ADDRESSES, [0.0] * MAX_PARTS
        adapter = self.adapters[slot]
        if adapter is not None:
            a_RI, parts = adapter
            addresses[:2] = a_RI.data_ptr(), len(a_RI)
            for b_OR, scale, columns, ranks in parts:
                i = self.modules.index(columns)
                addresses[2 + 3 * i : 5 + 3 * i] = b_OR.data_ptr(), ranks.start, b_OR.shape[1]
                scales[i] = scale
        return addresses, scales
