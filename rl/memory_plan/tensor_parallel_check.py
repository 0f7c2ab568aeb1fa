"""Check from a model's sizes whether so many ranks can share a sampler (`sampler_tp`)."""

from __future__ import annotations

from rl.errors import UserError
from rl.memory_plan.shapes import ModelShape
from rl.sampler import check_shard_counts


def check_tensor_parallel(shape: ModelShape, sampler_tp: int) -> None:
    """Raise UserError if they cannot share it: the fast decoder does not support the model, or its
    heads and columns are not divisible.
    """
    if sampler_tp == 1:
        return
    if not shape.fast:
        raise UserError(
            f"sampler_tp {sampler_tp} requires the fast decoder (docs/models.md lists its "
            f"families), and {shape.name} is not supported by it: leave sampler_tp at 1"
        )
    check_shard_counts(sampler_tp, shape.heads, shape.key_heads, shape.mlp_divisor or shape.mlp)
