"""Ranks and collectives on Python objects: the only place that knows torch.distributed.

On one process every function is the identity, so callers never ask which case they are in.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class ObjectGroup:
    """Moves Python objects between ranks over gloo (tensors of the learner go over the accelerator's own backend).

    A wait for the next verb has no bound (the driver may think for hours); the results of a verb have one.
    """

    def __init__(self, timeout_seconds: float):
        self._results = self._verbs = None
        if world() > 1:
            bound = datetime.timedelta(seconds=timeout_seconds)
            self._results = dist.new_group(backend="gloo", timeout=bound)
            self._verbs = dist.new_group(backend="gloo", timeout=datetime.timedelta(days=365))

    def broadcast_verb(self, verb: Any) -> Any:
        """Rank 0's object, on every rank."""
        if world() == 1:
            return verb
        box = [verb]
        dist.broadcast_object_list(box, src=0, group=self._verbs)
        return box[0]

    def gather(self, item: Any) -> list[Any] | None:
        """Every rank's object in rank order on rank 0, None elsewhere."""
        if world() == 1:
            return [item]
        items: list[Any] | None = [None] * world() if rank() == 0 else None
        dist.gather_object(item, items, dst=0, group=self._results)
        return items

    def all_gather(self, item: Any) -> list[Any]:
        if world() == 1:
            return [item]
        items: list[Any] = [None] * world()
        dist.all_gather_object(items, item, group=self._results)
        return items


def all_sum_(tensors: list[torch.Tensor]) -> None:
    """Sums each tensor over the ranks, in place, as one flat message per dtype."""
    if world() == 1 or not tensors:
        return
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        same = [t for t in tensors if t.dtype == dtype]
        flat = torch.cat([t.reshape(-1) for t in same])
        dist.all_reduce(flat)
        for tensor, piece in zip(same, flat.split([t.numel() for t in same]), strict=True):
            tensor.copy_(piece.view_as(tensor))


def shutdown() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
