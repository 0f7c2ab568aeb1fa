"""Print the summary of a run at its start and end, with the commands to run next."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rl.algorithms import METHODS, RowEvaluator
from rl.client import TrainingClient
from rl.config import RunConfig, StageConfig
from rl.errors import install_command
from rl.jsonl import METRICS_FILE, Row, read_metrics
from rl.reporting import (
    REPORT,
    TEACHER_KL,
    Console,
    format_count,
    format_held_out,
    has_plotly,
)
from rl.rewards import is_builtin_reward
from rl.trainer.checkpoint_manager import final_checkpoint, read_checkpoint_list
from rl.trainer.evaluator import HeldOutMetrics
from rl.trainer.initial_weights import find_previous_stage
from rl.trainer.saved_weights import (
    collect_worker_settings,
    is_outside_current_folder,
    list_environment_addresses,
    list_method_addresses,
    list_reward_addresses,
)
from rl.trainer.stage_data import (
    LAST_ROWS_SUFFIX,
    PreparedStage,
    describe_prepared,
    resolve_stage_reward,
)

_ROOT = Path(__file__).resolve().parents[2]
_SCRIPT_NAMES = ("train.py", "export.py")  # the scripts that print commands
# a wheel installs the root scripts and the recipes in whetstone_scripts (setup.py)
SCRIPTS_FOLDER = _ROOT if (_ROOT / "train.py").is_file() else _ROOT / "whetstone_scripts"


def print_introduction(
    run: RunConfig,
    folder: Path,
    policy: TrainingClient,
    console: Console,
    stages: Sequence[PreparedStage],
) -> None:
    """Print the stages, model, device and folder; warn of held-out rows in the training data."""
    info, settings = policy.info, collect_worker_settings(run.stages)
    sandbox = describe_prepared(stages).get("sandbox")
    trained = (
        "all weights"
        if info["lora_rank"] is None
        else f"LoRA rank {info['lora_rank']}, {format_count(info['trainable_parameters'])}"
    )
    if info["lora_rank"] is not None and info["base_dtype"] != "fp32":
        trained += f" on a base in {info['base_dtype']}"
    if info["lora_unadapted"] >= 0.01:
        trained += f"; {info['lora_unadapted']:.0%} of the weights, experts, have no adapter"
    console.start(
        f"Whetstone: {run.name}",
        {
            "stages": " -> ".join(f"{s.name} ({s.settings.loop.steps} steps)" for s in run.stages),
            "model": (
                f"{info['base_model']}, {format_count(info['parameters'])} parameters ({trained})"
            ),
            "data": "; ".join(_describe_data(stages)),
            "device": f"{info['device']}, {info['dtype']}, {_describe_processes(info['world'], settings.sampler_ranks, settings.sampler.tp)}",  # noqa: E501
            **({} if sandbox is None else {"programs in": sandbox}),
            "writes to": folder,
        },
    )
    overlaps = (prepared.overlap for prepared in stages)
    for text in dict.fromkeys(str(item) for item in overlaps if item is not None and item.shared):
        console.warn(text)


def _describe_data(stages: Sequence[PreparedStage]) -> list[str]:
    """Return the data of the stages: the numbers of training rows and of held-out rows.

    Stages with equal descriptions share one.
    """
    names: dict[str, list[str]] = {}
    for prepared in stages:
        data, held_out = prepared.plan.settings.data, prepared.test_problems
        source = " + ".join([data.dataset, *data.more_datasets])
        if prepared.environment is not None and not prepared.environment.needs_rows:
            source = prepared.environment.name
        if prepared.rows is None:
            text = "training rows that an earlier stage writes"
        else:
            text = f"{len(prepared.rows):,} training rows of {source}"
        if held_out is None:
            text += ", none held out"
        elif held_out.name.endswith(LAST_ROWS_SUFFIX) and not data.more_datasets:
            text += f", its last {len(held_out):,} rows held out"
        else:
            text += f", {len(held_out):,} held out"
        names.setdefault(text, []).append(prepared.plan.name)
    if len(names) == 1:
        return list(names)
    return [f"{', '.join(stage_names)}: {text}" for text, stage_names in names.items()]


def _describe_processes(world: int, samplers: int, tensor_parallel: int = 1) -> str:
    """Describe the processes: `world` of the learner, `samplers`, `tensor_parallel` per sampler
    (TP).
    """
    learners = f"{world} process{'es' if world > 1 else ''}"
    if tensor_parallel > 1:
        return f"{learners}, every {tensor_parallel} of which share a sampler"
    if not samplers:
        return learners
    learn, sample = "learns" if world == 1 else "learn", "samples" if samplers == 1 else "sample"
    return f"{learners} that {learn}, {samplers} that {sample}"


def print_summary(run: RunConfig, folder: Path, console: Console) -> None:
    """Print the held-out results of each stage, the files of the run, and the next commands."""
    results: dict[str, tuple[float | None, float | None]] = {}
    remarks: list[str | None] = []
    metrics = read_metrics(folder / METRICS_FILE)
    for plan in run.stages:
        name, method = plan.name, METHODS.create(plan)
        rows = [row for row in metrics if row.get("stage") == name]
        headline = method.headline if isinstance(method, RowEvaluator) else ""
        summary = HeldOutMetrics.from_rows(rows, headline)
        if summary.after is not None:
            results[f"held-out {summary.what}, {name}"] = summary.before, summary.after
        for set_name, figures in summary.rows.items():
            label = f"held-out {summary.headline}, {name}"
            results[f"{label}, {set_name}" if set_name else label] = figures
        if summary.greedy_after is not None:
            label = f"greedy {summary.what}, {name}"
            results[label] = summary.greedy_before, summary.greedy_after
        results |= _measure_distillation(name, rows)
        remarks += [summary.describe_no_gain(), summary.describe_sharpening()]
    # `name` and `rows` are those of the last stage
    remarks.append(_describe_better_weights(folder, name, rows))
    quoted_folder = shlex.quote(str(folder))
    report = f"{format_script('report')} {quoted_folder}"
    console.end(
        f"{run.name}: done",
        results=results,
        facts={
            "metrics": folder / "metrics.jsonl",
            "curves": folder / "curves.png",
            **({"page": folder / REPORT} if has_plotly() else {}),
            "weights": final_checkpoint(folder, name) / "model",
        },
        remarks=[text for text in remarks if text is not None],
        commands=[
            *_usage_commands(run.stages, folder),
            f"{format_script('plot')} {quoted_folder}",
            report if has_plotly() else f"{report}  # needs: {install_command('report')}",
            _format_export_command(run.stages, folder),
        ],
    )


def _describe_better_weights(folder: Path, stage: str, rows: Sequence[Row]) -> str | None:
    """Return a remark if the last stage's best weights are of an earlier step than its last."""
    best = [row for row in read_checkpoint_list(folder) if row.get("kind") == "best"]
    if not best or best[-1]["stage"] != stage or not isinstance(best[-1].get("value"), float):
        return None
    step, metric, value = (best[-1][key] for key in ("batch", "metric", "value"))
    measured = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
    if not measured or measured[-1][0] <= step or measured[-1][1] == value:
        return None
    before, after = (
        format_held_out({metric: number}) or f"{metric} {number:.3g}"
        for number in (value, measured[-1][1])
    )
    return (
        f"The best weights of {stage} are those of step {step}: {before}, at the end {after}. "
        "--checkpoint best selects them in sample.py, evaluate.py and export.py."
    )


# what a distillation learns: label and metrics, the first that a stage has logged
_DISTILLED = {
    "KL to teacher": TEACHER_KL,
    "cross-entropy to the teacher's answers": ("optim/ce",),
}


def _measure_distillation(stage: str, rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Return the figure of a stage that learns from a teacher, at its first and last step."""
    for label, names in _DISTILLED.items():
        values = [row[name] for row in rows for name in names if row.get(name) is not None]
        if values:
            return {f"{label}, first to last step, {stage}": (values[0], values[-1])}
    return {}


def _format_export_command(stages: Sequence[StageConfig], folder: Path) -> str:
    """Return the command that exports the weights: merged if they are an adapter."""
    merge = " --merge" if stages[-1].settings.model.lora_rank else ""
    paths = shlex.join([str(folder), str(_unused_path(Path("exports") / folder.name))])
    trust = _format_trust(list_method_addresses(stages))
    return f"{format_script('export')} {paths}{merge}{trust}"


def _format_trust(addresses: list[str]) -> str:
    """Return " --trust-run" if code at one of the addresses is imported from another folder."""
    return " --trust-run" if is_outside_current_folder(addresses) else ""


def format_script(name: str) -> str:
    """Return the command of one of the scripts, as the running script was started: `whetstone
    sample`, or `python` with the path of sample.py.
    """
    script, running = SCRIPTS_FOLDER / f"{name}.py", Path(sys.argv[0]).resolve()
    # a script of the project runs, not a user's script that imports `rl`
    if running.parent == SCRIPTS_FOLDER and running.name in _SCRIPT_NAMES:
        if getattr(sys.modules.get("whetstone"), "running_script", None) is not None:
            return f"whetstone {name.replace('_', '-')}"
        script = Path(sys.argv[0]).with_name(script.name)
    elif SCRIPTS_FOLDER != _ROOT:
        return f"whetstone {name.replace('_', '-')}"  # installed from a wheel
    elif script.parent == Path.cwd():
        script = Path(script.name)
    return f"python {shlex.quote(str(script))}"


def _unused_path(path: Path) -> Path:
    """Return `path`, or the first of path-2, path-3, ... that is free if `path` exists."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(
        candidate for candidate in itertools.chain([path], numbered) if not candidate.exists()
    )


def _usage_commands(stages: Sequence[StageConfig], folder: Path) -> list[str]:
    """Return the commands that use the weights of the run's last stage."""
    last, quoted_folder = stages[-1], shlex.quote(str(folder))
    if last.method != "reward_model":
        # evaluate.py needs a reward
        environment = getattr(last.settings, "env", None)
        scored = (
            environment is not None and environment.environment is not None
        ) or resolve_stage_reward(last.settings.data) is not None
        methods = list_method_addresses(stages)
        scorers = [
            *list_reward_addresses(last.settings.data),
            *list_environment_addresses(last.settings),
        ]
        evaluate = (
            f"{format_script('evaluate')} {quoted_folder}{_format_trust([*methods, *scorers])}"
        )
        name = last.settings.data.reward
        if name and ":" not in name and not is_builtin_reward(name):  # a function of `rl.train`
            evaluate += f" --reward FILE.py:{name}  # the file that defines {name}"
        return [
            f"{format_script('sample')} {quoted_folder}{_format_trust(methods)}",
            *([evaluate] if scored else []),
        ]
    flag = "reward" if METHODS[last.method](last.settings).value_head else "comparison"
    method = "rlhf" if flag == "reward" else "grpo"  # which has groups to compare within
    # preference pairs hold no reference answer to compare with
    flags = [*_policy_flags(stages, folder), *(["--reward", "None"] if method == "grpo" else [])]
    return [f"{_format_launch()} {method} --{flag}-model {quoted_folder} {shlex.join(flags)}"]


_DATA_SETTINGS = ("dataset_config", "data_format", "prompt_column", "system_prompt", "renderer")


def _policy_flags(stages: Sequence[StageConfig], folder: Path) -> list[str]:
    """Return the flags of a run that trains a policy with the reward model of the last stage.

    The policy begins from the same weights and reads the same rows. It writes to a new folder next
    to the run's.
    """
    before = find_previous_stage(stages, len(stages) - 1)
    model, data = stages[-1].settings.model, stages[-1].settings.data
    base = model.base_model
    if before is not None:
        base = str(final_checkpoint(folder, stages[before].name) / "model")
    flags = [
        "--base-model",
        base,
        *(["--tokenizer", model.tokenizer] if model.tokenizer else []),
        "--dataset",
        data.dataset,
    ]
    for name in _DATA_SETTINGS:
        if (value := getattr(data, name)) != getattr(type(data)(), name):
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return [
        *flags,
        "--output-dir",
        str(_unused_path(folder.with_name(f"{folder.name}-policy"))),
    ]


def format_resume_command(folder: Path, trusted: bool = False) -> str:
    """Return the command that resumes the run in `folder`: of the shell, or of Python if
    `rl.train` started it.
    """
    if Path(sys.argv[0]).resolve() != SCRIPTS_FOLDER / "train.py":
        trust = ", trust_run=True" if trusted else ""
        return f"rl.train(resume=True, output_dir={str(folder)!r}{trust})"
    trust = " --trust-run" if trusted else ""
    return f"{_format_launch()} --resume --output-dir {shlex.quote(str(folder))}{trust}"


def format_check_command(folder: Path, stages: Sequence[StageConfig]) -> str:
    """Return the command that checks the rewards of the run in `folder`, which has these stages."""
    rewards = [name for stage in stages for name in list_reward_addresses(stage.settings.data)]
    trust = _format_trust([*list_method_addresses(stages), *rewards])
    return f"{format_script('check_reward')} {shlex.quote(str(folder))}{trust}"


def _format_launch() -> str:
    """Return the command that launched this process: `python train.py` or `accelerate launch
    train.py` (with the script's path), or `whetstone train`.

    Launchers set environment variables; `accelerate launch` reads its saved config again.
    """
    launched = {"LOCAL_RANK", "TORCHELASTIC_RUN_ID"} & os.environ.keys() or any(
        name.startswith("ACCELERATE_") for name in os.environ
    )
    command = format_script("train")
    script = (
        shlex.quote(sys.argv[0])
        if command.startswith("whetstone")
        else command.removeprefix("python ")
    )
    return f"accelerate launch {script}" if launched else command
