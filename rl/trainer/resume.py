"""Find the resume point of a run: the newest complete checkpoint that belongs to it. Find and
remove what conflicts with files that the run will write.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.config import RunConfig, match_recorded_files, resolve_config
from rl.distributed import checkpoint_folder
from rl.errors import RunFolderError, UserError
from rl.learner import read_learner_state
from rl.reporting import Console, has_no_steps, load_saved_config
from rl.trainer import same_run
from rl.trainer.checkpoint_manager import (
    CHECKPOINTS_FOLDER,
    WEIGHTS_FOLDER,
    CheckpointManager,
    StageSteps,
    complete_checkpoint_list,
    read_stage_steps,
)
from rl.trainer.config_diff import CHANGES_KEY, check_changes


@dataclass(frozen=True)
class ResumePoint:
    """Describe a resume point: the checkpoint and its loop state; all empty at the beginning of a
    run.

    run_id: of the run, from its config.json

    rows: the checkpoints that stay

    stale: the checkpoints after this point; damaged ones are removed, others are replaced

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
    rows: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    stale: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
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
    rows, trouble = complete_checkpoint_list(folder, read_stage_steps(config["stages"]))
    if trouble is not None:
        console.warn(f"{trouble}: the list is rebuilt from the {len(rows)} checkpoints on disk")
    newest = CheckpointManager.find_newest_intact(folder, rows, console)
    if newest is None:
        return _start_from_beginning(run, folder, config, rows, console)
    row, state = newest
    path = folder / CHECKPOINTS_FOLDER / row["name"]
    loop = _read_loop_state(state, config, path, row)
    changes = check_changes(config, run, loop["stage"], loop["next_batch"], row["batch"])
    run = changes.run
    for text in changes.messages:
        console.note(text)
    same_run.check_same_run(state, config, run, loop["stage"], path)
    stages = read_stage_steps(resolve_config(run)["stages"])
    finished = [
        range(stage.first + 1, stage.first + 1 + stage.steps) for stage in stages[: loop["stage"]]
    ]
    same_run.check_logged_steps(
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
        ended, renamed_row = False, _rename_final_checkpoint(folder, row)
        renamed = (row["name"], renamed_row["name"])
        kept_rows = [*[other for other in kept_rows if other["name"] not in renamed], renamed_row]
    _apply_changed_settings(loop, changes.notes)
    fields: dict[str, Any] = {
        "state_path": str(path),
        "stage": loop["stage"],
        "next_batch": loop["next_batch"],
        "step": row["batch"],
    }
    fields |= {
        "stage_ended": ended,
        "loop_state": loop,
        "run_id": config.get(same_run.RUN_ID_KEY),
        "rows": kept_rows,
        "stale": stale,
        "renamed": renamed,
    }
    return ResumePoint(**fields, run=run, notes=changes.notes, changed=config.get(CHANGES_KEY, ()))


def _rename_final_checkpoint(folder: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a final checkpoint as that of a checkpoint before the stage's end."""
    name = f"{row['stage']}-{row['batch']:06d}"
    target = folder / CHECKPOINTS_FOLDER / name
    return {
        **row,
        "name": name,
        "kind": "last",
        "state_path": str(target),
        "sampler_path": str(target / "model"),
    }


def _start_from_beginning(
    run: RunConfig,
    folder: Path,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    console: Console,
) -> ResumePoint:
    notes: list[dict[str, Any]] = []
    if not has_no_steps(folder):
        changes = check_changes(config, run, len(run.stages) - 1, 0, 0)
        run, notes = changes.run, changes.notes
    _check_no_conflicts(folder, read_stage_steps(resolve_config(run)["stages"]), (), rows, 0)
    console.note(f"{folder} holds no complete checkpoint yet: starting from the beginning")
    return ResumePoint(
        run_id=config.get(same_run.RUN_ID_KEY),
        stale=rows,
        run=run,
        notes=notes,
        changed=config.get(CHANGES_KEY, ()),
    )


def _apply_changed_settings(loop: dict[str, Any], notes: Sequence[Mapping[str, Any]]) -> None:
    """Update changed settings in the loop's state, which would otherwise override the setting."""
    for note in notes:
        state = loop.get("method")
        if (
            note["setting"] == "kl_coef"
            and isinstance(state, dict)
            and "kl_coef" in state
            and note["to"] is not None
        ):
            state["kl_coef"] = note["to"]


def _read_loop_state(
    state: Mapping[str, Any], config: Mapping[str, Any], path: Path, row: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the loop state of a checkpoint. Raises RunFolderError if it contradicts the
    checkpoint's name or the run's stages.
    """
    loop, stages = state.get("metadata"), read_stage_steps(config["stages"])
    wrong = None
    if (
        isinstance(loop, dict)
        and "first_step" not in loop
        and loop.get("stage") in range(len(stages))
    ):
        loop["first_step"] = stages[loop["stage"]].first
    if not isinstance(loop, dict):
        wrong = "it has no loop state"
    elif bad := [
        key
        for key in ("stage", "next_batch", "first_step")
        if not isinstance(loop.get(key), int) or isinstance(loop[key], bool)
    ]:
        wrong = f"its {bad[0]} is {loop.get(bad[0])!r}"
    elif not 0 <= loop["stage"] < len(stages) or stages[loop["stage"]].name != row["stage"]:
        wrong = (
            f"it belongs to stage number {loop['stage'] + 1}, which is not called "
            f"{row['stage']} in the run"
        )
    elif (
        loop["first_step"] != stages[loop["stage"]].first
        or not 0 <= loop["next_batch"] <= stages[loop["stage"]].steps
    ):
        wrong = (
            f"it was made {loop['next_batch']} steps after step {loop['first_step']}, which "
            "is outside of the run's stage"
        )
    elif not path.name.endswith("-final") and path.name != f"{row['stage']}-{row['batch']:06d}":
        wrong = f"it belongs to step {row['batch']}"
    if wrong is not None:
        raise RunFolderError(
            f"the checkpoint {path} is not as this run saved it: {wrong}. Move it out of "
            f"{path.parent}"
        )
    assert isinstance(loop, dict)
    return loop


def _check_no_conflicts(
    folder: Path,
    stages: Sequence[StageSteps],
    kept_rows: Sequence[Mapping[str, Any]],
    stale_rows: Sequence[Mapping[str, Any]],
    step: int,
) -> None:
    """Raise RunFolderError if a foreign file or folder has a name that the run is going to write
    to.
    """
    kept_names, stale_names = (
        {row["name"] for row in kept_rows},
        {row["name"] for row in stale_rows},
    )
    for parent, form in (
        (folder / CHECKPOINTS_FOLDER, r"(?:(\d{6,12})|final)"),
        (folder / WEIGHTS_FOLDER, r"best-(\d{6,12})"),
    ):
        for path in sorted(parent.iterdir()) if parent.is_dir() else ():
            for stage in stages:
                match = re.fullmatch(re.escape(stage.name) + "-" + form, path.name)
                checkpoint_step = (
                    None
                    if match is None
                    else stage.first + stage.steps
                    if match[1] is None
                    else int(match[1])
                )
                if (
                    checkpoint_step is not None
                    and checkpoint_step >= step
                    and path.name not in kept_names
                    and (path.name not in stale_names or path.is_symlink())
                ):
                    raise RunFolderError(
                        f"{path} is in the way: the run is going to write its step "
                        f"{checkpoint_step} under that name, and it is "
                        f"{'a link' if path.is_symlink() else 'not from this run'}. Move it "
                        "elsewhere"
                    )


def remove_damaged_checkpoints(folder: Path, resume_point: ResumePoint) -> None:
    """Remove incomplete writes and damaged checkpoints after the resume point. Complete weights
    stay until the run writes them again.

    The final checkpoint of a stage that continues becomes an ordinary checkpoint. Call this
    function before config.json records that the stage continues.
    """
    if resume_point.renamed is not None:
        ended, name = (folder / CHECKPOINTS_FOLDER / part for part in resume_point.renamed)
        checkpoint_folder.remove_checkpoint(
            name
        )  # a checkpoint of the same step, from before the stage ended
        os.rename(ended, name)
    for parent in (folder / CHECKPOINTS_FOLDER, folder / WEIGHTS_FOLDER):
        checkpoint_folder.remove_leftovers(parent)
    for row in resume_point.stale:
        path = checkpoint_folder.checkpoint_path(
            folder / (CHECKPOINTS_FOLDER if row["state_path"] else WEIGHTS_FOLDER), row["name"]
        )
        try:
            if row["state_path"]:
                # The same reading as in the search for the resume point: a state may be unreadable
                # for other reasons than damage.
                read_learner_state(path)
            else:
                checkpoint_folder.verify_checkpoint(path)
        except checkpoint_folder.DamagedCheckpoint:
            checkpoint_folder.remove_checkpoint(path)


def check_final_checkpoints(run: RunConfig, folder: Path, names: Sequence[str]) -> None:
    """Raise UserError if the final checkpoint of an ended stage is damaged and other stages begin
    from it.
    """
    for name in names:
        path = folder / CHECKPOINTS_FOLDER / f"{name}-final"
        try:
            checkpoint_folder.verify_checkpoint(path)
        except checkpoint_folder.DamagedCheckpoint as error:
            raise UserError(
                f"a later stage begins from the end of stage {name}, but that checkpoint is "
                f"damaged: {error}"
            ) from error
