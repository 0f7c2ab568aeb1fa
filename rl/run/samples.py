"""What a stage samples: answers to problems, enough of them to learn from, and none that cannot be
learnt from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from rl.clients import SampleStream, SamplingClient
from rl.environments import ProblemGroupBuilder
from rl.episodes import (
    Clock,
    EnvGroupBuilder,
    Flow,
    Rollouts,
    Sampler,
    Seat,
    Waiters,
    continuous_rollout,
    group_streams,
    is_mixed,
    rollout,
)
from rl.errors import UserError
from rl.judges import judged, with_episode_rewards
from rl.run.episodes import episode_groups
from rl.run.given import Given
from rl.run.said import Said
from rl.seeds import derive_seed
from rl.types import Problem


class EveryRewardFailed(UserError):
    """No sample of a batch could be scored: the reward is broken, and going on would train on
    nothing.
    """


class Samples:
    """Who is asked, how often, and which answers count."""

    def __init__(self, given: Given, said: Said):
        self.given, self._said = given, said

    def groups(self, problems: Sequence[Problem], group_size: int) -> Sequence[EnvGroupBuilder]:
        given = self.given
        if given.environment is not None:
            renderers = None if given.opponents is None else given.opponents.renderers
            return episode_groups(
                given.environment, given.settings, problems, group_size, given.renderer, renderers
            )
        return [
            ProblemGroupBuilder(problem, group_size, given.renderer, given.scorer)
            for problem in problems
        ]

    def players(self, batch: int) -> Mapping[str, Sampler]:
        """Who plays the seats of a batch that are not the policy's."""
        return (
            {}
            if self.given.opponents is None
            else self.given.opponents.players(batch, self.given.seed)
        )

    def held_out_players(self) -> Mapping[str, Sampler]:
        """The same of an evaluation."""
        return {} if self.given.opponents is None else self.given.opponents.held_out_players()

    def roll(
        self, builders: Sequence[EnvGroupBuilder], sampler: SamplingClient, batch: int, seed: int
    ) -> Rollouts:
        """Plays a batch to its end, its episodes in step or each by itself."""
        given, players = self.given, self.players(batch)
        if given.decisions is None:
            return rollout(builders, sampler, given.sampling_params, seed=seed, players=players)
        given.decisions.batch = batch
        return continuous_rollout(
            builders,
            sampler,
            given.sampling_params,
            seed=seed,
            players=players,
            stream_of=SampleStream,
            limit=given.flow.max_waiting,
            steps=given.flow.slice_steps,
            seconds=self.seconds,
            clock=given.decisions.clock(),
        )

    def stream(
        self,
        builders: Sequence[EnvGroupBuilder],
        sampler: SamplingClient,
        batch: int,
        seed: int,
        use: Callable[[Rollouts], None],
    ) -> Rollouts:
        """The same in parts, each handed to `use` as soon as its groups have ended: parts in order,
        and groups in each.
        """
        given = self.given
        assert given.decisions is not None
        given.decisions.batch = batch
        samplers: dict[str | None, Any] = {None: sampler}
        samplers.update(self.players(batch).items())
        streams = group_streams([builder.problem_index for builder in builders])
        cuts = [round(i * len(builders) / given.flow.parts) for i in range(given.flow.parts + 1)]
        parts: list[Rollouts] = []
        with self.flow(samplers, given.decisions.clock()) as flow:
            for number, (builder, problem) in enumerate(zip(builders, streams, strict=True)):
                flow.begin(number, builder, seed=seed, problem=problem)
            for low, high in zip(cuts[:-1], cuts[1:], strict=True):
                while not set(range(low, high)) <= set(flow.done()):
                    flow.tick()
                parts.append(self.judged(flow.take(range(low, high))))
                use(parts[-1])
        return functools.reduce(Rollouts.with_more, parts)

    @contextmanager
    def flow(self, samplers: Mapping[str | None, Any], clock: Clock) -> Iterator[Flow]:
        """Episodes on their way, with streams of their own, which end with it."""
        waiters = Waiters(self.given.flow.max_waiting)
        with ExitStack() as stack:
            stack.callback(waiters.close)
            seats = {
                who: Seat(stack.enter_context(SampleStream(one)), one.info["max_context"])
                for who, one in samplers.items()
            }
            params, steps = self.given.sampling_params, self.given.flow.slice_steps
            flow = Flow(seats, params, waiters, clock, steps=steps, seconds=self.seconds)
            stack.callback(flow.close)
            yield flow

    @property
    def seconds(self) -> float:
        """What an environment that blocks has for an answer."""
        env = getattr(self.given.settings, "env", None)
        return float(env.episode_seconds) if env is not None else 600.0

    def judged(self, rollouts: Rollouts, *, alone: bool = False) -> Rollouts:
        """With what whole episodes earn beside their environment, and a model's judgement. `alone`:
        answers stand in no group.
        """
        given = self.given
        beside = given.scorer if given.environment is not None else None
        return judged(with_episode_rewards(rollouts, beside), given.models.rewards, alone=alone)

    def fill(self, rollouts: Rollouts, batch: int, sampler: SamplingClient) -> Rollouts:
        """Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): further problems until batch_size
        groups are mixed, within a bound.

        Without it, the same rollouts. Groups without signal and those beyond batch_size are left
        out of training, not of metrics; of a batch without any mixed group the first batch_size are
        kept. Each round takes its problems in an order of its own. A round in which every reward
        failed is the last: more samples would only fail again (`check` says how, if nothing is
        left).
        """
        given = self.given
        bound, wanted = given.settings.sampling.dynamic_sampling, given.loop.batch_size
        rounds, more = 0, rollouts
        while rounds < bound and more.groups and sum(map(is_mixed, rollouts.groups)) < wanted:
            rounds += 1
            problems = given.problems.batch(batch, wanted, derive_seed(given.seed, "extra", rounds))
            seed = derive_seed(given.seed, "sample", batch, rounds)
            builders = self.groups(problems, given.method.group_size)
            more = rollout(
                builders, sampler, given.sampling_params, seed=seed, players=self.players(batch)
            )
            more = self.judged(more)
            rollouts = rollouts.with_more(more)
        if not bound:
            return rollouts
        rollouts.counters["extra_rounds"] = rounds
        kept = ([group for group in rollouts.groups if is_mixed(group)] or rollouts.groups)[:wanted]
        chosen = {id(group) for group in kept}
        return replace(
            rollouts,
            groups=kept,
            left_out=[group for group in rollouts.groups if id(group) not in chosen],
        )

    def check(self, rollouts: Rollouts, newest: int, oldest: int = 0) -> None:
        """Names rewards that failed (each kind once); ends the run where none worked, or samples
        are of other weights.

        `newest`: the version of the weights that learn of them; `oldest`: so many updates before it
        samples may be.
        """
        if rollouts.errors:
            # texts that differ in a number would be said at every step: 20 at most
            kind = rollouts.errors[0].split(" (prompt")[0]
            self._said.warn(
                kind,
                f"{len(rollouts.errors)} samples were left out of this batch: {rollouts.errors[0]}",
                most=20,
            )
        drawn = [
            turn.ac for g in rollouts.groups for t in g.trajectories_G for turn in t.transitions
        ]
        versions: set[int | None] = set()
        for ac in drawn:
            versions |= {*ac.versions} if ac.versions else {ac.version}
        if versions - {newest - age for age in range(oldest + 1)}:
            expected = f"{newest}" if not oldest else f"{newest - oldest} to {newest}"
            raise RuntimeError(
                f"samples of versions {sorted(map(str, versions))}, version {expected} of the weights was expected"
            )
        if not rollouts.groups:
            what = "the reward" if self.given.environment is None else "the environment"
            raise EveryRewardFailed(
                f"{what} failed on every sample of the batch: {rollouts.errors[0]}"
            )
        pg = getattr(self.given.settings, "policy_gradient", None)
        single = all(len(t.transitions) == 1 for g in rollouts.groups for t in g.trajectories_G)
        if pg is not None and pg.step_rewards != "sum" and single:
            text = "every episode has one turn, and its reward is all there is to go"
            self._said.warn("to_go", f"step_rewards {pg.step_rewards} has no effect: {text}")
