"""Sample what a stage learns from: enough answers to problems, without those that cannot be learned
from.
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
    """Raised if no sample of a batch could be scored: the reward is broken, and training would
    continue on nothing.
    """


class Samples:
    """Choose the players, sample the rollouts, and select those to train on."""

    def __init__(self, given: Given, said: Said):
        self.given, self._said = given, said

    def groups(self, problems: Sequence[Problem], group_size: int) -> Sequence[EnvGroupBuilder]:
        context = self.given
        if context.environment is not None:
            renderers = None if context.opponents is None else context.opponents.renderers
            return episode_groups(
                context.environment,
                context.settings,
                problems,
                group_size,
                context.renderer,
                renderers,
            )
        return [
            ProblemGroupBuilder(problem, group_size, context.renderer, context.scorer)
            for problem in problems
        ]

    def players(self, batch: int) -> Mapping[str, Sampler]:
        """Return the samplers of a batch's players other than the policy."""
        return (
            {}
            if self.given.opponents is None
            else self.given.opponents.players(batch, self.given.seed)
        )

    def held_out_players(self) -> Mapping[str, Sampler]:
        """Return the samplers of an evaluation's players other than the policy."""
        return {} if self.given.opponents is None else self.given.opponents.held_out_players()

    def roll(
        self, builders: Sequence[EnvGroupBuilder], sampler: SamplingClient, batch: int, seed: int
    ) -> Rollouts:
        """Run a batch to its end, with its episodes in lockstep or each by itself."""
        context, players = self.given, self.players(batch)
        if context.decisions is None:
            return rollout(builders, sampler, context.sampling_params, seed=seed, players=players)
        context.decisions.batch = batch
        return continuous_rollout(
            builders,
            sampler,
            context.sampling_params,
            seed=seed,
            players=players,
            stream_of=SampleStream,
            limit=context.flow.max_waiting,
            steps=context.flow.slice_steps,
            seconds=self.seconds,
            clock=context.decisions.clock(),
        )

    def stream(
        self,
        builders: Sequence[EnvGroupBuilder],
        sampler: SamplingClient,
        batch: int,
        seed: int,
        use: Callable[[Rollouts], None],
    ) -> Rollouts:
        """Run a batch in parts. Call `use` with each part as soon as its groups have ended, in the
        order of parts and of groups.
        """
        context = self.given
        assert context.decisions is not None
        context.decisions.batch = batch
        samplers: dict[str | None, Any] = {None: sampler}
        samplers.update(self.players(batch).items())
        streams = group_streams([builder.problem_index for builder in builders])
        cuts = [
            round(i * len(builders) / context.flow.parts) for i in range(context.flow.parts + 1)
        ]
        parts: list[Rollouts] = []
        with self.flow(samplers, context.decisions.clock()) as flow:
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
        """Run episodes with separate sample streams, which close with the context."""
        waiters = Waiters(self.given.flow.max_waiting)
        with ExitStack() as stack:
            stack.callback(waiters.close)
            seats = {
                player: Seat(
                    stack.enter_context(SampleStream(player_sampler)),
                    player_sampler.info["max_context"],
                )
                for player, player_sampler in samplers.items()
            }
            params, steps = self.given.sampling_params, self.given.flow.slice_steps
            flow = Flow(seats, params, waiters, clock, steps=steps, seconds=self.seconds)
            stack.callback(flow.close)
            yield flow

    @property
    def seconds(self) -> float:
        """Return the seconds that a blocking environment waits for an answer."""
        env = getattr(self.given.settings, "env", None)
        return float(env.episode_seconds) if env is not None else 600.0

    def judged(self, rollouts: Rollouts, *, alone: bool = False) -> Rollouts:
        """Add the rewards of whole episodes (besides the environment's), and the judgement of a
        model. `alone`: the answers form no group.
        """
        context = self.given
        episode_scorer = context.scorer if context.environment is not None else None
        return judged(
            with_episode_rewards(rollouts, episode_scorer), context.models.rewards, alone=alone
        )

    def fill(self, rollouts: Rollouts, batch: int, sampler: SamplingClient) -> Rollouts:
        """Sample further problems until batch_size groups are mixed, within a bound (dynamic
        sampling: DAPO, arXiv 2503.14476, section 3.2).

        Without dynamic sampling, return the same rollouts. Groups without signal and groups beyond
        batch_size are left out of training, but not of metrics. If no group is mixed, the first
        batch_size groups are used. Each round shuffles its problems differently. A round in which
        every reward failed is the last: more samples would only fail again (`check` reports the
        reason if nothing remains).
        """
        context = self.given
        bound, batch_size = context.settings.sampling.dynamic_sampling, context.loop.batch_size
        rounds, more = 0, rollouts
        while rounds < bound and more.groups and sum(map(is_mixed, rollouts.groups)) < batch_size:
            rounds += 1
            problems = context.problems.batch(
                batch, batch_size, derive_seed(context.seed, "extra", rounds)
            )
            seed = derive_seed(context.seed, "sample", batch, rounds)
            builders = self.groups(problems, context.method.group_size)
            more = rollout(
                builders, sampler, context.sampling_params, seed=seed, players=self.players(batch)
            )
            more = self.judged(more)
            rollouts = rollouts.with_more(more)
        if not bound:
            return rollouts
        rollouts.counters["extra_rounds"] = rounds
        selected = ([group for group in rollouts.groups if is_mixed(group)] or rollouts.groups)[
            :batch_size
        ]
        chosen = {id(group) for group in selected}
        return replace(
            rollouts,
            groups=selected,
            left_out=[group for group in rollouts.groups if id(group) not in chosen],
        )

    def check(self, rollouts: Rollouts, newest: int, oldest: int = 0) -> None:
        """Warn about failed rewards (each kind once). End the run if no reward worked, or samples
        come from other weights.

        `newest`: weight version that learns from the samples; `oldest`: allowed staleness in
        updates.

        Raises EveryRewardFailed, or RuntimeError for samples of unexpected weight versions.
        """
        if rollouts.errors:
            # texts that differ in a number would be printed at every step: 20 at most
            kind = rollouts.errors[0].split(" (prompt")[0]
            self._said.warn(
                kind,
                f"{len(rollouts.errors)} samples were left out of this batch: {rollouts.errors[0]}",
                most=20,
            )
        actions = [
            turn.ac for g in rollouts.groups for t in g.trajectories_G for turn in t.transitions
        ]
        versions: set[int | None] = set()
        for ac in actions:
            versions |= {*ac.versions} if ac.versions else {ac.version}
        if versions - {newest - age for age in range(oldest + 1)}:
            expected = f"{newest}" if not oldest else f"{newest - oldest} to {newest}"
            raise RuntimeError(
                f"samples come from weight versions {sorted(map(str, versions))}, expected "
                f"version {expected}"
            )
        if not rollouts.groups:
            source = "the reward" if self.given.environment is None else "the environment"
            raise EveryRewardFailed(
                f"{source} failed on every sample of the batch: {rollouts.errors[0]}"
            )
        pg = getattr(self.given.settings, "policy_gradient", None)
        single = all(len(t.transitions) == 1 for g in rollouts.groups for t in g.trajectories_G)
        if pg is not None and pg.step_rewards != "sum" and single:
            text = "every episode has one turn, so its reward is the whole reward to go"
            self._said.warn("to_go", f"step_rewards {pg.step_rewards} has no effect: {text}")
