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

from rl.clients import SamplingClient
from rl.episodes import (
    Admission,
    EnvGroupBuilder,
    Flow,
    Rollouts,
    flow_state,
    group_metrics,
    group_streams,
    restore,
)
from rl.errors import UserError
from rl.run.stage import Stage
from rl.seeds import derive_seed
from rl.types import Datum


def train_asynchronous(stage: Stage) -> None:
    """Train a stage with `max_steps_off_policy` from its current batch to its end.

    Raises UserError if the environment has players that the policy does not play.
    """
    sampler = stage.start()
    assert sampler is not None and stage.given.decisions is not None
    if stage.samples.players(0):
        raise UserError(
            "max_steps_off_policy is for environments in which the policy plays alone, and this "
            "environment has other players: remove max_steps_off_policy"
        )
    state = stage.saves.in_flight
    clock = stage.given.decisions.clock(state["tick"] if state else 0, whole=True)
    with (
        stage.samples.flow({None: sampler}, clock) as flow,
        ThreadPoolExecutor(1, "learner") as learner,
    ):
        in_flight = UnderWay(stage, flow, state)
        weight_sync = Weights(stage, in_flight, sampler)
        stage.saves.state_of_flow = weight_sync.state
        update_future: Future | None = None
        pending_batch: tuple[Rollouts, list[Datum]] | None = None
        learner_version = sampler.version  # the version of the learner's weights
        flow.learning = lambda: update_future is not None or weight_sync.arriving is not None
        flow.learned, flow.landed = (
            lambda: update_future is not None and update_future.done(),
            weight_sync.landed,
        )
        for batch in stage.batches():
            stage.given.decisions.batch = batch
            while True:
                in_flight.begin()
                if (
                    update_future is None
                    and (rollouts := in_flight.take(learner_version)) is not None
                ):
                    pending_batch = (rollouts, [])
                    update_future = learner.submit(
                        _learn, stage, batch, *pending_batch, weight_sync.arriving
                    )
                    update_future.add_done_callback(lambda _: flow.waiters.poke())
                decision = flow.tick()
                if decision.learned:
                    break
                if decision.landed:
                    weight_sync.switch()
            assert update_future is not None and pending_batch is not None
            (metrics, new_version, new_weights), (rollouts, datums), update_future = (
                update_future.result(),
                pending_batch,
                None,
            )
            weight_sync.switch()
            metrics |= in_flight.metrics(rollouts, learner_version)
            learner_version = new_version
            weight_sync.updated(new_weights, batch)
            eval_sampler = (
                weight_sync.newest
                if stage.samples_held_out and stage.samples_at(batch)
                else weight_sync.sampler
            )
            stage.end_batch(
                batch,
                {**group_metrics(rollouts.sampled), **metrics},
                eval_sampler,
                rollouts,
                datums,
            )
    stage.end()


def _learn(
    stage: Stage, batch: int, rollouts: Rollouts, datums: list[Datum], before: SamplingClient | None
) -> tuple[dict[str, float], int, SamplingClient | None]:
    """Update on a batch; return metrics, the version of the new weights, and their client.

    The batch's datums are appended to `datums`. The client is None if sampler and learner share
    their ranks: then the weights are synced between two slices. `before` holds the weights of the
    previous update if they are still being sent; the new ones are sent after them.
    """
    datums += stage.method.credit(rollouts.groups, stage.models)
    metrics, version = (
        stage.method.learn(stage.models, datums, stage.progress(batch)),
        stage.models.policy.version,
    )
    if not stage.settings.flow.sampler_ranks:
        return metrics, version, None  # synced between two slices
    _ = before is None or before.version  # waits for them
    new_weights = stage.models.policy.save_weights_and_get_sampling_client()
    if stage.saves.is_due(batch + 1):
        _ = new_weights.version  # a checkpoint waits for them; sampling continues meanwhile
    return metrics, version, new_weights


class Weights:
    """Manage the weight sync of an asynchronous stage.

    `sampler` samples with the current weights. `arriving` holds newer weights that are on their way
    to the sampler's ranks while learner and sampler continue; None if no weights are.
    """

    def __init__(self, stage: Stage, under_way: UnderWay, sampler: SamplingClient):
        self.stage, self.under_way, self.flow, self.sampler = (
            stage,
            under_way,
            under_way.flow,
            sampler,
        )
        self.arriving: SamplingClient | None = None
        # The state that a replay leaves if it saved a checkpoint and the original run did not.
        if under_way.admission.version < stage.done:
            self._send(None)

    @property
    def newest(self) -> SamplingClient:
        """Return the client of the newest weights, arrived or not."""
        return self.arriving or self.sampler

    def landed(self) -> bool | None:
        """Return whether the pending weights have arrived; None if none are pending."""
        return None if self.arriving is None else self.arriving.there

    def switch(self) -> None:
        """Wait until the pending weights have arrived, then sample from them."""
        if self.arriving is not None:
            old, self.sampler, self.arriving = self.sampler, self.arriving, None
            self._use()
            old.release()

    def updated(self, fresh: SamplingClient | None, batch: int) -> None:
        """Sync the weights after an update.

        `fresh` holds the new weights if they are already being sent. The call waits for them if a
        checkpoint or a stop follows; otherwise they arrive in the background.
        """
        stage = self.stage
        must_wait = stage.saves.is_due(batch + 1) or stage.stop_request.exit_code is not None
        if self.flow.clock.under_way(fresh is not None and not must_wait):
            self._send(fresh)
        else:
            self.sampler = stage.next_sampler(self.sampler, fresh)
            self._use()
        if self.flow.clock.stopped():
            self.flow.seats[None].stream.renew()

    def state(self) -> dict[str, Any]:
        """Return the state of the groups in flight for a checkpoint.

        A run resumed from it continues with the newest weights, so pending weights are waited for.
        """
        if self.arriving is not None:
            if self.flow.clock.settle():
                self.switch()
            else:
                self.stage.console.warn(
                    "this checkpoint is at a point where the replayed run had a weight sync in "
                    "flight: a run resumed from it has the new weights slightly earlier than the "
                    "replayed run had"
                )
        if self.stage.stop_request.exit_code is not None and not self.stage.saves.is_due(
            self.stage.done
        ):
            self.flow.clock.stop()
        return self.under_way.state()

    def _send(self, fresh: SamplingClient | None) -> None:
        """Start to send the newest weights, `fresh` if they exist already."""
        self.arriving = fresh or self.stage.models.policy.save_weights_and_get_sampling_client()
        self.arriving.when_there(self.flow.waiters.poke)

    def _use(self) -> None:
        """Sample with the weights of `sampler` from the next token on."""
        _ = self.sampler.version  # waits; raises if the transfer failed
        self.flow.seats[None].stream.switch(
            self.sampler, anew=self.stage.settings.flow.recompute_cache
        )
        self.under_way.admission.updated()


class UnderWay:
    """Hold the groups of a stage: the problem of each, those in flight, and those to start next."""

    def __init__(self, stage: Stage, flow: Flow, state: Mapping[str, Any] | None):
        self.stage, self.flow = stage, flow
        # FlowSettings: only methods that have these settings train asynchronously.
        loop, flow_settings = stage.loop, stage.settings.flow
        size = loop.batch_size
        self.admission = Admission(
            size,
            flow_settings.max_steps_off_policy,
            size * loop.steps,
            flow_settings.on_stale == "resample",
            stage.done,
        )
        self.admission.next, self.admission.taken = size * stage.done, stage.done
        self.attempts: dict[int, int] = {}
        self.lost_tokens = 0
        self._seen: set[int] = set()
        if state is not None:
            self.admission.load_state(state["admission"])
            self.attempts = {int(number): count for number, count in state["attempts"].items()}
            for number in restore(flow, state["flow"], lambda number: self._of(number)[0]):
                self._again(number)
            self._seen = set(flow.done()) & self.admission.ended

    def _of(self, number: int) -> tuple[EnvGroupBuilder, int]:
        """Return the builder of a group and the random stream of its problem.

        Both are the same as in synchronous training.
        """
        stage, size = self.stage, self.stage.loop.batch_size
        problems = stage.problems.batch(number // size, size, stage.seed)
        stream = group_streams([problem.index for problem in problems])[number % size]
        return stage.groups([problems[number % size]], stage.method.group_size)[0], stream

    def begin(self) -> None:
        """Begin as many groups as the staleness bound allows."""
        for number in self.admission.begin():
            self._begin(number)

    def _begin(self, number: int) -> None:
        """Begin a group with the seed of its batch and attempt."""
        builder, stream = self._of(number)
        seed = derive_seed(self.stage.seed, "sample", number // self.stage.loop.batch_size)
        if attempt := self.attempts.get(number, 0):
            seed = derive_seed(seed, "again", attempt)
        self.flow.begin(
            number, builder, seed=seed, problem=stream, since=self.admission.since[number]
        )

    def _again(self, number: int) -> None:
        """Restart a rescheduled group with a new random seed."""
        self.attempts[number] = self.attempts.get(number, 0) + 1
        self.admission.since[number] = self.admission.version
        self.admission.ended.discard(number)
        self._begin(number)

    def take(self, newest: int) -> Rollouts | None:
        """Return the next batch, for weights of version `newest`; None if it is incomplete."""
        for number in self.flow.done():
            if number not in self._seen:
                self._seen.add(number)
                self.admission.end(number)
        batch, rescheduled = self.admission.take()
        for number in rescheduled:
            self.lost_tokens += self.flow.give_back(number)
            self._again(number)
        if not batch:
            return None
        self._seen -= set(batch)
        rollouts = self.stage.samples.judged(self.flow.take(batch))
        self.stage.samples.check(rollouts, newest, self.admission.bound)
        return rollouts

    def metrics(self, rollouts: Rollouts, version: int) -> dict[str, float]:
        """Return the staleness metrics of a batch trained at weights `version`, and reset counters.

        They are the share of trained tokens per age in updates, and the counts of groups that were
        waited for or resampled because of their age.
        """
        ages = Counter(version - v for v in token_versions(rollouts))
        total = max(1, ages.total())
        metrics = {f"async/age/{age}": ages[age] / total for age in range(self.admission.bound + 1)}
        metrics["async/age/mean"] = sum(age * count for age, count in ages.items()) / total
        metrics["async/age/max"] = max(ages, default=0)
        metrics |= {
            "async/awaited_groups": self.admission.awaited,
            "async/redrawn_groups": self.admission.redrawn,
        }
        metrics |= {
            "async/redrawn_tokens": self.lost_tokens,
            "async/groups_under_way": len(self.flow.groups),
        }
        self.admission.awaited = self.admission.redrawn = self.lost_tokens = 0
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; a resumed run continues as if never interrupted."""
        attempts = {
            str(number): count
            for number, count in self.attempts.items()
            if number in self.admission.since
        }
        state = {
            "tick": self.flow.clock.tick,
            "admission": self.admission.state(),
            "attempts": attempts,
        }
        return {**state, "flow": flow_state(self.flow)}


def token_versions(rollouts: Rollouts) -> list[int]:
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
