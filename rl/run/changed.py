"""Check the settings of a resumed run against those that its folder records.

Three kinds of difference are allowed: settings that change no result, more steps, and the settings
that --change names.
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

# Options of a single launch, or of output and reporting.
FREE_OPTIONS = ("resume", "auto_resume", "overwrite", "output_dir", "quiet", "wandb_project",
                "timeout", "stop_grace", "reward_env", "self_test", "replay", "plan", "plan_gpus",
                "plan_gpu_memory", "plan_zero", "plan_prompt_tokens", "change")  # fmt: skip
# Settings of a stage for micro-batching, memory, evaluation, checkpoints and timeouts. No gradient
# and no sample depends on them (except for rounding).
FREE = ("token_budget", "layout", "gradient_checkpointing", "fused_logprobs", "kept_logits_gib",
        "kv_cache_tokens", "max_rows", "sampler_cache", "sampler_tp", "sampler_ranks",
        "eval_every", "save_every", "rollouts_every", "keep_last", "keep_best", "keep_best_mode",
        "reward_timeout", "reward_workers", "reward_env")  # fmt: skip
# The settings of FREE that affect the rounding of results: they determine the order of sums, and a
# checkpoint causes caches to be computed again.
ROUNDS = ("token_budget", "layout", "gradient_checkpointing", "fused_logprobs", "kept_logits_gib",
          "kv_cache_tokens", "max_rows", "sampler_tp", "save_every")  # fmt: skip
CHANGES = "changes"  # in config.json


@dataclass(frozen=True)
class Allowed:
    """Hold the resumed run and its changes: notes for config.json, and lines for the console."""

    run: Run
    notes: list[dict[str, Any]]
    said: list[str]


def allowed(config: Mapping[str, Any], run: Run, at: int, done: int, step: int) -> Allowed:
    """Return `run` with the changes allowed over `config`, the config.json of the folder.

    The run resumes at batch `done` of stage number `at`, which is the run's step `step`. Stages
    that have ended keep their settings. Raises RunFolderError, with the remedy, if a difference
    would change the result and is not named by --change, or cannot change at all.
    """
    started_stages = at + 1
    recorded_stages, requested = config["stages"], resolved(run)
    # sources of the defaults of settings that an older config.json lacks
    default_sources: dict[str, Any] = {"methods": METHODS, "options": RunSettings}
    recorded, current = (
        {**config, "stages": recorded_stages[:started_stages]},
        {**requested, "stages": requested["stages"][:started_stages]},
    )
    mismatches = difference(
        recorded, current, ignore=_ignored(recorded_stages, requested), **default_sources
    )
    if any(line.startswith("stages ") for line in mismatches):
        raise RunFolderError(_refusal(mismatches))
    changeable = {
        word.partition("=")[0].rpartition(".")[2].replace("-", "_") for word in run.options.change
    }
    stages = list(run.stages)
    notes: list[dict[str, Any]] = []
    for index, stage in enumerate(run.stages[:started_stages]):
        before = {**_usual(stage), **recorded_stages[index]["settings"]}
        after = flatten(stage.settings)
        if index < at:
            stages[index] = _ended(stage, before, after)
            after = {key: value for key, value in after.items() if key not in changeable}
            continue
        changed = {
            key: (before.get(key), value)
            for key, value in after.items()
            if before.get(key) != value
        }
        _check_steps(changed, done)
        _check_model(changed, changeable)
        notes = [
            {"step": step, "stage": stage.name, "setting": key, "from": old_value, "to": value}
            for key, (old_value, value) in changed.items()
            if key in (*FREE, "steps") or key in changeable
        ]
    refused = difference(
        recorded, current, ignore=(*FREE_OPTIONS, *FREE, "steps", *changeable), **default_sources
    )
    if at and (unended := _ended_differ(recorded_stages[:at], requested["stages"][:at])):
        refused = [*unended, *refused]
    if refused:
        raise RunFolderError(_refusal(refused))
    messages = [
        f"from step {step} on: {note['setting']} {note['from']} -> {note['to']}" for note in notes
    ]
    messages += (
        _schedule(run.stages[at], recorded_stages[at]["settings"], done)
        if any(note["setting"] == "steps" for note in notes)
        else []
    )
    later_changes = difference(
        {"options": {}, "stages": recorded_stages[started_stages:]},
        {"options": {}, "stages": requested["stages"][started_stages:]},
        **default_sources,
    )
    if later_changes:
        messages.append(f"changed in stages that have not begun: {'; '.join(later_changes)}")
    return Allowed(replace(run, stages=tuple(stages)), notes, messages)


def replayed_otherwise(config: Mapping[str, Any], run: Run) -> list[str]:
    """Return the settings that keep a replay from being bit-identical, a line for each.

    `config` is the config.json of the run that `run` replays.
    """
    off_policy = any(
        getattr(getattr(stage.settings, "flow", None), "max_steps_off_policy", 0)
        for stage in run.stages
    )
    ignored = {*FREE_OPTIONS, *FREE} - {*ROUNDS} | (set() if off_policy else {"save_every"})
    return difference(
        config, resolved(run), ignore=tuple(ignored), methods=METHODS, options=RunSettings
    )


def changes_data(notes: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the changes include a setting of the training data."""
    data = {item.name for item in fields(PreferenceDataSettings)}
    return any(note["setting"] in data - {*FREE} for note in notes)


def _ignored(old: Sequence[Mapping[str, Any]], asked: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of all settings, so that only names and methods of stages are compared."""
    return tuple(
        {*FREE_OPTIONS, *(key for stage in [*old, *asked["stages"]] for key in stage["settings"])}
    )


def _usual(stage: StagePlan) -> dict[str, Any]:
    """Return the default settings of a stage's method, flat."""
    return flatten(METHODS[stage.method].settings())


def _ended(stage: StagePlan, before: Mapping[str, Any], after: Mapping[str, Any]) -> StagePlan:
    """Return an ended stage with the settings it was trained with.

    Settings of FREE, which hold for the whole run, take their current values. Raises RunFolderError
    if the recorded settings are invalid.
    """
    known = {key: value for key, value in before.items() if key in after}
    problems: list[str] = []
    settings = unflatten(
        type(stage.settings),
        {**known, **{key: after[key] for key in FREE if key in after}},
        problems,
        stage.name,
    )
    if problems:
        message = (
            "the config.json of this run is invalid for a stage that has ended: "
            f"{'; '.join(problems)}"
        )
        raise RunFolderError(f"{message}: correct it, or choose another --output-dir")
    return replace(stage, settings=settings)


def _ended_differ(
    old: Sequence[Mapping[str, Any]], asked: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return a line for each ended stage with a changed number of steps: none can be added."""
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
    """Raise RunFolderError if `steps` is changed to fewer than are done."""
    if "steps" in changed and changed["steps"][1] < done:
        raise RunFolderError(
            f"{done} steps of this stage are done, so steps cannot be {changed['steps'][1]}: set "
            f"it to {done} or more"
        )


def _check_model(changed: Mapping[str, tuple[Any, Any]], named: set[str]) -> None:
    """Raise RunFolderError if --change names a setting of the model: the checkpoint fixes these."""
    of_model = [
        item.name
        for item in fields(ModelSettings)
        if item.name in changed and item.name in named and item.name not in FREE
    ]
    if of_model:
        raise RunFolderError(
            f"--change {of_model[0]}: a checkpoint fits only the model from which it was saved. "
            "Begin a new run from its weights, with --base-model set to the folder of this run "
            "and another --output-dir"
        )


def _refusal(lines: Sequence[str]) -> str:
    """Return the message for settings that differ and are not allowed to."""
    return (
        f"a resumed run keeps its settings, these differ: {'; '.join(lines)}. Use the recorded "
        "settings (with only --resume and --output-dir, all are read from the folder), allow a "
        "change with --change NAME=VALUE, or choose a new --output-dir"
    )


def _schedule(stage: StagePlan, before: Mapping[str, Any], done: int) -> list[str]:
    """Return a line about the effect of a changed number of steps on the learning-rate schedule."""
    optim, steps = stage.settings.optim, stage.settings.loop.steps
    if optim.schedule == "constant":
        return []
    peak, warmup = stage.settings.learning_rate, optim.warmup_steps
    was = peak * factor(optim.schedule, done, int(before["steps"]), warmup)
    now = peak * factor(optim.schedule, done, steps, warmup)
    return [
        f"the {optim.schedule} schedule now ends at step {steps} of the stage, not at "
        f"{before['steps']}: the next step's learning rate is {now:.3g}, it would have been "
        f"{was:.3g}"
    ]
