"""Describe which positions a query attends to, and how its scores are limited."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionBounds:
    """Hold the bounds of an attention layer.

    `window`: the number of positions that a query attends to, its own included (0: all). `softcap`:
    scores s become softcap * tanh(s / softcap) (0: they stay as they are).
    """

    window: int = 0
    softcap: float = 0.0


UNBOUNDED = AttentionBounds()
