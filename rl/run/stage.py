"""Provide what a training loop calls around its five steps, for one stage of a run.

Separate classes sample, log, evaluate and save.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.clients import SamplingClient
from rl.data import Curriculum, ProblemSet
from rl.environments import EnvironmentSpec
from rl.episodes import EnvGroupBuilder, Rollouts
from rl.methods import EvaluatesRows, Models, Progress
from rl.ranks import Stopped, StopRequest
from rl.renderers import Renderer
from rl.report import Console, Logbook
from rl.rewards import Scorer
from rl.run.batch_log import BatchLog
from rl.run.decisions import Decisions
from rl.run.evaluator import Evaluator
from rl.run.given import Given
from rl.run.held_out import HeldOut
from rl.run.keeper import Keeper
from rl.run.said import Said
from rl.run.samples import Samples
from rl.run.saves import Saves
from rl.run.self_test import PROBLEMS, self_test
from rl.seeds import derive_seed
from rl.types import Datum, Problem


class Stage:
    """Train a policy by a method.

    `first_step`: the run's step count before this stage; `done`: batches already trained;
    `identity`: what its checkpoints record of the run (see rl.run.identity); `proves_itself`: run
    the self-test first (see rl.run.self_test).
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
        keeper: Keeper,
        stop_request: StopRequest,
        identity: Mapping[str, Any] | None = None,
        environment: EnvironmentSpec | None = None,
        proves_itself: bool = False,
        replay: Path | None = None,
    ):
        self.name, self.first_step, self.done = name, first_step, done
        self.method, self.models, self.problems, self.renderer = method, models, problems, renderer
        self.logbook, self.console, self.stop_request = logbook, console, stop_request
        self.seed = derive_seed(seed, index)
        self.proves_itself = proves_itself
        flow = getattr(method.settings, "flow", None)
        continuous = flow is not None and flow.continuous and method.online
        context = Given(
            decisions=Decisions(logbook.folder, name, done, replay) if continuous else None,
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
            keeper=keeper,
            identity=identity or {},
            environment=environment,
        )
        self.given, self.settings, self.loop = context, context.settings, context.loop
        self.sampling_params, self.eval_params = context.sampling_params, context.eval_params
        warnings = Said(console)
        self.samples = Samples(context, warnings)
        self.evaluator = Evaluator(context, self.samples)
        self.log = BatchLog(context)
        self.saves = Saves(context, self.evaluator, warnings)
        self._clock = 0.0
        self._sampled_at: float | None = None
        # seconds from the samples to the end of a batch, including its save
        self._rest_seconds = 0.0

    def start(self) -> SamplingClient | None:
        """Return a sampler of the current policy; None if the stage never samples.

        At the beginning of the stage the policy is evaluated too.
        """
        self.console.stage(self.name, self.loop.steps, first=self.first_step, done=self.done)
        if self.done:
            self.log.resume()
        self.evaluator.begin()
        if self.given.opponents is not None:
            self.given.opponents.begin(self.models.policy, self.first_step)
        sampler = None
        if self.method.online or self.samples_held_out:
            sampler = self.models.policy.save_weights_and_get_sampling_client()
        if sampler is not None and self.method.online and self.proves_itself:
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
            metrics = self.evaluator.before(sampler)
            if metrics or self.samples_held_out:
                self._log(0, metrics)
        self._clock = time.perf_counter()
        return sampler

    def remark(self) -> str | None:
        """Return the method's remark on the rows that it learns from, if any."""
        first = self.problems.batch(
            0, min(256, self.loop.batch_size * max(1, self.loop.steps)), self.seed
        )
        return (
            self.method.remark(first, self.renderer)
            if isinstance(self.method, EvaluatesRows) and self.done == 0
            else None
        )

    def batches(self) -> Iterator[int]:
        yield from range(self.done, self.loop.steps)

    def progress(self, batch: int) -> Progress:
        return Progress(batch, self.loop.steps, self.seed)

    def groups(self, problems: Sequence[Problem], group_size: int) -> Sequence[EnvGroupBuilder]:
        return self.samples.groups(problems, group_size)

    def fill(self, rollouts: Rollouts, batch: int, sampler: SamplingClient) -> Rollouts:
        """Sample further problems until batch_size groups are mixed (dynamic sampling, see
        Samples.fill). Without dynamic sampling, return the same rollouts.
        """
        return self.samples.fill(rollouts, batch, sampler)

    def check(self, rollouts: Rollouts, sampler: SamplingClient) -> None:
        """End the run if every reward failed, or samples come from other weights (see
        Samples.check).
        """
        self.samples.check(rollouts, sampler.version)

    def next_sampler(
        self, old: SamplingClient | None, fresh: SamplingClient | None = None
    ) -> SamplingClient:
        """Release the old sampler and return a sampler of the new weights; `fresh`: that sampler,
        if it exists already.
        """
        if old is not None:
            old.release()
        return fresh or self.models.policy.save_weights_and_get_sampling_client()

    @property
    def samples_held_out(self) -> bool:
        """Return whether held-out answers are ever sampled, which requires something
        to score them.
        """
        return self.evaluator.samples_held_out

    @property
    def held_out(self) -> HeldOut:
        return self.evaluator.held_out

    def samples_at(self, batch: int) -> bool:
        """Return whether an evaluation is due after this batch."""
        return self.evaluator.is_due(batch)

    def stop_if_late(self) -> None:
        """Stop before the update if a stop was requested and the rest of the step would exceed the
        grace time.

        The rest of the step is estimated by its duration in the previous batch. A resumed run
        generates the same samples again. Raises Stopped.
        """
        self._sampled_at = time.perf_counter()
        code = self.stop_request.exit_code
        if code is not None and self.stop_request.late(self._rest_seconds):
            # otherwise the run resumes from the end of the stage before, which is saved
            if self.done > 0:
                self.save(self.done)
            raise Stopped(code)

    def end_batch(
        self,
        batch: int,
        metrics: Mapping[str, float],
        sampler: SamplingClient | None,
        rollouts: Rollouts | None = None,
        datums: Sequence[Datum] = (),
    ) -> None:
        """Log the batch, evaluate and save when due, and stop the run if a stop was requested."""
        done = batch + 1
        row = self.log.row(batch, self._clock, metrics, sampler, rollouts, datums)
        if rollouts is not None and self.given.opponents is not None:
            row |= self.given.opponents.after(
                self.models.policy, rollouts, done, self.first_step + done
            )
        row |= self.evaluator.after(batch, sampler)
        warnings = self.log.watch(row)
        self.done = done
        self._log(done, row)
        for text in warnings:
            self.console.warn(text)
        self.log.rollouts(batch, rollouts)
        self.saves.keep(done, row)
        if self.stop_request.exit_code is not None:
            self.save(done)
            raise Stopped(self.stop_request.exit_code)
        self._clock = time.perf_counter()
        if self._sampled_at is not None:
            self._rest_seconds = self._clock - self._sampled_at

    def end(self) -> None:
        """Save the stage's final state under its name."""
        self.save(self.done, last=True)

    def _log(self, done: int, metrics: Mapping[str, float]) -> None:
        self.log.write(done, metrics)

    def save(self, done: int, *, last: bool = False) -> Path:
        """Save a resumable checkpoint: learner state and loop state. Return its path."""
        return self.saves.save(done, last=last)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the loop's state from what `save` wrote."""
        self.saves.load_state(state)
