"""Teams by rank: so many consecutive processes of a machine that hold a sampler's weights together
(`sampler_tp`), each its part.
"""

from __future__ import annotations

import os

from rl.errors import UserError
from rl.ranks import distributed
from rl.types.checked import whole


def check_team(sampler_tp: int, sampler_ranks: int = 0) -> None:
    """UserError where this launch cannot be cut up into teams of so many processes, none of which
    spans two machines.
    """
    whole(
        "sampler_tp",
        sampler_tp,
        "a whole number of processes that hold the sampler's weights together, 1 where each holds all",
        least=1,
    )
    if sampler_tp == 1:
        return
    check_apart_from_roles(sampler_tp, sampler_ranks)
    started = max(distributed.world(), int(os.environ.get("WORLD_SIZE", "1")))
    if started == 1:
        raise UserError(
            f"sampler_tp {sampler_tp} splits the sampler's weights over {sampler_tp} processes of a machine, and one was started: start as "
            f"many, as in `accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes {sampler_tp} train.py ...`, or "
            "set sampler_tp to 1"
        )
    check_divides(sampler_tp, min(started, int(os.environ.get("LOCAL_WORLD_SIZE", started))))


def check_apart_from_roles(sampler_tp: int, sampler_ranks: int) -> None:
    """UserError where teams are asked for in a launch some of whose processes only sample."""
    if sampler_tp > 1 and sampler_ranks:
        raise UserError(
            f"sampler_tp {sampler_tp} and sampler_ranks {sampler_ranks} do not go together: ranks that only sample hold all weights each. "
            "Leave out the one or the other"
        )


def check_divides(sampler_tp: int, per_node: int) -> None:
    """UserError where so many processes of a machine are no whole number of teams."""
    if per_node % sampler_tp:
        fitting = [k for k in range(1, per_node + 1) if per_node % k == 0]
        raise UserError(
            f"sampler_tp {sampler_tp} does not divide the {per_node} processes of a machine: it is one of {', '.join(map(str, fitting))} "
            "there, or start others"
        )
