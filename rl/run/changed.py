"""What a resumed run may ask for that it did not ask for before: what changes no result, steps that
are added, and what --change names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from rl.errors import RunFolderError
from rl.methods import METHODS
from rl.schedules import factor
from rl.settings import (
    ModelSettings,
    PreferenceDataSettings,
    Run,
    RunSettings,
    StagePlan,
    difference,
    flatten,
    resolved,
    unflatten,
)

# Of one start, or where and how it reports.
FREE_OPTIONS = ("resume", "auto_resume", "overwrite", "output_dir", "quiet", "wandb_project", "timeout", "stop_grace", "reward_env",
                "self_test", "replay", "plan", "plan_gpus", "plan_gpu_memory", "plan_zero", "plan_prompt_tokens", "change")  # fmt: skip
# Of a stage: how its work is cut up, what is looked at, kept and waited for. No gradient and no
# sample depends on them (but for rounding).
FREE = ("token_budget", "layout", "gradient_checkpointing", "fused_logprobs", "kept_logits_gib", "kv_cache_tokens", "max_rows",
        "sampler_cache", "sampler_tp",
        "sampler_ranks", "eval_every", "save_every",
        "rollouts_every", "keep_last", "keep_best", "keep_best_mode", "reward_timeout", "reward_workers", "reward_env")  # fmt: skip
# Of FREE, those on which a result's rounding depends: one of them where sums are cut, and a
# checkpoint has caches read again.
ROUNDS = ("token_budget", "layout", "gradient_checkpointing", "fused_logprobs", "kept_logits_gib", "kv_cache_tokens", "max_rows",
          "sampler_tp", "save_every")  # fmt: skip
CHANGES = "changes"  # in config.json


@dataclass(frozen=True)
class Allowed:
    """The run as it goes on, with what is different: notes for config.json, and what the console
    says.
    """

    run: Run
    notes: list[dict[str, Any]]
    said: list[str]


def allowed(config: Mapping[str, Any], run: Run, at: int, done: int, step: int) -> Allowed:
    """`run`, asked of a folder whose `config` is another, from batch `done` of stage number `at`
    (the run's `step`) on.

    Stages that have ended stay as they were. RunFolderError for what would change the result and is
    not named by --change, or cannot change at all; the remedy is said.
    """
    begun = at + 1
    old, asked = config["stages"], resolved(run)
    # what a setting was that config.json does not know yet
    then: dict[str, Any] = {"methods": METHODS, "options": RunSettings}
    theirs, ours = {**config, "stages": old[:begun]}, {**asked, "stages": asked["stages"][:begun]}
    wrong = difference(theirs, ours, ignore=_ignored(old, asked), **then)
    if any(line.startswith("stages ") for line in wrong):
        raise RunFolderError(_refusal(wrong))
    named = {
        word.partition("=")[0].rpartition(".")[2].replace("-", "_") for word in run.options.change
    }
    stages = list(run.stages)
    notes: list[dict[str, Any]] = []
    for index, stage in enumerate(run.stages[:begun]):
        before = {**_usual(stage), **old[index]["settings"]}
        after = flatten(stage.settings)
        if index < at:
            stages[index] = _ended(stage, before, after)
            after = {key: value for key, value in after.items() if key not in named}
            continue
        changed = {
            key: (before.get(key), value)
            for key, value in after.items()
            if before.get(key) != value
        }
        _check_steps(changed, done)
        _check_model(changed, named)
        notes = [
            {"step": step, "stage": stage.name, "setting": key, "from": was, "to": value}
            for key, (was, value) in changed.items()
            if key in (*FREE, "steps") or key in named
        ]
    refused = difference(theirs, ours, ignore=(*FREE_OPTIONS, *FREE, "steps", *named), **then)
    if at and (unended := _ended_differ(old[:at], asked["stages"][:at])):
        refused = [*unended, *refused]
    if refused:
        raise RunFolderError(_refusal(refused))
    said = [
        f"from step {step} on: {note['setting']} {note['from']} -> {note['to']}" for note in notes
    ]
    said += (
        _schedule(run.stages[at], old[at]["settings"], done)
        if any(note["setting"] == "steps" for note in notes)
        else []
    )
    later = difference(
        {"options": {}, "stages": old[begun:]},
        {"options": {}, "stages": asked["stages"][begun:]},
        **then,
    )
    if later:
        said.append(f"changed in stages that have not begun: {'; '.join(later)}")
    return Allowed(replace(run, stages=tuple(stages)), notes, said)


def replayed_otherwise(config: Mapping[str, Any], run: Run) -> list[str]:
    """Settings of a run that `run` replays, by its `config`, for whose sake the replay is not bit
    for bit; a line each.
    """
    late = any(
        getattr(getattr(stage.settings, "flow", None), "max_steps_off_policy", 0)
        for stage in run.stages
    )
    same = {*FREE_OPTIONS, *FREE} - {*ROUNDS} | (set() if late else {"save_every"})
    return difference(
        config, resolved(run), ignore=tuple(same), methods=METHODS, options=RunSettings
    )


def changes_data(notes: Sequence[Mapping[str, Any]]) -> bool:
    """Whether what is trained on is meant to be another than before."""
    data = {item.name for item in fields(PreferenceDataSettings)}
    return any(note["setting"] in data - {*FREE} for note in notes)


def _ignored(old: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> tuple[str, ...]:
    """All settings of stages: of the two lists of stages only names and methods are compared."""
    return tuple(
        {*FREE_OPTIONS, *(key for stage in [*old, *asked["stages"]] for key in stage["settings"])}
    )


def _usual(stage: StagePlan) -> dict[str, Any]:
    return flatten(METHODS[stage.method].settings())


def _ended(stage: StagePlan, before: Mapping[str, Any], after: Mapping[str, Any]) -> StagePlan:
    """A stage that is over, as it was trained; what holds for the whole run is as it is now."""
    known = {key: value for key, value in before.items() if key in after}
    problems: list[str] = []
    settings = unflatten(
        type(stage.settings),
        {**known, **{key: after[key] for key in FREE if key in after}},
        problems,
        stage.name,
    )
    if problems:
        what = f"the config.json of this run says of a stage that has ended: {'; '.join(problems)}"
        raise RunFolderError(f"{what}: mend it, or give another --output-dir")
    return replace(stage, settings=settings)


def _ended_differ(
    old: Sequence[Mapping[str, Any]], asked: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Steps asked of stages that have ended: nothing can be added there any more."""
    pairs = [
        (a["name"], a["settings"].get("steps"), b["settings"].get("steps"))
        for a, b in zip(old, asked, strict=True)
    ]
    return [
        f"stage {name}, which has ended: steps {was} -> {now}"
        for name, was, now in pairs
        if was != now
    ]


def _check_steps(changed: Mapping[str, tuple[Any, Any]], done: int) -> None:
    if "steps" in changed and changed["steps"][1] < done:
        raise RunFolderError(
            f"{done} steps of this stage are done, so steps cannot be {changed['steps'][1]}: give {done} or more"
        )


def _check_model(changed: Mapping[str, tuple[Any, Any]], named: set[str]) -> None:
    """A checkpoint is of one model; --change cannot make it another's."""
    of_model = [
        item.name
        for item in fields(ModelSettings)
        if item.name in changed and item.name in named and item.name not in FREE
    ]
    if of_model:
        raise RunFolderError(
            f"--change {of_model[0]}: a checkpoint is of the model that it was saved from. Begin a run from its weights, with --base-model "
            "and the folder of this one, and another --output-dir"
        )


def _refusal(lines: Sequence[str]) -> str:
    return (
        f"a resumed run keeps its settings, these differ: {'; '.join(lines)}. Give the run's own (--resume and --output-dir alone take "
        "all of them from the folder), allow what is to change with --change NAME=VALUE, or give a new --output-dir"
    )


def _schedule(stage: StagePlan, before: Mapping[str, Any], done: int) -> list[str]:
    """What other steps mean for a learning rate that falls over them."""
    optim, steps = stage.settings.optim, stage.settings.loop.steps
    if optim.schedule == "constant":
        return []
    peak, warmup = stage.settings.learning_rate, optim.warmup_steps
    was = peak * factor(optim.schedule, done, int(before["steps"]), warmup)
    now = peak * factor(optim.schedule, done, steps, warmup)
    return [
        f"the {optim.schedule} schedule ends at step {steps} of the stage now, not at {before['steps']}: the next step's learning rate is "
        f"{now:.3g}, it would have been {was:.3g}"
    ]
