"""What a run asks of the side that computes: precision, micro-batches, caches; one setting for all
stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rl.clients import SamplerSettings, WorkerSettings
from rl.errors import UserError
from rl.learner import LearnerSettings, kept_of_gib
from rl.settings import FlowSettings, StagePlan


def worker_settings(stages: Sequence[StagePlan]) -> WorkerSettings:
    """The device side, one for the whole run. Raises UserError where stages ask for different ones."""
    found = []
    for plan in stages:
        model, optim, sampling = plan.settings.model, plan.settings.optim, plan.settings.sampling
        learner = LearnerSettings(
            token_budget=optim.token_budget, layout=optim.layout, fused=model.fused_logprobs, kept_bytes=kept_of_gib(model.kept_logits_gib),
            gradient_checkpointing=model.gradient_checkpointing, optimizer=optim.optimizer, router_replay=model.router_replay,
            router_aux_loss_coef=model.router_aux_loss_coef,
        )  # fmt: skip
        limits = (sampling.kv_cache_tokens, sampling.max_rows)
        sampler = SamplerSettings(
            *limits,
            sampling.sampler,
            model.router_replay,
            sampling.sampler_cache,
            sampling.sampler_tp,
        )
        found.append(WorkerSettings(dtype=model.precision, learner=learner, sampler=sampler))
    ranks = {
        flow.sampler_ranks
        for plan in stages
        if isinstance(flow := getattr(plan.settings, "flow", None), FlowSettings)
    }
    if len(ranks) > 1:
        raise UserError(
            "sampler_ranks holds for the whole run: set it at the recipe's top level or on the line"
        )
    if any(settings != found[0] for settings in found):
        raise UserError(
            "precision, token_budget, layout, fused_logprobs, kept_logits_gib, gradient_checkpointing, optimizer, router_replay, "
            "router_aux_loss_coef, kv_cache_tokens, max_rows, sampler, sampler_cache and sampler_tp hold for the whole run: "
            "set them at the recipe's top level or on the line"
        )
    return replace(found[0], sampler_ranks=max(ranks, default=0))
