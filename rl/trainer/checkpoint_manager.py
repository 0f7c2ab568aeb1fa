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
from rl.jsonl import METRICS_FILE, read_jsonl, read_metrics
from rl.learner import read_learner_state
from rl.reporting import CHECKPOINTS, Console, Logbook

CHECKPOINTS_FOLDER, WEIGHTS_FOLDER = "checkpoints", "sampler_weights"
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


def read_checkpoint_list(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of checkpoints.jsonl. Raises UserError if a row is invalid.

    A name that would lead to a path outside the folder is invalid.
    """
    path = folder / CHECKPOINTS
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        bad_key = next(
            (
                key
                for key, kind in _ROW_TYPES.items()
                if not isinstance(row.get(key), kind) or isinstance(row.get(key), bool)
            ),
            None,
        )
        if bad_key is not None:
            raise UserError(
                f"{path} line {number} does not describe a checkpoint: its {bad_key!r} is "
                f"{row.get(bad_key)!r:.60}; delete that line"
            )
        if not checkpoint_folder.is_checkpoint_name(row["name"]):
            raise UserError(
                f"{path} line {number} names {row['name']!r:.60}, which is not a valid checkpoint "
                "name; delete that line"
            )
    return rows


def scan_checkpoints(folder: Path, stages: Sequence[StageSteps]) -> list[dict[str, Any]]:
    """Return a row for each checkpoint and best weights of the run in `folder`, oldest first.

    Nothing is written, and no checksums are verified (except where a state contradicts its name).
    """
    rows = [
        row
        for path in _list_folders(folder / CHECKPOINTS_FOLDER)
        if (row := _checkpoint_row(path, stages)) is not None
    ]
    rows += [
        row
        for path in _list_folders(folder / WEIGHTS_FOLDER)
        if (row := _best_weights_row(path, stages, folder)) is not None
    ]
    return sorted(rows, key=lambda row: (row["batch"], _KIND_ORDER[row["kind"]]))


def _list_folders(parent: Path) -> list[Path]:
    """Return the folders in `parent` with valid checkpoint names, sorted."""
    return (
        sorted(
            path
            for path in parent.iterdir()
            if path.is_dir() and checkpoint_folder.is_checkpoint_name(path.name)
        )
        if parent.is_dir()
        else []
    )


def _checkpoint_row(path: Path, stages: Sequence[StageSteps]) -> dict[str, Any] | None:
    """Return the row of a resumable checkpoint.

    None if its name fits no stage of the run, or if its intact state contradicts its name.
    """
    for index, stage in enumerate(stages):
        final = path.name == f"{stage.name}-final"
        steps = re.fullmatch(re.escape(stage.name) + r"-(\d{6,12})", path.name)
        if final or steps:
            batch = stage.first + stage.steps if final else int(steps[1])  # type: ignore[index]
            if _contradicts_name(path, index, batch - stage.first):
                return None
            row = {
                "name": path.name,
                "kind": "final" if final else "last",
                "stage": stage.name,
                "batch": batch,
            }
            return {**row, "state_path": str(path), "sampler_path": str(path / "model")}
    return None


def _contradicts_name(path: Path, stage: int, batches: int) -> bool:
    """Return whether an intact checkpoint's state has another stage or step than its name.

    Such a checkpoint was copied here.
    """
    try:
        loop = checkpoint_folder.read_unverified_state(path).get("metadata")
        if not isinstance(loop, dict) or (
            loop.get("stage", stage),
            loop.get("next_batch", batches),
        ) == (stage, batches):
            return False
        checkpoint_folder.verify_checkpoint(path)
    except checkpoint_folder.DamagedCheckpoint:
        return False
    return True


def _best_weights_row(
    path: Path, stages: Sequence[StageSteps], folder: Path
) -> dict[str, Any] | None:
    """Return the row of best weights; None if their name fits no stage of the run."""
    for stage in stages:
        match = re.fullmatch(re.escape(stage.name) + r"-best-(\d{6,12})", path.name)
        if match:
            row = {"name": path.name, "kind": "best", "stage": stage.name, "batch": int(match[1])}
            has_value_head = (path / "model").is_dir()
            metric, value = _read_best_metric(folder, stage, int(match[1]))
            return {
                **row,
                "metric": metric,
                "value": value,
                "state_path": None,
                "sampler_path": str(path / "model" if has_value_head else path),
            }
    return None


def _read_best_metric(
    folder: Path, stage: StageSteps, step: int
) -> tuple[str | None, float | None]:
    """Return (metric, value) at a step; the value is None if metrics.jsonl lacks it.

    If the reward does not report correctness, the reward itself selects the best weights.
    """
    try:
        row = next(
            (
                row
                for row in read_metrics(folder / METRICS_FILE)
                if row["step"] == step and row.get("stage") == stage.name
            ),
            {},
        )
    except UserError:
        row = {}
    for name in (stage.metric, "test/env/all/reward/total"):
        value = row.get(name) if name is not None else None
        if isinstance(value, (int, float)) and math.isfinite(value):
            return name, float(value)
    return stage.metric, None


def complete_checkpoint_list(
    folder: Path, stages: Sequence[StageSteps]
) -> tuple[list[dict[str, Any]], str | None]:
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
        if (
            row["kind"] == "best"
            and recorded.get("kind") == "best"
            and isinstance(recorded.get("value"), (int, float))
            and row["value"] is None
        ):
            row["value"], row["metric"] = recorded["value"], recorded.get("metric")
    return rows, problem


class CheckpointManager:
    """Write checkpoints below a run's folder and list existing ones in checkpoints.jsonl."""

    def __init__(self, logbook: Logbook):
        self.logbook = logbook

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
        known = {row["name"]: row for row in self.logbook.checkpoints()}
        if name in known:  # a stop at a step that is saved already
            return self._folder(known[name])
        self.logbook.sync()  # a checkpoint needs the log up to its step on disk
        path = Path(policy.save_state(name, metadata=state, companions=other_clients).result().path)
        row = {"name": name, "kind": "final" if final else "last", "stage": stage, "batch": step}
        self.logbook.add_checkpoint(
            {**row, "state_path": str(path), "sampler_path": str(path / "model")}
        )
        self._prune("last", keep_last)
        for known_stage in {r["stage"] for r in self.logbook.checkpoints()}:
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
        the weights are only for sampling. The previous best weights stay until the next resumable
        checkpoint, so that a run resumed from before this step still has them.
        """
        rows = [
            r for r in self.logbook.checkpoints() if r.get("kind") == "best" and r["stage"] == stage
        ]
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
        path = policy.save_weights_for_sampler(name, value_head=value_head).result().path
        row = {
            "name": name,
            "kind": "best",
            "stage": stage,
            "batch": step,
            "metric": metric,
            "value": value,
        }
        self.logbook.add_checkpoint(
            {
                **row,
                "state_path": None,
                "sampler_path": str(Path(path) / "model") if value_head else path,
            }
        )

    def _prune(self, kind: str, keep: int, stage: str | None = None) -> None:
        """Remove all but the last `keep` checkpoints of a kind (and stage)."""
        rows = [
            r
            for r in self.logbook.checkpoints()
            if r.get("kind") == kind and stage in (None, r["stage"])
        ]
        for row in rows[:-keep]:
            self.logbook.remove_checkpoint(row["name"])
            checkpoint_folder.remove_checkpoint(self._folder(row))

    def _folder(self, row: dict[str, Any]) -> Path:
        """Return a checkpoint's folder, by name below this run's folder.

        The recorded path is not used: in a copied run it is that of the original.
        """
        return checkpoint_folder.checkpoint_path(
            self.logbook.folder / (CHECKPOINTS_FOLDER if row["state_path"] else WEIGHTS_FOLDER),
            row["name"],
        )

    @staticmethod
    def find_newest_intact(
        folder: Path, rows: list[dict[str, Any]], console: Console
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return (row, state) of the newest intact checkpoint; None if none is.

        Damaged checkpoints are skipped with a warning. Checkpoints are located by name below
        `folder`, not by the recorded path, so that a run's folder may be moved.
        """
        for row in reversed([r for r in rows if r.get("state_path")]):
            try:
                return row, read_learner_state(
                    checkpoint_folder.checkpoint_path(folder / CHECKPOINTS_FOLDER, row["name"])
                )
            except checkpoint_folder.DamagedCheckpoint as error:
                console.warn(
                    f"checkpoint {row['name']} cannot be used, trying an older checkpoint: {error}"
                )
        return None
