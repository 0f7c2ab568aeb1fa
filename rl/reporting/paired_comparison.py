"""Compare held-out answers of two evaluations problem by problem."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, stdev

from rl.jsonl import Row
from rl.reporting.episode_html import StoredEpisode

_NORMAL_95 = 1.96  # the 97.5% quantile of the standard normal distribution
_MAX_SCORE = 1e300
_FEW_PROBLEMS = 30  # below it the normal interval is rough


def make_problem_key(row: Row) -> str:
    """Return a text that is equal for two rows of the same problem: data set, number and prompt.

    The prompt of an episode of several turns is what precedes its first turn.
    """
    turns = StoredEpisode(row).turns
    prompt = turns[0].get("messages") or "" if turns else row.get("prompt", "")
    return json.dumps([row.get("tag"), row.get("problem"), prompt], default=str)


def score_row(row: Row) -> float | None:
    """Return 1 or 0 for a right or wrong answer; its reward if correctness is unknown; None if it
    has no score.
    """
    metrics = row.get("metrics")
    value = metrics.get("correct") if isinstance(metrics, Mapping) else None
    value = row.get("reward") if value is None else value
    # JSON's integers are unbounded, and a sum of scores must be a float too
    if not isinstance(value, (int, float)) or not abs(value) <= _MAX_SCORE:
        return None
    return float(value)


def average_by_problem(rows: Iterable[Row]) -> dict[str, float]:
    """Return the mean score of each problem."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        if (score := score_row(row)) is not None:
            scores.setdefault(make_problem_key(row), []).append(score)
    return {key: fmean(values) for key, values in scores.items()}


@dataclass(frozen=True)
class PairedComparison:
    """Hold the mean scores of two evaluations on the problems that both have.

    `difference` is after - before. `standard_error` is that of the mean difference: the standard
    deviation (with P - 1) of the differences per problem divided by the square root of their
    number P; None for fewer than two problems.
    """

    problems: int
    before: float
    after: float
    standard_error: float | None

    @property
    def difference(self) -> float:
        """Return after - before."""
        return self.after - self.before

    @property
    def is_noise(self) -> bool:
        """Return whether the 95% interval of the difference contains 0."""
        return self.standard_error is None or (
            abs(self.difference) <= _NORMAL_95 * self.standard_error
        )

    def describe(self) -> str:
        """Return a sentence that says whether the difference is noise."""
        if self.standard_error is None:
            return "Fewer than two problems are shared: the difference cannot be judged."
        if self.difference == 0 and self.standard_error == 0:
            return f"Both score the same on each of the {self.problems} problems."
        margin = _NORMAL_95 * self.standard_error
        low, high = self.difference - margin, self.difference + margin
        interval = f"its 95% interval, {low:+.3f} to {high:+.3f},"
        verdict = (
            f"is within the noise: {interval} contains 0"
            if self.is_noise
            else f"is larger than the noise: {interval} does not contain 0"
        )
        few = (
            f" ({self.problems} problems are few: the interval is rough)"
            if self.problems < _FEW_PROBLEMS
            else ""
        )
        return f"The difference of {self.difference:+.3f} {verdict}{few}."


def compare_paired(
    before: Mapping[str, float], after: Mapping[str, float]
) -> PairedComparison | None:
    """Return the comparison on the shared problems of two evaluations, each a mean score by problem
    (`average_by_problem`); None if they share no problem.
    """
    shared = [key for key in before if key in after]
    if not shared:
        return None
    differences, count = [after[key] - before[key] for key in shared], len(shared)
    return PairedComparison(
        problems=count,
        before=fmean(before[key] for key in shared),
        after=fmean(after[key] for key in shared),
        standard_error=stdev(differences) / math.sqrt(count) if count > 1 else None,
    )
