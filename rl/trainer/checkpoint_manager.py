"""Manage a run's checkpoints: the last k, each stage's final, the best by a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.client import TrainingClient
from rl.distributed import checkpoint_folder
from rl.learner import read_learner_state
from rl.reporting import Console, Logbook


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
        checkpoint_folder.remove_checkpoint(self.logbook.folder / "sampler_weights" / name)
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
            self.logbook.folder / ("checkpoints" if row["state_path"] else "sampler_weights"),
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
                    checkpoint_folder.checkpoint_path(folder / "checkpoints", row["name"])
                )
            except checkpoint_folder.DamagedCheckpoint as error:
                console.warn(
                    f"checkpoint {row['name']} cannot be used, trying an older checkpoint: {error}"
                )
        return None
