"""`rl.train(...)`: a run from Python or a notebook, asked for in the words of the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.errors import UserError
from rl.jsonl import METRICS, read_metrics
from rl.methods import METHODS
from rl.rewards import register_reward
from rl.run.execute import execute, folder_of
from rl.run.reopen import Weights, open_weights
from rl.settings import Run, RunSettings, read, words_of

_RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "addition.yaml"


@dataclass(frozen=True)
class Trained:
    """What a run left in its folder. `pandas.DataFrame(trained.metrics)` is its table."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row for each step, as in metrics.jsonl."""
        return read_metrics(self.folder / METRICS)

    @property
    def weights(self) -> Weights:
        """The newest: `.sampler(service)` samples from them, `.path` is their folder."""
        return open_weights(str(self.folder))


def train(
    what: str | Path = "", *, reward: str | Callable[..., Any] | None = None, **settings: Any
) -> Trained:
    """What `train.py WHAT --setting value ...` does; raises instead of ending the process.

        rl.train("grpo", base_model="Qwen/Qwen3-0.6B", lora_rank=32, dataset="problems.jsonl", reward=my_function, steps=100)
        rl.train("recipes/gsm8k.yaml", output_dir="runs/mine", **{"grpo.steps": 50})
        rl.train(resume=True, output_dir="runs/mine", steps=200)

    what: a method, a recipe, or mine.py:Method; nothing: the default recipe, or what the folder of
    a resumed run says reward: a name, or a function (prompt, response, meta) -> float, of a
    notebook too UserError names every setting that is wrong. A run that is interrupted is saved,
    and raises KeyboardInterrupt.
    """
    from rl.ranks import INTERRUPTED, Stopped

    if callable(reward):
        name = getattr(reward, "__name__", type(reward).__name__)
        register_reward(name, replace=True)(reward)
        reward = name
    if reward is not None:
        settings["reward"] = reward
    run = asked_for(what, settings)
    try:
        execute(run)
    except Stopped as stopped:
        if stopped.exit_code == INTERRUPTED:
            raise KeyboardInterrupt("the run is saved: resume=True goes on with it") from None
        raise
    return Trained(folder_of(run))


def asked_for(what: str | Path, settings: dict[str, Any]) -> Run:
    """The run that a call of `train` means. SettingsError with every problem found."""
    words = [str(what)] if str(what) else []
    for name, value in settings.items():
        if callable(value):
            raise UserError(f"{name} is a function; only reward may be one")
        said = (
            ("None",)
            if value is None
            else words_of(str(value) if isinstance(value, Path) else value)
        )
        words += [f"--{name}={said[0]}", *said[1:]] if said else [f"--{name}"]
    return read(words, METHODS, _RECIPE, RunSettings)
