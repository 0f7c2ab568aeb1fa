"""Cutting datums into micro-batches by a token budget, and laying a micro-batch out as tensors.

Two layouts of the same micro-batch, proved to give the same logprobs:
  "padded"  [rows, longest], right-padded. Causal attention never looks right, so no mask is needed, and what stands at
            the padding is not read: the head runs on real tokens alone. Best where attention costs rows x longest^2.
  "packed"  [1, T], sequences end to end with positions that restart at 0. Best where attention takes cu_seqlens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl.types import Datum

LAYOUTS = ("padded", "packed")


@dataclass(slots=True)
class PackedBatch:
    """One micro-batch. `input_ids` and `position_ids` as the model reads them; everything else is flat over real tokens.

    token_index  int64 [T] where each real token stands in input_ids.flatten(), or None where that is the identity
    cu_seqlens   int64 [D + 1]
    inputs       the datums' fields, [T] (or [T, K])
    datum_index  the position of each datum in the caller's list
    scale        1.0, or 0.0 for a batch that only keeps a rank in step with the others
    """

    input_ids: Tensor
    position_ids: Tensor | None
    token_index: Tensor | None
    cu_seqlens: Tensor
    inputs: dict[str, Tensor]
    datum_index: list[int]
    scale: float = 1.0

    @property
    def tokens(self) -> int:
        return int(self.cu_seqlens[-1])


def plan(lengths: Sequence[int], token_budget: int, layout: str) -> list[list[int]]:
    """Which datums go together: lists of indices, each micro-batch costing at most `token_budget` positions.

    Cost is what the layout really holds: rows x longest when padded, the sum of lengths when packed. A single datum
    longer than the budget stands alone (it has to be trained on somehow). Longest first, so that neighbours have like
    lengths and the largest micro-batch, which decides the peak of memory, comes first. A pure function of its arguments.
    """
    if token_budget < 1:
        raise ValueError(f"the token budget of a micro-batch is at least 1, got {token_budget}")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if layout == "packed":
        return _first_fit(order, lengths, token_budget)
    batches: list[list[int]] = []
    for i in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _first_fit(order: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    batches: list[list[int]] = []
    room: list[int] = []
    for i in order:
        for b, left in enumerate(room):
            if lengths[i] <= left:
                batches[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            batches.append([i])
            room.append(token_budget - lengths[i])
    return batches


def collate(datums: Sequence[Datum], indices: Sequence[int], layout: str, device: torch.device | str = "cpu") -> PackedBatch:
    """Lays the datums of these indices out as one micro-batch on `device`. All must have the same fields."""
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}: one of {', '.join(LAYOUTS)}")
    chosen = [datums[i] for i in indices]
    tokens = [datum.model_input.to_ints() for datum in chosen]
    lengths = np.asarray([len(t) for t in tokens], dtype=np.int64)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    flat = np.concatenate([np.asarray(t, dtype=np.int64) for t in tokens])
    position_ids = token_index = None
    if layout == "packed":
        starts = np.repeat(cu_seqlens[:-1], lengths)
        input_ids, position_ids = flat[None], (np.arange(len(flat)) - starts)[None]
    else:
        longest = int(lengths.max())
        present = np.arange(longest)[None] < lengths[:, None]
        input_ids = np.zeros(present.shape, dtype=np.int64)
        input_ids[present] = flat
        token_index = None if present.all() else np.flatnonzero(present)
    names = chosen[0].loss_fn_inputs.keys()
    inputs = {}
    for name in names:
        inputs[name] = torch.from_numpy(np.concatenate([datum.loss_fn_inputs[name].array for datum in chosen])).to(device)

    def put(array: np.ndarray | None) -> Tensor | None:
        return None if array is None else torch.from_numpy(array).to(device)

    ids = put(input_ids)
    assert ids is not None
    return PackedBatch(ids, put(position_ids), put(token_index), torch.from_numpy(cu_seqlens).to(device), inputs, list(indices))
