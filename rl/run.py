"""A run from its beginning (or from its newest checkpoint) to its end: stages in order, one folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl import checkpoint
from rl.console import Console, compact
from rl.errors import UserError
from rl.held_out import HeldOut
from rl.hosts import StageHosts, make_policy, make_renderer
from rl.interrupts import Stopped, StopRequest
from rl.jsonl import read_rows
from rl.keeper import Keeper
from rl.logbook import CHECKPOINTS, Logbook, check_claim, claim, holds_a_run, saved_config
from rl.methods import METHODS
from rl.methods.base import Models
from rl.offline import train_offline
from rl.online import train_online
from rl.plan import check as check_memory
from rl.prepare import Prepared, begins_after, check_rows, check_weights, prepare, reward_of, worker_settings
from rl.run_plan import Run, difference, resolved
from rl.service import ServiceClient
from rl.stage import Stage
from rl.stored import stored_answers
from rl.training_client import TrainingClient

# Settings that a resumed run may change: where and how it reports, nothing that enters a result.
_FREE = ("resume", "auto_resume", "overwrite", "output_dir", "quiet", "wandb_project", "timeout", "stop_grace",
         "plan", "plan_gpus", "plan_gpu_memory", "plan_zero", "plan_prompt_tokens")  # fmt: skip


@dataclass(frozen=True)
class Position:
    """Where a run goes on: the checkpoint and its loop state; all empty at the beginning."""

    state_path: str | None = None
    stage: int = 0
    next_batch: int = 0
    step: int = -1
    stage_ended: bool = False
    loop_state: Mapping[str, Any] | None = None


def execute(run: Run, begins: Callable[[], None] = lambda: None) -> None:
    """Carries out a run on rank 0; other ranks serve inside ServiceClient. Raises Stopped when asked to stop.

    Everything that can be wrong with settings, data, reward, model and folder is found before the folder is touched, which
    is when `begins` is called.
    """
    options = run.options
    folder = Path(options.output_dir or Path("runs") / run.name)
    settings = replace(worker_settings(run.stages), timeout_seconds=options.timeout, stop_grace_seconds=options.stop_grace)
    with (
        StopRequest(options.stop_grace) as stop_request,
        ServiceClient(output_dir=folder, seed=options.seed, settings=settings) as service,
        Console(quiet=options.quiet) as console,
        ExitStack() as stack,
    ):
        run = _restarted(run, folder)
        options = run.options
        check_claim(folder, resume=options.resume, overwrite=options.overwrite)
        position = _position(run, folder, console) if options.resume else Position()
        stages = [prepare(plan, run.stages[:i]) for i, plan in enumerate(run.stages)]
        for prepared in stages:
            if prepared.scorer is not None:
                stack.callback(prepared.scorer.close)
        check_weights(run.stages)
        check_memory(run, console.warn)
        at = _Whereabouts(run, folder, stages, position)
        policy = at.policy(service)
        others = at.others(service, policy)
        begins()
        claim(folder, resolved(run), resume=options.resume, overwrite=options.overwrite)
        _introduce(run, folder, policy, console)
        logbook = stack.enter_context(_logbook(run, folder, position, console))
        stop_request.working = True
        _run_stages(at, service, policy, others, logbook, console, stop_request)


def _restarted(run: Run, folder: Path) -> Run:
    """`run` as one to resume, where it is to go on with what the folder holds and the folder holds a run."""
    if not run.options.auto_resume or not holds_a_run(folder):
        return run
    return replace(run, options=replace(run.options, resume=True))


def _position(run: Run, folder: Path, console: Console) -> Position:
    """The newest whole checkpoint of the run in `folder`, whose settings must be those asked for."""
    changed = difference(saved_config(folder), resolved(run), ignore=_FREE)
    if changed:
        raise UserError(
            f"a resumed run keeps its settings, these differ: {'; '.join(changed)}. Give the run's own, or a new --output-dir"
        )
    found = Keeper.newest_whole(folder, read_rows(folder / CHECKPOINTS), console)
    if found is None:
        console.note(f"{folder} holds no whole checkpoint yet: starting from the beginning")
        return Position()
    row, state = found
    loop = state["metadata"]
    console.note(f"going on from {row['name']} (stage {row['stage']}, {loop['next_batch']} steps done)")
    path = str(folder / "checkpoints" / row["name"])
    return Position(path, loop["stage"], loop["next_batch"], row["batch"], row["kind"] == "final", loop)


@contextmanager
def _logbook(run: Run, folder: Path, position: Position, console: Console) -> Iterator[Logbook]:
    logbook = Logbook(
        folder,
        resume_step=position.step if run.options.resume else None,
        wandb_project=run.options.wandb_project,
        config=resolved(run),
        console=console,
    )
    with logbook:
        _remove_orphans(folder, logbook)
        yield logbook


def _remove_orphans(folder: Path, logbook: Logbook) -> None:
    """Folders that checkpoints.jsonl does not name: cut-off writes, and what lies after the point of a resume."""
    named = {row["name"] for row in logbook.checkpoints()}
    for parent in (folder / "checkpoints", folder / "sampler_weights"):
        checkpoint.remove_leftovers(parent)
        for path in parent.iterdir() if parent.is_dir() else ():
            if path.is_dir() and path.name not in named:
                shutil.rmtree(path)


class _Whereabouts:
    """The stages of a run and which of them are still to do, from `position` on."""

    def __init__(self, run: Run, folder: Path, stages: Sequence[Prepared], position: Position):
        self.run, self.folder, self.stages, self.position = run, folder, stages, position
        self.index = position.stage
        if position.stage_ended:  # not: all its batches are trained; the stage's final checkpoint may be missing still
            self.index += 1

    @property
    def finished(self) -> bool:
        return self.index >= len(self.stages)

    @property
    def resumes_here(self) -> bool:
        return self.position.state_path is not None and self.index == self.position.stage

    def first_step(self, index: int) -> int:
        """Steps of the run before a stage; one is left between stages for the evaluation before the first step."""
        return sum(prepared.plan.settings.loop.steps + 1 for prepared in self.stages[:index])

    def final_path(self, index: int) -> str:
        return str(self.folder / "checkpoints" / f"{self.stages[index].plan.name}-final")

    def previous(self, index: int) -> str | None:
        """The checkpoint that a stage begins from; None where that is a base model."""
        before = begins_after(self.run.stages, index)
        return None if before is None else self.final_path(before)

    def policy(self, service: ServiceClient) -> TrainingClient:
        """The learner of this stage, checked against its data."""
        index = min(self.index, len(self.stages) - 1)
        prepared = self.stages[index]
        if prepared.awaits is not None and prepared.rows is None and not self.finished:
            first, loop = self.first_step(prepared.awaits), self.stages[prepared.awaits].plan.settings.loop
            prepared.rows = stored_answers(prepared.plan, self.folder, range(first + 1, first + loop.steps + 1, loop.rollouts_every))
        previous = self.previous(index)
        resume_from = self.position.state_path if self.resumes_here or self.finished else None
        value_head = METHODS[prepared.plan.method].value_head(prepared.plan.settings)
        policy = make_policy(
            service, prepared.plan.settings.model, previous, resume_from, self.run.options.seed, value_head=value_head
        )
        if not self.finished:
            check_rows(prepared, policy, make_renderer(policy, prepared.plan.settings.data.renderer))
        return policy

    def others(self, service: ServiceClient, policy: TrainingClient) -> dict[str, Any]:
        """The other models that this stage's method needs."""
        if self.finished:
            return {}
        prepared = self.stages[self.index]
        plan, tags = prepared.plan, sorted({problem.tag for problem in prepared.problems})
        previous = self.previous(self.index)
        earlier = {stage.name: self.final_path(i) for i, stage in enumerate(self.run.stages[: self.index])}
        resume_from = self.position.state_path if self.resumes_here else None
        hosts = StageHosts(service, policy, plan.settings.model, previous, earlier, self.run.options.seed, resume_from, tags)
        return METHODS[plan.method].clients(plan.settings, hosts)

    def remark(self) -> str | None:
        """What there is to say of this stage's data."""
        prepared = self.stages[self.index]
        return METHODS[prepared.plan.method].remark(prepared.plan.settings, prepared.problems)

    def stage(
        self,
        policy: TrainingClient,
        others: dict[str, Any],
        logbook: Logbook,
        console: Console,
        keeper: Keeper,
        stop_request: StopRequest,
    ) -> Stage:
        prepared = self.stages[self.index]
        plan = prepared.plan
        method = METHODS[plan.method].hooks(plan.settings)
        loop_state = self.position.loop_state if self.resumes_here else None
        stage = Stage(
            name=plan.name,
            index=self.index,
            method=method,
            models=Models(policy, others),
            problems=prepared.curriculum or prepared.problems,
            test_problems=prepared.test_problems,
            renderer=make_renderer(policy, plan.settings.data.renderer),
            scorer=prepared.scorer,
            seed=self.run.options.seed,
            first_step=self.first_step(self.index),
            done=self.position.next_batch if loop_state is not None else 0,
            logbook=logbook,
            console=console,
            keeper=keeper,
            stop_request=stop_request,
        )
        if loop_state is not None:
            stage.load_state(loop_state)
        return stage


def _run_stages(
    at: _Whereabouts,
    service: ServiceClient,
    policy: TrainingClient,
    others: dict[str, Any],
    logbook: Logbook,
    console: Console,
    stop_request: StopRequest,
) -> None:
    keeper = Keeper(logbook)
    held_out: dict[str, HeldOut] = {}
    while not at.finished:
        stage = at.stage(policy, others, logbook, console, keeper, stop_request)
        if (remark := at.remark()) is not None:
            console.note(remark)
        try:
            (train_online if stage.method.online else train_offline)(stage)
        except Stopped:
            console.end("stopped as asked, everything saved", facts={"folder": at.folder}, commands=[_resume_command(at.run, at.folder)])
            raise
        held_out[stage.name] = stage.held_out
        policy.release()
        del stage, others  # with them go the other models' weights
        at.index += 1
        if not at.finished:
            policy = at.policy(service)
            others = at.others(service, policy)
    _conclude(at, held_out, console)


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


def _conclude(at: _Whereabouts, held_out: Mapping[str, HeldOut], console: Console) -> None:
    folder = at.folder
    results: dict[str, tuple[float | None, float | None]] = {}
    remarks = []
    for name, found in held_out.items():
        if found.after is not None:
            results[f"held-out {found.what}, {name}"] = (found.before, found.after)
        if found.rows is not None:
            results[f"held-out {found.rows[0].removeprefix('test/')}, {name}"] = found.rows[1:]
        if found.greedy_after is not None:
            results[f"greedy {found.what}, {name}"] = (found.greedy_before, found.greedy_after)
        remarks += [text for text in [found.sharpening()] if text is not None]
    console.end(
        f"{at.run.name}: done",
        results=results,
        facts={
            "metrics": folder / "metrics.jsonl",
            "curves": folder / "curves.png",
            "weights": Path(at.final_path(len(at.stages) - 1)) / "model",
        },
        remarks=remarks,
        commands=[*_uses(at, folder), f"python plot.py {folder}"],
    )


def _uses(at: _Whereabouts, folder: Path) -> list[str]:
    """What a person does next with the weights of a run's last stage."""
    last = at.stages[-1].plan
    if last.method != "reward_model":
        scored = reward_of(last.settings.data) is not None  # else evaluate.py would ask for a reward
        return [f"python sample.py {folder}", *([f"python evaluate.py {folder}"] if scored else [])]
    flag = "reward" if METHODS[last.method].value_head(last.settings) else "comparison"
    method = "rlhf" if flag == "reward" else "grpo"  # which has groups to compare within
    return [f"accelerate launch train.py {method} --{flag}-model {folder}"]


def _resume_command(run: Run, folder: Path) -> str:
    what = run.recipe or run.stages[0].method
    return f"accelerate launch train.py {what} --output-dir {folder} --resume (with the same other flags)"
