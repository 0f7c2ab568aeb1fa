"""Roll out groups of environments in lockstep: all episodes advance together, and each turn is a
single batch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from rl.rollout.episode_state import (
    EpisodeState,
    build_groups,
    check_context,
    check_player,
    fill_overflow_metric,
    get_sampling_params,
    record_step,
)
from rl.rollout.rollout_types import (
    EnvGroupBuilder,
    EpisodeFailed,
    StepResult,
    TrajectoryGroup,
    has_signal,
)
from rl.seed import derive_seed
from rl.types import SampledSequence, SampleResponse, SamplingParams

if TYPE_CHECKING:
    from rl.sampler import SamplingRequest


class ActionSampler(Protocol):
    """Sample actions: the part of SamplingClient that rollouts use."""

    @property
    def info(self) -> Mapping[str, Any]: ...

    def sample_many(self, requests: Sequence[SamplingRequest], /) -> PendingSamples: ...


class PendingSamples(Protocol):
    """Represent samples in progress: a future of responses and the engine's counters."""

    def result(self) -> tuple[list[SampleResponse], dict[str, int]]: ...


@dataclass(slots=True)
class RolloutBatch:
    """Hold groups without their failed members, and statistics of the rollout.

    `errors`: a message for each sample whose environment or reward failed. `counters`: the
    engine's. `sample_seconds`, `score_seconds`: seconds of sampling and of scoring.
    """

    groups: list[TrajectoryGroup]
    errors: list[str]
    counters: dict[str, int]
    sample_seconds: float
    score_seconds: float
    # groups that were sampled but are not trained on (dynamic sampling)
    untrained_groups: list[TrajectoryGroup] = field(default_factory=list)

    @property
    def all_groups(self) -> list[TrajectoryGroup]:
        """Return all sampled groups, which the metrics describe."""
        return [*self.groups, *self.untrained_groups]

    def merge(self, other: RolloutBatch) -> RolloutBatch:
        """Return these rollouts together with `other`, which were sampled later."""
        return RolloutBatch(
            [*self.groups, *other.groups],
            [*self.errors, *other.errors],
            {
                name: self.counters.get(name, 0) + other.counters.get(name, 0)
                for name in {**self.counters, **other.counters}
            },
            self.sample_seconds + other.sample_seconds,
            self.score_seconds + other.score_seconds,
        )


def rollout(
    builders: Sequence[EnvGroupBuilder],
    sampler: ActionSampler,
    params: SamplingParams,
    *,
    seed: int,
    max_turns: int | None = None,
    players: Mapping[str, ActionSampler] | None = None,
) -> RolloutBatch:
    """Run the episodes of every group to their end. Return their trajectories and rewards, in the
    order of `builders`.

    If the next observation of an episode leaves fewer than `params.max_tokens` tokens in the
    model's context, the episode ends: it is truncated, the metrics of its last turn have
    `context_overflow` 1, and it keeps the rewards earned so far. If the first observation leaves
    too few, the episode is left out and `errors` has the reason. The same holds for the builder's
    `max_tokens`. `max_turns` overrides the builders' `max_turns`.

    `players`: samplers of seats that are not the policy's, by the names that environments use. If
    several seats of an episode are the policy's, the trajectories of each seat form a separate
    group, because they are not comparable across seats.

    The random stream of a sample is a function of (seed, turn, problem, index in the group,
    position) alone; a problem that occurs twice in the batch gets a second stream. Raises
    ValueError for a group without members, RuntimeError if an episode exceeds the maximum number of
    turns.
    """
    episodes: list[EpisodeState] = []
    streams = assign_random_streams([builder.problem_index for builder in builders])
    samplers: dict[str | None, ActionSampler] = {
        name: client for name, client in (players or {}).items()
    }  # noqa: C416
    samplers[None] = sampler
    counters: Counter[str] = Counter()
    sample_seconds, turn = 0.0, 0
    try:
        score_seconds = _start_episodes(builders, episodes)
        live = [e for e in episodes if e.error is None]
        while live := [e for e in live if _can_continue(e, builders[e.group], params, samplers)]:
            for episode in live:
                if turn >= (builders[episode.group].max_turns if max_turns is None else max_turns):
                    first = builders[episode.group].problem_index
                    raise RuntimeError(
                        f"{len(live)} episodes have not ended after {turn} turns (problem {first} "
                        f"first)"
                    )
            start = time.perf_counter()
            actions = _sample_actions(
                live, streams, samplers, params, derive_seed(seed, turn), counters
            )
            sampled = time.perf_counter()
            _step_environments(live, actions)
            sample_seconds += sampled - start
            score_seconds += time.perf_counter() - sampled
            live = [e for e in live if e.error is None and not e.transitions[-1].episode_done]
            turn += 1
    finally:
        for episode in episodes:
            episode.env.close()
    fill_overflow_metric(episodes)
    groups, errors = build_groups(builders, episodes)
    return RolloutBatch(groups, errors, dict(counters), sample_seconds, score_seconds)


def _can_continue(
    episode: EpisodeState,
    builder: EnvGroupBuilder,
    params: SamplingParams,
    samplers: Mapping[str | None, ActionSampler],
) -> bool:
    """Return whether the episode's next player is available and the next action fits into its
    context.
    """
    return check_player(episode, builder, samplers) and check_context(
        episode, builder, params, samplers[episode.player].info["max_context"]
    )


def _start_episodes(builders: Sequence[EnvGroupBuilder], episodes: list[EpisodeState]) -> float:
    """Append all episodes, each with its first observation or its error. Return the elapsed
    seconds. Raises ValueError if a builder makes no environments.
    """
    begin = time.perf_counter()
    for g, builder in enumerate(builders):
        envs = builder.make_envs()
        if not envs:
            raise ValueError(
                f"the group of problem {builder.problem_index} ({builder.tag}) has no environments"
            )
        episodes += [EpisodeState(g, i, env) for i, env in enumerate(envs)]
    observations = [episode.env.initial_observation() for episode in episodes]
    for episode, first in zip(episodes, observations, strict=True):
        try:
            episode.observation, episode.stop = (
                first if isinstance(first, tuple) else first.result()
            )
        except EpisodeFailed as failed:
            episode.error = str(failed)
    return time.perf_counter() - begin


def assign_random_streams(problem_indices: Sequence[int]) -> list[int]:
    """Return a random stream for each group: the problem's index, or for the k-th repetition of the
    problem in the batch a number derived from both.
    """
    counts: Counter[int] = Counter()
    streams = []
    for index in problem_indices:
        streams.append(index if counts[index] == 0 else derive_seed(index, counts[index]))
        counts[index] += 1
    return streams


def _sample_actions(
    live: Sequence[EpisodeState],
    streams: Sequence[int],
    samplers: Mapping[str | None, ActionSampler],
    params: SamplingParams,
    seed: int,
    counters: Counter[str],
) -> list[SampledSequence]:
    """Return an action for each live episode, sampled by the player whose turn it is. Add the
    policy's engine counters (not those of other players) to `counters`.
    """
    sequence_of: dict[int, SampledSequence] = {}
    for player in dict.fromkeys(episode.player for episode in live):
        player_episodes = [episode for episode in live if episode.player == player]
        responses, counts = (
            samplers[player]
            .sample_many(_build_requests(player_episodes, streams, params, seed))
            .result()
        )
        if player is None:
            counters.update(counts)
        sequences = [sequence for response in responses for sequence in response.sequences]
        sequence_of.update(
            (id(episode), sequence)
            for episode, sequence in zip(player_episodes, sequences, strict=True)
        )
    return [sequence_of[id(episode)] for episode in live]


def _build_requests(
    live: Sequence[EpisodeState], streams: Sequence[int], params: SamplingParams, seed: int
) -> list[SamplingRequest]:
    """Return the requests for a sampler. Adjacent episodes of a group with the same observation
    share a request (a single prefill).
    """
    # imported here: rl.sampler needs torch, which the help text and method settings must not import
    from rl.sampler import SamplingRequest

    requests: list[SamplingRequest] = []
    last: EpisodeState | None = None
    for episode in live:
        shared = (
            last is not None
            and last.group == episode.group
            and last.index + requests[-1].num_samples == episode.index
            and last.observation is episode.observation
            and last.stop == episode.stop
            and last.env.most_tokens == episode.env.most_tokens
        )
        if shared:
            requests[-1] = replace(requests[-1], num_samples=requests[-1].num_samples + 1)
            continue
        request = SamplingRequest(
            prompt=episode.observation.flat(),
            images=episode.observation.placed(),
            num_samples=1,
            params=get_sampling_params(episode, params),
            seed=seed,
            problem=streams[episode.group],
            first_index=episode.index,
        )
        requests.append(request)
        last = episode
    return requests


def _step_environments(live: Sequence[EpisodeState], actions: Sequence[SampledSequence]) -> None:
    """Step every environment, then wait for all pending steps and scores together, so that they run
    concurrently.
    """
    seats = [episode.env.seat for episode in live]
    promised = [episode.env.step(action) for episode, action in zip(live, actions, strict=True)]
    for episode, action, seat, promise in zip(live, actions, seats, promised, strict=True):
        try:
            result = promise if isinstance(promise, StepResult) else promise.result()
        except EpisodeFailed as failed:
            episode.error = str(failed)
            continue
        record_step(episode, action, seat, result)


def is_mixed(group: TrajectoryGroup) -> bool:
    """Return whether the group's members earned different rewards."""
    return has_signal(group.get_total_rewards())
