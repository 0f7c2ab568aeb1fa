"""Train a policy by a method in one stage of a run.

The training loop calls the trainer before the first batch, after each batch, and at the end.
Separate classes sample, log, evaluate, and write checkpoints, whose time and state the trainer
chooses. A loss that is not finite ends the run with advice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from rl.algorithms import Progress, RowEvaluator
from rl.client import SamplingClient
from rl.data import Curriculum
from rl.distributed import RunStopped, StopRequest
from rl.errors import UserError
from rl.jsonl import replace_nonfinite
from rl.rollout import RolloutBatch
from rl.trainer.batch_log import BatchLog
from rl.trainer.evaluator import HELD_OUT_ACCURACY, Evaluator
from rl.trainer.run_report import ReportWriter
from rl.trainer.self_test import PROBLEMS, self_test
from rl.trainer.stage_sampling import StageContext, StageSampler, WarnOnce
from rl.trainer.step_profile import StepProfile
from rl.types import Datum


@dataclass
class TrainingBatch:
    """Hold batch `number` of a stage: its samples, if it samples, and the datums trained on."""

    number: int
    rollouts: RolloutBatch | None = None
    datums: Sequence[Datum] = ()


@dataclass(kw_only=True, eq=False)
class Trainer(StageContext):
    """Train the policy of a stage by a method.

    `done`: batches already trained; `runs_self_test`: run the self-test first (see
    rl.trainer.self_test); `profiled_steps`: steps to profile (see rl.trainer.step_profile).
    """

    stop_request: StopRequest
    done: int = 0
    report: ReportWriter | None = None
    runs_self_test: bool = False
    profiled_steps: int = 0

    def __post_init__(self) -> None:
        self.profile = (
            StepProfile(self.logbook.folder / "profile", self.name, self.profiled_steps)
            if self.profiled_steps
            else None
        )
        self._warn_once = WarnOnce(self.console)
        self.stage_sampler = StageSampler(self, self._warn_once)
        self.evaluator = Evaluator(self, self.stage_sampler)
        self.log = BatchLog(self)
        # state of unfinished episodes, if sampling is continuous
        self.get_engine_state: Callable[[], dict[str, Any]] | None = None
        # a checkpoint's state of unfinished episodes
        self.in_flight: Mapping[str, Any] | None = None
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
        if self.opponents is not None:
            self.opponents.add_initial_version(self.models.policy, self.first_step)
        sampler = None
        if self.method.online or self.evaluator.samples_held_out:
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
                    advises_correction=_has_unused_correction(self.method.settings),
                )
            )
        if self.done == 0 and self.loop.eval_every:
            metrics = self.evaluator.evaluate(0, sampler)
            if metrics or self.evaluator.samples_held_out:
                self.log.write_row(0, metrics)
                if self.report is not None:
                    self.report.update()
        self._batch_start = time.perf_counter()
        return sampler

    def batches(self) -> Iterator[int]:
        batches = range(self.done, self.loop.steps)
        for batch in batches if self.profile is None else self.profile.iter_batches(batches):
            self.log.begin_update(batch)
            yield batch

    def progress(self, batch: int) -> Progress:
        return Progress(batch, self.loop.steps, self.seed)

    def next_sampler(
        self, old_sampler: SamplingClient | None, new_sampler: SamplingClient | None = None
    ) -> SamplingClient:
        """Release the old sampler and return a sampler of the new weights; `new_sampler`: that
        sampler, if it exists already.
        """
        if old_sampler is not None:
            old_sampler.release()
        return new_sampler or self.models.policy.save_weights_and_get_sampling_client()

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
        batch: TrainingBatch,
        metrics: Mapping[str, float],
        sampler: SamplingClient | None,
    ) -> None:
        """Log the batch, evaluate and save when due, and stop the run if a stop was requested.

        An evaluation is skipped if a stop was requested and it would take longer than the grace
        time, as far as is known from the last one. That of the last step is never skipped.
        """
        number, rollouts, done = batch.number, batch.rollouts, batch.number + 1
        is_due = self.evaluator.is_due(number)
        is_late = self.stop_request.exceeds_grace(self.evaluator.seconds)
        is_evaluated = is_due and (done == self.loop.steps or not is_late)
        metrics = {**self.method.shaping_metrics, **read_update_metrics(self.method, metrics)}
        row = self.log.build_row(
            number, self._batch_start, metrics, sampler, rollouts, batch.datums
        )
        opponents = self.opponents
        if rollouts is not None and opponents is not None:
            opponents.record_results(rollouts)
        if self.profile is not None:
            self.profile.end_step(is_evaluated=is_evaluated)
        if is_evaluated:
            row |= self.evaluator.evaluate(done, sampler)
        elif is_due:
            self.console.note(f"no evaluation after step {done}: it may exceed stop_grace")
        if rollouts is not None and opponents is not None:
            row |= opponents.update_pool(self.models.policy, done, self.first_step + done)
        warnings = self.log.check_alarms(row)
        self.done = done
        self.log.write_row(done, row)
        for text in warnings:
            self.console.warn(text)
        self.log.write_rollouts(number, rollouts)
        self._save_if_due(done, row, is_evaluated)
        if self.report is not None and is_evaluated:
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

    def is_save_due(self, done: int) -> bool:
        """Return whether a checkpoint is due after `done` batches. The end of the stage always has
        a checkpoint, whatever save_every is.
        """
        loop = self.loop
        return done == loop.steps or bool(loop.save_every and done % loop.save_every == 0)

    def _save_if_due(self, done: int, row: Mapping[str, float], is_evaluated: bool) -> None:
        """Save after `done` batches: the best weights if these are the best, and a checkpoint if it
        is due.
        """
        loop, method = self.loop, self.method
        best, samples = loop.keep_best, self.evaluator.samples_held_out
        reads_rows = isinstance(method, RowEvaluator)
        if best == HELD_OUT_ACCURACY and best not in row:
            # a reward without a "correct" metric
            best = method.headline if reads_rows and not samples else "test/env/all/reward/total"
        if best is not None and row.get(best) is not None:
            self.checkpoints.save_best(
                self.models.policy,
                self.first_step + done,
                self.name,
                best,
                float(row[best]),
                mode=loop.get_best_mode(best),
                value_head=reads_rows and method.keeps_value_head,
            )
        elif best is not None and best not in row and is_evaluated and (samples or reads_rows):
            self._warn_once.warn(
                best,
                f"keep_best asks for {best}, which this run does not measure: no best weights "
                "are saved",
            )
        # saved after the best weights, so that a resumed run has them
        if done < loop.steps and self.is_save_due(done):
            self.save(done)

    def save(self, done: int, *, final: bool = False) -> Path:
        """Save a resumable checkpoint: learner state and loop state. Return its path."""
        problems = self.problems
        state: dict[str, Any] = {
            "stage": self.index,
            "next_batch": done,
            "first_step": self.first_step,
            "method": self.method.state(),
            "curriculum": problems.state() if isinstance(problems, Curriculum) else None,
            "opponents": None if self.opponents is None else self.opponents.state(),
            "run": dict(self.identity),
        }
        if self.get_engine_state is not None:
            state["in_flight"] = replace_nonfinite(self.get_engine_state())
        path = self.checkpoints.save(
            self.models.policy,
            self.first_step + done,
            self.name,
            state,
            keep_last=self.loop.keep_last,
            final=final,
            other_clients=self.models.trainable,
        )
        if self.opponents is not None:
            self.opponents.prune()
        return path

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the loop's state from what `save` wrote."""
        self.method.load_state(state["method"])
        self.in_flight = state.get("in_flight")
        # None: the run continues with a curriculum that it did not have before
        if isinstance(self.problems, Curriculum) and state["curriculum"] is not None:
            self.problems.load_state(state["curriculum"])
        if self.opponents is not None:
            self.opponents.load_state(state.get("opponents"))


def _has_unused_correction(settings: Any) -> bool:
    """Return whether a method has a correction of importance weights that is not set."""
    correction = getattr(settings, "correction", None)
    truncated = getattr(getattr(settings, "policy_gradient", None), "truncated_is", None)
    return correction is not None and correction.correction == "none" and truncated is None


def read_update_metrics(method: object, metrics: Any) -> dict[str, Any]:
    """Return the metrics that the update of a method returned, with arrays as their number. Raises
    UserError unless they map names to numbers; "step" and "stage" are names of the logbook.
    """
    wrong: Any = type(metrics).__name__
    if isinstance(metrics, Mapping):
        wrong = {k: v for k, v in metrics.items() if not _is_number(v) or k in ("step", "stage")}
    if wrong:
        raise UserError(
            f"{type(method).__name__}.update returned {wrong!s:.300}; expected a dict of metrics "
            "with a number for each name other than step and stage, such as "
            "{'optim/grad_norm': 0.5}"
        )
    return {k: v.item() if getattr(v, "shape", ()) else v for k, v in metrics.items()}


def _is_number(value: Any) -> bool:
    """Return whether a metric is a number, an array or tensor of a single number, or None (not
    measured, logged as null).
    """
    if not isinstance(value, SupportsFloat):
        return value is None
    return math.prod(getattr(value, "shape", ())) == 1


def describe_nonfinite(trainer: Trainer, problem: object) -> str:
    """Return stage, step and remedy of a loss or of logits that are NaN or infinite: continuing
    would destroy the weights, or train on nothing.
    """
    complete = [row for row in trainer.checkpoints.rows if row.get("state_path")]
    where = (
        f"step {trainer.done + 1} of {trainer.loop.steps} of stage {trainer.name} (step "
        f"{trainer.first_step + trainer.done + 1} of the run)"
    )
    advice = "No checkpoint was written yet: start again"
    if complete:
        advice = (
            f"The checkpoints are unchanged, the newest is {complete[-1]['name']}: --resume "
            "continues from it and meets the same batch again; add --change learning_rate=X to "
            "continue with another learning rate"
        )
    return (
        f"{where}: {problem}. {advice}. Lower learning_rate (here "
        f"{trainer.settings.learning_rate:g}), add warmup_steps, keep grad_clip_norm at 1 or "
        "below, or train in precision fp32"
    )
