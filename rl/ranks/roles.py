"""Assign roles by rank: the last processes of a launch sample, the others learn.

Each side is a separate world. A separate world (its ranks, its collectives) lets DDP, FSDP2 and
DeepSpeed run as if no other process had been started: none of them needs a sub-group. A bridge
connects the worlds. Its members are rank 0, which runs the script, and the samplers.
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
    """Describe the role of this process.

    `samplers`: the number of sampling processes. `samples`: whether this process samples. `bridge`:
    the driver (its rank 0) and the samplers; None on learners that are not the driver.
    """

    samplers: int
    samples: bool
    bridge: distributed.Members | None


_taken: Role | None = None  # this process's role, which never changes


def has_side() -> bool:
    """Return whether this process only learns or only samples."""
    return _taken is not None


def called() -> str:
    """Return this process's name for errors."""
    return (
        _taken.bridge.called
        if _taken is not None and _taken.samples and _taken.bridge
        else f"rank {distributed.rank()}"
    )


def check_roles(sampler_ranks: int) -> None:
    """Raise UserError if this launch cannot use `sampler_ranks` processes for sampling."""
    whole(
        "sampler_ranks",
        sampler_ranks,
        "a whole number of processes, 0 if all learn and sample",
        least=0,
    )
    if not sampler_ranks:
        return
    have = 0 if _taken is None else _taken.samplers
    if (_taken is not None or distributed.world() > 1) and have != sampler_ranks:
        raise UserError(
            f"sampler_ranks {sampler_ranks} comes too late: a script's first service sets the "
            f"number of sampling processes, which is {have} here. Use the same value for all "
            "services"
        )
    if _taken is not None:
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


def take_role(sampler_ranks: int, timeout_seconds: float) -> Role | None:
    """Assign this process's role and initialize its world; return None without roles.

    The environment's ranks are those of this side afterwards. Raises UserError like `check_roles`.
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
        # A single process runs as if it had been started without a launcher.
        os.environ.pop("LOCAL_RANK", None)
    _taken = Role(sampler_ranks, samples, bridge)
    return _taken


def _settle(rank: int, world: int) -> None:
    """Set the environment's ranks to this side's for accelerate and DeepSpeed.

    The GPU remains that of the launch.
    """
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0"))
        os.environ["ACCELERATE_TORCH_DEVICE"] = f"cuda:{local}"
        torch.cuda.set_device(local)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), str(world)
