"""Execute the stages of a run in order, from its start or newest checkpoint to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.algorithms import METHODS, Models
from rl.client import ServiceClient, TrainingClient
from rl.config import (
    LAUNCH_FOLDER_KEY,
    RunConfig,
    record_resumed_files,
    resolve_config,
)
from rl.distributed import RunStopped, StopRequest
from rl.errors import RunFolderError
from rl.reporting import (
    Console,
    Logbook,
    check_claim_folder,
    check_trackers,
    check_writable,
    claim_folder,
    contains_run,
    has_no_steps,
    load_saved_config,
    write_config,
)
from rl.trainer.cache_size import choose_cache_size
from rl.trainer.checkpoint_manager import CheckpointManager
from rl.trainer.config_diff import CHANGES_KEY, includes_data_change
from rl.trainer.data_source import load_stored_answers
from rl.trainer.evaluator import HeldOutMetrics
from rl.trainer.initial_weights import (
    ORIGINS_KEY,
    check_initial_weights,
    check_outside_run_folder,
    describe_random_weights,
    describe_tied_heads,
    find_previous_stage,
    format_origin,
    resolve_initial_weights,
)
from rl.trainer.memory_report import check_memory as check_memory
from rl.trainer.memory_table import StageNeeds
from rl.trainer.opponent_models import OpponentModels
from rl.trainer.pipeline import check_api_models, convert_epochs_to_steps, dry_run, prepare_stages
from rl.trainer.replay_log import (
    ReplayLog,
    check_replay,
    check_replay_sampler,
    list_replay_differences,
)
from rl.trainer.report_writer import ReportWriter, describe_launch
from rl.trainer.resume import (
    RUN_ID_KEY,
    ResumePoint,
    check_final_checkpoints,
    check_same_data,
    find_resume_point,
    make_run_id,
    remove_damaged_checkpoints,
)
from rl.trainer.resume import make_identity as identity_of
from rl.trainer.reward_startup_check import check_rewards_at_start
from rl.trainer.run_lock import RunLock
from rl.trainer.run_summary import (
    format_check_command,
    format_resume_command,
    print_introduction,
    print_summary,
)
from rl.trainer.stage_context import StageContext
from rl.trainer.stage_data import PreparedStage, check_rows, check_sandboxes, describe_prepared
from rl.trainer.stage_models import StageModelFactory, make_policy, stage_renderer
from rl.trainer.trainer import Trainer
from rl.trainer.training_loop import train
from rl.trainer.worker_settings import collect_worker_settings


def execute(run: RunConfig, on_begin: Callable[[], None] = lambda: None) -> None:
    """Execute a run on rank 0; other ranks serve inside ServiceClient.

    Settings, data, reward, model and folder are checked before the folder is changed; `on_begin` is
    called between the two. Raises RunStopped when a stop was requested.
    """
    options = run.options
    folder = resolve_run_folder(run)
    check_trackers(options.tracker_names)
    check_replay_sampler(run)
    settings = replace(
        collect_worker_settings(run.stages),
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
        stop_request.on_exit = lock.release
        check_writable(folder)
        if folder.is_dir():
            lock.acquire(console.warn)
        run = convert_epochs_to_steps(_resume_if_started(run, folder))
        options = run.options
        check_claim_folder(folder, resume=options.resume, overwrite=options.overwrite)
        run, origins = resolve_initial_weights(
            run, load_saved_config(folder) if options.resume else None
        )
        check_outside_run_folder(origins, folder)
        position = (
            find_resume_point(run, folder, console)
            if options.resume
            else ResumePoint(run_id=make_run_id())
        )
        run = position.run or run
        check_replay(run, console.warn)
        check_sandboxes(run.stages)
        stages = _prepare_stages(run, console, stack)
        check_initial_weights(run.stages)
        plans = _plan_memory(run, service, console)
        run_state = RunState(run, folder, stages, position)
        run_state.check_stages()
        policy = run_state.create_policy(service)
        others = run_state.create_other_models(service, policy)
        on_begin()
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(console.warn)
        config = _claim_run_folder(run, folder, position, origins, stages)
        run_state.run_id = config[RUN_ID_KEY]
        print_introduction(run, folder, policy, console, stages)
        for text in _describe_start(run, origins):
            console.note(text)
        launch = describe_launch(max(0, position.step), policy.info, plans)
        report = _open_report(folder, launch, console, lock, stop_request)
        stack.callback(report.close)
        logbook = stack.enter_context(_open_logbook(run, folder, position, console, lock))
        if options.reward_check and not options.resume:
            _check_rewards(stages, folder, console)
        stop_request.has_started = True
        _run_stages(run_state, service, policy, others, logbook, console, stop_request, report)


def _plan_memory(run: RunConfig, service: ServiceClient, console: Console) -> list[StageNeeds]:
    """Set the size of the samplers' KV cache. Check the memory plan, and return it on a GPU."""
    sized = choose_cache_size(run)
    service.set_cache_size(sized.stages[0].settings.sampling.kv_cache_tokens)
    return check_memory(sized, console.warn)


def _check_rewards(stages: Sequence[PreparedStage], folder: Path, console: Console) -> None:
    """Check what the rewards of the stages pay for, before the first step."""
    command = format_check_command(folder, [prepared.plan for prepared in stages])
    check_rewards_at_start(stages, folder, console, command)


def _describe_start(run: RunConfig, origins: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines about the weights that the run starts from."""
    hints = [] if run.options.resume else describe_random_weights(run.stages)
    return [*map(format_origin, origins), *describe_tied_heads(run), *hints]


def _prepare_stages(run: RunConfig, console: Console, stack: ExitStack) -> list[PreparedStage]:
    """Return the prepared stages, print their remarks, and let `stack` close their scorers."""
    stages = prepare_stages(run.stages)
    for prepared in stages:
        if prepared.scorer is not None:
            stack.callback(prepared.scorer.close)
        for text in prepared.remarks:
            console.warn(text)
    return stages


def _claim_run_folder(
    run: RunConfig,
    folder: Path,
    position: ResumePoint,
    origins: Sequence[Mapping[str, Any]],
    stages: Sequence[PreparedStage],
) -> dict[str, Any]:
    """Write config.json and remove damaged checkpoints. Returns the config."""
    options = run.options
    record = {
        RUN_ID_KEY: position.run_id or make_run_id(),
        ORIGINS_KEY: origins,
        CHANGES_KEY: [*position.changed, *position.notes],
        LAUNCH_FOLDER_KEY: str(Path.cwd()),
    }
    config = {**resolve_config(run), **record, **describe_prepared(stages)}
    claim_folder(folder, config, resume=options.resume, overwrite=options.overwrite)
    remove_damaged_checkpoints(folder, position)
    if options.resume:
        recorded = load_saved_config(folder)
        # a run resumed by its folder only names no recipe
        config["recipe"] = run.recipe or recorded.get("recipe")
        config = record_resumed_files(recorded, config)
        # update the config after a corrected recipe, or of a run older than run ids
        write_config(folder, config)
    return config


def resolve_run_folder(run: RunConfig) -> Path:
    """Return the run's folder: --output-dir with `~` expanded, or runs/<name>.

    Raises RunFolderError if `~` cannot be expanded.
    """
    output_dir = Path(run.options.output_dir or Path("runs") / run.name)
    try:
        return output_dir.expanduser()
    except RuntimeError as error:  # ~nobody
        raise RunFolderError(f"--output-dir {output_dir}: {error}") from error


def _resume_if_started(run: RunConfig, folder: Path) -> RunConfig:
    """Return `run` with `resume` set if `auto_resume` is on and the folder's run took a step."""
    if not run.options.auto_resume or not contains_run(folder) or has_no_steps(folder):
        return run
    return replace(run, options=replace(run.options, resume=True))


def _open_logbook(
    run: RunConfig, folder: Path, position: ResumePoint, console: Console, lock: RunLock
) -> Logbook:
    """Return the run's logbook, truncated to the step from which the run resumes."""
    return Logbook(
        folder,
        resume_step=position.step if run.options.resume else None,
        trackers=run.options.tracker_names,
        tracker_project=run.options.wandb_project or run.options.tracker_project,
        config=resolve_config(run),
        console=console,
        checkpoints=position.rows,
        guard=lock.check_held,
    )


def _open_report(
    folder: Path,
    launch: Mapping[str, Any],
    console: Console,
    lock: RunLock,
    stop_request: StopRequest,
) -> ReportWriter:
    """Return the writer of the run's page, with the record of this launch."""
    return ReportWriter(
        folder,
        console,
        launch,
        guard=lock.check_held,
        exceeds_grace=stop_request.exceeds_grace,
    )


class RunState:
    """Track the stages of a run: `index` is the current stage, beginning at `position`."""

    def __init__(
        self, run: RunConfig, folder: Path, stages: Sequence[PreparedStage], position: ResumePoint
    ):
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

    def initial_checkpoint(self, index: int) -> str | None:
        """Return the checkpoint from which a stage begins; None if it begins from a base model."""
        before = find_previous_stage(self.run.stages, index)
        return None if before is None else self.final_path(before)

    def check_stages(self) -> None:
        """Raise UserError if a needed final checkpoint is missing or a later stage cannot begin."""
        if self.finished:
            return
        ahead = range(self.index, len(self.stages))
        needed = {
            before
            for i in ahead
            if (before := find_previous_stage(self.run.stages, i)) is not None
            and before < self.index
        }
        check_final_checkpoints(
            self.run, self.folder, [self.stages[i].plan.name for i in sorted(needed)]
        )
        check_api_models(self.run.stages[self.index :])
        dry_run(self.run.stages, self.stages, self.index)

    def _prepare_stage(self) -> PreparedStage:
        """Return the current stage, with the rows that an earlier stage has written."""
        prepared = self.stages[self.index]
        if prepared.awaited_stage is not None and prepared.rows is None:
            first, loop = (
                self.first_step(prepared.awaited_stage),
                self.stages[prepared.awaited_stage].plan.settings.loop,
            )
            prepared.rows = load_stored_answers(
                prepared.plan,
                self.folder,
                range(first + 1, first + loop.steps + 1, loop.rollouts_every),
            )
        return prepared

    def create_policy(self, service: ServiceClient) -> TrainingClient:
        """Return the training client of the current stage, after checking its data.

        Raises UserError if the data differ from those that the checkpoint was trained on.
        """
        index = min(self.index, len(self.stages) - 1)
        prepared = self.stages[index]
        if not self.finished:
            self._prepare_stage()
        previous = self.initial_checkpoint(index)
        resume_from = self.position.state_path if self.resumes_here or self.finished else None
        value_head = METHODS[prepared.plan.method](prepared.plan.settings).value_head
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
        loop_state, changed = self.position.loop_state, includes_data_change(self.position.notes)
        # `prepared.problems` has only the rows that were not skipped
        if not self.finished and self.resumes_here and loop_state is not None and not changed:
            check_same_data(
                loop_state.get("run"),
                prepared.problems,
                prepared.plan.name,
                str(self.position.state_path),
            )
        return policy

    def create_other_models(self, service: ServiceClient, policy: TrainingClient) -> dict[str, Any]:
        """Return the other models that the current stage's method needs, by their roles."""
        if self.finished:
            return {}
        prepared = self.stages[self.index]
        plan, tags = prepared.plan, prepared.problems.tags
        previous = self.initial_checkpoint(self.index)
        earlier = {
            stage.name: self.final_path(i) for i, stage in enumerate(self.run.stages[: self.index])
        }
        resume_from = self.position.state_path if self.resumes_here else None
        hosts = StageModelFactory(
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
        models = METHODS[plan.method](plan.settings).make_models(hosts)
        if prepared.environment is not None:
            models = {
                **models,
                "opponents": OpponentModels(
                    prepared.environment.make(), plan.settings.env, hosts, self.folder, plan.name
                ),
            }
        return models

    def remark_on_data(self) -> str | None:
        """Return the method's remark on the current stage's data, if any."""
        prepared = self.stages[self.index]
        method = METHODS[prepared.plan.method](prepared.plan.settings)
        return method.remark_on_data(prepared.problems)

    def create_trainer(
        self,
        policy: TrainingClient,
        others: dict[str, Any],
        logbook: Logbook,
        console: Console,
        keeper: CheckpointManager,
        stop_request: StopRequest,
        report: ReportWriter,
    ) -> Trainer:
        """Return the trainer of the current stage, with the state of the checkpoint if it
        resumes.
        """
        prepared, options = self.stages[self.index], self.run.options
        plan = prepared.plan
        method = METHODS[plan.method](plan.settings)
        loop_state = self.position.loop_state if self.resumes_here else None
        done = self.position.next_batch if loop_state is not None else 0
        flow = getattr(plan.settings, "flow", None)
        replay_log = None
        if method.online and flow is not None and flow.is_async:
            # other settings of evaluation would not have the recorded episodes
            replays = not list_replay_differences(self.run)
            replay_log = ReplayLog(
                self.folder, plan.name, done, options.replay, replays_evaluations=replays
            )
        context = StageContext(
            name=plan.name,
            index=self.index,
            method=method,
            models=Models(policy, others),
            problems=prepared.curriculum or prepared.problems,
            test_problems=prepared.test_problems,
            renderer=stage_renderer(policy, plan.settings),
            scorer=prepared.scorer,
            run_seed=options.seed,
            first_step=self.first_step(self.index),
            logbook=logbook,
            console=console,
            checkpoints=keeper,
            identity=identity_of(self.run, self.run_id, self.index, prepared.problems),
            environment=prepared.environment,
            replay_log=replay_log,
        )
        trainer = Trainer(
            context,
            stop_request=stop_request,
            done=done,
            report=report,
            runs_self_test=options.self_test,
            profiled_steps=options.profile,
        )
        if loop_state is not None:
            trainer.load_state(loop_state)
        return trainer


def _run_stages(
    run_state: RunState,
    service: ServiceClient,
    policy: TrainingClient,
    others: dict[str, Any],
    logbook: Logbook,
    console: Console,
    stop_request: StopRequest,
    report: ReportWriter,
) -> None:
    """Train the remaining stages in order and print the results. Raises RunStopped on a stop."""
    keeper = CheckpointManager(logbook)
    held_out: dict[str, HeldOutMetrics] = {}
    while not run_state.finished:
        trainer = run_state.create_trainer(
            policy, others, logbook, console, keeper, stop_request, report
        )
        for remark in (run_state.remark_on_data(), trainer.remark_on_rows()):
            if remark is not None:
                console.note(remark)
        try:
            train(trainer)
        except RunStopped:
            console.end(
                "stopped on request, everything is saved",
                facts={"folder": run_state.folder},
                commands=[format_resume_command(run_state.folder, run_state.run.options.trust_run)],
            )
            raise
        held_out[trainer.name] = trainer.evaluator.held_out
        policy.release()
        del trainer, others  # frees the other models' weights
        run_state.index += 1
        if not run_state.finished:
            policy = run_state.create_policy(service)
            others = run_state.create_other_models(service, policy)
    print_summary(run_state, held_out, console)
