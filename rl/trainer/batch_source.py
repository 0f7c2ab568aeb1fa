"""Provide the batches of a stage: rows of data, or samples on or off policy."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

from rl.algorithms import StreamedStep
from rl.client import SamplingClient
from rl.rollout import (
    EnvGroupBuilder,
    RolloutBatch,
    RolloutEngine,
    StalenessController,
    assign_random_streams,
    list_turns,
    restore_engine_state,
    save_engine_state,
)
from rl.seed import derive_seed
from rl.trainer.trainer import Trainer, TrainingBatch
from rl.types import Problem


class PolicyUpdate(NamedTuple):
    """Hold an update's metrics, the version of the new weights, and their client.

    The client is None if sampler and learner share their ranks: then the weights are synced
    between two slices.
    """

    metrics: dict[str, float]
    version: int
    new_weights: SamplingClient | None


class BatchSource(abc.ABC):
    """Provide the batches of a stage, and a sampler of the weights after each.

    `sampler` samples from the current weights; None if the stage never samples.
    """

    def __init__(self, trainer: Trainer, sampler: SamplingClient | None):
        self.trainer, self.sampler, self.stack = trainer, sampler, ExitStack()

    def close(self) -> None:
        """Stop sampling."""
        self.stack.close()

    @abc.abstractmethod
    def take_batch(self, number: int) -> TrainingBatch:
        """Return batch `number` of the stage, complete. Raises RunStopped if a stop was requested
        while it was sampled on policy, and the rest of the step would exceed the grace time.
        """

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        """Train on a batch. Return the `optim/...` metrics."""
        method, models = self.trainer.method, self.trainer.models
        if batch.rollouts is not None:
            groups = method.shape_rewards(batch.rollouts.groups)
            batch.datums = method.compute_advantages(groups, models)
        return method.update(models, batch.datums, self.trainer.progress(batch.number))

    @abc.abstractmethod
    def sync_weights(self, number: int) -> SamplingClient | None:
        """Return a sampler for the evaluation and the log after batch `number`."""


class RowSource(BatchSource):
    """Read rows of data. Weights are synced only for an evaluation that samples."""

    def take_batch(self, number: int) -> TrainingBatch:
        trainer = self.trainer
        rows = trainer.problems.batch(number, trainer.loop.batch_size, trainer.seed)
        seed = derive_seed(trainer.seed, "datums", number)
        datums = trainer.method.build_datums(rows, trainer.renderer, trainer.models, seed)
        return TrainingBatch(number, datums=datums)

    def sync_weights(self, number: int) -> SamplingClient | None:
        evaluator = self.trainer.evaluator
        if evaluator.is_due(number) and evaluator.samples_held_out:
            self.sampler = self.trainer.next_sampler(self.sampler)
        return self.sampler


class SampleSource(BatchSource):
    """Sample each batch from the weights of the step before it."""

    sampler: SamplingClient

    def take_batch(self, number: int) -> TrainingBatch:
        trainer = self.trainer
        problems = trainer.problems.batch(number, trainer.loop.batch_size, trainer.seed)
        rollouts = self._sample(problems, number, derive_seed(trainer.seed, "sample", number))
        trainer.stop_if_late()
        trainer.stage_sampler.check_rollouts(rollouts, self.sampler.version)
        return TrainingBatch(number, rollouts)

    def _sample(self, problems: Sequence[Problem], number: int, seed: int) -> RolloutBatch:
        """Return the samples of a batch with their rewards."""
        samples = self.trainer.stage_sampler
        rollouts = samples.sample(problems, self.sampler, seed, batch=number)
        return samples.fill_mixed_groups(rollouts, number, self.sampler)

    def sync_weights(self, number: int) -> SamplingClient:
        self.sampler = self.trainer.next_sampler(self.sampler)
        return self.sampler


class StreamedSource(SampleSource):
    """Sample as SampleSource does, and send each part of a batch to the gradient while the rest is
    still sampled.
    """

    step: StreamedStep

    def _sample(self, problems: Sequence[Problem], number: int, seed: int) -> RolloutBatch:
        trainer = self.trainer
        self.step = StreamedStep(trainer.method, trainer.models, trainer.progress(number))
        return trainer.stage_sampler.sample(
            problems,
            self.sampler,
            seed,
            batch=number,
            consume=lambda part: self.step.add(part.groups),
        )

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        metrics = self.step.finish()
        batch.datums = self.step.batch_datums
        return metrics


class AsyncSource(BatchSource):
    """Sample off-policy: episodes continue while the learner updates.

    The engine ticks in `take_batch` and in `update`. `sampler` samples with the current weights.
    `pending` holds newer weights that are on their way to the sampler's ranks while learner and
    sampler continue; None if no weights are.
    """

    sampler: SamplingClient

    def __init__(self, trainer: Trainer, sampler: SamplingClient):
        super().__init__(trainer, sampler)
        self.learner_version = sampler.version  # the version of the learner's weights
        self.pending: SamplingClient | None = None
        self._running_update: Future[PolicyUpdate] | None = None
        self._new_weights: SamplingClient | None = None
        state, replay_log = trainer.in_flight, trainer.replay_log
        assert replay_log is not None
        with ExitStack() as stack:
            event_log = replay_log.create_event_log(state["tick"] if state else 0, whole_stage=True)
            self.engine = stack.enter_context(
                trainer.stage_sampler.start_engine({None: sampler}, event_log)
            )
            self._update_executor = stack.enter_context(ThreadPoolExecutor(1, "learner"))
            self.in_flight = InFlightGroups(trainer, self.engine, state)
            # The state that a replay leaves if it saved a checkpoint and the original run did not.
            if self.in_flight.staleness.version < trainer.done:
                self._start_transfer(None)
            trainer.get_engine_state = self.state
            self.stack = stack.pop_all()
        self.engine.is_updating = lambda: (
            self._running_update is not None or self.pending is not None
        )
        self.engine.update_ended = lambda: (
            self._running_update is not None and self._running_update.done()
        )
        self.engine.weights_arrived = lambda: None if self.pending is None else self.pending.ready

    def take_batch(self, number: int) -> TrainingBatch:
        replay_log = self.trainer.replay_log
        assert replay_log is not None
        replay_log.batch = number
        while True:
            self.in_flight.start_groups()
            rollouts = self.in_flight.take_batch(self.learner_version)
            if rollouts is not None:
                return TrainingBatch(number, rollouts)
            if self.engine.tick().weights_arrived:
                self._switch_to_pending()

    def update(self, batch: TrainingBatch) -> dict[str, float]:
        """Train on a batch in the learner's thread while sampling continues."""
        self._running_update = self._update_executor.submit(
            self.update_and_send, batch, self.pending
        )
        self._running_update.add_done_callback(lambda _: self.engine.executor.wake())
        while not (decision := self.engine.tick()).update_ended:
            if decision.weights_arrived:
                self._switch_to_pending()
            self.in_flight.start_groups()
        result, self._running_update = self._running_update.result(), None
        self._switch_to_pending()
        assert batch.rollouts is not None
        staleness = self.in_flight.metrics(batch.rollouts, self.learner_version)
        self.learner_version, self._new_weights = result.version, result.new_weights
        return result.metrics | staleness

    def update_and_send(self, batch: TrainingBatch, pending: SamplingClient | None) -> PolicyUpdate:
        """Train on a batch and begin to send the new weights.

        `pending` holds the weights of the previous update if they are still being sent; the new
        ones are sent after them.
        """
        trainer = self.trainer
        metrics, policy = super().update(batch), trainer.models.policy
        version, new_weights = policy.version, None
        if trainer.settings.flow.sampler_ranks:
            if pending is not None:
                _ = pending.version  # waits for them
            new_weights = policy.save_weights_and_get_sampling_client()
            if trainer.is_save_due(batch.number + 1):
                # a checkpoint waits for them; sampling continues meanwhile
                _ = new_weights.version
        return PolicyUpdate(metrics, version, new_weights)

    def sync_weights(self, number: int) -> SamplingClient:
        """Sync the weights after an update. New weights that are already being sent arrive in the
        background, unless a checkpoint or a stop follows.
        """
        trainer, evaluator, log = self.trainer, self.trainer.evaluator, self.engine.event_log
        must_wait = trainer.is_save_due(number + 1) or trainer.stop_request.exit_code is not None
        if log.log_weights_in_transit(self._new_weights is not None and not must_wait):
            self._start_transfer(self._new_weights)
        else:
            self.sampler = trainer.next_sampler(self.sampler, self._new_weights)
            self._use_sampler()
        if log.is_stopped():
            self.engine.player_streams[None].stream.recompute_cache()
        if evaluator.samples_held_out and evaluator.is_due(number):
            return self.pending or self.sampler
        return self.sampler

    def state(self) -> dict[str, Any]:
        """Return the state of the groups in flight for a checkpoint.

        A run resumed from it continues with the newest weights, so pending weights are waited for.
        """
        trainer, log = self.trainer, self.engine.event_log
        if self.pending is not None:
            if log.log_weights_awaited():
                self._switch_to_pending()
            else:
                trainer.console.warn(
                    "this checkpoint is at a point where the replayed run had a weight sync in "
                    "flight: a run resumed from it has the new weights slightly earlier than the "
                    "replayed run had"
                )
        if trainer.stop_request.exit_code is not None and not trainer.is_save_due(trainer.done):
            log.log_stop()
        return self.in_flight.state()

    def _switch_to_pending(self) -> None:
        """Wait until the pending weights have arrived, then sample from them."""
        if self.pending is not None:
            old, self.sampler, self.pending = self.sampler, self.pending, None
            self._use_sampler()
            old.release()

    def _start_transfer(self, new_weights: SamplingClient | None) -> None:
        """Start to send the newest weights, `new_weights` if they exist already."""
        policy = self.trainer.models.policy
        self.pending = new_weights or policy.save_weights_and_get_sampling_client()
        self.pending.on_ready(self.engine.executor.wake)

    def _use_sampler(self) -> None:
        """Sample with the weights of `sampler` from the next token on."""
        _ = self.sampler.version  # waits; raises if the transfer failed
        self.engine.player_streams[None].stream.switch_weights(
            self.sampler, recompute=self.trainer.settings.flow.recompute_cache
        )
        self.in_flight.staleness.version += 1


def open_source(trainer: Trainer, sampler: SamplingClient | None) -> BatchSource:
    """Return the source of a trainer's batches. `sampler` samples from the current weights; None
    if the stage never samples.
    """
    flow = trainer.flow
    if not trainer.method.online:
        return RowSource(trainer, sampler)
    assert sampler is not None
    if flow.steps_off_policy:
        return AsyncSource(trainer, sampler)
    return (StreamedSource if flow.gradient_parts > 1 else SampleSource)(trainer, sampler)


class InFlightGroups:
    """Hold the groups of a stage: the problem of each, those in flight, and those to start next."""

    def __init__(self, trainer: Trainer, engine: RolloutEngine, state: Mapping[str, Any] | None):
        self.trainer, self.engine = trainer, engine
        # AsyncRolloutSettings: only methods that have these settings train asynchronously.
        loop, flow_settings = trainer.loop, trainer.settings.flow
        size = loop.batch_size
        self.staleness = StalenessController(
            size,
            flow_settings.max_steps_off_policy,
            size * loop.steps,
            flow_settings.on_stale == "resample",
            trainer.done,
        )
        self.staleness.next_group, self.staleness.batches_taken = size * trainer.done, trainer.done
        self.attempts: dict[int, int] = {}
        self.discarded_tokens = 0
        if state is not None:
            self.staleness.load_state(state["admission"])
            self.attempts = {int(number): count for number, count in state["attempts"].items()}
            for number in restore_engine_state(
                engine, state["flow"], lambda number: self._builder_and_stream(number)[0]
            ):
                self._restart_group(number)
            # Older versions saved the end of a stage without its groups in flight.
            for number in sorted(self.staleness.start_versions.keys() - engine.groups.keys()):
                self._restart_group(number)

    def _builder_and_stream(self, number: int) -> tuple[EnvGroupBuilder, int]:
        """Return the builder of a group and the random stream of its problem.

        Both are the same as in synchronous training.
        """
        trainer, size = self.trainer, self.trainer.loop.batch_size
        problems = trainer.problems.batch(number // size, size, trainer.seed)
        stream = assign_random_streams([problem.index for problem in problems])[number % size]
        group_size = trainer.method.group_size
        builders = trainer.stage_sampler.build_groups([problems[number % size]], group_size)
        return builders[0], stream

    def start_groups(self) -> None:
        """Begin as many groups as the staleness bound allows."""
        for number in self.staleness.start_groups():
            self._start_group(number)

    def _start_group(self, number: int) -> None:
        """Begin a group with the seed of its batch and attempt."""
        builder, stream = self._builder_and_stream(number)
        seed = derive_seed(self.trainer.seed, "sample", number // self.trainer.loop.batch_size)
        if attempt := self.attempts.get(number, 0):
            seed = derive_seed(seed, "again", attempt)
        self.engine.start_group(
            number,
            builder,
            seed=seed,
            random_stream=stream,
            start_version=self.staleness.start_versions[number],
        )

    def _restart_group(self, number: int) -> None:
        """Restart a rescheduled group with a new random seed."""
        self.attempts[number] = self.attempts.get(number, 0) + 1
        self.staleness.start_versions[number] = self.staleness.version
        self.staleness.ended_groups.discard(number)
        self._start_group(number)

    def take_batch(self, learner_version: int) -> RolloutBatch | None:
        """Return the next batch, for weights of version `learner_version`; None if it is
        incomplete.
        """
        self.staleness.ended_groups.update(self.engine.completed_groups())
        batch, rescheduled = self.staleness.take_batch()
        if rescheduled:
            self.discarded_tokens += self.engine.count_sampled_tokens(rescheduled)
        for number in rescheduled:
            self.engine.discard_group(number)
            self._restart_group(number)
        if not batch:
            return None
        rollouts = self.trainer.stage_sampler.add_judgements(self.engine.take_rollouts(batch))
        self.trainer.stage_sampler.check_rollouts(
            rollouts, learner_version, self.staleness.max_staleness
        )
        return rollouts

    def metrics(self, rollouts: RolloutBatch, version: int) -> dict[str, float]:
        """Return the staleness metrics of a batch trained at weights `version`, and reset counters.

        They are the share of trained tokens per age in updates, and the counts of groups that were
        waited for or resampled because of their age.
        """
        ages: Counter[int] = Counter()
        for turn in list_turns(rollouts.groups):
            versions = turn.ac.versions or [turn.ac.version or 0] * turn.ac.num_tokens
            ages.update(version - v for v in versions)
        staleness = self.staleness
        total = max(1, ages.total())
        shares = {age: ages[age] / total for age in range(staleness.max_staleness + 1)}
        metrics = {
            **{f"async/age/{age}": share for age, share in shares.items()},
            "async/age/mean": sum(age * count for age, count in ages.items()) / total,
            "async/age/max": max(ages, default=0),
            "async/awaited_groups": staleness.num_awaited,
            "async/redrawn_groups": staleness.num_rescheduled,
            "async/redrawn_tokens": self.discarded_tokens,
            "async/groups_under_way": len(self.engine.groups),
        }
        staleness.num_awaited = staleness.num_rescheduled = self.discarded_tokens = 0
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; a resumed run continues as if never interrupted."""
        started = self.staleness.start_versions
        return {
            "tick": self.engine.event_log.tick,
            "admission": self.staleness.state(),
            "attempts": {str(n): count for n, count in self.attempts.items() if n in started},
            "flow": save_engine_state(self.engine),
        }
