"""What a rank holds that samples and does not learn (`sampler_ranks`)."""

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
    """The next version's trained weights, which land beside those that are drawn from.

    Twice: where an update is shorter than a landing, the version after it begins to land before the
    last slice by the oldest is drawn.
    """
    adapters = min(shape.trainable, shape.adapters)
    return float((BF16 if launch.bf16 else FP32) * (shape.trainable - adapters) + FP32 * adapters)


def staged(shape: ModelShape) -> float:
    """On rank 0, in CPU memory: a copy of the trained weights on their way."""
    return float(FP32 * shape.trainable)


def plan_sampler(
    shape: ModelShape, launch: Launch, work: Work, others: Sequence[ModelShape] = ()
) -> Plan:
    """A sampler's part of `plan`. `others`: models that only score, which samplers hold."""
    items = (
        always(
            "sampler's copy of the weights",
            sampler_copy(shape, launch) + packed_copy(shape, launch),
        ),
        always("the next version, and one that follows at its heels", 2 * arriving(shape, launch)),
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
