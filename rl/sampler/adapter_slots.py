"""Assign the adapters of a `MultiAdapterDecoder` to slots, for steps that run without the
host.

A step reads the slot of each row, and the addresses of the matrices of each slot
(kernels.lora_ops). Nothing is copied. Another adapter in a slot changes only these numbers, so
that CUDA graphs stay valid. Slot 0 has no adapter. Shapes: N rows, X slots, T tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.adapter_table import (
    MAX_PARTS,
    NUM_ADDRESSES,
    TILE_ROWS,
    AdapterTable,
    LoraPart,
)
from kernels.lora_ops import MAX_RANK
from rl.sampler.decode_state import send_to_device
from rl.sampler.decoder_weights import DecoderWeights
from rl.sampler.linear_layers import LoraWeights, Projection, TokenEmbedding

_MIN_SLOTS, _MIN_RANK = 8, 32  # initial room, so that few adapters more need no new tables

Adapter = tuple[Tensor, Sequence[LoraPart]]


class AdapterSlots:
    """Hold the tables of `modules` (`Projection.table`) and `tiles`, which name the rows of each
    slot.

    `layout` counts the rebuilds of tables and tiles: graphs that were captured before the last one
    are invalid. Tables are rebuilt, larger, if there are more adapters than slots, if an adapter
    has a larger rank, or if it is on a matrix that no adapter was on.
    """

    def __init__(self, modules: Sequence[Projection | TokenEmbedding], weights: DecoderWeights):
        self._modules = list(modules)
        self._columns = _find_columns(self._modules, weights)
        self._device = weights.buffers["embed"].device
        self._names: dict[int, str] = {}  # names of the adapters in the slots, by number
        self._slots: dict[int, int] = {}  # by number; the base without an adapter has slot 0
        self._host_adapters: set[int] = set()  # numbers of adapters that no slot can hold
        self._tables: dict[int, AdapterTable] = {}  # by index of the module
        self._addresses = self._scales = torch.zeros(0)  # [adapted modules, X, ..]
        self._num_slots, self._max_rank = _MIN_SLOTS, _MIN_RANK
        self._dtype: torch.dtype | None = None
        self.tiles = torch.zeros(0)
        self._max_rows = self.layout = 0

    def update(self, names: Mapping[int, str], max_rows: int) -> None:
        """Assign slots to the adapters that rows use now, if they have changed. `names`: of the
        weights, by number (`Decoder.weights_name`). `max_rows`: the most rows of a step.
        """
        if names == self._names and max_rows <= self._max_rows:
            return
        for number in [n for n, name in self._names.items() if names.get(n) != name]:
            self.remove(number)
        adapters = {n: self._read_adapters(n) for n in names.keys() - self._names.keys()}
        # with no adapter in a slot, the next one may have another dtype
        dtype = self._dtype if any(self._slots.values()) else None
        fits = True
        for number, of_modules in adapters.items():
            matrices = [m for a, parts in of_modules.values() for m in (a, *(p[0] for p in parts))]
            ranks = [p[0].shape[1] for _, parts in of_modules.values() for p in parts]
            dtypes = {m.dtype for m in matrices} | ({dtype} - {None})
            if len(dtypes) > 1 or max(ranks, default=0) > MAX_RANK:
                self._host_adapters.add(number)
                continue
            dtype = next(iter(dtypes), None)
            self._slots[number] = self._take_slot() if of_modules else 0
            self._max_rank = max(self._max_rank, *(1 << (r - 1).bit_length() for r in ranks), 1)
            fits &= of_modules.keys() <= self._tables.keys()
        self._names, self._dtype = dict(names), dtype or self._dtype
        room = max(self._slots.values(), default=0)
        tables = [*self._tables.values()]
        fits &= all((t.max_rank, t.dtype) == (self._max_rank, self._dtype) for t in tables)
        if not fits or room >= self._num_slots or max_rows > self._max_rows:
            while room >= self._num_slots:
                self._num_slots *= 2
            self._max_rows = max(max_rows, self._max_rows)
            self._build_tables()
        else:
            self._write({self._slots[n]: of for n, of in adapters.items() if n in self._slots})

    def remove(self, number: int) -> None:
        """Remove the adapter of this number; no row may use it any more."""
        self._names.pop(number, None)
        self._host_adapters.discard(number)
        slot = self._slots.pop(number, 0)
        for table in self._tables.values():
            table.adapters[slot] = None

    def holds(self, numbers: np.ndarray) -> bool:
        """Return whether all these adapters have a slot."""
        return not self._host_adapters.intersection(numbers.tolist())

    def find_slots(self, numbers: np.ndarray) -> np.ndarray:
        """Return the slots of adapters, [N]."""
        return np.array([self._slots[number] for number in numbers.tolist()], np.int64)

    def select_tiles(self, rows: int) -> Tensor:
        """Return the tiles of the first `rows` rows, at the same address every time."""
        return self.tiles.narrow(0, 0, self._count_tiles(rows))

    def make_tiles(self, slots: np.ndarray, rows: int) -> np.ndarray:
        """Return the tiles of a batch of up to `rows` rows with these slots [N], int32 [T, 1 +
        TILE_ROWS] (`kernels.lora_ops.add_row_lora_`).
        """
        tiles = np.full((self._count_tiles(rows), 1 + TILE_ROWS), -1, np.int32)
        tiles[:, 0] = 0
        order = np.argsort(slots, kind="stable")
        order = order[slots[order] > 0]
        _, starts, counts = np.unique(slots[order], return_index=True, return_counts=True)
        tile_counts = -(-counts // TILE_ROWS)
        place = np.arange(len(order)) - np.repeat(starts, counts)  # among the rows of its slot
        tile = np.repeat(tile_counts.cumsum() - tile_counts, counts) + place // TILE_ROWS
        tiles[tile, 1 + place % TILE_ROWS], tiles[tile, 0] = order, slots[order]
        return tiles

    def _count_tiles(self, rows: int) -> int:
        """Return the most tiles of a batch of up to `rows` rows: one of each slot may be partly
        filled.
        """
        return rows // TILE_ROWS + min(rows, self._num_slots - 1)

    def _take_slot(self) -> int:
        """Return the lowest free slot."""
        return min({*range(1, len(self._slots) + 2)} - {*self._slots.values()})

    def _read_adapters(self, number: int) -> dict[int, Adapter]:
        """Return an adapter's matrices by the index of their module."""
        result: dict[int, Adapter] = {}
        for i, module in enumerate(self._modules):
            adapter: Any = module.row_lora.get(number)
            if isinstance(adapter, LoraWeights):
                result[i] = adapter.lora_a, adapter.parts
            elif adapter is not None:  # of an embedding
                a_RV, b_ER, scale = adapter
                result[i] = a_RV, [(b_ER, scale, self._columns[i][0], slice(0, len(a_RV)))]
        return result

    def _build_tables(self) -> None:
        """Make tables and tiles of the present sizes, and fill the tables."""
        adapters = {self._slots[n]: self._read_adapters(n) for n in self._slots}
        adapted = sorted({*self._tables}.union(*(of.keys() for of in adapters.values())))
        device = self._device
        size = len(adapted), self._num_slots
        self._addresses = torch.zeros(*size, NUM_ADDRESSES, dtype=torch.int64, device=device)
        self._scales = torch.zeros(*size, MAX_PARTS, device=device)
        self.tiles = torch.zeros(
            self._count_tiles(self._max_rows), 1 + TILE_ROWS, dtype=torch.int32, device=device
        )
        self.layout += 1
        tables = zip(adapted, self._addresses.unbind(), self._scales.unbind(), strict=True)
        for i, addresses, scales in tables:
            assert self._dtype is not None
            self._modules[i].table = self._tables[i] = AdapterTable(
                [None] * self._num_slots, addresses, scales, self._columns[i],
                self._modules[i].num_inputs, self._max_rank, self._dtype,
            )  # fmt: skip
        self._write(adapters)

    def _write(self, adapters: Mapping[int, Mapping[int, Adapter]]) -> None:
        """Write the adapters of these slots to the tables, without waiting for the device."""
        for slot, of_modules in adapters.items():
            if slot == 0:
                continue
            addresses, scales = [], list[list[float]]()
            for i, table in sorted(self._tables.items()):
                table.adapters[slot] = of_modules.get(i)
                row, of_row = table.describe(slot)
                addresses.append(row)
                scales.append(of_row)
            device = self._addresses.device
            self._addresses[:, slot] = send_to_device(torch.tensor(addresses), device)
            self._scales[:, slot] = send_to_device(torch.tensor(scales), device)


def _find_columns(
    modules: Sequence[Projection | TokenEmbedding], weights: DecoderWeights
) -> list[tuple[slice, ...]]:
    """Return the columns of the output of each module that an adapter may have: those of each
    parameter of a fused matrix.
    """
    pieces: dict[int, set[tuple[int, int]]] = {}
    for piece in weights.slices.values():
        ends = piece.start, piece.start + piece.length
        pieces.setdefault(id(weights.buffers[piece.buffer]), set()).add(ends)
    return [
        (slice(0, module.weight_VE.shape[1]),)
        if isinstance(module, TokenEmbedding)
        else tuple(slice(*ends) for ends in sorted(pieces[id(module.weight)]))
        for module in modules
    ]
