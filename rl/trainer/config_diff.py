"""Check the settings of a resumed run, or of a replay, against those that the folder of the run
records.

A resumed run may differ in settings that change no result, in more steps, and in the settings that
--change names. A replay that differs in more than settings without an effect is not bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from rl.algorithms import METHODS
from rl.config import (
    CHANGEABLE_OPTIONS,
    CHANGEABLE_SETTINGS,
    ModelSettings,
    PreferenceDataSettings,
    RunConfig,
    RunSettings,
    StageConfig,
    current_settings,
    diff_configs,
    flatten_settings,
    list_changed_settings,
    resolve_config,
    unflatten_settings,
)
from rl.errors import RunFolderError, UserError
from rl.lr_schedule import compute_lr_factor
from rl.reporting import load_saved_config
from rl.sampler import check_features

# The members of CHANGEABLE_SETTINGS that affect rounding: they determine the order of sums, and
# after a checkpoint caches are computed again.
ROUNDING_SETTINGS = (
    "token_budget",
    "layout",
    "context_parallel_size",
    "expert_parallel_size",
    "gradient_checkpointing",
    "fused_logprobs",
    "kept_logits_gib",
    "kv_cache_tokens",
    "max_rows",
    "sampler_tp",
    "num_speculative_tokens",
    "save_every",
)
CHANGES_KEY = "changes"  # in config.json
DECISIONS_FILE = "decisions.jsonl"


@dataclass(frozen=True)
class ConfigChanges:
    """Hold the resumed run and its changes: notes for config.json, and lines for the console."""

    run: RunConfig
    notes: list[dict[str, Any]]
    messages: list[str]


def check_changes(
    config: Mapping[str, Any], run: RunConfig, stage_index: int, done: int, step: int
) -> ConfigChanges:
    """Return `run` with the changes allowed over `config`, the config.json of the folder.

    The run resumes at batch `done` of stage number `stage_index`, which is the run's step `step`.
    Stages that have ended keep their settings. Raises RunFolderError, with the remedy, if a
    difference would change the result and is not named by --change, or cannot change at all.
    """
    # sources of the defaults of settings that an older config.json lacks
    default_sources: dict[str, Any] = {"methods": METHODS, "options": RunSettings}
    requested, started = resolve_config(run), slice(stage_index + 1)
    recorded_stages, requested_stages = _use_current_names(config, run), requested["stages"]
    recorded = {**config, "stages": recorded_stages[started]}
    current = {**requested, "stages": requested_stages[started]}
    names = [[(s["name"], s["method"]) for s in c["stages"]] for c in (recorded, current)]
    if names[0] != names[1]:
        changes = diff_configs(recorded, current, ignore=CHANGEABLE_OPTIONS, **default_sources)
        raise RunFolderError(_format_refusal(changes))
    changeable = _list_changed_settings(run)
    ended = [
        _restore_ended_stage(stage, saved["settings"])
        for stage, saved in zip(run.stages[:stage_index], recorded_stages, strict=False)
    ]
    stage, saved_settings = run.stages[stage_index], recorded_stages[stage_index]["settings"]
    changed = _find_changes(stage, saved_settings, changeable, done)
    notes = [
        {"step": step, "stage": stage.name, "setting": key, "from": old_value, "to": value}
        for key, (old_value, value) in changed.items()
        if key in (*CHANGEABLE_SETTINGS, "steps") or key in changeable
    ]
    # no steps can be added to a stage that has ended
    refused = [
        f"stage {a['name']}, which has ended: steps {was} -> {now}"
        for a, b in zip(recorded_stages[:stage_index], requested_stages[:stage_index], strict=True)
        if (was := a["settings"].get("steps")) != (now := b["settings"].get("steps"))
    ]
    changeable_keys = (*CHANGEABLE_OPTIONS, *CHANGEABLE_SETTINGS, "steps", *changeable)
    refused += diff_configs(recorded, current, ignore=changeable_keys, **default_sources)
    if refused:
        raise RunFolderError(_format_refusal(refused))
    messages = _describe_changes(notes, stage, saved_settings, done)
    later_changes = diff_configs(
        {"options": {}, "stages": recorded_stages[stage_index + 1 :]},
        {"options": {}, "stages": requested_stages[stage_index + 1 :]},
        **default_sources,
    )
    if later_changes:
        messages.append(f"changed in stages that have not begun: {'; '.join(later_changes)}")
    stages = (*ended, *run.stages[stage_index:])
    return ConfigChanges(replace(run, stages=stages), notes, messages)


def _list_changed_settings(run: RunConfig) -> set[str]:
    """Return the settings that --change of the run names."""
    known = {key for stage in run.stages for key in flatten_settings(stage.settings)}
    return list_changed_settings(run.options.change, known)


def check_replay_sampler(run: RunConfig) -> None:
    """Raise UserError for a replay with a sampler whose samples cannot be repeated."""
    kinds = {stage.settings.sampling.sampler for stage in run.stages}
    if run.options.replay is not None and "vllm" in kinds:
        check_features(("vllm", "replay"))


def check_replay(run: RunConfig, warn: Callable[[str], None]) -> None:
    """Check a replay before anything is loaded.

    Raises UserError if the folder has no event log. Warns if settings differ, so that the replay
    cannot be bit-identical.
    """
    if differs := list_replay_differences(run):
        warn(
            f"this replay of {find_event_log(run.options.replay).parent} will not be "
            f"bit-identical, because settings differ: {'; '.join(differs)}"
        )


def list_replay_differences(run: RunConfig) -> list[str]:
    """Return the settings that keep a replay from being bit-identical, a line for each; [] if `run`
    replays none.
    """
    if run.options.replay is None:
        return []
    config = load_saved_config(find_event_log(run.options.replay).parent)
    flows = [getattr(stage.settings, "flow", None) for stage in run.stages]
    ignored = {*CHANGEABLE_OPTIONS, *CHANGEABLE_SETTINGS} - {*ROUNDING_SETTINGS}
    if not any(getattr(flow, "max_steps_off_policy", 0) for flow in flows):
        ignored.add("save_every")
    config = {**config, "stages": _use_current_names(config, run)}
    return diff_configs(
        config, resolve_config(run), ignore=tuple(ignored), methods=METHODS, options=RunSettings
    )


def _use_current_names(config: Mapping[str, Any], run: RunConfig) -> list[dict[str, Any]]:
    """Return the stages of a config.json with the settings of users' methods under their current
    names, except settings that the stage of `run` at the same place has.
    """
    known: list[Collection[str]] = [flatten_settings(stage.settings) for stage in run.stages]
    known += [()] * (len(config["stages"]) - len(known))
    return [
        {**stage, "settings": current_settings(stage["settings"], names)}
        for stage, names in zip(config["stages"], known, strict=False)
    ]


def find_event_log(replay: str | Path) -> Path:
    """Return the path of the event log in a run's folder. Raises UserError if it has none."""
    path = Path(replay).expanduser() / DECISIONS_FILE
    if not path.is_file():
        raise UserError(
            f"replay {replay}: the folder has no {DECISIONS_FILE}, which runs write with "
            "--rollout-mode async or settings that require it"
        )
    return path


def includes_data_change(notes: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the changes include a setting of the training data."""
    data = {item.name for item in fields(PreferenceDataSettings)}
    return any(note["setting"] in data - {*CHANGEABLE_SETTINGS} for note in notes)


def _restore_ended_stage(stage: StageConfig, recorded: Mapping[str, Any]) -> StageConfig:
    """Return an ended stage with the settings it was trained with.

    Settings of CHANGEABLE_SETTINGS, which hold for the whole run, take their current values. Raises
    RunFolderError if the recorded settings are invalid.
    """
    current = flatten_settings(stage.settings)
    before = {**flatten_settings(type(stage.settings)()), **recorded}
    values = {
        key: current[key] if key in CHANGEABLE_SETTINGS else before[key]
        for key in current
        if key in before
    }
    problems: list[str] = []
    settings = unflatten_settings(type(stage.settings), values, problems, stage.name)
    if problems:
        raise RunFolderError(
            "the config.json of this run is invalid for a stage that has ended: "
            f"{'; '.join(problems)}: correct it, or choose another --output-dir"
        )
    return replace(stage, settings=settings)


def _find_changes(
    stage: StageConfig, recorded: Mapping[str, Any], changeable: set[str], done: int
) -> dict[str, tuple[Any, Any]]:
    """Return (value before, value now) of each setting that differs.

    Raises RunFolderError if `steps` is changed to fewer than are done, or if --change names a
    setting of the model: the checkpoint fixes these.
    """
    before = {**flatten_settings(type(stage.settings)()), **recorded}
    changed = {
        key: (before.get(key), value)
        for key, value in flatten_settings(stage.settings).items()
        if before.get(key) != value
    }
    if "steps" in changed and changed["steps"][1] < done:
        raise RunFolderError(
            f"{done} steps of this stage are done, so steps cannot be {changed['steps'][1]}: set "
            f"it to {done} or more"
        )
    named = {key for key in changed if key in changeable} - {*CHANGEABLE_SETTINGS}
    if of_model := [item.name for item in fields(ModelSettings) if item.name in named]:
        raise RunFolderError(
            f"--change {of_model[0]}: a checkpoint fits only the model from which it was saved. "
            "Begin a new run from its weights, with --base-model set to the folder of this run "
            "and another --output-dir"
        )
    return changed


def _format_refusal(lines: Sequence[str]) -> str:
    """Return the message for settings that differ and are not allowed to."""
    return (
        f"a resumed run keeps its settings, these differ: {'; '.join(lines)}. Use the recorded "
        "settings (with only --resume and --output-dir, all are read from the folder), allow a "
        "change with --change NAME=VALUE, or choose a new --output-dir"
    )


def _describe_changes(
    notes: Sequence[Mapping[str, Any]], stage: StageConfig, before: Mapping[str, Any], done: int
) -> list[str]:
    """Return a line for each change, and one about the effect of a changed number of steps on the
    learning-rate schedule.
    """
    lines = [
        f"from step {note['step']} on: {note['setting']} {note['from']} -> {note['to']}"
        for note in notes
    ]
    optim, steps = stage.settings.optim, stage.settings.loop.steps
    if optim.schedule == "constant" or all(note["setting"] != "steps" for note in notes):
        return lines
    was, now = (
        stage.settings.learning_rate
        * compute_lr_factor(optim.schedule, done, total, optim.warmup_steps)
        for total in (int(before["steps"]), steps)
    )
    lines.append(
        f"the {optim.schedule} schedule now ends at step {steps} of the stage, not at "
        f"{before['steps']}: the next step's learning rate is {now:.3g}, it would have been "
        f"{was:.3g}"
    )
    return lines
