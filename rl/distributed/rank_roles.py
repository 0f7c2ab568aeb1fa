"""Assign roles by rank: the last processes of a launch sample, the others learn.

Each side is a separate world. A separate world (its ranks, its collectives) lets DDP, FSDP2 and
DeepSpeed run as if no other process had been started: none of them needs a sub-group. A bridge
connects the worlds. Its members are rank 0, which runs the script, and the samplers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from rl.distributed import collectives
from rl.distributed.gloo_interface import select_gloo_interface
from rl.errors import UserError
from rl.types.number_checks import validate_integer

_SHARDING = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")


@dataclass(frozen=True)
class RankRole:
    """Describe the role of this process.

    `num_samplers`: the number of sampling processes. `is_sampler`: whether this process samples.
    `bridge`: the driver (its rank 0) and the samplers; None on learners that are not the driver.
    """

    num_samplers: int
    is_sampler: bool
    bridge: collectives.BridgeMembers | None


_current_role: RankRole | None = None  # this process's role, which never changes


def is_set(name: str) -> bool:
    """Return whether an environment variable is set to true."""
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def has_role() -> bool:
    """Return whether this process only learns or only samples."""
    return _current_role is not None


def rank_name() -> str:
    """Return this process's name for errors."""
    return (
        _current_role.bridge.rank_name
        if _current_role is not None and _current_role.is_sampler and _current_role.bridge
        else f"rank {collectives.rank()}"
    )


def check_roles(sampler_ranks: int) -> None:
    """Raise UserError if this launch cannot use `sampler_ranks` processes for sampling."""
    validate_integer(
        "sampler_ranks",
        sampler_ranks,
        "a whole number of processes, 0 if all learn and sample",
        minimum=0,
    )
    if not sampler_ranks:
        return
    have = 0 if _current_role is None else _current_role.num_samplers
    if (_current_role is not None or collectives.world() > 1) and have != sampler_ranks:
        raise UserError(
            f"sampler_ranks {sampler_ranks} comes too late: a script's first service sets the "
            f"number of sampling processes, which is {have} here. Use the same value for all "
            "services"
        )
    if _current_role is not None:
        return
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started == 1:
        raise UserError(
            f"sampler_ranks {sampler_ranks} requests processes that sample while others learn, "
            f"but one was started: start at least {sampler_ranks + 1}, as in `accelerate launch "
            f"--config_file accelerate_configs/ddp.yaml --num_processes {sampler_ranks + 1} "
            "train.py ...`, or leave it out (sampling and learning take turns then)"
        )
    if sampler_ranks >= started:
        raise UserError(
            f"sampler_ranks {sampler_ranks} of {started} processes leaves none to learn: use at "
            f"most {started - 1} here, or start {sampler_ranks + 1} processes or more"
        )


def assign_role(sampler_ranks: int, timeout_seconds: float) -> RankRole | None:
    """Assign this process's role and initialize its world; return None without roles.

    The environment's ranks are those of this side afterwards. Raises UserError like `check_roles`.
    """
    global _current_role
    if not sampler_ranks or _current_role is not None:
        return _current_role
    check_roles(sampler_ranks)
    select_gloo_interface()  # before the environment counts the processes of one side alone
    store, rank, world = collectives.join_rendezvous(timeout_seconds)
    learners = world - sampler_ranks
    samples, mine = rank >= learners, rank - learners if rank >= learners else rank
    bridge = None
    if samples or rank == 0:
        called = f"sampler rank {mine} (rank {rank} of the launch)" if samples else "rank 0"
        bridge = collectives.BridgeMembers(
            mine + 1 if samples else 0,
            sampler_ranks + 1,
            collectives.prefix_store(store, "bridge"),
            called,
        )
    if samples:
        for name in _SHARDING:
            os.environ.pop(name, None)
    _set_rank_environment(mine, sampler_ranks if samples else learners)
    if int(os.environ["WORLD_SIZE"]) > 1 or any(map(is_set, _SHARDING)):
        side = collectives.prefix_store(store, "samplers" if samples else "learners")
        collectives.init_world(side, mine, int(os.environ["WORLD_SIZE"]), timeout_seconds)
    else:
        # A single process runs as if it had been started without a launcher.
        os.environ.pop("LOCAL_RANK", None)
    _current_role = RankRole(sampler_ranks, samples, bridge)
    return _current_role


def _set_rank_environment(rank: int, world: int) -> None:
    """Set the environment's ranks to this side's for accelerate and DeepSpeed.

    The GPU remains that of the launch.
    """
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"cuda:{local}"
        torch.cuda.set_device(local)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world)
