"""What the output head may keep of a micro-batch on a GPU where nobody says (`kept_logits_gib`),
beside what must find room.

The rule goes by the device's whole memory and the bytes that a rank is known to hold, not by what
is free: the first forward comes before Adam's moments and before a sampler's copy, a resumed run's
after them, and whether scores are kept or computed again shows in the last bits of a gradient. So a
run repeats, and goes on, to the bit on the same kind of GPU, whatever was free when. Of ranks whose
devices or shares differ all take the least, so that which of them computes a micro-batch does not
choose its plan; a run that goes on with other GPUs, another number of ranks or another sharding may
choose otherwise. What other processes hold on the GPU is not known here: name a size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rl.ranks import asks_for_fsdp, distributed, zero_settings

FP32 = 4
ADAM = 8  # bytes of a trained number: two fp32 moments
ADAM_8BIT = 2 + 2 * FP32 / 256  # two moments, each with an fp32 scale for 256 numbers


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """How ranks hold what is trained. `zero`: DeepSpeed's stage, None without it; `fsdp`: FSDP2;
    `offload`: the optimizer is in CPU memory.

    `optimizer`: how AdamW keeps its moments, as the settings call it.
    """

    world: int = 1
    zero: int | None = None
    offload: bool = False
    fsdp: bool = False
    optimizer: str = "adamw"


def optimizer_bytes(trainable: float, how: Sharing) -> float:
    """8 a trained number; sharded from stage 1 on, with an fp32 copy of it (in fp32 training too).
    In 8 bit 2; pages leave a full GPU.
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
    """4 a trained number while a step is under way; sharded from stage 2 on."""
    if how.zero == 3 and how.offload:
        return 0.0
    return FP32 * trainable / (how.world if how.zero in (2, 3) or how.fsdp else 1)


def kept_of_gib(gib: float | None) -> int | None:
    """The setting `kept_logits_gib` in bytes, None where nobody says."""
    return None if gib is None else int(gib * 2**30)


def default_kept(memory: float, stays: float) -> int:
    """Bytes: a quarter of what `stays` leaves of a GPU's memory, down to a power of two; 0 where it
    leaves nothing.

    The other three are for activations, which grow with the tokens as [T, V] does, for other models
    and for fragments. The power of two leaves room for the few MiB by which a rank's share and its
    plan (`rl.memory`) differ.
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
    """What was asked for, or on a GPU the default, in bytes; None elsewhere (`linear_logprob` has
    one of its own). All ranks call it.

    `model`: as this rank holds it, sharded; `shapes`: of its parameters when whole.
    """
    memory = _memory(accelerator.device)
    if asked is not None or memory is None:
        return asked
    zero, offload = zero_settings()
    how = Sharing(
        world=distributed.world(),
        zero=zero,
        offload=offload,
        fsdp=asks_for_fsdp(),
        optimizer=optimizer,
    )
    trained = float(sum(shapes[name].numel() for name in trainable))
    # a sampler's
    copy = (2 if accelerator.mixed_precision == "bf16" else FP32) * sum(
        shape.numel() for shape in shapes.values()
    )
    weights = sum(_bytes_here(parameter) for parameter in model.parameters())
    found = default_kept(
        memory, weights + gradient_bytes(trained, how) + optimizer_bytes(trained, how) + copy
    )
    of_ranks = torch.zeros(how.world, dtype=torch.int64, device=accelerator.device)
    of_ranks[distributed.rank()] = found
    distributed.all_sum_([of_ranks])
    return int(of_ranks.min())


def _memory(device: torch.device) -> float | None:
    """All of a GPU's bytes, None of another device."""
    return (
        float(torch.cuda.get_device_properties(device).total_memory)
        if device.type == "cuda"
        else None
    )


def _bytes_here(parameter: Any) -> int:
    """Of a parameter, this rank's share of it under ZeRO-3 or FSDP2."""
    share: Tensor = getattr(parameter, "ds_tensor", parameter)
    share = share.to_local() if hasattr(share, "to_local") else share
    return share.numel() * share.element_size()
