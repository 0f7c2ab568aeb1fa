"""Which checkpoints a run's folder holds: what their own files say. checkpoints.jsonl is made from
that, and believed in nothing else.

A row's stage and step are in the checkpoint's name, and have to be those of its state.json; of best
weights the metric's value is that of metrics.jsonl. A folder that no name of this run's stages
fits, or that tells of another step (a copy, somebody's own), is passed over, neither listed nor
touched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.errors import UserError
from rl.jsonl import METRICS, read_metrics, read_rows
from rl.ranks import checkpoint
from rl.report import CHECKPOINTS

RESUMABLE, WEIGHTS = "checkpoints", "sampler_weights"


@dataclass(frozen=True)
class StageSteps:
    """A stage of a run in numbers. `first`: the run's step before its own; `metric`: what its best
    weights are chosen by.
    """

    name: str
    first: int
    steps: int
    metric: str | None = None


def stage_steps(stages: Sequence[Mapping[str, Any]]) -> list[StageSteps]:
    """Of the stages in a config.json. One step is left between stages, for the evaluation before
    the first of each.
    """
    found, first = [], 0
    for stage in stages:
        steps = stage["settings"].get("steps", 0)
        steps = steps if isinstance(steps, int) else 0
        found.append(StageSteps(stage["name"], first, steps, stage["settings"].get("keep_best")))
        first += steps + 1
    return found


def listed(folder: Path) -> list[dict[str, Any]]:
    """checkpoints.jsonl as it stands. UserError where a row is none; names lead nowhere but below
    the folder.
    """
    path = folder / CHECKPOINTS
    rows = read_rows(path)
    for number, row in enumerate(rows, start=1):
        wrong = next(
            (
                key
                for key, kind in _ROW.items()
                if not isinstance(row.get(key), kind) or isinstance(row.get(key), bool)
            ),
            None,
        )
        if wrong is not None:
            raise UserError(
                f"{path} line {number} is no checkpoint's: its {wrong!r} is {row.get(wrong)!r:.60}; delete that line"
            )
        if not checkpoint.is_name(row["name"]):
            raise UserError(
                f"{path} line {number} names {row['name']!r:.60}, which is no checkpoint's name; delete that line"
            )
    return rows


_ROW: dict[str, Any] = {
    "name": str,
    "batch": int,
    "stage": str,
    "kind": str,
    "state_path": (str, type(None)),
}


def take_stock(folder: Path, stages: Sequence[StageSteps]) -> list[dict[str, Any]]:
    """The rows of every checkpoint and best weights of the run that lie in `folder`, oldest first;
    nothing is written or checksummed.
    """
    rows = [
        row
        for path in _folders(folder / RESUMABLE)
        if (row := _resumable(path, stages)) is not None
    ]
    rows += [
        row
        for path in _folders(folder / WEIGHTS)
        if (row := _best(path, stages, folder)) is not None
    ]
    return sorted(rows, key=lambda row: (row["batch"], _ORDER[row["kind"]]))


_ORDER = {"best": 0, "last": 1, "final": 2}


def _folders(parent: Path) -> list[Path]:
    return (
        sorted(path for path in parent.iterdir() if path.is_dir() and checkpoint.is_name(path.name))
        if parent.is_dir()
        else []
    )


def _resumable(path: Path, stages: Sequence[StageSteps]) -> dict[str, Any] | None:
    """The row of a checkpoint; None where no stage of the run gives it its name, or where it is
    whole and says to be another.
    """
    for index, stage in enumerate(stages):
        final = path.name == f"{stage.name}-final"
        steps = re.fullmatch(re.escape(stage.name) + r"-(\d{6,12})", path.name)
        if final or steps:
            batch = stage.first + stage.steps if final else int(steps[1])  # type: ignore[index]
            if _is_another(path, index, batch - stage.first):
                return None
            row = {
                "name": path.name,
                "kind": "final" if final else "last",
                "stage": stage.name,
                "batch": batch,
            }
            return {**row, "state_path": str(path), "sampler_path": str(path / "model")}
    return None


def _is_another(path: Path, stage: int, batches: int) -> bool:
    """Whether a whole checkpoint's own state tells of another stage or step than its name: one that
    was put here.
    """
    try:
        loop = checkpoint.glance(path).get("metadata")
        if not isinstance(loop, dict) or (
            loop.get("stage", stage),
            loop.get("next_batch", batches),
        ) == (stage, batches):
            return False
        checkpoint.verify(path)
    except checkpoint.DamagedCheckpoint:
        return False
    return True


def _best(path: Path, stages: Sequence[StageSteps], folder: Path) -> dict[str, Any] | None:
    for stage in stages:
        found = re.fullmatch(re.escape(stage.name) + r"-best-(\d{6,12})", path.name)
        if found:
            row = {"name": path.name, "kind": "best", "stage": stage.name, "batch": int(found[1])}
            head = (path / "model").is_dir()
            metric, value = _measured(folder, stage, int(found[1]))
            return {
                **row,
                "metric": metric,
                "value": value,
                "state_path": None,
                "sampler_path": str(path / "model" if head else path),
            }
    return None


def _measured(folder: Path, stage: StageSteps, step: int) -> tuple[str | None, float | None]:
    """(metric, value) at a step. Where the reward does not tell what is correct, it is itself what
    best weights are chosen by.
    """
    try:
        row = next(
            (
                row
                for row in read_metrics(folder / METRICS)
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


def completed(
    folder: Path, stages: Sequence[StageSteps]
) -> tuple[list[dict[str, Any]], str | None]:
    """(rows, what was wrong with checkpoints.jsonl): `take_stock`, and what the list says of a
    checkpoint beyond that.
    """
    rows, trouble = take_stock(folder, stages), None
    try:
        known = {row["name"]: row for row in listed(folder)}
    except UserError as error:
        known, trouble = {}, str(error)
    unnamed = [row["name"] for row in rows if row["name"] not in known]
    if unnamed and trouble is None and (known or not (folder / CHECKPOINTS).exists()):
        trouble = f"{folder / CHECKPOINTS} does not name {', '.join(unnamed)}"
    for row in rows:
        noted = known.get(row["name"], {})
        if (
            row["kind"] == "best"
            and noted.get("kind") == "best"
            and isinstance(noted.get("value"), (int, float))
            and row["value"] is None
        ):
            row["value"], row["metric"] = noted["value"], noted.get("metric")
    return rows, trouble
