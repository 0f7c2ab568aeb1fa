"""Plan the memory of a rank that samples and does not learn (`sampler_ranks`)."""

from __future__ import annotations

from collections.abc import Sequence

from rl.memory.given import BF16, FP32, Launch, ModelShape, Work
from rl.memory.plan import (
    CUDA_BYTES,
    Item,
    Plan,
    always,
    kv_cache,
    packed_copy,
    sampler_copy,
    sampler_working,
)


def arriving(shape: ModelShape, launch: Launch) -> float:
    """Return the bytes of the next version's trained weights, which arrive while the current
    version still samples.

    `plan_sampler` counts them twice: if an update is shorter than a weight sync, the following
    version begins to arrive before the oldest version's last slice is sampled.
    """
    adapters = min(shape.trainable, shape.adapters)
    return float((BF16 if launch.bf16 else FP32) * (shape.trainable - adapters) + FP32 * adapters)


def staged(shape: ModelShape) -> float:
    """Return the bytes in CPU memory on rank 0: a copy of the trained weights in transfer."""
    return float(FP32 * shape.trainable)


def plan_sampler(
    shape: ModelShape, launch: Launch, work: Work, others: Sequence[ModelShape] = ()
) -> Plan:
    """Return a sampler rank's plan. `others`: models that only score, which sampler ranks hold."""
    items = (
        always(
            "sampler's copy of the weights",
            sampler_copy(shape, launch) + packed_copy(shape, launch),
        ),
        always("pending weight versions (at most two)", 2 * arriving(shape, launch)),
        always("models that only score", sum(sampler_copy(other, launch) for other in others)),
        Item("logits and working memory", sample=sampler_working(shape, launch, work)),
        Item("KV cache", sample=kv_cache(shape, launch, work)),
        always("CUDA context and libraries (assumed)", CUDA_BYTES if launch.cuda else 0.0),
    )
    read = [
        (
            "loading: every process reads the whole model in fp32",
            float(FP32 * shape.parameters * launch.per_node),
        )
    ]
    return Plan(items, tuple(read if launch.cuda else []))
