"""Start a run from the command line (`main`), or from Python or a notebook (`rl.train`)."""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from rl.algorithms import METHODS
from rl.config import (
    RunConfig,
    RunSettings,
    flatten_settings,
    format_as_flags,
    format_help,
    read_run,
)
from rl.distributed import INTERRUPTED, RunStopped, end_with_launcher
from rl.errors import RankLost, UserError
from rl.jsonl import METRICS_FILE, get_rollout_step, read_jsonl, read_metrics
from rl.reporting import CURVES, ROLLOUTS, contains_run
from rl.rewards import register_reward
from rl.trainer.execute import execute, resolve_run_folder
from rl.trainer.memory_report import report_memory
from rl.trainer.run_summary import SCRIPTS_FOLDER
from rl.trainer.saved_weights import SavedWeights, open_weights

TRACEBACK_VARIABLE = "WHETSTONE_TRACEBACK"
RANK_LOST_EXIT_CODE = 1
_DEFAULT_RECIPE = SCRIPTS_FOLDER / "recipes" / "sorting.yaml"


def main(run: RunConfig) -> int:
    """Plan or execute a run and return its exit code.

    0: done. 1: another process was lost. 2: a user error. 75: stopped and saved, run again with
    --resume. 130: interrupted by Ctrl-C.
    """
    outcome = ["nothing was started"]

    def work() -> None:
        if run.options.plan:
            report_memory(run)
            return
        execute(run, lambda: outcome.append("the run stopped"))

    # Without a recipe, settings were typed as flags, so messages name them as flags.
    sections = (
        [run.options, *(stage.settings for stage in run.stages)] if run.recipe is None else []
    )
    flags = {name for table in sections for name in flatten_settings(table)} - METHODS.keys()
    return run_guarded(work, see="python train.py --help", outcome=lambda: outcome[-1], flags=flags)


def run_guarded(
    work: Callable[[], None],
    *,
    see: str,
    outcome: str | Callable[[], str],
    flags: Collection[str] = (),
) -> int:
    """Call `work` and return its exit code, as in `main`.

    An error is printed in a box: `outcome` is its heading (a callable is evaluated after the
    error), `see` is a hint below it, and settings in `flags` are named as flags.
    """
    _silence_libraries()
    end_with_launcher()

    def fail(problem: str, *, see: str, code: int = 2) -> NoReturn:
        head = outcome if isinstance(outcome, str) else outcome()
        format_help.exit_with_problems(
            [format_as_flags(problem, flags)], see=see, outcome=head, code=code
        )

    try:
        work()
    except RunStopped as stopped:
        return stopped.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except RankLost as lost:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        hint = (
            f"--resume continues from the newest checkpoint; {TRACEBACK_VARIABLE}=1 "
            "shows the traceback"
        )
        fail(str(lost), see=hint, code=RANK_LOST_EXIT_CODE)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or os.environ.get(TRACEBACK_VARIABLE):
            raise
        fail(
            f"the disk is full: {error}",
            see="free some space, then --resume continues from the newest checkpoint",
        )
    except ValueError as error:
        # A ValueError of this project names the wrong input. Errors of a library may not, so the
        # hint is the traceback.
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        hint = (
            see
            if isinstance(error, UserError)
            else f"{TRACEBACK_VARIABLE}=1 shows where this was raised"
        )
        fail(str(error), see=hint)
    return 0


def _silence_libraries() -> None:
    """Silence progress bars and warnings of libraries that require no action from the user."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        # in a log file, each redraw of a progress bar would be a line
        transformers_logging.disable_progress_bar()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


@dataclass(frozen=True)
class TrainingResult:
    """Give access to the results in a run's folder. `pandas.DataFrame(trained.metrics)` is its
    table. A notebook displays it as its curves.

    trusted: `weights` may import the run's custom method from any folder
    """

    folder: Path
    trusted: bool = field(default=False, repr=False)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return one row per step, as in metrics.jsonl."""
        return read_metrics(self.folder / METRICS_FILE)

    def series(self, name: str, stage: str | None = None) -> dict[int, float]:
        """Return step to value of a metric, of all stages or of `stage`.

        Raises UserError, with the most similar metrics, if no row has a value of that name.
        """
        rows = [row for row in self.metrics if stage in (None, row.get("stage"))]
        values = {row["step"]: row[name] for row in rows if row.get(name) is not None}
        if not values:
            where = f"{self.folder / METRICS_FILE}" + (f", stage {stage}," if stage else "")
            known = sorted({key for row in rows for key in row})
            similar = ", ".join(get_close_matches(name, known, n=4, cutoff=0.4) or known[:8])
            raise UserError(f"{where} has no values of {name!r}; similar metrics: {similar or '-'}")
        return values

    @property
    def weights(self) -> SavedWeights:
        """Return the newest weights: `.path` is their folder. `rl.sample(trained.folder, prompts)`
        samples from them.
        """
        return open_weights(str(self.folder), trusted=self.trusted)

    @property
    def rollouts(self) -> list[dict[str, Any]]:
        """Return one row per stored episode, as in rollouts/*.jsonl, with its `step` and `file`.

        The setting `rollouts_every` selects the steps of which episodes are stored.
        """
        files = sorted((self.folder / ROLLOUTS).glob("step_*.jsonl"))
        return [
            {"step": get_rollout_step(file.name), "file": file.name, **row}
            for file in files
            for row in read_jsonl(file)
        ]

    def _repr_png_(self) -> bytes | None:
        """Return the curves, for notebooks; None if the run has drawn none."""
        path = self.folder / CURVES
        return path.read_bytes() if path.is_file() else None


def open_run(folder: str | Path, *, trusted: bool = False) -> TrainingResult:
    """Open the results of a run, which may have ended, still run, or run in another process.

    trusted: `weights` may import the run's custom method from any folder, not from the current
    folder alone.

    Raises UserError if the folder holds no run.
    """
    path = Path(folder).expanduser()
    if not contains_run(path):
        raise UserError(f"{path} holds no run: expected a folder that rl.train or train.py wrote")
    return TrainingResult(path, trusted)


def train(
    what: str | Path = "", *, reward: str | Callable[..., Any] | None = None, **settings: Any
) -> TrainingResult:
    """Run the equivalent of `train.py WHAT --setting value ...`. Errors are raised instead of
    ending the process.

        rl.train("grpo", base_model="Qwen/Qwen3-0.6B", lora_rank=32, dataset="problems.jsonl",
                 reward=my_function, steps=100)
        rl.train("recipes/gsm8k.yaml", output_dir="runs/mine", **{"grpo.steps": 50})
        rl.train(resume=True, output_dir="runs/mine", steps=200)

    what: a method, a recipe, or mine.py:Method; if empty, the default recipe, or the method of the
    resumed run's folder.

    reward: a name, or a function (prompt, response, meta) -> float, which may be defined in a
    notebook.

    Raises UserError naming every wrong setting. An interrupted run is saved before
    KeyboardInterrupt is raised.
    """
    if callable(reward):
        name = getattr(reward, "__name__", type(reward).__name__)
        register_reward(name, replace=True)(reward)
        reward = name
    if reward is not None:
        settings["reward"] = reward
    run = resolve_run(what, settings)
    try:
        execute(run)
    except RunStopped as stopped:
        if stopped.exit_code == INTERRUPTED:
            raise KeyboardInterrupt("the run is saved: resume=True continues it") from None
        raise
    return TrainingResult(resolve_run_folder(run), trusted=True)  # its method was just imported


def resolve_run(what: str | Path, settings: dict[str, Any]) -> RunConfig:
    """Return the run that the arguments of `train` describe. Raises SettingsError with every
    problem.
    """
    words = [str(what)] if str(what) else []
    return read_run(words, METHODS, _DEFAULT_RECIPE, RunSettings, settings)
