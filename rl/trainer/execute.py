"""Execute the stages of a run in order, from its start or newest checkpoint to its end."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rl.algorithms import METHODS, Models
from rl.client import SampleScorerHandle, ServiceClient
from rl.config import (
    LAUNCH_FOLDER_KEY,
    RunConfig,
    record_resumed_files,
    resolve_config,
)
from rl.distributed import RunStopped, StopRequest
from rl.errors import RunFolderError, UserError
from rl.processes import RunLock
from rl.reporting import (
    Console,
    Logbook,
    check_claim_folder,
    check_trackers,
    check_writable,
    claim_folder,
    contains_run,
    has_steps,
    load_saved_config,
    write_config,
)
from rl.trainer.checkpoint_manager import CheckpointManager, final_checkpoint, read_stage_steps
from rl.trainer.initial_weights import (
    ORIGINS_KEY,
    check_initial_weights,
    check_outside_run_folder,
    describe_random_weights,
    describe_tied_heads,
    find_previous_stage,
    resolve_initial_weights,
)
from rl.trainer.memory_report import check_memory
from rl.trainer.memory_requirements import StageNeeds, choose_cache_size
from rl.trainer.preflight import (
    check_api_models,
    check_rewards_at_start,
    convert_epochs_to_steps,
    dry_run,
    prepare_stages,
)
from rl.trainer.resume import (
    CHANGES_KEY,
    RUN_ID_KEY,
    ResumePoint,
    check_final_checkpoints,
    check_same_data,
    find_resume_point,
    includes_data_change,
    make_identity,
    remove_damaged_checkpoints,
)
from rl.trainer.run_report import ReportWriter, describe_launch
from rl.trainer.run_summary import (
    format_check_command,
    format_resume_command,
    print_introduction,
    print_summary,
)
from rl.trainer.saved_weights import collect_worker_settings
from rl.trainer.stage_data import (
    PreparedStage,
    check_rows,
    check_sandboxes,
    describe_prepared,
    load_stored_answers,
)
from rl.trainer.stage_models import OpponentModels, StageModelFactory, stage_renderer
from rl.trainer.stage_sampling import (
    ReplayLog,
    check_replay,
    check_replay_sampler,
    list_replay_differences,
    open_sample_scorers,
)
from rl.trainer.trainer import Trainer, describe_nonfinite
from rl.trainer.training_loop import train


def execute(
    run: RunConfig, on_begin: Callable[[], None] = lambda: None, *, ends_process: bool = False
) -> None:
    """Execute a run on rank 0; other ranks serve inside ServiceClient.

    Settings, data, reward, model and folder are checked before the folder is changed; `on_begin` is
    called between the two. `ends_process`: the process may be ended by Ctrl-C (see StopRequest).
    Raises RunStopped when a stop was requested.
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
        StopRequest(options.stop_grace, ends_process=ends_process) as stop_request,
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
        check_outside_run_folder(run, origins, folder)
        position = find_resume_point(run, folder, console) if options.resume else ResumePoint()
        run = position.run or run
        check_replay(run, console.warn)
        check_sandboxes(run.stages)
        stages = _prepare_stages(run, console, stack)
        check_initial_weights(run.stages)
        plans = _plan_memory(run, service, console)
        run_state = RunState(run, folder, stages, position, service, console, stop_request)
        run_state.check_stages()
        run_state.models = run_state.create_models()
        on_begin()
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(console.warn)
        run_state.claim_folder(origins)
        policy = run_state.models.policy
        print_introduction(run, folder, policy, console, stages)
        run_state.print_origins(origins)
        launch = describe_launch(max(0, position.step), policy.info, plans)
        del policy  # a stage frees its models
        report = stack.enter_context(
            ReportWriter(
                folder,
                console,
                launch,
                guard=lock.check_held,
                exceeds_grace=stop_request.exceeds_grace,
            )
        )
        logbook = stack.enter_context(run_state.open_logbook(lock))
        if options.reward_check and not options.resume:
            check_rewards_at_start(
                stages, folder, console, format_check_command(folder, run.stages)
            )
        stop_request.has_started = True
        run_state.train_stages(logbook, report)


def _plan_memory(run: RunConfig, service: ServiceClient, console: Console) -> list[StageNeeds]:
    """Set the size of the samplers' KV cache. Check the memory plan, and return it on a GPU."""
    sized = choose_cache_size(run)
    service.set_cache_size(sized.stages[0].settings.sampling.kv_cache_tokens)
    return check_memory(sized, console.warn)


def _prepare_stages(run: RunConfig, console: Console, stack: ExitStack) -> list[PreparedStage]:
    """Return the prepared stages, whose scorers `stack` closes, and print their remarks."""
    stages = prepare_stages(run.stages, stack)
    for prepared in stages:
        for text in prepared.remarks:
            console.warn(text)
    return stages


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
    if not run.options.auto_resume or not contains_run(folder) or not has_steps(folder):
        return run
    return replace(run, options=replace(run.options, resume=True))


@dataclass
class RunState:
    """Track the stages of a run: `index` is the current stage, beginning at `position`.

    `models` are those of the current stage, and `run_id` of a new run is set when its folder is
    claimed.
    """

    run: RunConfig
    folder: Path
    stages: Sequence[PreparedStage]
    position: ResumePoint
    service: ServiceClient
    console: Console
    stop_request: StopRequest

    def __post_init__(self) -> None:
        self.models: Models
        self.sample_scorers: SampleScorerHandle | None = None  # of the current stage
        self.run_id = self.position.run_id
        # a stage has not ended if all batches are trained but its final checkpoint is missing
        self.index = self.position.stage + self.position.stage_ended
        self.steps = read_stage_steps(resolve_config(self.run)["stages"])

    def claim_folder(self, origins: Sequence[Mapping[str, Any]]) -> None:
        """Write config.json and remove damaged checkpoints. `origins`: the sources of the stages'
        initial weights.
        """
        run, folder, position, options = self.run, self.folder, self.position, self.run.options
        self.run_id = position.run_id or uuid.uuid4().hex
        record = {
            RUN_ID_KEY: self.run_id,
            ORIGINS_KEY: origins,
            CHANGES_KEY: [*position.changed, *position.notes],
            LAUNCH_FOLDER_KEY: str(Path.cwd()),
        }
        config = {**resolve_config(run), **record, **describe_prepared(self.stages)}
        if options.resume:
            check_claim_folder(folder, resume=True, overwrite=options.overwrite)
        else:
            claim_folder(folder, config, overwrite=options.overwrite)
        remove_damaged_checkpoints(folder, position)
        if options.resume:
            recorded = load_saved_config(folder)
            # a run resumed by its folder only names no recipe
            config["recipe"] = run.recipe or recorded.get("recipe")
            # update the config after a corrected recipe, or of a run older than run ids
            write_config(folder, record_resumed_files(recorded, config))

    def print_origins(self, origins: Sequence[Mapping[str, Any]]) -> None:
        """Print lines about the weights that the run starts from."""
        note = self.console.note
        for origin in origins:
            note(f"stage {origin['stage']} begins from {origin['from']}: {origin['how']}")
        hints = [] if self.run.options.resume else describe_random_weights(self.run.stages)
        for text in (*describe_tied_heads(self.run), *hints):
            note(text)

    def open_logbook(self, lock: RunLock) -> Logbook:
        """Return the run's logbook, truncated to the step from which the run resumes."""
        options = self.run.options
        return Logbook(
            self.folder,
            resume_step=self.position.step if options.resume else None,
            trackers=options.tracker_names,
            tracker_project=options.wandb_project or options.tracker_project,
            config=resolve_config(self.run),
            console=self.console,
            guard=lock.check_held,
        )

    @property
    def finished(self) -> bool:
        """Return whether all stages have ended."""
        return self.index >= len(self.stages)

    @property
    def resumes_here(self) -> bool:
        """Return whether the current stage resumes from a checkpoint of itself."""
        return self.position.state_path is not None and self.index == self.position.stage

    def check_stages(self) -> None:
        """Raise UserError if a needed final checkpoint is missing or a later stage cannot begin."""
        if self.finished:
            return
        ahead = range(self.index, len(self.stages))
        previous = {find_previous_stage(self.run.stages, i) for i in ahead}
        ended = [plan.name for i, plan in enumerate(self.run.stages[: self.index]) if i in previous]
        check_final_checkpoints(self.folder, ended)
        check_api_models(self.run.stages[self.index :])
        dry_run(self.run.stages, self.stages, self.index)

    def create_models(self) -> Models:
        """Return the models of the current stage, after checking its data. After the last stage
        return its policy.

        Raises UserError if the data differ from those that the checkpoint was trained on.
        """
        resume_from = self.position.state_path
        if self.finished:
            assert resume_from is not None
            policy = self.service.create_training_client_from_state_with_optimizer(resume_from)
            return Models(policy)
        prepared = self.stages[self.index]
        plan = prepared.plan
        self._load_rows_of_stage(prepared)
        factory = StageModelFactory.open_stage(
            self.service,
            self.run.stages,
            self.index,
            partial(final_checkpoint, self.folder),
            self.run.options.seed,
            resume_from if self.resumes_here else None,
        )
        assert factory.renderer is not None
        check_rows(prepared, factory.policy, factory.renderer)
        loop_state = self.position.loop_state
        # `prepared.problems` has only the rows that were not skipped
        if self.resumes_here and loop_state and not includes_data_change(self.position.notes):
            check_same_data(
                loop_state.get("run"), prepared.problems, plan.name, str(self.position.state_path)
            )
        factory.tags = prepared.problems.tags
        others = METHODS.create(plan).make_models(factory)
        if prepared.environment is not None:
            environment, env = prepared.environment.make(), plan.settings.env
            opponents = OpponentModels(environment, env, factory, self.folder, plan.name)
            others = {**others, "opponents": opponents}
        return Models(factory.policy, others)

    def _load_rows_of_stage(self, prepared: PreparedStage) -> None:
        """Load the rows of a stage that an earlier stage has written."""
        if prepared.source_stage is None or prepared.rows is not None:
            return
        source = self.steps[prepared.source_stage]
        every = self.run.stages[prepared.source_stage].settings.loop.rollouts_every
        steps = range(source.first + 1, source.first + source.steps + 1, every)
        prepared.rows = load_stored_answers(prepared.plan, self.folder, steps)

    def create_trainer(
        self, logbook: Logbook, checkpoints: CheckpointManager, report: ReportWriter
    ) -> Trainer:
        """Return the trainer of the current stage, with the state of the checkpoint if it
        resumes.
        """
        prepared, options = self.stages[self.index], self.run.options
        plan, method = prepared.plan, METHODS.create(prepared.plan)
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
        renderer = stage_renderer(self.models.policy, plan.settings)
        self.sample_scorers = open_sample_scorers(
            self.service, prepared, renderer, self.models.rewards, self.console.note
        )
        trainer = Trainer(
            name=plan.name,
            index=self.index,
            method=method,
            models=self.models,
            problems=prepared.curriculum or prepared.problems,
            test_problems=prepared.test_problems,
            renderer=renderer,
            scorer=prepared.scorer,
            run_seed=options.seed,
            first_step=self.steps[self.index].first,
            logbook=logbook,
            console=self.console,
            checkpoints=checkpoints,
            identity=make_identity(self.run, self.run_id, self.index, prepared.problems),
            environment=prepared.environment,
            replay_log=replay_log,
            rank_scores=self.sample_scorers,
            stop_request=self.stop_request,
            done=done,
            report=report,
            runs_self_test=options.self_test,
            profiled_steps=options.profile,
        )
        if loop_state is not None:
            trainer.load_state(loop_state)
        description = method.describe_data(prepared.problems, renderer)
        if description is not None:
            self.console.note(description)
        return trainer

    def train_stages(self, logbook: Logbook, report: ReportWriter) -> None:
        """Train the remaining stages in order and print the results. Raises RunStopped on a
        stop.
        """
        checkpoints = CheckpointManager(logbook, self.position.rows, self.position.stale)
        while not self.finished:
            trainer = self.create_trainer(logbook, checkpoints, report)
            try:
                with _freeze_objects():
                    train(trainer)
            except FloatingPointError as error:
                # Nothing is saved: a checkpoint must not contain what the step has already changed
                # (baselines, earlier substeps).
                raise UserError(describe_nonfinite(trainer, error)) from error
            except RunStopped:
                saved = [row["name"] for row in checkpoints.rows if row["state_path"]]
                start = saved[-1] if saved else "the beginning"
                self.console.end(
                    f"stopped on request; --resume continues from {start}",
                    facts={"folder": self.folder},
                    commands=[format_resume_command(self.folder, self.run.options.trust_run)],
                )
                raise
            finally:
                if self.sample_scorers is not None:
                    self.sample_scorers.close()
            self.models.policy.release()
            del trainer, self.models
            gc.collect()  # frees the other models' weights
            self.index += 1
            if not self.finished:
                self.models = self.create_models()
        print_summary(self.run, self.folder, self.console)


@contextmanager
def _freeze_objects() -> Iterator[None]:
    """Exclude the objects that exist by now, those of imported modules above all, from garbage
    collection. A batch makes many objects, so that each step would search all of them: 0.1 s each
    time.
    """
    gc.collect()  # garbage with reference cycles would stay, such as a stage's models
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
