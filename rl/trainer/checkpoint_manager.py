"""Scan a run's checkpoints; keep the last k, each stage's final one and the best by a metric."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.client import TrainingClient
from rl.distributed import checkpoint_folder
from rl.errors import UserError
from rl.jsonl import METRICS_FILE, Row, read_jsonl, read_metrics, replace_nonfinite, write_jsonl
from rl.learner import read_learner_state
from rl.reporting import CHECKPOINTS, Console, Logbook

CHECKPOINTS_FOLDER, WEIGHTS_FOLDER = "checkpoints", "sampler_weights"
# A row of checkpoints.jsonl: _ROW_TYPES, and sampler_path; of best weights also metric and value.
CheckpointRow = dict[str, Any]
_KIND_ORDER = {"best": 0, "last": 1, "final": 2}
_ROW_TYPES: dict[str, Any] = {
    "name": str,
    "batch": int,
    "stage": str,
    "kind": str,
    "state_path": (str, type(None)),
}


@dataclass(frozen=True)
class StageSteps:
    """Hold a stage's steps: `first` is the run's step count before the stage.

    `metric` is the metric that selects the stage's best weights.
    """

    name: str
    first: int
    steps: int
    metric: str | None = None


def read_stage_steps(stages: Sequence[Mapping[str, Any]]) -> list[StageSteps]:
    """Return the steps of the stages in a config.json.

    A step is reserved between stages for the evaluation before the first step.
    """
    result, first = [], 0
    for stage in stages:
        steps = stage["settings"].get("steps", 0)
        steps = steps if isinstance(steps, int) else 0
        result.append(StageSteps(stage["name"], first, steps, stage["settings"].get("keep_best")))
        first += steps + 1
    return result


def read_checkpoint_list(folder: Path) -> list[CheckpointRow]:
    """Return the rows of checkpoints.jsonl. Raises UserError if a row is invalid.

    A name that would lead to a path outside the folder is invalid.
    """
    path = folder / CHECKPOINTS
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        for key, kind in _ROW_TYPES.items():
            if not isinstance(row.get(key), kind) or isinstance(row.get(key), bool):
                raise UserError(
                    f"{path} line {number} does not describe a checkpoint: its {key!r} is "
                    f"{row.get(key)!r:.60}; delete that line"
                )
        if not checkpoint_folder.is_checkpoint_name(row["name"]):
            raise UserError(
                f"{path} line {number} names {row['name']!r:.60}, which is not a valid checkpoint "
                "name; delete that line"
            )
    return rows


def final_checkpoint(folder: Path, stage: str) -> Path:
    """Return the path of the final checkpoint of a stage of the run in `folder`."""
    return folder / CHECKPOINTS_FOLDER / f"{stage}-final"


def make_checkpoint_row(
    path: Path, kind: str, stage: str, step: int, **figures: Any
) -> CheckpointRow:
    """Return the row of a checkpoint: a resumable one ("last" or "final"), or the "best" weights
    with their metric and its value as `figures`.

    Weights that were saved with a value head are in a folder of their own.
    """
    row = {"name": path.name, "kind": kind, "stage": stage, "batch": step, **figures}
    if kind == "best":
        weights = path / "model" if (path / "model").is_dir() else path
        return {**row, "state_path": None, "sampler_path": str(weights)}
    return {**row, "state_path": str(path), "sampler_path": str(path / "model")}


def locate_checkpoint(folder: Path, row: CheckpointRow) -> Path:
    """Return the folder of a row's checkpoint, by name below the run's `folder`.

    The recorded path is not used: in a copied or moved run it is that of the original.
    """
    parent = folder / (CHECKPOINTS_FOLDER if row["state_path"] else WEIGHTS_FOLDER)
    return checkpoint_folder.checkpoint_path(parent, row["name"])


def match_checkpoint_name(
    name: str, stages: Sequence[StageSteps], *, best: bool
) -> tuple[int, int] | None:
    """Return (index of the stage, step) of a resumable checkpoint, or of the best weights, by its
    name. None if the name fits no stage of the run.
    """
    for index, stage in enumerate(stages):
        if name == f"{stage.name}-final" and not best:
            return index, stage.first + stage.steps
        form = re.escape(stage.name) + ("-best" if best else "") + r"-(\d{6,12})"
        if (match := re.fullmatch(form, name)) is not None:
            return index, int(match[1])
    return None


def scan_checkpoints(folder: Path, stages: Sequence[StageSteps]) -> list[CheckpointRow]:
    """Return a row for each checkpoint and best weights of the run in `folder`, oldest first.

    Nothing is written, and no checksums are verified (except where a state contradicts its name:
    such a checkpoint was copied here).
    """
    rows = []
    for parent, best in ((folder / CHECKPOINTS_FOLDER, False), (folder / WEIGHTS_FOLDER, True)):
        for path in sorted(parent.iterdir()) if parent.is_dir() else ():
            match = match_checkpoint_name(path.name, stages, best=best)
            is_checkpoint = path.is_dir() and checkpoint_folder.is_checkpoint_name(path.name)
            if match is None or not is_checkpoint:
                continue
            stage, step = stages[match[0]], match[1]
            if best:
                figures = _read_best_metric(folder, stage, step)
                rows.append(make_checkpoint_row(path, "best", stage.name, step, **figures))
            elif not _contradicts_name(path, match[0], step - stage.first):
                kind = "final" if path.name == f"{stage.name}-final" else "last"
                rows.append(make_checkpoint_row(path, kind, stage.name, step))
    return sorted(rows, key=lambda row: (row["batch"], _KIND_ORDER[row["kind"]]))


def _contradicts_name(path: Path, stage: int, batches: int) -> bool:
    """Return whether an intact checkpoint's state has another stage or step than its name."""
    try:
        loop = checkpoint_folder.read_unverified_state(path).get("metadata")
        state = loop if isinstance(loop, dict) else {}
        if (state.get("stage", stage), state.get("next_batch", batches)) == (stage, batches):
            return False
        checkpoint_folder.verify_checkpoint(path)
    except checkpoint_folder.DamagedCheckpoint:
        return False
    return True


def _read_best_metric(folder: Path, stage: StageSteps, step: int) -> dict[str, Any]:
    """Return the metric and its value at a step; the value is None if metrics.jsonl lacks it.

    If the reward does not report correctness, the reward itself selects the best weights.
    """
    try:
        rows = read_metrics(folder / METRICS_FILE)
    except UserError:
        rows = []
    logged = [row for row in rows if row["step"] == step and row.get("stage") == stage.name]
    row = logged[0] if logged else {}
    for name in (stage.metric, "test/env/all/reward/total"):
        value = row.get(name) if name is not None else None
        if isinstance(value, (int, float)) and math.isfinite(value):
            return {"metric": name, "value": float(value)}
    return {"metric": stage.metric, "value": None}


def complete_checkpoint_list(
    folder: Path, stages: Sequence[StageSteps]
) -> tuple[list[CheckpointRow], str | None]:
    """Return the rows of `scan_checkpoints` and the problem with checkpoints.jsonl (None if none).

    Metric values that only checkpoints.jsonl holds are added to the rows.
    """
    rows, problem = scan_checkpoints(folder, stages), None
    try:
        listed_rows = {row["name"]: row for row in read_checkpoint_list(folder)}
    except UserError as error:
        listed_rows, problem = {}, str(error)
    missing = [row["name"] for row in rows if row["name"] not in listed_rows]
    if missing and problem is None and (listed_rows or not (folder / CHECKPOINTS).exists()):
        problem = f"{folder / CHECKPOINTS} does not name {', '.join(missing)}"
    for row in rows:
        recorded = listed_rows.get(row["name"], {})
        is_best = row["kind"] == recorded.get("kind") == "best"
        if is_best and row["value"] is None and isinstance(recorded.get("value"), (int, float)):
            row["value"], row["metric"] = recorded["value"], recorded.get("metric")
    return rows, problem


class CheckpointManager:
    """Write checkpoints below a run's folder and list existing ones in checkpoints.jsonl.

    `rows`: those that exist, oldest first. They are kept in memory, since the file may be changed
    while the run writes it.

    `stale`: checkpoints of steps that a resumed run takes again. They are removed before the next
    resumable checkpoint is saved.
    """

    def __init__(
        self, logbook: Logbook, rows: Sequence[Row] = (), stale: Sequence[CheckpointRow] = ()
    ):
        self.logbook, self.rows = logbook, [dict(row) for row in rows]
        self._stale = list(stale)
        if self.rows or (logbook.folder / CHECKPOINTS).exists():
            self._write()

    def _write(self) -> None:
        """Write checkpoints.jsonl atomically."""
        self.logbook.guard()
        write_jsonl(self.logbook.folder / CHECKPOINTS, self.rows)

    def _add(self, row: CheckpointRow) -> None:
        """List a checkpoint, in the place of one of the same name."""
        self.rows = [known for known in self.rows if known["name"] != row["name"]]
        self.rows.append(replace_nonfinite(row))
        self._write()

    def save(
        self,
        policy: TrainingClient,
        step: int,
        stage: str,
        state: dict[str, Any],
        *,
        keep_last: int,
        final: bool = False,
        other_clients: Mapping[str, TrainingClient] | None = None,
    ) -> Path:
        """Save a resumable checkpoint at `step` and return its path.

        Older checkpoints of the run beyond `keep_last` are removed after the new checkpoint is
        complete. Other clients that learn in this stage (`other_clients`) are saved under their
        names.
        """
        name = f"{stage}-final" if final else f"{stage}-{step:06d}"
        known = {row["name"]: row for row in self.rows}
        if name in known:  # a stop at a step that is saved already
            return locate_checkpoint(self.logbook.folder, known[name])
        self.logbook.sync()  # a checkpoint needs the log up to its step on disk
        # Before the save: a run resumed from the new checkpoint would take those of earlier steps
        # for its own.
        self._remove_stale()
        path = Path(policy.save_state(name, metadata=state, companions=other_clients).result().path)
        row = make_checkpoint_row(path, "final" if final else "last", stage, step)
        self._add(row)
        self._prune("last", keep_last)
        for known_stage in {r["stage"] for r in self.rows}:
            self._prune("best", 1, known_stage)
        return path

    def save_best(
        self,
        policy: TrainingClient,
        step: int,
        stage: str,
        metric: str,
        value: float,
        *,
        mode: str = "max",
        value_head: bool = False,
    ) -> None:
        """Save these weights, without optimizer, if `metric` is the stage's best value so far.

        Higher is better, in mode "min" lower. With `value_head` the head is saved too; otherwise
        the weights are only for sampling. The best weights at the last resumable checkpoint stay
        until the next one, so that a run resumed from it still has them.
        """
        rows = self._list_rows("best", stage)
        sign = -1 if mode == "min" else 1
        # unknown if checkpoints.jsonl and the metrics were lost
        best_value = rows[-1].get("value") if rows else None
        if not math.isfinite(value) or (
            best_value is not None and sign * best_value >= sign * value
        ):
            return
        name = f"{stage}-best-{step:06d}"
        # written by the run before it was resumed from an earlier step
        checkpoint_folder.remove_checkpoint(self.logbook.folder / WEIGHTS_FOLDER / name)
        path = Path(policy.save_weights_for_sampler(name, value_head=value_head).result().path)
        row = make_checkpoint_row(path, "best", stage, step, metric=metric, value=value)
        self._add(row)
        resumable = [row["batch"] for row in self.rows if row["state_path"]]
        self._prune("best", 1, stage, after=max(resumable, default=-1))

    def _remove_stale(self) -> None:
        """Remove stale checkpoints that the run has not written again: after a change, or with
        other timing, other weights are the best.
        """
        self.logbook.guard()
        names = {row["name"] for row in self.rows}
        for row in self._stale:
            if row["name"] not in names:
                checkpoint_folder.remove_checkpoint(locate_checkpoint(self.logbook.folder, row))
        self._stale = []

    def _prune(self, kind: str, keep: int, stage: str | None = None, *, after: int = -1) -> None:
        """Remove all but the last `keep` checkpoints of a kind (and stage) after a step."""
        rows = [row for row in self._list_rows(kind, stage) if row["batch"] > after]
        for row in rows[:-keep]:
            self.rows.remove(row)
            self._write()
            checkpoint_folder.remove_checkpoint(locate_checkpoint(self.logbook.folder, row))

    def _list_rows(self, kind: str, stage: str | None) -> list[CheckpointRow]:
        """Return the rows of a kind (and stage)."""
        return [
            row for row in self.rows if row.get("kind") == kind and stage in (None, row["stage"])
        ]

    @staticmethod
    def find_newest_intact(
        folder: Path, rows: list[CheckpointRow], console: Console
    ) -> tuple[CheckpointRow, dict[str, Any]] | None:
        """Return (row, state) of the newest intact checkpoint; None if none is.

        Damaged checkpoints are skipped with a warning.
        """
        for row in reversed([r for r in rows if r.get("state_path")]):
            try:
                return row, read_learner_state(locate_checkpoint(folder, row))
            except checkpoint_folder.DamagedCheckpoint as error:
                console.warn(
                    f"checkpoint {row['name']} cannot be used, trying an older checkpoint: {error}"
                )
        return None
