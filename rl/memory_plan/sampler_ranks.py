"""Plan the memory of a rank that samples and does not learn (`sampler_ranks`)."""

from __future__ import annotations

from collections.abc import Sequence

from rl.distributed import BF16, FP32
from rl.memory_plan.byte_counts import (
    CUDA_BYTES,
    MemoryItem,
    MemoryPlan,
    constant_item,
    kv_cache_bytes,
    packed_copy_bytes,
    sampler_copy_bytes,
    sampler_working_bytes,
)
from rl.memory_plan.shapes import LaunchShape, ModelShape, StepWork


def pending_weight_bytes(shape: ModelShape, launch: LaunchShape) -> float:
    """Return the bytes of the next version's trained weights, which arrive while the current
    version still samples.

    `plan_sampler_memory` counts them twice: if an update is shorter than a weight sync, the
    following version begins to arrive before the oldest version's last slice is sampled.
    """
    adapters = min(shape.trainable, shape.adapters)
    return float((BF16 if launch.bf16 else FP32) * (shape.trainable - adapters) + FP32 * adapters)


def staged_weight_bytes(shape: ModelShape) -> float:
    """Return the bytes in CPU memory on rank 0: a copy of the trained weights in transfer."""
    return float(FP32 * shape.trainable)


def plan_sampler_memory(
    shape: ModelShape, launch: LaunchShape, work: StepWork, others: Sequence[ModelShape] = ()
) -> MemoryPlan:
    """Return a sampler rank's plan. `others`: models that only score, which sampler ranks hold."""
    items = (
        constant_item(
            "sampler's copy of the weights",
            sampler_copy_bytes(shape, launch) + packed_copy_bytes(shape, launch),
        ),
        constant_item(
            "pending weight versions (at most two)", 2 * pending_weight_bytes(shape, launch)
        ),
        constant_item(
            "models that only score", sum(sampler_copy_bytes(other, launch) for other in others)
        ),
        MemoryItem("logits and working memory", sample=sampler_working_bytes(shape, launch, work)),
        MemoryItem("KV cache", sample=kv_cache_bytes(shape, launch, work)),
        constant_item("CUDA context and libraries (assumed)", CUDA_BYTES if launch.cuda else 0.0),
    )
    read = [
        (
            "loading: every process reads the whole model in fp32",
            float(FP32 * shape.parameters * launch.per_node),
        )
    ]
    return MemoryPlan(items, tuple(read if launch.cuda else []))
