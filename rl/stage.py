"""One stage of a run: everything around the five steps of a loop (what to sample, what to log, evaluate and save)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rl.alarms import Alarms
from rl.console import Console
from rl.curriculum import Curriculum
from rl.data.problem_set import ProblemSet
from rl.environments import ProblemGroupBuilder
from rl.errors import UserError
from rl.held_out import HELD_OUT, HeldOut
from rl.interrupts import Stopped, StopRequest
from rl.keeper import Keeper
from rl.learned_rewards import judged
from rl.logbook import Logbook
from rl.methods.base import EvaluatesRows, Models, Progress
from rl.metrics import credited_share, group_metrics, sampled_metrics
from rl.renderers import Renderer
from rl.rewards import Scorer
from rl.rollout import Rollouts, is_mixed, rollout, rollout_rows
from rl.sampling_client import SamplingClient
from rl.seeds import derive_seed
from rl.types import Datum, Problem, SamplingParams

KEPT_OF_GREEDY = ("test/greedy/all/correct", "test/greedy/all/reward/total")


class EveryRewardFailed(UserError):
    """No sample of a batch could be scored: the reward is broken, and going on would train on nothing."""


class Stage:
    """A method at work on a policy. `first_step`: the run's step count before this stage; `done`: batches already trained."""

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
    ):
        self.name, self.index = name, index
        self.method, self.models, self.settings = method, models, method.settings
        self.problems, self.test_problems = problems, test_problems
        self.renderer, self.scorer = renderer, scorer
        self.seed = derive_seed(seed, index)
        self.first_step, self.done = first_step, done
        self.logbook, self.console, self.keeper, self.stop_request = logbook, console, keeper, stop_request
        self.loop = self.settings.loop
        sampling = self.settings.sampling
        self.sampling_params = SamplingParams(max_tokens=sampling.max_tokens, temperature=sampling.temperature)
        held_out = sampling.temperature if sampling.eval_temperature is None else sampling.eval_temperature
        self.eval_params = SamplingParams(max_tokens=sampling.max_tokens, temperature=held_out)
        self.held_out = HeldOut()
        self._alarms = Alarms()
        self._clock = 0.0
        self._sampled_at: float | None = None
        self._timed: SamplingClient | None = None  # whose weights' way to the sampler is logged already
        self._rest_seconds = 0.0  # from the samples to the end of a batch, its save included
        self._tokens = 0
        self._said: set[str] = set()

    # ------------------------------------------------------------------------------------------------ what a loop calls

    def start(self) -> SamplingClient | None:
        """A sampler of the policy as it is, evaluated if this is the stage's beginning; None where nothing is ever sampled."""
        self.console.stage(self.name, self.loop.steps, first=self.first_step, done=self.done)
        if self.done:
            self._alarms = Alarms([row for row in self.logbook.rows() if row["stage"] == self.name and "progress/batch" in row])
        self._clock = time.perf_counter()
        self._begin_rows()
        sampler = None
        if self.method.online or self.samples_held_out:
            sampler = self.models.policy.save_weights_and_get_sampling_client()
        if self.done == 0 and self.loop.eval_every:
            found = self.evaluate_rows()
            if sampler is not None:
                found |= {**self.evaluate(sampler), **self.evaluate_greedy(sampler)}
            if found or self.samples_held_out:
                self._log(0, found)
        self._clock = time.perf_counter()
        return sampler

    def batches(self) -> Iterator[int]:
        yield from range(self.done, self.loop.steps)

    def groups(self, problems: Sequence[Problem], group_size: int) -> list[ProblemGroupBuilder]:
        return [ProblemGroupBuilder(problem, group_size, self.renderer, self.scorer) for problem in problems]

    def progress(self, batch: int) -> Progress:
        return Progress(batch, self.loop.steps, self.seed)

    def check(self, rollouts: Rollouts, sampler: SamplingClient) -> None:
        """Names rewards that failed (each kind once); ends the run where none worked, or samples are of other weights."""
        if rollouts.errors:
            kind = rollouts.errors[0].split(" (prompt")[0]
            if kind not in self._said:
                self._said.add(kind)
                self.console.warn(f"{len(rollouts.errors)} samples were left out of this batch: {rollouts.errors[0]}")
        versions = {turn.ac.version for g in rollouts.groups for t in g.trajectories_G for turn in t.transitions}
        if versions - {sampler.version}:
            raise RuntimeError(f"samples of versions {sorted(map(str, versions))}, version {sampler.version} of the weights was expected")
        if not rollouts.groups:
            raise EveryRewardFailed(f"the reward failed on every sample of the batch: {rollouts.errors[0]}")

    def fill(self, rollouts: Rollouts, batch: int, sampler: SamplingClient) -> Rollouts:
        """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): further problems until batch_size groups are mixed, within a bound.

        Without it, the same rollouts. Groups without signal and those beyond batch_size are left out of training, not of metrics;
        of a batch without any mixed group the first batch_size are kept. Each round takes its problems in an order of its own.
        A round in which every reward failed is the last: more samples would only fail again (`check` says how, if nothing is left).
        """
        bound, wanted = self.settings.sampling.dynamic_sampling, self.loop.batch_size
        rounds, more = 0, rollouts
        while rounds < bound and more.groups and sum(map(is_mixed, rollouts.groups)) < wanted:
            rounds += 1
            problems = self.problems.batch(batch, wanted, derive_seed(self.seed, "extra", rounds))
            seed = derive_seed(self.seed, "sample", batch, rounds)
            more = rollout(self.groups(problems, self.method.group_size), sampler, self.sampling_params, seed=seed)
            more = judged(more, self.models.rewards)
            rollouts = rollouts.with_more(more)
        if not bound:
            return rollouts
        rollouts.counters["extra_rounds"] = rounds
        kept = ([group for group in rollouts.groups if is_mixed(group)] or rollouts.groups)[:wanted]
        chosen = {id(group) for group in kept}
        return replace(rollouts, groups=kept, left_out=[group for group in rollouts.groups if id(group) not in chosen])

    @property
    def samples_held_out(self) -> bool:
        """Whether answers to held-out problems are ever sampled: where something scores them."""
        judge = self.models.rewards
        return (self.scorer is not None or (judge is not None and judge.scores_alone)) and bool(self.loop.eval_every)

    def samples_at(self, batch: int) -> bool:
        """Whether held-out problems are looked at after this batch."""
        every = self.loop.eval_every
        return bool(every) and ((batch + 1) % every == 0 or batch + 1 == self.loop.steps)

    def stop_if_late(self) -> None:
        """Stops before the update where a stop was asked for and the rest of the step would outlast the grace time.

        The rest is taken to need what it needed in the batch before. A resumed run draws the same samples again.
        """
        self._sampled_at = time.perf_counter()
        code = self.stop_request.exit_code
        if code is not None and self.stop_request.late(self._rest_seconds):
            if self.done > 0:  # else the end of the stage before is where to go on, and is saved
                self.save(self.done)
            raise Stopped(code)

    def next_sampler(self, old: SamplingClient | None) -> SamplingClient:
        """The new weights, in the old sampler's place."""
        if old is not None:
            old.release()
        return self.models.policy.save_weights_and_get_sampling_client()

    def end_batch(
        self,
        batch: int,
        metrics: Mapping[str, float],
        sampler: SamplingClient | None,
        rollouts: Rollouts | None = None,
        datums: Sequence[Datum] = (),
    ) -> None:
        """Logs the batch, evaluates and saves where it is time, and stops the run if somebody asked for that."""
        done = batch + 1
        sync = {} if sampler is None or sampler is self._timed else {"time/sync": sampler.sync_seconds}
        self._timed = sampler
        seconds = time.perf_counter() - self._clock
        row: dict[str, float] = {"progress/batch": batch, "progress/done_frac": done / self.loop.steps, **metrics, **sync}
        row["progress/epoch"] = self.problems.epoch(done, self.loop.batch_size)
        row["time/step"] = seconds
        tokens = row.get("optim/tokens", 0.0)
        if rollouts is not None:
            row |= self._sampling_metrics(rollouts, datums)
            row["reward/total"] = row["env/all/reward/total"]
            row["reward/failed"] = len(rollouts.errors)
            row["time/sample"], row["time/score"] = rollouts.sample_seconds, rollouts.score_seconds
            row.update({f"sampler/{name}": count for name, count in rollouts.counters.items()})
            tokens = rollouts.counters["emitted_tokens"]
        if self.scorer is None and self.models.rewards is None:  # what was not scored has no reward, not one of 0
            row = {name: value for name, value in row.items() if not any(part in name for part in ("reward/", "by_group/"))}
        row["time/tokens_per_second"] = tokens / max(seconds, 1e-9)
        if self.samples_at(batch):
            row.update(self.evaluate_rows())
        if sampler is not None and self.samples_at(batch):
            row.update(self.evaluate(sampler))
            if done == self.loop.steps:
                row.update(self.evaluate_greedy(sampler))
        said = self._watch(row)
        self.done = done
        self._log(done, row)
        for text in said:
            self.console.warn(text)
        if rollouts is not None and self.loop.rollouts_every and (batch % self.loop.rollouts_every == 0):
            self.logbook.rollouts(self.first_step + done, rollout_rows(rollouts, self.renderer, self.sampling_params.temperature))
        self._keep(done, row)
        if self.stop_request.exit_code is not None:
            self.save(done)
            raise Stopped(self.stop_request.exit_code)
        self._clock = time.perf_counter()
        if self._sampled_at is not None:
            self._rest_seconds = self._clock - self._sampled_at

    def _sampling_metrics(self, rollouts: Rollouts, datums: Sequence[Datum]) -> dict[str, float]:
        found = {**sampled_metrics(rollouts.sampled), "optim/frac_credited": credited_share(rollouts.sampled, datums)}
        return {**found, "sampler/temperature": self.sampling_params.temperature}

    def _watch(self, row: dict[str, float]) -> list[str]:
        """Tells the curriculum of a batch's success, and the alarms of everything; returns what there is to say."""
        if isinstance(self.problems, Curriculum):
            row.update(self.problems.metrics())
            self.problems.learn(row.get("env/all/correct", row.get("env/all/reward/total", 0.0)))
        metrics, said = self._alarms(row)
        row.update(metrics)
        return said

    def end(self) -> None:
        """The stage's last state, saved under its name."""
        self.save(self.done, last=True)

    # -------------------------------------------------------------------------------------------------------- the parts

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `save` wrote of the loop."""
        self.method.load_state(state["method"])
        self.held_out = HeldOut(**state["held_out"])
        if isinstance(self.problems, Curriculum):
            self.problems.load_state(state["curriculum"])

    def evaluate(self, sampler: SamplingClient) -> dict[str, float]:
        """`test/env/...` on the held-out problems, one sample each, always with the same random streams."""
        if self.test_problems is None or not self.samples_held_out:
            return {}
        start = time.perf_counter()
        builders = self.groups(list(self.test_problems), 1)
        result = rollout(builders, sampler, self.eval_params, seed=derive_seed(self.seed, "test"))
        result = judged(result, self.models.rewards, alone=True)
        self.check(result, sampler)
        metrics = group_metrics(result.groups, "test/env")
        metrics["time/test"] = time.perf_counter() - start
        accuracy, held_out = self._headline(metrics, "test/env/all"), self.held_out
        held_out.before, held_out.after = (accuracy if held_out.before is None else held_out.before), accuracy
        return metrics

    def _begin_rows(self) -> None:
        if isinstance(self.method, EvaluatesRows):
            batches = (self.problems.batch(i, self.loop.batch_size, self.seed) for i in range(self.loop.steps))
            held_out = self.test_problems if self.test_problems is not None else ()
            self.method.begin(chain(chain.from_iterable(batches), held_out), self.renderer, self.models)

    def evaluate_rows(self) -> dict[str, float]:
        """What the method itself measures on held-out rows."""
        if self.test_problems is None or not isinstance(self.method, EvaluatesRows):
            return {}
        start = time.perf_counter()
        metrics = self.method.evaluate(list(self.test_problems), self.renderer, self.models)
        metrics["time/test_rows"] = time.perf_counter() - start
        self.held_out.note_rows(self.method.headline, metrics[self.method.headline])
        return metrics

    def _headline(self, metrics: Mapping[str, float], name: str) -> float | None:
        """Accuracy where the reward tells what is correct, else the reward itself."""
        self.held_out.what = "accuracy" if f"{name}/correct" in metrics else "reward"
        return metrics.get(f"{name}/correct", metrics.get(f"{name}/reward/total"))

    def evaluate_greedy(self, sampler: SamplingClient) -> dict[str, float]:
        """`test/greedy/...`: the likeliest answer to each held-out problem, where sampling does not give it anyway."""
        if self.test_problems is None or not self.samples_held_out:
            return {}
        if not self.settings.sampling.eval_greedy or self.eval_params.temperature == 0:
            return {}
        builders = self.groups(list(self.test_problems), 1)
        result = judged(rollout(builders, sampler, replace(self.eval_params, temperature=0.0), seed=0), self.models.rewards, alone=True)
        metrics = {k: v for k, v in group_metrics(result.groups, "test/greedy").items() if k.startswith(KEPT_OF_GREEDY)}
        accuracy, held_out = self._headline(metrics, "test/greedy/all"), self.held_out
        held_out.greedy_before = accuracy if held_out.greedy_before is None else held_out.greedy_before
        held_out.greedy_after = accuracy
        return metrics

    def _log(self, done: int, metrics: Mapping[str, float]) -> None:
        step = self.first_step + done
        self.logbook.log(step, {"stage": self.name, **metrics})
        self.console.update(step, metrics)

    def _keep(self, done: int, row: Mapping[str, float]) -> None:
        if self.loop.save_every and done % self.loop.save_every == 0 and done < self.loop.steps:
            self.save(done)
        best = self.loop.keep_best
        if best == HELD_OUT and best not in row:
            best = "test/env/all/reward/total"  # a reward that does not tell what is correct
        looks = self.samples_held_out or isinstance(self.method, EvaluatesRows)
        if looks and best is not None and best not in row and self.samples_at(done - 1) and best not in self._said:
            self._said.add(best)
            self.console.warn(f"keep_best asks for {best}, which this run does not measure: no best weights are kept")
        if best is not None and best in row:
            head, mode = isinstance(self.method, EvaluatesRows) and self.method.keeps_value_head, self.loop.keep_best_mode
            self.keeper.best(self.models.policy, self.first_step + done, self.name, best, row[best], mode=mode, value_head=head)

    def save(self, done: int, *, last: bool = False) -> Path:
        """A resumable checkpoint: the learner's state, and where this loop stands."""
        state = {
            "stage": self.index,
            "next_batch": done,
            "first_step": self.first_step,
            "method": self.method.state(),
            "held_out": asdict(self.held_out),
            "curriculum": self.problems.state() if isinstance(self.problems, Curriculum) else None,
        }
        return self.keeper.save(
            self.models.policy,
            self.first_step + done,
            self.name,
            state,
            keep_last=self.loop.keep_last,
            last=last,
            beside=self.models.learning,
        )
