"""A run's folder: metrics, checkpoints and rollouts as files that a resumed run continues as if
nothing had happened.

    config.json              the resolved settings
    metrics.jsonl            one JSON object a line: "step", "stage", metrics
    checkpoints.jsonl        one line a checkpoint: "name", "batch", "state_path", "sampler_path"
    decisions.jsonl          what the clock decided, where episodes go on by themselves: see rl.run.decisions
    rollouts/step_000010.*   what was sampled: .jsonl whole, .html to read
    curves.png               drawn at the end (and by plot.py at any time)
    run.lock                 while a process works here: see rl.run.lock
    logs/                    of whatever started the processes (slurm/job.sh); never touched here

`step` counts the optimizer steps done since the start of the run, over all its stages: 0 is before
the first. Only rank 0 makes a Logbook.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rl.errors import RunFolderError
from rl.jsonl import METRICS, finite, json_line, read_metrics, read_rows, write_atomically
from rl.report import html, plots
from rl.report.tracker import Tracker, Warner
from rl.settings import current_settings

CHECKPOINTS, CONFIG, ROLLOUTS, CURVES = "checkpoints.jsonl", "config.json", "rollouts", "curves.png"
LOGS, LOCK = "logs", "run.lock"
_OWN = (
    "decisions.jsonl",
    CONFIG,
    METRICS,
    CHECKPOINTS,
    CURVES,
    ROLLOUTS,
    "checkpoints",
    "sampler_weights",
    "wandb",
    "wandb_id.txt",
)


# --------------------------------------------------------------------------------------- the folder


def _json_of(path: Path) -> Any:
    """RunFolderError naming the file where it is no JSON."""
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(
            f"{path} is not JSON ({error}); repair it, or give another folder"
        ) from error


def holds_a_run(folder: Path) -> bool:
    """Whether config.json is a run's. A model's folder has a config.json too, and must not be taken
    for ours.
    """
    path = folder / CONFIG
    if not path.is_file():
        return False
    config = _json_of(path)
    return isinstance(config, dict) and "stages" in config


def never_took_a_step(folder: Path) -> bool:
    """Whether a run began here and ended before its first step: there is nothing in its folder that
    it learnt or sampled.
    """
    for name in ("checkpoints", "sampler_weights", ROLLOUTS):
        parent = folder / name
        if parent.is_dir() and any(".partial-" not in path.name for path in parent.iterdir()):
            return False
    if (folder / CHECKPOINTS).exists() and read_rows(folder / CHECKPOINTS):
        return False
    return all(row.get("step") == 0 for row in read_rows(folder / METRICS))


def _contents(folder: Path) -> list[Path]:
    """What lies in `folder`, but for its logs, its lock and a config.json that was never finished:
    a restarted job finds those.
    """
    there = folder.iterdir() if folder.is_dir() else ()
    return [
        path
        for path in there
        if path.name not in (LOGS, CONFIG + ".tmp") and not path.name.startswith(LOCK)
    ]


def check_claim(folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Whether `claim` would succeed, without touching anything: asked before models and data are
    loaded.

    RunFolderError where the folder holds another run and neither was asked for, where there is
    nothing to resume, or where the folder to be overwritten holds files but no run (a mistyped path
    is not emptied).
    """
    if resume and overwrite:
        raise RunFolderError(
            "--resume continues a run and --overwrite deletes it; give one of them"
        )
    if resume:
        if not holds_a_run(folder):
            raise RunFolderError(
                f"nothing to resume: {folder} holds no run ({CONFIG}); check --output-dir, or drop --resume"
            )
        return
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file; give a folder as --output-dir")
    if _contents(folder):
        if not holds_a_run(folder):
            raise RunFolderError(
                f"{folder} is not empty and holds no run ({CONFIG}); give another --output-dir"
            )
        if not overwrite and not never_took_a_step(folder):
            raise RunFolderError(
                f"{folder} holds a run: --resume continues it, --overwrite deletes it; or change --output-dir"
            )


def check_can_write(folder: Path) -> None:
    """RunFolderError where the folder cannot be made or written to. It is tried, and taken back:
    permissions tell half of it.
    """
    made: list[Path] = []
    try:
        if folder.exists() and not folder.is_dir():
            raise RunFolderError(f"{folder} is a file; give a folder as --output-dir")
        for parent in [*reversed(folder.parents), folder]:
            if not parent.exists():
                parent.mkdir()
                made.append(parent)
        probe = folder / f"{LOCK}.{uuid.uuid4().hex}.try"
        probe.touch(exist_ok=False)
        probe.unlink()
    except NotADirectoryError as error:
        raise RunFolderError(
            f"--output-dir {folder} cannot be: {error.filename} lies below a file; give another"
        ) from error
    except RunFolderError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise RunFolderError(
            f"--output-dir {str(folder)[:200]!r} cannot be made or written to ({error}); give another"
        ) from error
    finally:
        for parent in reversed(made):
            with contextlib.suppress(OSError):
                parent.rmdir()


def saved_config(folder: Path) -> dict[str, Any]:
    """config.json of a run. RunFolderError naming what it lacks."""
    config = _json_of(folder / CONFIG)
    wrong = None
    if not isinstance(config, dict):
        wrong = "holds no JSON object"
    elif missing := [key for key in ("name", "options", "stages") if key not in config]:
        wrong = f"has no {' and no '.join(map(repr, missing))}"
    elif not isinstance(config["name"], str) or not isinstance(config["options"], dict):
        wrong = "has a 'name' that is no text or 'options' that are no settings"
    elif (
        not isinstance(config["stages"], list)
        or not config["stages"]
        or not all(map(_is_stage, config["stages"]))
    ):
        wrong = "has 'stages' that are no list of stages, each with 'method', 'name' and 'settings'"
    if wrong is not None:
        raise RunFolderError(
            f"{folder / CONFIG} {wrong}: it is not as a run writes it, repair it or give another folder"
        )
    for stage in config["stages"]:
        stage["settings"] = current_settings(stage["settings"])
    return config


def _is_stage(stage: Any) -> bool:
    named = (
        isinstance(stage, dict)
        and isinstance(stage.get("method"), str)
        and isinstance(stage.get("name"), str)
    )
    return named and isinstance(stage.get("settings"), dict)


def claim(
    folder: Path, config: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False
) -> dict[str, Any] | None:
    """Make `folder` this run's: write config.json, or with `resume` return the saved one (and leave
    it as it is).

    A folder of a run that never took a step is begun anew. Raises what `check_claim` raises.
    """
    check_claim(folder, resume=resume, overwrite=overwrite)
    if resume:
        return saved_config(folder)
    for path in _contents(folder):
        if overwrite or path.name in _OWN:  # notes beside a run that never began are not ours
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, config)
    return None


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    write_atomically(folder / CONFIG, json.dumps(finite(config), indent=2, allow_nan=False) + "\n")


# -------------------------------------------------------------------------------------- the logbook


class Logbook:
    """The open files of one run.

    `resume_step`: the step of the checkpoint that the run continues from; whatever was written
    after it is taken back, so that the files end as those of an undisturbed run (all but times).
    Without it, a folder that already has metrics is an error. `checkpoints`: those that a resumed
    run has (see rl.run.inventory), by default what its list says up to that step. `guard` raises
    where the folder is no longer ours to write to.
    `wandb_project`: also log to weights & biases (its files lie in the run's folder;
    WANDB_MODE=offline works).
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int | None = None,
        wandb_project: str | None = None,
        config: Mapping[str, Any] | None = None,
        console: Warner | None = None,
        checkpoints: Sequence[Mapping[str, Any]] | None = None,
        guard: Callable[[], None] = lambda: None,
    ):
        self.folder = folder
        self.console = console
        self._guard = guard
        self._last_step = -1
        self._failed: set[str] = set()
        self._checkpoints: list[dict[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        if resume_step is not None:
            self._take_back(resume_step, checkpoints)
        elif (folder / METRICS).exists() or (folder / CHECKPOINTS).exists():
            raise RunFolderError(
                f"{folder} has metrics or checkpoints already: resume that run, or take another folder"
            )
        resumed = resume_step is not None
        self._tracker = (
            Tracker(wandb_project, folder, config or {}, resumed=resumed, console=console)
            if wandb_project
            else None
        )
        # a metric's name may be a row's text
        self._metrics = (folder / METRICS).open("a", encoding="utf-8", errors="replace")

    def _take_back(self, resume_step: int, checkpoints: Sequence[Mapping[str, Any]] | None) -> None:
        rows = [row for row in read_metrics(self.folder / METRICS) if row["step"] <= resume_step]
        write_atomically(self.folder / METRICS, "".join(json_line(row) for row in rows))
        self._last_step = max((row["step"] for row in rows), default=-1)
        if checkpoints is None:
            checkpoints = [
                row for row in read_rows(self.folder / CHECKPOINTS) if row["batch"] <= resume_step
            ]
        self._checkpoints = [dict(row) for row in checkpoints]
        if (self.folder / CHECKPOINTS).exists() or self._checkpoints:
            self._write_checkpoints()
        for path in (self.folder / ROLLOUTS).glob("step_*"):
            digits = path.name.removeprefix("step_").partition(".")[0].partition("_")[0]
            if digits.isdigit() and int(digits) > resume_step:
                path.unlink()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line. Values are numbers (NaN and infinity become null) or short texts such as
        "stage".
        """
        self._guard()
        if step < self._last_step:
            raise ValueError(
                f"step {step} after step {self._last_step}: steps count over all stages of a run, upwards"
            )
        self._last_step = step
        self._metrics.write(json_line(finite({"step": step, **metrics})))
        self._metrics.flush()
        if self._tracker is not None:
            self._tracker.log(step, metrics)

    def rows(self) -> list[dict[str, Any]]:
        """The metrics so far, oldest first."""
        return read_metrics(self.folder / METRICS)

    def sync(self) -> None:
        """The metrics so far are on the disk: a checkpoint may say that they are there."""
        self._guard()
        self._metrics.flush()
        os.fsync(self._metrics.fileno())

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]], stage: str = "") -> None:
        """Write what was sampled at `step`: every row as JSON, and a page to read (keys: see
        `rl.report.html.page`).

        `stage`: a later stage's name, for the files' names: steps count from the run's beginning,
        as in the metrics.
        """
        folder = self.folder / ROLLOUTS
        folder.mkdir(exist_ok=True)
        plain = [finite(row) for row in rows]
        name = f"step_{step:06d}" + (f"_{stage}" if stage else "")
        write_atomically(folder / f"{name}.jsonl", "".join(json_line(row) for row in plain))
        title = f"{self.folder.name}, step {step}" + (f" ({stage})" if stage else "")
        self._aside(
            "page of rollouts",
            lambda: self._write_page(folder / f"{name}.html", step, plain, title),
        )

    def _write_page(
        self, page: Path, step: int, rows: Sequence[Mapping[str, Any]], title: str
    ) -> None:
        """The page, linked with the one before it in both directions."""
        folder = page.parent
        earlier = max(
            (path for path in folder.glob("step_*.html") if path.name < page.name), default=None
        )
        digits = "" if earlier is None else earlier.stem.removeprefix("step_").partition("_")[0]
        before = (earlier.name, int(digits)) if earlier is not None and digits.isdigit() else None
        write_atomically(
            page,
            html.page(
                rows, title=title, step=step, before=before, file=page.with_suffix(".jsonl").name
            ),
        )
        if earlier is not None and before is not None:
            written = earlier.read_text(encoding="utf-8", errors="replace")
            write_atomically(earlier, html.with_next(written, page.name, step))

    def _aside(self, what: str, work: Callable[[], object]) -> bool:
        """Does what stands beside a run and must never end it (a tracker, a page, a picture): what
        fails is said once.

        Whatever it raises: these are others' libraries, on others' text.
        """
        try:
            work()
        except Exception as error:
            if self.console is not None and what not in self._failed:
                self.console.warn(
                    f"no {what} ({type(error).__name__}: {error}); the run goes on without"
                )
            self._failed.add(what)
            return False
        return True

    def checkpoint(self, row: Mapping[str, Any]) -> None:
        """Note a checkpoint: `name`, `batch` (its step), `state_path`, `sampler_path`. A row of the
        same name is replaced.
        """
        missing = [key for key in ("name", "batch") if key not in row]
        if missing:
            raise ValueError(f"a checkpoint row needs {missing}, got {sorted(row)}")
        self._guard()
        self._checkpoints = [old for old in self._checkpoints if old["name"] != row["name"]] + [
            finite(row)
        ]
        self._write_checkpoints()

    def forget_checkpoint(self, name: str) -> None:
        """Take a checkpoint's row out, before its folder is removed."""
        self._guard()
        self._checkpoints = [row for row in self._checkpoints if row["name"] != name]
        self._write_checkpoints()

    def checkpoints(self) -> list[dict[str, Any]]:
        """The checkpoints noted so far, oldest first. The file is written, never asked: it may have
        been changed meanwhile.
        """
        return list(self._checkpoints)

    def _write_checkpoints(self) -> None:
        write_atomically(
            self.folder / CHECKPOINTS, "".join(json_line(row) for row in self._checkpoints)
        )

    def close(self) -> None:
        """Close the files and draw the curves. Safe to call twice."""
        if self._metrics.closed:
            return
        self._metrics.close()
        if self._tracker is not None:
            self._tracker.finish()
        if self.rows():
            # a picture is not worth a finished run
            self._aside(CURVES, lambda: plots.draw(self.folder, self.folder / CURVES))

    def __enter__(self) -> Logbook:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
