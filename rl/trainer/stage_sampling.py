"""Sample what a stage learns from: enough answers to problems, without those that cannot be learned
from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from rl.client import SampleStream, SamplingClient
from rl.envs import ProblemGroupBuilder
from rl.errors import UserError
from rl.judges import add_episode_rewards, apply_learned_rewards
from rl.reporting import Console
from rl.rollout import (
    ActionSampler,
    EnvGroupBuilder,
    EventLog,
    RolloutBatch,
    RolloutEngine,
    RolloutSchedule,
    is_mixed,
    open_engine,
    rollout,
    start_groups,
)
from rl.seed import derive_seed
from rl.trainer.stage_context import StageContext
from rl.trainer.stage_environment import build_episode_groups
from rl.types import Problem, SamplingParams


class AllRewardsFailed(UserError):
    """Raised if no sample of a batch could be scored: the reward is broken, and training would
    continue on nothing.
    """


class WarnOnce:
    """Record which kinds of warnings were printed."""

    def __init__(self, console: Console):
        self._console = console
        self.printed_kinds: set[str] = set()

    def warn(self, kind: str, text: str, *, max_kinds: int | None = None) -> None:
        """Print `text` unless its kind was printed before, at most `max_kinds` kinds."""
        if kind not in self.printed_kinds and (
            max_kinds is None or len(self.printed_kinds) < max_kinds
        ):
            self.printed_kinds.add(kind)
            self._console.warn(text)


class StageSampler:
    """Choose the players, sample the rollouts, and select those to train on."""

    def __init__(self, context: StageContext, warn_once: WarnOnce):
        self.context, self._warn_once = context, warn_once

    def build_groups(
        self, problems: Sequence[Problem], group_size: int
    ) -> Sequence[EnvGroupBuilder]:
        context = self.context
        if context.environment is not None:
            renderers = None if context.opponents is None else context.opponents.renderers
            return build_episode_groups(
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

    def load_players(self, batch: int) -> Mapping[str, ActionSampler]:
        """Return the samplers of a batch's players other than the policy."""
        return (
            {}
            if self.context.opponents is None
            else self.context.opponents.players(batch, self.context.seed)
        )

    def load_held_out_players(self) -> Mapping[str, ActionSampler]:
        """Return the samplers of an evaluation's players other than the policy."""
        return {} if self.context.opponents is None else self.context.opponents.held_out_players()

    def sample_batch(
        self,
        builders: Sequence[EnvGroupBuilder],
        sampler: SamplingClient,
        batch: int,
        seed: int,
        part: str = "",
    ) -> RolloutBatch:
        """Run a batch, or a further `part` of it, to its end, with its episodes in lockstep or each
        by itself.
        """
        context, players = self.context, self.load_players(batch)
        if context.replay_log is None:
            return rollout(builders, sampler, context.sampling_params, seed=seed, players=players)
        context.replay_log.batch = batch
        return self.sample_episodes(builders, sampler, context.sampling_params, seed, players, part)

    def sample_episodes(
        self,
        builders: Sequence[EnvGroupBuilder],
        sampler: SamplingClient,
        params: SamplingParams,
        seed: int,
        players: Mapping[str, ActionSampler],
        part: str = "",
    ) -> RolloutBatch:
        """Run episodes to their end, each by itself: no episode waits for a slow one. A run with
        an event log records the events as this `part` of the batch.
        """
        replay_log = self.context.replay_log
        return rollout(
            builders,
            sampler,
            params,
            seed=seed,
            players=players,
            schedule=self.schedule,
            event_log=None if replay_log is None else replay_log.create_event_log(part=part),
        )

    def sample_in_parts(
        self,
        builders: Sequence[EnvGroupBuilder],
        sampler: SamplingClient,
        batch: int,
        seed: int,
        consume: Callable[[RolloutBatch], None],
    ) -> RolloutBatch:
        """Run a batch in parts. Call `consume` with each part as soon as its groups have ended, in
        the order of parts and of groups.
        """
        context = self.context
        assert context.replay_log is not None
        context.replay_log.batch = batch
        samplers: dict[str | None, Any] = {None: sampler}
        samplers.update(self.load_players(batch).items())
        cuts = [
            round(i * len(builders) / context.flow.gradient_parts)
            for i in range(context.flow.gradient_parts + 1)
        ]
        parts: list[RolloutBatch] = []
        with self.start_engine(samplers, context.replay_log.create_event_log()) as engine:
            start_groups(engine, builders, seed)
            for low, high in zip(cuts[:-1], cuts[1:], strict=True):
                while not set(range(low, high)) <= set(engine.completed_groups()):
                    engine.tick()
                parts.append(self.add_judgements(engine.take_rollouts(range(low, high))))
                consume(parts[-1])
        return functools.reduce(RolloutBatch.merge, parts)

    def start_engine(
        self, samplers: Mapping[str | None, Any], event_log: EventLog
    ) -> AbstractContextManager[RolloutEngine]:
        """Run episodes with separate sample streams, which close with the context."""
        return open_engine(samplers, self.context.sampling_params, self.schedule, event_log)

    @property
    def schedule(self) -> RolloutSchedule:
        """Return the schedule of episodes that continue independently. A blocking environment has
        the seconds of an episode for each turn.
        """
        flow, env = self.context.flow, getattr(self.context.settings, "env", None)
        return RolloutSchedule(
            make_stream=SampleStream,
            steps=flow.slice_steps,
            max_environments=flow.max_waiting,
            env_timeout=float(env.episode_seconds) if env is not None else 600.0,
        )

    def add_judgements(self, rollouts: RolloutBatch, *, ungrouped: bool = False) -> RolloutBatch:
        """Add the rewards of whole episodes (besides the environment's), and the judgement of a
        model. `ungrouped`: the answers form no group.
        """
        context = self.context
        episode_scorer = context.scorer if context.environment is not None else None
        return apply_learned_rewards(
            add_episode_rewards(rollouts, episode_scorer),
            context.models.rewards,
            ungrouped=ungrouped,
        )

    def fill_mixed_groups(
        self, rollouts: RolloutBatch, batch: int, sampler: SamplingClient
    ) -> RolloutBatch:
        """Sample further problems until batch_size groups are mixed, within a bound (dynamic
        sampling: DAPO, arXiv 2503.14476, section 3.2).

        Without dynamic sampling, return the same rollouts. Groups without signal and groups beyond
        batch_size are left out of training, but not of metrics. If no group is mixed, the first
        batch_size groups are used. Each round shuffles its problems differently. A round in which
        every reward failed is the last: more samples would only fail again (`check_rollouts`
        reports the reason if nothing remains).
        """
        context = self.context
        bound, batch_size = context.settings.sampling.dynamic_sampling, context.loop.batch_size
        rounds, more = 0, rollouts
        while rounds < bound and more.groups and sum(map(is_mixed, rollouts.groups)) < batch_size:
            rounds += 1
            problems = context.problems.batch(
                batch, batch_size, derive_seed(context.seed, "extra", rounds)
            )
            seed = derive_seed(context.seed, "sample", batch, rounds)
            builders = self.build_groups(problems, context.method.group_size)
            more = self.sample_batch(builders, sampler, batch, seed, f"extra {rounds}")
            more = self.add_judgements(more)
            rollouts = rollouts.merge(more)
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
            untrained_groups=[group for group in rollouts.groups if id(group) not in chosen],
        )

    def check_rollouts(
        self, rollouts: RolloutBatch, learner_version: int, max_staleness: int = 0
    ) -> None:
        """Warn about failed rewards (each kind once). End the run if no reward worked, or samples
        come from other weights.

        `learner_version`: weight version that learns from the samples; `max_staleness`: allowed
        staleness in updates.

        Raises AllRewardsFailed, or RuntimeError for samples of unexpected weight versions.
        """
        if rollouts.errors:
            # texts that differ in a number would be printed at every step: 20 at most
            kind = rollouts.errors[0].split(" (prompt")[0]
            self._warn_once.warn(
                kind,
                f"{len(rollouts.errors)} samples were left out of this batch: {rollouts.errors[0]}",
                max_kinds=20,
            )
        actions = [
            turn.ac for g in rollouts.groups for t in g.trajectories_G for turn in t.transitions
        ]
        versions: set[int | None] = set()
        for ac in actions:
            versions |= {*ac.versions} if ac.versions else {ac.version}
        if versions - {learner_version - age for age in range(max_staleness + 1)}:
            expected = (
                f"{learner_version}"
                if not max_staleness
                else f"{learner_version - max_staleness} to {learner_version}"
            )
            raise RuntimeError(
                f"samples come from weight versions {sorted(map(str, versions))}, expected "
                f"version {expected}"
            )
        if not rollouts.groups:
            source = "the reward" if self.context.environment is None else "the environment"
            raise AllRewardsFailed(
                f"{source} failed on every sample of the batch: {rollouts.errors[0]}"
            )
        pg = getattr(self.context.settings, "policy_gradient", None)
        single = all(len(t.transitions) == 1 for g in rollouts.groups for t in g.trajectories_G)
        if pg is not None and pg.step_rewards != "sum" and single:
            text = "every episode has one turn, so its reward is the whole reward to go"
            self._warn_once.warn("to_go", f"step_rewards {pg.step_rewards} has no effect: {text}")
