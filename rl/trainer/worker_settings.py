"""Collect a run's worker settings (precision, micro-batches, caches), shared by all stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rl.config import AsyncRolloutSettings, SamplingSettings, StageConfig
from rl.errors import UserError
from rl.learner import LearnerSettings, kept_bytes_from_gib
from rl.runtime import SamplerSettings, WorkerSettings
from rl.sampler import DEFAULT_CACHE_TOKENS, check_features


def make_sampler_settings(sampling: SamplingSettings, router_replay: bool) -> SamplerSettings:
    """Return the settings of a rank's sampler."""
    return SamplerSettings(
        sampling.kv_cache_tokens or DEFAULT_CACHE_TOKENS,
        sampling.max_rows,
        sampling.sampler,
        router_replay,
        sampling.sampler_cache,
        sampling.sampler_tp,
        sampling.sampler_url,
        sampling.sampler_folder,
        sampling.sampler_timeout,
        sampling.sampler_command,
        sampling.sampler_memory,
    )


def collect_worker_settings(stages: Sequence[StageConfig]) -> WorkerSettings:
    """Return the worker settings of the whole run. Raises UserError if those of stages differ."""
    per_stage = []
    for plan in stages:
        model, optim = plan.settings.model, plan.settings.optim
        learner = LearnerSettings(
            token_budget=optim.token_budget,
            layout=optim.layout,
            fused=model.fused_logprobs,
            kept_bytes=kept_bytes_from_gib(model.kept_logits_gib),
            gradient_checkpointing=model.gradient_checkpointing,
            offload_activations=model.offload_activations,
            optimizer=optim.optimizer,
            router_replay=model.router_replay,
            router_aux_loss_coef=model.router_aux_loss_coef,
            context_parallel_size=optim.context_parallel_size,
        )
        sampler = make_sampler_settings(plan.settings.sampling, model.router_replay)
        per_stage.append(WorkerSettings(dtype=model.precision, learner=learner, sampler=sampler))
    flows = [
        flow
        for plan in stages
        if isinstance(flow := getattr(plan.settings, "flow", None), AsyncRolloutSettings)
    ]
    if per_stage[0].sampler.kind == "vllm" and any(flow.recompute_cache for flow in flows):
        check_features(("vllm", "cache recomputation"))
    ranks = {flow.sampler_ranks for flow in flows}
    if len(ranks) > 1:
        raise UserError(
            "sampler_ranks applies to the whole run: set it at the recipe's top level or on the "
            "command line"
        )
    if any(settings != per_stage[0] for settings in per_stage):
        raise UserError(
            "precision, token_budget, layout, context_parallel_size, fused_logprobs, "
            "kept_logits_gib, gradient_checkpointing, offload_activations, optimizer, "
            "router_replay, router_aux_loss_coef, kv_cache_tokens, max_rows, sampler, "
            "sampler_url, sampler_folder, sampler_timeout, sampler_command, sampler_memory, "
            "sampler_cache and sampler_tp apply to the whole run: set them at the recipe's top "
            "level or on the command line"
        )
    return replace(per_stage[0], sampler_ranks=max(ranks, default=0))
