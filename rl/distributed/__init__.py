"""Manage processes: collectives, launch, stop signals and atomic checkpoint folders."""

from rl.distributed import checkpoint_folder, collectives, stop_signals
from rl.distributed.accelerate_launch import (
    get_launch_sharding,
    make_accelerator,
)
from rl.distributed.checkpoint_folder import checkpoint_path
from rl.distributed.gloo_interface import spans_machines
from rl.distributed.launch_agreement import check_same_launch
from rl.distributed.parallel_groups import (
    check_context_parallel,
    check_context_parallel_size,
    check_expert_parallel,
    check_expert_parallel_size,
    check_tensor_parallel,
    check_tensor_parallel_size,
)
from rl.distributed.rank_roles import assign_role, check_roles, rank_name
from rl.distributed.sharding import (
    ADAM_8BIT_BYTES,
    ADAM_BYTES,
    BF16,
    FP32,
    PERSISTENCE_THRESHOLD,
    FSDPSharding,
    Launch,
    ParameterCounts,
    Sharding,
    ZeroSharding,
)
from rl.distributed.stop_signals import (
    INTERRUPTED,
    RunStopped,
    StopRequest,
    end_process_at_exit,
    end_with_launcher,
)

__all__ = [
    "INTERRUPTED",
    "StopRequest",
    "RunStopped",
    "checkpoint_path",
    "rank_name",
    "spans_machines",
    "check_tensor_parallel_size",
    "check_roles",
    "check_context_parallel",
    "check_context_parallel_size",
    "check_expert_parallel",
    "check_expert_parallel_size",
    "check_tensor_parallel",
    "checkpoint_folder",
    "collectives",
    "end_with_launcher",
    "stop_signals",
    "end_process_at_exit",
    "make_accelerator",
    "check_same_launch",
    "assign_role",
    "get_launch_sharding",
    "ADAM_8BIT_BYTES",
    "ADAM_BYTES",
    "BF16",
    "FP32",
    "PERSISTENCE_THRESHOLD",
    "FSDPSharding",
    "Launch",
    "ParameterCounts",
    "Sharding",
    "ZeroSharding",
]
