"""What a stage evaluates: held-out problems, sampled, answered greedily, or measured by the method
itself.
"""

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
    """Evaluates when it is time. `held_out`: the figures that sum the stage up."""

    def __init__(self, given: Given, samples: Samples):
        self.given, self.samples = given, samples
        self.held_out = HeldOut()

    @property
    def samples_held_out(self) -> bool:
        """Whether answers to held-out problems are ever sampled: where something scores them."""
        judge = self.given.models.rewards
        return (self.given.rewarded or (judge is not None and judge.scores_alone)) and bool(
            self.given.loop.eval_every
        )

    @property
    def measures(self) -> bool:
        """Whether anything is ever measured on held-out problems."""
        return self.samples_held_out or isinstance(self.given.method, EvaluatesRows)

    def is_due(self, batch: int) -> bool:
        """Whether held-out problems are looked at after this batch."""
        every = self.given.loop.eval_every
        return bool(every) and ((batch + 1) % every == 0 or batch + 1 == self.given.loop.steps)

    def begin(self) -> None:
        """Shows the method that measures rows every one that the stage trains on or evaluates."""
        given = self.given
        if isinstance(given.method, EvaluatesRows):
            batches = (
                given.problems.batch(i, given.loop.batch_size, given.seed)
                for i in range(given.loop.steps)
            )
            held_out = given.test_problems if given.test_problems is not None else ()
            given.method.begin(
                chain(chain.from_iterable(batches), held_out), given.renderer, given.models
            )

    def before(self, sampler: SamplingClient | None) -> dict[str, float]:
        """What there is to measure before the first step."""
        found = self.rows()
        if sampler is not None:
            found |= {**self.sampled(sampler), **self.greedy(sampler)}
        return found

    def after(self, batch: int, sampler: SamplingClient | None) -> dict[str, float]:
        """What there is to measure after this batch, if it is time; greedy answers after the last
        alone.
        """
        if not self.is_due(batch):
            return {}
        found = self.rows()
        if sampler is not None:
            found |= self.sampled(sampler)
            if batch + 1 == self.given.loop.steps:
                found |= self.greedy(sampler)
        return found

    def rows(self) -> dict[str, float]:
        """What the method itself measures on held-out rows."""
        given = self.given
        if given.test_problems is None or not isinstance(given.method, EvaluatesRows):
            return {}
        start = time.perf_counter()
        metrics = given.method.evaluate(list(given.test_problems), given.renderer, given.models)
        # of the held-out rows none has what would be measured
        if given.method.headline not in metrics:
            return {}
        metrics["time/test_rows"] = time.perf_counter() - start
        self.held_out.note_rows(given.method.headline, metrics)
        return metrics

    def sampled(self, sampler: SamplingClient) -> dict[str, float]:
        """`test/env/...` on the held-out problems, one sample each, always with the same random
        streams.
        """
        given = self.given
        if given.test_problems is None or not self.samples_held_out:
            return {}
        start = time.perf_counter()
        builders = self.samples.groups(list(given.test_problems), 1)
        seed, players = derive_seed(given.seed, "test"), self.samples.held_out_players()
        result = rollout(builders, sampler, given.eval_params, seed=seed, players=players)
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
        """`test/greedy/...`: the likeliest answer to each held-out problem, where sampling does not
        give it anyway.
        """
        given = self.given
        if given.test_problems is None or not self.samples_held_out:
            return {}
        if not given.settings.sampling.eval_greedy or given.eval_params.temperature == 0:
            return {}
        builders = self.samples.groups(list(given.test_problems), 1)
        players, params = (
            self.samples.held_out_players(),
            replace(given.eval_params, temperature=0.0),
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
        """What rewards took here is no part of the next batch's."""
        for scores in (self.given.scorer, self.given.models.rewards):
            if scores is not None:
                scores.take_seconds()

    def _headline(self, metrics: Mapping[str, float], name: str) -> float | None:
        """Accuracy where the reward tells what is correct, else the reward itself."""
        self.held_out.what = "accuracy" if f"{name}/correct" in metrics else "reward"
        return metrics.get(f"{name}/correct", metrics.get(f"{name}/reward/total"))
