"""Find changes of a run's settings or its launch that would lower its peak, each alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl.config import RunConfig
from rl.distributed import ZeroSharding
from rl.memory_plan import LaunchShape
from rl.sampler import DEFAULT_CACHE_TOKENS
from rl.trainer.memory_requirements import MeasureMicroBatch, compute_stage_needs, measure_nothing

# settings, and kinds of change, of which only the smallest sufficient change is listed
CACHE, TENSOR_PARALLEL, CONTEXT_PARALLEL = "kv_cache_tokens", "sampler_tp", "context_parallel_size"
MIN_EFFECT = 0.98  # fraction of a peak: a change that leaves more than that fraction does not count


@dataclass(frozen=True)
class MemorySaving:
    """Describe a change: the words to type, its effect on a stage's settings and on the launch, and
    the peak with it.

    `kind`: the setting that changes, or "launch".
    """

    command: str
    settings: Callable[[Any], Any]
    launch: Callable[[LaunchShape], LaunchShape]
    kind: str
    peak: float = 0.0


def _unchanged(value: Any) -> Any:
    return value


def _setting_change(section: str, name: str, value: Any) -> MemorySaving:
    def apply(settings: Any) -> Any:
        return replace(settings, **{section: replace(getattr(settings, section), **{name: value})})

    flag = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
    return MemorySaving(flag, apply, _unchanged, name)


def _sharding_change(sharding: ZeroSharding, gpus: int) -> MemorySaving:
    def apply(launch: LaunchShape) -> LaunchShape:
        return replace(launch, world=gpus, per_node=min(gpus, 8), sharding=sharding)

    return MemorySaving(f"{sharding.config_file} on {gpus} GPUs", _unchanged, apply, "launch")


def _list_candidates(run: RunConfig, launch: LaunchShape) -> list[MemorySaving]:
    model, optim, sampling = (
        getattr(run.stages[-1].settings, name) for name in ("model", "optim", "sampling")
    )
    changes = [_setting_change("model", "gradient_checkpointing", True)] * (
        not model.gradient_checkpointing
    )
    changes += [_setting_change("model", "offload_activations", True)] * (
        launch.cuda and model.gradient_checkpointing and not model.offload_activations
    )
    changes += [_setting_change("model", "fused_logprobs", True)] * (not model.fused_logprobs)
    changes += [_setting_change("model", "kept_logits_gib", 0)] * (
        launch.cuda and model.fused_logprobs and model.kept_logits_gib != 0
    )
    changes += [_setting_change("model", "lora_rank", 32)] * (not model.lora_rank)
    changes += [
        _setting_change("optim", "token_budget", max(1, optim.token_budget // divisor))
        for divisor in (2, 4)
    ]
    changes.append(_setting_change("sampling", "max_rows", max(1, sampling.max_rows // 4)))
    changes += [
        _setting_change("sampling", "kv_cache_tokens", size) for size in _halved_cache_sizes(run)
    ]
    # sharding excludes these changes
    if launch.cuda and not launch.sharding.divides:
        changes += [_setting_change("model", "base_dtype", "4bit")] * bool(model.lora_rank)
        changes.append(_setting_change("optim", "optimizer", "adamw_8bit"))
    if launch.cuda:
        gpus = max(launch.world, 8)
        candidates = [ZeroSharding(stage=stage) for stage in (1, 2, 3)]
        candidates.append(ZeroSharding(stage=3, offload=True))
        shardings = [
            _sharding_change(sharding, gpus)
            for sharding in candidates
            if launch.sharding.can_change_to(sharding)
            or (gpus > launch.world and not sharding.offload)
        ]
        # a tensor-parallel group consists of processes of a single machine
        if min(gpus, 8) % max(stage.settings.sampling.sampler_tp for stage in run.stages) == 0:
            changes += shardings
        for section, name in (("sampling", TENSOR_PARALLEL), ("optim", CONTEXT_PARALLEL)):
            changes += _parallel_changes(run, launch, gpus, section, name)
    return changes


def _parallel_changes(
    run: RunConfig, launch: LaunchShape, gpus: int, section: str, name: str
) -> list[MemorySaving]:
    """Return samplers (sequences of the learner) shared by 2, 4 or 8 processes of a machine, where
    the policy can be divided among them. `section`, `name`: of the setting.
    """
    settings, changes = [stage.settings for stage in run.stages], []
    for size in (2, 4, 8):
        change = _setting_change(section, name, size)
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
            size > max(getattr(getattr(stage, section), name) for stage in settings)
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
    now = run.stages[-1].settings.sampling.kv_cache_tokens or DEFAULT_CACHE_TOKENS
    least = (
        max(stage.settings.sampling.max_tokens for stage in run.stages)
        + run.options.plan_prompt_tokens
    )
    return [now >> i for i in range(1, 12) if now >> i >= least]


def find_savings(run: RunConfig, launch: LaunchShape, prompt: int) -> list[MemorySaving]:
    """Return single changes that lower the peak of the run, the most effective first."""
    settings = [stage.settings for stage in run.stages]
    bound = MIN_EFFECT * _compute_peak(run, launch, prompt, settings)
    savings = []
    for change in _list_candidates(run, launch):
        changed = [change.settings(stage_settings) for stage_settings in settings]
        changed_launch = change.launch(launch)
        # a micro-batch counts as 0 B first: its trace takes long
        if _compute_peak(run, changed_launch, prompt, changed, measure_nothing) >= bound:
            continue
        peak = _compute_peak(run, changed_launch, prompt, changed)
        if peak < bound:
            savings.append(replace(change, peak=peak))
    return sorted(savings, key=lambda change: change.peak)


def _compute_peak(
    run: RunConfig,
    launch: LaunchShape,
    prompt: int,
    settings: Sequence[Any],
    measure: MeasureMicroBatch | None = None,
) -> float:
    """Return the run's peak with these settings of the stages and this launch."""
    stages = compute_stage_needs(run, launch, prompt, settings, measure)
    return max(needs.plan.peak for needs in stages)


def select_listed(changes: Sequence[MemorySaving], limit: float) -> list[MemorySaving]:
    """Return the changes to list. Of several cache sizes or parallel sizes, list only the smallest
    change that fits, or the most effective if none fits.
    """
    several = (CACHE, TENSOR_PARALLEL, CONTEXT_PARALLEL)
    selected = []
    for kind in several:
        least_first = sorted((c for c in changes if c.kind == kind), key=lambda c: -c.peak)
        if least_first:
            selected.append(next((c for c in least_first if c.peak <= limit), least_first[-1]))
    return [change for change in changes if change.kind not in several or change in selected]
