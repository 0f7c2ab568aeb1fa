"""Estimate the memory that a run would need, before it begins."""

from rl.memory_plan.byte_counts import (
    GIB,
    USABLE_FRACTION,
    MemoryItem,
    MemoryPlan,
    offloaded_activation_bytes,
    plan_memory,
    plan_sampler_memory,
    saved_logits_bytes,
    staged_weight_bytes,
)
from rl.memory_plan.shapes import (
    LaunchShape,
    MicroBatch,
    MicroBatchMemory,
    ModelShape,
    StepWork,
    compute_concurrent_rows,
    count_pool_pages,
    largest_micro_batch,
)
from rl.memory_plan.tracing import (
    ComputeConfig,
    ModelSkeleton,
    load_model_skeleton,
    trace_micro_batch,
)

__all__ = [
    "ComputeConfig",
    "GIB",
    "MicroBatchMemory",
    "LaunchShape",
    "MicroBatch",
    "ModelShape",
    "MemoryItem",
    "MemoryPlan",
    "USABLE_FRACTION",
    "ModelSkeleton",
    "StepWork",
    "saved_logits_bytes",
    "largest_micro_batch",
    "load_model_skeleton",
    "plan_memory",
    "offloaded_activation_bytes",
    "plan_sampler_memory",
    "count_pool_pages",
    "compute_concurrent_rows",
    "staged_weight_bytes",
    "trace_micro_batch",
]
