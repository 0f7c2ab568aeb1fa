"""Compute the linear layers of a decoder: a matrix plus unmerged LoRA adapters, as PEFT adds them.

A matrix may carry several adapters (`Projection.row_lora`), each for some of the rows: the matrix
is read once for all of them. Steps of a device read them through a table (adapter_slots.py).

On a CPU, large float32 matrices have a second copy in the layout that oneDNN reads fastest. A plain
torch product reads the matrix in its stored layout and reorders it in each step. On a CPU with
AVX-512 (1 thread) that gave 60 to 95 GFLOP/s for 64 rows against 100 to 113 with this layout, and
35 against 80 for 16 rows of a large head. Small matrices fit into the CPU's cache and large models
would need twice the memory: both keep the plain layout.

Shapes: N rows (or prompts) first, I inputs, O outputs, R ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from kernels.adapter_table import AdapterTable
from kernels.lora_ops import add_lora_, add_row_lora_
from rl.sampler.precision import linear_fp32
from rl.sampler.prefix_attention import cap_scores
from rl.sampler.tensor_parallel import (
    TensorParallelGroup,
    gather_columns,
    make_vocab_shard,
    shard_range,
)

# (number of the adapter, indices of its rows in the first dimension; None: all rows), or the tiles
# of a step of the device (`kernels.lora_ops.add_row_lora_`).
RowAdapters = Sequence[tuple[int, Tensor | None]] | Tensor
MIN_ELEMENTS = 1 << 18  # elements of a matrix
MAX_BYTES = 512 << 20  # bytes of all matrices that a decoder may hold twice
_TUNED_ROWS = 64  # row count that the layout is tuned for; it works for any number

# Keyed by matrix, so that decoders that share a matrix share its second layout: (version of the
# matrix, second layout).
_layouts = WeakTensorKeyDictionary()


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Describe a low-rank addition to some outputs of a projection.

    outputs[columns] += scale * low[ranks] B^T, with low = x A^T.
    """

    b_key: str
    scale: float
    columns: slice
    ranks: slice


# The adapters of each (fused) linear layer, by its key.
AdapterSpecs = Mapping[str, Sequence[LoraSpec]]


class LoraWeights(NamedTuple):
    """Hold the adapters of a (fused) linear layer, in their dtype."""

    lora_a: Tensor
    parts: Sequence[tuple[Tensor, float, slice, slice]]

    def add_(self, x: Tensor, y: Tensor, rows: Tensor | None = None) -> None:
        """Add the adapters' output for x [N, .., I] to y [N, .., O], for all rows or the rows with
        these indices.
        """
        add_lora_(y, x, self.lora_a, self.parts, rows)

    def truncate(self, outputs: int) -> LoraWeights:
        """Return these adapters restricted to the first outputs of a layer that is not fused."""
        parts = [
            (b_OR[:outputs], scale, slice(0, outputs), ranks)
            for b_OR, scale, _, ranks in self.parts
        ]
        return LoraWeights(self.lora_a, parts)


class Projection:
    """Map x [..., I] to [..., O], with the buffers of the names "key.weight", "key.bias" and
    "key.lora_a" (the last two only where the model has them).

    `adapter` applies to every row, `row_lora` (by number) to the rows assigned to them. `table`:
    the adapters of rows for steps of a device, if there are any. `may_pack`: whether the matrix may
    be held in a second layout (`get_layout`).
    """

    __slots__ = ("adapter", "bias", "packed_layout", "row_lora", "may_pack", "table", "weight")

    def __init__(self, key: str, buffers: Mapping[str, Tensor], adapters: AdapterSpecs):
        self.weight, self.bias = buffers[f"{key}.weight"], buffers.get(f"{key}.bias")
        parts = [(buffers[a.b_key], a.scale, a.columns, a.ranks) for a in adapters.get(key, ())]
        self.adapter = LoraWeights(buffers[f"{key}.lora_a"], parts) if parts else None
        self.row_lora: dict[int, LoraWeights] = {}
        self.table: AdapterTable | None = None
        self.may_pack = False
        self.packed_layout: tuple[int, Tensor] | None = None

    def __call__(self, x: Tensor, row_adapters: RowAdapters | None = None) -> Tensor:
        y = self._product(x)
        if self.adapter is not None:
            self.adapter.add_(x, y)
        if isinstance(row_adapters, Tensor):
            if self.table is not None:
                add_row_lora_(y, x, self.table, row_adapters)
        elif row_adapters is not None and self.row_lora:
            for number, rows in row_adapters:
                if number in self.row_lora:
                    self.row_lora[number].add_(x, y, rows)
        return y

    @property
    def num_inputs(self) -> int:
        """Return I."""
        return self.weight.shape[1]

    def _product(self, x: Tensor) -> Tensor:
        if self.may_pack and (
            self.packed_layout is None or self.packed_layout[0] != self.weight._version
        ):
            self.packed_layout = get_layout(self.weight)
            self.may_pack = self.packed_layout is not None
        return (
            self._plain(x)
            if self.packed_layout is None
            else packed_linear(x, self.packed_layout[1], self.bias)
        )

    def _plain(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class HeadProjection(Projection):
    """Compute float32 logits even if weights and hidden states are half precision, as a learner
    does. `softcap`: logits x become softcap * tanh(x / softcap) (0: they stay).

    `tp_group`: each of its ranks holds some rows of the vocabulary, and all ranks get all logits.
    """

    __slots__ = ("shard", "softcap", "tp_group", "vocab_size")

    def __init__(
        self,
        key: str,
        buffers: Mapping[str, Tensor],
        adapters: AdapterSpecs,
        vocab_size: int,
        tp_group: TensorParallelGroup | None,
        softcap: float,
    ):
        """Build the head; `vocab_size` is the size of the vocabulary if the tensor-parallel group
        shards it.
        """
        super().__init__(key, buffers, adapters)
        self.softcap = softcap
        self.tp_group, self.vocab_size = tp_group, vocab_size
        self.shard = make_vocab_shard(tp_group, vocab_size)

    def __call__(self, x: Tensor, row_adapters: RowAdapters | None = None) -> Tensor:
        y = cap_scores(super().__call__(x, row_adapters), self.softcap)
        return y if self.tp_group is None else gather_columns(self.tp_group, y, self.vocab_size)

    def _plain(self, x: Tensor) -> Tensor:
        return linear_fp32(x, self.weight, self.bias)

    def truncate(self, outputs: int) -> HeadProjection:
        """Return a head of `outputs` outputs, with the same weights: the first, of each rank."""
        other = copy.copy(self)
        other.vocab_size, other.packed_layout = outputs, None
        if self.tp_group is not None:
            first, last = shard_range(outputs, self.tp_group)
            other.shard, outputs = make_vocab_shard(self.tp_group, outputs), last - first
        other.weight = self.weight[:outputs]
        other.bias = None if self.bias is None else self.bias[:outputs]
        other.adapter = None if self.adapter is None else self.adapter.truncate(outputs)
        return other


class TokenEmbedding:
    """Map tokens [N, ..] to vectors [N, .., E]; adapters (A [R, V], B [E, R], scale) as in
    `Projection`.

    `tp_group`: each of its ranks holds the vectors of some of the `vocab_size`, and all ranks get
    all vectors.
    """

    __slots__ = ("adapter", "row_lora", "table", "tp_group", "weight_VE", "vocab_size")

    def __init__(
        self,
        weight_VE: Tensor,
        adapter: tuple[Tensor, Tensor, float] | None,
        vocab_size: int,
        tp_group: TensorParallelGroup | None,
    ):
        self.weight_VE, self.adapter = weight_VE, adapter
        self.vocab_size, self.tp_group = vocab_size, tp_group
        self.row_lora: dict[int, tuple[Tensor, Tensor, float]] = {}
        self.table: AdapterTable | None = None

    @property
    def num_inputs(self) -> int:
        """Return the number of local vectors."""
        return self.weight_VE.shape[0]

    def __call__(self, ids: Tensor, row_adapters: RowAdapters | None = None) -> Tensor:
        if self.tp_group is None:
            return self._vectors(ids, row_adapters)
        first, last = shard_range(self.vocab_size, self.tp_group)
        elsewhere = (ids < first) | (ids >= last)
        vectors = self._vectors((ids - first).masked_fill(elsewhere, 0), row_adapters)
        return self.tp_group.all_reduce_(vectors.masked_fill(elsewhere.unsqueeze(-1), 0))

    def _vectors(self, ids: Tensor, row_adapters: RowAdapters | None) -> Tensor:
        """Return the vectors of `ids` from the local rows, with the adapters' output."""
        x = F.embedding(ids, self.weight_VE)
        if self.adapter is not None:
            x = x + _lora_vectors(ids, self.adapter).to(x.dtype)
        if isinstance(row_adapters, Tensor):
            if self.table is not None:
                add_row_lora_(x, ids, self.table, row_adapters)
            return x
        for number, rows in (row_adapters or ()) if self.row_lora else ():
            if number in self.row_lora:
                selected = ids if rows is None else ids.index_select(0, rows)
                delta = _lora_vectors(selected, self.row_lora[number]).to(x.dtype)
                x = x + delta if rows is None else x.index_add(0, rows, delta)
        return x


def _lora_vectors(ids: Tensor, adapter: tuple[Tensor, Tensor, float]) -> Tensor:
    """Return the adapter's output [N, .., E] for `ids`."""
    a_RV, b_ER, scale = adapter
    return F.linear(F.embedding(ids, a_RV.T), b_ER) * scale


def group_rows_by_adapter(
    adapters: Sequence[int], device: torch.device
) -> list[tuple[int, Tensor | None]]:
    """Group rows by adapter. `adapters`: the number of each row's."""
    rows_of: dict[int, list[int]] = {}
    for row, adapter in enumerate(adapters):
        rows_of.setdefault(adapter, []).append(row)
    if len(rows_of) == 1:
        return [(adapters[0], None)]
    return [(number, torch.tensor(rows, device=device)) for number, rows in rows_of.items()]


def fits_budget(matrices: Iterable[Tensor]) -> bool:
    """Return whether a decoder of these matrices may hold them in a second layout."""
    matching = [w for w in matrices if _is_supported(w)]
    return 0 < sum(w.nbytes for w in matching) <= MAX_BYTES


def _is_supported(weight: Tensor) -> bool:
    """Return whether this matrix is supported: a large, contiguous float32 CPU tensor."""
    plain = (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and type(weight) is Tensor
    )
    # An inference tensor has no version counter, so an outdated layout would not be noticed.
    return (
        plain
        and weight.numel() >= MIN_ELEMENTS
        and not weight.is_inference()
        and torch.backends.mkldnn.is_available()
    )


def get_layout(weight: Tensor) -> tuple[int, Tensor] | None:
    """Return (version of the matrix, its second layout); None if the matrix keeps the plain layout.

    Call it again after the matrix has changed.
    """
    if not _is_supported(weight):
        return None
    made = _layouts.get(weight)
    if made is None or made[0] != weight._version:
        made = _layouts[weight] = (
            weight._version,
            torch.ops.mkldnn._reorder_linear_weight(weight, _TUNED_ROWS),
        )
    return made


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [.., I] times the matrix [O, I] in its second layout, plus `bias`: [.., O]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
