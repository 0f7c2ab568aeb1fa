"""Log a stage: a row of metrics and its alarms for each batch, and readable rollouts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rl.client import SamplingClient
from rl.data import Curriculum
from rl.reporting import AlarmMonitor
from rl.rewards import GAVE_UP
from rl.rollout import (
    RolloutBatch,
    build_rollout_rows,
    compute_credited_share,
    compute_group_metrics,
    compute_sample_metrics,
)
from rl.trainer.stage_context import StageContext
from rl.trainer.update_recorder import UpdateRecorder
from rl.types import Datum


class BatchLog:
    """Build and write the metrics row of each batch of a stage."""

    def __init__(self, context: StageContext):
        self.context = context
        self._alarms = AlarmMonitor()
        # the sampler for which the weight sync time is logged already
        self._timed_sampler: SamplingClient | None = None
        self._recorder: UpdateRecorder | None = None

    def restore_alarms(self) -> None:
        """Restore the alarms from the rows that the stage has logged before."""
        self._alarms = AlarmMonitor(
            [
                row
                for row in self.context.logbook.read_rows()
                if row["stage"] == self.context.name and "progress/batch" in row
            ]
        )

    def build_row(
        self,
        batch: int,
        start_time: float,
        metrics: Mapping[str, float],
        sampler: SamplingClient | None,
        rollouts: RolloutBatch | None,
        datums: Sequence[Datum],
    ) -> dict[str, float]:
        """Return all metrics of a batch except those of the evaluation after it: `metrics` of the
        update, and those of the samples.

        `start_time` is the batch's start by time.perf_counter. `sampler` holds the new weights.
        """
        loop, done = self.context.loop, batch + 1
        sync = (
            {}
            if sampler is None or sampler is self._timed_sampler
            else {"time/sync": sampler.sync_seconds}
        )
        self._timed_sampler = sampler
        seconds = time.perf_counter() - start_time
        if rollouts is not None:
            metrics = {**compute_group_metrics(rollouts.all_groups), **metrics}
        row: dict[str, float] = {
            "progress/batch": batch,
            "progress/done_frac": done / loop.steps,
            **metrics,
            **sync,
        }
        row["progress/epoch"] = self.context.problems.epoch(done, loop.batch_size)
        row["time/step"] = seconds
        tokens = row.get("optim/tokens", 0.0)
        if rollouts is not None:
            row |= self._sampling_metrics(rollouts, datums)
            row["reward/total"] = row["env/all/reward/total"]
            row["reward/failed"] = len(rollouts.errors)
            row["reward/gave_up"] = count_given_up(rollouts)
            row["time/sample"], row["time/score"] = rollouts.sample_seconds, rollouts.score_seconds
            row.update({f"sampler/{name}": count for name, count in rollouts.counters.items()})
            for scores in (self.context.scorer, self.context.models.rewards):
                row.update(
                    {
                        f"time/reward/{name}": elapsed
                        for name, elapsed in (
                            scores.take_seconds() if scores is not None else {}
                        ).items()
                    }
                )
            tokens = rollouts.counters["emitted_tokens"]
        # A batch that was not scored has no reward; it does not have reward 0.
        if not self.context.has_rewards and self.context.models.rewards is None:
            row = {
                name: value
                for name, value in row.items()
                if not any(part in name for part in ("reward/", "by_group/"))
            }
        row["time/tokens_per_second"] = tokens / max(seconds, 1e-9)
        return row

    def _sampling_metrics(
        self, rollouts: RolloutBatch, datums: Sequence[Datum]
    ) -> dict[str, float]:
        """Return the metrics of the samples and the share of them that has an advantage."""
        metrics = {
            **compute_sample_metrics(rollouts.all_groups),
            "optim/frac_credited": compute_credited_share(rollouts.all_groups, datums),
        }
        return {**metrics, "sampler/temperature": self.context.sampling_params.temperature}

    def check_alarms(self, row: dict[str, float]) -> list[str]:
        """Update curriculum and alarms from a batch's row; return the messages of the alarms.

        The metrics of both are added to `row`.
        """
        problems = self.context.problems
        if isinstance(problems, Curriculum):
            row.update(problems.metrics())
            problems.record_success(
                row.get("env/all/correct", row.get("env/all/reward/total", 0.0))
            )
        metrics, alarms = self._alarms(row)
        row.update(metrics)
        return alarms

    def write_row(self, done: int, metrics: Mapping[str, float]) -> None:
        """Write the row of the stage's step `done` to the logbook and the console."""
        step = self.context.first_step + done
        self.context.logbook.log(step, {"stage": self.context.name, **metrics})
        self.context.console.update(step, metrics)

    def begin_update(self, batch: int) -> None:
        """Record the update of a batch, if its rollouts are kept."""
        if self.keeps_rollouts(batch) and self.context.method.online:
            self._recorder = UpdateRecorder()
            self.context.models.policy.recorder = self._recorder

    def keeps_rollouts(self, batch: int) -> bool:
        """Return whether the rollouts of a batch are written: every `rollouts_every` batches, and
        those of the last batch.
        """
        loop = self.context.loop
        return bool(loop.rollouts_every) and (
            batch % loop.rollouts_every == 0 or batch + 1 == loop.steps
        )

    def write_rollouts(self, batch: int, rollouts: RolloutBatch | None) -> None:
        """Write the rollouts of a batch and the record of its update, if they are kept."""
        context = self.context
        if rollouts is not None and self.keeps_rollouts(batch):
            rows = build_rollout_rows(
                rollouts, context.renderer, context.sampling_params.temperature
            )
            step = context.first_step + batch + 1
            stage = context.name if context.first_step else ""
            context.logbook.write_rollouts(step, rows, stage)
            recorder = self._recorder
            if recorder is not None:
                context.logbook.write_update_record(
                    step, lambda: recorder.build_record(rollouts.groups), stage
                )
        if self._recorder is not None:
            context.models.policy.recorder = self._recorder = None


def count_given_up(rollouts: RolloutBatch) -> float:
    """Return the number of responses that a built-in reward gave up on; they scored 0."""
    turns = [
        turn
        for group in rollouts.all_groups
        for trajectory in group.trajectories_G
        for turn in trajectory.transitions
    ]
    return sum(
        value
        for turn in turns
        for name, value in turn.metrics.items()
        if name.rpartition("/")[2] == GAVE_UP
    )
