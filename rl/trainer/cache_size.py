"""Choose the size of the sampler's KV cache where the setting `kv_cache_tokens` is not set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rl.config import RunConfig, StageConfig
from rl.errors import UserError
from rl.memory_plan import USABLE_FRACTION, LaunchShape
from rl.sampler import DEFAULT_CACHE_TOKENS
from rl.trainer.memory_requirements import compute_stage_needs, resolve_launch
from rl.trainer.memory_table import DeviceMemory, StageNeeds

# Of a device: more cache than the default is only used if the plan leaves the rest, because the
# cache then stays allocated, with its CUDA graphs, while the learner works.
_GROWTH_FRACTION = 0.8


def choose_cache_size(run: RunConfig) -> RunConfig:
    """Return the run with `kv_cache_tokens` for the devices of this launch in every stage.

    A run that cannot be planned, and a run on CPUs, has the default size.
    """
    if not torch.cuda.is_available():
        return set_cache_size(run, DEFAULT_CACHE_TOKENS)
    launch, device = resolve_launch(run.options, run.stages[0].settings.model.precision)
    try:
        return fit_cache_size(run, launch, device)
    except UserError:  # reported where the run is checked
        return set_cache_size(run, DEFAULT_CACHE_TOKENS)


def fit_cache_size(run: RunConfig, launch: LaunchShape, device: DeviceMemory) -> RunConfig:
    """Return the run with `kv_cache_tokens` set in every stage, by a rule that depends only on
    settings, model and the device's memory.

    The default is doubled while that is less than `max_rows` answers take and the memory plan,
    with the cache at every moment, is at most 80% of the device. It is halved until what is held
    while sampling fits, if that leaves room for the longest answer; if not, it is not changed.
    """
    if not launch.cuda or all(stage.settings.sampling.kv_cache_tokens for stage in run.stages):
        return set_cache_size(run, DEFAULT_CACHE_TOKENS)
    prompt = run.options.plan_prompt_tokens
    samplings = [stage.settings.sampling for stage in run.stages]
    longest = prompt + max(sampling.max_tokens for sampling in samplings)
    most = max(sampling.max_rows for sampling in samplings) * longest

    def plan(tokens: int) -> list[StageNeeds]:
        return compute_stage_needs(set_cache_size(run, tokens), launch, prompt)

    tokens = DEFAULT_CACHE_TOKENS
    while tokens < most and _peak_with_cache(plan(2 * tokens)) <= _GROWTH_FRACTION * device.memory:
        tokens *= 2
    if tokens > DEFAULT_CACHE_TOKENS:
        return set_cache_size(run, tokens)
    usable = USABLE_FRACTION * device.memory
    sizes = (DEFAULT_CACHE_TOKENS >> i for i in range(10))
    fitting = (
        size for size in sizes if size >= longest and _peak_of_sampling(plan(size)) <= usable
    )
    return set_cache_size(run, next(fitting, DEFAULT_CACHE_TOKENS))


def set_cache_size(run: RunConfig, tokens: int) -> RunConfig:
    """Return the run with `kv_cache_tokens` in the stages that do not set it."""
    tokens = max(tokens, *(stage.settings.sampling.max_tokens for stage in run.stages))
    return replace(run, stages=tuple(_set_in_stage(stage, tokens) for stage in run.stages))


def _set_in_stage(stage: StageConfig, tokens: int) -> StageConfig:
    sampling = stage.settings.sampling
    if sampling.kv_cache_tokens is not None:
        return stage
    sampling = replace(sampling, kv_cache_tokens=tokens)
    return replace(stage, settings=replace(stage.settings, sampling=sampling))


def _peak_with_cache(stages: Sequence[StageNeeds]) -> float:
    """Return the largest sum of the plans in bytes if the KV cache stays while learning."""
    peaks = [0.0]
    for needs in stages:
        size = sum(item.sample for item in needs.plan.items if item.name == "KV cache")
        sums = needs.plan.sums
        peaks.append(max(sums["sample"], *(sums[name] + size for name in ("train", "update"))))
    return max(peaks)


def _peak_of_sampling(stages: Sequence[StageNeeds]) -> float:
    return max(needs.plan.sums["sample"] for needs in stages)
