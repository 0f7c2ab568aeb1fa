"""Evaluate a stage on held-out problems: sampled, greedy, or measured by the method itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from rl.algorithms import RowEvaluator
from rl.client import SamplingClient
from rl.rollout import RolloutBatch, build_rollout_rows, compute_group_metrics
from rl.seed import derive_seed
from rl.trainer.held_out_metrics import HeldOutMetrics
from rl.trainer.stage_context import StageContext
from rl.trainer.stage_sampling import StageSampler

GREEDY_METRICS = ("test/greedy/all/correct", "test/greedy/all/reward/total")


class Evaluator:
    """Evaluate a stage at its intervals. `held_out` sums up the stage's held-out metrics."""

    def __init__(self, context: StageContext, samples: StageSampler):
        self.context, self.samples = context, samples
        self.held_out = HeldOutMetrics()
        # the answers of the current evaluation, and whether they are greedy
        self._answers: list[tuple[RolloutBatch, bool]] = []
        self._phase = "before"  # of the evaluation: before the first batch, or after a batch

    @property
    def samples_held_out(self) -> bool:
        """Return whether held-out problems are sampled: they are evaluated and can be scored."""
        reward_model = self.context.models.rewards
        return (
            self.context.has_rewards
            or (reward_model is not None and reward_model.scores_single_answers)
        ) and bool(self.context.loop.eval_every)

    @property
    def measures_held_out(self) -> bool:
        """Return whether the stage measures anything on held-out problems."""
        return self.samples_held_out or isinstance(self.context.method, RowEvaluator)

    def is_due(self, batch: int) -> bool:
        """Return whether held-out problems are evaluated after this batch."""
        every = self.context.loop.eval_every
        return bool(every) and ((batch + 1) % every == 0 or batch + 1 == self.context.loop.steps)

    def prepare_method(self) -> None:
        """Pass all training and held-out rows to a method that measures rows."""
        context = self.context
        if isinstance(context.method, RowEvaluator):
            batches = (
                context.problems.batch(i, context.loop.batch_size, context.seed)
                for i in range(context.loop.steps)
            )
            held_out = context.test_problems if context.test_problems is not None else ()
            context.method.begin(
                chain(chain.from_iterable(batches), held_out), context.renderer, context.models
            )

    def evaluate_before_training(self, sampler: SamplingClient | None) -> dict[str, float]:
        """Return the held-out metrics before the first step."""
        self._phase = "before"
        metrics = self.evaluate_rows()
        if sampler is not None:
            metrics |= {**self.evaluate_sampled(sampler), **self.evaluate_greedy(sampler)}
        self._write_answers(0, metrics)
        return metrics

    def evaluate_after_batch(self, batch: int, sampler: SamplingClient | None) -> dict[str, float]:
        """Return the held-out metrics after a batch, {} if none are due.

        Greedy responses are measured only after the last batch.
        """
        if not self.is_due(batch):
            return {}
        self._phase = "after"
        metrics = self.evaluate_rows()
        if sampler is not None:
            metrics |= self.evaluate_sampled(sampler)
            if batch + 1 == self.context.loop.steps:
                metrics |= self.evaluate_greedy(sampler)
        self._write_answers(batch + 1, metrics)
        return metrics

    def evaluate_rows(self) -> dict[str, float]:
        """Return the metrics that the method itself measures on held-out rows."""
        context = self.context
        if context.test_problems is None or not isinstance(context.method, RowEvaluator):
            return {}
        start = time.perf_counter()
        metrics = context.method.evaluate(
            list(context.test_problems), context.renderer, context.models
        )
        # no held-out row has the field that would be measured
        if context.method.headline not in metrics:
            return {}
        metrics["time/test_rows"] = time.perf_counter() - start
        self.held_out.record_rows(context.method.headline, metrics)
        return metrics

    def evaluate_sampled(self, sampler: SamplingClient) -> dict[str, float]:
        """Return `test/env/...`: a sample of each held-out problem, always with the same seeds."""
        context = self.context
        if context.test_problems is None or not self.samples_held_out:
            return {}
        start = time.perf_counter()
        result = self._sample(sampler, derive_seed(context.seed, "test"), greedy=False)
        self.samples.check_rollouts(result, sampler.version)
        metrics = compute_group_metrics(result.groups, "test/env")
        metrics["time/test"] = time.perf_counter() - start
        accuracy, held_out = self._headline(metrics, "test/env/all"), self.held_out
        held_out.before, held_out.after = (
            (accuracy if held_out.before is None else held_out.before),
            accuracy,
        )
        return metrics

    def evaluate_greedy(self, sampler: SamplingClient) -> dict[str, float]:
        """Return `test/greedy/...`: the greedy response to each held-out problem.

        {} if evaluation samples at temperature 0 anyway, or if `eval_greedy` is off.
        """
        context = self.context
        if context.test_problems is None or not self.samples_held_out:
            return {}
        if not context.settings.sampling.eval_greedy or context.eval_params.temperature == 0:
            return {}
        result = self._sample(sampler, 0, greedy=True)
        metrics = {
            k: v
            for k, v in compute_group_metrics(result.groups, "test/greedy").items()
            if k.startswith(GREEDY_METRICS)
        }
        accuracy, held_out = self._headline(metrics, "test/greedy/all"), self.held_out
        held_out.greedy_before = (
            accuracy if held_out.greedy_before is None else held_out.greedy_before
        )
        held_out.greedy_after = accuracy
        return metrics

    def _sample(self, sampler: SamplingClient, seed: int, *, greedy: bool) -> RolloutBatch:
        """Return a judged sample of each held-out problem, and keep it for `_write_answers`."""
        context, samples = self.context, self.samples
        assert context.test_problems is not None
        params = context.eval_params
        result = samples.sample_episodes(
            samples.build_groups(list(context.test_problems), 1),
            sampler,
            replace(params, temperature=0.0) if greedy else params,
            seed,
            samples.load_held_out_players(),
            f"greedy {self._phase}" if greedy else f"test {self._phase}",
        )
        result = samples.add_judgements(result, ungrouped=True)
        self._reset_reward_timers()
        self._answers.append((result, greedy))
        return result

    def _write_answers(self, done: int, metrics: dict[str, float]) -> None:
        """Write the answers of the evaluation after the stage's step `done`, unless the run stores
        no rollouts. Add the seconds to `time/test`.
        """
        context, answers, start = self.context, self._answers, time.perf_counter()
        self._answers = []
        if not answers or not context.loop.rollouts_every:
            return
        for result, greedy in answers:
            temperature = 0.0 if greedy else context.eval_params.temperature
            context.logbook.write_held_out_answers(
                context.first_step + done,
                build_rollout_rows(result, None, temperature),
                context.name,
                greedy=greedy,
            )
        metrics["time/test"] += time.perf_counter() - start

    def _reset_reward_timers(self) -> None:
        """Reset the reward timers, so that evaluation does not count towards the next batch."""
        for scores in (self.context.scorer, self.context.models.rewards):
            if scores is not None:
                scores.take_seconds()

    def _headline(self, metrics: Mapping[str, float], name: str) -> float | None:
        """Return the accuracy if the reward reports correctness, else the mean reward."""
        self.held_out.what = "accuracy" if f"{name}/correct" in metrics else "reward"
        return metrics.get(f"{name}/correct", metrics.get(f"{name}/reward/total"))
