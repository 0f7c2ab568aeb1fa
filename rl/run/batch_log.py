"""What a stage logs: a row of metrics for each batch, what the alarms say of it, and rollouts to
read.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rl.clients import SamplingClient
from rl.data import Curriculum
from rl.episodes import Rollouts, credited_share, rollout_rows, sampled_metrics
from rl.report import Alarms
from rl.rewards import GAVE_UP
from rl.run.given import Given
from rl.types import Datum


class BatchLog:
    """Puts a batch's row together, and writes it."""

    def __init__(self, given: Given):
        self.given = given
        self._alarms = Alarms()
        # whose weights' way to the sampler is logged already
        self._timed: SamplingClient | None = None

    def resume(self) -> None:
        """The alarms go on from the rows that the stage logged before."""
        self._alarms = Alarms(
            [
                row
                for row in self.given.logbook.rows()
                if row["stage"] == self.given.name and "progress/batch" in row
            ]
        )

    def row(
        self,
        batch: int,
        since: float,
        metrics: Mapping[str, float],
        sampler: SamplingClient | None,
        rollouts: Rollouts | None,
        datums: Sequence[Datum],
    ) -> dict[str, float]:
        """All of a batch but what is evaluated after it. `since`: its beginning by
        time.perf_counter. `sampler`: of the new weights.
        """
        loop, done = self.given.loop, batch + 1
        sync = (
            {} if sampler is None or sampler is self._timed else {"time/sync": sampler.sync_seconds}
        )
        self._timed = sampler
        seconds = time.perf_counter() - since
        row: dict[str, float] = {
            "progress/batch": batch,
            "progress/done_frac": done / loop.steps,
            **metrics,
            **sync,
        }
        row["progress/epoch"] = self.given.problems.epoch(done, loop.batch_size)
        row["time/step"] = seconds
        tokens = row.get("optim/tokens", 0.0)
        if rollouts is not None:
            row |= self._sampling_metrics(rollouts, datums)
            row["reward/total"] = row["env/all/reward/total"]
            row["reward/failed"] = len(rollouts.errors)
            row["reward/gave_up"] = gave_up_count(rollouts)
            row["time/sample"], row["time/score"] = rollouts.sample_seconds, rollouts.score_seconds
            row.update({f"sampler/{name}": count for name, count in rollouts.counters.items()})
            for scores in (self.given.scorer, self.given.models.rewards):
                row.update(
                    {
                        f"time/reward/{name}": taken
                        for name, taken in (
                            scores.take_seconds() if scores is not None else {}
                        ).items()
                    }
                )
            tokens = rollouts.counters["emitted_tokens"]
        # what was not scored has no reward, not one of 0
        if not self.given.rewarded and self.given.models.rewards is None:
            row = {
                name: value
                for name, value in row.items()
                if not any(part in name for part in ("reward/", "by_group/"))
            }
        row["time/tokens_per_second"] = tokens / max(seconds, 1e-9)
        return row

    def _sampling_metrics(self, rollouts: Rollouts, datums: Sequence[Datum]) -> dict[str, float]:
        found = {
            **sampled_metrics(rollouts.sampled),
            "optim/frac_credited": credited_share(rollouts.sampled, datums),
        }
        return {**found, "sampler/temperature": self.given.sampling_params.temperature}

    def watch(self, row: dict[str, float]) -> list[str]:
        """Tells the curriculum of a batch's success, and the alarms of everything; returns what
        there is to say.
        """
        problems = self.given.problems
        if isinstance(problems, Curriculum):
            row.update(problems.metrics())
            problems.learn(row.get("env/all/correct", row.get("env/all/reward/total", 0.0)))
        metrics, said = self._alarms(row)
        row.update(metrics)
        return said

    def write(self, done: int, metrics: Mapping[str, float]) -> None:
        step = self.given.first_step + done
        self.given.logbook.log(step, {"stage": self.given.name, **metrics})
        self.given.console.update(step, metrics)

    def rollouts(self, batch: int, rollouts: Rollouts | None) -> None:
        """Writes a batch's rollouts, where it is time."""
        given = self.given
        if (
            rollouts is not None
            and given.loop.rollouts_every
            and (batch % given.loop.rollouts_every == 0)
        ):
            rows = rollout_rows(rollouts, given.renderer, given.sampling_params.temperature)
            given.logbook.rollouts(
                given.first_step + batch + 1, rows, given.name if given.first_step else ""
            )


def gave_up_count(rollouts: Rollouts) -> float:
    """The number of answers that a built-in reward gave up on, which scored 0."""
    turns = [
        turn
        for group in rollouts.sampled
        for trajectory in group.trajectories_G
        for turn in trajectory.transitions
    ]
    return sum(
        value
        for turn in turns
        for name, value in turn.metrics.items()
        if name.rpartition("/")[2] == GAVE_UP
    )
