"""Estimate the memory that a run would need, before it begins."""

from rl.memory.given import Held, Launch, MicroBatch, ModelShape, Work
from rl.memory.plan import GIB, ROOM, Plan, kept_logits, plan
from rl.memory.roles import plan_sampler, staged
from rl.memory.step import micro_batch, pool_pages, sampled_at_once
from rl.memory.teams import check_team_holds
from rl.memory.trace import Arithmetic, Skeleton
from rl.memory.traces import Traces, follow

__all__ = [
    "Arithmetic",
    "GIB",
    "Held",
    "Launch",
    "MicroBatch",
    "ModelShape",
    "Plan",
    "ROOM",
    "Skeleton",
    "Traces",
    "Work",
    "check_team_holds",
    "follow",
    "kept_logits",
    "micro_batch",
    "plan",
    "plan_sampler",
    "pool_pages",
    "sampled_at_once",
    "staged",
]
