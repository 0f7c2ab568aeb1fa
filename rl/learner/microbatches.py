"""Distribute datums over the ranks and cut them into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from rl.distributed import collectives
from rl.learner.packing import (
    PackedBatch,
    TokenSelector,
    block_shape,
    choose_layout,
    collate,
    copy_to_device,
    count_expert_columns,
    make_blocks,
    plan_micro_batches,
)
from rl.types import Datum


@dataclass(frozen=True)
class MicroBatchPlan:
    """Hold the plan of a micro-batch. `units`: indices of datums (rl.learner.packing).
    `temperature`: that of all its datums. `scale`: see PackedBatch.
    """

    layout: str
    units: list[list[int]]
    temperature: float
    scale: float = 1.0


@dataclass(frozen=True)
class RankBatch:
    """Hold a rank's share of a batch: its micro-batches, and their datums by index in the batch.

    `num_micro_batches`: number of micro-batches of each rank in the whole batch.
    """

    datums: Mapping[int, Datum]
    micro_batches: Sequence[MicroBatchPlan]
    num_micro_batches: int


@dataclass(frozen=True)
class MicroBatchPlanner:
    """Plan micro-batches.

    `token_budget`: positions in a micro-batch. `requested_layout`: the requested layout.
    `exact_layouts`: the exact layouts. `hidden_size`: the model's hidden size. `rope_switch`: set
    if the model's rotary frequencies change with a row's length. `reads_images`: whether the model
    reads images. `sharing`: the consecutive ranks that share this rank's micro-batches. `varlen`:
    attention takes the lengths of sequences (rl.learner.varlen_attention).
    """

    token_budget: int
    requested_layout: str
    exact_layouts: frozenset[str]
    hidden_size: int
    device: torch.device
    rope_switch: Any
    reads_images: bool
    sharing: collectives.RankGroup | None
    varlen: bool

    @property
    def group_size(self) -> int:
        """Return the number of ranks that share a micro-batch."""
        return 1 if self.sharing is None else self.sharing.size

    def split(
        self,
        datums: Sequence[Datum],
        group: int,
        temperatures: Sequence[float],
        micro_batch: int | None = None,
    ) -> list[RankBatch]:
        """Return each rank's share of a batch; ranks that share micro-batches have the same object.

        Every rank has a micro-batch of each round. A rank that a round has none for gets one of the
        same kind with scale 0. `micro_batch`: only the round of that index.
        """
        rounds = self._plan_rounds(datums, group, temperatures)
        selected = rounds if micro_batch is None else rounds[micro_batch : micro_batch + 1]
        shares = []
        for rank in range(collectives.world() // self.group_size):
            plans = [
                plans[rank] if rank < len(plans) else _make_filler(plans[0], group)
                for plans in selected
            ]
            indices = {i for plan in plans for unit in plan.units for i in unit}
            share = RankBatch({i: datums[i] for i in sorted(indices)}, plans, len(rounds))
            shares += [share] * self.group_size
        return shares

    def _plan_rounds(
        self, datums: Sequence[Datum], group: int, temperatures: Sequence[float]
    ) -> list[list[MicroBatchPlan]]:
        """Return micro-batches, longest first, in rounds with a micro-batch for each group of
        ranks.

        The last round of a kind may have fewer. `group` consecutive datums belong together and stay
        in a micro-batch. All datums of a micro-batch have the same temperature.
        """
        world = collectives.world() // self.group_size
        # Each kind is distributed separately, texts first. Every rank runs the same number of
        # micro-batches with images (ranks that share a vision tower's weights must enter it
        # together) and without, and the same number with two forwards and with a single forward.
        dealt: dict[tuple[bool, bool], list[MicroBatchPlan]] = {
            (sees, two): [] for sees in (False, True) for two in (False, True)
        }
        # Datums with and without a field (soft targets, say), of two temperatures, or of other
        # rotary frequencies share no micro-batch.
        kinds: dict[tuple, list[int]] = {}
        for i in range(len(datums)):
            group_datums = datums[i - i % group : i - i % group + group]
            fields = (
                (name, data.array.shape[1:])
                for name, data in group_datums[0].loss_fn_inputs.items()
            )
            sees = self.reads_images and any(
                datum.model_input.images_with_positions() for datum in group_datums
            )
            kinds.setdefault(
                (
                    temperatures[i - i % group],
                    self._is_beyond_switch(group_datums),
                    count_expert_columns(group_datums),
                    sees,
                    *fields,
                ),
                [],
            ).append(i)
        for kind, members in kinds.items():
            sees, two_forwards = kind[3], kind[1] is None
            same = [datums[i] for i in members]
            layout = "padded" if sees or two_forwards else self._choose_layout(same)
            varlen = self.varlen and layout != "padded"
            together = make_blocks(same, layout, self.token_budget, group, varlen=varlen)
            shapes = [block_shape(same, block, layout, varlen=varlen) for block in together]
            share = self.token_budget
            if world > 1:  # at least as many micro-batches as ranks
                total = sum(rows * longest for rows, longest in shapes)
                share = max(1, min(self.token_budget, -(-total // world)))
            for chunk in plan_micro_batches(shapes, share, "packed" if varlen else layout):
                units = [[members[i] for i in unit] for j in chunk for unit in together[j]]
                dealt[sees, two_forwards].append(MicroBatchPlan(layout, units, kind[0]))
        return [
            chunks[i : i + world] for chunks in dealt.values() for i in range(0, len(chunks), world)
        ]

    def _is_beyond_switch(self, datums: Sequence[Datum]) -> bool | None:
        """Return whether these rows lie beyond the switch of rotary frequencies.

        Return None if only some do: these rows need two forwards.
        """
        if self.rope_switch is None:
            return False
        kinds = {
            self.rope_switch.uses_long_frequencies(datum.model_input.length) for datum in datums
        }
        return None if len(kinds) > 1 else next(iter(kinds))

    def _choose_layout(self, datums: Sequence[Datum]) -> str:
        """Return the layout of these datums: the requested layout, or for "auto" the cheapest exact
        layout.
        """
        if self.requested_layout != "auto":
            return self.requested_layout
        if "packed" in self.exact_layouts:
            # Flash attention separates concatenated sequences by their positions.
            return "packed"
        if "shared" not in self.exact_layouts:
            return "padded"
        if self.varlen:
            return "shared"  # computes no position twice, and no padding
        return choose_layout(datums, self.token_budget, self.hidden_size)

    def make_micro_batches(
        self, share: RankBatch, select_tokens: TokenSelector | None = None
    ) -> Iterator[PackedBatch]:
        """Yield the micro-batches of a rank's share. The next is laid out while a GPU still
        computes the current one. `select_tokens`: see `collate`.

        A batch with rows on both sides of `rope_switch` is split into its `sub_batches`.
        """
        datums = share.datums
        for plan in share.micro_batches:
            with record_function("whetstone/collate"):
                batch = collate(
                    datums,
                    plan.units,
                    plan.layout,
                    self.device,
                    self.sharing,
                    varlen=self.varlen,
                    select_tokens=select_tokens,
                )
                batch.scale, batch.temperature = plan.scale, plan.temperature
                if self.rope_switch is not None:
                    self._split_by_rope_switch(batch, datums, select_tokens)
            yield batch

    def _split_by_rope_switch(
        self, batch: PackedBatch, datums: Mapping[int, Datum], select_tokens: TokenSelector | None
    ) -> None:
        """Set the batch's `sub_batches`, a forward each, if it has rows of both kinds of rotary
        frequencies.

        Such a batch does not replay its routers: their record is discarded.
        """
        sides = [
            [
                i
                for i in batch.datum_index
                if self.rope_switch.uses_long_frequencies(datums[i].model_input.length) == beyond
            ]
            for beyond in (False, True)
        ]
        if not all(sides):
            return
        batch.experts = None
        batch.sub_batches = [
            collate(datums, [[i] for i in side], "padded", self.device, select_tokens=select_tokens)
            for side in sides
        ]
        begins: dict[int, int] = {}
        at = 0
        for i in (i for side in sides for i in side):
            begins[i], at = at, at + datums[i].model_input.length
        order = [
            np.arange(begins[i], begins[i] + datums[i].model_input.length)
            for i in batch.datum_index
        ]
        batch.sub_batch_order = copy_to_device(np.concatenate(order), self.device)


def _make_filler(plan: MicroBatchPlan, group: int) -> MicroBatchPlan:
    """Return a micro-batch with scale 0 of the first `group` datums of another."""
    first = plan.units[0][0] // group * group
    units = [[i] for i in range(first, first + group)]
    return MicroBatchPlan("padded", units, plan.temperature, scale=0.0)


def merge_sub_batches(
    parts: Sequence[tuple[Tensor | None, ...]], order: Tensor | None
) -> tuple[Any, ...]:
    """Return the outputs of a batch's sides (tuples of [T, ...], or None) merged into batch token
    order.
    """
    if order is None:
        return parts[0]
    return tuple(
        None if column[0] is None else torch.cat([*column])[order]
        for column in zip(*parts, strict=True)
    )  # type: ignore[list-item]


def sum_terms(
    terms: Sequence[tuple[Any, Mapping[str, Tensor]]],
) -> tuple[Any, dict[str, Tensor]]:
    """Return the sum of (value, metric sums) pairs."""
    metrics: dict[str, Tensor] = {}
    for _, sums in terms:
        metrics |= {
            name: metrics[name] + value if name in metrics else value
            for name, value in sums.items()
        }
    return sum(value for value, _ in terms), metrics
