"""Implement `rl.train(...)`: start a run from Python or a notebook, with the settings of the
command line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.algorithms import METHODS
from rl.config import RunConfig, RunSettings, read_run, to_words
from rl.errors import UserError
from rl.jsonl import METRICS_FILE, read_metrics
from rl.rewards import register_reward
from rl.trainer.execute import execute, resolve_run_folder
from rl.trainer.saved_weights import SavedWeights, open_weights

_ROOT = Path(__file__).resolve().parents[2]
# a wheel installs the recipes in whetstone_scripts (setup.py)
_FOLDER = _ROOT if (_ROOT / "recipes").is_dir() else _ROOT / "whetstone_scripts"
_DEFAULT_RECIPE = _FOLDER / "recipes" / "sorting.yaml"


@dataclass(frozen=True)
class TrainingResult:
    """Give access to the results in a run's folder. `pandas.DataFrame(trained.metrics)` is its
    table.
    """

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Return one row per step, as in metrics.jsonl."""
        return read_metrics(self.folder / METRICS_FILE)

    @property
    def weights(self) -> SavedWeights:
        """Return the newest weights: `.sampler(service)` samples from them, `.path` is their
        folder.
        """
        return open_weights(str(self.folder))


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
    from rl.distributed import INTERRUPTED, RunStopped

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
    return TrainingResult(resolve_run_folder(run))


def resolve_run(what: str | Path, settings: dict[str, Any]) -> RunConfig:
    """Return the run that the arguments of `train` describe. Raises SettingsError with every
    problem.
    """
    words = [str(what)] if str(what) else []
    for name, value in settings.items():
        if callable(value):
            raise UserError(f"{name} is a function; only reward may be a function")
        values = (
            ("None",)
            if value is None
            else to_words(str(value) if isinstance(value, Path) else value)
        )
        words += [f"--{name}={values[0]}", *values[1:]] if values else [f"--{name}"]
    return read_run(words, METHODS, _DEFAULT_RECIPE, RunSettings)
