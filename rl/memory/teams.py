"""Whether so many ranks can hold a sampler of a model together (`sampler_tp`), from its numbers
alone.
"""

from __future__ import annotations

from rl.errors import UserError
from rl.memory.given import ModelShape
from rl.sampler import check_counts


def check_team_holds(shape: ModelShape, sampler_tp: int) -> None:
    """UserError where they cannot: a model that the fast decoder does not sample, or whose heads
    and columns do not come out even.
    """
    if sampler_tp == 1:
        return
    if not shape.fast:
        raise UserError(
            f"sampler_tp {sampler_tp} splits what the fast decoder samples (the Llama and Qwen families), and {shape.name} is none of "
            "these: leave sampler_tp at 1"
        )
    check_counts(sampler_tp, shape.heads, shape.key_heads, shape.mlp)
