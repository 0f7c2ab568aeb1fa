"""What would make a run fit: single changes of its settings or its launch, and several together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl.memory import Launch
from rl.run.plan_needs import TRACES, needs_of, nothing, runs_of
from rl.settings import Run

# settings, and kinds of change of which the least that is enough is told
CACHE, TEAM = "kv_cache_tokens", "sampler_tp"
HELPS = 0.98  # of a peak: a change that leaves more than that of it is none


@dataclass(frozen=True)
class Change:
    """A remedy: what to type, what it makes of a stage's settings and of the launch, and the peak
    with it.

    `kind`: of several of a kind one is taken. `costly`: it changes what is learnt, or costs much
    time.
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
    found = [_setting("model", "gradient_checkpointing", True)] * (not model.gradient_checkpointing)
    found += [_setting("model", "fused_logprobs", True)] * (not model.fused_logprobs)
    found += [_setting("model", "kept_logits_gib", 0)] * (
        launch.cuda and model.fused_logprobs and model.kept_logits_gib != 0
    )
    found += [_setting("model", "lora_rank", 32, costly=True)] * (not model.lora_rank)
    found += [
        _setting("optim", "token_budget", max(1, optim.token_budget // divisor))
        for divisor in (2, 4)
    ]
    found.append(_setting("sampling", "max_rows", max(1, sampling.max_rows // 4)))
    found += [_setting("sampling", "kv_cache_tokens", size) for size in _smaller_caches(run)]
    # none of them goes with another, or with sharding
    if launch.cuda and launch.zero is None and not launch.fsdp:
        found += [
            replace(_setting("model", "base_dtype", "4bit", costly=True), kind="launch")
        ] * bool(model.lora_rank)
        found.append(
            replace(_setting("optim", "optimizer", "adamw_8bit", costly=True), kind="launch")
        )
    if launch.cuda:
        gpus = max(launch.world, 8)
        now = 3 if launch.fsdp else launch.zero or 0
        shardings = [
            _sharding(stage, gpus) for stage in (1, 2, 3) if stage > now or gpus > launch.world
        ]
        shardings += [_sharding(3, gpus, offload=True)] * (not launch.offload)
        # teams are of a machine's processes
        if min(gpus, 8) % max(stage.settings.sampling.sampler_tp for stage in run.stages) == 0:
            found += shardings
        found += _teams(run, launch, gpus)
    return found


def _teams(run: Run, launch: Launch, gpus: int) -> list[Change]:
    """Samplers that 2, 4 or 8 processes of a machine hold together, where the policy's heads and
    columns can be dealt out to them.
    """
    settings, found = [stage.settings for stage in run.stages], []
    for size in (2, 4, 8):
        change = _setting("sampling", TEAM, size)
        if launch.per_node % size:  # more processes have to be launched
            change = replace(
                change, words=f"{change.words} on {gpus} GPUs", launch=_launched(gpus, size)
            )
        try:
            needs_of(
                run, change.launch(launch), 1, [change.settings(one) for one in settings], nothing
            )
        except ValueError:  # these settings, this model or so many processes do not go with it
            continue
        found += [change] * (size > max(one.sampling.sampler_tp for one in settings))
    return found


def _launched(gpus: int, size: int) -> Callable[[Launch], Launch]:
    """On so many GPUs, where those of a machine are no whole number of teams."""
    return lambda launch: (
        replace(launch, world=gpus, per_node=min(gpus, 8)) if launch.per_node % size else launch
    )


def _smaller_caches(run: Run) -> list[int]:
    """Halves, down to one that holds the longest answer and its prompt in every stage."""
    now = run.stages[-1].settings.sampling.kv_cache_tokens
    least = (
        max(stage.settings.sampling.max_tokens for stage in run.stages)
        + run.options.plan_prompt_tokens
    )
    return [now >> i for i in range(1, 12) if now >> i >= least]


def ahead(run: Run, launch: Launch, prompt: int) -> None:
    """Has what the run's plan and the remedies for it will ask for worked out from now on, if there
    are processes for it.
    """
    _want(run, launch, prompt, [[], *([change] for change in _candidates(run, launch))])


def remedies(run: Run, launch: Launch, prompt: int) -> list[Change]:
    """Single changes that lower the peak of the run, the most effective first."""
    bound = HELPS * _peak(run, launch, prompt, [])
    candidates = _candidates(run, launch)
    _want(
        run,
        launch,
        prompt,
        [[change] for change in candidates if _least(run, launch, prompt, [change]) <= bound],
    )
    tried = [
        replace(change, peak=_peak(run, launch, prompt, [change], bound)) for change in candidates
    ]
    return sorted(
        (change for change in tried if change.peak < bound), key=lambda change: change.peak
    )


def together(
    run: Run, launch: Launch, prompt: int, changes: Sequence[Change], room: float
) -> tuple[list[Change], float]:
    """Changes that make it fit when taken together, the costly ones only if the others are not
    enough; and the peak then.

    No changes where all of them are not enough.
    """
    taken: list[Change] = []
    peak = _peak(run, launch, prompt, [])
    ordered = sorted(changes, key=lambda change: (change.costly, change.peak))
    for i, change in enumerate(ordered):
        tried = _with(taken, change)
        # and meanwhile what comes next if this one helps
        if TRACES.are_helped and _least(run, launch, prompt, tried) <= HELPS * peak:
            following = [_with(tried, change) for change in ordered[i + 1 : i + 2]]
            everything = tried  # where nothing less is enough
            for change in ordered[i + 1 :]:
                everything = (
                    everything
                    if change.kind in {other.kind for other in everything}
                    else _with(everything, change)
                )
            _want(run, launch, prompt, [tried, *following, everything])
        lower = _peak(run, launch, prompt, tried, HELPS * peak)
        if lower < HELPS * peak:
            taken, peak = tried, lower
        if peak <= room:
            return _no_more_than_needed(run, launch, prompt, taken, changes, room)
    return [], peak


def _with(taken: Sequence[Change], change: Change) -> list[Change]:
    """Of several of a kind one is taken, the last."""
    return [*(other for other in taken if other.kind != change.kind), change]


def _no_more_than_needed(
    run: Run,
    launch: Launch,
    prompt: int,
    taken: list[Change],
    changes: Sequence[Change],
    room: float,
) -> tuple[list[Change], float]:
    """What was taken together, with the smallest team and the largest of the caches that still fit
    beside it, and the peak.
    """
    others = [change for change in taken if change.kind not in (CACHE, TEAM)]
    caches = [[], *([cache] for cache in _least_first(changes, CACHE))]
    teams = [[], *([team] for team in _least_first(changes, TEAM))]
    for team, cache in ((team, cache) for team in teams for cache in caches):
        peak = _peak(run, launch, prompt, [*others, *team, *cache], room)
        if peak <= room:
            return [*others, *team, *cache], peak
    raise AssertionError("what was taken fits")


def _least_first(changes: Sequence[Change], kind: str) -> list[Change]:
    return sorted(
        (change for change in changes if change.kind == kind), key=lambda change: -change.peak
    )


def shown(changes: Sequence[Change], room: float) -> list[Change]:
    """The changes to be told: of several caches or teams the one that changes least and fits, or
    where none does that helps most.
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
    """The run's peak with these changes; where it is above `bound` whatever a micro-batch holds,
    what it is at least.
    """
    if math.isfinite(bound):  # following a micro-batch takes long
        least = _least(run, launch, prompt, changes)
        if least > bound:
            return least
    settings, launch = _changed(run, launch, changes)
    return max(needs.plan.peak for needs in needs_of(run, launch, prompt, settings))


def _least(run: Run, launch: Launch, prompt: int, changes: Sequence[Change]) -> float:
    """What the run's peak with these changes is at least, whatever a micro-batch holds."""
    settings, launch = _changed(run, launch, changes)
    return max(needs.plan.peak for needs in needs_of(run, launch, prompt, settings, nothing))


def _changed(run: Run, launch: Launch, changes: Sequence[Change]) -> tuple[list[Any], Launch]:
    """(the stages' settings, the launch) with these changes."""
    settings = [stage.settings for stage in run.stages]
    for change in changes:
        settings, launch = [change.settings(one) for one in settings], change.launch(launch)
    return settings, launch


def _want(run: Run, launch: Launch, prompt: int, tries: Sequence[Sequence[Change]]) -> None:
    """Has the micro-batches of these tries followed, in this order, where there are processes for
    it.
    """
    found = []
    for changes in tries if TRACES.are_helped else ():
        settings, changed = _changed(run, launch, changes)
        found += runs_of(run, changed, prompt, settings)
    TRACES.want(found)
