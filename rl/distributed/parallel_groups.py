"""Check the groups of ranks of a launch that hold the sampler's weights together (`sampler_tp`), or
share the learner's micro-batches (`context_parallel_size`) or experts (`expert_parallel_size`).

A group is consecutive processes.
"""

from __future__ import annotations

import os

from rl.distributed import collectives
from rl.distributed.accelerate_launch import get_launch_sharding
from rl.distributed.sharding import FSDPSharding, Sharding
from rl.errors import UserError
from rl.types.feature_table import check_features
from rl.types.number_checks import validate_integer


def check_tensor_parallel(sampler_tp: int, sampler_ranks: int = 0) -> None:
    """Raise UserError if this launch cannot be divided into groups that each lie on a single
    machine.
    """
    validate_integer(
        "sampler_tp",
        sampler_tp,
        "a whole number of processes that hold the sampler's weights together, 1 if each holds all",
        minimum=1,
    )
    if sampler_tp == 1:
        return
    if sampler_ranks:
        received = f"sampler_tp {sampler_tp} and sampler_ranks {sampler_ranks}"
        check_features(("tensor parallelism", "sampler ranks"), received)
    started = max(collectives.world(), int(os.environ.get("WORLD_SIZE", "1")))
    if started == 1:
        raise UserError(
            f"sampler_tp {sampler_tp} splits the sampler's weights over {sampler_tp} processes of "
            "a machine, but one was started: start that many, as in `accelerate launch "
            f"--config_file accelerate_configs/zero3.yaml --num_processes {sampler_tp} train.py "
            "...`, or set sampler_tp to 1"
        )
    check_tensor_parallel_size(
        sampler_tp, min(started, int(os.environ.get("LOCAL_WORLD_SIZE", started)))
    )


def check_tensor_parallel_size(sampler_tp: int, per_node: int) -> None:
    """Raise UserError if the number of processes per machine is not divisible by `sampler_tp`."""
    if per_node % sampler_tp:
        raise UserError(
            f"sampler_tp {sampler_tp} does not divide the {per_node} processes of a machine: use "
            f"{_list_divisors(per_node)}, or start another number of processes"
        )


def check_context_parallel(size: int, sampler_ranks: int = 0) -> None:
    """Raise UserError if the ranks that learn cannot be divided into groups of `size`."""
    if size > 1:
        check_context_parallel_size(size, _count_learners(sampler_ranks))


def check_context_parallel_size(size: int, learners: int) -> None:
    """Raise UserError if `learners`, the number of processes that learn, is no multiple of
    `size`.
    """
    if learners % size:
        raise UserError(
            f"context_parallel_size {size} divides each sequence among {size} processes, but "
            f"{learners} learn{'s' if learners == 1 else ''}: use {_list_divisors(learners)}, or "
            f"start a multiple of {size}, as in `accelerate launch --config_file "
            f"accelerate_configs/zero3.yaml --num_processes {size} train.py ...`"
        )


def check_expert_parallel(size: int, sampler_ranks: int = 0) -> None:
    """Raise UserError if the ranks that learn cannot divide experts in groups of `size`."""
    if size > 1:
        check_expert_parallel_size(size, _count_learners(sampler_ranks), get_launch_sharding())


def check_expert_parallel_size(size: int, learners: int, sharding: Sharding) -> None:
    """Raise UserError if `learners`, the number of processes that learn, is no multiple of `size`,
    or if their sharding does not divide experts.
    """
    launch = (
        f"`accelerate launch --config_file accelerate_configs/fsdp2.yaml --num_processes {size} "
        "train.py ...`"
    )
    if not isinstance(sharding, FSDPSharding) or sharding.replicas > 1:
        name = sharding.describe(learners) or "a single process"
        raise UserError(
            f"expert_parallel_size {size} divides experts under FSDP2 alone, not with {name}: "
            f"start {launch}, or set it to 1"
        )
    if learners % size:
        raise UserError(
            f"expert_parallel_size {size} divides experts among {size} processes, but {learners} "
            f"learn{'s' if learners == 1 else ''}: use {_list_divisors(learners)}, or start a "
            f"multiple of {size}, as in {launch}"
        )


def _count_learners(sampler_ranks: int) -> int:
    """Return the number of processes of this launch that learn."""
    return max(collectives.world(), int(os.environ.get("WORLD_SIZE", "1")) - sampler_ranks)


def _list_divisors(count: int) -> str:
    """Return the divisors of a number, for a message."""
    return ", ".join(str(k) for k in range(1, count + 1) if count % k == 0)
