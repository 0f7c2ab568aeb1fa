"""Execute the stages of a run in order, from its start or newest checkpoint to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.clients import ServiceClient, TrainingClient
from rl.errors import RunFolderError
from rl.methods import METHODS, Models
from rl.ranks import Stopped, StopRequest
from rl.report import (
    Console,
    Logbook,
    check_can_write,
    check_claim,
    check_tracker,
    claim,
    holds_a_run,
    never_took_a_step,
    saved_config,
    write_config,
)
from rl.run.beginnings import begins_after, check_weights
from rl.run.changed import CHANGES, changes_data
from rl.run.conclusion import conclude, introduce, resume_command
from rl.run.decisions import check_replay
from rl.run.device_side import worker_settings
from rl.run.epochs import in_steps
from rl.run.held_out import HeldOut
from rl.run.hosts import StageHosts, make_policy, stage_renderer
from rl.run.identity import ID, check_data, new_id
from rl.run.identity import of as identity_of
from rl.run.keeper import Keeper
from rl.run.lock import RunLock
from rl.run.offline import train_offline
from rl.run.online import train_online
from rl.run.opponents import Opponents
from rl.run.origins import ORIGINS, check_apart, said, settled
from rl.run.plan import check as check_memory
from rl.run.position import Position, check_finals, find, make_way
from rl.run.prepare import Prepared, check_rows, check_sandboxes, found_out
from rl.run.rehearsal import prepared_stages, rehearse
from rl.run.stage import Stage
from rl.run.stored import stored_answers
from rl.settings import Run, resolved


def execute(run: Run, begins: Callable[[], None] = lambda: None) -> None:
    """Execute a run on rank 0; other ranks serve inside ServiceClient.

    Settings, data, reward, model and folder are checked before the folder is changed; `begins` is
    called between the two. Raises Stopped when a stop was requested.
    """
    options = run.options
    folder = folder_of(run)
    check_tracker(options.wandb_project)
    settings = replace(
        worker_settings(run.stages),
        timeout_seconds=options.timeout,
        stop_grace_seconds=options.stop_grace,
    )
    with (
        StopRequest(options.stop_grace) as stop_request,
        ServiceClient(output_dir=folder, seed=options.seed, settings=settings) as service,
        Console(quiet=options.quiet) as console,
        RunLock(folder, patient=options.auto_resume) as lock,
        ExitStack() as stack,
    ):
        stop_request.farewell = lock.release
        check_can_write(folder)
        if folder.is_dir():
            lock.acquire(console.warn)
        run = in_steps(_restarted(run, folder))
        options = run.options
        check_claim(folder, resume=options.resume, overwrite=options.overwrite)
        run, origins = settled(run, saved_config(folder).get(ORIGINS, ()) if options.resume else ())
        check_apart(origins, folder)
        position = find(run, folder, console) if options.resume else Position(run_id=new_id())
        run = position.run or run
        check_replay(run, console.warn)
        check_sandboxes(run.stages)
        stages = prepared_stages(run.stages)
        for prepared in stages:
            if prepared.scorer is not None:
                stack.callback(prepared.scorer.close)
            for text in prepared.remarks:
                console.warn(text)
        check_weights(run.stages)
        check_memory(run, console.warn)
        run_state = _Whereabouts(run, folder, stages, position)
        run_state.check()
        policy = run_state.policy(service)
        others = run_state.others(service, policy)
        begins()
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(console.warn)
        record = {
            ID: position.run_id or new_id(),
            ORIGINS: origins,
            CHANGES: [*position.changed, *position.notes],
        }
        config = {**resolved(run), **record, **found_out(stages)}
        claim(folder, config, resume=options.resume, overwrite=options.overwrite)
        make_way(folder, position)
        if options.resume:
            # a run resumed by its folder only names no recipe
            config["recipe"] = run.recipe or saved_config(folder).get("recipe")
            # update the config after a corrected recipe, or of a run older than run ids
            write_config(folder, config)
        run_state.run_id = config[ID]
        introduce(run, folder, policy, console, stages)
        for note in origins:
            console.note(said(note))
        logbook = stack.enter_context(_logbook(run, folder, position, console, lock))
        stop_request.working = True
        _run_stages(run_state, service, policy, others, logbook, console, stop_request)


def folder_of(run: Run) -> Path:
    """Return the run's folder: --output-dir with `~` expanded, or runs/<name>.

    Raises RunFolderError if `~` cannot be expanded.
    """
    output_dir = Path(run.options.output_dir or Path("runs") / run.name)
    try:
        return output_dir.expanduser()
    except RuntimeError as error:  # ~nobody
        raise RunFolderError(f"--output-dir {output_dir}: {error}") from error


def _restarted(run: Run, folder: Path) -> Run:
    """Return `run` with `resume` set if `auto_resume` is on and the folder's run took a step."""
    if not run.options.auto_resume or not holds_a_run(folder) or never_took_a_step(folder):
        return run
    return replace(run, options=replace(run.options, resume=True))


def _logbook(
    run: Run, folder: Path, position: Position, console: Console, lock: RunLock
) -> Logbook:
    """Return the run's logbook, truncated to the step from which the run resumes."""
    return Logbook(
        folder,
        resume_step=position.step if run.options.resume else None,
        wandb_project=run.options.wandb_project,
        config=resolved(run),
        console=console,
        checkpoints=position.rows,
        guard=lock.held,
    )


class _Whereabouts:
    """Track the stages of a run: `index` is the current stage, beginning at `position`."""

    def __init__(self, run: Run, folder: Path, stages: Sequence[Prepared], position: Position):
        self.run, self.folder, self.stages, self.position = run, folder, stages, position
        self.run_id = position.run_id
        self.index = position.stage
        # False if all batches are trained but the stage's final checkpoint is missing.
        if position.stage_ended:
            self.index += 1

    @property
    def finished(self) -> bool:
        """Return whether all stages have ended."""
        return self.index >= len(self.stages)

    @property
    def resumes_here(self) -> bool:
        """Return whether the current stage resumes from a checkpoint of itself."""
        return self.position.state_path is not None and self.index == self.position.stage

    def first_step(self, index: int) -> int:
        """Return the run's step count before a stage.

        A step is reserved between stages for the evaluation before the first step.
        """
        return sum(prepared.plan.settings.loop.steps + 1 for prepared in self.stages[:index])

    def final_path(self, index: int) -> str:
        """Return the path of the final checkpoint of a stage."""
        return str(self.folder / "checkpoints" / f"{self.stages[index].plan.name}-final")

    def previous(self, index: int) -> str | None:
        """Return the checkpoint from which a stage begins; None if it begins from a base model."""
        before = begins_after(self.run.stages, index)
        return None if before is None else self.final_path(before)

    def check(self) -> None:
        """Raise UserError if a needed final checkpoint is missing or a later stage cannot begin."""
        if self.finished:
            return
        ahead = range(self.index, len(self.stages))
        needed = {
            before
            for i in ahead
            if (before := begins_after(self.run.stages, i)) is not None and before < self.index
        }
        check_finals(self.run, self.folder, [self.stages[i].plan.name for i in sorted(needed)])
        rehearse(self.run.stages, self.stages, self.index)

    def _filled(self) -> Prepared:
        """Return the current stage, with the rows that an earlier stage has written."""
        prepared = self.stages[self.index]
        if prepared.awaits is not None and prepared.rows is None:
            first, loop = (
                self.first_step(prepared.awaits),
                self.stages[prepared.awaits].plan.settings.loop,
            )
            prepared.rows = stored_answers(
                prepared.plan,
                self.folder,
                range(first + 1, first + loop.steps + 1, loop.rollouts_every),
            )
        return prepared

    def policy(self, service: ServiceClient) -> TrainingClient:
        """Return the training client of the current stage, after checking its data.

        Raises UserError if the data differ from those that the checkpoint was trained on.
        """
        index = min(self.index, len(self.stages) - 1)
        prepared = self.stages[index]
        if not self.finished:
            self._filled()
        previous = self.previous(index)
        resume_from = self.position.state_path if self.resumes_here or self.finished else None
        value_head = METHODS[prepared.plan.method].value_head(prepared.plan.settings)
        policy = make_policy(
            service,
            prepared.plan.settings.model,
            previous,
            resume_from,
            self.run.options.seed,
            value_head=value_head,
        )
        if not self.finished:
            check_rows(prepared, policy, stage_renderer(policy, prepared.plan.settings))
        loop_state, changed = self.position.loop_state, changes_data(self.position.notes)
        # `prepared.problems` has only the rows that were not skipped
        if not self.finished and self.resumes_here and loop_state is not None and not changed:
            check_data(
                loop_state.get("run"),
                prepared.problems,
                prepared.plan.name,
                str(self.position.state_path),
            )
        return policy

    def others(self, service: ServiceClient, policy: TrainingClient) -> dict[str, Any]:
        """Return the other models that the current stage's method needs, by their roles."""
        if self.finished:
            return {}
        prepared = self.stages[self.index]
        plan, tags = prepared.plan, prepared.problems.tags
        previous = self.previous(self.index)
        earlier = {
            stage.name: self.final_path(i) for i, stage in enumerate(self.run.stages[: self.index])
        }
        resume_from = self.position.state_path if self.resumes_here else None
        hosts = StageHosts(
            service,
            policy,
            plan.settings.model,
            previous,
            earlier,
            self.run.options.seed,
            resume_from,
            tags,
            stage_renderer(policy, plan.settings),
        )
        models = METHODS[plan.method].other_models(plan.settings, hosts)
        if prepared.environment is not None:
            models = {
                **models,
                "opponents": Opponents(
                    prepared.environment.make(), plan.settings.env, hosts, self.folder, plan.name
                ),
            }
        return models

    def remark(self) -> str | None:
        """Return the method's remark on the current stage's data, if any."""
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
        """Return the current stage, with the state of the checkpoint if it resumes."""
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
            renderer=stage_renderer(policy, plan.settings),
            scorer=prepared.scorer,
            seed=self.run.options.seed,
            first_step=self.first_step(self.index),
            done=self.position.next_batch if loop_state is not None else 0,
            logbook=logbook,
            console=console,
            keeper=keeper,
            stop_request=stop_request,
            identity=identity_of(self.run, self.run_id, self.index, prepared.problems),
            environment=prepared.environment,
            proves_itself=self.run.options.self_test,
            replay=self.run.options.replay,
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
    """Train the remaining stages in order and print the results. Raises Stopped on a stop."""
    keeper = Keeper(logbook)
    held_out: dict[str, HeldOut] = {}
    while not at.finished:
        stage = at.stage(policy, others, logbook, console, keeper, stop_request)
        for remark in (at.remark(), stage.remark()):
            if remark is not None:
                console.note(remark)
        try:
            (train_online if stage.method.online else train_offline)(stage)
        except Stopped:
            console.end(
                "stopped on request, everything is saved",
                facts={"folder": at.folder},
                commands=[resume_command(at.folder)],
            )
            raise
        held_out[stage.name] = stage.held_out
        policy.release()
        del stage, others  # frees the other models' weights
        at.index += 1
        if not at.finished:
            policy = at.policy(service)
            others = at.others(service, policy)
    conclude(at, held_out, console)
