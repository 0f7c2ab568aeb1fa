"""Log a stage: a row of metrics and its alarms, rollouts, and a record of each update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl.client import SamplingClient
from rl.data import Curriculum
from rl.reporting import AlarmMonitor
from rl.rewards import GAVE_UP
from rl.rollout import (
    RolloutBatch,
    TrajectoryGroup,
    build_rollout_rows,
    compute_credited_share,
    compute_group_metrics,
    compute_sample_metrics,
    list_turns,
)
from rl.trainer.stage_sampling import StageContext
from rl.types import AdamParams, Datum

MAX_RECORDED_TOKENS = 1_000_000  # action tokens of a file, each counted once for every call
_UNRECORDED_INPUTS = ("target_tokens", "versions")


@dataclass(frozen=True)
class _DatumSource:
    """Locate a datum in the rollouts: group, index, part of the episode, its turns, and the
    positions of its actions.
    """

    group: int
    index: int
    part: int
    turns: Sequence[int]
    positions: np.ndarray
    sampled: np.ndarray


class UpdateRecorder:
    """Record the learner calls of an update (a CallRecorder) and build its record."""

    def __init__(self) -> None:
        # datums, pending outputs and metadata of each forward_backward call
        self._calls: list[tuple[list[Datum], Future, dict[str, Any]]] = []
        self._learning_rates: list[float] = []

    def record_backward(
        self,
        data: Sequence[Datum],
        loss: str,
        config: Mapping[str, Any],
        divisor: float,
        outputs: Future,
    ) -> None:
        metadata = {
            "loss": loss,
            "config": dict(config),
            "divisor": float(divisor),
            "optimizer_step": len(self._learning_rates),
        }
        self._calls.append((list(data), outputs, metadata))

    def record_scale(self, factor: float) -> None:
        for _, _, metadata in self._calls:
            if metadata["optimizer_step"] == len(self._learning_rates):
                metadata["divisor"] /= factor

    def record_step(self, params: AdamParams) -> None:
        self._learning_rates.append(params.learning_rate)

    def build_record(
        self, groups: Sequence[TrajectoryGroup], max_tokens: int = MAX_RECORDED_TOKENS
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """Return the arrays and the metadata of the record; None if no call trained on a rollout.

        The record holds whole groups, from the first, of at most `max_tokens` tokens.
        """
        # the source of a datum by the id of its model_input, which a method keeps when it adds or
        # replaces loss inputs
        sources = {id(key): source for key, source in _list_sources(groups)}
        num_groups = self._count_fitting_groups(sources, len(groups), max_tokens)
        numbers: dict[int, int] = {}
        datums: list[tuple[Datum, _DatumSource]] = []
        arrays: dict[str, np.ndarray] = {}
        calls = []
        for k, (data, outputs, metadata) in enumerate(self._calls):
            members: list[int] = []
            logprobs: list[np.ndarray] = []
            entropies: list[np.ndarray] = []
            for datum, output in zip(data, outputs.result()[0], strict=True):
                source = sources.get(id(datum.model_input))
                if source is None or source.group >= num_groups or "logprobs" not in output:
                    continue
                if id(datum) not in numbers:
                    numbers[id(datum)] = len(datums)
                    datums.append((datum, source))
                members.append(numbers[id(datum)])
                logprobs.append(np.asarray(output["logprobs"], np.float32)[source.positions])
                if "entropy" in output:
                    entropies.append(np.asarray(output["entropy"], np.float32)[source.positions])
            arrays[f"call/{k}/datums"] = np.asarray(members, np.int64)
            arrays[f"call/{k}/logprobs"] = np.concatenate([np.zeros(0, np.float32), *logprobs])
            if entropies and len(entropies) == len(logprobs):
                arrays[f"call/{k}/entropies"] = np.concatenate(entropies)
            rates = self._learning_rates[metadata["optimizer_step"] :]
            rate = rates[0] if rates else None
            calls.append({**metadata, "learning_rate": rate, "datums": len(data)})
        if not datums:
            return None
        arrays |= _flatten_datums(datums)
        return arrays, {"calls": calls, "groups": len(groups), "recorded_groups": num_groups}

    def _count_fitting_groups(
        self, sources: Mapping[int, _DatumSource], count: int, max_tokens: int
    ) -> int:
        """Return the number of groups, from the first, whose tokens fit in."""
        tokens = np.zeros(count, np.int64)
        for data, _, _ in self._calls:
            for datum in data:
                if (source := sources.get(id(datum.model_input))) is not None:
                    tokens[source.group] += len(source.positions)
        return int((np.cumsum(tokens) <= max_tokens).sum())


def _list_sources(groups: Sequence[TrajectoryGroup]) -> Iterator[tuple[Any, _DatumSource]]:
    for g, group in enumerate(groups):
        for i, trajectory in enumerate(group.trajectories_G):
            for part, (datum, turns) in enumerate(trajectory.datums):
                positions = np.flatnonzero(datum.loss_fn_inputs["mask"].array)
                sampled = datum.loss_fn_inputs["logprobs"].array[positions]
                yield datum.model_input, _DatumSource(g, i, part, turns, positions, sampled)


def _flatten_datums(datums: Sequence[tuple[Datum, _DatumSource]]) -> dict[str, np.ndarray]:
    """Return the arrays of the datums, one after the other. An input that a datum lacks is NaN."""
    names = {
        name: None
        for datum, _ in datums
        for name, value in datum.loss_fn_inputs.items()
        if name not in _UNRECORDED_INPUTS and value.array.ndim == 1
    }
    arrays = {
        "target_tokens": np.concatenate(
            [d.loss_fn_inputs["target_tokens"].array[s.positions] for d, s in datums]
        ),
        "sampled": np.concatenate([source.sampled for _, source in datums]),
        "datums": np.asarray(
            [[s.group, s.index, s.part, len(s.positions)] for _, s in datums], np.int64
        ),
        "turns": np.asarray([turn for _, s in datums for turn in s.turns], np.int64),
        "turn_counts": np.asarray([len(s.turns) for _, s in datums], np.int64),
    }
    for name in names:
        arrays[f"input/{name}"] = np.concatenate(
            [
                d.loss_fn_inputs[name].array[s.positions]
                if name in d.loss_fn_inputs
                else np.full(len(s.positions), np.nan, np.float32)
                for d, s in datums
            ]
        ).astype(np.float32)
    return arrays


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
        sync: dict[str, float] = {}
        if sampler is not None and sampler is not self._timed_sampler:
            sync["time/sync"] = sampler.sync_seconds  # waits: a part of the step's time
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
            row |= compute_sample_metrics(rollouts.all_groups)
            row["optim/frac_credited"] = compute_credited_share(rollouts.all_groups, datums)
            row["sampler/temperature"] = self.context.sampling_params.temperature
            row["reward/total"] = row["env/all/reward/total"]
            row["reward/failed"] = len(rollouts.errors)
            # responses that a built-in reward gave up on; they scored 0
            row["reward/gave_up"] = sum(
                value
                for turn in list_turns(rollouts.all_groups)
                for name, value in turn.metrics.items()
                if name.rpartition("/")[2] == GAVE_UP
            )
            row["time/sample"], row["time/score"] = rollouts.sample_seconds, rollouts.score_seconds
            row.update({f"sampler/{name}": count for name, count in rollouts.counters.items()})
            for scores in (self.context.scorer, self.context.models.rewards):
                times = {} if scores is None else scores.take_seconds()
                row.update({f"time/reward/{name}": elapsed for name, elapsed in times.items()})
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
