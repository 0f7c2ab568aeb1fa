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
    """How: `budget` positions in a micro-batch, the layout asked for and those that are exact, the model's width.

    `switch`: where its rotary frequencies change with a row's length; `sees`: whether it reads images.
    """

    budget: int
    layout: str
    layouts: frozenset[str]
    hidden: int
    switch: Any = None
    sees: bool = False

    def rounds(self, datums: Sequence[Datum], group: int, drawn_at: Sequence[float]) -> list[list[Chunk]]:
        """Micro-batches longest first, in rounds of one for each rank; the last round of a kind may have too few.

        `group` consecutive datums belong together and are never torn apart. A micro-batch has one temperature.
        """
        world = distributed.world()
        # Dealt out apart, texts first: every rank runs as many with images as the others (ranks that share a vision tower's weights have
        # to enter it together), and as many without.
        dealt: dict[bool, list[Chunk]] = {False: [], True: []}
        # Datums with and without a field (soft targets, say), of two temperatures, or of other rotary frequencies share no micro-batch.
        kinds: dict[tuple, list[int]] = {}
        for i in range(len(datums)):
            own = datums[i - i % group : i - i % group + group]
            fields = ((name, data.array.shape[1:]) for name, data in own[0].loss_fn_inputs.items())
            told = all(datum.experts is not None for datum in own)
            sees = self.sees and any(datum.model_input.placed() for datum in own)
            kinds.setdefault((drawn_at[i - i % group], self._row_kind(own), told, sees, *fields), []).append(i)
        for kind, members in kinds.items():
            sees = kind[3]
            same = [datums[i] for i in members]
            layout = "padded" if sees else self._layout(same)
            together = blocks(same, layout, self.budget, group)
            costs = [block_cost(same, block, layout) for block in together]
            share = self.budget
            if world > 1:  # enough micro-batches to go round
                share = max(1, min(self.budget, -(-sum(costs) // world)))
            for chunk in plan(costs, share, layout):
                dealt[sees].append((layout, [[members[i] for i in unit] for j in chunk for unit in together[j]]))
        return [chunks[i : i + world] for chunks in dealt.values() for i in range(0, len(chunks), world)]

    def _row_kind(self, together: Sequence[Datum]) -> bool:
        """What rows must have in common with these to share a forward with them. Raises ValueError where these cannot share one."""
        switch = self.switch
        if switch is None:
            return False
        found = {switch.is_beyond(datum.model_input.length): datum.model_input.length for datum in together}
        if len(found) > 1:
            raise ValueError(
                f"sequences of {' and '.join(map(str, found.values()))} tokens belong together, and this model's rotary embedding has "
                f"other frequencies beyond {switch.at} tokens, one set a forward: keep such pairs on one side of it"
            )
        return next(iter(found))

    def _layout(self, datums: Sequence[Datum]) -> str:
        if self.layout != "auto":
            return self.layout
        if "packed" in self.layouts:
            return "packed"  # flash attention: sequences end to end, told apart by their positions
        if "shared" not in self.layouts:
            return "padded"
        return choose_layout(datums, self.budget, self.hidden)


def batches(
    datums: Sequence[Datum], rounds: Sequence[Sequence[Chunk]], group: int, drawn_at: Sequence[float], device: torch.device
) -> list[PackedBatch]:
    """This rank's of each round; where there is none for it, one of the same kind that counts for nothing."""
    rank, found = distributed.rank(), []
    for dealt_out in rounds:
        if rank < len(dealt_out):
            layout, mine = dealt_out[rank]
            found.append(collate(datums, mine, layout, device))
        else:
            first = dealt_out[0][1][0][0] // group * group
            found.append(collate(datums, [[i] for i in range(first, first + group)], "padded", device))
            found[-1].scale = 0.0
        found[-1].temperature = drawn_at[found[-1].datum_index[0]]
    return found


def collect(outputs: dict[int, dict[str, np.ndarray]], batch: PackedBatch, found: Mapping[str, Tensor]) -> None:
    """Cuts what was found at each token into datums."""
    bounds = batch.cu_seqlens.tolist()
    arrays = {name: tensor.detach().float().cpu().numpy() for name, tensor in found.items()}
    for i, start, end in zip(batch.datum_index, bounds[:-1], bounds[1:], strict=True):
        outputs[i] = {name: array[start:end] for name, array in arrays.items()}
