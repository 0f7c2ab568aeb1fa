"""Start a run from the command line (`main`), or from Python or a notebook (`rl.train`), and sample
from saved weights (`rl.sample`).
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from rl.algorithms import METHODS
from rl.client import SamplingClient, ServiceClient
from rl.config import (
    DataSettings,
    RunConfig,
    RunSettings,
    SamplingSettings,
    flatten_settings,
    format_as_flags,
    format_help,
    read_run,
)
from rl.data import LengthLimits, ProblemSet, PromptTemplate, RowCheck, select_good_rows
from rl.distributed import INTERRUPTED, RunStopped, end_with_launcher
from rl.errors import RankLost, UserError
from rl.images import content_to_text
from rl.jsonl import METRICS_FILE, get_rollout_step, read_jsonl, read_metrics
from rl.renderers import Renderer
from rl.reporting import CURVES, ROLLOUTS, contains_run
from rl.rewards import is_builtin_reward, register_reward
from rl.trainer.execute import execute, resolve_run_folder
from rl.trainer.memory_report import report_memory
from rl.trainer.run_summary import SCRIPTS_FOLDER
from rl.trainer.saved_weights import SavedWeights, open_weights
from rl.trainer.stage_data import load_held_out_problems
from rl.trainer.stage_models import make_renderer
from rl.types import Message, SamplingParams

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
        execute(run, lambda: outcome.append("the run stopped"), ends_process=True)

    # Without a recipe, settings were typed as flags, so messages name them as flags.
    sections = (
        [run.options, *(stage.settings for stage in run.stages)] if run.recipe is None else []
    )
    flags = {name for table in sections for name in flatten_settings(table)} - METHODS.keys()
    return run_guarded(
        work,
        see="python train.py --help",
        outcome=lambda: outcome[-1],
        flags=flags,
        resumes=lambda: len(outcome) > 1,
    )


def run_guarded(
    work: Callable[[], None],
    *,
    see: str,
    outcome: str | Callable[[], str],
    flags: Collection[str] = (),
    resumes: Callable[[], bool] = lambda: False,
) -> int:
    """Call `work` and return its exit code, as in `main`.

    An error is printed in a box: `outcome` is its heading (a callable is evaluated after the
    error), `see` is a hint below it, and settings in `flags` are named as flags. `resumes` returns
    whether a run has begun that --resume continues.
    """
    _silence_libraries()
    end_with_launcher()
    try:
        work()
    except RunStopped as stopped:
        return stopped.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except (RankLost, torch.OutOfMemoryError, OSError, ValueError) as error:
        is_disk_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if os.environ.get(TRACEBACK_VARIABLE) or (isinstance(error, OSError) and not is_disk_full):
            raise
        problem, code = str(error), 2
        resume = "--resume continues from the newest checkpoint" if resumes() else ""
        if isinstance(error, RankLost):
            code = RANK_LOST_EXIT_CODE
            see = f"{resume}{resume and '; '}{TRACEBACK_VARIABLE}=1 shows the traceback"
        elif is_disk_full:
            problem = f"the disk is full: {error}"
            see = f"free some space, then {resume or 'repeat the command'}"
        elif not isinstance(error, UserError):
            # A ValueError of this project names the wrong input. Errors of a library may not, so
            # the hint is the traceback.
            see = f"{TRACEBACK_VARIABLE}=1 shows where this was raised"
        format_help.exit_with_problems(
            [format_as_flags(problem, flags)],
            see=see,
            outcome=outcome if isinstance(outcome, str) else outcome(),
            code=code,
        )
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
        if is_builtin_reward(name):
            raise UserError(
                f"reward is a function with the name of the built-in reward {name!r}: rename the "
                f"function, or pass reward={name!r} for the built-in reward"
            )
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


@dataclass(frozen=True)
class SampledModel:
    """Hold loaded weights and the settings to sample them with."""

    name: str
    sampler: SamplingClient
    renderer: Renderer
    params: SamplingParams
    data: DataSettings


def load_sampled_model(
    saved: SavedWeights,
    service: ServiceClient,
    data: DataSettings,
    sampling: SamplingSettings,
    *,
    system_prompt: str | None,
    renderer_name: str | None = None,
    max_tokens: int | None,
    temperature: float | None,
    top_k: int = -1,
    top_p: float = 1.0,
) -> SampledModel:
    """Load weights into a sampler of `service`.

    The keywords replace values of `data` and `sampling`; None keeps them, and the system prompt ""
    is none. Raises UserError if the weights cannot be loaded.
    """
    if system_prompt is not None:
        data = replace(data, system_prompt=system_prompt or None)
    sampler = saved.create_sampler(service, prefers_servers=True)
    renderer = make_renderer(sampler, renderer_name or data.renderer, data.template, sampling.stop)
    params = SamplingParams(
        sampling.max_tokens if max_tokens is None else max_tokens,
        None,
        renderer.get_stop_sequences(),
        sampling.temperature if temperature is None else temperature,
        top_k=top_k,
        top_p=top_p,
    )
    return SampledModel(saved.name, sampler, renderer, params, data)


def select_fitting_problems(
    problems: ProblemSet,
    data: DataSettings,
    info: Mapping[str, Any],
    renderer: Renderer,
    max_tokens: int,
) -> ProblemSet:
    """Return the problems with prompts that leave room for `max_tokens` of response.

    Longer prompts are truncated, skipped or raise UserError, as the settings of `data` say.
    """
    check = RowCheck(
        info, renderer, problems.name, (), max_tokens, limits=LengthLimits.from_settings(data)
    )
    return select_good_rows(problems, check, data.on_bad_row)


def iterate_prompts(
    data: DataSettings, prompts: Iterable[str], dataset: str | None, limit: int
) -> Iterator[Sequence[Message]]:
    """Yield the conversation of each row of `dataset`, or of each of `prompts` without a dataset.

    The system prompt, template and suffix of `data` are applied. At most `limit` rows are read.
    Raises UserError if a prompt is empty.
    """
    if dataset is not None:
        problems = load_held_out_problems(
            replace(
                data,
                eval_dataset=dataset,
                more_datasets=(),
                dataset_weights=(),
                more_eval_datasets=(),
                eval_limit=limit,
            )
        )
        yield from (problem.messages for problem in problems or () if problem.messages)
        return
    template = PromptTemplate.from_settings(data)
    for prompt in prompts:
        if not prompt.strip():
            raise UserError("a prompt is empty: pass a text with --prompt")
        yield template([{"role": "user", "content": prompt}], {})


def sample(
    weights: str | Path,
    prompts: Sequence[str | Sequence[Message]],
    samples: int = 1,
    *,
    checkpoint: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    system_prompt: str | None = None,
    seed: int = 0,
    trusted: bool = False,
) -> list[list[str]]:
    """Return `samples` answers to each prompt, as `python sample.py WEIGHTS` prints them.

        rl.sample("runs/mine", ["12+34=", "56+78="], samples=4)
        rl.sample("Qwen/Qwen3-0.6B", ["Why is the sky blue?"], temperature=0, max_tokens=64)

    weights: a run's folder, a folder of weights, a hub name or tiny:<preset>.

    prompts: texts, which get the prompt template and the system prompt of the run, or
    conversations (lists of messages), which are used as they are.

    checkpoint: of a run's folder, "best" or a name in checkpoints.jsonl; None: the newest.

    temperature, max_tokens, system_prompt: by default those of the run, else 1, 256 and none.

    trusted: import a run's custom method from any folder, not from the current folder alone.

    Raises UserError if the weights cannot be opened, or `prompts` is a single prompt.
    """
    prompts = prompts if isinstance(prompts, str) else list(prompts)
    if isinstance(prompts, str) or any(isinstance(prompt, Mapping) for prompt in prompts):
        raise UserError(
            f"prompts is a single prompt, expected a list of prompts: pass [{prompts!r}]"
        )
    for prompt in prompts:
        if not isinstance(prompt, Iterable):  # an array of messages is one, as parquet rows have
            raise UserError(f"a prompt is a text or a list of messages, got {prompt!r:.100}")
    saved = open_weights(str(weights), checkpoint, trusted=trusted)
    with saved.create_service(seed) as service:
        model = load_sampled_model(
            saved,
            service,
            *saved.prompt_settings,
            system_prompt=system_prompt,
            max_tokens=max_tokens,
            temperature=temperature,
        )
        conversations = [
            next(iterate_prompts(model.data, [prompt], None, 1))
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
        futures = [
            model.sampler.sample(
                model.renderer.build_generation_prompt(messages), samples, model.params
            )
            for messages in conversations
        ]
        return [
            [
                content_to_text(model.renderer.parse_response(sequence.tokens)[0]["content"])
                for sequence in future.result().sequences
            ]
            for future in futures
        ]
