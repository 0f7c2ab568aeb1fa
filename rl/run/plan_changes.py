"""Find changes that would make a run fit: single changes of its settings or its launch, and
combinations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl.memory import Launch
from rl.run.plan_needs import TRACES, needs_of, nothing, runs_of
from rl.settings import Run

# settings, and kinds of change, of which only the smallest sufficient change is listed
CACHE, TEAM = "kv_cache_tokens", "sampler_tp"
HELPS = 0.98  # fraction of a peak: a change that leaves more than that fraction does not count


@dataclass(frozen=True)
class Change:
    """Describe a change: the words to type, its effect on a stage's settings and on the launch, and
    the peak with it.

    `kind`: a combination contains at most a single change of each kind. `costly`: the change
    affects what is learned, or costs much time.
    """

    words: str
    settings: Callable[[Any], Any]
    launch: Callable[[Launch], Launch]
    kind: str
    costly: bool = False
    peak: float = 0.0


def _same(thing: Any) -> Any:
    return thing


def _setting(section: str, name: str, value: Any, costly: bool = False) -> Change:
    def apply(settings: Any) -> Any:
        return replace(settings, **{section: replace(getattr(settings, section), **{name: value})})

    flag = "--" + name.replace("_", "-") + ("" if value is True else f" {value}")
    return Change(flag, apply, _same, name, costly)


def _sharding(stage: int, gpus: int, offload: bool = False) -> Change:
    def apply(launch: Launch) -> Launch:
        return replace(
            launch, world=gpus, per_node=min(gpus, 8), zero=stage, offload=offload, fsdp=False
        )

    name = f"zero{stage}{'_offload' if offload else ''}"
    return Change(
        f"accelerate_configs/{name}.yaml on {gpus} GPUs", _same, apply, "launch", costly=offload
    )


def _candidates(run: Run, launch: Launch) -> list[Change]:
    model, optim, sampling = (
        getattr(run.stages[-1].settings, name) for name in ("model", "optim", "sampling")
    )
    changes = [_setting("model", "gradient_checkpointing", True)] * (
        not model.gradient_checkpointing
    )
    changes += [_setting("model", "fused_logprobs", True)] * (not model.fused_logprobs)
    changes += [_setting("model", "kept_logits_gib", 0)] * (
        launch.cuda and model.fused_logprobs and model.kept_logits_gib != 0
    )
    changes += [_setting("model", "lora_rank", 32, costly=True)] * (not model.lora_rank)
    changes += [
        _setting("optim", "token_budget", max(1, optim.token_budget // divisor))
        for divisor in (2, 4)
    ]
    changes.append(_setting("sampling", "max_rows", max(1, sampling.max_rows // 4)))
    changes += [_setting("sampling", "kv_cache_tokens", size) for size in _smaller_caches(run)]
    # these changes exclude each other, and sharding
    if launch.cuda and launch.zero is None and not launch.fsdp:
        changes += [
            replace(_setting("model", "base_dtype", "4bit", costly=True), kind="launch")
        ] * bool(model.lora_rank)
        changes.append(
            replace(_setting("optim", "optimizer", "adamw_8bit", costly=True), kind="launch")
        )
    if launch.cuda:
        gpus = max(launch.world, 8)
        now = 3 if launch.fsdp else launch.zero or 0
        shardings = [
            _sharding(stage, gpus) for stage in (1, 2, 3) if stage > now or gpus > launch.world
        ]
        shardings += [_sharding(3, gpus, offload=True)] * (not launch.offload)
        # a tensor-parallel group consists of processes of a single machine
        if min(gpus, 8) % max(stage.settings.sampling.sampler_tp for stage in run.stages) == 0:
            changes += shardings
        changes += _teams(run, launch, gpus)
    return changes


def _teams(run: Run, launch: Launch, gpus: int) -> list[Change]:
    """Return samplers shared by 2, 4 or 8 processes of a machine, where the policy's heads and
    columns can be divided among them.
    """
    settings, changes = [stage.settings for stage in run.stages], []
    for size in (2, 4, 8):
        change = _setting("sampling", TEAM, size)
        if launch.per_node % size:  # more processes have to be launched
            change = replace(
                change, words=f"{change.words} on {gpus} GPUs", launch=_launched(gpus, size)
            )
        try:
            needs_of(
                run,
                change.launch(launch),
                1,
                [change.settings(stage_settings) for stage_settings in settings],
                nothing,
            )
        except ValueError:  # these settings, this model or so many processes do not fit together
            continue
        changes += [change] * (
            size > max(stage_settings.sampling.sampler_tp for stage_settings in settings)
        )
    return changes


def _launched(gpus: int, size: int) -> Callable[[Launch], Launch]:
    """Return a launch change to `gpus` GPUs, for a machine whose GPUs are no multiple of `size`."""
    return lambda launch: (
        replace(launch, world=gpus, per_node=min(gpus, 8)) if launch.per_node % size else launch
    )


def _smaller_caches(run: Run) -> list[int]:
    """Return halvings of the KV cache, down to the size of the longest prompt and answer of any
    stage.
    """
    now = run.stages[-1].settings.sampling.kv_cache_tokens
    least = (
        max(stage.settings.sampling.max_tokens for stage in run.stages)
        + run.options.plan_prompt_tokens
    )
    return [now >> i for i in range(1, 12) if now >> i >= least]


def ahead(run: Run, launch: Launch, prompt: int) -> None:
    """Start computing what the run's plan and its changes need, if helper processes exist."""
    _want(run, launch, prompt, [[], *([change] for change in _candidates(run, launch))])


def remedies(run: Run, launch: Launch, prompt: int) -> list[Change]:
    """Return single changes that lower the peak of the run, the most effective first."""
    bound = HELPS * _peak(run, launch, prompt, [])
    candidates = _candidates(run, launch)
    _want(
        run,
        launch,
        prompt,
        [[change] for change in candidates if _least(run, launch, prompt, [change]) <= bound],
    )
    evaluated = [
        replace(change, peak=_peak(run, launch, prompt, [change], bound)) for change in candidates
    ]
    return sorted(
        (change for change in evaluated if change.peak < bound), key=lambda change: change.peak
    )


def together(
    run: Run, launch: Launch, prompt: int, changes: Sequence[Change], room: float
) -> tuple[list[Change], float]:
    """Return (changes, peak): changes that make the run fit in combination. Costly changes are
    included only if the others are not enough.

    The list is empty if all changes together are not enough.
    """
    selected: list[Change] = []
    peak = _peak(run, launch, prompt, [])
    ordered = sorted(changes, key=lambda change: (change.costly, change.peak))
    for i, change in enumerate(ordered):
        trial = _with(selected, change)
        # meanwhile compute what comes next if this change helps
        if TRACES.are_helped and _least(run, launch, prompt, trial) <= HELPS * peak:
            following = [_with(trial, change) for change in ordered[i + 1 : i + 2]]
            everything = trial  # for the case that nothing less is enough
            for change in ordered[i + 1 :]:
                everything = (
                    everything
                    if change.kind in {other.kind for other in everything}
                    else _with(everything, change)
                )
            _want(run, launch, prompt, [trial, *following, everything])
        lower = _peak(run, launch, prompt, trial, HELPS * peak)
        if lower < HELPS * peak:
            selected, peak = trial, lower
        if peak <= room:
            return _no_more_than_needed(run, launch, prompt, selected, changes, room)
    return [], peak


def _with(taken: Sequence[Change], change: Change) -> list[Change]:
    """Add `change` and replace a change of the same kind."""
    return [*(other for other in taken if other.kind != change.kind), change]


def _no_more_than_needed(
    run: Run,
    launch: Launch,
    prompt: int,
    taken: list[Change],
    changes: Sequence[Change],
    room: float,
) -> tuple[list[Change], float]:
    """Return (changes, peak): the combination with the smallest tensor-parallel group and the
    largest KV cache that still fit.
    """
    others = [change for change in taken if change.kind not in (CACHE, TEAM)]
    caches = [[], *([cache] for cache in _least_first(changes, CACHE))]
    teams = [[], *([team] for team in _least_first(changes, TEAM))]
    for team, cache in ((team, cache) for team in teams for cache in caches):
        peak = _peak(run, launch, prompt, [*others, *team, *cache], room)
        if peak <= room:
            return [*others, *team, *cache], peak
    raise AssertionError("the selected changes fit")


def _least_first(changes: Sequence[Change], kind: str) -> list[Change]:
    return sorted(
        (change for change in changes if change.kind == kind), key=lambda change: -change.peak
    )


def shown(changes: Sequence[Change], room: float) -> list[Change]:
    """Return the changes to list. Of several cache sizes or tensor-parallel sizes, list only the
    smallest change that fits, or the most effective if none fits.
    """
    best = []
    for kind in (CACHE, TEAM):
        ordered = _least_first(changes, kind)
        best += (
            [next((change for change in ordered if change.peak <= room), ordered[-1])]
            if ordered
            else []
        )
    return [change for change in changes if change.kind not in (CACHE, TEAM) or change in best]


def _peak(
    run: Run, launch: Launch, prompt: int, changes: Sequence[Change], bound: float = math.inf
) -> float:
    """Return the run's peak with these changes. If its lower bound exceeds `bound`, return the
    lower bound.
    """
    if math.isfinite(bound):  # tracing a micro-batch takes long
        least = _least(run, launch, prompt, changes)
        if least > bound:
            return least
    settings, launch = _changed(run, launch, changes)
    return max(needs.plan.peak for needs in needs_of(run, launch, prompt, settings))


def _least(run: Run, launch: Launch, prompt: int, changes: Sequence[Change]) -> float:
    """Return a lower bound of the run's peak with these changes: a micro-batch counts as 0 B."""
    settings, launch = _changed(run, launch, changes)
    return max(needs.plan.peak for needs in needs_of(run, launch, prompt, settings, nothing))


def _changed(run: Run, launch: Launch, changes: Sequence[Change]) -> tuple[list[Any], Launch]:
    """Return (the stages' settings, the launch) with these changes."""
    settings = [stage.settings for stage in run.stages]
    for change in changes:
        settings, launch = (
            [change.settings(stage_settings) for stage_settings in settings],
            change.launch(launch),
        )
    return settings, launch


def _want(run: Run, launch: Launch, prompt: int, tries: Sequence[Sequence[Change]]) -> None:
    """Queue the micro-batches of these sets of changes for tracing, in this order, if helper
    processes exist.
    """
    micro_batches = []
    for changes in tries if TRACES.are_helped else ():
        settings, changed = _changed(run, launch, changes)
        micro_batches += runs_of(run, changed, prompt, settings)
    TRACES.want(micro_batches)
