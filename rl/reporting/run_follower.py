"""Read the folder of a run that another process writes: its new metrics, its state, its latest
answers. Nothing in the folder is trusted or changed, and files may be missing or half written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.jsonl import METRICS_FILE, Row, get_evaluation_step, get_rollout_step
from rl.processes import LOCK, RunLock
from rl.reporting.curve_report import collect_alarms
from rl.reporting.logbook import CONFIG, ROLLOUTS
from rl.reporting.metric_plots import RunCurve, is_number
from rl.reporting.rollout_report import get_reward, read_rollouts, select_evenly
from rl.sanitize import sanitize_text

_STALE_SECONDS = 60.0  # age of a lock's heartbeat above which its process has ended
_NAME_LIMIT = 60  # characters of a name


class RunFollower:
    """Read a run's folder again and again. `refresh` reads what is new."""

    def __init__(self, folder: Path, label: str | None = None):
        self.folder = folder
        self.label = sanitize_name(label or folder.resolve().name)
        self.rows: list[dict[str, Any]]
        self.alarms: list[dict[str, Any]]  # periods, as `collect_alarms` returns them
        self.evaluations: list[dict[str, Any]]  # first and last row with held-out metrics
        self._offset: int
        self._identity: int  # inode of metrics.jsonl
        self._rest: bytes  # of an unfinished line
        self._drop_rows()
        self.stages: list[tuple[str, int]] = []  # name and steps of each stage
        self.answers: list[dict[str, Any]] = []
        self.answers_step: int | None = None
        self.are_held_out = False  # whether the answers are those of an evaluation
        self._answers_key: tuple[str, float] | None = None
        self._heartbeat: float | None = None  # the lock's, by the clock of the file's host
        self._heartbeat_seen = 0.0  # when it came, by time.monotonic()
        self._lock = RunLock(folder)  # only read

    def refresh(self) -> None:
        """Read the rows that were added, and the newest file of rollouts."""
        self._read_heartbeat()
        self._read_config()
        self._read_metrics()
        self._read_answers()

    def _read_config(self) -> None:
        """Read names and steps of the stages."""
        try:
            config = json.loads((self.folder / CONFIG).read_bytes())
            self.stages = [
                (str(stage["name"]), int(stage["settings"]["steps"])) for stage in config["stages"]
            ]
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return

    def _read_heartbeat(self) -> None:
        """Read the heartbeat of the run's lock. Its host's clock may differ from that of this
        process, so only the age of the first heartbeat is measured by it.
        """
        try:
            heartbeat = (self.folder / LOCK).stat().st_mtime
        except OSError:
            self._heartbeat = None
            return
        if heartbeat != self._heartbeat:
            age = max(0.0, time.time() - heartbeat) if self._heartbeat is None else 0.0
            self._heartbeat, self._heartbeat_seen = heartbeat, time.monotonic() - age

    def _read_metrics(self) -> None:
        """Read the new lines of metrics.jsonl; all of them if the file was replaced (a resume), and
        none if it was removed (a run that is overwritten).
        """
        try:
            with (self.folder / METRICS_FILE).open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._identity or status.st_size < self._offset:
                    self._drop_rows()
                    self._identity = status.st_ino
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            self._drop_rows()
            return
        except OSError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not lines:
            return
        self.rows += [row for line in lines if (row := _parse_metrics(line)) is not None]
        self.alarms = collect_alarms(self.rows)
        measured = [row for row in self.rows if any(name.startswith("test/") for name in row)]
        self.evaluations = [*measured[:1], *measured[1:][-1:]]

    def _drop_rows(self) -> None:
        """Drop what was read of metrics.jsonl."""
        self.rows, self.alarms, self.evaluations = [], [], []
        self._offset, self._identity, self._rest = 0, 0, b""

    def _read_answers(self) -> None:
        """Read the newest file of rollouts, if it changed."""
        files = [
            (step, trained, path)
            for path in (self.folder / ROLLOUTS).glob("*.jsonl")
            for trained, get_step in ((True, get_rollout_step), (False, get_evaluation_step))
            if (step := get_step(path.name)) is not None
        ]
        if not files:
            self.answers, self._answers_key = [], None
            return
        step, trained, path = max(files, key=lambda file: file[:2])
        try:
            key = (str(path), path.stat().st_mtime)
            if key != self._answers_key:
                self.answers = [row for row in read_rollouts(path) if "prompt" in row]
                self._answers_key, self.answers_step = key, step
                self.are_held_out = not trained
        except OSError:
            return

    @property
    def curve(self) -> RunCurve:
        """Return the rows as curves."""
        return RunCurve(self.label, self.rows)

    @property
    def step(self) -> int | None:
        """Return the newest step; None before the first row."""
        return self.rows[-1]["step"] if self.rows else None

    @property
    def last_step(self) -> int | None:
        """Return the last step of the run; None if its settings are unknown."""
        return sum(steps + 1 for _, steps in self.stages) - 1 if self.stages else None

    def find_stage(self) -> tuple[str, int, int] | None:
        """Return name, steps done and all steps of the current stage; None before the first
        row.
        """
        first = 0
        for name, steps in self.stages:
            if self.step is not None and first <= self.step <= first + steps:
                return sanitize_name(name), self.step - first, steps
            first += steps + 1
        return None

    def get_state(self) -> str:
        """Return "running", "finished", "stopped", "killed" or "waiting" (no run yet)."""
        if self._heartbeat is not None:
            age = time.monotonic() - self._heartbeat_seen
            ended = age >= _STALE_SECONDS or self._lock.has_local_owner_ended()
            return "killed" if ended else "running"
        if self.step is None:
            return "stopped" if self.stages else "waiting"
        return (
            "finished" if self.last_step is not None and self.step >= self.last_step else "stopped"
        )

    def get_age(self) -> float | None:
        """Return the seconds since the newest row was written; None before the first row."""
        try:
            return max(0.0, time.time() - (self.folder / METRICS_FILE).stat().st_mtime)
        except OSError:
            return None

    def estimate_seconds(self) -> float | None:
        """Return the seconds that the current stage still needs, at the speed of its last 20
        steps; None before its first step.
        """
        if (stage := self.find_stage()) is None:
            return None
        _, done, steps = stage
        start = self.rows[-1]["step"] - done
        seconds = [
            row["time/step"]
            for row in self.rows[-20:]
            if row["step"] > start and "time/step" in row
        ]
        return (steps - done) * sum(seconds) / len(seconds) if seconds else None


def sanitize_name(name: str) -> str:
    """Return a name as a bounded line of text."""
    return " ".join(sanitize_text(name, _NAME_LIMIT).split())


def _parse_metrics(line: bytes) -> dict[str, Any] | None:
    """Return step, stage and finite numbers of a row; None if it is no row."""
    try:
        row = json.loads(line)
        step = row["step"]
        if not isinstance(step, int) or not is_number(step):
            return None
        return {
            name: value
            for name, value in row.items()
            if is_number(value) or (name == "stage" and isinstance(value, str))
        }
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def choose_answers(rows: Sequence[Row], count: int, page: int) -> list[Row]:
    """Return `count` answers: on page 0 the best, the worst and those between, by reward; then the
    next in the order of the file.
    """
    if not rows or count < 1:
        return []
    if page > 0:
        start = (page - 1) * count % len(rows)
        return list(rows[start : start + count])
    return select_evenly(sorted(rows, key=get_reward, reverse=True), count)
