"""Choose the backend of a learner: replicated, DeepSpeed or FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rl.distributed import FSDPSharding, ZeroSharding, get_launch_sharding
from rl.learner.backend import Backend, ReplicatedBackend
from rl.learner.backend_fsdp import FSDPBackend
from rl.learner.expert_parallel import ExpertGroup
from rl.models import SafetensorsWeights


def make_backend(
    model: Any,
    trainable: Mapping[str, Tensor],
    accelerator: Any,
    optimizer: str = "adamw",
    skeleton: Any = None,
    lazy_weights: SafetensorsWeights | None = None,
    expert_group: ExpertGroup | None = None,
) -> Backend:
    """Return the backend that this launch requests.

    `optimizer`: its kind, see rl.learner.adamw. `skeleton`: for a model with 4-bit matrices, its
    modules before quantization. `lazy_weights`: for a model without values
    (`Sharding.reads_shards`), the source of its weights. `expert_group`: the ranks that divide the
    experts, under FSDP2 alone.
    """
    sharding = get_launch_sharding()
    if skeleton is None and isinstance(sharding, ZeroSharding):
        # Imported here, because deepspeed is an extra.
        from rl.learner.backend_deepspeed import DeepSpeedBackend

        return DeepSpeedBackend(
            model, trainable, accelerator.state.deepspeed_plugin.deepspeed_config, lazy_weights
        )
    if skeleton is None and isinstance(sharding, FSDPSharding):
        return FSDPBackend(
            model,
            bf16=accelerator.mixed_precision == "bf16",
            lazy_weights=lazy_weights,
            expert_group=expert_group,
        )
    return ReplicatedBackend(model, trainable, accelerator, optimizer, skeleton)
