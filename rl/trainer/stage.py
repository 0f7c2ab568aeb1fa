"""Provide what a training loop calls around its five steps, for one stage of a run.

Separate classes sample, log, evaluate and save.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.algorithms import Models, Progress, RowEvaluator
from rl.client import SamplingClient
from rl.data import Curriculum, ProblemSet
from rl.distributed import RunStopped, StopRequest
from rl.envs import EnvironmentSpec
from rl.renderers import Renderer
from rl.reporting import Console, Logbook
from rl.rewards import Scorer
from rl.rollout import EnvGroupBuilder, RolloutBatch
from rl.seed import derive_seed
from rl.trainer.batch_log import BatchLog
from rl.trainer.checkpoint_manager import CheckpointManager
from rl.trainer.evaluator import Evaluator
from rl.trainer.held_out_metrics import HeldOutMetrics
from rl.trainer.replay_log import ReplayLog
from rl.trainer.report_writer import ReportWriter
from rl.trainer.self_test import PROBLEMS, self_test
from rl.trainer.stage_checkpoints import StageCheckpoints
from rl.trainer.stage_context import StageContext
from rl.trainer.stage_sampling import StageSampler
from rl.trainer.step_profile import StepProfile
from rl.trainer.warn_once import WarnOnce
from rl.types import Datum, Problem


class Stage:
    """Train a policy by a method.

    `first_step`: the run's step count before this stage; `done`: batches already trained;
    `identity`: what its checkpoints record of the run (see rl.trainer.same_run); `runs_self_test`:
    run the self-test first (see rl.trainer.self_test); `profiled_steps`: steps to profile (see
    rl.trainer.step_profile).
    """

    def __init__(
        self,
        *,
        name: str,
        index: int,
        method: Any,
        models: Models,
        problems: ProblemSet | Curriculum,
        test_problems: ProblemSet | None,
        renderer: Renderer,
        scorer: Scorer | None,
        seed: int,
        first_step: int,
        done: int,
        logbook: Logbook,
        console: Console,
        checkpoints: CheckpointManager,
        stop_request: StopRequest,
        report: ReportWriter | None = None,
        identity: Mapping[str, Any] | None = None,
        environment: EnvironmentSpec | None = None,
        runs_self_test: bool = False,
        replay: Path | None = None,
        replays_evaluations: bool = True,
        profiled_steps: int = 0,
    ):
        self.name, self.first_step, self.done = name, first_step, done
        self.method, self.models, self.problems, self.renderer = method, models, problems, renderer
        self.logbook, self.console, self.stop_request = logbook, console, stop_request
        self.report = report
        self.seed = derive_seed(seed, index)
        self.runs_self_test = runs_self_test
        self.profile = (
            StepProfile(logbook.folder / "profile", name, profiled_steps)
            if profiled_steps
            else None
        )
        flow = getattr(method.settings, "flow", None)
        continuous = flow is not None and flow.is_async and method.online
        context = StageContext(
            replay_log=ReplayLog(
                logbook.folder, name, done, replay, replays_evaluations=replays_evaluations
            )
            if continuous
            else None,
            name=name,
            index=index,
            method=method,
            models=models,
            problems=problems,
            test_problems=test_problems,
            renderer=renderer,
            scorer=scorer,
            seed=self.seed,
            first_step=first_step,
            logbook=logbook,
            console=console,
            checkpoints=checkpoints,
            identity=identity or {},
            environment=environment,
        )
        self.context, self.settings, self.loop = context, context.settings, context.loop
        self.sampling_params, self.eval_params = context.sampling_params, context.eval_params
        warnings = WarnOnce(console)
        self.stage_sampler = StageSampler(context, warnings)
        self.evaluator = Evaluator(context, self.stage_sampler)
        self.log = BatchLog(context)
        self.stage_checkpoints = StageCheckpoints(context, self.evaluator, warnings)
        self._batch_start = 0.0
        self._sampling_end: float | None = None
        # seconds from the samples to the end of a batch, including its save
        self._rest_seconds = 0.0

    def start(self) -> SamplingClient | None:
        """Return a sampler of the current policy; None if the stage never samples.

        At the beginning of the stage the policy is evaluated too.
        """
        self.console.stage(self.name, self.loop.steps, first=self.first_step, done=self.done)
        if self.done:
            self.log.restore_alarms()
        self.evaluator.prepare_method()
        if self.context.opponents is not None:
            self.context.opponents.add_initial_version(self.models.policy, self.first_step)
        sampler = None
        if self.method.online or self.samples_held_out:
            sampler = self.models.policy.save_weights_and_get_sampling_client()
        if sampler is not None and self.method.online and self.runs_self_test:
            conversations = [
                problem.messages for problem in self.problems.batch(self.done, PROBLEMS, self.seed)
            ]
            self.console.note(
                self_test(
                    self.models.policy,
                    sampler,
                    conversations,
                    self.renderer,
                    self.sampling_params,
                    self.seed,
                )
            )
        if self.done == 0 and self.loop.eval_every:
            metrics = self.evaluator.evaluate_before_training(sampler)
            if metrics or self.samples_held_out:
                self._log(0, metrics)
                if self.report is not None:
                    self.report.update()
        self._batch_start = time.perf_counter()
        return sampler

    def data_remark(self) -> str | None:
        """Return the method's remark on the rows that it learns from, if any."""
        if not isinstance(self.method, RowEvaluator) or self.done > 0:
            return None
        count = min(256, self.loop.batch_size * max(1, self.loop.steps))
        if isinstance(self.problems, ProblemSet):
            count = min(count, len(self.problems))  # a larger batch would repeat rows
        return self.method.remark(self.problems.batch(0, count, self.seed), self.renderer)

    def batches(self) -> Iterator[int]:
        batches = range(self.done, self.loop.steps)
        for batch in batches if self.profile is None else self.profile.iter_batches(batches):
            self.log.begin_update(batch)
            yield batch

    def progress(self, batch: int) -> Progress:
        return Progress(batch, self.loop.steps, self.seed)

    def build_groups(
        self, problems: Sequence[Problem], group_size: int
    ) -> Sequence[EnvGroupBuilder]:
        return self.stage_sampler.build_groups(problems, group_size)

    def fill(self, rollouts: RolloutBatch, batch: int, sampler: SamplingClient) -> RolloutBatch:
        """Sample further problems until batch_size groups are mixed (dynamic sampling, see
        StageSampler.fill_mixed_groups). Without dynamic sampling, return the same rollouts.
        """
        return self.stage_sampler.fill_mixed_groups(rollouts, batch, sampler)

    def check(self, rollouts: RolloutBatch, sampler: SamplingClient) -> None:
        """End the run if every reward failed, or samples come from other weights (see
        StageSampler.check_rollouts).
        """
        self.stage_sampler.check_rollouts(rollouts, sampler.version)

    def next_sampler(
        self, old_sampler: SamplingClient | None, new_sampler: SamplingClient | None = None
    ) -> SamplingClient:
        """Release the old sampler and return a sampler of the new weights; `new_sampler`: that
        sampler, if it exists already.
        """
        if old_sampler is not None:
            old_sampler.release()
        return new_sampler or self.models.policy.save_weights_and_get_sampling_client()

    @property
    def samples_held_out(self) -> bool:
        """Return whether held-out answers are ever sampled, which requires something
        to score them.
        """
        return self.evaluator.samples_held_out

    @property
    def held_out(self) -> HeldOutMetrics:
        return self.evaluator.held_out

    def evaluates_after(self, batch: int) -> bool:
        """Return whether an evaluation is due after this batch."""
        return self.evaluator.is_due(batch)

    def stop_if_late(self) -> None:
        """Stop before the update if a stop was requested and the rest of the step would exceed the
        grace time.

        The rest of the step is estimated by its duration in the previous batch. A resumed run
        generates the same samples again. Raises RunStopped.
        """
        self._sampling_end = time.perf_counter()
        code = self.stop_request.exit_code
        if code is not None and self.stop_request.exceeds_grace(self._rest_seconds):
            # otherwise the run resumes from the end of the stage before, which is saved
            if self.done > 0:
                self.save(self.done)
            raise RunStopped(code)

    def end_batch(
        self,
        batch: int,
        metrics: Mapping[str, float],
        sampler: SamplingClient | None,
        rollouts: RolloutBatch | None = None,
        datums: Sequence[Datum] = (),
    ) -> None:
        """Log the batch, evaluate and save when due, and stop the run if a stop was requested."""
        done = batch + 1
        row = self.log.build_row(batch, self._batch_start, metrics, sampler, rollouts, datums)
        if rollouts is not None and self.context.opponents is not None:
            row |= self.context.opponents.update_after_batch(
                self.models.policy, rollouts, done, self.first_step + done
            )
        if self.profile is not None:
            self.profile.end_step(row, is_last=self.evaluates_after(batch))
        row |= self.evaluator.evaluate_after_batch(batch, sampler)
        warnings = self.log.check_alarms(row)
        self.done = done
        self._log(done, row)
        for text in warnings:
            self.console.warn(text)
        self.log.write_rollouts(batch, rollouts)
        self.stage_checkpoints.save_if_due(done, row)
        if self.report is not None and self.evaluates_after(batch):
            self.report.update()
        if self.stop_request.exit_code is not None:
            self.save(done)
            raise RunStopped(self.stop_request.exit_code)
        self._batch_start = time.perf_counter()
        if self._sampling_end is not None:
            self._rest_seconds = self._batch_start - self._sampling_end

    def end(self) -> None:
        """Save the stage's final state under its name."""
        self.save(self.done, final=True)
        if self.profile is not None and self.profile.table is not None:
            table = self.profile.table.replace("\n", "\n  ")
            self.console.note(f"profile of {self.name} (in {self.profile.folder}):\n  {table}")

    def _log(self, done: int, metrics: Mapping[str, float]) -> None:
        self.log.write_row(done, metrics)

    def save(self, done: int, *, final: bool = False) -> Path:
        """Save a resumable checkpoint: learner state and loop state. Return its path."""
        return self.stage_checkpoints.save(done, final=final)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the loop's state from what `save` wrote."""
        self.stage_checkpoints.load_state(state)
