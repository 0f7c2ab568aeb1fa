"""Find the resume point of a run: the newest complete checkpoint that belongs to it. Remove what
conflicts with files that the run will write.

A checkpoint belongs to a run if run id, seed, model and data are equal. Fields that the state of an
older checkpoint lacks are not compared.

A resumed run may differ from the settings that its folder records in settings that change no
result, in more steps, and in the settings that --change names.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rl.algorithms import METHODS, RolloutDataSettings
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
    match_recorded_files,
    parse_changes,
    resolve_config,
    unflatten_settings,
)
from rl.data import ProblemSet
from rl.distributed import checkpoint_folder
from rl.errors import RunFolderError, UserError
from rl.jsonl import METRICS_FILE, read_metrics
from rl.learner import read_learner_state
from rl.lr_schedule import compute_lr_factor
from rl.reporting import Console, has_steps, load_saved_config
from rl.sanitize import list_some
from rl.seed import derive_seed
from rl.trainer.checkpoint_manager import (
    CHECKPOINTS_FOLDER,
    WEIGHTS_FOLDER,
    CheckpointManager,
    CheckpointRow,
    StageSteps,
    complete_checkpoint_list,
    final_checkpoint,
    locate_checkpoint,
    make_checkpoint_row,
    match_checkpoint_name,
    read_stage_steps,
)
from rl.trainer.initial_weights import (
    continues_adapter,
    find_adapter_root,
    find_previous_stage,
)
from rl.types import LoraConfig

RUN_ID_KEY = "id"
CHANGES_KEY = "changes"  # in config.json
# hashed rows of a data set: all of a small set, evenly spaced rows of a large set
_HASHED_ROWS, _HASHED_STREAM_ROWS = 2000, 64


@dataclass(frozen=True)
class ResumePoint:
    """Describe a resume point: the checkpoint and its loop state; all empty at the beginning of a
    run.

    run_id: of the run, from its config.json

    rows: the checkpoints that stay

    stale: the checkpoints after this point; damaged ones are removed now, others when the run
    writes them again or saves its next checkpoint

    run: the run as it continues: the requested settings, except for stages that have ended

    notes: the settings that differ from this point on

    changed: the settings that differed at earlier resumes

    renamed: (old, new) checkpoint name of an ended stage that continues because steps were added
    """

    state_path: str | None = None
    stage: int = 0
    next_batch: int = 0
    step: int = -1
    stage_ended: bool = False
    loop_state: Mapping[str, Any] | None = None
    run_id: str | None = None
    rows: Sequence[CheckpointRow] = ()
    stale: Sequence[CheckpointRow] = ()
    run: RunConfig | None = None
    notes: Sequence[Mapping[str, Any]] = ()
    changed: Sequence[Mapping[str, Any]] = ()
    renamed: tuple[str, str] | None = None


def find_resume_point(run: RunConfig, folder: Path, console: Console) -> ResumePoint:
    """Return the resume point of the run in `folder`: its newest complete checkpoint. Nothing is
    written.

    The settings of stages that have begun must equal the requested settings; later stages may
    differ. Raises RunFolderError or UserError if they differ, if a checkpoint belongs to another
    run, or if the metrics have gaps.
    """
    config = match_recorded_files(load_saved_config(folder), resolve_config(run))
    recorded_stages = read_stage_steps(config["stages"])
    rows, trouble = complete_checkpoint_list(folder, recorded_stages)
    if trouble is not None:
        console.warn(f"{trouble}: the list is rebuilt from the {len(rows)} checkpoints on disk")
    newest = CheckpointManager.find_newest_intact(folder, rows, console)
    if newest is None:
        return _start_from_beginning(run, folder, config, rows, console)
    row, state = newest
    path = folder / CHECKPOINTS_FOLDER / row["name"]
    loop = _read_loop_state(state, recorded_stages, path, row)
    changes = check_changes(config, run, loop["stage"], loop["next_batch"], row["batch"])
    run = changes.run
    for text in changes.messages:
        console.note(text)
    check_same_run(state, config, run, loop["stage"], path)
    stages = read_stage_steps(resolve_config(run)["stages"])
    finished = [
        range(stage.first + 1, stage.first + 1 + stage.steps) for stage in stages[: loop["stage"]]
    ]
    check_logged_steps(
        folder,
        [*finished, range(loop["first_step"] + 1, loop["first_step"] + loop["next_batch"] + 1)],
    )
    index = rows.index(row)
    # no checkpoint after it can be resumed from
    kept_rows, stale = rows[: index + 1], rows[index + 1 :]
    _check_no_conflicts(folder, stages, kept_rows, stale, row["batch"])
    console.note(
        f"resuming from {row['name']} (stage {row['stage']}, {loop['next_batch']} steps done)"
    )
    ended = row["kind"] == "final"
    renamed = None
    if ended and loop["next_batch"] < stages[loop["stage"]].steps:  # steps were added
        target = path.with_name(f"{row['stage']}-{row['batch']:06d}")
        ended, renamed = False, (row["name"], target.name)
        rows = [other for other in kept_rows if other["name"] not in renamed]
        kept_rows = [*rows, make_checkpoint_row(target, "last", row["stage"], row["batch"])]
    if ended:
        _note_finished_run(console, run, loop["stage"])
    _apply_changed_settings(loop, changes.notes)
    return ResumePoint(
        state_path=str(path),
        stage=loop["stage"],
        next_batch=loop["next_batch"],
        step=row["batch"],
        stage_ended=ended,
        loop_state=loop,
        run_id=config.get(RUN_ID_KEY),
        rows=kept_rows,
        stale=stale,
        run=run,
        notes=changes.notes,
        changed=config.get(CHANGES_KEY, ()),
        renamed=renamed,
    )


def _start_from_beginning(
    run: RunConfig,
    folder: Path,
    config: Mapping[str, Any],
    rows: Sequence[CheckpointRow],
    console: Console,
) -> ResumePoint:
    notes: list[dict[str, Any]] = []
    if has_steps(folder):
        changes = check_changes(config, run, 0, 0, 0)
        run, notes = changes.run, changes.notes
        for text in changes.messages:
            console.note(text)
    _check_no_conflicts(folder, read_stage_steps(resolve_config(run)["stages"]), (), rows, 0)
    console.note(f"{folder} holds no complete checkpoint yet: starting from the beginning")
    return ResumePoint(
        run_id=config.get(RUN_ID_KEY),
        stale=rows,
        run=run,
        notes=notes,
        changed=config.get(CHANGES_KEY, ()),
    )


def _apply_changed_settings(loop: dict[str, Any], notes: Sequence[Mapping[str, Any]]) -> None:
    """Update changed settings in the loop's state, which would otherwise override the setting.

    Groups in flight start again: they belong to batches, prompts and samples of the old settings.
    """
    method = loop.get("method")
    for note in notes:
        changes_kl = note["setting"] == "kl_coef" and note["to"] is not None
        if changes_kl and isinstance(method, dict) and "kl_coef" in method:
            method["kl_coef"] = note["to"]
    if any(note["setting"] not in (*CHANGEABLE_SETTINGS, "steps") for note in notes):
        loop["in_flight"] = None


def _read_loop_state(
    state: Mapping[str, Any], stages: Sequence[StageSteps], path: Path, row: CheckpointRow
) -> dict[str, Any]:
    """Return the loop state of a checkpoint. Raises RunFolderError if it contradicts the
    checkpoint's name or the run's stages.
    """
    loop = state.get("metadata")
    if (wrong := _find_contradiction(loop, stages, path, row)) is not None:
        raise RunFolderError(
            f"the checkpoint {path} is not as this run saved it: {wrong}. Move it out of "
            f"{path.parent}"
        )
    assert isinstance(loop, dict)
    return loop


def _find_contradiction(
    loop: Any, stages: Sequence[StageSteps], path: Path, row: CheckpointRow
) -> str | None:
    """Return what contradicts the checkpoint's name or the run's stages in a loop state. Add
    `first_step`, which older checkpoints lack.
    """
    if not isinstance(loop, dict):
        return "it has no loop state"
    if "first_step" not in loop and loop.get("stage") in range(len(stages)):
        loop["first_step"] = stages[loop["stage"]].first
    for key in ("stage", "next_batch", "first_step"):
        if not isinstance(loop.get(key), int) or isinstance(loop[key], bool):
            return f"its {key} is {loop.get(key)!r}"
    number, done, first = loop["stage"], loop["next_batch"], loop["first_step"]
    if not 0 <= number < len(stages) or stages[number].name != row["stage"]:
        return (
            f"it belongs to stage number {number + 1}, which is not called {row['stage']} in the "
            "run"
        )
    if first != stages[number].first or not 0 <= done <= stages[number].steps:
        return f"it was made {done} steps after step {first}, which is outside of the run's stage"
    if not path.name.endswith("-final") and path.name != f"{row['stage']}-{row['batch']:06d}":
        return f"it belongs to step {row['batch']}"
    return None


def _check_no_conflicts(
    folder: Path,
    stages: Sequence[StageSteps],
    kept_rows: Sequence[CheckpointRow],
    stale_rows: Sequence[CheckpointRow],
    step: int,
) -> None:
    """Raise RunFolderError if a foreign file or folder has a name that the run is going to write
    to.
    """
    kept_names, stale_names = ({row["name"] for row in rows} for rows in (kept_rows, stale_rows))
    for parent, best in ((folder / CHECKPOINTS_FOLDER, False), (folder / WEIGHTS_FOLDER, True)):
        for path in sorted(parent.iterdir()) if parent.is_dir() else ():
            match = match_checkpoint_name(path.name, stages, best=best)
            if match is None or match[1] < step or path.name in kept_names:
                continue
            if path.name not in stale_names or path.is_symlink():
                origin = "a link" if path.is_symlink() else "not from this run"
                raise RunFolderError(
                    f"{path} is in the way: the run is going to write its step {match[1]} under "
                    f"that name, and it is {origin}. Move it elsewhere"
                )


def remove_damaged_checkpoints(folder: Path, resume_point: ResumePoint) -> None:
    """Remove incomplete writes and damaged checkpoints after the resume point. Complete weights
    stay until the run writes them again or saves its next checkpoint.

    The final checkpoint of a stage that continues becomes an ordinary checkpoint. Call this
    function before config.json records that the stage continues.
    """
    if resume_point.renamed is not None:
        ended, name = (folder / CHECKPOINTS_FOLDER / part for part in resume_point.renamed)
        # a checkpoint of the same step, from before the stage ended
        checkpoint_folder.remove_checkpoint(name)
        os.rename(ended, name)
    for parent in (folder / CHECKPOINTS_FOLDER, folder / WEIGHTS_FOLDER):
        checkpoint_folder.remove_leftovers(parent)
    for row in resume_point.stale:
        path = locate_checkpoint(folder, row)
        try:
            if row["state_path"]:
                # The same reading as in the search for the resume point: a state may be unreadable
                # for other reasons than damage.
                read_learner_state(path)
            else:
                checkpoint_folder.verify_checkpoint(path)
        except checkpoint_folder.DamagedCheckpoint:
            checkpoint_folder.remove_checkpoint(path)


def check_final_checkpoints(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError if the final checkpoint of an ended stage is damaged and other stages begin
    from it.
    """
    for name in names:
        try:
            checkpoint_folder.verify_checkpoint(final_checkpoint(folder, name))
        except checkpoint_folder.DamagedCheckpoint as error:
            raise UserError(
                f"a later stage begins from the end of stage {name}, but that checkpoint is "
                f"damaged: {error}"
            ) from error


def make_identity(
    run: RunConfig, run_id: str | None, index: int, problems: ProblemSet
) -> dict[str, Any]:
    """Return the identity of the run that a checkpoint of this stage records."""
    return {
        RUN_ID_KEY: run_id,
        "seed": run.options.seed,
        "stage": run.stages[index].name,
        "data": compute_data_fingerprint(problems),
    }


def compute_data_fingerprint(problems: ProblemSet) -> str:
    """Return a hash of the training data: the number of rows, their prompts and answers."""
    digest = hashlib.sha256(str(len(problems)).encode())
    stride = -(-len(problems) // (_HASHED_STREAM_ROWS if problems.is_lazy else _HASHED_ROWS))
    for i in range(0, len(problems), stride):
        row = problems.at(i)
        answers = [[answer.reward, answer.text] for answer in row.answers]
        texts = [list(map(dict, row.messages)), row.response, row.rejected]
        content = [*texts, row.meta.get("answer"), answers]
        digest.update(
            json.dumps(content, sort_keys=True, default=str).encode("utf-8", "surrogatepass")
        )
    return digest.hexdigest()[:32]


def check_same_run(
    state: Mapping[str, Any],
    config: Mapping[str, Any],
    run: RunConfig,
    index: int,
    checkpoint_path: Path,
) -> None:
    """Raise RunFolderError, naming the differences, if a checkpoint is of another run.

    Run id, seed, stage and model are compared with those of `run`.
    """
    recorded = state["metadata"].get("run")
    recorded = recorded if isinstance(recorded, dict) else {}
    expected = [
        ("run", RUN_ID_KEY, config.get(RUN_ID_KEY)),
        ("seed", "seed", run.options.seed),
        ("stage", "stage", run.stages[index].name),
    ]
    changed = [
        f"its {name} is {recorded[key]!r}, this run's is {value!r}"
        for name, key, value in expected
        if value is not None and recorded.get(key) not in (None, value)
    ]
    changed += _diff_model(state["spec"], run, index)
    if changed:
        raise RunFolderError(
            f"the checkpoint {checkpoint_path} belongs to another run: {'; '.join(changed)}. Move "
            f"it out of {checkpoint_path.parent}, so that --resume continues from the newest "
            "checkpoint of this run, or begin a new run from its weights with --base-model "
            f"{checkpoint_path / 'model'} and another --output-dir"
        )


def _diff_model(spec: Mapping[str, Any], run: RunConfig, index: int) -> list[str]:
    """Return a line for each difference between a checkpoint's spec and this stage's model."""
    stages, root = run.stages, find_adapter_root(run.stages, index)
    before = find_previous_stage(stages, root)
    model, seed = stages[root].settings.model, run.options.seed
    base = model.base_model if before is None else f"{stages[before].name}-final/model"
    is_continued = continues_adapter(stages, root)  # another run's, with its seed and base
    expected: dict[str, Any] = {}
    if not is_continued:
        lora = model.make_lora(derive_seed(seed, "adapter") % 2**31)
        expected["seed"] = derive_seed(seed, "weights") % 2**31
        expected["lora"] = lora and asdict(lora)
    expected["value_head"] = METHODS.create(stages[index]).value_head
    if spec.get("lora"):
        spec = {**spec, "lora": asdict(LoraConfig(**spec["lora"]))}
    differences = [
        f"{key} of its model is {spec[key]!r}, this run's is {value!r}"
        for key, value in expected.items()
        if spec.get(key, value) != value
    ]
    recorded_base = str(spec.get("base_model", base))
    is_moved = before is not None and Path(recorded_base).parts[-2:] == Path(base).parts
    if not is_continued and recorded_base != base and not is_moved:
        differences.append(
            f"it was made from {recorded_base}, this run's stage {stages[index].name} from {base}"
        )
    return differences


def check_same_data(recorded: Any, problems: ProblemSet, stage: str, checkpoint_path: str) -> None:
    """Raise UserError if the rows are not those that a checkpoint's stage trained on."""
    if not isinstance(recorded, dict) or not isinstance(recorded.get("data"), str):
        return
    if recorded["data"] != (current := compute_data_fingerprint(problems)):
        raise UserError(
            f"the data of stage {stage}, {problems.name}, are not those that {checkpoint_path} was "
            f"trained on (their fingerprint is {current}, was {recorded['data']}): restore the "
            "file, or begin a new run from those weights with --base-model "
            f"{checkpoint_path}/model and another --output-dir"
        )


def check_logged_steps(folder: Path, steps: Sequence[range]) -> None:
    """Raise UserError if metrics.jsonl lacks or repeats a step that the run has taken.

    `steps` holds the steps of each stage so far.
    """
    path = folder / METRICS_FILE
    counts = Counter(row["step"] for row in read_metrics(path))
    expected = [step for part in steps for step in part]
    missing = [step for step in expected if not counts[step]]
    duplicated = [step for step in expected if counts[step] > 1]
    if missing or duplicated:
        problem = f"has {_format_steps(duplicated)} more than once"
        if missing:
            problem = f"lacks {_format_steps(missing)}"
        raise UserError(
            f"{path} {problem}, and the checkpoint was made after them: restore the file from a "
            "copy, or begin a new run from the checkpoint's weights with --base-model and another "
            "--output-dir"
        )


def _format_steps(steps: Sequence[int]) -> str:
    """Return the steps as words, at most 6 of them."""
    return f"step{'s' * (len(steps) > 1)} {list_some(steps, 6)}"


def _note_finished_run(console: Console, run: RunConfig, stage_index: int) -> None:
    """Print how to continue the run if the stage that has ended is its last."""
    if stage_index == len(run.stages) - 1:
        flag = "steps" if len(run.stages) == 1 else f"{run.stages[-1].name}.steps"
        console.note(f"all steps of this run are done: --{flag} N with a larger N continues it")


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
    requested = resolve_config(run)
    recorded_stages, requested_stages = use_current_names(config, run), requested["stages"]
    recorded = {**config, "stages": recorded_stages[: stage_index + 1]}
    current = {**requested, "stages": requested_stages[: stage_index + 1]}
    names = [[(s["name"], s["method"]) for s in c["stages"]] for c in (recorded, current)]
    if names[0] != names[1]:
        refused = diff_configs(recorded, current, ignore=CHANGEABLE_OPTIONS, **default_sources)
        raise RunFolderError(_format_refusal(refused))
    known = {key for item in requested_stages for key in item["settings"]}
    changeable = list_changed_settings(run.options.change, known)
    allowed = {*CHANGEABLE_SETTINGS, "steps", *changeable}
    ended = [
        _restore_ended_stage(stage, saved["settings"])
        for stage, saved in zip(run.stages[:stage_index], recorded_stages, strict=False)
    ]
    saved_settings = recorded_stages[stage_index]["settings"]
    stage = _keep_rollout_steps(run.stages, stage_index, saved_settings, done)
    changed = _find_changes(stage, saved_settings, changeable, done)
    notes = [
        {"step": step, "stage": stage.name, "setting": key, "from": old_value, "to": value}
        for key, (old_value, value) in changed.items()
        if key in allowed
    ]
    _check_ended_steps(recorded_stages[:stage_index], requested_stages[:stage_index], stage.name)
    refused = diff_configs(
        recorded, current, ignore={*CHANGEABLE_OPTIONS, *allowed}, **default_sources
    )
    if refused:
        raise RunFolderError(_format_refusal(refused))
    messages = _describe_changes(notes, stage, saved_settings, done)
    messages += _list_idle_changes(ended, run.options.change)
    later_changes = diff_configs(
        {"options": {}, "stages": recorded_stages[stage_index + 1 :]},
        {"options": {}, "stages": requested_stages[stage_index + 1 :]},
        **default_sources,
    )
    if later_changes:
        messages.append(f"changed in stages that have not begun: {'; '.join(later_changes)}")
    run = replace(run, stages=(*ended, stage, *run.stages[stage_index + 1 :]))
    return ConfigChanges(run, notes, messages)


def use_current_names(config: Mapping[str, Any], run: RunConfig) -> list[dict[str, Any]]:
    """Return the stages of a config.json with the settings of users' methods under their current
    names, except settings that the stage of `run` at the same place has.
    """
    known: list[Collection[str]] = [flatten_settings(stage.settings) for stage in run.stages]
    known += [()] * (len(config["stages"]) - len(known))
    return [
        {**stage, "settings": current_settings(stage["settings"], names)}
        for stage, names in zip(config["stages"], known, strict=False)
    ]


def includes_data_change(notes: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the changes include a setting of the training data."""
    data = {item.name for item in fields(PreferenceDataSettings)}
    return any(note["setting"] in data - {*CHANGEABLE_SETTINGS} for note in notes)


def _restore_ended_stage(stage: StageConfig, recorded: Mapping[str, Any]) -> StageConfig:
    """Return an ended stage with the settings it was trained with.

    Settings of CHANGEABLE_SETTINGS, which hold for the whole run, take their current values; not
    rollouts_every, by which a later stage finds the rollouts of this one. Raises RunFolderError if
    the recorded settings are invalid.
    """
    current = flatten_settings(stage.settings)
    before = {**flatten_settings(type(stage.settings)()), **recorded}
    values = {
        key: current[key] if key in CHANGEABLE_SETTINGS and key != "rollouts_every" else before[key]
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


def _keep_rollout_steps(
    stages: Sequence[StageConfig], index: int, recorded: Mapping[str, Any], done: int
) -> StageConfig:
    """Return the stage at which the run resumes, with the recorded rollouts_every if a later stage
    learns from its rollouts and some of them may be written.
    """
    stage, later = stages[index], [item.settings.data for item in stages[index + 1 :]]
    if done and any(isinstance(d, RolloutDataSettings) and d.dataset == stage.name for d in later):
        every = recorded.get("rollouts_every", stage.settings.loop.rollouts_every)
        return stage.with_section("loop", rollouts_every=every)
    return stage


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


def _check_ended_steps(
    recorded: Sequence[Mapping[str, Any]], requested: Sequence[Mapping[str, Any]], current: str
) -> None:
    """Raise RunFolderError if the steps of stages that have ended differ. `current`: the stage at
    which the run resumes.
    """
    lines = [
        f"stage {a['name']}, which has ended: steps {was} -> {now}"
        for a, b in zip(recorded, requested, strict=True)
        if (was := a["settings"].get("steps")) != (now := b["settings"].get("steps"))
    ]
    if lines:
        raise RunFolderError(
            f"the steps of a stage that has ended cannot change: {'; '.join(lines)}. Use the "
            f"recorded number (--{current}.steps changes that of stage {current} alone), or choose "
            "a new --output-dir"
        )


def _list_idle_changes(ended: Sequence[StageConfig], words: Sequence[str]) -> list[str]:
    """Return a line for each word of --change that names a stage that has ended."""
    return [
        f"stage {stage.name} has ended: --change {key} changes nothing"
        for stage in ended
        for key, _ in parse_changes(words, [])
        if key.rpartition(".")[0] == stage.name
    ]


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
