"""Add the low-rank products of the adapters of a (fused) linear layer to its output.

On CUDA a decode batch takes two kernels, whatever the number of adapters
(kernels/lora_ops_triton.py); other devices, larger batches and ranks above 256 take plain torch,
which is the reference. No gradients. Shapes: N rows, I inputs, O outputs, R ranks of all adapters,
T tiles, X slots.

`add_lora_` adds the same adapters to all rows; `add_row_lora_` adds to each row those of its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.common import can_run_triton, device_context

MAX_ROWS = 1024  # rows of a decode batch; prompts have more, for which cuBLAS is faster
MAX_RANK = 256  # a program holds all ranks of an adapter in shared memory (64 KiB in float32)

# An adapter: B [outputs, ranks], its scale, its columns of the output, its rows of A.
LoraPart = tuple[Tensor, float, slice, slice]
MAX_PARTS = 3  # adapters of a fused layer: q, k and v
TILE_ROWS = 16  # rows of a tile, the fewest of a product on tensor cores


@dataclass(frozen=True, slots=True)
class AdapterTable:
    """Hold the adapters of a layer by slot. Kernels read them through their addresses, so that a
    CUDA graph keeps working when a slot gets another adapter.

    `adapters` [X]: A [R, I] and the parts of each slot (None: the slot has no adapter on the
    layer); these tensors are contiguous and of the same dtype `dtype`. `addresses` int64 [X, 2 + 3
    MAX_PARTS]: address and rows of A (0: none), then for each of `modules` the address of B (0:
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

    def describe(self, slot: int) -> tuple[list[int], list[float]]:
        """Return a slot's values of `addresses` and `scales`."""
        addresses, scales = [0] * (2 + 3 * MAX_PARTS), [0.0] * MAX_PARTS
        adapter = self.adapters[slot]
        if adapter is not None:
            a_RI, parts = adapter
            addresses[:2] = a_RI.data_ptr(), len(a_RI)
            for b_OR, scale, columns, ranks in parts:
                i = self.modules.index(columns)
                addresses[2 + 3 * i : 5 + 3 * i] = b_OR.data_ptr(), ranks.start, b_OR.shape[1]
                scales[i] = scale
        return addresses, scales


def add_lora_(
    y: Tensor, x: Tensor, a_RI: Tensor, parts: Sequence[LoraPart], rows: Tensor | None = None
) -> None:
    """Add scale (x A^T)[ranks] B^T to the columns of y [.., O] for each of `parts`; x is [.., I].
    `rows`: only for these indices of the first dimension (None: all).

    The products are computed in the dtype of A and B, and rounded to y's before they are added.
    """
    count = y.numel() // y.shape[-1]
    rank = max(b_OR.shape[1] for b_OR, *_ in parts)
    is_batch = rows is None and y.dim() == 2 and 0 < count <= MAX_ROWS
    if can_run_triton(y) and is_batch and rank <= MAX_RANK:
        from kernels.lora_ops_triton import add_lora_ as fused

        with device_context(y):
            fused(y, x, a_RI, parts)
        return
    low = F.linear((x if rows is None else x.index_select(0, rows)).to(a_RI.dtype), a_RI)
    _add_parts_(y, low, parts, rows)


def add_row_lora_(y: Tensor, x: Tensor, table: AdapterTable, tiles: Tensor) -> None:
    """Add to each row of y [N, O] the products of `add_lora_` with the adapters of its slot. x:
    [N, I], or token ids [N] that select columns of A.

    `tiles` int32 [T, 1 + TILE_ROWS]: the slot of a tile (0: the tile is empty), and its rows of y
    (-1: none). Rows in no tile stay as they are. On CUDA these are two kernels, whatever the number
    of slots, and nothing waits for the host.
    """
    if can_run_triton(y):
        from kernels.lora_ops_triton import add_row_lora_ as fused

        with device_context(y):
            fused(y, x, table, tiles)
        return
    slot_T, row_TM = tiles[:, 0], tiles[:, 1:]
    for slot in sorted({*slot_T.tolist()} - {0}):
        adapter, rows = table.adapters[slot], row_TM[slot_T == slot]
        if adapter is not None:
            (a_RI, parts), rows = adapter, rows[rows >= 0].long()
            chosen = x.index_select(0, rows)
            is_embedding = x.dim() == 1
            low = (
                F.embedding(chosen, a_RI.T)
                if is_embedding
                else F.linear(chosen.to(a_RI.dtype), a_RI)
            )
            _add_parts_(y, low, parts, rows)


def _add_parts_(y: Tensor, low: Tensor, parts: Sequence[LoraPart], rows: Tensor | None) -> None:
    """Add the products of x A^T (`low`) and the B of each part to its columns of y, or to these
    `rows` of it.
    """
    for b_OR, scale, columns, ranks in parts:
        delta = (F.linear(_narrow(low, ranks), b_OR) * scale).to(y.dtype)
        if rows is None:
            _narrow(y, columns).add_(delta)
        else:
            _narrow(y, columns).index_add_(0, rows, delta)


def _narrow(tensor: Tensor, columns: slice) -> Tensor:
    """Return the given columns of a tensor [.., columns], as a view."""
    # indexing queries the device even of fake tensors
    return tensor.narrow(-1, columns.start, columns.stop - columns.start)
