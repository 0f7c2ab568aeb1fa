"""Roles by rank: the last processes of a launch sample, the others learn, and each side is a world
of its own.

A world of its own (its ranks, its collectives) is what lets DDP, FSDP2 and DeepSpeed go on as if
nobody else had been started: no sub-group has to be named to any of them. Between the worlds stands
a bridge, of rank 0, which runs the script, and the samplers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from rl.errors import UserError
from rl.ranks import distributed
from rl.types.checked import whole

_SHARDING = ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP")


@dataclass(frozen=True)
class Role:
    """What this process does. `bridge`: of the driver (rank 0 there) and the samplers; None on
    learners that do not drive.

    `samplers`: how many there are.
    """

    samplers: int
    samples: bool
    bridge: distributed.Members | None


_taken: Role | None = None  # of this process, which has one for good


def has_side() -> bool:
    """Whether this process learns or samples, and does not do both."""
    return _taken is not None


def called() -> str:
    """This process, as an error names it."""
    return (
        _taken.bridge.called
        if _taken is not None and _taken.samples and _taken.bridge
        else f"rank {distributed.rank()}"
    )


def check_roles(sampler_ranks: int) -> None:
    """UserError where this launch cannot spare so many processes for sampling."""
    whole(
        "sampler_ranks",
        sampler_ranks,
        "a whole number of processes, 0 where all learn and sample",
        least=0,
    )
    if not sampler_ranks:
        return
    have = 0 if _taken is None else _taken.samplers
    if (_taken is not None or distributed.world() > 1) and have != sampler_ranks:
        raise UserError(
            f"sampler_ranks {sampler_ranks} comes too late: a script's first service says how many of its processes sample, which is "
            f"{have} here. Give all its services the same"
        )
    if _taken is not None:
        return
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started == 1:
        raise UserError(
            f"sampler_ranks {sampler_ranks} asks for processes that sample while others learn, and one was started: start at least "
            f"{sampler_ranks + 1}, as in `accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes {sampler_ranks + 1} "
            "train.py ...`, or leave it out (sampling and learning take turns then)"
        )
    if sampler_ranks >= started:
        raise UserError(
            f"sampler_ranks {sampler_ranks} of {started} processes leaves none to learn: it is at most {started - 1} here, "
            f"or start {sampler_ranks + 1} processes or more"
        )


def take_role(sampler_ranks: int, timeout_seconds: float) -> Role | None:
    """This process's side of the launch, whose world begins here; None where there are no sides.
    UserError as of `check_roles`.

    What the environment says of ranks is that of this side from now on.
    """
    global _taken
    if not sampler_ranks or _taken is not None:
        return _taken
    check_roles(sampler_ranks)
    store, rank, world = distributed.meeting_place(timeout_seconds)
    learners = world - sampler_ranks
    samples, mine = rank >= learners, rank - learners if rank >= learners else rank
    bridge = None
    if samples or rank == 0:
        called = f"sampler rank {mine} (rank {rank} of the launch)" if samples else "rank 0"
        bridge = distributed.Members(
            mine + 1 if samples else 0,
            sampler_ranks + 1,
            distributed.corner(store, "bridge"),
            called,
        )
    if samples:
        for name in _SHARDING:
            os.environ.pop(name, None)
    _settle(mine, sampler_ranks if samples else learners)
    sharded = any(
        os.environ.get(name, "false").lower() in ("1", "true", "yes") for name in _SHARDING
    )
    if int(os.environ["WORLD_SIZE"]) > 1 or sharded:
        side = distributed.corner(store, "samplers" if samples else "learners")
        distributed.begin_world(side, mine, int(os.environ["WORLD_SIZE"]), timeout_seconds)
    else:
        # it is a process by itself, as if started without a launcher
        os.environ.pop("LOCAL_RANK", None)
    _taken = Role(sampler_ranks, samples, bridge)
    return _taken


def _settle(rank: int, world: int) -> None:
    """Tells whoever reads the environment (accelerate, DeepSpeed) of this side alone; the GPU stays
    the launch's.
    """
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"cuda:{local}"
        torch.cuda.set_device(local)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world)
