"""Evaluate held-out problems at intervals of a stage, and compute the metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

from rl.algorithms import RowEvaluator
from rl.client import SamplingClient
from rl.jsonl import Row
from rl.rollout import (
    RolloutBatch,
    TrajectoryGroup,
    build_rollout_rows,
    compute_group_metrics,
    mean,
    square,
)
from rl.seed import derive_seed
from rl.trainer.stage_sampling import StageContext, StageSampler
from rl.types import Problem

HELD_OUT_ACCURACY = "test/env/all/correct"
GREEDY_METRICS = ("test/greedy/all/correct", "test/greedy/all/reward/total")
_REPORTED_METRICS = {
    "reward/total": "mean reward",
    "correct": "correct",
    "format": "format",
    "won": "won",
    "drawn": "drawn",
    "lost": "lost",
    "ended": "ended by itself",
    "frac_truncated": "truncated",
    "ac_tokens_per_turn": "tokens an answer",
}
# Accuracies of instructions under the names of lm-eval: the metrics of the reward `ifeval` that are
# summed, and divided by the sum of another (None: by the number of answers).
_INSTRUCTION_ACCURACIES = {
    "prompt_level_strict_acc": ("correct", None),
    "inst_level_strict_acc": ("instructions_strict", "instructions"),
    "prompt_level_loose_acc": ("loose", None),
    "inst_level_loose_acc": ("instructions_loose", "instructions"),
}


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from n responses of which c are correct.

    pass@k is the probability that at least 1 of k responses is correct. The estimate is
    1 - C(n - c, k) / C(n, k): Chen et al. 2021, arXiv 2107.03374, section 2.1, equation 1. Raises
    ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got {n=}, {c=}, {k=}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def compute_pass_at_k(correct_P_G: Sequence[Sequence[float]], n: int) -> dict[str, float]:
    """Return pass@1, 2, 4, ... and pass@n, each with its standard error.

    The mean is over the problems for which all n responses were scored. The standard error is that
    of the mean over problems: the standard deviation (with P - 1) of the estimates per problem
    divided by the square root of their number P. It treats the problems as a sample of all possible
    problems and includes the variance from sampling other responses to the same problems.
    """
    correct_counts = [round(sum(correct_G)) for correct_G in correct_P_G if len(correct_G) == n]
    result: dict[str, float] = {}
    for k in sorted({*(2**i for i in range(n.bit_length())), n}) if correct_counts else []:
        estimates_P = [pass_at_k(n, c, k) for c in correct_counts]
        result[f"pass@{k}"] = mean(estimates_P)
        if len(correct_counts) > 1:
            ones = [1.0] * len(estimates_P)
            result[f"standard error of pass@{k}"] = compute_clustered_error(estimates_P, ones)
    return result


def compute_clustered_error(totals_P: Sequence[float], counts_P: Sequence[float]) -> float:
    """Return the standard error of the mean score, with the answers clustered by problem.

    `totals_P`, `counts_P`: sum and number of the scores of each of 2 or more problems. Answers to
    the same problem, of all samples and seeds, are not independent. With the mean
    m = sum(totals) / sum(counts) the error is

        sqrt(P / (P - 1) * sum over problems of (total - m * count)^2) / sum(counts)

    This is the clustered standard error of Miller 2024, arXiv 2411.00640, section 2.2, whose sum
    over pairs of answers of a problem is the square of their sum, with the factor P / (P - 1) for a
    small number P of problems. If all counts are equal, it is the standard deviation (with P - 1)
    of the means of the problems, divided by the square root of P.
    """
    answers, problems = sum(counts_P), len(counts_P)
    average = sum(totals_P) / answers
    squares = sum(
        square(total - average * count) for total, count in zip(totals_P, counts_P, strict=True)
    )
    return math.sqrt(problems / (problems - 1) * squares) / answers


def make_response_rows(
    groups: Sequence[TrajectoryGroup], problems: Sequence[Problem]
) -> list[dict[str, Any]]:
    """Return a row for each response.

    It has problem, prompt, response, expected, reward, the metrics of the reward, and tokens.
    """
    expected = {problem.index: problem.meta.get("answer") for problem in problems}
    rows = []
    for group in groups:
        for trajectory, reward, metrics in zip(
            group.trajectories_G, group.get_total_rewards(), group.get_final_metrics(), strict=True
        ):
            turn = trajectory.transitions[-1]
            # the last message is the prompt, which has a separate key
            logs = {name: value for name, value in turn.logs.items() if name != "messages"}
            rows.append(
                {
                    "problem": group.problem_index,
                    **logs,
                    "expected": expected[group.problem_index],
                    "reward": reward,
                    **metrics,
                    "tokens": turn.ac.num_tokens,
                }
            )
    return rows


def compute_evaluation_metrics(groups: Sequence[TrajectoryGroup], samples: int) -> dict[str, float]:
    """Return the mean metrics of all responses. The mean reward, the accuracies and pass@k have
    their standard errors, with the responses clustered by problem.

    `groups`: those of all seeds; a problem has a group for each seed. `samples`: the number of
    responses to a problem, of all seeds; pass@k is added if it is more than 1 and correctness is 0
    or 1 for all responses. Correctness is known if the reward reports it (its metric `correct`) or
    if all rewards are 0 or 1.
    """
    metrics = compute_group_metrics(groups)
    result = {
        label: metrics[f"env/all/{name}"]
        for name, label in _REPORTED_METRICS.items()
        if f"env/all/{name}" in metrics
    }
    rewards_P_G = _merge_by_problem(groups, [group.get_total_rewards() for group in groups])
    correct_P_G = _collect_metric(groups, "correct")
    if not any(correct_P_G) and _is_binary(rewards_P_G):
        correct_P_G = rewards_P_G
        result["correct"] = mean(reward for correct_G in correct_P_G for reward in correct_G)
    _add_error(result, "mean reward", rewards_P_G)
    _add_error(result, "correct", correct_P_G)
    if any(_collect_metric(groups, "instructions")):
        for label, (name, other) in _INSTRUCTION_ACCURACIES.items():
            values_P_G = _collect_metric(groups, name)
            counts_P_G = _collect_metric(groups, other) if other is not None else None
            _add_error(result, label, values_P_G, counts_P_G)
    if samples > 1 and _is_binary(correct_P_G):
        result |= compute_pass_at_k(correct_P_G, samples)
    return result


def _is_binary(values_P_G: Sequence[Sequence[float]]) -> bool:
    """Return whether all values are 0 or 1."""
    return all(value in (0.0, 1.0) for values_G in values_P_G for value in values_G)


def _add_error(
    result: dict[str, float],
    label: str,
    values_P_G: Sequence[Sequence[float]],
    counts_P_G: Sequence[Sequence[float]] | None = None,
) -> None:
    """Add the standard error of a mean, and the mean itself unless `result` has it.

    `counts_P_G`: by what the sum of the values is divided; default: their number.
    """
    pairs = [
        (sum(values), float(len(values)) if counts_P_G is None else sum(counts_P_G[i]))
        for i, values in enumerate(values_P_G)
        if values
    ]
    if not pairs:
        return
    totals_P, counts_P = zip(*pairs, strict=True)
    result.setdefault(label, sum(totals_P) / sum(counts_P))
    if len(pairs) > 1:
        result[f"standard error of {label}"] = compute_clustered_error(totals_P, counts_P)


def _merge_by_problem(
    groups: Sequence[TrajectoryGroup], values_P_G: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Merge the values of all groups of the same problem, which several seeds sampled."""
    merged: dict[tuple[str, int], list[float]] = {}
    for group, values in zip(groups, values_P_G, strict=True):
        merged.setdefault((group.tag, group.problem_index), []).extend(values)
    return list(merged.values())


def _collect_metric(groups: Sequence[TrajectoryGroup], name: str) -> list[list[float]]:
    """Return a metric of the responses to each problem, of those that have it."""
    values_P_G = [
        [metrics[name] for metrics in group.get_final_metrics() if name in metrics]
        for group in groups
    ]
    return _merge_by_problem(groups, values_P_G)


@dataclass
class HeldOutMetrics:
    """Hold the held-out metrics of a stage before the first step and at the last evaluation.

    `before` and `after` are of samples, the `greedy_` fields of greedy responses.
    """

    before: float | None = None
    after: float | None = None
    greedy_before: float | None = None
    greedy_after: float | None = None
    what: str = "accuracy"  # or "reward" if the reward does not report correctness
    headline: str = ""  # the metric that the method measures on rows
    # (before, after) of all rows ("") and of each data set by its name
    rows: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: Sequence[Row], headline: str = "") -> Self:
        """Return the held-out metrics in the logged rows of a stage. `headline`: the metric that
        its method measures on rows, of all held-out rows and of each data set.
        """
        ends: dict[str, tuple[float, float]] = {}  # first and last value of each metric
        for row in rows:
            for name, value in row.items():
                if name.startswith("test/") and value is not None:
                    ends[name] = ends.get(name, (value,))[0], value
        name, what = (
            ("correct", "accuracy") if HELD_OUT_ACCURACY in ends else ("reward/total", "reward")
        )
        (before, after), (greedy_before, greedy_after) = (
            ends.get(f"test/{kind}/all/{name}", (None, None)) for kind in ("env", "greedy")
        )
        headline = headline.removeprefix("test/")
        sets = {
            name.removeprefix("test/").removesuffix(headline).rstrip("/"): values
            for name, values in ends.items()
            if headline
            and name.endswith(f"/{headline}")
            and not name.startswith(("test/env/", "test/greedy/"))  # of sampled answers
        }
        return cls(before, after, greedy_before, greedy_after, what, headline, sets)

    def describe_no_gain(self) -> str | None:
        """Return a remark if the sampled answers to held-out problems did not improve."""
        if self.before is None or self.after is None or self.after > self.before:
            return None
        if self.what == "accuracy" and self.before == 1:
            return None
        return (
            f"The held-out {self.what} did not rise. docs/troubleshooting.md lists causes under "
            '"It does not learn".'
        )

    def describe_sharpening(self) -> str | None:
        """Return a remark on the share of the gain that greedy decoding had before training.

        None if there is no gain, and if the metric is not accuracy.
        """
        if self.before is None or self.after is None or self.greedy_before is None:
            return None
        if self.after <= self.before or self.what != "accuracy":
            return None
        share = (min(self.greedy_before, self.after) - self.before) / (self.after - self.before)
        if share < 0.5:
            percent = f"{max(share, 0.0):.0%}"
            part, remainder = ("None", "All of it") if percent == "0%" else (percent, "The rest")
            return (
                f"{part} of this gain is sharpening: before the first step the greedy answer was "
                f"correct for {self.greedy_before:.1%} of the problems. {remainder} is new."
            )
        return (
            f"Most of this gain ({share:.0%}) is sharpening, not new knowledge: before the first "
            f"step the greedy answer was already correct for {self.greedy_before:.1%} of the "
            "problems; the model now samples it more often."
        )


class Evaluator:
    """Evaluate a stage at its intervals."""

    def __init__(self, context: StageContext, samples: StageSampler):
        self.context, self.samples = context, samples
        # the answers of the current evaluation, and whether they are greedy
        self._answers: list[tuple[RolloutBatch, bool]] = []
        self._phase = "before"  # of the evaluation: before the first batch, or after a batch
        self.seconds = 0.0  # of the last evaluation of this process

    @property
    def samples_held_out(self) -> bool:
        """Return whether held-out problems are sampled: they are evaluated and can be scored."""
        reward_model = self.context.models.rewards
        return (
            self.context.has_rewards
            or (reward_model is not None and reward_model.scores_single_answers)
        ) and bool(self.context.loop.eval_every)

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
            context.method.prepare_rows(
                chain(chain.from_iterable(batches), held_out), context.renderer, context.models
            )

    def evaluate(self, done: int, sampler: SamplingClient | None) -> dict[str, float]:
        """Return the held-out metrics after `done` batches of the stage; 0: before the first step.

        Greedy responses are measured only before the first and after the last batch.
        """
        start = time.perf_counter()
        self._phase = "after" if done else "before"
        metrics = self.evaluate_rows()
        if sampler is not None and self.context.test_problems is not None and self.samples_held_out:
            metrics |= self.evaluate_sampled(sampler)
            if done in (0, self.context.loop.steps):
                metrics |= self.evaluate_greedy(sampler)
            self._write_answers(done, metrics)
        self.seconds = time.perf_counter() - start
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
        return metrics

    def evaluate_sampled(self, sampler: SamplingClient) -> dict[str, float]:
        """Return `test/env/...`: a sample of each held-out problem, always with the same seeds."""
        context, start = self.context, time.perf_counter()
        result = self._sample(sampler, derive_seed(context.seed, "test"), greedy=False)
        self.samples.check_rollouts(result, sampler.version)
        metrics = compute_group_metrics(result.groups, "test/env")
        metrics["time/test"] = time.perf_counter() - start
        return metrics

    def evaluate_greedy(self, sampler: SamplingClient) -> dict[str, float]:
        """Return `test/greedy/...`: the greedy response to each held-out problem.

        {} if evaluation samples at temperature 0 anyway, or if `eval_greedy` is off.
        """
        context = self.context
        if not context.settings.sampling.eval_greedy or context.eval_params.temperature == 0:
            return {}
        result = self._sample(sampler, 0, greedy=True)
        metrics = compute_group_metrics(result.groups, "test/greedy")
        return {k: v for k, v in metrics.items() if k.startswith(GREEDY_METRICS)}

    def _sample(self, sampler: SamplingClient, seed: int, *, greedy: bool) -> RolloutBatch:
        """Return a judged sample of each held-out problem, and keep it for `_write_answers`."""
        context, params = self.context, self.context.eval_params
        assert context.test_problems is not None
        result = self.samples.sample(
            list(context.test_problems),
            sampler,
            seed,
            params=replace(params, temperature=0.0) if greedy else params,
            part=f"{'greedy' if greedy else 'test'} {self._phase}",
        )
        for scores in (context.scorer, context.models.rewards):
            if scores is not None:
                scores.take_seconds()  # an evaluation does not count towards the next batch
        self._answers.append((result, greedy))
        return result

    def _write_answers(self, done: int, metrics: dict[str, float]) -> None:
        """Write the answers of the evaluation after the stage's step `done`, unless the run stores
        no rollouts. Add the seconds to `time/test`.
        """
        context, answers, start = self.context, self._answers, time.perf_counter()
        self._answers = []
        if not context.loop.rollouts_every:
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
