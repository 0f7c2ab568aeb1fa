"""Choose the memory that the output head may keep of a micro-batch on a GPU.

It applies if `kept_logits_gib` is not set, and accounts for the other memory that a rank needs.

The rule uses the device's total memory and the bytes that a rank is known to hold, not the free
memory. The first forward comes before Adam's moments and before a sampler's copy, that of a resumed
run after them, and whether scores are kept or recomputed shows in the last bits of a gradient. So
the choice repeats on the same kind of GPU, also after a resume, whatever memory was free. If the
devices or shards of ranks differ, all ranks use the smallest value, so the plan of a micro-batch
does not depend on its rank. A run that resumes with other GPUs, another number of ranks or another
sharding may choose another value. Memory of other processes on the GPU is not known here: set a
size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rl.distributed import Launch, collectives, get_launch_sharding


def kept_bytes_from_gib(gib: float | None) -> int | None:
    """Return the setting `kept_logits_gib` in bytes; None if it is not set."""
    return None if gib is None else int(gib * 2**30)


def default_kept_bytes(memory: float, reserved: float) -> int:
    """Return, in bytes, a quarter of a GPU's memory minus `reserved`, rounded down to a power of
    two.

    Return 0 if `reserved` exceeds the memory. The other three quarters are for activations, which
    grow with the tokens as [T, V] does, for other models and for fragmentation. The power of two
    absorbs the few MiB by which a rank's shard and its plan (`rl.memory_plan`) differ.
    """
    spare = int(memory - reserved) // 4
    return 1 << spare.bit_length() - 1 if spare > 0 else 0


def choose_kept_bytes(
    requested: int | None,
    model: nn.Module,
    shapes: Mapping[str, torch.Size],
    trainable: Collection[str],
    accelerator: Any,
    optimizer: str,
) -> int | None:
    """Return the requested number of bytes, or on a GPU the default; None on other devices.

    None selects the default of `linear_logprob`. All ranks call it. `model`: as this rank holds it,
    sharded. `shapes`: the shapes of its full parameters.
    """
    memory = _device_memory(accelerator.device)
    if requested is not None or memory is None:
        return requested
    launch = Launch(
        cuda=True,
        bf16=accelerator.mixed_precision == "bf16",
        world=collectives.world(),
        sharding=get_launch_sharding(),
        optimizer=optimizer,
    )
    trained = float(sum(shapes[name].numel() for name in trainable))
    # of a sampler
    copy = launch.compute_bytes * sum(shape.numel() for shape in shapes.values())
    weights = sum(_local_bytes(parameter) for parameter in model.parameters())
    local_bytes = default_kept_bytes(
        memory,
        weights + launch.gradient_bytes(trained) + launch.optimizer_bytes(trained) + copy,
    )
    rank_bytes = torch.zeros(launch.world, dtype=torch.int64, device=accelerator.device)
    rank_bytes[collectives.rank()] = local_bytes
    collectives.all_sum_([rank_bytes])
    return int(rank_bytes.min())


def _device_memory(device: torch.device) -> float | None:
    """Return a GPU's total memory in bytes; None for another device."""
    return (
        float(torch.cuda.get_device_properties(device).total_memory)
        if device.type == "cuda"
        else None
    )


def _local_bytes(parameter: Any) -> int:
    """Return the bytes of a parameter on this rank: its shard under ZeRO-3 or FSDP2."""
    share: Tensor = getattr(parameter, "ds_tensor", parameter)
    share = share.to_local() if hasattr(share, "to_local") else share
    return share.numel() * share.element_size()
