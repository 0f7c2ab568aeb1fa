"""Which checkpoints a run keeps: the last k, the end of each stage, and the best weights by a
metric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.clients import TrainingClient
from rl.learner import read_state
from rl.ranks import checkpoint
from rl.report import Console, Logbook


class Keeper:
    """Writes checkpoints under a run's folder and notes them in checkpoints.jsonl, which names only
    what is there.
    """

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
        last: bool = False,
        beside: Mapping[str, TrainingClient] | None = None,
    ) -> Path:
        """A resumable checkpoint at `step`; older ones of the run beyond `keep_last` are removed
        after it is whole.

        `beside`: other clients that learn in this stage, saved into it by their names.
        """
        name = f"{stage}-final" if last else f"{stage}-{step:06d}"
        known = {row["name"]: row for row in self.logbook.checkpoints()}
        if name in known:  # asked to stop at a step that was saved anyway
            return self._folder(known[name])
        self.logbook.sync()  # what a checkpoint goes on from is on the disk before it
        path = Path(policy.save_state(name, metadata=state, beside=beside).result().path)
        row = {"name": name, "kind": "final" if last else "last", "stage": stage, "batch": step}
        self.logbook.checkpoint(
            {**row, "state_path": str(path), "sampler_path": str(path / "model")}
        )
        self._prune("last", keep_last)
        for known_stage in {r["stage"] for r in self.logbook.checkpoints()}:
            self._prune("best", 1, known_stage)
        return path

    def best(
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
        """Keeps these weights, without an optimizer, if `metric` is higher (mode "min": lower) than
        ever before in this stage.

        `value_head`: with the head, where that is what the stage is for; else they are for sampling
        alone.

        The best before stays until the next resumable checkpoint: a run resumed from before this
        step still has it.
        """
        rows = [
            r for r in self.logbook.checkpoints() if r.get("kind") == "best" and r["stage"] == stage
        ]
        sign = -1 if mode == "min" else 1
        # of weights whose list was lost with the metrics it is not known
        before = rows[-1].get("value") if rows else None
        if not math.isfinite(value) or (before is not None and sign * before >= sign * value):
            return
        name = f"{stage}-best-{step:06d}"
        # of the run before it was resumed from an earlier step
        checkpoint.remove(self.logbook.folder / "sampler_weights" / name)
        path = policy.save_weights_for_sampler(name, value_head=value_head).result().path
        row = {
            "name": name,
            "kind": "best",
            "stage": stage,
            "batch": step,
            "metric": metric,
            "value": value,
        }
        self.logbook.checkpoint(
            {
                **row,
                "state_path": None,
                "sampler_path": str(Path(path) / "model") if value_head else path,
            }
        )

    def _prune(self, kind: str, keep: int, stage: str | None = None) -> None:
        rows = [
            r
            for r in self.logbook.checkpoints()
            if r.get("kind") == kind and stage in (None, r["stage"])
        ]
        for row in rows[:-keep]:
            self.logbook.forget_checkpoint(row["name"])
            checkpoint.remove(self._folder(row))

    def _folder(self, row: dict[str, Any]) -> Path:
        """By name below this run's folder, not by the path noted: that of a copied run is the
        original's.
        """
        return checkpoint.below(
            self.logbook.folder / ("checkpoints" if row["state_path"] else "sampler_weights"),
            row["name"],
        )

    @staticmethod
    def newest_whole(
        folder: Path, rows: list[dict[str, Any]], console: Console
    ) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """(row, state) of the newest checkpoint that can be resumed from; damaged ones are named
        and passed over.

        They are looked for by name below `folder`, not by the path noted, so a run's folder may be
        moved.
        """
        for row in reversed([r for r in rows if r.get("state_path")]):
            try:
                return row, read_state(checkpoint.below(folder / "checkpoints", row["name"]))
            except checkpoint.DamagedCheckpoint as error:
                console.warn(
                    f"checkpoint {row['name']} cannot be used, trying an older one: {error}"
                )
        return None
