"""Run one of accelerate's trackers in its own process, for rl.reporting.tracker_process.

A line of standard input is a message in JSON: first the setup, then metrics and tables. The end of
input finishes the tracker, also if the run was killed. A line of standard output is a reply: `id`,
the tracker's id of the run, or `failed`, a text. What the tracker prints is discarded.

Local stores are in the run's folder, unless the user's environment names another store:
MLFLOW_TRACKING_URI, TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rl.reporting.tracker_process import ROLLOUT_COLUMNS
from rl.sanitize import describe_error

_END_SECONDS = 600  # seconds after the end of input at which a hanging tracker is ended


class TrackerBackend:
    """Start a tracker of accelerate, and log to it. A subclass sets its store and its tables."""

    name = ""

    def __init__(self, setup: Mapping[str, Any]):
        from accelerate.state import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState(cpu=True)  # accelerate's trackers need it; no GPU
        self.setup, self.folder = setup, Path(setup["folder"])
        self.is_resumed = setup["resume_step"] is not None  # it continues an earlier run
        self.warning: str | None = None
        self.tracker: Any = LOGGER_TYPE_TO_CLASS[self.name](**self.make_arguments())
        self.start()

    def make_arguments(self) -> dict[str, Any]:
        """Return the arguments of accelerate's tracker, after setting its store."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the tracker."""
        self.tracker.start()

    def get_id(self) -> str | None:
        """Return the tracker's id of the run; None if it needs none."""
        return self.setup["id"]

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log metrics: numbers and texts."""
        self.tracker.log(values, step=step)

    def log_table(self, name: str, rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log rows of ROLLOUT_COLUMNS."""
        raise NotImplementedError


class WandbBackend(TrackerBackend):
    """Log to Weights & Biases, or offline without its server or a key."""

    name = "wandb"

    def make_arguments(self) -> dict[str, Any]:
        """Return the arguments; temporary files stay in the run's folder."""
        for kind in ("CACHE", "DATA", "ARTIFACT"):
            os.environ.setdefault(f"WANDB_{kind}_DIR", str(self.folder / "wandb" / kind.lower()))
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, init_timeout=30, x_stats_pid=self.setup["parent"]
        )
        return {
            "run_name": self.setup["project"],
            "name": self.setup["run"],
            "id": self.setup["id"],
            "resume": "allow" if self.is_resumed else None,
            "dir": str(self.folder),
            "config": self.setup["config"],
            "settings": settings,
        }

    def start(self) -> None:
        try:
            self.tracker.start()
        except Exception as error:
            if os.environ.get("WANDB_MODE", "online") != "online":
                raise
            self.tracker.init_kwargs["mode"] = "offline"
            self.tracker.start()
            self.warning = (
                f"did not start online ({describe_error(error, 300)}) and logs offline; `wandb "
                f"sync {self.folder / 'wandb'}/offline-run-*` sends it (WANDB_MODE=offline avoids "
                f"the attempt)"
            )

    def log_table(self, name: str, rows: Sequence[Sequence[Any]], step: int) -> None:
        self.tracker.log_table(name, columns=list(ROLLOUT_COLUMNS), data=rows, step=step)


class TensorboardBackend(TrackerBackend):
    """Log to TensorBoard's files. A resumed run hides the steps that it repeats."""

    name = "tensorboard"

    def make_arguments(self) -> dict[str, Any]:
        """Return the arguments; earlier events after the step of the resume are hidden."""
        purge = {"purge_step": self.setup["resume_step"] + 1} if self.is_resumed else {}
        return {"run_name": self.name, "logging_dir": str(self.folder), **purge}

    def start(self) -> None:
        self.tracker.start()
        if not self.is_resumed:
            settings = json.dumps(self.setup["config"], indent=2)
            self.tracker.log({"config": _indent(settings)}, step=0)

    def log(self, values: Mapping[str, Any], step: int) -> None:
        # a text, such as the stage, would become a page of its own at each step
        super().log({k: v for k, v in values.items() if not isinstance(v, str)}, step)

    def log_table(self, name: str, rows: Sequence[Sequence[Any]], step: int) -> None:
        parts = [
            f"reward {reward}, advantage {advantage}\n\n{_indent(prompt)}\n\nanswer\n\n"
            + _indent(answer)
            for _, _, prompt, answer, _, reward, advantage in rows
        ]
        self.tracker.log({name: "\n\n---\n\n".join(parts)}, step=step)


class TrackioBackend(TrackerBackend):
    """Log to trackio's local store. Its id of a run is the run's name."""

    name = "trackio"

    def make_arguments(self) -> dict[str, Any]:
        if not any(os.environ.get(f"TRACKIO_{key}") for key in ("SPACE_ID", "SERVER_URL")):
            os.environ["HF_HUB_OFFLINE"] = "1"  # it would ask the hub for the user's name
        os.environ.setdefault("TRACKIO_DIR", str(self.folder / self.name))
        return {
            "run_name": self.setup["project"],
            "name": self.setup["id"],
            "resume": "allow" if self.is_resumed else "never",
            "config": self.setup["config"],
            "embed": False,
        }

    def log_table(self, name: str, rows: Sequence[Sequence[Any]], step: int) -> None:
        import trackio

        table = trackio.Table(columns=list(ROLLOUT_COLUMNS), data=[list(row) for row in rows])
        self.tracker.log({name: table}, step=step)


class MlflowBackend(TrackerBackend):
    """Log to mlflow's local database, or to the server that MLFLOW_TRACKING_URI names."""

    name = "mlflow"

    def make_arguments(self) -> dict[str, Any]:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        artifacts = None
        if not os.environ.get("MLFLOW_TRACKING_URI"):
            store = self.folder / self.name
            store.mkdir(exist_ok=True)
            os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{store / 'mlflow.db'}"
            artifacts = (store / "artifacts").as_uri()
        return {
            "experiment_name": self.setup["project"],
            "logging_dir": artifacts,
            "run_id": self.setup["id"],
            "run_name": self.setup["run"],
        }

    def start(self) -> None:
        self.tracker.start()
        if self.setup["id"] is None:
            self.tracker.store_init_configuration(_flatten_config(self.setup["config"]))

    def get_id(self) -> str:
        return self.tracker.tracker.info.run_id

    def log(self, values: Mapping[str, Any], step: int) -> None:
        # mlflow refuses the whole row for one name with another character
        super().log({re.sub(r"[^\w\-./: ]", "_", key)[:250]: v for key, v in values.items()}, step)

    def log_table(self, name: str, rows: Sequence[Sequence[Any]], step: int) -> None:
        import mlflow

        columns = {column: [row[i] for row in rows] for i, column in enumerate(ROLLOUT_COLUMNS)}
        mlflow.log_table(columns, artifact_file=f"{name}/step_{step:06d}.json")


BACKENDS = {
    backend.name: backend
    for backend in (WandbBackend, TensorboardBackend, TrackioBackend, MlflowBackend)
}


def _indent(text: str) -> str:
    """Return the text as an indented block of Markdown, in which nothing is markup."""
    return "\n".join(f"    {line}" for line in str(text).splitlines())


def _flatten_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config as "options.seed" or "grpo.learning_rate" to value."""
    values = {f"options.{key}": value for key, value in config.get("options", {}).items()}
    for stage in config.get("stages", ()):
        values |= {f"{stage['name']}.{key}": value for key, value in stage["settings"].items()}
    return values


def _take_streams() -> tuple[IO[str], IO[str]]:
    """Return standard input and output, and put /dev/null in their place for the tracker."""
    messages = os.fdopen(os.dup(0), encoding="utf-8", errors="replace")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    silence = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(silence, number)
    return messages, replies


def serve(messages: IO[str], replies: IO[str]) -> None:
    """Start the tracker of the first message, log the others, and finish at the end of input."""

    def reply(**fields: Any) -> None:
        with contextlib.suppress(OSError):  # the run was killed
            replies.write(json.dumps(fields) + "\n")
            replies.flush()

    def attempt(label: str, action: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `action`; reply with a failure if it raises. All exceptions are
        caught: the tracker's and the network's.
        """
        try:
            return action(*arguments)
        except Exception as error:
            reply(failed=f"{label}: {describe_error(error, 500)}")
            return None

    setup = json.loads(messages.readline())
    backend = attempt("did not start", BACKENDS[setup["tracker"]], setup)
    if backend is None:
        return
    reply(id=backend.get_id())
    if backend.warning is not None:
        reply(failed=backend.warning)
    actions = {"metrics": backend.log, "rollouts": backend.log_table}
    for line in messages:
        if not line.endswith("\n"):  # the run was killed while it wrote
            break
        message = json.loads(line)
        kind, arguments = message["kind"], message["arguments"]
        attempt(f"did not accept the {kind} of step {arguments[-1]}", actions[kind], *arguments)
    signal.alarm(_END_SECONDS)
    attempt("did not finish", backend.tracker.finish)


if __name__ == "__main__":
    serve(*_take_streams())
    sys.exit(0)
