"""Datums dealt out over the ranks and cut into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl.learner.packing import PackedBatch, block_cost, blocks, choose_layout, collate, plan
from rl.ranks import distributed
from rl.types import Datum

Chunk = tuple[str, list[list[int]]]  # the layout of a micro-batch, and its units


@dataclass(frozen=True)
class Dealing:
    """How: `budget` positions in a micro-batch, the layout asked for and those that are exact, the
    model's width.

    `switch`: where its rotary frequencies change with a row's length; `sees`: whether it reads
    images.
    """

    budget: int
    layout: str
    layouts: frozenset[str]
    hidden: int
    switch: Any = None
    sees: bool = False

    def rounds(
        self, datums: Sequence[Datum], group: int, drawn_at: Sequence[float]
    ) -> list[list[Chunk]]:
        """Micro-batches longest first, in rounds of one for each rank; the last round of a kind may
        have too few.

        `group` consecutive datums belong together and are never torn apart. A micro-batch has one
        temperature.
        """
        world = distributed.world()
        # Dealt out apart, texts first: every rank runs as many with images as the others (ranks
        # that share a vision tower's weights have to enter it together), and as many without; as
        # many of two forwards, and as many of one.
        dealt: dict[tuple[bool, bool], list[Chunk]] = {
            (sees, two): [] for sees in (False, True) for two in (False, True)
        }
        # Datums with and without a field (soft targets, say), of two temperatures, or of other
        # rotary frequencies share no micro-batch.
        kinds: dict[tuple, list[int]] = {}
        for i in range(len(datums)):
            own = datums[i - i % group : i - i % group + group]
            fields = ((name, data.array.shape[1:]) for name, data in own[0].loss_fn_inputs.items())
            told = all(datum.experts is not None for datum in own)
            sees = self.sees and any(datum.model_input.placed() for datum in own)
            kinds.setdefault(
                (drawn_at[i - i % group], self._row_kind(own), told, sees, *fields), []
            ).append(i)
        for kind, members in kinds.items():
            sees, two_forwards = kind[3], kind[1] is None
            same = [datums[i] for i in members]
            layout = "padded" if sees or two_forwards else self._layout(same)
            together = blocks(same, layout, self.budget, group)
            costs = [block_cost(same, block, layout) for block in together]
            share = self.budget
            if world > 1:  # enough micro-batches to go round
                share = max(1, min(self.budget, -(-sum(costs) // world)))
            for chunk in plan(costs, share, layout):
                dealt[sees, two_forwards].append(
                    (layout, [[members[i] for i in unit] for j in chunk for unit in together[j]])
                )
        return [
            chunks[i : i + world] for chunks in dealt.values() for i in range(0, len(chunks), world)
        ]

    def _row_kind(self, together: Sequence[Datum]) -> bool | None:
        """Return whether these rows lie beyond the switch of rotary frequencies; None where some
        do, so that they need two forwards.
        """
        if self.switch is None:
            return False
        kinds = {self.switch.is_beyond(datum.model_input.length) for datum in together}
        return None if len(kinds) > 1 else next(iter(kinds))

    def _layout(self, datums: Sequence[Datum]) -> str:
        if self.layout != "auto":
            return self.layout
        if "packed" in self.layouts:
            return "packed"  # flash attention: sequences end to end, told apart by their positions
        if "shared" not in self.layouts:
            return "padded"
        return choose_layout(datums, self.budget, self.hidden)


def batches(
    datums: Sequence[Datum],
    rounds: Sequence[Sequence[Chunk]],
    group: int,
    drawn_at: Sequence[float],
    device: torch.device,
    switch: Any = None,
) -> list[PackedBatch]:
    """This rank's of each round; where there is none for it, one of the same kind that counts for
    nothing.

    `switch`: where rotary frequencies change with a row's length; a batch with rows of both kinds
    is split into its `sides`.
    """
    rank, found = distributed.rank(), []
    for dealt_out in rounds:
        if rank < len(dealt_out):
            layout, mine = dealt_out[rank]
            found.append(collate(datums, mine, layout, device))
        else:
            first = dealt_out[0][1][0][0] // group * group
            found.append(
                collate(datums, [[i] for i in range(first, first + group)], "padded", device)
            )
            found[-1].scale = 0.0
        found[-1].temperature = drawn_at[found[-1].datum_index[0]]
        if switch is not None:
            _split(found[-1], datums, switch, device)
    return found


def _split(batch: PackedBatch, datums: Sequence[Datum], switch: Any, device: torch.device) -> None:
    """Give the batch its `sides`, if it has rows of both kinds of rotary frequencies: a forward of
    each kind.

    Such a batch replays no router: what was recorded of it is left out.
    """
    sides = [
        [i for i in batch.datum_index if switch.is_beyond(datums[i].model_input.length) == beyond]
        for beyond in (False, True)
    ]
    if not all(sides):
        return
    batch.experts = None
    batch.sides = [collate(datums, [[i] for i in side], "padded", device) for side in sides]
    begins: dict[int, int] = {}
    at = 0
    for i in (i for side in sides for i in side):
        begins[i], at = at, at + datums[i].model_input.length
    order = [
        np.arange(begins[i], begins[i] + datums[i].model_input.length) for i in batch.datum_index
    ]
    batch.side_order = torch.from_numpy(np.concatenate(order)).to(device)


def in_order(parts: Sequence[tuple[Tensor | None, ...]], order: Tensor | None) -> tuple[Any, ...]:
    """Return what was computed of each of a batch's sides (tuples of [T, ...], or None) as one, in
    the order of the batch's tokens.
    """
    if order is None:
        return parts[0]
    return tuple(
        None if column[0] is None else torch.cat([*column])[order]
        for column in zip(*parts, strict=True)
    )  # type: ignore[list-item]


def summed_terms(
    terms: Sequence[tuple[Any, Mapping[str, Tensor]]],
) -> tuple[Any, dict[str, Tensor]]:
    """Return the sum of (value, metric sums)."""
    metrics: dict[str, Tensor] = {}
    for _, sums in terms:
        metrics |= {
            name: metrics[name] + value if name in metrics else value
            for name, value in sums.items()
        }
    return sum(value for value, _ in terms), metrics


def collect(
    outputs: dict[int, dict[str, np.ndarray]], batch: PackedBatch, found: Mapping[str, Tensor]
) -> None:
    """Cuts what was found at each token into datums."""
    bounds = batch.cu_seqlens.tolist()
    arrays = {name: tensor.detach().float().cpu().numpy() for name, tensor in found.items()}
    for i, start, end in zip(batch.datum_index, bounds[:-1], bounds[1:], strict=True):
        outputs[i] = {name: array[start:end] for name, array in arrays.items()}
