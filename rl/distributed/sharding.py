"""Describe how a launch divides weights, gradients and optimizer over its processes: one class for
each backend.

A class states what its backend needs and excludes, and the bytes that a rank holds with it. Every
constant is the size of a dtype or a default of DeepSpeed 0.19; none is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from rl.distributed.collectives import SUM_BUCKET_BYTES

FP32, BF16 = 4, 2
# 4 bit, an 8-bit scale for 64 numbers, and an fp32 scale for 256 scales (arXiv 2305.14314)
NF4 = (4 + 8 / 64 + 32 / (64 * 256)) / 8
ADAM_BYTES = 8  # bytes per trained parameter: two fp32 moments
ADAM_8BIT_BYTES = 2 + 2 * FP32 / 256  # two moments, each with an fp32 scale per 256 numbers
REDUCE_BUCKET = 500_000_000  # numbers in a DeepSpeed bucket (reduce_bucket_size)
# ZeRO-3 keeps what is used again within 1e9 numbers (stage3_max_reuse_distance), forwards and back
REUSE_DISTANCE = 500_000_000
PREFETCH = 50_000_000  # stage3_prefetch_bucket_size
# ZeRO-3 does not shard smaller parameters (stage3_param_persistence_threshold)
PERSISTENCE_THRESHOLD = 100_000
SUB_GROUP = 1_000_000_000  # numbers that ZeRO-3 updates at once

PhaseBytes = tuple[float, float, float]  # bytes while sampling, in a micro-batch, in an update


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Count the numbers (tensor elements) of a model.

    parameters  numbers in all parameters
    trainable   numbers in trained parameters
    small       numbers in parameters that ZeRO-3 does not shard
    largest     numbers in the largest parameter
    layers      number of layers
    layer       numbers in a layer, which FSDP2 gathers as a unit
    layer_experts  numbers in the experts of a layer
    matrices    numbers in frozen matrices, which a bf16 base stores in bf16
    linears     numbers in frozen matrices that a 4-bit base stores in 4 bit
    """

    parameters: int
    trainable: int
    small: int
    largest: int
    layers: int
    layer: int = 0
    layer_experts: int = 0
    matrices: int = 0
    linears: int = 0


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Replicate the state on every rank (DDP), or hold it in a single process; the base of the
    classes that divide it.
    """

    level: ClassVar[int] = 0  # the ZeRO stage that divides as much
    divides: ClassVar[bool] = False  # the backend moves and divides the model
    # the backend stores all weights in the dtype of the arithmetic and drives the backward
    owns_weights: ClassVar[bool] = False
    float32_embeddings: ClassVar[bool] = True  # a bf16 embedding may return fp32
    keeps_gradients: ClassVar[bool] = True  # each rank accumulates full gradients in place
    permanent_gradients: ClassVar[bool] = False  # their buffer is allocated once
    offload: bool = False  # the optimizer is in CPU memory

    def reads_shards(self, world: int) -> bool:
        """Return whether each rank holds and reads only a shard of the weights."""
        return False

    def rescale(self, world: int, per_machine: int) -> Sharding:
        """Return the sharding for another number of processes, `per_machine` on each machine."""
        return self

    def describe(self, world: int) -> str:
        """Return the name for a message, empty for a single process."""
        return "DDP" if world > 1 else ""

    def can_change_to(self, other: Sharding) -> bool:
        """Return whether `other` leaves less on a GPU of the same launch."""
        return other.level > self.level or (other.offload and not self.offload)

    def weight_bytes(self, counts: ParameterCounts, launch: Launch) -> float:
        """Return the bytes of the weights: 4 N, or less with a frozen base in bf16 or 4 bit."""
        whole = float(FP32 * counts.parameters)
        if launch.base_dtype != "fp32":
            whole -= (FP32 - BF16) * counts.matrices
        if launch.base_dtype == "4bit":
            whole -= (BF16 - NF4) * counts.linears
        return whole

    def adam_bytes(self, trained: float, world: int) -> float:
        """Return the bytes of AdamW's fp32 state."""
        return ADAM_BYTES * trained

    def gradient_bytes(self, trained: float, world: int) -> float:
        """Return the bytes of the gradients during a step: 4 for each trained parameter."""
        return FP32 * trained

    def temporary_bytes(self, counts: ParameterCounts, launch: Launch) -> PhaseBytes:
        """Return the bytes of communication buffers and gathered weights."""
        # a bucket of gradients in a flat buffer
        bucket = min(SUM_BUCKET_BYTES, FP32 * counts.trainable)
        return 0.0, 0.0, bucket if launch.world > 1 else 0.0


@dataclass(frozen=True, kw_only=True)
class FSDPSharding(Sharding):
    """Shard the state by FSDP2. `replicas`: copies of it, one for each machine (HSDP)."""

    level: ClassVar[int] = 3
    divides: ClassVar[bool] = True
    float32_embeddings: ClassVar[bool] = False
    keeps_gradients: ClassVar[bool] = False
    replicas: int = 1

    def num_shards(self, world: int) -> int:
        """Return how many ranks hold a copy of the state together."""
        return world // self.replicas

    def reads_shards(self, world: int) -> bool:
        return True

    def rescale(self, world: int, per_machine: int) -> Sharding:
        return FSDPSharding()

    def describe(self, world: int) -> str:
        return "FSDP2" if self.replicas == 1 else f"HSDP of {self.num_shards(world)}"

    def weight_bytes(self, counts: ParameterCounts, launch: Launch) -> float:
        return super().weight_bytes(counts, launch) / self.num_shards(launch.world)

    def adam_bytes(self, trained: float, world: int) -> float:
        return ADAM_BYTES * trained / self.num_shards(world)

    def gradient_bytes(self, trained: float, world: int) -> float:
        return FP32 * trained / self.num_shards(world)

    def temporary_bytes(self, counts: ParameterCounts, launch: Launch) -> PhaseBytes:
        # gathered: embeddings and head, the current and the next layer; a unit's gradients
        outside = counts.parameters - counts.layers * counts.layer
        layer = counts.layer - counts.layer_experts * (1 - 1 / launch.expert_parallel_size)
        summed = max(outside, layer) * counts.trainable / counts.parameters
        return 0.0, launch.compute_bytes * (outside + 2 * layer) + FP32 * summed, 0.0


@dataclass(frozen=True, kw_only=True)
class ZeroSharding(Sharding):
    """Shard the state by DeepSpeed's ZeRO `stage`. `hpz`: number of ranks that hold stage 3's
    second copy of the weights together, 1 without one. `hpz_is_auto`: it follows the launch.
    """

    divides: ClassVar[bool] = True
    owns_weights: ClassVar[bool] = True
    stage: int = 0
    hpz: int = 1
    hpz_is_auto: bool = field(default=False, compare=False)

    def rescale(self, world: int, per_machine: int) -> Sharding:
        rows = per_machine if per_machine < world else 1
        return replace(self, hpz=rows) if self.hpz_is_auto else self

    @property
    def level(self) -> int:  # type: ignore[override]
        return self.stage

    @property
    def keeps_gradients(self) -> bool:  # type: ignore[override]
        return self.stage == 0

    @property
    def permanent_gradients(self) -> bool:  # type: ignore[override]
        return self.stage == 3

    @property
    def config_file(self) -> str:
        """Return the accelerate config that launches it."""
        return f"accelerate_configs/zero{self.stage}{'_offload' if self.offload else ''}.yaml"

    def reads_shards(self, world: int) -> bool:
        return self.stage == 3 and world > 1

    def describe(self, world: int) -> str:
        return f"ZeRO-{self.stage}" + (" with the optimizer on the CPU" if self.offload else "")

    def weight_bytes(self, counts: ParameterCounts, launch: Launch) -> float:
        if self.stage < 3:
            return launch.weight_bytes * counts.parameters
        large = counts.parameters - counts.small
        second = large / self.hpz if self.hpz > 1 else 0.0
        return launch.weight_bytes * (large / launch.world + second + counts.small)

    def adam_bytes(self, trained: float, world: int) -> float:
        if self.offload:
            return 0.0
        # with an fp32 copy of the parameters, in fp32 training too
        return (ADAM_BYTES + FP32) * trained / world if self.stage else ADAM_BYTES * trained

    def gradient_bytes(self, trained: float, world: int) -> float:
        if self.stage == 3 and self.offload:
            return 0.0
        return FP32 * trained / (world if self.stage > 1 else 1)

    def temporary_bytes(self, counts: ParameterCounts, launch: Launch) -> PhaseBytes:
        if self.stage == 0:
            return super().temporary_bytes(counts, launch)
        trained = counts.trainable
        in_bucket = FP32 * min(trained, REDUCE_BUCKET)
        # CPU memory is allocated on the first write
        reserved = REDUCE_BUCKET if launch.cuda else min(trained, REDUCE_BUCKET)
        # stages 1 and 2 allocate the bucket for each backward and fill it while activations are
        # freed
        early, local = REDUCE_BUCKET if launch.cuda else 0, FP32 * trained / launch.world
        overflows = trained > REDUCE_BUCKET  # else all is sent after the last layer's backward
        if self.stage == 1:
            return 0.0, FP32 * early, FP32 * reserved + local
        if self.stage == 2:
            sent = in_bucket if launch.bf16 else 0.0  # the bucket in fp32, for communication
            size = launch.weight_bytes
            return 0.0, size * early + sent * overflows, size * reserved + sent + local
        bucket = FP32 * reserved
        # weights that are used again soon, the prefetched weights, and the current layer
        large = counts.parameters - counts.small
        gathered = launch.weight_bytes * min(large, REUSE_DISTANCE + PREFETCH + counts.largest)
        # `in_bucket` here: a second copy of a bucket's gradients, partitioned by rank
        step = 0.0 if self.offload else FP32 * min(trained / launch.world, SUB_GROUP)
        return (
            bucket,
            bucket + gathered + in_bucket * overflows,
            bucket + max(gathered + in_bucket, step),
        )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Describe the processes of a run and what they store. `memory`: bytes of each GPU, 0 if
    unknown.

    `optimizer`: the setting of that name; `base_dtype`: dtype of frozen matrices, as a setting
    names it; `expert_parallel_size`: number of ranks that divide the experts.
    """

    cuda: bool
    bf16: bool
    world: int = 1
    per_node: int = 1
    memory: float = 0.0
    sharding: Sharding = Sharding()
    optimizer: str = "adamw"
    base_dtype: str = "fp32"
    expert_parallel_size: int = 1

    @property
    def compute_bytes(self) -> int:
        return BF16 if self.bf16 else FP32

    @property
    def weight_bytes(self) -> int:
        """Return the bytes per weight in the learner: fp32, unless the backend stores all weights
        in bf16 and its optimizer has the fp32 copy.
        """
        return BF16 if self.sharding.owns_weights and self.bf16 else FP32

    def optimizer_bytes(self, trained: float) -> float:
        """Return the optimizer's bytes on a rank. Paged state does not count, since its pages leave
        a full GPU.
        """
        if self.sharding.offload or self.optimizer.startswith("paged"):
            return 0.0
        if self.optimizer == "adamw_8bit":
            return ADAM_8BIT_BYTES * trained
        return self.sharding.adam_bytes(trained, self.world)

    def gradient_bytes(self, trained: float) -> float:
        """Return the gradients' bytes on a rank during a step."""
        return self.sharding.gradient_bytes(trained, self.world)

    def state_bytes(self, counts: ParameterCounts) -> float:
        """Return the bytes of weights, gradients and optimizer on a rank during a step."""
        return (
            self.sharding.weight_bytes(counts, self)
            + self.gradient_bytes(counts.trainable)
            + self.optimizer_bytes(counts.trainable)
        )
