"""Train off-policy: sample while the learner updates, within a bound on staleness.

A batch is made of the groups that are ready; no token is staler than the bound. One thread runs the
ticks: it advances environments and sampler, takes batches, and switches running samples to new
weights. A second thread computes the updates. The update's verbs and the sampler's slices alternate
on the same devices, or run on separate devices. With separate devices, a weight sync is in flight
while the sampler still samples with the old weights and the learner begins the next update. Wall
time decides only three things: when each environment was ready, when an update ended, and when its
weights arrived. All three are recorded in the run's event log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rl.client import SamplingClient
from rl.errors import UserError
from rl.rollout import (
    EnvGroupBuilder,
    RolloutBatch,
    RolloutEngine,
    StalenessController,
    assign_random_streams,
    compute_group_metrics,
    restore_engine_state,
    save_engine_state,
)
from rl.seed import derive_seed
from rl.trainer.stage import Stage
from rl.types import Datum


def train_asynchronous(stage: Stage) -> None:
    """Train a stage with `max_steps_off_policy` from its current batch to its end.

    Raises UserError if the environment has players that the policy does not play.
    """
    sampler = stage.start()
    assert sampler is not None and stage.context.replay_log is not None
    if stage.stage_sampler.load_players(0):
        raise UserError(
            "max_steps_off_policy is for environments in which the policy plays alone, and this "
            "environment has other players: remove max_steps_off_policy"
        )
    state = stage.stage_checkpoints.in_flight
    event_log = stage.context.replay_log.create_event_log(
        state["tick"] if state else 0, whole_stage=True
    )
    with (
        stage.stage_sampler.start_engine({None: sampler}, event_log) as engine,
        ThreadPoolExecutor(1, "learner") as update_executor,
    ):
        in_flight = InFlightGroups(stage, engine, state)
        weight_sync = WeightSync(stage, in_flight, sampler)
        stage.stage_checkpoints.get_engine_state = weight_sync.state
        update_future: Future | None = None
        pending_batch: tuple[RolloutBatch, list[Datum]] | None = None
        learner_version = sampler.version  # the version of the learner's weights
        engine.is_updating = lambda: update_future is not None or weight_sync.pending is not None
        engine.update_ended, engine.weights_arrived = (
            lambda: update_future is not None and update_future.done(),
            weight_sync.has_arrived,
        )
        for batch in stage.batches():
            stage.context.replay_log.batch = batch
            while True:
                in_flight.start_groups()
                if (
                    update_future is None
                    and (rollouts := in_flight.take_batch(learner_version)) is not None
                ):
                    pending_batch = (rollouts, [])
                    update_future = update_executor.submit(
                        _update_policy, stage, batch, *pending_batch, weight_sync.pending
                    )
                    update_future.add_done_callback(lambda _: engine.executor.wake())
                decision = engine.tick()
                if decision.update_ended:
                    break
                if decision.weights_arrived:
                    weight_sync.switch_to_pending()
            assert update_future is not None and pending_batch is not None
            (metrics, new_version, new_weights), (rollouts, datums), update_future = (
                update_future.result(),
                pending_batch,
                None,
            )
            weight_sync.switch_to_pending()
            metrics |= in_flight.metrics(rollouts, learner_version)
            learner_version = new_version
            weight_sync.sync_after_update(new_weights, batch)
            eval_sampler = (
                weight_sync.newest_sampler
                if stage.samples_held_out and stage.evaluates_after(batch)
                else weight_sync.sampler
            )
            stage.end_batch(
                batch,
                {**compute_group_metrics(rollouts.all_groups), **metrics},
                eval_sampler,
                rollouts,
                datums,
            )
    stage.end()


def _update_policy(
    stage: Stage,
    batch: int,
    rollouts: RolloutBatch,
    datums: list[Datum],
    pending: SamplingClient | None,
) -> tuple[dict[str, float], int, SamplingClient | None]:
    """Update on a batch; return metrics, the version of the new weights, and their client.

    The batch's datums are appended to `datums`. The client is None if sampler and learner share
    their ranks: then the weights are synced between two slices. `pending` holds the weights of the
    previous update if they are still being sent; the new ones are sent after them.
    """
    groups = stage.method.shape_rewards(rollouts.groups)
    datums += stage.method.compute_advantages(groups, stage.models)
    metrics, version = (
        stage.method.update(stage.models, datums, stage.progress(batch)),
        stage.models.policy.version,
    )
    if not stage.settings.flow.sampler_ranks:
        return metrics, version, None  # synced between two slices
    _ = pending is None or pending.version  # waits for them
    new_weights = stage.models.policy.save_weights_and_get_sampling_client()
    if stage.stage_checkpoints.is_due(batch + 1):
        _ = new_weights.version  # a checkpoint waits for them; sampling continues meanwhile
    return metrics, version, new_weights


class WeightSync:
    """Manage the weight sync of an asynchronous stage.

    `sampler` samples with the current weights. `pending` holds newer weights that are on
    their way to the sampler's ranks while learner and sampler continue; None if no weights are.
    """

    def __init__(self, stage: Stage, in_flight: InFlightGroups, sampler: SamplingClient):
        self.stage, self.in_flight, self.engine, self.sampler = (
            stage,
            in_flight,
            in_flight.engine,
            sampler,
        )
        self.pending: SamplingClient | None = None
        # The state that a replay leaves if it saved a checkpoint and the original run did not.
        if in_flight.admission.version < stage.done:
            self._start_transfer(None)

    @property
    def newest_sampler(self) -> SamplingClient:
        """Return the client of the newest weights, arrived or not."""
        return self.pending or self.sampler

    def has_arrived(self) -> bool | None:
        """Return whether the pending weights have arrived; None if none are pending."""
        return None if self.pending is None else self.pending.ready

    def switch_to_pending(self) -> None:
        """Wait until the pending weights have arrived, then sample from them."""
        if self.pending is not None:
            old, self.sampler, self.pending = self.sampler, self.pending, None
            self._use_sampler()
            old.release()

    def sync_after_update(self, new_weights: SamplingClient | None, batch: int) -> None:
        """Sync the weights after an update.

        `new_weights` holds the new weights if they are already being sent. The call waits for them
        if a checkpoint or a stop follows; otherwise they arrive in the background.
        """
        stage = self.stage
        must_wait = (
            stage.stage_checkpoints.is_due(batch + 1) or stage.stop_request.exit_code is not None
        )
        if self.engine.event_log.log_weights_in_transit(new_weights is not None and not must_wait):
            self._start_transfer(new_weights)
        else:
            self.sampler = stage.next_sampler(self.sampler, new_weights)
            self._use_sampler()
        if self.engine.event_log.is_stopped():
            self.engine.player_streams[None].stream.recompute_cache()

    def state(self) -> dict[str, Any]:
        """Return the state of the groups in flight for a checkpoint.

        A run resumed from it continues with the newest weights, so pending weights are waited for.
        """
        if self.pending is not None:
            if self.engine.event_log.log_weights_awaited():
                self.switch_to_pending()
            else:
                self.stage.console.warn(
                    "this checkpoint is at a point where the replayed run had a weight sync in "
                    "flight: a run resumed from it has the new weights slightly earlier than the "
                    "replayed run had"
                )
        if (
            self.stage.stop_request.exit_code is not None
            and not self.stage.stage_checkpoints.is_due(self.stage.done)
        ):
            self.engine.event_log.log_stop()
        return self.in_flight.state()

    def _start_transfer(self, new_weights: SamplingClient | None) -> None:
        """Start to send the newest weights, `new_weights` if they exist already."""
        self.pending = (
            new_weights or self.stage.models.policy.save_weights_and_get_sampling_client()
        )
        self.pending.on_ready(self.engine.executor.wake)

    def _use_sampler(self) -> None:
        """Sample with the weights of `sampler` from the next token on."""
        _ = self.sampler.version  # waits; raises if the transfer failed
        self.engine.player_streams[None].stream.switch_weights(
            self.sampler, recompute=self.stage.settings.flow.recompute_cache
        )
        self.in_flight.admission.advance_version()


class InFlightGroups:
    """Hold the groups of a stage: the problem of each, those in flight, and those to start next."""

    def __init__(self, stage: Stage, engine: RolloutEngine, state: Mapping[str, Any] | None):
        self.stage, self.engine = stage, engine
        # AsyncRolloutSettings: only methods that have these settings train asynchronously.
        loop, flow_settings = stage.loop, stage.settings.flow
        size = loop.batch_size
        self.admission = StalenessController(
            size,
            flow_settings.max_steps_off_policy,
            size * loop.steps,
            flow_settings.on_stale == "resample",
            stage.done,
        )
        self.admission.next_group, self.admission.batches_taken = size * stage.done, stage.done
        self.attempts: dict[int, int] = {}
        self.discarded_tokens = 0
        self._ended_groups: set[int] = set()
        if state is not None:
            self.admission.load_state(state["admission"])
            self.attempts = {int(number): count for number, count in state["attempts"].items()}
            for number in restore_engine_state(
                engine, state["flow"], lambda number: self._builder_and_stream(number)[0]
            ):
                self._restart_group(number)
            self._ended_groups = set(engine.completed_groups()) & self.admission.ended_groups

    def _builder_and_stream(self, number: int) -> tuple[EnvGroupBuilder, int]:
        """Return the builder of a group and the random stream of its problem.

        Both are the same as in synchronous training.
        """
        stage, size = self.stage, self.stage.loop.batch_size
        problems = stage.problems.batch(number // size, size, stage.seed)
        stream = assign_random_streams([problem.index for problem in problems])[number % size]
        return stage.build_groups([problems[number % size]], stage.method.group_size)[0], stream

    def start_groups(self) -> None:
        """Begin as many groups as the staleness bound allows."""
        for number in self.admission.start_groups():
            self._start_group(number)

    def _start_group(self, number: int) -> None:
        """Begin a group with the seed of its batch and attempt."""
        builder, stream = self._builder_and_stream(number)
        seed = derive_seed(self.stage.seed, "sample", number // self.stage.loop.batch_size)
        if attempt := self.attempts.get(number, 0):
            seed = derive_seed(seed, "again", attempt)
        self.engine.start_group(
            number,
            builder,
            seed=seed,
            problem=stream,
            start_version=self.admission.start_versions[number],
        )

    def _restart_group(self, number: int) -> None:
        """Restart a rescheduled group with a new random seed."""
        self.attempts[number] = self.attempts.get(number, 0) + 1
        self.admission.start_versions[number] = self.admission.version
        self.admission.ended_groups.discard(number)
        self._start_group(number)

    def take_batch(self, learner_version: int) -> RolloutBatch | None:
        """Return the next batch, for weights of version `learner_version`; None if it is
        incomplete.
        """
        for number in self.engine.completed_groups():
            if number not in self._ended_groups:
                self._ended_groups.add(number)
                self.admission.mark_ended(number)
        batch, rescheduled = self.admission.take_batch()
        for number in rescheduled:
            self.discarded_tokens += self.engine.discard_group(number)
            self._restart_group(number)
        if not batch:
            return None
        self._ended_groups -= set(batch)
        rollouts = self.stage.stage_sampler.add_judgements(self.engine.take_rollouts(batch))
        self.stage.stage_sampler.check_rollouts(
            rollouts, learner_version, self.admission.max_staleness
        )
        return rollouts

    def metrics(self, rollouts: RolloutBatch, version: int) -> dict[str, float]:
        """Return the staleness metrics of a batch trained at weights `version`, and reset counters.

        They are the share of trained tokens per age in updates, and the counts of groups that were
        waited for or resampled because of their age.
        """
        ages = Counter(version - v for v in token_versions(rollouts))
        total = max(1, ages.total())
        metrics = {
            f"async/age/{age}": ages[age] / total for age in range(self.admission.max_staleness + 1)
        }
        metrics["async/age/mean"] = sum(age * count for age, count in ages.items()) / total
        metrics["async/age/max"] = max(ages, default=0)
        metrics |= {
            "async/awaited_groups": self.admission.num_awaited,
            "async/redrawn_groups": self.admission.num_rescheduled,
        }
        metrics |= {
            "async/redrawn_tokens": self.discarded_tokens,
            "async/groups_under_way": len(self.engine.groups),
        }
        self.admission.num_awaited = self.admission.num_rescheduled = self.discarded_tokens = 0
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; a resumed run continues as if never interrupted."""
        attempts = {
            str(number): count
            for number, count in self.attempts.items()
            if number in self.admission.start_versions
        }
        state = {
            "tick": self.engine.event_log.tick,
            "admission": self.admission.state(),
            "attempts": attempts,
        }
        return {**state, "flow": save_engine_state(self.engine)}


def token_versions(rollouts: RolloutBatch) -> list[int]:
    """Return the weight version of each sampled token, in order."""
    versions: list[int] = []
    for group in rollouts.groups:
        for trajectory in group.trajectories_G:
            for turn in trajectory.transitions:
                turn_versions: Sequence[int] = turn.ac.versions or [turn.ac.version or 0] * len(
                    turn.ac.tokens
                )
                versions += turn_versions
    return versions
