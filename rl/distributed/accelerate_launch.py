"""Create the accelerator of this launch and reject launches that would not train as requested.

Accelerate silently treats some settings as "no distributed training": processes then train
separately, or a single process runs instead of several. Each such state raises an error that names
the setting.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rl.distributed import collectives
from rl.distributed.gloo_interface import select_gloo_interface
from rl.distributed.rank_roles import has_role, is_set
from rl.distributed.sharding import FSDPSharding, Sharding, ZeroSharding
from rl.errors import UserError

# The learner decides these at each call; other values in a config file would be silently ignored.
_CONTROLLED_SETTINGS = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,  # set at each step; accelerate's default would be 1.0
    # the number of backwards before a step is not known in advance
    "managed_gradient_accumulation": False,
}
_REJECTED_SETTINGS = (
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "train_batch_size",
    "torch_autocast",
    "data_types",
)


def make_accelerator(*, bf16: bool, timeout_seconds: float = 1800.0) -> Any:
    """Join the processes of this launch and return accelerate's Accelerator.

    `timeout_seconds`: timeout of each wait in a collective. Raises UserError for an inconsistent
    launch, and if an earlier service of the script has another precision.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import InitProcessGroupKwargs

    processes = _num_launched_processes()
    precision = "bf16" if bf16 else "no"
    on_cpu = not torch.cuda.is_available()
    bound = datetime.timedelta(seconds=timeout_seconds)
    group = [InitProcessGroupKwargs(backend="gloo" if on_cpu else "nccl", timeout=bound)]
    _check_environment(processes)
    before = AcceleratorState().mixed_precision if AcceleratorState._shared_state else precision
    if before != precision:
        raise UserError(
            f"an earlier service of this script computes in {before.replace('no', 'fp32')}, and "
            "all services of a process need the same precision: set the same dtype in every "
            "service's settings"
        )
    select_gloo_interface()
    if is_set("ACCELERATE_USE_DEEPSPEED"):
        accelerator = _make_deepspeed_accelerator(bf16, precision, group, timeout_seconds)
    else:
        # Without cpu=True accelerate joins a gloo group and then treats every process as the only
        # process. It would choose a Mac's GPU, which has no float64.
        if _parallel_size("DP_REPLICATE") > 1 and not _uses_fsdp():
            raise UserError(
                "parallelism_config shards only with FSDP2 and several processes: use "
                "accelerate_configs/hsdp.yaml, or leave it out"
            )
        # Accelerate would apply a parallelism_config to its own wrapping, which is not used.
        os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
        accelerator = Accelerator(
            mixed_precision=precision,
            cpu=on_cpu and (processes > 1 or torch.backends.mps.is_available()),
            kwargs_handlers=group if processes > 1 else [],
        )
    kind = str(accelerator.distributed_type.value)
    if (
        accelerator.num_processes != processes
        or collectives.world() != processes
        or (processes > 1 and kind == "NO")
    ):
        raise UserError(
            f"{processes} processes were launched, but accelerate counts "
            f"{accelerator.num_processes} of type {kind} and torch.distributed "
            f"{collectives.world()}: each would train separately. Launch with a config file from "
            "accelerate_configs/"
        )
    if is_set("ACCELERATE_USE_DEEPSPEED") != (kind == "DEEPSPEED"):
        raise UserError(
            f"DeepSpeed was requested but accelerate chose {kind}: set use_cpu: false in the "
            "accelerate config"
        )
    if isinstance(sharding := get_launch_sharding(), FSDPSharding):
        collectives.init_shard_mesh(sharding.num_shards(processes), timeout_seconds)
    return accelerator


def _uses_fsdp() -> bool:
    """Return whether this launch shards by FSDP2; a single process has nothing to shard."""
    return is_set("ACCELERATE_USE_FSDP") and _num_launched_processes() > 1


def get_launch_sharding() -> Sharding:
    """Return how this launch divides the learner's state. Nothing is started.

    Raises UserError for a DeepSpeed config that is missing or invalid.
    """
    if is_set("ACCELERATE_USE_DEEPSPEED"):
        config = _read_deepspeed_config()
        zero = make_engine_config(config, bf16=False)["zero_optimization"]
        requested = config.get("zero_optimization", {}).get("zero_hpz_partition_size")
        return ZeroSharding(
            stage=int(zero["stage"]),
            offload=zero.get("offload_optimizer", {}).get("device", "none") != "none",
            hpz=int(zero.get("zero_hpz_partition_size") or 1),
            hpz_is_auto=requested == "auto" and zero["stage"] == 3,
        )
    return FSDPSharding(replicas=_parallel_size("DP_REPLICATE")) if _uses_fsdp() else Sharding()


def _parallel_size(name: str) -> int:
    """Return a size of the accelerate config's parallelism_config, 1 if it sets none."""
    return int(os.environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1"))


def _check_parallel_sizes() -> None:
    """Raise UserError for sizes of a parallelism_config that do not multiply to the number of
    processes, or for another kind of parallelism than data parallelism.
    """
    replicas, shards = _parallel_size("DP_REPLICATE"), _parallel_size("DP_SHARD")
    for name in ("TP", "CP", "SP"):
        if _parallel_size(name) > 1:
            remedy = "" if name == "TP" else ", and set context_parallel_size of the run"
            raise UserError(
                f"parallelism_config_{name.lower()}_size is {_parallel_size(name)}: the learner "
                f"shards over data-parallel ranks alone, leave it out{remedy}"
            )
    if replicas * shards not in (1, _num_launched_processes()):
        raise UserError(
            f"parallelism_config_dp_replicate_size {replicas} x parallelism_config_dp_shard_size "
            f"{shards} are {replicas * shards} processes, but {_num_launched_processes()} were "
            "launched: set them to the number of machines and the GPUs of one machine, as in "
            "accelerate_configs/hsdp.yaml"
        )


def _check_fsdp_settings() -> None:
    """Raise UserError for settings of an FSDP config that would be silently ignored."""
    _check_parallel_sizes()
    version = os.environ.get("FSDP_VERSION", "1")
    reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
    if version != "2":
        raise UserError(
            f"fsdp_version is {version}, only 2 is supported: use accelerate_configs/fsdp2.yaml"
        )
    if reshard not in ("true", "full_shard"):
        raise UserError(
            f"fsdp_reshard_after_forward is {reshard}; layers are always resharded after their "
            "forward: leave it out"
        )
    if is_set("FSDP_OFFLOAD_PARAMS"):
        raise UserError(
            "fsdp_offload_params is not supported: leave it out, or use "
            "accelerate_configs/zero3_offload.yaml"
        )
    if is_set("FSDP_ACTIVATION_CHECKPOINTING"):
        raise UserError(
            "fsdp_activation_checkpointing is ignored: leave it out, and set the run's "
            "gradient_checkpointing"
        )
    # This is accelerate's default: transformers would load weights on the first rank only.
    if is_set("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise UserError(
            "every rank reads the weights: set fsdp_cpu_ram_efficient_loading to false, as in "
            "accelerate_configs/fsdp2.yaml"
        )


def _num_launched_processes() -> int:
    """Return the number of processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _max_row_size() -> int:
    """Return the largest number of consecutive ranks in rows that each lie in one machine.

    Every machine has the same number of processes, but the last may all sample instead of learn.
    """
    processes = _num_launched_processes()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    return processes if processes <= local else math.gcd(processes, local)


def _check_environment(processes: int) -> None:
    """Raise UserError for environments in which accelerate launch has dropped a requested
    setting.
    """
    if is_set("ACCELERATE_USE_CPU"):
        for name, label in (
            ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
            ("ACCELERATE_USE_FSDP", "FSDP"),
        ):
            if is_set(name):
                raise UserError(
                    f"use_cpu (or --cpu) silently disables {label}: set use_cpu: false in the "
                    "accelerate config"
                )
        if (
            processes == 1
            and "LOCAL_RANK" not in os.environ
            and "MASTER_ADDR" in os.environ
            and not has_role()
        ):
            raise UserError(
                "accelerate launch started one process but its config requests several (caused "
                "by --cpu with --num_processes, or distributed_type: MULTI_CPU): use "
                "accelerate_configs/ddp.yaml, which also runs on CPUs"
            )
    if _uses_fsdp():
        _check_fsdp_settings()


# ---------------------------------------------------------------------------------------- DeepSpeed


def _make_deepspeed_accelerator(
    bf16: bool, precision: str, handlers: list[Any], timeout_seconds: float
) -> Any:
    """Return an Accelerator with DeepSpeed."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    _disable_shm_build()
    # The plugin exists if an earlier service of the same script made it.
    if AcceleratorState._shared_state and AcceleratorState().deepspeed_plugins is not None:
        return Accelerator(mixed_precision=precision)
    plugin = DeepSpeedPlugin(
        hf_ds_config=make_engine_config(_read_deepspeed_config(), bf16=bf16), zero3_init_flag=False
    )
    accelerator = Accelerator(
        mixed_precision=precision, deepspeed_plugin=plugin, kwargs_handlers=handlers
    )
    if collectives.world() > 1:
        # Otherwise DeepSpeed makes this group of gradients with torch's timeout of 30 (NCCL: 10)
        # minutes instead of this launch's.
        groups._WORLD_GROUP = collectives.new_world_group(timeout_seconds)
        # DeepSpeed would make the groups of zero_hpz_partition_size ranks at each engine, which
        # fails at the second.
        size = plugin.deepspeed_config["zero_optimization"].get("zero_hpz_partition_size") or 1
        if size > 1:
            groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = collectives.new_row_group(
                size, timeout_seconds
            )
    # The plugin enables ZeRO-3 in transformers, and every from_pretrained would then return empty
    # shards, also for models that are loaded for sampling, scoring or saving. Learners are sharded
    # by rl.learner.backend_deepspeed.
    unset_hf_deepspeed_config()
    return accelerator


def _disable_shm_build() -> None:
    """Keep DeepSpeed from compiling collectives at start on CPUs.

    They are for inference, which nothing here uses, and are compiled under a lock in torch's cache.
    A process that is killed meanwhile keeps the lock, and every later start on the machine would
    wait forever.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _read_deepspeed_config() -> dict[str, Any]:
    """Return the DeepSpeed config that the accelerate config names.

    It is searched in the current folder and in the project's root. Raises UserError if no such file
    exists.
    """
    named = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if named is None:
        raise UserError(
            "the accelerate config sets up DeepSpeed inline: put these settings into a file like "
            "ds_configs/zero3.json and name that file with deepspeed_config_file"
        )
    places = [Path(named), Path(__file__).resolve().parents[2] / named]
    for path in places:
        if path.is_file():
            return _parse_config(path)
    raise UserError(
        f"the accelerate config names the DeepSpeed config {named}, but neither "
        f"{places[0].absolute()} nor {places[1]} exists"
    )


def _parse_config(path: Path) -> dict[str, Any]:
    """Return a JSON object. Raises UserError, naming the file, if it holds something else."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"the DeepSpeed config {path} is not JSON ({error}): repair it") from error
    if not isinstance(config, dict):
        raise UserError(
            f"the DeepSpeed config {path} is a {type(config).__name__}, expected a JSON object"
        )
    return config


def make_engine_config(user_config: Mapping[str, Any], *, bf16: bool) -> dict[str, Any]:
    """Return a DeepSpeed config for the learner; `user_config`: the user's config, with its ZeRO
    settings.

    "auto" values are left to DeepSpeed, except zero_hpz_partition_size of stage 3: the processes of
    a machine if there are several machines. Raises UserError for a setting that the learner
    controls.
    """
    config = _copy_without_auto(user_config)
    config.pop("comment", None)
    for name in _REJECTED_SETTINGS:
        if name in config:
            raise UserError(
                f"the DeepSpeed config sets {name!r}, which the learner sets itself: leave it out"
            )
    for name, value in _CONTROLLED_SETTINGS.items():
        if config.setdefault(name, value) != value:
            raise UserError(
                f"the DeepSpeed config sets {name} to {config[name]!r}, the learner needs "
                f"{value!r}: leave it out"
            )
    zero = config.setdefault("zero_optimization", {})
    stage = zero.setdefault("stage", 0)
    if stage == 0 and bf16:
        raise UserError(
            "ZeRO stage 0 would sum gradients in bf16: use accelerate_configs/ddp.yaml, which "
            "does not shard either"
        )
    row, requested = _max_row_size(), user_config.get("zero_optimization", {})
    if requested.get("zero_hpz_partition_size") == "auto" and stage == 3:
        zero["zero_hpz_partition_size"] = row if row < _num_launched_processes() else 1
    if (hpz := zero.get("zero_hpz_partition_size") or 1) > 1 and stage != 3:
        raise UserError(
            f"zero_hpz_partition_size is {hpz}, which needs ZeRO stage 3 and the config sets "
            f"{stage}: leave it out"
        )
    if row % hpz:
        raise UserError(
            f"zero_hpz_partition_size is {hpz}, but at most {row} consecutive ranks share a "
            'machine, so weights would be gathered between machines: set it to "auto"'
        )
    if stage != 2 and zero.setdefault("overlap_comm", False):
        raise UserError(
            "overlap_comm works only at ZeRO stage 2 because the number of accumulated gradients "
            f"varies, but the config sets it at stage {stage}"
        )
    # torch's AdamW also steps on CPU memory and needs no build.
    config["zero_force_ds_cpu_optimizer"] = False
    # Both settings are needed; otherwise gradients are summed in bf16 (error 4e-3 after eight
    # micro-batches).
    if bf16:
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        config["communication_data_type"] = "fp32"
    config["steps_per_print"] = 10**9
    return config


def _copy_without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested settings without "auto" values."""
    return {
        key: _copy_without_auto(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if value != "auto"
    }
