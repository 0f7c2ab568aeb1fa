"""Find changes that would make a run fit: single changes of its settings or its launch, and
combinations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl.config import RunConfig
from rl.memory_plan import LaunchShape
from rl.trainer.memory_requirements import (
    TRACE_CACHE,
    collect_micro_batches,
    compute_stage_needs,
    measure_nothing,
)

# settings, and kinds of change, of which only the smallest sufficient change is listed
CACHE, TENSOR_PARALLEL = "kv_cache_tokens", "sampler_tp"
MIN_EFFECT = 0.98  # fraction of a peak: a change that leaves more than that fraction does not count


@dataclass(frozen=True)
class MemorySaving:
    """Describe a change: the words to type, its effect on a stage's settings and on the launch, and
    the peak with it.

    `kind`: a combination contains at most a single change of each kind. `costly`: the change
    affects what is learned, or costs much time.
    """

    command: str
    settings: Callable[[Any], Any]
    launch: Callable[[LaunchShape], LaunchShape]
    kind: str
    costly: bool = False
    peak: float = 0.0


def _unchanged(value: Any) -> Any:
    return value


def _setting_change(section: str, name: str, value: Any, costly: bool = False) -> MemorySaving:
    def apply(settings: Any) -> Any:
        return replace(settings, **{section: replace(getattr(settings, section), **{name: value})})

    flag = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
    return MemorySaving(flag, apply, _unchanged, name, costly)


def _sharding_change(stage: int, gpus: int, offload: bool = False) -> MemorySaving:
    def apply(launch: LaunchShape) -> LaunchShape:
        return replace(
            launch, world=gpus, per_node=min(gpus, 8), zero_stage=stage, offload=offload, fsdp=False
        )

    name = f"zero{stage}{'_offload' if offload else ''}"
    return MemorySaving(
        f"accelerate_configs/{name}.yaml on {gpus} GPUs",
        _unchanged,
        apply,
        "launch",
        costly=offload,
    )


def _list_candidates(run: RunConfig, launch: LaunchShape) -> list[MemorySaving]:
    model, optim, sampling = (
        getattr(run.stages[-1].settings, name) for name in ("model", "optim", "sampling")
    )
    changes = [_setting_change("model", "gradient_checkpointing", True)] * (
        not model.gradient_checkpointing
    )
    changes += [_setting_change("model", "fused_logprobs", True)] * (not model.fused_logprobs)
    changes += [_setting_change("model", "kept_logits_gib", 0)] * (
        launch.cuda and model.fused_logprobs and model.kept_logits_gib != 0
    )
    changes += [_setting_change("model", "lora_rank", 32, costly=True)] * (not model.lora_rank)
    changes += [
        _setting_change("optim", "token_budget", max(1, optim.token_budget // divisor))
        for divisor in (2, 4)
    ]
    changes.append(_setting_change("sampling", "max_rows", max(1, sampling.max_rows // 4)))
    changes += [
        _setting_change("sampling", "kv_cache_tokens", size) for size in _halved_cache_sizes(run)
    ]
    # these changes exclude each other, and sharding
    if launch.cuda and launch.zero_stage is None and not launch.fsdp:
        changes += [
            replace(_setting_change("model", "base_dtype", "4bit", costly=True), kind="launch")
        ] * bool(model.lora_rank)
        changes.append(
            replace(_setting_change("optim", "optimizer", "adamw_8bit", costly=True), kind="launch")
        )
    if launch.cuda:
        gpus = max(launch.world, 8)
        now = 3 if launch.fsdp else launch.zero_stage or 0
        shardings = [
            _sharding_change(stage, gpus)
            for stage in (1, 2, 3)
            if stage > now or gpus > launch.world
        ]
        shardings += [_sharding_change(3, gpus, offload=True)] * (not launch.offload)
        # a tensor-parallel group consists of processes of a single machine
        if min(gpus, 8) % max(stage.settings.sampling.sampler_tp for stage in run.stages) == 0:
            changes += shardings
        changes += _tensor_parallel_changes(run, launch, gpus)
    return changes


def _tensor_parallel_changes(run: RunConfig, launch: LaunchShape, gpus: int) -> list[MemorySaving]:
    """Return samplers shared by 2, 4 or 8 processes of a machine, where the policy's heads and
    columns can be divided among them.
    """
    settings, changes = [stage.settings for stage in run.stages], []
    for size in (2, 4, 8):
        change = _setting_change("sampling", TENSOR_PARALLEL, size)
        if launch.per_node % size:  # more processes have to be launched
            change = replace(
                change,
                command=f"{change.command} on {gpus} GPUs",
                launch=_launch_with_gpus(gpus, size),
            )
        try:
            compute_stage_needs(
                run,
                change.launch(launch),
                1,
                [change.settings(stage_settings) for stage_settings in settings],
                measure_nothing,
            )
        except ValueError:  # these settings, this model or so many processes do not fit together
            continue
        changes += [change] * (
            size > max(stage_settings.sampling.sampler_tp for stage_settings in settings)
        )
    return changes


def _launch_with_gpus(gpus: int, size: int) -> Callable[[LaunchShape], LaunchShape]:
    """Return a launch change to `gpus` GPUs, for a machine whose GPUs are no multiple of `size`."""
    return lambda launch: (
        replace(launch, world=gpus, per_node=min(gpus, 8)) if launch.per_node % size else launch
    )


def _halved_cache_sizes(run: RunConfig) -> list[int]:
    """Return halvings of the KV cache, down to the size of the longest prompt and answer of any
    stage.
    """
    now = run.stages[-1].settings.sampling.kv_cache_tokens
    least = (
        max(stage.settings.sampling.max_tokens for stage in run.stages)
        + run.options.plan_prompt_tokens
    )
    return [now >> i for i in range(1, 12) if now >> i >= least]


def queue_traces(run: RunConfig, launch: LaunchShape, prompt: int) -> None:
    """Start computing what the run's plan and its changes need, if helper processes exist."""
    _queue_traces(
        run, launch, prompt, [[], *([change] for change in _list_candidates(run, launch))]
    )


def find_savings(run: RunConfig, launch: LaunchShape, prompt: int) -> list[MemorySaving]:
    """Return single changes that lower the peak of the run, the most effective first."""
    bound = MIN_EFFECT * _compute_peak(run, launch, prompt, [])
    candidates = _list_candidates(run, launch)
    _queue_traces(
        run,
        launch,
        prompt,
        [
            [change]
            for change in candidates
            if _compute_lower_bound(run, launch, prompt, [change]) <= bound
        ],
    )
    evaluated = [
        replace(change, peak=_compute_peak(run, launch, prompt, [change], bound))
        for change in candidates
    ]
    return sorted(
        (change for change in evaluated if change.peak < bound), key=lambda change: change.peak
    )


def find_combination(
    run: RunConfig, launch: LaunchShape, prompt: int, changes: Sequence[MemorySaving], limit: float
) -> tuple[list[MemorySaving], float]:
    """Return (changes, peak): changes that make the run fit in combination. Costly changes are
    included only if the others are not enough.

    The list is empty if all changes together are not enough.
    """
    selected: list[MemorySaving] = []
    peak = _compute_peak(run, launch, prompt, [])
    ordered = sorted(changes, key=lambda change: (change.costly, change.peak))
    for i, change in enumerate(ordered):
        trial = _add_change(selected, change)
        # meanwhile compute what comes next if this change helps
        if (
            TRACE_CACHE.has_helpers
            and _compute_lower_bound(run, launch, prompt, trial) <= MIN_EFFECT * peak
        ):
            following = [_add_change(trial, change) for change in ordered[i + 1 : i + 2]]
            everything = trial  # for the case that nothing less is enough
            for change in ordered[i + 1 :]:
                everything = (
                    everything
                    if change.kind in {other.kind for other in everything}
                    else _add_change(everything, change)
                )
            _queue_traces(run, launch, prompt, [trial, *following, everything])
        lower = _compute_peak(run, launch, prompt, trial, MIN_EFFECT * peak)
        if lower < MIN_EFFECT * peak:
            selected, peak = trial, lower
        if peak <= limit:
            return _minimize_combination(run, launch, prompt, selected, changes, limit)
    return [], peak


def _add_change(selected: Sequence[MemorySaving], change: MemorySaving) -> list[MemorySaving]:
    """Add `change` and replace a change of the same kind."""
    return [*(other for other in selected if other.kind != change.kind), change]


def _minimize_combination(
    run: RunConfig,
    launch: LaunchShape,
    prompt: int,
    selected: list[MemorySaving],
    changes: Sequence[MemorySaving],
    limit: float,
) -> tuple[list[MemorySaving], float]:
    """Return (changes, peak): the combination with the smallest tensor-parallel group and the
    largest KV cache that still fit.
    """
    others = [change for change in selected if change.kind not in (CACHE, TENSOR_PARALLEL)]
    caches = [[], *([cache] for cache in _order_least_first(changes, CACHE))]
    teams = [[], *([team] for team in _order_least_first(changes, TENSOR_PARALLEL))]
    for team, cache in ((team, cache) for team in teams for cache in caches):
        peak = _compute_peak(run, launch, prompt, [*others, *team, *cache], limit)
        if peak <= limit:
            return [*others, *team, *cache], peak
    raise AssertionError("the selected changes fit")


def _order_least_first(changes: Sequence[MemorySaving], kind: str) -> list[MemorySaving]:
    return sorted(
        (change for change in changes if change.kind == kind), key=lambda change: -change.peak
    )


def select_listed(changes: Sequence[MemorySaving], limit: float) -> list[MemorySaving]:
    """Return the changes to list. Of several cache sizes or tensor-parallel sizes, list only the
    smallest change that fits, or the most effective if none fits.
    """
    best = []
    for kind in (CACHE, TENSOR_PARALLEL):
        ordered = _order_least_first(changes, kind)
        best += (
            [next((change for change in ordered if change.peak <= limit), ordered[-1])]
            if ordered
            else []
        )
    return [
        change
        for change in changes
        if change.kind not in (CACHE, TENSOR_PARALLEL) or change in best
    ]


def _compute_peak(
    run: RunConfig,
    launch: LaunchShape,
    prompt: int,
    changes: Sequence[MemorySaving],
    bound: float = math.inf,
) -> float:
    """Return the run's peak with these changes. If its lower bound exceeds `bound`, return the
    lower bound.
    """
    if math.isfinite(bound):  # tracing a micro-batch takes long
        least = _compute_lower_bound(run, launch, prompt, changes)
        if least > bound:
            return least
    settings, launch = _apply_changes(run, launch, changes)
    return max(needs.plan.peak for needs in compute_stage_needs(run, launch, prompt, settings))


def _compute_lower_bound(
    run: RunConfig, launch: LaunchShape, prompt: int, changes: Sequence[MemorySaving]
) -> float:
    """Return a lower bound of the run's peak with these changes: a micro-batch counts as 0 B."""
    settings, launch = _apply_changes(run, launch, changes)
    return max(
        needs.plan.peak
        for needs in compute_stage_needs(run, launch, prompt, settings, measure_nothing)
    )


def _apply_changes(
    run: RunConfig, launch: LaunchShape, changes: Sequence[MemorySaving]
) -> tuple[list[Any], LaunchShape]:
    """Return (the stages' settings, the launch) with these changes."""
    settings = [stage.settings for stage in run.stages]
    for change in changes:
        settings, launch = (
            [change.settings(stage_settings) for stage_settings in settings],
            change.launch(launch),
        )
    return settings, launch


def _queue_traces(
    run: RunConfig, launch: LaunchShape, prompt: int, combinations: Sequence[Sequence[MemorySaving]]
) -> None:
    """Queue the micro-batches of these sets of changes for tracing, in this order, if helper
    processes exist.
    """
    micro_batches = []
    for changes in combinations if TRACE_CACHE.has_helpers else ():
        settings, changed = _apply_changes(run, launch, changes)
        micro_batches += collect_micro_batches(run, changed, prompt, settings)
    TRACE_CACHE.queue_runs(micro_batches)
