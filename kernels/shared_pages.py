"""Which rows share which pages of a cache (see paged_attention.py).

Shapes: R rows, G groups, B pages of a table.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Pages at the beginning of several rows' sequences, all of them full.

    `order` the rows by group, those of no group last; `place` where each row stands in it; `group`
    of each of `order` (of no group: any).
    """

    order: Tensor  # [R] int64
    place: Tensor  # [R] int64
    group: Tensor  # [R] int64
    shares: Tensor  # [R] bool, by row: whether it is of a group
    starts: Tensor  # [G + 1] int32: where each group's rows begin in `order`
    table: Tensor  # [G, B] int32
    length: Tensor  # [G] int32, positions; of groups without rows 0
