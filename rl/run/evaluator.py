"""Evaluate a stage on held-out problems: sampled, greedy, or measured by the method itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from rl.clients import SamplingClient
from rl.episodes import group_metrics, rollout
from rl.methods import EvaluatesRows
from rl.run.given import Given
from rl.run.held_out import HeldOut
from rl.run.samples import Samples
from rl.seeds import derive_seed

KEPT_OF_GREEDY = ("test/greedy/all/correct", "test/greedy/all/reward/total")


class Evaluator:
    """Evaluate a stage at its intervals. `held_out` sums up the stage's held-out metrics."""

    def __init__(self, given: Given, samples: Samples):
        self.given, self.samples = given, samples
        self.held_out = HeldOut()

    @property
    def samples_held_out(self) -> bool:
        """Return whether held-out problems are sampled: they are evaluated and can be scored."""
        reward_model = self.given.models.rewards
        return (
            self.given.rewarded or (reward_model is not None and reward_model.scores_alone)
        ) and bool(self.given.loop.eval_every)

    @property
    def measures(self) -> bool:
        """Return whether the stage measures anything on held-out problems."""
        return self.samples_held_out or isinstance(self.given.method, EvaluatesRows)

    def is_due(self, batch: int) -> bool:
        """Return whether held-out problems are evaluated after this batch."""
        every = self.given.loop.eval_every
        return bool(every) and ((batch + 1) % every == 0 or batch + 1 == self.given.loop.steps)

    def begin(self) -> None:
        """Pass all training and held-out rows to a method that measures rows."""
        context = self.given
        if isinstance(context.method, EvaluatesRows):
            batches = (
                context.problems.batch(i, context.loop.batch_size, context.seed)
                for i in range(context.loop.steps)
            )
            held_out = context.test_problems if context.test_problems is not None else ()
            context.method.begin(
                chain(chain.from_iterable(batches), held_out), context.renderer, context.models
            )

    def before(self, sampler: SamplingClient | None) -> dict[str, float]:
        """Return the held-out metrics before the first step."""
        metrics = self.rows()
        if sampler is not None:
            metrics |= {**self.sampled(sampler), **self.greedy(sampler)}
        return metrics

    def after(self, batch: int, sampler: SamplingClient | None) -> dict[str, float]:
        """Return the held-out metrics after a batch, {} if none are due.

        Greedy responses are measured only after the last batch.
        """
        if not self.is_due(batch):
            return {}
        metrics = self.rows()
        if sampler is not None:
            metrics |= self.sampled(sampler)
            if batch + 1 == self.given.loop.steps:
                metrics |= self.greedy(sampler)
        return metrics

    def rows(self) -> dict[str, float]:
        """Return the metrics that the method itself measures on held-out rows."""
        context = self.given
        if context.test_problems is None or not isinstance(context.method, EvaluatesRows):
            return {}
        start = time.perf_counter()
        metrics = context.method.evaluate(
            list(context.test_problems), context.renderer, context.models
        )
        # no held-out row has the field that would be measured
        if context.method.headline not in metrics:
            return {}
        metrics["time/test_rows"] = time.perf_counter() - start
        self.held_out.note_rows(context.method.headline, metrics)
        return metrics

    def sampled(self, sampler: SamplingClient) -> dict[str, float]:
        """Return `test/env/...`: a sample of each held-out problem, always with the same seeds."""
        context = self.given
        if context.test_problems is None or not self.samples_held_out:
            return {}
        start = time.perf_counter()
        builders = self.samples.groups(list(context.test_problems), 1)
        seed, players = derive_seed(context.seed, "test"), self.samples.held_out_players()
        result = rollout(builders, sampler, context.eval_params, seed=seed, players=players)
        result = self.samples.judged(result, alone=True)
        self._forget_seconds()
        self.samples.check(result, sampler.version)
        metrics = group_metrics(result.groups, "test/env")
        metrics["time/test"] = time.perf_counter() - start
        accuracy, held_out = self._headline(metrics, "test/env/all"), self.held_out
        held_out.before, held_out.after = (
            (accuracy if held_out.before is None else held_out.before),
            accuracy,
        )
        return metrics

    def greedy(self, sampler: SamplingClient) -> dict[str, float]:
        """Return `test/greedy/...`: the greedy response to each held-out problem.

        {} if evaluation samples at temperature 0 anyway, or if `eval_greedy` is off.
        """
        context = self.given
        if context.test_problems is None or not self.samples_held_out:
            return {}
        if not context.settings.sampling.eval_greedy or context.eval_params.temperature == 0:
            return {}
        builders = self.samples.groups(list(context.test_problems), 1)
        players, params = (
            self.samples.held_out_players(),
            replace(context.eval_params, temperature=0.0),
        )
        result = rollout(builders, sampler, params, seed=0, players=players)
        result = self.samples.judged(result, alone=True)
        self._forget_seconds()
        metrics = {
            k: v
            for k, v in group_metrics(result.groups, "test/greedy").items()
            if k.startswith(KEPT_OF_GREEDY)
        }
        accuracy, held_out = self._headline(metrics, "test/greedy/all"), self.held_out
        held_out.greedy_before = (
            accuracy if held_out.greedy_before is None else held_out.greedy_before
        )
        held_out.greedy_after = accuracy
        return metrics

    def _forget_seconds(self) -> None:
        """Reset the reward timers, so that evaluation does not count towards the next batch."""
        for scores in (self.given.scorer, self.given.models.rewards):
            if scores is not None:
                scores.take_seconds()

    def _headline(self, metrics: Mapping[str, float], name: str) -> float | None:
        """Return the accuracy if the reward reports correctness, else the mean reward."""
        self.held_out.what = "accuracy" if f"{name}/correct" in metrics else "reward"
        return metrics.get(f"{name}/correct", metrics.get(f"{name}/reward/total"))
