"""Linear layers as a decoder computes them: a matrix, and adapters beside it that are added
unmerged, as PEFT adds them.

One matrix may carry the adapters of several (`Projection.others`), each for rows of its own: the
matrix is read once for all of them. Shapes: N rows (or prompts) first, I inputs, O outputs, R
ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rl.sampler import packed
from rl.sampler.precision import linear_fp32
from rl.sampler.split import Team, joined, span

# Which rows (the first dimension) are of which adapter, each by its number; None in the place of
# rows: all of them.
Whose = Sequence[tuple[int, Tensor | None]]


@dataclass(frozen=True, slots=True)
class Adapter:
    """Low-rank addition to some outputs of a projection: outputs[columns] += scale * low[ranks]
    B^T, low = x A^T.
    """

    b_key: str
    scale: float
    columns: slice
    ranks: slice


@dataclass(frozen=True, slots=True)
class ProjectionSpec:
    """Which buffers a (fused) linear layer reads."""

    weight: str
    bias: str | None = None
    lora_a: str | None = None
    adapters: tuple[Adapter, ...] = ()


def _cut(tensor: Tensor, columns: slice) -> Tensor:
    # indexing asks a device even of fake tensors
    return tensor.narrow(-1, columns.start, columns.stop - columns.start)


class LowRank:
    """The adapters of one (fused) linear layer, in their own dtype."""

    __slots__ = ("lora_a", "parts")

    def __init__(self, lora_a: Tensor, parts: Sequence[tuple[Tensor, float, slice, slice]]):
        self.lora_a, self.parts = lora_a, parts

    def add_(self, x: Tensor, y: Tensor, rows: Tensor | None = None) -> None:
        """Adds to outputs y [N, .., O] what these make of x [N, .., I]: of all rows, or of some, by
        number.
        """
        own = x if rows is None else x.index_select(0, rows)
        low = F.linear(own.to(self.lora_a.dtype), self.lora_a)
        for b_OR, scale, columns, ranks in self.parts:
            more = (F.linear(_cut(low, ranks), b_OR) * scale).to(y.dtype)
            if rows is None:
                _cut(y, columns).add_(more)
            else:
                _cut(y, columns).index_add_(0, rows, more)

    def first(self, outputs: int) -> LowRank:
        """To the first outputs alone, of one layer by itself."""
        parts = [
            (b_OR[:outputs], scale, slice(0, outputs), ranks)
            for b_OR, scale, _, ranks in self.parts
        ]
        return LowRank(self.lora_a, parts)


class Projection:
    """x [..., I] to [..., O]. `adapter` is for every row, `others` by number for those rows that
    are said to be theirs.

    `packs`: whether the matrix may be held in a second layout (`rl.sampler.packed`).
    """

    __slots__ = ("adapter", "bias", "layout", "others", "packs", "weight")

    def __init__(self, spec: ProjectionSpec, buffers: dict[str, Tensor]):
        self.weight = buffers[spec.weight]
        self.bias = buffers[spec.bias] if spec.bias else None
        parts = [(buffers[a.b_key], a.scale, a.columns, a.ranks) for a in spec.adapters]
        self.adapter = LowRank(buffers[spec.lora_a], parts) if spec.lora_a else None
        self.others: dict[int, LowRank] = {}
        self.packs = False
        self.layout: tuple[int, Tensor] | None = None

    def __call__(self, x: Tensor, whose: Whose | None = None) -> Tensor:
        y = self._product(x)
        if self.adapter is not None:
            self.adapter.add_(x, y)
        if whose is not None and self.others:
            for number, rows in whose:
                if number in self.others:
                    self.others[number].add_(x, y, rows)
        return y

    def _product(self, x: Tensor) -> Tensor:
        if self.packs and (self.layout is None or self.layout[0] != self.weight._version):
            self.layout = packed.layout(self.weight)
            self.packs = self.layout is not None
        return (
            self._plain(x) if self.layout is None else packed.product(x, self.layout[1], self.bias)
        )

    def _plain(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class HeadProjection(Projection):
    """The output head: logits in float32 also where weights and hidden states are half precision,
    as a learner's are.

    `team`: whose ranks each have some rows of the vocabulary, and all get the logits of all.
    """

    __slots__ = ("outputs", "team", "words")

    def __init__(
        self,
        spec: ProjectionSpec,
        buffers: dict[str, Tensor],
        words: int = 0,
        team: Team | None = None,
    ):
        """`words`: of the vocabulary, where a team holds it."""
        super().__init__(spec, buffers)
        self.team, self.words, self.outputs = team, words, words

    def __call__(self, x: Tensor, whose: Whose | None = None) -> Tensor:
        y = super().__call__(x, whose)
        return y if self.team is None else joined(self.team, y, self.words)[..., : self.outputs]

    def _plain(self, x: Tensor) -> Tensor:
        return linear_fp32(x, self.weight, self.bias)

    def first(self, outputs: int) -> HeadProjection:
        """The first outputs alone, of the same weights."""
        other = copy.copy(self)
        if self.team is not None:
            other.outputs = outputs
            return other
        other.layout = None
        other.weight, other.bias = (
            self.weight[:outputs],
            None if self.bias is None else self.bias[:outputs],
        )
        other.adapter = None if self.adapter is None else self.adapter.first(outputs)
        return other


class Embedding:
    """Tokens [N, ..] to vectors [N, .., E]; adapters (A [R, V], B [E, R], scale) as `Projection`
    has them.

    `team`: whose ranks each have the vectors of some of the `words`, and all get those that are
    asked for.
    """

    __slots__ = ("adapter", "others", "team", "weight_VE", "words")

    def __init__(
        self,
        weight_VE: Tensor,
        adapter: tuple[Tensor, Tensor, float] | None,
        words: int = 0,
        team: Team | None = None,
    ):
        self.weight_VE, self.adapter, self.words, self.team = weight_VE, adapter, words, team
        self.others: dict[int, tuple[Tensor, Tensor, float]] = {}

    def __call__(self, ids: Tensor, whose: Whose | None = None) -> Tensor:
        if self.team is None:
            return self._vectors(ids, whose)
        first, last = span(self.words, self.team)
        elsewhere = (ids < first) | (ids >= last)
        own = self._vectors((ids - first).masked_fill(elsewhere, 0), whose)
        return self.team.sum_(own.masked_fill(elsewhere.unsqueeze(-1), 0))

    def _vectors(self, ids: Tensor, whose: Whose | None) -> Tensor:
        x = F.embedding(ids, self.weight_VE)
        if self.adapter is not None:
            x = x + _low_vectors(ids, self.adapter).to(x.dtype)
        for number, rows in (whose or ()) if self.others else ():
            if number in self.others:
                own = ids if rows is None else ids.index_select(0, rows)
                more = _low_vectors(own, self.others[number]).to(x.dtype)
                x = x + more if rows is None else x.index_add(0, rows, more)
        return x


def _low_vectors(ids: Tensor, adapter: tuple[Tensor, Tensor, float]) -> Tensor:
    a_RV, b_ER, scale = adapter
    return F.linear(F.embedding(ids, a_RV.T), b_ER) * scale


def groups(numbers: Sequence[int], device: torch.device) -> Whose:
    """`Whose` of rows that are each of the adapter of that number."""
    where: dict[int, list[int]] = {}
    for row, number in enumerate(numbers):
        where.setdefault(int(number), []).append(row)
    if len(where) == 1:
        return [(next(iter(where)), None)]
    return [(number, torch.tensor(rows, device=device)) for number, rows in where.items()]
