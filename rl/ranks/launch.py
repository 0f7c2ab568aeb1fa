"""The accelerator of this launch, and refusal of launches that would train something else than was
asked for.

Accelerate takes some settings as "no distributed training" without a word: processes then train
alone, or one process where several were meant. Each such state is an error here that names the
setting.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rl.errors import UserError
from rl.ranks import distributed
from rl.ranks.roles import has_side

# What the learner decides at each call; a config file that says otherwise would be overruled
# without a word.
_OWNED = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0.0,  # set at each step; left out, accelerate would make it 1.0
    # the number of backwards before a step is not known in advance
    "managed_gradient_accumulation": False,
}
_REFUSED = (
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
    "train_batch_size",
    "torch_autocast",
    "data_types",
)


def make_accelerator(*, bf16: bool, timeout_seconds: float = 1800.0) -> Any:
    """Joins the processes of this launch and returns accelerate's Accelerator. Raises UserError for
    a launch that cannot be meant.

    `timeout_seconds`: bound of one wait in a collective.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    asked = _asked_processes()
    precision = "bf16" if bf16 else "no"
    on_cpu = not torch.cuda.is_available()
    bound = datetime.timedelta(seconds=timeout_seconds)
    group = [InitProcessGroupKwargs(backend="gloo" if on_cpu else "nccl", timeout=bound)]
    _refuse_before_start(asked)
    if _flag("ACCELERATE_USE_DEEPSPEED"):
        accelerator = _with_deepspeed(bf16, precision, group, timeout_seconds)
    else:
        # Without cpu=True accelerate joins a gloo group and then takes every process for a single
        # one.
        accelerator = Accelerator(
            mixed_precision=precision,
            cpu=on_cpu and asked > 1,
            kwargs_handlers=group if asked > 1 else [],
        )
    kind = str(accelerator.distributed_type.value)
    if (
        accelerator.num_processes != asked
        or distributed.world() != asked
        or (asked > 1 and kind == "NO")
    ):
        raise UserError(
            f"{asked} processes were launched, but accelerate counts {accelerator.num_processes} of type {kind} and torch.distributed "
            f"{distributed.world()}: each would train alone. Launch with a config file from accelerate_configs/"
        )
    if _flag("ACCELERATE_USE_DEEPSPEED") != (kind == "DEEPSPEED"):
        raise UserError(
            f"DeepSpeed was asked for and accelerate chose {kind}: set use_cpu: false in the accelerate config"
        )
    return accelerator


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def asks_for_fsdp() -> bool:
    """Whether this launch shards by FSDP2 (rl.learner.backend_fsdp; accelerate's own wrapping of
    models is not used).
    """
    # one process has nothing to shard
    return _flag("ACCELERATE_USE_FSDP") and _asked_processes() > 1


def _refuse_fsdp_settings() -> None:
    """Settings of an FSDP config that would be overruled without a word."""
    version, reshard = (
        os.environ.get("FSDP_VERSION", "1"),
        os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower(),
    )
    if version != "2":
        raise UserError(
            f"fsdp_version is {version}, only 2 is supported: use accelerate_configs/fsdp2.yaml"
        )
    if reshard not in ("true", "full_shard"):
        raise UserError(
            f"fsdp_reshard_after_forward is {reshard}; layers are always given up after their forward: leave it out"
        )
    if _flag("FSDP_OFFLOAD_PARAMS"):
        raise UserError(
            "fsdp_offload_params is not supported: leave it out, or use accelerate_configs/zero3_offload.yaml"
        )
    if _flag("FSDP_ACTIVATION_CHECKPOINTING"):
        raise UserError(
            "fsdp_activation_checkpointing is not read: leave it out, and set gradient_checkpointing of the run"
        )
    # accelerate's default: transformers would load weights on the first rank alone
    if _flag("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise UserError(
            "every rank reads the weights: set fsdp_cpu_ram_efficient_loading to false, as in accelerate_configs/fsdp2.yaml"
        )


def _asked_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def _refuse_before_start(asked: int) -> None:
    """Environments that accelerate launch leaves behind when it drops what was asked for."""
    if _flag("ACCELERATE_USE_CPU"):
        for name, what in (
            ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
            ("ACCELERATE_USE_FSDP", "FSDP"),
        ):
            if _flag(name):
                raise UserError(
                    f"use_cpu (or --cpu) switches {what} off without a word: set use_cpu: false in the accelerate config"
                )
        if (
            asked == 1
            and "LOCAL_RANK" not in os.environ
            and "MASTER_ADDR" in os.environ
            and not has_side()
        ):
            raise UserError(
                "accelerate launch started one process where its config asks for several (--cpu with --num_processes, or "
                "distributed_type: MULTI_CPU, does that): use accelerate_configs/ddp.yaml, which also runs on CPUs"
            )
    if asks_for_fsdp():
        _refuse_fsdp_settings()


# ---------------------------------------------------------------------------------------- DeepSpeed


def _with_deepspeed(bf16: bool, precision: str, handlers: list[Any], timeout_seconds: float) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin
    from deepspeed.utils import groups
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    _build_nothing()
    # of an earlier service of the same script
    if AcceleratorState._shared_state and AcceleratorState().deepspeed_plugins is not None:
        before = (
            AcceleratorState()
            .deepspeed_plugin.deepspeed_config.get("bf16", {})
            .get("enabled", False)
        )
        if bool(before) != bf16:
            raise UserError(
                f"an earlier service of this script trains in {'bf16' if before else 'fp32'} under DeepSpeed, which has one precision for "
                "them all: give every service's settings the same dtype"
            )
        return Accelerator(mixed_precision=precision)
    plugin = DeepSpeedPlugin(
        hf_ds_config=engine_config(_asked_config(), bf16=bf16), zero3_init_flag=False
    )
    accelerator = Accelerator(
        mixed_precision=precision, deepspeed_plugin=plugin, kwargs_handlers=handlers
    )
    if distributed.world() > 1:
        # Else DeepSpeed makes this group itself, for gradients, with torch's bound of 30 (NCCL: 10)
        # minutes instead of ours.
        groups._WORLD_GROUP = distributed.another_group(timeout_seconds)
    # The plugin tells transformers that ZeRO-3 is on, and every from_pretrained would then return
    # empty shards: also for models that are read to be sampled from, scored or saved. Learners are
    # sharded where they are made (rl.learner.backend_deepspeed).
    unset_hf_deepspeed_config()
    return accelerator


def _build_nothing() -> None:
    """On CPUs DeepSpeed would compile collectives at start (of inference, which nothing here uses),
    under a lock in torch's cache.

    A process that is killed meanwhile leaves the lock behind, and every later start on the machine
    would wait for it, for ever.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _asked_config() -> dict[str, Any]:
    """The DeepSpeed config that the accelerate config names, looked for from here and from the
    project's root.
    """
    named = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if named is None:
        raise UserError(
            "the accelerate config asks for DeepSpeed with settings of its own: put them into a file like ds_configs/zero3.json "
            "and name that with deepspeed_config_file"
        )
    places = [Path(named), Path(__file__).resolve().parents[2] / named]
    for path in places:
        if path.is_file():
            return json.loads(path.read_text())
    raise UserError(
        f"the accelerate config names the DeepSpeed config {named}, which is neither {places[0].absolute()} nor {places[1]}"
    )


def zero_settings() -> tuple[int | None, bool]:
    """(DeepSpeed's stage or None without it, whether the optimizer is kept on the CPU) of this
    launch; nothing is started.
    """
    if not _flag("ACCELERATE_USE_DEEPSPEED"):
        return None, False
    zero = engine_config(_asked_config(), bf16=False)["zero_optimization"]
    return int(zero["stage"]), zero.get("offload_optimizer", {}).get("device", "none") != "none"


def engine_config(asked: Mapping[str, Any], *, bf16: bool) -> dict[str, Any]:
    """A DeepSpeed config as the learner's verbs need it; `asked`: the user's, whose ZeRO settings
    hold.

    Raises UserError for a setting that the learner owns. "auto" values are left to DeepSpeed.
    """
    config: dict[str, Any] = json.loads(json.dumps(asked))  # a copy of plain values
    config.pop("comment", None)
    _drop_auto(config)
    for name in _REFUSED:
        if name in config:
            raise UserError(
                f"the DeepSpeed config sets {name!r}, which the learner sets itself: leave it out"
            )
    for name, value in _OWNED.items():
        if config.setdefault(name, value) != value:
            raise UserError(
                f"the DeepSpeed config sets {name} to {config[name]!r}, the learner needs {value!r}: leave it out"
            )
    zero = config.setdefault("zero_optimization", {})
    stage = zero.setdefault("stage", 0)
    if stage == 0 and bf16:
        raise UserError(
            "ZeRO stage 0 would sum gradients in bf16: use accelerate_configs/ddp.yaml, which shards as little"
        )
    if stage != 2 and zero.setdefault("overlap_comm", False):
        raise UserError(
            f"overlap_comm works at ZeRO stage 2 alone when gradients accumulate freely, the config sets it at stage {stage}"
        )
    # torch's AdamW steps on CPU memory as well, without a build
    config["zero_force_ds_cpu_optimizer"] = False
    # both settings: without either one, gradients are summed in bf16 (4e-3 off after eight
    # micro-batches)
    if bf16:
        config["bf16"] = {"enabled": True}
        config["data_types"], config["communication_data_type"] = (
            {"grad_accum_dtype": "fp32"},
            "fp32",
        )
    config["steps_per_print"] = 10**9
    return config


def _drop_auto(config: dict[str, Any]) -> None:
    for key, value in list(config.items()):
        if value == "auto":
            del config[key]
        elif isinstance(value, dict):
            _drop_auto(value)
