"""Send a run's metrics and rollouts to experiment trackers (wandb, tensorboard, trackio, mlflow).

Each tracker is one of accelerate's, in a process of its own (rl.reporting.tracker_worker). A
tracker that fails, hangs, prints, or crashes costs its own data: the run warns once and continues.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rl.errors import RunFolderError, install_command
from rl.jsonl import Row, format_json_line, replace_nonfinite, write_atomically
from rl.processes import get_environment_without_launch, kill_tree
from rl.reporting.episode_html import StoredEpisode
from rl.reporting.rollout_report import select_evenly
from rl.sanitize import sanitize_message, sanitize_text

# Modules that each tracker imports; the extra of the same name installs them.
TRACKER_MODULES = {
    "wandb": ("wandb",),
    "tensorboard": ("tensorboard",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
TRACKER_FILES = tuple(
    file for name in TRACKER_MODULES for file in (name, f"{name}_id.txt")
)  # of a run's folder
ROLLOUT_COLUMNS = ("step", "problem", "prompt", "answer", "expected", "reward", "advantage")
_TABLE_ROWS, _TEXT_LIMIT = 50, 2000  # rows of a table; characters of a cell
_QUEUE_LINES = 1000  # messages that wait for a tracker; further ones are dropped
_FINISH_SECONDS = 120.0  # seconds in which all trackers must finish at the end of a run


class WarningSink(Protocol):
    """Receive warnings about failures that must not end the run."""

    def warn(self, text: str) -> None: ...


def check_trackers(names: Sequence[str]) -> None:
    """Raise RunFolderError if the packages of a tracker are not installed. Called before any
    work.
    """
    for name in names:
        specs = {module: importlib.util.find_spec(module) for module in TRACKER_MODULES[name]}
        # a folder of that name in the current folder, such as wandb/, is a package without a file
        missing = [module for module, spec in specs.items() if not (spec and spec.origin)]
        if missing:
            raise RunFolderError(
                f"the tracker {name} needs the package {' and '.join(missing)}: "
                f"{install_command(name)}, or leave {name} out of --tracker"
            )


def build_table(step: int, rows: Sequence[Row]) -> list[list[Any]]:
    """Return at most 50 rollouts, at equal distances, as rows of ROLLOUT_COLUMNS, with bounded
    text.
    """
    return [
        [
            step,
            _bound_text(row.get("problem")),
            _bound_text(row.get("prompt")),
            _bound_text(_join_turns(row)),
            _bound_text(row.get("answer")),
            row.get("reward"),
            row.get("advantage"),
        ]
        for row in select_evenly(rows, _TABLE_ROWS)
    ]


def _join_turns(row: Row) -> Any:
    """Return the text of an answer, or of the turns of an episode."""
    turns = StoredEpisode(row).turns
    if len(turns) < 2:
        return row.get("response")
    return "\n\n".join(f"[{i}] {turn.get('response', '')}" for i, turn in enumerate(turns, 1))


def _bound_text(value: Any) -> str:
    """Return the value as bounded text without control characters."""
    return "" if value is None else sanitize_text(str(value), _TEXT_LIMIT)


class TrackerProcess:
    """Hold the process of a tracker. No method waits for it, except `finish`."""

    def __init__(self, name: str, setup: Mapping[str, Any], folder: Path):
        self.name = name
        self.replies: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rl.reporting.tracker_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,  # a file that a tracker writes into its current folder
            env={**get_environment_without_launch(), "PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C reaches the run alone
            text=True,
            encoding="utf-8",
        )
        self.send({**setup, "tracker": name, "parent": os.getpid()})
        threading.Thread(target=self._write_lines, daemon=True).start()
        self._reader = threading.Thread(target=self._read_replies, daemon=True)
        self._reader.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, or drop it if 1000 messages wait."""
        if self._lines.qsize() < _QUEUE_LINES:
            self._lines.put(format_json_line(replace_nonfinite(message)))
        else:
            self.replies.put({"failed": f"does not keep up: {_QUEUE_LINES} messages wait"})

    def request_end(self) -> None:
        """Make the process finish after the messages that wait."""
        self._lines.put(None)

    def wait(self, seconds: float) -> None:
        """Wait for the end of the process, and kill it and its descendants after `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.replies.put({"failed": "did not finish in time"})  # before its exit code
            kill_tree(self._process.pid)
            self._process.wait()
        self._reader.join(1.0)

    def _write_lines(self) -> None:
        """Write the messages to the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as stream:
            for line in iter(self._lines.get, None):
                stream.write(line)
                stream.flush()

    def _read_replies(self) -> None:
        """Read the replies of the process, and report a crash."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                self.replies.put(json.loads(line))
        if (code := self._process.wait()) != 0:
            self.replies.put({"failed": f"its process ended with exit code {code}"})


class RunTrackers:
    """Log a run to trackers. Their files and ids are in the run's folder.

    A resumed run continues the run of each tracker under the id in `<name>_id.txt`. `resume_step`:
    step from which the run resumes; None for a new run.
    """

    def __init__(
        self,
        names: Sequence[str],
        project: str,
        folder: Path,
        config: Mapping[str, Any],
        *,
        resume_step: int | None = None,
        console: WarningSink | None = None,
        finish_seconds: float = _FINISH_SECONDS,
    ):
        check_trackers(names)
        self._folder, self._console, self._finish_seconds = folder, console, finish_seconds
        self._warned: set[str] = set()
        self._processes: list[TrackerProcess] = []
        folder = folder.resolve()
        for name in names:
            setup = {
                "project": project,
                "folder": str(folder),
                "run": folder.name,
                "config": config,
                "resume_step": resume_step,
                "id": self._read_id(name, resumed=resume_step is not None),
            }
            try:
                self._processes.append(TrackerProcess(name, setup, folder))
            except OSError as error:
                self._warn(name, f"did not start: {error}")

    def _read_id(self, name: str, *, resumed: bool) -> str | None:
        """Return the id of the tracker's run. None: the tracker chooses it, or has none."""
        path = self._folder / f"{name}_id.txt"
        if resumed and path.exists():
            return path.read_text(encoding="utf-8").strip()
        if name not in ("wandb", "trackio"):
            return None
        run_id = uuid.uuid4().hex[:8]
        if name == "trackio":  # it resumes by the name of the run, which it also shows
            run_id = f"{self._folder.resolve().name}-{run_id}"
        self._write_id(name, run_id)
        return run_id

    def _write_id(self, name: str, run_id: str) -> None:
        write_atomically(self._folder / f"{name}_id.txt", run_id + "\n")

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of a step, except null values."""
        values = replace_nonfinite(metrics) if self._processes else {}
        values = {key: value for key, value in values.items() if value is not None}
        self._send("metrics", values, step)

    def log_table(self, name: str, step: int, rows: Sequence[Row]) -> None:
        """Log rollouts as the table `name` of a step."""
        self._send("rollouts", name, build_table(step, rows) if self._processes else [], step)

    def _send(self, kind: str, *arguments: Any) -> None:
        for process in self._processes:
            process.send({"kind": kind, "arguments": arguments})
        self._handle_replies()

    def finish(self) -> None:
        """Finish the trackers. One that needs longer than two minutes is killed."""
        for process in self._processes:
            process.request_end()
        deadline = time.monotonic() + self._finish_seconds
        for process in self._processes:
            process.wait(max(0.0, deadline - time.monotonic()))
        self._handle_replies()

    def _handle_replies(self) -> None:
        """Record the ids of the trackers, and warn about failures."""
        for process in self._processes:
            while not process.replies.empty():
                reply = process.replies.get()
                if "failed" in reply:
                    self._warn(process.name, str(reply["failed"]))
                elif reply.get("id") is not None:
                    try:
                        self._write_id(process.name, str(reply["id"]))
                    except OSError as error:
                        self._warn(process.name, f"its id was not saved: {error}")

    def _warn(self, name: str, text: str) -> None:
        """Warn about the first failure of a tracker."""
        if self._console is not None and name not in self._warned:
            text = sanitize_message(text, 1000)
            self._console.warn(
                f"the tracker {name} {text}. The run continues; metrics.jsonl has all metrics"
            )
        self._warned.add(name)
