"""Sampling that goes on while the learner updates: batches of what is ready, no token older than
the bound.

One thread ticks: it lets environments and sampler go on, takes batches, and brings new weights to
what is being drawn. An update is worked out in another thread; its verbs and the sampler's slices
take turns on the devices, or have devices of their own: then weights are on their way while the one
draws with the old ones and the other begins the next update. Of all this the clock decides three
things alone, who was ready when, when an update had ended and when its weights were there, and all
stand in the run's log of decisions.
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
    """Runs a stage with `max_steps_off_policy` from where it stands to its end."""
    sampler = stage.start()
    assert sampler is not None and stage.given.decisions is not None
    if stage.samples.players(0):
        raise UserError(
            "max_steps_off_policy is for environments that the policy plays by itself: of other seats, leave it out"
        )
    state = stage.saves.in_flight
    clock = stage.given.decisions.clock(state["tick"] if state else 0, whole=True)
    with (
        stage.samples.flow({None: sampler}, clock) as flow,
        ThreadPoolExecutor(1, "learner") as learner,
    ):
        under_way = UnderWay(stage, flow, state)
        weights = Weights(stage, under_way, sampler)
        stage.saves.state_of_flow = weights.state
        learning: Future | None = None
        taken: tuple[Rollouts, list[Datum]] | None = None
        newest = sampler.version  # of the weights that learn
        flow.learning = lambda: learning is not None or weights.arriving is not None
        flow.learned, flow.landed = lambda: learning is not None and learning.done(), weights.landed
        for batch in stage.batches():
            stage.given.decisions.batch = batch
            while True:
                under_way.begin()
                if learning is None and (rollouts := under_way.take(newest)) is not None:
                    taken = (rollouts, [])
                    learning = learner.submit(_learn, stage, batch, *taken, weights.arriving)
                    learning.add_done_callback(lambda _: flow.waiters.poke())
                decision = flow.tick()
                if decision.learned:
                    break
                if decision.landed:
                    weights.switch()
            assert learning is not None and taken is not None
            (metrics, after, fresh), (rollouts, datums), learning = learning.result(), taken, None
            weights.switch()
            metrics |= under_way.metrics(rollouts, newest)
            newest = after
            weights.updated(fresh, batch)
            draws = (
                weights.newest
                if stage.samples_held_out and stage.samples_at(batch)
                else weights.sampler
            )
            stage.end_batch(
                batch, {**group_metrics(rollouts.sampled), **metrics}, draws, rollouts, datums
            )
    stage.end()


def _learn(
    stage: Stage, batch: int, rollouts: Rollouts, datums: list[Datum], before: SamplingClient | None
) -> tuple[dict[str, float], int, SamplingClient | None]:
    """The update on a batch; its datums are put into `datums`. Metrics, the weights' version, and
    they where they go to other ranks.

    `before`: those of the update before, if they are on their way; one after the other.
    """
    datums += stage.method.credit(rollouts.groups, stage.models)
    metrics, version = (
        stage.method.learn(stage.models, datums, stage.progress(batch)),
        stage.models.policy.version,
    )
    if not stage.settings.flow.sampler_ranks:
        return metrics, version, None  # they are taken between two slices
    _ = before is None or before.version  # waits for them
    fresh = stage.models.policy.save_weights_and_get_sampling_client()
    if stage.saves.is_due(batch + 1):
        _ = fresh.version  # a checkpoint waits for them, and sampling goes on meanwhile
    return metrics, version, fresh


class Weights:
    """Who draws from which weights, and which are on their way to other ranks while both sides go
    on with what they have.
    """

    def __init__(self, stage: Stage, under_way: UnderWay, sampler: SamplingClient):
        self.stage, self.under_way, self.flow, self.sampler = (
            stage,
            under_way,
            under_way.flow,
            sampler,
        )
        self.arriving: SamplingClient | None = None
        # as a replay left it, which saved where the run that it repeated did not
        if under_way.admission.version < stage.done:
            self._send(None)

    @property
    def newest(self) -> SamplingClient:
        return self.arriving or self.sampler

    def landed(self) -> bool | None:
        return None if self.arriving is None else self.arriving.there

    def switch(self) -> None:
        """What is on its way has come, or is waited for, and is drawn from from now on."""
        if self.arriving is not None:
            old, self.sampler, self.arriving = self.sampler, self.arriving, None
            self._use()
            old.release()

    def updated(self, fresh: SamplingClient | None, batch: int) -> None:
        """After an update; `fresh`: its weights, where they are under way already. Where a
        checkpoint follows they are waited for.
        """
        stage = self.stage
        stops = stage.saves.is_due(batch + 1) or stage.stop_request.exit_code is not None
        if self.flow.clock.under_way(fresh is not None and not stops):
            self._send(fresh)
        else:
            self.sampler = stage.next_sampler(self.sampler, fresh)
            self._use()
        if self.flow.clock.stopped():
            self.flow.seats[None].stream.renew()

    def state(self) -> dict[str, Any]:
        """Of what is under way, for a checkpoint, from which a run goes on with the newest weights."""
        if self.arriving is not None:
            if self.flow.clock.settle():
                self.switch()
            else:
                self.stage.console.warn(
                    "this checkpoint falls where weights were on their way in the run that is replayed: what goes on from it has them a "
                    "little sooner than that run had"
                )
        if self.stage.stop_request.exit_code is not None and not self.stage.saves.is_due(
            self.stage.done
        ):
            self.flow.clock.stop()
        return self.under_way.state()

    def _send(self, fresh: SamplingClient | None) -> None:
        self.arriving = fresh or self.stage.models.policy.save_weights_and_get_sampling_client()
        self.arriving.when_there(self.flow.waiters.poke)

    def _use(self) -> None:
        _ = self.sampler.version  # waits; raises where they could not be brought
        self.flow.seats[None].stream.switch(
            self.sampler, anew=self.stage.settings.flow.recompute_cache
        )
        self.under_way.admission.updated()


class UnderWay:
    """The groups of a stage: which problem each is of, which are under way, and which are next."""

    def __init__(self, stage: Stage, flow: Flow, state: Mapping[str, Any] | None):
        self.stage, self.flow = stage, flow
        # FlowSettings: only a method that has them comes here
        loop, asked = stage.loop, stage.settings.flow
        size = loop.batch_size
        self.admission = Admission(
            size,
            asked.max_steps_off_policy,
            size * loop.steps,
            asked.over_age == "redraw",
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
        """A group's builder, and the stream of its problem: those that it has where batches are
        sampled one after the other.
        """
        stage, size = self.stage, self.stage.loop.batch_size
        problems = stage.problems.batch(number // size, size, stage.seed)
        stream = group_streams([problem.index for problem in problems])[number % size]
        return stage.groups([problems[number % size]], stage.method.group_size)[0], stream

    def begin(self) -> None:
        """Begins as many groups as may be under way."""
        for number in self.admission.begin():
            self._begin(number)

    def _begin(self, number: int) -> None:
        builder, stream = self._of(number)
        seed = derive_seed(self.stage.seed, "sample", number // self.stage.loop.batch_size)
        if attempt := self.attempts.get(number, 0):
            seed = derive_seed(seed, "again", attempt)
        self.flow.begin(
            number, builder, seed=seed, problem=stream, since=self.admission.since[number]
        )

    def _again(self, number: int) -> None:
        """A group that was given back begins anew, with random numbers of its own."""
        self.attempts[number] = self.attempts.get(number, 0) + 1
        self.admission.since[number] = self.admission.version
        self.admission.ended.discard(number)
        self._begin(number)

    def take(self, newest: int) -> Rollouts | None:
        """The next batch, for weights of version `newest`; None where it is not there yet."""
        for number in self.flow.done():
            if number not in self._seen:
                self._seen.add(number)
                self.admission.end(number)
        batch, given_back = self.admission.take()
        for number in given_back:
            self.lost_tokens += self.flow.give_back(number)
            self._again(number)
        if not batch:
            return None
        self._seen -= set(batch)
        rollouts = self.stage.samples.judged(self.flow.take(batch))
        self.stage.samples.check(rollouts, newest, self.admission.bound)
        return rollouts

    def metrics(self, rollouts: Rollouts, version: int) -> dict[str, float]:
        """The age of each trained token in updates, of weights of that version, and what was done
        about those that grew old.
        """
        ages = Counter(version - v for v in token_versions(rollouts))
        total = max(1, ages.total())
        found = {f"async/age/{age}": ages[age] / total for age in range(self.admission.bound + 1)}
        found["async/age/mean"] = sum(age * count for age, count in ages.items()) / total
        found["async/age/max"] = max(ages, default=0)
        found |= {
            "async/awaited_groups": self.admission.awaited,
            "async/redrawn_groups": self.admission.redrawn,
        }
        found |= {
            "async/redrawn_tokens": self.lost_tokens,
            "async/groups_under_way": len(self.flow.groups),
        }
        self.admission.awaited = self.admission.redrawn = self.lost_tokens = 0
        return found

    def state(self) -> dict[str, Any]:
        """For a checkpoint: from here the run goes on as if it had not been interrupted."""
        attempts = {
            str(number): count
            for number, count in self.attempts.items()
            if number in self.admission.since
        }
        now = {
            "tick": self.flow.clock.tick,
            "admission": self.admission.state(),
            "attempts": attempts,
        }
        return {**now, "flow": flow_state(self.flow)}


def token_versions(rollouts: Rollouts) -> list[int]:
    """Of each sampled token."""
    found: list[int] = []
    for group in rollouts.groups:
        for trajectory in group.trajectories_G:
            for turn in trajectory.transitions:
                versions: Sequence[int] = turn.ac.versions or [turn.ac.version or 0] * len(
                    turn.ac.tokens
                )
                found += versions
    return found
