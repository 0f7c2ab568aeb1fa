"""A run's folder: metrics, checkpoints and rollouts as files that a resumed run continues as if nothing had happened.

    config.json              the resolved settings
    metrics.jsonl            one JSON object a line: "step", "stage", metrics
    checkpoints.jsonl        one line a checkpoint: "name", "batch", "state_path", "sampler_path"
    rollouts/step_000010.*   what was sampled: .jsonl whole, .html to read
    curves.png               drawn at the end (and by plot.py at any time)
    logs/                    of whatever started the processes (slurm/job.sh); never touched here

`step` counts the optimizer steps done since the start of the run, over all its stages: 0 is before the first. Only rank 0
makes a Logbook.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rl import html, plots
from rl.errors import UserError
from rl.jsonl import METRICS, finite, json_line, read_rows, write_atomically

CHECKPOINTS, CONFIG, ROLLOUTS, CURVES = "checkpoints.jsonl", "config.json", "rollouts", "curves.png"
LOGS = "logs"


class Warner(Protocol):
    """Where a Logbook says that something went wrong that must not end the run."""

    def warn(self, text: str) -> None: ...


class RunFolderError(UserError):
    """The folder cannot be used as asked; the message says what to do."""


# ----------------------------------------------------------------------------------------------------------- the folder


def holds_a_run(folder: Path) -> bool:
    """Whether config.json is a run's. A model's folder has a config.json too, and must not be taken for ours."""
    path = folder / CONFIG
    if not path.is_file():
        return False
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise RunFolderError(f"{path} is not JSON ({error}); repair it, or give another --output-dir") from error
    return isinstance(config, dict) and "stages" in config


def _contents(folder: Path) -> list[Path]:
    """What lies in `folder`, but for its logs and the start of a config.json that was never finished: a restarted job finds both."""
    return [path for path in folder.iterdir() if path.name not in (LOGS, CONFIG + ".tmp")] if folder.is_dir() else []


def check_claim(folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Whether `claim` would succeed, without touching anything: asked before models and data are loaded.

    RunFolderError where the folder holds another run and neither was asked for, where there is nothing to resume, or where
    the folder to be overwritten holds files but no run (a mistyped path is not emptied).
    """
    if resume and overwrite:
        raise RunFolderError("--resume continues a run and --overwrite deletes it; give one of them")
    if resume:
        if not holds_a_run(folder):
            raise RunFolderError(f"nothing to resume: {folder} holds no run ({CONFIG}); check --output-dir, or drop --resume")
        return
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file; give a folder as --output-dir")
    if _contents(folder):
        if not holds_a_run(folder):
            raise RunFolderError(f"{folder} is not empty and holds no run ({CONFIG}); give another --output-dir")
        if not overwrite:
            raise RunFolderError(f"{folder} holds a run: --resume continues it, --overwrite deletes it; or change --output-dir")


def saved_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / CONFIG).read_text(encoding="utf-8"))


def claim(folder: Path, config: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False) -> dict[str, Any] | None:
    """Make `folder` this run's: write config.json, or with `resume` return the saved one (and leave it as it is).

    Raises what `check_claim` raises.
    """
    check_claim(folder, resume=resume, overwrite=overwrite)
    if resume:
        return saved_config(folder)
    for path in _contents(folder):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / CONFIG, json.dumps(finite(config), indent=2, allow_nan=False) + "\n")
    return None


# ----------------------------------------------------------------------------------------------------------- the logbook


class Logbook:
    """The open files of one run.

    `resume_step`: the step of the checkpoint that the run continues from; whatever was written after it is taken back, so
    that the files end as those of an undisturbed run (all but times). Without it, a folder that already has metrics is an
    error. `wandb_project`: also log to weights & biases (its files lie in the run's folder; WANDB_MODE=offline works).
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int | None = None,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
        console: Warner | None = None,
    ):
        self.folder = folder
        self.console = console
        self._last_step = -1
        folder.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            self._take_back(resume_step)
        elif (folder / METRICS).exists() or (folder / CHECKPOINTS).exists():
            raise RunFolderError(f"{folder} has metrics or checkpoints already: resume that run, or take another folder")
        resumed = resume_step is not None
        self._wandb = _start_wandb(wandb_project, folder, config or {}, resumed=resumed) if wandb_project else None
        self._metrics = (folder / METRICS).open("a", encoding="utf-8")

    def _take_back(self, resume_step: int) -> None:
        rows = [row for row in read_rows(self.folder / METRICS) if row["step"] <= resume_step]
        write_atomically(self.folder / METRICS, "".join(json_line(row) for row in rows))
        self._last_step = max((row["step"] for row in rows), default=-1)
        if (self.folder / CHECKPOINTS).exists():
            kept = [row for row in self.checkpoints() if row["batch"] <= resume_step]
            write_atomically(self.folder / CHECKPOINTS, "".join(json_line(row) for row in kept))
        for path in (self.folder / ROLLOUTS).glob("step_*"):
            digits = path.name.removeprefix("step_").partition(".")[0]
            if digits.isdigit() and int(digits) > resume_step:
                path.unlink()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line. Values are numbers (NaN and infinity become null) or short texts such as "stage"."""
        if step < self._last_step:
            raise ValueError(f"step {step} after step {self._last_step}: steps count over all stages of a run, upwards")
        self._last_step = step
        self._metrics.write(json_line(finite({"step": step, **metrics})))
        self._metrics.flush()
        if self._wandb is not None:
            self._wandb.log({key: value for key, value in metrics.items() if value is not None}, step=step)

    def rows(self) -> list[dict[str, Any]]:
        """The metrics so far, oldest first."""
        return read_rows(self.folder / METRICS)

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write what was sampled at `step`: every row as JSON, and a page to read (keys: see `rl.html.page`)."""
        folder = self.folder / ROLLOUTS
        folder.mkdir(exist_ok=True)
        plain = [finite(row) for row in rows]
        write_atomically(folder / f"step_{step:06d}.jsonl", "".join(json_line(row) for row in plain))
        title = f"{self.folder.name}, step {step}"
        write_atomically(folder / f"step_{step:06d}.html", html.page(plain, title=title, step=step))

    def checkpoint(self, row: Mapping[str, Any]) -> None:
        """Note a checkpoint: `name`, `batch` (its step), `state_path`, `sampler_path`. A row of the same name is replaced."""
        missing = [key for key in ("name", "batch") if key not in row]
        if missing:
            raise ValueError(f"a checkpoint row needs {missing}, got {sorted(row)}")
        rows = [old for old in self.checkpoints() if old["name"] != row["name"]]
        write_atomically(self.folder / CHECKPOINTS, "".join(json_line(item) for item in [*rows, finite(row)]))

    def forget_checkpoint(self, name: str) -> None:
        """Take a checkpoint's row out, before its folder is removed."""
        rows = [row for row in self.checkpoints() if row["name"] != name]
        write_atomically(self.folder / CHECKPOINTS, "".join(json_line(row) for row in rows))

    def checkpoints(self) -> list[dict[str, Any]]:
        """The checkpoints noted so far, oldest first."""
        return read_rows(self.folder / CHECKPOINTS)

    def close(self) -> None:
        """Close the files and draw the curves. Safe to call twice."""
        if self._metrics.closed:
            return
        self._metrics.close()
        if self._wandb is not None:
            self._wandb.finish()
        if not read_rows(self.folder / METRICS):
            return
        try:
            plots.draw(self.folder, self.folder / CURVES)
        except (ImportError, plots.NothingToDraw) as error:
            # A picture is not worth a finished run.
            if self.console is not None:
                self.console.warn(f"no {CURVES}: {error}")

    def __enter__(self) -> Logbook:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _start_wandb(project: str, folder: Path, config: Mapping[str, Any], *, resumed: bool) -> Any:
    """A weights & biases run that keeps its files, and its id for a resume, in the run's folder."""
    try:
        import wandb
    except ImportError as error:
        raise RunFolderError(
            f"logging to the weights & biases project {project!r} needs the package: pip install wandb, or leave the flag out"
        ) from error
    id_file = folder / "wandb_id.txt"
    run_id = id_file.read_text(encoding="utf-8").strip() if resumed and id_file.exists() else uuid.uuid4().hex[:8]
    try:
        run = wandb.init(
            project=project,
            name=folder.name,
            id=run_id,
            resume="allow" if resumed else None,
            dir=str(folder),
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
    except wandb.errors.Error as error:
        raise RunFolderError(
            f"weights & biases did not start ({error}); set WANDB_MODE=offline to log without its server, or leave the flag out"
        ) from error
    write_atomically(id_file, run_id + "\n")
    return run
