"""Where a run goes on: the newest whole checkpoint that is its own, and what has to make way for
what it will write.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.errors import RunFolderError, UserError
from rl.learner import read_state
from rl.ranks import checkpoint
from rl.report import Console, never_took_a_step, saved_config
from rl.run import identity
from rl.run.changed import CHANGES, allowed
from rl.run.inventory import RESUMABLE, WEIGHTS, StageSteps, completed, stage_steps
from rl.run.keeper import Keeper
from rl.settings import Run, resolved


@dataclass(frozen=True)
class Position:
    """Where a run goes on: the checkpoint and its loop state; all empty at the beginning.

    run_id   of the run, from its config.json
    rows     the checkpoints that stay; `stale`: those after this point, whose folders make way
    run      as it goes on: what was asked for, but for stages that have ended; `notes`: what is
    different from here on; `changed`: before renamed  the end of a stage that goes on after all,
    and the name of its checkpoint from now on
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
    run: Run | None = None
    notes: Sequence[Mapping[str, Any]] = ()
    changed: Sequence[Mapping[str, Any]] = ()
    renamed: tuple[str, str] | None = None


def find(run: Run, folder: Path, console: Console) -> Position:
    """The newest whole checkpoint of the run in `folder`. Nothing is written.

    The settings of stages that have begun must be those asked for; a stage that has not may have
    been mended. RunFolderError or UserError where they are not, where a checkpoint is of another
    run, or the metrics have holes.
    """
    config = saved_config(folder)
    rows, trouble = completed(folder, stage_steps(config["stages"]))
    if trouble is not None:
        console.warn(
            f"{trouble}: the list is made again from the {len(rows)} checkpoints that are there"
        )
    found = Keeper.newest_whole(folder, rows, console)
    if found is None:
        return _beginning(run, folder, config, rows, console)
    row, state = found
    place = folder / RESUMABLE / row["name"]
    loop = _loop_state(state, config, place, row)
    going = allowed(config, run, loop["stage"], loop["next_batch"], row["batch"])
    run = going.run
    for text in going.said:
        console.note(text)
    identity.check_run(state, config, run, loop["stage"], place)
    own = stage_steps(resolved(run)["stages"])
    taken = [
        range(stage.first + 1, stage.first + 1 + stage.steps) for stage in own[: loop["stage"]]
    ]
    identity.check_metrics(
        folder, [*taken, range(loop["first_step"] + 1, loop["first_step"] + loop["next_batch"] + 1)]
    )
    here = rows.index(row)
    kept, stale = rows[: here + 1], rows[here + 1 :]  # none of those after it can be resumed from
    _check_the_way(folder, own, kept, stale, row["batch"])
    console.note(
        f"going on from {row['name']} (stage {row['stage']}, {loop['next_batch']} steps done)"
    )
    ended = row["kind"] == "final"
    renamed = None
    if ended and loop["next_batch"] < own[loop["stage"]].steps:  # steps were added
        ended, name = False, f"{row['stage']}-{row['batch']:06d}"
        renamed = (row["name"], name)
        there = folder / RESUMABLE / name
        again = {
            **row,
            "name": name,
            "kind": "last",
            "state_path": str(there),
            "sampler_path": str(there / "model"),
        }
        kept = [*[other for other in kept if other["name"] not in renamed], again]
    _change_state(loop, going.notes)
    where: dict[str, Any] = {
        "state_path": str(place),
        "stage": loop["stage"],
        "next_batch": loop["next_batch"],
        "step": row["batch"],
    }
    where |= {
        "stage_ended": ended,
        "loop_state": loop,
        "run_id": config.get(identity.ID),
        "rows": kept,
        "stale": stale,
        "renamed": renamed,
    }
    return Position(**where, run=run, notes=going.notes, changed=config.get(CHANGES, ()))


def _beginning(
    run: Run,
    folder: Path,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    console: Console,
) -> Position:
    notes: list[dict[str, Any]] = []
    if not never_took_a_step(folder):
        going = allowed(config, run, len(run.stages) - 1, 0, 0)
        run, notes = going.run, going.notes
    _check_the_way(folder, stage_steps(resolved(run)["stages"]), (), rows, 0)
    console.note(f"{folder} holds no whole checkpoint yet: starting from the beginning")
    return Position(
        run_id=config.get(identity.ID),
        stale=rows,
        run=run,
        notes=notes,
        changed=config.get(CHANGES, ()),
    )


def _change_state(loop: dict[str, Any], notes: Sequence[Mapping[str, Any]]) -> None:
    """What the loop's state holds of a setting that changes: it would win over the setting."""
    for note in notes:
        state = loop.get("method")
        if (
            note["setting"] == "kl_coef"
            and isinstance(state, dict)
            and "kl_coef" in state
            and note["to"] is not None
        ):
            state["kl_coef"] = note["to"]


def _loop_state(
    state: Mapping[str, Any], config: Mapping[str, Any], place: Path, row: Mapping[str, Any]
) -> dict[str, Any]:
    """What the loop noted in a checkpoint. RunFolderError where that is not what its name and the
    run's stages say.
    """
    loop, stages = state.get("metadata"), stage_steps(config["stages"])
    wrong = None
    if (
        isinstance(loop, dict)
        and "first_step" not in loop
        and loop.get("stage") in range(len(stages))
    ):
        loop["first_step"] = stages[loop["stage"]].first
    if not isinstance(loop, dict):
        wrong = "it has no state of a loop"
    elif bad := [
        key
        for key in ("stage", "next_batch", "first_step")
        if not isinstance(loop.get(key), int) or isinstance(loop[key], bool)
    ]:
        wrong = f"its {bad[0]} is {loop.get(bad[0])!r}"
    elif not 0 <= loop["stage"] < len(stages) or stages[loop["stage"]].name != row["stage"]:
        wrong = (
            f"it is of stage number {loop['stage'] + 1}, which the run does not call {row['stage']}"
        )
    elif (
        loop["first_step"] != stages[loop["stage"]].first
        or not 0 <= loop["next_batch"] <= stages[loop["stage"]].steps
    ):
        wrong = f"it was made {loop['next_batch']} steps after step {loop['first_step']}, where the run's stage does not go"
    elif not place.name.endswith("-final") and place.name != f"{row['stage']}-{row['batch']:06d}":
        wrong = f"it is of step {row['batch']}"
    if wrong is not None:
        raise RunFolderError(
            f"the checkpoint {place} is not as this run saved it: {wrong}. Move it out of {place.parent}"
        )
    assert isinstance(loop, dict)
    return loop


def _check_the_way(
    folder: Path,
    stages: Sequence[StageSteps],
    kept: Sequence[Mapping[str, Any]],
    stale: Sequence[Mapping[str, Any]],
    step: int,
) -> None:
    """RunFolderError where something that is not ours to remove has a name that the run is going to
    write under.
    """
    stays, leaves = {row["name"] for row in kept}, {row["name"] for row in stale}
    for parent, form in (
        (folder / RESUMABLE, r"(?:(\d{6,12})|final)"),
        (folder / WEIGHTS, r"best-(\d{6,12})"),
    ):
        for path in sorted(parent.iterdir()) if parent.is_dir() else ():
            for stage in stages:
                found = re.fullmatch(re.escape(stage.name) + "-" + form, path.name)
                at = (
                    None
                    if found is None
                    else stage.first + stage.steps
                    if found[1] is None
                    else int(found[1])
                )
                if (
                    at is not None
                    and at >= step
                    and path.name not in stays
                    and (path.name not in leaves or path.is_symlink())
                ):
                    raise RunFolderError(
                        f"{path} is in the way: the run is going to write its step {at} under that name, and it is "
                        f"{'a link' if path.is_symlink() else 'none of its own'}. Move it elsewhere"
                    )


def make_way(folder: Path, position: Position) -> None:
    """Removes cut-off writes, and damaged checkpoints after the point of a resume. Whole weights
    stay until they are made again.

    The end of a stage that goes on after all becomes a checkpoint like others: to be called before
    config.json says that it goes on.
    """
    if position.renamed is not None:
        ended, name = (folder / RESUMABLE / part for part in position.renamed)
        checkpoint.remove(name)  # of the same step, from before the stage ended
        os.rename(ended, name)
    for parent in (folder / RESUMABLE, folder / WEIGHTS):
        checkpoint.remove_leftovers(parent)
    for row in position.stale:
        place = checkpoint.below(
            folder / (RESUMABLE if row["state_path"] else WEIGHTS), row["name"]
        )
        try:
            if row["state_path"]:
                # as whoever looked for the point did: what cannot be read as a state is not only
                # what is damaged
                read_state(place)
            else:
                checkpoint.verify(place)
        except checkpoint.DamagedCheckpoint:
            checkpoint.remove(place)


def check_finals(run: Run, folder: Path, names: Sequence[str]) -> None:
    """UserError where the final checkpoint of a stage that is done and that others begin from is
    not whole.
    """
    for name in names:
        place = folder / RESUMABLE / f"{name}-final"
        try:
            checkpoint.verify(place)
        except checkpoint.DamagedCheckpoint as error:
            raise UserError(
                f"a later stage begins from the end of stage {name}, which is not whole any more: {error}"
            ) from error
