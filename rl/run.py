"""A run from its beginning (or from its newest checkpoint) to its end: stages in order, one folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl import checkpoint
from rl.cli import Run, difference, resolved
from rl.cli import Stage as StagePlan
from rl.console import Console, compact
from rl.data import load_problems
from rl.data.problem_set import ProblemSet
from rl.errors import UserError
from rl.interrupts import Stopped, StopRequest
from rl.keeper import Keeper
from rl.learner import LearnerSettings
from rl.logbook import Logbook, claim
from rl.methods import METHODS
from rl.methods.base import Models
from rl.model_info import get_recommended_renderer_name
from rl.offline import train_offline
from rl.online import train_online
from rl.renderers import get_renderer
from rl.rewards import Scorer
from rl.seeds import derive_seed
from rl.service import ServiceClient
from rl.settings import DataSettings, ModelSettings
from rl.stage import Stage
from rl.training_client import TrainingClient
from rl.worker import SamplerSettings, WorkerSettings


@dataclass(frozen=True)
class Position:
    """Where a run goes on: the checkpoint and its loop state; all empty at the beginning."""

    state_path: str | None = None
    stage: int = 0
    next_batch: int = 0
    step: int = 0
    loop_state: Mapping[str, Any] | None = None


def execute(run: Run) -> None:
    """Carries out a run on rank 0; other ranks serve inside ServiceClient. Raises Stopped when asked to stop."""
    folder = Path(run.options.output_dir or Path("runs") / run.name)
    service_settings = _worker_settings(run.stages)
    with ServiceClient(output_dir=folder, seed=run.options.seed, settings=service_settings) as service:
        with Console(quiet=run.options.quiet) as console, StopRequest() as stop_request:
            config = resolved(run)
            saved = claim(folder, config, resume=run.options.resume, overwrite=run.options.overwrite)
            _check_same(saved, config)
            position = _position(folder, console) if saved is not None else Position()
            logbook = Logbook(
                folder,
                resume_step=position.step if saved is not None else None,
                wandb_project=run.options.wandb_project,
                config=config,
                console=console,
            )
            with logbook:
                _remove_orphans(folder, logbook)
                _stages(run, service, folder, position, logbook, console, stop_request)


def _check_same(saved: Mapping[str, Any] | None, asked: Mapping[str, Any]) -> None:
    changed = difference(saved, asked, ignore=("resume", "overwrite", "output_dir", "quiet", "wandb_project")) if saved else []
    if changed:
        raise UserError(
            "a resumed run keeps its settings, these differ: " + "; ".join(changed) + ". Give the run's own settings, or a new --output-dir"
        )


def _position(folder: Path, console: Console) -> Position:
    found = Keeper.newest_whole(folder, checkpoint_rows(folder), console)
    if found is None:
        console.note(f"{folder} holds no whole checkpoint yet: starting from the beginning")
        return Position(step=-1)
    row, state = found
    loop = state["metadata"]
    console.note(f"going on from {row['name']} (stage {row['stage']}, {loop['next_batch']} steps done)")
    return Position(str(folder / "checkpoints" / row["name"]), loop["stage"], loop["next_batch"], row["batch"], loop)


def checkpoint_rows(folder: Path) -> list[dict[str, Any]]:
    from rl.jsonl import read_rows
    from rl.logbook import CHECKPOINTS

    return read_rows(folder / CHECKPOINTS)


def _remove_orphans(folder: Path, logbook: Logbook) -> None:
    """Folders that checkpoints.jsonl does not name: cut-off writes, and what lies after the point of a resume."""
    rows = logbook.checkpoints()
    named = {Path(row[key]).name for row in rows for key in ("state_path", "sampler_path") if row.get(key)}
    named |= {row["name"] for row in rows}
    for parent in (folder / "checkpoints", folder / "sampler_weights"):
        checkpoint.remove_leftovers(parent)
        for path in parent.iterdir() if parent.is_dir() else ():
            if path.is_dir() and path.name not in named:
                shutil.rmtree(path)


def _worker_settings(stages: tuple[StagePlan, ...]) -> WorkerSettings:
    """The device side is one for the whole run; where stages differ, the first stage decides precision."""
    first = stages[0].settings
    return WorkerSettings(
        dtype=first.model.precision,
        learner=LearnerSettings(
            token_budget=first.optim.token_budget,
            layout=first.optim.layout,
            fused=first.model.fused_logprobs,
            gradient_checkpointing=first.model.gradient_checkpointing,
        ),
        sampler=SamplerSettings(first.sampling.kv_cache_tokens, first.sampling.max_rows, first.sampling.sampler),
    )


def _stages(
    run: Run,
    service: ServiceClient,
    folder: Path,
    position: Position,
    logbook: Logbook,
    console: Console,
    stop_request: StopRequest,
) -> None:
    keeper = Keeper(logbook)
    first_step = 0
    previous: str | None = None  # the final checkpoint of the stage before
    results: dict[str, tuple[float | None, float | None]] = {}
    started = False
    for index, plan in enumerate(run.stages):
        steps = plan.settings.loop.steps
        here = index == position.stage and position.state_path is not None
        if index < position.stage or (here and position.next_batch >= steps):
            previous = _final_path(folder, plan.name)
            first_step += steps + 1
            continue
        begin = None if names_its_model(run.stages, index) else previous
        policy = _policy(service, plan.settings.model, begin, position.state_path if here else None, run.options.seed)
        stage = _stage(run, index, plan, policy, first_step, position if here else None, logbook, console, keeper, stop_request)
        if not started:
            _introduce(run, folder, policy, console)
            started = True
        try:
            (train_online if stage.method.online else train_offline)(stage)
        except Stopped:
            console.end("stopped as asked, everything saved", facts={"folder": folder}, commands=[_resume_command(run, folder)])
            raise
        finally:
            stage.scorer.close()
            policy.release()
        results[f"held-out accuracy, {plan.name}"] = (stage.before, stage.after)
        previous = _final_path(folder, plan.name)
        first_step += steps + 1
    _conclude(run, folder, results, console)


def _final_path(folder: Path, stage: str) -> str:
    for row in checkpoint_rows(folder):
        if row["name"] == f"{stage}-final":
            return str(folder / "checkpoints" / row["name"])
    raise UserError(f"the run in {folder} has no checkpoint of the end of stage {stage}: it cannot go on from there")


def names_its_model(stages: Sequence[StagePlan], index: int) -> bool:
    """Whether a stage begins from a base model of its own: the first, and one that names another than those before it.

    What stands for all stages (at a recipe's top, or on the line) names the model that the first begins from.
    """
    default = ModelSettings().base_model
    *before, asked = [stage.settings.model.base_model for stage in stages[: index + 1]]
    named = [base for base in before if base != default]
    return not before or asked not in (default, *named[-1:])


def _policy(
    service: ServiceClient, model: ModelSettings, previous: str | None, resume_from: str | None, seed: int
) -> TrainingClient:
    """The learner of a stage: resumed, from `previous` (the last checkpoint of the stage before), or from its base model."""
    if resume_from is not None:
        return service.create_training_client_from_state_with_optimizer(resume_from)
    base = model.base_model if previous is None else str(Path(previous) / "model")
    if previous is not None and (Path(base) / "adapter_config.json").is_file():
        return service.create_training_client_from_state(previous)  # the stage before trained an adapter: go on with it
    if model.lora_rank == 0:
        return service.create_full_training_client(base, tokenizer=model.tokenizer, seed=derive_seed(seed, "weights") % 2**31)
    return service.create_lora_training_client(
        base,
        rank=model.lora_rank,
        seed=derive_seed(seed, "adapter") % 2**31,
        train_mlp=model.train_mlp,
        train_attn=model.train_attn,
        train_unembed=model.train_unembed,
        alpha=model.lora_alpha,
        tokenizer=model.tokenizer,
        model_seed=derive_seed(seed, "weights") % 2**31,
    )


def _stage(
    run: Run,
    index: int,
    plan: StagePlan,
    policy: TrainingClient,
    first_step: int,
    position: Position | None,
    logbook: Logbook,
    console: Console,
    keeper: Keeper,
    stop_request: StopRequest,
) -> Stage:
    settings = plan.settings
    method = METHODS[plan.method].hooks(settings)
    problems, test_problems = _problems(settings.data, settings.loop.eval_every > 0)
    name = settings.data.renderer or get_recommended_renderer_name(policy.info["base_model"])
    renderer = get_renderer(name, policy.get_tokenizer())
    stage = Stage(
        name=plan.name,
        index=index,
        method=method,
        models=Models(policy),
        problems=problems,
        test_problems=test_problems,
        renderer=renderer,
        scorer=Scorer(settings.data.reward, timeout=settings.data.reward_timeout, workers=settings.data.reward_workers),
        seed=run.options.seed,
        first_step=first_step,
        done=position.next_batch if position else 0,
        logbook=logbook,
        console=console,
        keeper=keeper,
        stop_request=stop_request,
    )
    if position is not None and position.loop_state is not None:
        method.load_state(position.loop_state["method"])
        stage.before, stage.after = position.loop_state["held_out"]
    return stage


def _problems(data: DataSettings, held_out: bool) -> tuple[ProblemSet, ProblemSet | None]:
    columns: dict[str, Any] = {
        "format": data.data_format,
        "config": data.dataset_config,
        "prompt_column": data.prompt_column,
        "answer_column": data.answer_column,
        "response_column": data.response_column,
        "system_prompt": data.system_prompt,
        "on_bad_row": data.on_bad_row,
    }
    train = load_problems(data.dataset, split="train", limit=data.train_limit, **columns)
    if not held_out:
        return train, None
    if data.eval_dataset is None and Path(data.dataset).is_file():
        return _held_out(train, data.eval_limit)
    return train, load_problems(data.eval_dataset or data.dataset, split="test", limit=data.eval_limit, **columns)


def _held_out(problems: ProblemSet, limit: int) -> tuple[ProblemSet, ProblemSet | None]:
    """A single file has no test split: its last tenth (at most `limit` rows) is held out and never trained on."""
    count = min(limit, len(problems) // 10)
    if count == 0:
        return problems, None
    rows = list(problems)
    return ProblemSet(rows[:-count], name=problems.name), ProblemSet(rows[-count:], name=f"{problems.name}, held out")


def _introduce(run: Run, folder: Path, policy: TrainingClient, console: Console) -> None:
    info = policy.info
    trained = "all weights" if info["lora_rank"] is None else f"LoRA rank {info['lora_rank']}, {compact(info['trainable_parameters'])}"
    console.start(
        f"Whetstone: {run.name}",
        {
            "stages": " -> ".join(f"{s.name} ({s.settings.loop.steps} steps)" for s in run.stages),
            "model": f"{info['base_model']}, {compact(info['parameters'])} parameters ({trained})",
            "device": f"{info['device']}, {info['dtype']}, {info['world']} process{'es' if info['world'] > 1 else ''}",
            "writes to": folder,
        },
    )


def _conclude(run: Run, folder: Path, results: dict[str, tuple[float | None, float | None]], console: Console) -> None:
    final = Path(_final_path(folder, run.stages[-1].name)) / "model"
    remarks = []
    if run.recipe is not None and Path(run.recipe).stem == "addition":
        remarks.append(
            "Most of this gain is sharpening: the taught model's likeliest answer was already right about nine times in ten, "
            "and RL made it say that one."
        )
    console.end(
        f"{run.name}: done",
        results=results,
        facts={"metrics": folder / "metrics.jsonl", "curves": folder / "curves.png", "weights": final},
        remarks=remarks,
        commands=[f"python sample.py {folder}", f"python evaluate.py {folder}", f"python plot.py {folder}"],
    )


def _resume_command(run: Run, folder: Path) -> str:
    what = run.recipe or run.stages[0].method
    return f"accelerate launch train.py {what} --output-dir {folder} --resume (with the same other flags)"

