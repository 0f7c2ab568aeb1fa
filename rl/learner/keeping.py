"""Choose the memory that the output head may keep of a micro-batch on a GPU.

It applies if `kept_logits_gib` is not set, and accounts for the other memory that a rank needs.

The rule uses the device's total memory and the bytes that a rank is known to hold, not the free
memory. The first forward comes before Adam's moments and before a sampler's copy, that of a resumed
run after them, and whether scores are kept or recomputed shows in the last bits of a gradient. So a
run repeats, and resumes, bit for bit on the same kind of GPU, whatever memory was free. If the
devices or shards of ranks differ, all ranks use the smallest value, so the plan of a micro-batch
does not depend on its rank. A run that resumes with other GPUs, another number of ranks or another
sharding may choose another value. Memory of other processes on the GPU is not known here: set a
size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl.ranks import asks_for_fsdp, distributed, zero_settings

FP32 = 4
ADAM = 8  # bytes per trained parameter: two fp32 moments
ADAM_8BIT = 2 + 2 * FP32 / 256  # two moments, each with an fp32 scale per 256 numbers


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Describe the sharding of trained state over ranks.

    `zero`: DeepSpeed's stage, None without DeepSpeed. `fsdp`: FSDP2. `offload`: the optimizer is in
    CPU memory. `optimizer`: the setting of that name, which decides the storage of AdamW's moments.
    """

    world: int = 1
    zero: int | None = None
    offload: bool = False
    fsdp: bool = False
    optimizer: str = "adamw"


def optimizer_bytes(trainable: float, how: Sharing) -> float:
    """Return the optimizer's bytes on each rank.

    It is 8 per trained parameter. From ZeRO stage 1 on it is sharded, with an fp32 copy of the
    parameter (in fp32 training too). In 8 bit it is 2. Paged state does not count, since its pages
    leave a full GPU.
    """
    if how.offload or how.optimizer.startswith("paged"):
        return 0.0
    if how.optimizer == "adamw_8bit":
        return ADAM_8BIT * trainable
    if how.fsdp:
        return ADAM * trainable / how.world
    if how.zero in (None, 0):
        return ADAM * trainable
    return (ADAM + FP32) * trainable / how.world


def gradient_bytes(trainable: float, how: Sharing) -> float:
    """Return the gradients' bytes on each rank during a step: 4 per trained parameter.

    They are sharded from ZeRO stage 2 on.
    """
    if how.zero == 3 and how.offload:
        return 0.0
    return FP32 * trainable / (how.world if how.zero in (2, 3) or how.fsdp else 1)


def kept_of_gib(gib: float | None) -> int | None:
    """Return the setting `kept_logits_gib` in bytes; None if it is not set."""
    return None if gib is None else int(gib * 2**30)


def default_kept(memory: float, stays: float) -> int:
    """Return, in bytes, a quarter of a GPU's memory minus `stays`, rounded down to a power of two.

    Return 0 if `stays` exceeds the memory. The other three quarters are for activations, which grow
    with the tokens as [T, V] does, for other models and for fragmentation. The power of two absorbs
    the few MiB by which a rank's shard and its plan (`rl.memory`) differ.
    """
    spare = int(memory - stays) // 4
    return 1 << spare.bit_length() - 1 if spare > 0 else 0


def settled(
    asked: int | None,
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
    memory = _memory(accelerator.device)
    if asked is not None or memory is None:
        return asked
    zero, offload = zero_settings()
    sharing = Sharing(
        world=distributed.world(),
        zero=zero,
        offload=offload,
        fsdp=asks_for_fsdp(),
        optimizer=optimizer,
    )
    trained = float(sum(shapes[name].numel() for name in trainable))
    # of a sampler
    copy = (2 if accelerator.mixed_precision == "bf16" else FP32) * sum(
        shape.numel() for shape in shapes.values()
    )
    weights = sum(_bytes_here(parameter) for parameter in model.parameters())
    local_bytes = default_kept(
        memory,
        weights + gradient_bytes(trained, sharing) + optimizer_bytes(trained, sharing) + copy,
    )
    rank_bytes = torch.zeros(sharing.world, dtype=torch.int64, device=accelerator.device)
    rank_bytes[distributed.rank()] = local_bytes
    distributed.all_sum_([rank_bytes])
    return int(rank_bytes.min())


def _memory(device: torch.device) -> float | None:
    """Return a GPU's total memory in bytes; None for another device."""
    return (
        float(torch.cuda.get_device_properties(device).total_memory)
        if device.type == "cuda"
        else None
    )


def _bytes_here(parameter: Any) -> int:
    """Return the bytes of a parameter on this rank: its shard under ZeRO-3 or FSDP2."""
    share: Tensor = getattr(parameter, "ds_tensor", parameter)
    share = share.to_local() if hasattr(share, "to_local") else share
    return share.numel() * share.element_size()
