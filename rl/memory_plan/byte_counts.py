"""Compute the bytes that a GPU (or process) holds, from a model's sizes, the launch and the work of
a step. All functions are pure.

Three moments are distinguished, since they do not hold memory at the same time:
    sample  KV cache and the sampler's working memory
    train   a micro-batch: gradients, activations, logits
    update  gradients summed over ranks, the optimizer's step

The largest sum is the peak. `rl.distributed.sharding` has the bytes of each backend. Nt:
numbers in the model that are trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from kernels import estimate_saved_bytes
from rl.distributed import ADAM_8BIT_BYTES, ADAM_BYTES, BF16, FP32
from rl.learner import default_kept_bytes
from rl.memory_plan.shapes import (
    LaunchShape,
    MicroBatch,
    MicroBatchMemory,
    ModelShape,
    StepWork,
)
from rl.sampler import BLOCK_SIZE, count_processing_bytes

GIB = float(1 << 30)
PREFILL_TOKENS = 8192  # see rl.sampler
PACKED_MIN_SIZE, PACKED_MAX_SIZE = 1 << 18, 512 << 20  # see rl.sampler.linear_layers
CUDA_BYTES = 1 << 30  # context, cuBLAS, NCCL: an assumption
USABLE_FRACTION = (
    0.92  # usable fraction of a GPU's memory: above it, fragmentation may not leave enough
)


@dataclass(frozen=True)
class MemoryItem:
    """Hold the bytes of an item at each of the three moments."""

    name: str
    sample: float = 0.0
    train: float = 0.0
    update: float = 0.0


@dataclass(frozen=True)
class MemoryPlan:
    """List what a GPU holds, item by item. `host`: (purpose, bytes) of CPU memory that a
    machine needs.
    """

    items: tuple[MemoryItem, ...]
    host: tuple[tuple[str, float], ...]

    @property
    def sums(self) -> dict[str, float]:
        return {
            moment.name: sum(getattr(item, moment.name) for item in self.items)
            for moment in fields(MemoryItem)[1:]
        }

    @property
    def peak(self) -> float:
        return max(self.sums.values())


def constant_item(name: str, size: float) -> MemoryItem:
    return MemoryItem(name, size, size, size)


def plan_memory(
    shape: ModelShape,
    micro_batch_memory: MicroBatchMemory,
    launch: LaunchShape,
    work: StepWork,
    others: Sequence[ModelShape] = (),
    critics: Sequence[ModelShape] = (),
    saved_logits: float = 0.0,
) -> MemoryPlan:
    """Compute the complete plan of a rank.

    `micro_batch_memory`: memory of a micro-batch (`rl.memory_plan.tracing`). `others`: models that
    only score (a reference model, teachers). `saved_logits`: see `saved_logits_bytes`. `critics`:
    models that are trained besides this model. Their micro-batches run one after another, and are
    assumed to need no more memory than the policy's.
    """
    sampler = sampler_weight_bytes(shape, launch) if work.samples else 0.0
    items = [
        constant_item("weights", launch.sharding.weight_bytes(shape, launch)),
        constant_item("optimizer (AdamW)", launch.optimizer_bytes(shape.trainable)),
        gradient_item(shape, launch),
        constant_item("sampler's copy of the weights", sampler),
        *(critic_item(critic, launch) for critic in critics),
        constant_item(
            "models that only score", sum(sampler_copy_bytes(other, launch) for other in others)
        ),
        MemoryItem("activations", train=micro_batch_memory.activations),
        MemoryItem(
            "logits and output head",
            train=micro_batch_memory.logits,
            sample=sampler_working_bytes(shape, launch, work),
        ),
        MemoryItem("logits kept for the backward", train=saved_logits),
        MemoryItem("KV cache", sample=kv_cache_bytes(shape, launch, work)),
        temporary_item(shape, micro_batch_memory, launch),
        constant_item("CUDA context and libraries (assumed)", CUDA_BYTES if launch.cuda else 0.0),
    ]
    return MemoryPlan(tuple(items), tuple(host_memory(shape, launch)))


def gradient_item(shape: ModelShape, launch: LaunchShape) -> MemoryItem:
    """Return the bytes of the gradients: 4 Nt during a step; sharded at ZeRO stage 2; at stage 3 a
    permanent buffer.
    """
    size = launch.gradient_bytes(shape.trainable)
    return (
        constant_item("gradients", size)
        if launch.sharding.permanent_gradients
        else MemoryItem("gradients", train=size, update=size)
    )


def critic_item(shape: ModelShape, launch: LaunchShape) -> MemoryItem:
    """Return the bytes of a critic (a second trained model), except its micro-batch."""
    stays = launch.sharding.weight_bytes(shape, launch) + launch.optimizer_bytes(shape.trainable)
    grads = gradient_item(shape, launch)
    sizes = (stays + size for size in (grads.sample, grads.train, grads.update))
    return MemoryItem("critic: weights, optimizer, gradients", *sizes)


def sampler_copy_bytes(shape: ModelShape, launch: LaunchShape) -> float:
    """Return the bytes of the sampler's copy on each GPU: weights in the dtype of the computation,
    unmerged adapters in fp32. A rank of a tensor-parallel group holds only its part.
    """
    base, adapters = float(shape.parameters - shape.adapters), float(shape.adapters)
    if launch.sampler_tp > 1:
        base = (base - shape.unsplit) / launch.sampler_tp + shape.unsplit
        adapters = (adapters - shape.unsplit_adapters) / launch.sampler_tp + shape.unsplit_adapters
    return launch.compute_bytes * base + FP32 * adapters


def sampler_weight_bytes(shape: ModelShape, launch: LaunchShape) -> float:
    """Return the bytes of all copies of the weights that a sampler holds."""
    return sampler_copy_bytes(shape, launch) + packed_copy_bytes(shape, launch)


def packed_copy_bytes(shape: ModelShape, launch: LaunchShape) -> float:
    """Return the bytes of the packed copy: on a CPU in fp32, the fast decoder stores its large
    matrices a second time in another layout.
    """
    width, across = shape.head_width * shape.hidden, shape.mlp * shape.hidden
    layer = [(shape.heads + 2 * shape.key_heads) * width, shape.heads * width, 2 * across, across]
    size = FP32 * sum(
        n for n in [*layer * shape.layers, shape.vocab * shape.hidden] if n >= PACKED_MIN_SIZE
    )
    return (
        float(size)
        if shape.fast and not (launch.cuda or launch.bf16) and size <= PACKED_MAX_SIZE
        else 0.0
    )


def kv_cache_bytes(shape: ModelShape, launch: LaunchShape, work: StepWork) -> float:
    """Return the bytes of keys and values of every layer. Prompts count once per group (in the
    generic decoder once per row). A tensor-parallel rank stores only its heads.

    A paged cache counts the whole pool, allocated at the beginning, and an unused page.
    """
    layers = shape.layers if shape.caching is None else shape.caching
    per_token = (
        2 * layers * shape.key_heads * shape.head_width * launch.compute_bytes / launch.sampler_tp
    )
    if work.pages:
        return float(per_token * BLOCK_SIZE * (work.pages + 1))
    tokens = work.prompts * work.prompt + work.rows * (work.answer - 1)
    return per_token * (tokens if shape.fast else tokens + work.rows * work.prompt)


def saved_logits_bytes(
    shape: ModelShape, launch: LaunchShape, batch: MicroBatch, max_bytes: int | None
) -> float:
    """Return the bytes that the output head saves of a micro-batch on a GPU, so that its backward
    need not compute the logits again.

    `max_bytes`: allowed bytes; None: the learner's default. Off CUDA this memory is part of
    `MicroBatchMemory`.
    """
    if not launch.cuda:
        return 0.0
    most = (
        default_kept_bytes(
            launch.memory, launch.state_bytes(shape) + launch.compute_bytes * shape.parameters
        )
        if max_bytes is None
        else max_bytes
    )
    return float(estimate_saved_bytes(batch.tokens, shape.vocab, launch.compute_bytes, most))


def sampler_working_bytes(shape: ModelShape, launch: LaunchShape, work: StepWork) -> float:
    """Return the sampler's working memory, the maximum over prefill (a batch of prompts through a
    single layer), sampling (a token for every row) and attention.

    Sampling holds fp32 [rows, V] four times (logits, divided by temperature, exp, padded to blocks)
    and [prompts, V] of last logits. Attention over shared prompts holds its scores in parts,
    complete, and as probabilities. A tensor-parallel rank has its heads and columns of a layer, and
    all logits. The memory pool of CUDA graphs is separate: it holds mostly the temporaries of
    rows with logits processing.
    """
    size = launch.compute_bytes
    tokens = min(PREFILL_TOKENS, work.prompts * work.prompt)
    heads = shape.heads / launch.sampler_tp
    mlp = max(shape.mlp, shape.routed_width if shape.fast else 0) / launch.sampler_tp
    routed = 3 * shape.experts_per_token * shape.hidden if shape.fast else 0  # inputs and outputs
    reading = size * tokens * (2 * shape.hidden + routed + 3 * mlp + 6 * heads * shape.head_width)
    drawing = FP32 * shape.vocab * (4 * work.rows + work.prompts)
    attending = work.rows * heads * (work.prompt + work.answer) * (3 * FP32 + size)
    in_graphs = launch.cuda and work.pages
    processing = count_processing_bytes(work.rows, shape.vocab) if in_graphs else 0
    return max(reading, drawing, attending) + processing if work.samples else 0.0


def temporary_item(
    shape: ModelShape, micro_batch_memory: MicroBatchMemory, launch: LaunchShape
) -> MemoryItem:
    """Return the temporary memory: casts of the weights, weight-sized tensors of the backward, and
    communication buffers of the launch.
    """
    busy = micro_batch_memory.casts + micro_batch_memory.weight_sized
    sample, train, update = launch.sharding.temporary_bytes(shape, launch)
    return MemoryItem("temporary buffers", sample, busy + train, update)


def offloaded_activation_bytes(shape: ModelShape, batch: MicroBatch) -> float:
    """Return the bytes of the inputs of all layers in fp32 (bf16 weights: half as much), in pinned
    memory: torch rounds each tensor up to a power of two.
    """
    size = FP32 * batch.rows * batch.length * shape.hidden
    return float(shape.layers * 2 ** math.ceil(math.log2(size)))


def host_memory(shape: ModelShape, launch: LaunchShape) -> list[tuple[str, float]]:
    """Return (purpose, bytes) of CPU memory of a machine if the learner runs on GPUs."""
    if not launch.cuda:
        return []
    needs = [loading_memory(shape, launch)]
    if launch.optimizer.startswith("paged"):
        pages = float(ADAM_8BIT_BYTES * shape.trainable * launch.per_node)
        needs.append(("optimizer pages that do not fit on the GPU, at most", pages))
    if launch.sharding.divides:
        saved = shape.parameters if shape.trainable == shape.parameters else shape.trainable
        size = float(FP32 * saved + ADAM_BYTES * shape.trainable)
        needs.append(("saving: rank 0 gathers weights and optimizer", size))
    if launch.sharding.offload:
        size = (ADAM_BYTES + 2 * FP32) * shape.trainable * launch.per_node / launch.world
        needs.append(("optimizer and gradients, offloaded", size))
    return needs


def loading_memory(shape: ModelShape, launch: LaunchShape) -> tuple[str, float]:
    """Return (purpose, bytes) of CPU memory of a machine while its processes load the model."""
    part, numbers = "the whole model in fp32", shape.parameters
    if launch.loads_in_shards and launch.sharding.reads_shards(launch.world):
        part, numbers = "its share, one tensor at a time", shape.largest
    return f"loading: every process reads {part}", float(FP32 * numbers * launch.per_node)


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
        constant_item("sampler's copy of the weights", sampler_weight_bytes(shape, launch)),
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
    return MemoryPlan(items, (loading_memory(shape, launch),) if launch.cuda else ())
