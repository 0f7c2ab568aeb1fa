"""Manage a run's folder: metrics, checkpoints and rollouts as files that a resumed run continues
without a trace of the interruption.

    config.json              the resolved settings
    metrics.jsonl            a JSON object on each line: "step", "stage", metrics
    checkpoints.jsonl        a line a checkpoint: "name", "batch", "state_path", "sampler_path"
    decisions.jsonl          decisions of the event log of async rollouts: rl.trainer.stage_sampling
    rollouts/step_000010.*   the samples: .jsonl with all rows, .html to read, .update.safetensors
                             with the logprobs of their update: rl.trainer.batch_log
    rollouts/grpo-eval-000010.jsonl
                             the held-out answers of an evaluation (greedy: grpo-eval-greedy-000010)
    reward_check.json        what the rewards pay for: rl.trainer.preflight
    curves.png               drawn at the end (and by plot.py at any time)
    wandb/, wandb_id.txt     of each tracker: its files, and the id under which it resumes
    report.html              written at evaluations and at the end: rl.trainer.run_report
    launches.jsonl           a line a launch: versions, devices, memory: rl.trainer.run_report
    run.lock                 while a process works in the folder: see rl.processes.run_lock
    logs/                    logs of the launcher (slurm/job.sh); never touched by this module

`step` counts the optimizer steps completed since the start of the run, over all its stages: 0 is
before the first step. Only rank 0 creates a Logbook.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.config import current_settings, is_method_address
from rl.errors import RankLost, RunFolderError
from rl.jsonl import (
    METRICS_FILE,
    TEMPORARY,
    Row,
    find_bad_metric,
    format_json_line,
    get_evaluation_step,
    get_rollout_step,
    name_evaluation_file,
    read_jsonl,
    read_metrics,
    replace_nonfinite,
    write_atomically,
    write_jsonl,
)
from rl.processes import LOCK
from rl.reporting import metric_plots, rollout_html
from rl.reporting.tracker_process import TRACKER_FILES, RunTrackers, WarningSink
from rl.reporting.update_files import write_update_file

CHECKPOINTS, CONFIG, ROLLOUTS, CURVES = "checkpoints.jsonl", "config.json", "rollouts", "curves.png"
EVALUATIONS = "evaluations"  # a .json and a .md file for each evaluation by evaluate.py
REPORT, LAUNCHES, LOGS = "report.html", "launches.jsonl", "logs"
REWARD_CHECK = "reward_check.json"
# of rl.jsonl.write_atomically
_TEMPORARY_NAME = re.compile(r".*\.[0-9a-f]{8}" + re.escape(TEMPORARY))
_RUN_FILES = (
    "decisions.jsonl",
    CONFIG,
    METRICS_FILE,
    CHECKPOINTS,
    CURVES,
    REPORT,
    LAUNCHES,
    REWARD_CHECK,
    ROLLOUTS,
    EVALUATIONS,
    "checkpoints",
    "sampler_weights",
    *TRACKER_FILES,
)


# --------------------------------------------------------------------------------------- the folder


def _read_json(path: Path) -> Any:
    """Parse a JSON file. Raises RunFolderError, naming the file, if it cannot be parsed."""
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunFolderError(
            f"{path} is not JSON ({error}); repair it, or give another folder"
        ) from error


def contains_run(folder: Path) -> bool:
    """Return whether config.json belongs to a run. A model's folder also has a config.json and must
    not be mistaken for a run.
    """
    path = folder / CONFIG
    if not os.path.isfile(path):  # Path.is_file raises for a name that is too long
        return False
    config = _read_json(path)
    return isinstance(config, dict) and "stages" in config


def has_steps(folder: Path) -> bool:
    """Return whether the folder's run has taken a step, so that the folder holds trained weights or
    samples.
    """
    for name in ("checkpoints", "sampler_weights", ROLLOUTS):
        parent = folder / name
        if parent.is_dir() and any(
            ".partial-" not in path.name
            and not path.name.endswith(TEMPORARY)
            and get_evaluation_step(path.name) != 0
            for path in parent.iterdir()
        ):
            return True
    if (folder / CHECKPOINTS).exists() and read_jsonl(folder / CHECKPOINTS):
        return True
    return any(row.get("step") != 0 for row in read_jsonl(folder / METRICS_FILE))


def _list_contents(folder: Path) -> list[Path]:
    """Return the contents of `folder`, except its logs, its lock and a partially written
    config.json, which exist when a job is restarted.
    """
    paths = folder.iterdir() if folder.is_dir() else ()
    return [
        path
        for path in paths
        if path.name != LOGS
        and not path.name.startswith(LOCK)
        and not (path.name.startswith(CONFIG) and path.name.endswith(TEMPORARY))
    ]


def check_claim_folder(folder: Path, *, resume: bool = False, overwrite: bool = False) -> None:
    """Check that `claim_folder` would succeed, without changing any file. Called before models and
    data are loaded.

    Raises RunFolderError if the folder holds another run and neither `resume` nor `overwrite` is
    set, if no run exists to resume, or if the folder to overwrite holds files but no run (a
    mistyped path is not emptied).
    """
    if resume and overwrite:
        raise RunFolderError(
            "--resume continues a run and --overwrite deletes it; use only --resume or only "
            "--overwrite"
        )
    if resume:
        if not contains_run(folder):
            raise RunFolderError(
                f"nothing to resume: {folder} holds no run ({CONFIG}); check --output-dir, or drop "
                f"--resume"
            )
        return
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file; give a folder as --output-dir")
    if _list_contents(folder):
        if not contains_run(folder):
            raise RunFolderError(
                f"{folder} is not empty and holds no run ({CONFIG}); give another --output-dir"
            )
        if not overwrite and has_steps(folder):
            raise RunFolderError(
                f"{folder} holds a run: --resume continues it, --overwrite deletes it; or change "
                f"--output-dir"
            )


def check_writable(folder: Path) -> None:
    """Raise RunFolderError if the folder cannot be created or written to.

    The check creates the folder inside of a temporary one, and removes both, because permission
    bits are not conclusive. Runs that start at the same time do not disturb each other.
    """
    folder = Path(os.path.abspath(folder))  # ".." would leave the temporary folder
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if os.path.exists(nearest) and not os.path.isdir(nearest):  # Path's methods may raise
        raise RunFolderError(f"{nearest} is a file; give another folder as --output-dir")
    probe = nearest / f"{LOCK}.{uuid.uuid4().hex}.try"
    try:
        (probe / folder.relative_to(nearest)).mkdir(parents=True)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        raise RunFolderError(
            f"--output-dir {str(folder)[:200]!r} cannot be created or written to ({error}); use "
            f"another folder"
        ) from error
    finally:
        shutil.rmtree(probe, ignore_errors=True)


def load_saved_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a run. Raises RunFolderError, naming the defect, if it is
    incomplete.
    """
    config = _read_json(folder / CONFIG)
    defect = None
    if not isinstance(config, dict):
        defect = "holds no JSON object"
    elif missing := [key for key in ("name", "options", "stages") if key not in config]:
        defect = f"has no {' and no '.join(map(repr, missing))}"
    elif not isinstance(config["name"], str) or not isinstance(config["options"], dict):
        defect = "has a 'name' that is not a text or 'options' that are not settings"
    elif (
        not isinstance(config["stages"], list)
        or not config["stages"]
        or not all(map(_is_stage, config["stages"]))
    ):
        defect = (
            "has 'stages' that are not a list of stages, each with 'method', 'name' and 'settings'"
        )
    if defect is not None:
        raise RunFolderError(
            f"{folder / CONFIG} {defect}: no run writes such a file, repair it or use another "
            f"folder"
        )
    for stage in config["stages"]:
        if not is_method_address(stage["method"]):  # a user's method may have a former name
            stage["settings"] = current_settings(stage["settings"])
    return config


def _is_stage(stage: Any) -> bool:
    """Return whether the value has the form of a stage of config.json."""
    kinds = {"method": str, "name": str, "settings": dict}
    return isinstance(stage, dict) and all(isinstance(stage.get(k), t) for k, t in kinds.items())


def claim_folder(folder: Path, config: Mapping[str, Any], *, overwrite: bool = False) -> None:
    """Claim `folder` for a new run: write config.json.

    The folder of a run that never took a step is started again. Raises RunFolderError as
    `check_claim_folder`.
    """
    check_claim_folder(folder, overwrite=overwrite)
    for path in _list_contents(folder):
        if overwrite or path.name in _RUN_FILES:  # keep foreign files
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(f"{CONFIG}*{TEMPORARY}"):  # of a start that was killed
        path.unlink(missing_ok=True)
    write_config(folder, config)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write config.json atomically."""
    write_atomically(
        folder / CONFIG, json.dumps(replace_nonfinite(config), indent=2, allow_nan=False) + "\n"
    )


# -------------------------------------------------------------------------------------- the logbook


class Logbook:
    """Hold the open files of a run.

    `resume_step`: step of the checkpoint that the run continues from. All later rows are removed,
    so that the files end up equal to those of an uninterrupted run (except times). Without
    `resume_step`, a folder with metrics raises RunFolderError. `guard` raises if the folder no
    longer belongs to this process. `trackers`: names of trackers to log to as well, in the project
    `tracker_project`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int | None = None,
        trackers: Sequence[str] = (),
        tracker_project: str = "whetstone",
        config: Mapping[str, Any] | None = None,
        console: WarningSink | None = None,
        guard: Callable[[], None] = lambda: None,
    ):
        self.folder, self.console, self.guard = folder, console, guard
        self._last_step = -1
        self._failed: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        for path in (*folder.glob(f"*{TEMPORARY}"), *folder.glob(f"{ROLLOUTS}/*{TEMPORARY}")):
            if _TEMPORARY_NAME.fullmatch(path.name):  # of a launch that was killed
                path.unlink(missing_ok=True)
        if resume_step is not None:
            self._remove_later_rows(resume_step)
        elif (folder / METRICS_FILE).exists() or (folder / CHECKPOINTS).exists():
            raise RunFolderError(
                f"{folder} has metrics or checkpoints already: resume that run, or use another "
                f"folder"
            )
        self._trackers = RunTrackers(
            trackers,
            tracker_project,
            folder,
            config or {},
            resume_step=resume_step,
            console=console,
        )
        # errors="replace": a metric's name may be arbitrary text of a data row
        self._metrics = (folder / METRICS_FILE).open("a", encoding="utf-8", errors="replace")

    def _remove_later_rows(self, resume_step: int) -> None:
        """Remove metrics and rollouts after step `resume_step`."""
        rows = [
            row for row in read_metrics(self.folder / METRICS_FILE) if row["step"] <= resume_step
        ]
        write_jsonl(self.folder / METRICS_FILE, rows)
        self._last_step = max((row["step"] for row in rows), default=-1)
        for path in (self.folder / ROLLOUTS).glob("*"):
            steps = (get_rollout_step(path.name), get_evaluation_step(path.name))
            if any(step is not None and step > resume_step for step in steps):
                path.unlink()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append a row of metrics. Values are numbers (NaN and infinity become null) or short texts
        such as "stage". Raises ValueError for other values, which a resume could not read, and if
        `step` is lower than the last step.
        """
        self.guard()
        if step < self._last_step:
            raise ValueError(
                f"step {step} after step {self._last_step}: steps must not decrease, over all "
                f"stages of a run"
            )
        row = replace_nonfinite({"step": step, **metrics})
        if (problem := find_bad_metric(row)) is not None:
            raise ValueError(f"metrics of step {step}: {problem}")
        self._last_step = step
        self._metrics.write(format_json_line(row))
        self._metrics.flush()
        self._trackers.log(step, metrics)

    def read_rows(self) -> list[dict[str, Any]]:
        """Return the metrics so far, oldest first."""
        return read_metrics(self.folder / METRICS_FILE)

    def sync(self) -> None:
        """Flush the metrics to disk, so that a checkpoint may rely on them."""
        self.guard()
        self._metrics.flush()
        os.fsync(self._metrics.fileno())

    def write_rollouts(self, step: int, rows: Iterable[Row], stage: str = "") -> None:
        """Write the samples of `step`: every row as JSON, and an HTML page (keys: see
        `rl.reporting.rollout_html.render_page`).

        `stage`: name of a later stage for the file names. Steps count from the start of the run, as
        in the metrics.
        """
        path = self._locate_rollouts(step, stage)
        plain = self._write_answers(path, rows)
        title = f"{self.folder.name}, step {step}" + (f" ({stage})" if stage else "")
        self._run_optional(
            "page of rollouts",
            lambda: self._write_page(path.with_suffix(".html"), step, plain, title),
        )
        self._trackers.log_table("rollouts", step, plain)

    def _locate_rollouts(self, step: int, stage: str) -> Path:
        """Return the file of the samples of a step; `stage`: name of a later stage."""
        return self.folder / ROLLOUTS / f"step_{step:06d}{f'_{stage}' if stage else ''}.jsonl"

    def write_update_record(
        self,
        step: int,
        build: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]] | None],
        stage: str = "",
    ) -> None:
        """Write the record of the update of `step` beside its samples: arrays and metadata, as
        `build` returns them (rl.trainer.batch_log). A failure never ends the run.
        """
        path = self._locate_rollouts(step, stage).with_suffix(".update.safetensors")

        def write() -> None:
            record = build()
            if record is not None:
                write_update_file(path, *record)

        self._run_optional("record of the update", write)

    def write_held_out_answers(
        self, step: int, rows: Iterable[Row], stage: str, *, greedy: bool = False
    ) -> None:
        """Write the held-out answers of an evaluation at `step`, as rows without tokens."""
        path = self.folder / ROLLOUTS / name_evaluation_file(stage, step, greedy=greedy)
        plain = self._write_answers(path, rows)
        if not greedy:
            self._trackers.log_table("held_out_answers", step, plain)

    def _write_answers(self, path: Path, rows: Iterable[Row]) -> list[dict[str, Any]]:
        """Write rows of samples, and return them as they are written."""
        path.parent.mkdir(exist_ok=True)
        plain = [replace_nonfinite(row) for row in rows]
        write_jsonl(path, plain)
        return plain

    def _write_page(self, page: Path, step: int, rows: Sequence[Row], title: str) -> None:
        """Write the page, and link it with the previous page in both directions."""
        folder = page.parent
        names = {get_rollout_step(path.name): path.name for path in folder.glob("*.html")}
        earlier_step = max((k for k in names if k is not None and k < step), default=None)
        earlier = names.get(earlier_step, "")
        text = rollout_html.render_page(
            rows,
            title=title,
            step=step,
            previous=None if earlier_step is None else (earlier, earlier_step),
            file=page.with_suffix(".jsonl").name,
        )
        write_atomically(page, text)
        if earlier_step is not None:
            written = (folder / earlier).read_text(encoding="utf-8", errors="replace")
            linked = rollout_html.add_next_link(written, page.name, step)
            write_atomically(folder / earlier, linked)

    def _run_optional(self, label: str, action: Callable[[], object]) -> None:
        """Run optional work that must never end a run (a tracker, a page, a picture). Warn about
        the first failure of each kind.

        All exceptions are caught, because the work runs third-party libraries on arbitrary text.
        """
        try:
            action()
        except Exception as error:
            if self.console is not None and label not in self._failed:
                self.console.warn(
                    f"no {label} ({type(error).__name__}: {error}); the run continues without it"
                )
            self._failed.add(label)

    def close(self, *, draw: bool = True) -> None:
        """Close the files and draw the curves if `draw`. Calling it again has no effect."""
        if self._metrics.closed:
            return
        self._metrics.close()
        self._trackers.finish()
        if draw and self.read_rows():
            # a failed picture must not fail a finished run
            self._run_optional(
                CURVES, lambda: metric_plots.draw_curves(self.folder, self.folder / CURVES)
            )

    def __enter__(self) -> Logbook:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After the loss of a rank, the launcher soon ends this process, which has to print the
        # error before that.
        self.close(draw=kind is None or not issubclass(kind, RankLost))
