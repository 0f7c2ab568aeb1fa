"""Write the report of runs: what was learned, settings, curves and rollouts as one HTML file. While
a run trains, write its report and its launches at a bounded cost.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import resource
import shlex
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from rl.algorithms import METHODS
from rl.config import RunSettings, flatten_settings
from rl.errors import RankLost, UserError, install_command
from rl.jsonl import Row, read_jsonl, write_atomically, write_jsonl
from rl.reporting import (
    CHECKPOINTS,
    LAUNCHES,
    MAX_REPORT_BYTES,
    REPORT,
    REWARD_CHECK,
    ROLLOUTS,
    TABLE_COLUMNS,
    Console,
    PairedComparison,
    RunCurve,
    average_by_problem,
    collect_curves,
    collect_rollouts,
    compare_paired,
    contains_run,
    encode_json,
    flatten_config,
    group_by_settings,
    has_plotly,
    label_runs,
    list_evaluation_tables,
    list_evaluations,
    load_plotly,
    load_saved_config,
    read_curve,
    read_rollouts,
    render_report,
)
from rl.sanitize import sanitize_text
from rl.trainer.evaluator import GREEDY_METRICS, HELD_OUT_ACCURACY, HeldOutMetrics
from rl.trainer.memory_report import format_gib
from rl.trainer.memory_requirements import StageNeeds, get_machine_memory
from rl.trainer.reward_probe import RewardProbeResult

_HELD_OUT_REWARD = "test/env/all/reward/total"
# Held-out metrics of stages that learn from rows: label and metric.
_ROW_METRICS = (
    ("loss", "test/loss"),
    ("token accuracy", "test/token_accuracy"),
    ("accuracy on pairs", "test/rewards/accuracies"),
)
# Metrics of a checkpoint's step: label and name.
_CHECKPOINT_METRICS = (
    ("reward", "reward/total"),
    ("loss on held-out rows", "test/loss"),
    ("loss", "optim/loss"),
    ("KL to reference", "optim/kl_ref_k3"),
    ("entropy", "optim/entropy"),
)
_FIRST_SETTINGS = ("base_model", "dataset", "reward", "rewards", "environment")
_VALUE_LIMIT = 2000  # characters of a setting
_MAX_EVALUATIONS = 50  # evaluations by evaluate.py that the page shows, the newest


@dataclass(frozen=True)
class SavedRun:
    """Hold what the folder of a run records: its label, configuration and metrics."""

    folder: Path
    label: str
    config: dict[str, Any]
    curve: RunCurve

    def select_rows(self, stage: str) -> list[dict[str, Any]]:
        """Return the rows of a stage, in the order of its steps."""
        return [row for row in self.curve.rows if row.get("stage") == stage]

    def list_values(self, stage: str, metric: str) -> list[float]:
        """Return the values of a metric in a stage, in the order of its steps."""
        return [row[metric] for row in self.select_rows(stage) if row.get(metric) is not None]


def read_saved_run(folder: Path, label: str) -> SavedRun:
    """Read the folder of a run. Raises UserError if it holds no run or no metrics."""
    if not contains_run(folder):
        raise UserError(f"{folder} holds no run: expected a folder that rl.train or train.py wrote")
    try:
        curve = read_curve(folder, label)
    except FileNotFoundError as error:
        raise UserError(str(error)) from error
    return SavedRun(folder, sanitize_text(label, 200), load_saved_config(folder), curve)


# --------------------------------------------------------------------------------------- headline


def describe_headline(run: SavedRun) -> dict[str, Any]:
    """Return the held-out figures before and after each stage, and remarks on them."""
    figures: list[tuple[str, Any, Any]] = []
    row_figures: list[tuple[str, Any, Any]] = []
    remarks: list[str] = []
    for stage in run.config["stages"]:
        name = stage["name"]
        held_out = HeldOutMetrics.from_rows(run.select_rows(name))
        if held_out.before is not None:
            figures.append((f"held-out {held_out.what}, {name}", held_out.before, held_out.after))
            greedy = GREEDY_METRICS[held_out.what == "reward"]
            if len(run.list_values(name, greedy)) > 1:
                ends = held_out.greedy_before, held_out.greedy_after
                figures.append((f"greedy {held_out.what}, {name}", *ends))
            remarks += filter(None, [held_out.describe_sharpening()])
            if paired := compare_ends(run, name):
                remarks.append(f"{name}, last against first evaluation: {paired.describe()}")
        for label, metric in _ROW_METRICS:
            if values := run.list_values(name, metric):
                row_figures.append((f"held-out {label}, {name}", values[0], values[-1]))
    return {"figures": figures + row_figures, "remarks": remarks}


def compare_ends(run: SavedRun, stage: str) -> PairedComparison | None:
    """Compare the last evaluation of a stage with its first, problem by problem; None if the run
    stored fewer than two.
    """
    files = [
        file
        for file in list_evaluations(run.folder / ROLLOUTS)
        if file.stage == stage and not file.greedy
    ]
    if len(files) < 2:
        return None
    before, after = (average_by_problem(read_rollouts(files[i].path)) for i in (0, -1))
    return compare_paired(before, after)


# --------------------------------------------------------------------------------------- settings


def _get_stage_defaults(method: str) -> dict[str, Any] | None:
    """Return the default settings of a built-in method; None for a method in a file, whose code is
    not imported.
    """
    if method not in METHODS.keys():  # noqa: SIM118  (`in METHODS` imports a method in a file)
        return None
    return flatten_settings(METHODS[method].Settings())


def _format_value(value: Any) -> str:
    """Return a setting as text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return sanitize_text("(not set)" if value is None else text, _VALUE_LIMIT)


def _list_changed(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that differ from their default, or have none."""
    return {k: value for k, value in settings.items() if k not in defaults or defaults[k] != value}


def describe_settings(run: SavedRun) -> list[dict[str, Any]]:
    """Return the settings of each stage: those that differ from the defaults, and all others."""
    entries = [("options", run.config["options"], flatten_settings(RunSettings()))]
    entries += [
        (
            f"{stage['name']} ({stage['method']})",
            stage["settings"],
            _get_stage_defaults(stage["method"]) or {},
        )
        for stage in run.config["stages"]
    ]
    sections = []
    for title, settings, defaults in entries:
        changed = _list_changed(settings, defaults)
        rows = [(str(k), _format_value(value), k in changed) for k, value in settings.items()]
        default_texts = {str(k): _format_value(defaults[k]) for k in changed if k in defaults}
        sections.append({"title": title, "rows": rows, "defaults": default_texts})
    return sections


def make_recipe(config: Mapping[str, Any]) -> str:
    """Return a recipe, as YAML, whose run has the settings of `config`.

    It has the settings that differ from the defaults of their method, and those that the method's
    variant implies. It has all settings of a method in a file.
    """
    stages = []
    for stage in config["stages"]:
        defaults = _get_stage_defaults(stage["method"])
        settings = stage["settings"]
        variant = settings.get("variant")
        implied = METHODS[stage["method"]].variants.get(variant, {}) if defaults and variant else {}
        known = {key: value for key, value in (defaults or {}).items() if key not in implied}
        changed = _list_changed(settings, known)
        stages.append({"method": stage["method"], "name": stage["name"], **changed})
    recipe = {"stages": stages}
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100)
    if sanitize_text(text, len(text)) == text:
        return text
    # marks that a page cannot show as they are become escapes of YAML
    return yaml.safe_dump(recipe, sort_keys=False, width=100)


def format_repeat_command(config: Mapping[str, Any]) -> str:
    """Return the command that repeats a run with the recipe of `make_recipe` as repeat.yaml."""
    words = ["whetstone", "train", "repeat.yaml", "--name", str(config["name"]) + "-repeated"]
    seed = config["options"].get("seed")
    return shlex.join([*words, *(["--seed", str(seed)] if seed is not None else [])])


class _Device(BaseModel):
    name: str
    memory: float


class _Launch(BaseModel):
    """Describe a row of launches.jsonl: when, versions, devices, planned and used memory."""

    time: str = ""
    step: int | None = None
    processes: int | None = None
    dtype: str = ""
    devices: list[_Device] = []
    planned_memory: dict[str, float] = {}
    peak_memory: float | None = None
    peak_memory_of: str = ""
    versions: dict[str, str] = {}

    def count_devices(self) -> list[tuple[str, int]]:
        """Return each kind of device and the number of devices of that kind."""
        kinds = (f"{device.name} ({format_gib(device.memory)})" for device in self.devices)
        return list(Counter(kinds).items())


def read_launches(folder: Path) -> list[_Launch]:
    """Return each launch of the run. Rows of another form are left out."""
    path = folder / LAUNCHES
    launches = []
    for row in read_rollouts(path) if path.is_file() else []:
        with contextlib.suppress(ValidationError):
            launches.append(_Launch.model_validate(row))
    return launches


def list_checkpoints(run: SavedRun) -> list[dict[str, Any]]:
    """Return the checkpoints of the run with the metrics of their step."""
    rows_by_step = {row["step"]: row for row in run.curve.rows}
    checkpoints = []
    for saved in read_jsonl(run.folder / CHECKPOINTS):
        row = rows_by_step.get(saved.get("batch", -1), {})
        held_out = row.get(HELD_OUT_ACCURACY, row.get(_HELD_OUT_REWARD))
        metrics = {
            "held-out value": saved.get("value", held_out),
            **{label: row.get(name) for label, name in _CHECKPOINT_METRICS},
        }
        checkpoints.append({**saved, "metrics": metrics})
    return checkpoints


@dataclass(frozen=True)
class RewardCheck(RewardProbeResult):
    """Hold the check of a reward that the run made before its first step."""

    dataset: str = ""


def read_reward_checks(folder: Path) -> list[RewardCheck]:
    """Return the checks of rewards; [] without any, or if their file cannot be read."""
    checks = TypeAdapter(dict[str, list[RewardCheck]])
    try:
        return checks.validate_json((folder / REWARD_CHECK).read_bytes()).get("rewards", [])[:20]
    except (OSError, ValidationError):
        return []


# ------------------------------------------------------------------------------------- several runs


def list_differing_settings(runs: Sequence[SavedRun]) -> list[dict[str, Any]]:
    """Return the settings in which runs differ: name and the value of each run. Stages are compared
    by position.
    """
    tables = [flatten_config(run.config) for run in runs]
    rows = []
    for name in dict.fromkeys(key for table in tables for key in table):
        values = [_format_value(table[name]) if name in table else "-" for table in tables]
        if len(set(values)) > 1:
            rows.append({"name": name, "values": values})
    return rows


def compare_runs(runs: Sequence[SavedRun]) -> list[dict[str, Any]]:
    """Compare the last held-out answers of each later run with those of the first, by problem.
    Sampled answers are compared with sampled ones, greedy answers with greedy ones.
    """
    rows = []
    for greedy in (False, True):
        scores: list[dict[str, float]] = []
        for run in runs:
            files = [f for f in list_evaluations(run.folder / ROLLOUTS) if f.greedy is greedy]
            scores.append(average_by_problem(read_rollouts(files[-1].path)) if files else {})
        for run, after in list(zip(runs, scores, strict=True))[1:]:
            paired = compare_paired(scores[0], after)
            if paired is not None:
                kind = "greedy" if greedy else "sampled"
                rows.append({"second": run.label, "kind": kind, "paired": paired})
    return rows


# --------------------------------------------------------------------------------------- the page


def collect_report(
    runs: Sequence[SavedRun], out: Path, limit: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what fills the template, and the data of the page's script, in about `limit` bytes."""
    data = collect_curves([run.curve for run in runs])
    for group, entry in zip(
        group_by_settings([run.config for run in runs]), data["runs"], strict=True
    ):
        entry["group"] = group
    context = {
        "title": " / ".join(run.label for run in runs[:6]),
        "runs": [_describe_run(run, entry) for run, entry in zip(runs, data["runs"], strict=True)],
        "differing": list_differing_settings(runs) if len(runs) > 1 else [],
        "paired": compare_runs(runs) if len(runs) > 1 else [],
        "evaluation_columns": [name.replace("_", " ") for name in TABLE_COLUMNS],
        "format_gib": format_gib,
    }
    remaining = limit - len(encode_json(data)) - len(json.dumps(context, default=str))
    for run, entry in zip(runs, data["runs"], strict=True):
        folder = run.folder / ROLLOUTS
        entry["rollouts"] = collect_rollouts(
            folder, max(0, remaining // len(runs)), entry["alarms"]
        )
        entry["rollouts"]["link"] = _make_link(folder, out)
    return context, data


def _make_link(folder: Path, out: Path) -> str:
    """Return the address of a folder from the page: relative if it lies below the page's folder."""
    target, base = folder.resolve(), out.resolve().parent
    if target.is_relative_to(base):
        return target.relative_to(base).as_posix()
    return target.as_uri()


def _describe_run(run: SavedRun, entry: Row) -> dict[str, Any]:
    """Return what the template shows of a run."""
    rows = run.curve.rows
    stages, checkpoints = run.config["stages"], list_checkpoints(run)
    facts = [
        ("stages", " → ".join(f"{stage['name']} ({stage['method']})" for stage in stages)),
        ("steps", str(rows[-1]["step"] if rows else 0)),
        ("hours in steps and evaluations", f"{entry['axes']['hours'][-1]:.3g}" if rows else "0"),
        ("recipe", run.config.get("recipe")),
        ("id", run.config.get("id")),
        ("folder", str(run.folder)),
    ]
    for stage in stages:
        for name in _FIRST_SETTINGS:
            if value := stage["settings"].get(name):
                facts.append((f"{stage['name']}: {name}", _format_value(value)))
    return {
        "label": run.label,
        "facts": [(name, _format_value(value)) for name, value in facts if value],
        "headline": describe_headline(run),
        "settings": describe_settings(run),
        "evaluations": list_evaluation_tables(run.folder)[-_MAX_EVALUATIONS:],
        "checkpoints": checkpoints,
        "checkpoint_metrics": [
            name
            for name in (checkpoints[0]["metrics"] if checkpoints else ())
            if any(isinstance(item["metrics"][name], (int, float)) for item in checkpoints)
        ],
        "launches": read_launches(run.folder),
        "rewards": read_reward_checks(run.folder),
        "alarms": entry["alarms"][:200],
        "times": entry["times"]["total"],
        "recipe": make_recipe(run.config),
        "command": format_repeat_command(run.config),
    }


def write_report(
    folders: Sequence[Path], out: Path | None = None, labels: Sequence[str] | None = None
) -> Path:
    """Write the report of the runs in `folders`, and return its path.

    `out`: the file, by default report.html in the run's folder, or for several runs in the current
    folder; if it is a folder, the page is report.html in it. The page has at most 10 MB. Raises
    UserError if a folder holds no run, if labels do not match, or if plotly is missing.
    """
    if labels is not None and len(labels) != len(folders):
        raise UserError(
            f"{len(labels)} labels for {len(folders)} runs: expected a label for each run"
        )
    runs = [
        read_saved_run(folder, label)
        for folder, label in zip(folders, labels or label_runs(folders), strict=True)
    ]
    out = out or (folders[0] / REPORT if len(folders) == 1 else Path(REPORT))
    out = out / REPORT if out.is_dir() else out
    plotly = load_plotly()
    limit = MAX_REPORT_BYTES - len(plotly.encode()) - 300_000  # the rest: the template
    while True:
        context, data = collect_report(runs, out, limit)
        page = render_report(context, data, plotly)
        excess = len(page.encode()) - MAX_REPORT_BYTES
        if excess <= 0 or limit <= 0:
            break
        limit -= excess
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    return out


# ------------------------------------------------------------------------------ while a run trains

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "triton", "numpy")
_MAX_LAUNCHES = 200  # rows that are kept of a run that is resumed again and again


def list_versions() -> dict[str, str]:
    """Return the versions of Python, of the main packages and of CUDA in this process."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**versions, **({"cuda": torch.version.cuda} if torch.version.cuda else {})}


def list_devices() -> list[dict[str, Any]]:
    """Return name and bytes of memory of each GPU of this machine; without one, its processor."""
    if torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return [{"name": device.name, "memory": device.total_memory} for device in devices]
    name = f"{os.cpu_count()} CPU cores, {platform.machine()}"
    return [{"name": name, "memory": get_machine_memory()}]


def measure_peak_memory() -> dict[str, Any]:
    """Return the most bytes that rank 0 has used so far: of GPU memory, otherwise of its process.
    The allocator's reserve counts as GPU memory.
    """
    if torch.cuda.is_initialized():
        return {"peak_memory": torch.cuda.max_memory_reserved(), "peak_memory_of": "GPU of rank 0"}
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"peak_memory": peak, "peak_memory_of": "process of rank 0"}


def describe_launch(
    step: int, info: Mapping[str, Any], plans: Sequence[StageNeeds]
) -> dict[str, Any]:
    """Return the record of a launch that starts at `step`. `info`: that of the policy's client.
    `plans`: the memory plan of each stage, if it was computed.
    """
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "step": step,
        "processes": info.get("world"),
        "device": str(info.get("device")),
        "dtype": str(info.get("dtype")),
        "parameters": info.get("parameters"),
        "trainable_parameters": info.get("trainable_parameters"),
        "versions": list_versions(),
        "devices": list_devices(),
        "planned_memory": {needs.stage: round(needs.plan.peak) for needs in plans},
    }


_MAX_SHARE = 0.01  # of the run's time
_FIRST_COST = 0.5  # expected CPU seconds of the first page


class ReportWriter:
    """Write report.html and launches.jsonl of a run. A failure is a warning and never ends the run.

    launches.jsonl has a row for each launch, the last is `launch` with the memory that it has used
    so far. Lines that are no JSON objects are dropped.

    Evaluations write the page in a thread, unless pages would then take more than 1% of the time:
    a page that took C seconds of CPU time is followed by the next one after 100 C seconds at the
    earliest. The end of a `with` block always writes it, except after the loss of a rank or if the
    grace time of a stop request is too short.

    `guard` raises if the folder no longer belongs to this process. `exceeds_grace` returns whether
    a stop was requested whose grace time is shorter than a number of seconds.
    """

    def __init__(
        self,
        folder: Path,
        console: Console,
        launch: Mapping[str, Any],
        *,
        guard: Callable[[], None],
        exceeds_grace: Callable[[float], bool],
    ):
        self.folder, self.console, self._launch = folder, console, launch
        self._earlier_launches: list[dict[str, Any]] | None = None
        self._guard, self._exceeds_grace = guard, exceeds_grace
        self._cost, self._last_end = _FIRST_COST, time.monotonic()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._has_warned = False
        self._is_available = has_plotly()
        self._write_launches()
        if not self._is_available:
            console.note(f"no {REPORT}: it needs plotly: {install_command('report')}")

    def update(self) -> None:
        """Begin the page of an evaluation, if its cost allows."""
        self._warn_of_failure()
        busy = self._thread is not None and self._thread.is_alive()
        if busy or time.monotonic() - self._last_end < self._cost / _MAX_SHARE:
            return
        self._write_launches()
        if self._is_available:
            self._thread = threading.Thread(target=self._write_page, name="report", daemon=True)
            self._thread.start()

    def close(self, *, draw: bool = True) -> None:
        """Write the launches, and the page of the whole run if `draw`."""
        self._write_launches()
        if draw and self._is_available and not self._exceeds_grace(1 + 4 * self._cost):
            if self._thread is not None:
                self._thread.join()
            self._write_page()
        self._warn_of_failure()

    def __enter__(self) -> ReportWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # After the loss of a rank, the launcher soon ends this process, which has to print the
        # error before that.
        self.close(draw=kind is None or not issubclass(kind, RankLost))

    def _write_launches(self) -> None:
        try:
            self._guard()
            path = self.folder / LAUNCHES
            if self._earlier_launches is None:
                rows = read_rollouts(path) if path.exists() else []
                self._earlier_launches = rows[1 - _MAX_LAUNCHES :]
            rows = [*self._earlier_launches, {**self._launch, **measure_peak_memory()}]
            write_jsonl(path, rows)
        except Exception as error:  # a full disk, or a damaged file
            self._failure = error
        self._warn_of_failure()

    def _write_page(self) -> None:
        """Write the page, and measure the CPU time that it takes."""
        start = time.thread_time()
        try:
            self._guard()
            write_report([self.folder])
        except Exception as error:  # arbitrary files and texts are read
            self._failure = error
        self._cost = time.thread_time() - start
        self._last_end = time.monotonic()

    def _warn_of_failure(self) -> None:
        """Warn of the first failure, on the thread of the run."""
        if self._failure is not None and not self._has_warned:
            self._has_warned = True
            kind, text = type(self._failure).__name__, str(self._failure)
            self.console.warn(f"no {REPORT} ({kind}: {text[:500]}); the run continues without it")
        self._failure = None
