"""Compute the bytes that a GPU (or process) holds, from a model's sizes, the launch and the work of
a step. All functions are pure.

Three moments are distinguished, since they do not hold memory at the same time:
    sample  KV cache and the sampler's working memory
    train   a micro-batch: gradients, activations, logits
    update  gradients summed over ranks, the optimizer's step

The largest sum is the peak. Every constant below is the size of a dtype or a default of DeepSpeed
0.19 or torch; none is fitted. N: numbers in the model, of which Nt are trained; W: ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from kernels import estimate_saved_bytes
from rl.distributed import collectives
from rl.learner import (
    ADAM_8BIT_BYTES,
    ADAM_BYTES,
    default_kept_bytes,
    gradient_bytes,
    optimizer_bytes,
)
from rl.memory_plan.shapes import (
    BF16,
    FP32,
    LaunchShape,
    MicroBatch,
    MicroBatchMemory,
    ModelShape,
    StepWork,
)
from rl.sampler import BLOCK_SIZE

GIB = float(1 << 30)
# 4 bit, an 8-bit scale for 64 numbers, and an fp32 scale for 256 scales (arXiv 2305.14314)
NF4 = (4 + 8 / 64 + 32 / (64 * 256)) / 8
REDUCE_BUCKET = 500_000_000  # numbers in a DeepSpeed bucket (reduce_bucket_size)
# ZeRO-3 keeps what is used again within 1e9 numbers (stage3_max_reuse_distance), forwards and back
REUSE_DISTANCE = 500_000_000
PREFETCH = 50_000_000  # stage3_prefetch_bucket_size
# ZeRO-3 does not shard smaller parameters (stage3_param_persistence_threshold)
PERSISTENCE_THRESHOLD = 100_000
SUB_GROUP = 1_000_000_000  # numbers that ZeRO-3 updates at once
PREFILL_TOKENS = 8192  # see rl.sampler
PACKED_MIN_SIZE, PACKED_MAX_SIZE = 1 << 18, 512 << 20  # see rl.sampler.mkldnn_layout
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
    """List what a GPU holds, item by item. `host_memory`: (purpose, bytes) of CPU memory that a
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
    sampler = (
        sampler_copy_bytes(shape, launch) + packed_copy_bytes(shape, launch)
        if work.samples
        else 0.0
    )
    items = [
        constant_item("weights", weight_bytes(shape, launch)),
        constant_item("optimizer (AdamW)", optimizer_bytes(shape.trainable, launch)),
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


def weight_bytes(shape: ModelShape, launch: LaunchShape) -> float:
    """Return the bytes of the weights: 4 N; under DeepSpeed in bf16 2 N; at ZeRO stage 3 sharded,
    except small parameters, with a second copy per machine if requested; FSDP2 shards all.

    A frozen base in bf16 or in 4 bit needs less, unless all weights are in bf16 already.
    """
    whole = float(FP32 * shape.parameters)
    if launch.zero_stage is None and launch.base_dtype != "fp32":
        whole -= (FP32 - BF16) * shape.matrices + (BF16 - NF4) * (
            shape.linears if launch.base_dtype == "4bit" else 0
        )
    if launch.fsdp:
        return whole / launch.num_shards
    if launch.zero_stage is None:
        return whole
    if launch.zero_stage == 3:
        large = shape.parameters - shape.small
        second = large / launch.hpz if launch.hpz > 1 else 0.0
        return launch.weight_bytes * (large / launch.world + second + shape.small)
    return launch.weight_bytes * shape.parameters


def gradient_item(shape: ModelShape, launch: LaunchShape) -> MemoryItem:
    """Return the bytes of the gradients: 4 Nt during a step; sharded at ZeRO stage 2; at stage 3 a
    permanent buffer.
    """
    size = gradient_bytes(shape.trainable, launch)
    return (
        constant_item("gradients", size)
        if launch.zero_stage == 3
        else MemoryItem("gradients", train=size, update=size)
    )


def critic_item(shape: ModelShape, launch: LaunchShape) -> MemoryItem:
    """Return the bytes of a critic (a second trained model), except its micro-batch."""
    stays, grads = (
        weight_bytes(shape, launch) + optimizer_bytes(shape.trainable, launch),
        gradient_item(shape, launch),
    )
    return MemoryItem(
        "critic: weights, optimizer, gradients",
        stays + grads.sample,
        stays + grads.train,
        stays + grads.update,
    )


def sampler_copy_bytes(shape: ModelShape, launch: LaunchShape) -> float:
    """Return the bytes of the sampler's copy on each GPU: weights in the dtype of the computation,
    unmerged adapters in fp32. A rank of a tensor-parallel group holds only its part.
    """
    base, adapters = float(shape.parameters - shape.adapters), float(shape.adapters)
    if launch.sampler_tp > 1:
        base = (base - shape.unsplit) / launch.sampler_tp + shape.unsplit
        adapters = (adapters - shape.unsplit_adapters) / launch.sampler_tp + shape.unsplit_adapters
    return launch.compute_bytes * base + FP32 * adapters


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
    stays = (
        weight_bytes(shape, launch)
        + gradient_bytes(shape.trainable, launch)
        + optimizer_bytes(shape.trainable, launch)
    )
    most = (
        default_kept_bytes(launch.memory, stays + launch.compute_bytes * shape.parameters)
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
    all logits.
    """
    size = launch.compute_bytes
    tokens = min(PREFILL_TOKENS, work.prompts * work.prompt)
    heads, mlp = shape.heads / launch.sampler_tp, shape.mlp / launch.sampler_tp
    reading = size * tokens * (2 * shape.hidden + 3 * mlp + 6 * heads * shape.head_width)
    drawing = FP32 * shape.vocab * (4 * work.rows + work.prompts)
    attending = work.rows * heads * (work.prompt + work.answer) * (3 * FP32 + size)
    return max(reading, drawing, attending) if work.samples else 0.0


def temporary_item(
    shape: ModelShape, micro_batch_memory: MicroBatchMemory, launch: LaunchShape
) -> MemoryItem:
    """Return the temporary memory: casts of the weights, weight-sized tensors of the backward, and
    communication buffers of the launch.
    """
    busy = micro_batch_memory.casts + micro_batch_memory.weight_sized
    in_bucket = min(shape.trainable, REDUCE_BUCKET)
    # CPU memory is allocated on the first write
    reserved = REDUCE_BUCKET if launch.cuda else in_bucket
    # stages 1 and 2 allocate the bucket for each backward and fill it while activations are freed
    early = REDUCE_BUCKET if launch.cuda else 0
    name = "temporary buffers"
    if launch.fsdp:
        return MemoryItem(name, train=busy + gathered_fsdp_bytes(shape, launch))
    if launch.zero_stage in (None, 0):
        if launch.world == 1:
            return MemoryItem(name, train=busy)
        # a bucket of gradients in a flat buffer
        bucket = min(collectives.SUM_BUCKET_BYTES, FP32 * shape.trainable)
        return MemoryItem(name, train=busy, update=bucket)
    mine = FP32 * shape.trainable / launch.world
    if launch.zero_stage == 1:
        return MemoryItem(name, train=busy + FP32 * early, update=FP32 * reserved + mine)
    if launch.zero_stage == 2:
        sent = FP32 * in_bucket if launch.bf16 else 0.0  # the bucket in fp32, for communication
        # otherwise all gradients are sent after the last layer's backward
        during = sent if shape.trainable > REDUCE_BUCKET else 0.0
        size = launch.weight_bytes
        return MemoryItem(
            name, train=busy + size * early + during, update=size * reserved + sent + mine
        )
    bucket = FP32 * reserved
    gathered = gathered_zero3_bytes(shape, launch)
    sending = FP32 * in_bucket  # a second copy of a bucket's gradients, partitioned by rank
    during = sending if shape.trainable > REDUCE_BUCKET else 0.0
    step = 0.0 if launch.offload else FP32 * min(shape.trainable / launch.world, SUB_GROUP)
    return MemoryItem(
        name, bucket, bucket + busy + gathered + during, bucket + max(gathered + sending, step)
    )


def gathered_zero3_bytes(shape: ModelShape, launch: LaunchShape) -> float:
    """Return the peak bytes of weights gathered by ZeRO-3: all that is used again soon, the
    prefetched weights, and the current layer.
    """
    large = shape.parameters - shape.small
    return launch.weight_bytes * min(large, REUSE_DISTANCE + PREFETCH + shape.largest)


def gathered_fsdp_bytes(shape: ModelShape, launch: LaunchShape) -> float:
    """Return the peak bytes gathered by FSDP2: embeddings and head, the current and the next layer;
    and a unit's gradients to reduce.
    """
    outside = shape.parameters - shape.layers * shape.layer
    summed = max(outside, shape.layer) * shape.trainable / shape.parameters
    return launch.compute_bytes * (outside + 2 * shape.layer) + FP32 * summed


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
    if launch.loads_in_shards and (launch.zero_stage == 3 or launch.fsdp):
        needs = [
            (
                "loading: every process reads its share, one tensor at a time",
                float(FP32 * shape.largest * launch.per_node),
            )
        ]
    else:
        needs = [
            (
                "loading: every process reads the whole model in fp32",
                float(FP32 * shape.parameters * launch.per_node),
            )
        ]
    if launch.optimizer.startswith("paged"):
        needs.append(
            (
                "optimizer pages that do not fit on the GPU, at most",
                float(ADAM_8BIT_BYTES * shape.trainable * launch.per_node),
            )
        )
    if launch.zero_stage is not None or launch.fsdp:
        saving = (
            FP32 * (shape.parameters if shape.trainable == shape.parameters else shape.trainable)
            + ADAM_BYTES * shape.trainable
        )
        needs.append(("saving: rank 0 gathers weights and optimizer", float(saving)))
    if launch.offload:
        needs.append(
            (
                "optimizer and gradients, offloaded",
                (ADAM_BYTES + 2 * FP32) * shape.trainable * launch.per_node / launch.world,
            )
        )
    return needs
