"""Check the groups of ranks that share the learner's micro-batches (`context_parallel_size`)."""

from __future__ import annotations

import os

from rl.distributed import collectives
from rl.errors import UserError


def check_context_parallel(size: int, sampler_ranks: int = 0) -> None:
    """Raise UserError if the ranks that learn cannot be divided into groups of `size`."""
    if size > 1:
        started = max(collectives.world(), int(os.environ.get("WORLD_SIZE", "1")) - sampler_ranks)
        check_context_parallel_size(size, started)


def check_context_parallel_size(size: int, learners: int) -> None:
    """Raise UserError if `learners`, the number of processes that learn, is no multiple of
    `size`.
    """
    if learners % size == 0:
        return
    fitting = [k for k in range(1, learners + 1) if learners % k == 0]
    raise UserError(
        f"context_parallel_size {size} divides each sequence among {size} processes, but "
        f"{learners} learn{'s' if learners == 1 else ''}: use {', '.join(map(str, fitting))}, or "
        f"start a multiple of {size}, as in `accelerate launch --config_file "
        f"accelerate_configs/zero3.yaml --num_processes {size} train.py ...`"
    )
