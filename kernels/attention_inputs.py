"""Describe which positions a query attends to, how its scores are limited, and which rows share
which pages of a KV cache.

Shapes: R rows, G groups, B pages of a block table.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBounds:
    """Hold the bounds of an attention layer.

    `window`: the number of positions that a query attends to, its own included (0: all). `softcap`:
    scores s become softcap * tanh(s / softcap) (0: they stay as they are).
    """

    window: int = 0
    softcap: float = 0.0


UNBOUNDED = AttentionBounds()


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Hold the full pages at the beginning of several rows' sequences.

    `order`: the rows sorted by group, rows without a group last. `place`: the index of each row in
    `order`. `group`: the group of each entry of `order` (any number for a row without a group).
    """

    order: Tensor  # [R] int64
    place: Tensor  # [R] int64
    group: Tensor  # [R] int64
    shares: Tensor  # [R] bool, by row: whether the row belongs to a group
    starts: Tensor  # [G + 1] int32: start of each group's rows in `order`
    table: Tensor  # [G, B] int32
    length: Tensor  # [G] int32, in positions; 0 for groups without rows
