"""One stage of a run: what a loop calls around its five steps. Its parts say what is sampled,
logged, evaluated and saved.
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
    """A method at work on a policy. `first_step`: the run's step count before this stage; `done`:
    batches already trained.

    `identity`: what its checkpoints note of the run (see rl.run.identity). `proves_itself`: see
    rl.run.self_test.
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
        given = Given(
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
        self.given, self.settings, self.loop = given, given.settings, given.loop
        self.sampling_params, self.eval_params = given.sampling_params, given.eval_params
        said = Said(console)
        self.samples = Samples(given, said)
        self.evaluator = Evaluator(given, self.samples)
        self.log = BatchLog(given)
        self.saves = Saves(given, self.evaluator, said)
        self._clock = 0.0
        self._sampled_at: float | None = None
        self._rest_seconds = 0.0  # from the samples to the end of a batch, its save included

    def start(self) -> SamplingClient | None:
        """A sampler of the policy as it is, evaluated if this is the stage's beginning; None where
        nothing is ever sampled.
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
            few = [
                problem.messages for problem in self.problems.batch(self.done, PROBLEMS, self.seed)
            ]
            self.console.note(
                self_test(
                    self.models.policy, sampler, few, self.renderer, self.sampling_params, self.seed
                )
            )
        if self.done == 0 and self.loop.eval_every:
            found = self.evaluator.before(sampler)
            if found or self.samples_held_out:
                self._log(0, found)
        self._clock = time.perf_counter()
        return sampler

    def remark(self) -> str | None:
        """What the method has to say of the rows that it learns from."""
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

    # -------------------------------------------------------------------------------------- samples

    def groups(self, problems: Sequence[Problem], group_size: int) -> Sequence[EnvGroupBuilder]:
        return self.samples.groups(problems, group_size)

    def fill(self, rollouts: Rollouts, batch: int, sampler: SamplingClient) -> Rollouts:
        """Dynamic sampling: further problems until batch_size groups are mixed (see Samples.fill).
        Without it, the same rollouts.
        """
        return self.samples.fill(rollouts, batch, sampler)

    def check(self, rollouts: Rollouts, sampler: SamplingClient) -> None:
        """Ends the run where every reward failed, or samples are of other weights (see
        Samples.check).
        """
        self.samples.check(rollouts, sampler.version)

    def next_sampler(
        self, old: SamplingClient | None, fresh: SamplingClient | None = None
    ) -> SamplingClient:
        """The new weights, in the old sampler's place; `fresh`: where they are there already."""
        if old is not None:
            old.release()
        return fresh or self.models.policy.save_weights_and_get_sampling_client()

    # ---------------------------------------------------------------------------- held-out problems

    @property
    def samples_held_out(self) -> bool:
        """Whether answers to held-out problems are ever sampled: where something scores them."""
        return self.evaluator.samples_held_out

    @property
    def held_out(self) -> HeldOut:
        return self.evaluator.held_out

    def samples_at(self, batch: int) -> bool:
        """Whether held-out problems are looked at after this batch."""
        return self.evaluator.is_due(batch)

    # --------------------------------------------------------------------------- ends, and stopping

    def stop_if_late(self) -> None:
        """Stops before the update where a stop was asked for and the rest of the step would outlast
        the grace time.

        The rest is taken to need what it needed in the batch before. A resumed run draws the same
        samples again.
        """
        self._sampled_at = time.perf_counter()
        code = self.stop_request.exit_code
        if code is not None and self.stop_request.late(self._rest_seconds):
            if self.done > 0:  # else the end of the stage before is where to go on, and is saved
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
        """Logs the batch, evaluates and saves where it is time, and stops the run if somebody asked
        for that.
        """
        done = batch + 1
        row = self.log.row(batch, self._clock, metrics, sampler, rollouts, datums)
        if rollouts is not None and self.given.opponents is not None:
            row |= self.given.opponents.after(
                self.models.policy, rollouts, done, self.first_step + done
            )
        row |= self.evaluator.after(batch, sampler)
        said = self.log.watch(row)
        self.done = done
        self._log(done, row)
        for text in said:
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
        """The stage's last state, saved under its name."""
        self.save(self.done, last=True)

    # ---------------------------------------------------------------------------- metrics and state

    def _log(self, done: int, metrics: Mapping[str, float]) -> None:
        self.log.write(done, metrics)

    def save(self, done: int, *, last: bool = False) -> Path:
        """A resumable checkpoint: the learner's state, and where this loop stands."""
        return self.saves.save(done, last=last)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `save` wrote of the loop."""
        self.saves.load_state(state)
