"""Add the low-rank products of the adapters of a (fused) linear layer to its output.

On CUDA a decode batch takes two kernels, whatever the number of adapters
(kernels/lora_ops_triton.py); other devices, larger batches and ranks above 256 take plain torch,
which is the reference. No gradients. Shapes: N rows, I inputs, O outputs, R ranks of all adapters,
T tiles, X slots.

`add_lora_` adds the same adapters to all rows; `add_row_lora_` adds to each row those of its slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.adapter_table import TILE_ROWS, AdapterTable, LoraPart
from kernels.common import can_run_triton, device_context

MAX_ROWS = 1024  # rows of a decode batch; prompts have more, for which cuBLAS is faster
MAX_RANK = 256  # a program holds all ranks of an adapter in shared memory (64 KiB in float32)


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
    if not can_run_triton(y):
        return _add_row_lora_with_torch_(y, x, table, tiles)
    from kernels.lora_ops_triton import add_row_lora_ as fused

    with device_context(y):
        return fused(y, x, table, tiles)


def _add_row_lora_with_torch_(y: Tensor, x: Tensor, table: AdapterTable, tiles: Tensor) -> None:
    """Implement `add_row_lora_` with torch's operations; the device waits for the host."""
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


def run_row_lora_trial(newer: bool, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return y of small cases of `add_row_lora_`, by the kernels (`newer`) or by torch, for
    `check_kernels_agree`. `dtype`: of the weights; adapters are float32 or have it too, and the
    cases of the latter are the last output, which may differ by rounding.
    """
    if newer:
        from kernels.lora_ops_triton import add_row_lora_ as add_
    else:
        add_ = _add_row_lora_with_torch_
    g, outputs = torch.Generator().manual_seed(0), list[Tensor]()
    modules = (slice(0, 64), slice(64, 112), slice(112, 128))
    tiles = torch.full((5, 1 + TILE_ROWS), -1, dtype=torch.int32)
    tiles[:, 0] = torch.tensor([2, 1, 1, 0, 2])
    tiles[0, 1:], tiles[1, 1:] = torch.arange(0, 32, 2), torch.arange(1, 33, 2)
    tiles[2, 1:3], tiles[4, 1:4] = torch.tensor([40, 33]), torch.tensor([36, 35, 34])

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=g)

    for adapter in (torch.float32, dtype):
        table = AdapterTable.allocate(3, modules, 1100, 32, adapter, device)
        for slot, ranks in ((1, (32, 5)), (2, (3, 32, 16))):
            starts = [sum(ranks[:i]) for i in range(len(ranks))]
            parts = [
                (draw(module.stop - module.start, rank).to(device, adapter), 0.5 + slot, module,
                 slice(start, start + rank))
                for module, rank, start in zip(modules, ranks, starts, strict=False)
            ]  # fmt: skip
            table.write(slot, draw(sum(ranks), 1100).to(device, adapter), parts)
        ids = torch.arange(0, 1066, 26, device=device)
        for x in ((0.03 * draw(41, 1100)).to(device, adapter), ids):
            y = draw(41, 128).to(device, adapter)
            add_(y, x, table, tiles.to(device))
            outputs.append(y)
    return *outputs[:2], torch.stack(outputs[2:])


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
