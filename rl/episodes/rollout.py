"""Environments and a sampler to trajectory groups: all episodes advance together, turn by turn,
each turn one batch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from rl.episodes.episode import (
    EnvGroupBuilder,
    EpisodeFailed,
    StepResult,
    TrajectoryGroup,
    has_signal,
)
from rl.episodes.playing import Playing, count_overflows, finished, fits, own_params, seated, take
from rl.seeds import derive_seed
from rl.types import SampledSequence, SampleResponse, SamplingParams

if TYPE_CHECKING:
    from rl.sampler import Request


class Sampler(Protocol):
    """What draws the actions: a SamplingClient, as far as it is asked here."""

    @property
    def info(self) -> Mapping[str, Any]: ...

    def sample_many(self, requests: Sequence[Request], /) -> Drawing: ...


class Drawing(Protocol):
    """Samples under way: a future of responses and the engine's counters."""

    def result(self) -> tuple[list[SampleResponse], dict[str, int]]: ...


@dataclass(slots=True)
class Rollouts:
    """Groups whose failed members are already taken out, and what happened on the way.

    `errors`: one text for each sample that a failing reward cost. `counters`: the engine's.
    `seconds`: sampling, scoring.
    """

    groups: list[TrajectoryGroup]
    errors: list[str]
    counters: dict[str, int]
    sample_seconds: float
    score_seconds: float
    # sampled, but not to be trained on (dynamic sampling)
    left_out: list[TrajectoryGroup] = field(default_factory=list)

    @property
    def sampled(self) -> list[TrajectoryGroup]:
        """All of them: what metrics describe."""
        return [*self.groups, *self.left_out]

    def with_more(self, more: Rollouts) -> Rollouts:
        """These and those that were sampled after them."""
        return Rollouts(
            [*self.groups, *more.groups],
            [*self.errors, *more.errors],
            {
                name: self.counters.get(name, 0) + more.counters.get(name, 0)
                for name in {**self.counters, **more.counters}
            },
            self.sample_seconds + more.sample_seconds,
            self.score_seconds + more.score_seconds,
        )


def rollout(
    builders: Sequence[EnvGroupBuilder],
    sampler: Sampler,
    params: SamplingParams,
    *,
    seed: int,
    max_turns: int | None = None,
    players: Mapping[str, Sampler] | None = None,
) -> Rollouts:
    """Plays every group to its end and returns their trajectories and rewards, in the order of
    `builders`.

    An episode whose next observation leaves no room for `params.max_tokens` in the model's context
    ends there: it is truncated, its last turn's metrics have `context_overflow` 1, its rewards are
    those it has earned. One whose first observation leaves none is left out, and `errors` says so.
    The same holds of the builder's own `max_tokens`. `max_turns`: instead of the builders' own.

    `players`: samplers of seats that are not the policy's, by the names that environments give
    them. Where several seats of an episode are the policy's, their trajectories stand in groups of
    their own, one a seat, since they are not comparable.

    The random stream of a sample is a function of (seed, turn, problem, index in the group,
    position) alone; a problem that stands in the batch twice gets a second stream. Raises
    ValueError for a group without members.
    """
    episodes: list[Playing] = []
    streams = group_streams([builder.problem_index for builder in builders])
    samplers: dict[str | None, Sampler] = {name: client for name, client in (players or {}).items()}  # noqa: C416
    samplers[None] = sampler
    counters: Counter[str] = Counter()
    sample_seconds, turn = 0.0, 0
    try:
        score_seconds = _start(builders, episodes)
        live = [e for e in episodes if e.error is None]
        while live := [e for e in live if _goes_on(e, builders[e.group], params, samplers)]:
            for episode in live:
                if turn >= (builders[episode.group].max_turns if max_turns is None else max_turns):
                    first = builders[episode.group].problem_index
                    raise RuntimeError(
                        f"{len(live)} episodes have not ended after {turn} turns (problem {first} first)"
                    )
            start = time.perf_counter()
            actions = _sample(live, streams, samplers, params, derive_seed(seed, turn), counters)
            sampled = time.perf_counter()
            _advance(live, actions)
            sample_seconds += sampled - start
            score_seconds += time.perf_counter() - sampled
            live = [e for e in live if e.error is None and not e.transitions[-1].episode_done]
            turn += 1
    finally:
        for episode in episodes:
            episode.env.close()
    count_overflows(episodes)
    groups, errors = finished(builders, episodes)
    return Rollouts(groups, errors, dict(counters), sample_seconds, score_seconds)


def _goes_on(
    episode: Playing,
    builder: EnvGroupBuilder,
    params: SamplingParams,
    samplers: Mapping[str | None, Sampler],
) -> bool:
    return seated(episode, builder, samplers) and fits(
        episode, builder, params, samplers[episode.player].info["max_context"]
    )


def _start(builders: Sequence[EnvGroupBuilder], episodes: list[Playing]) -> float:
    """Append all episodes, each with its first observation or its error. Return the seconds that
    took.
    """
    begin = time.perf_counter()
    for g, builder in enumerate(builders):
        envs = builder.make_envs()
        if not envs:
            raise ValueError(
                f"the group of problem {builder.problem_index} ({builder.tag}) has no environments"
            )
        episodes += [Playing(g, i, env) for i, env in enumerate(envs)]
    given = [episode.env.initial_observation() for episode in episodes]
    for episode, first in zip(episodes, given, strict=True):
        try:
            episode.observation, episode.stop = (
                first if isinstance(first, tuple) else first.result()
            )
        except EpisodeFailed as failed:
            episode.error = str(failed)
    return time.perf_counter() - begin


def group_streams(problem_indices: Sequence[int]) -> list[int]:
    """One stream a group: the problem's index, or for its k-th repetition in the batch a number
    derived from both.
    """
    seen: Counter[int] = Counter()
    streams = []
    for index in problem_indices:
        streams.append(index if seen[index] == 0 else derive_seed(index, seen[index]))
        seen[index] += 1
    return streams


def _sample(
    live: Sequence[Playing],
    streams: Sequence[int],
    samplers: Mapping[str | None, Sampler],
    params: SamplingParams,
    seed: int,
    counters: Counter[str],
) -> list[SampledSequence]:
    """One action for each live episode, of whoever's turn it is. The engines' counters are added to
    `counters`: the policy's alone.
    """
    drawn: dict[int, SampledSequence] = {}
    for player in dict.fromkeys(episode.player for episode in live):
        theirs = [episode for episode in live if episode.player == player]
        responses, counts = (
            samplers[player].sample_many(_requests(theirs, streams, params, seed)).result()
        )
        if player is None:
            counters.update(counts)
        sequences = [sequence for response in responses for sequence in response.sequences]
        drawn.update(
            (id(episode), sequence) for episode, sequence in zip(theirs, sequences, strict=True)
        )
    return [drawn[id(episode)] for episode in live]


def _requests(
    live: Sequence[Playing], streams: Sequence[int], params: SamplingParams, seed: int
) -> list[Request]:
    """What is asked of one sampler. Neighbours of a group with the same observation share one
    request (one prefill).
    """
    # with torch, which the help and the settings of methods do without
    from rl.sampler import Request

    requests: list[Request] = []
    last: Playing | None = None
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
        request = Request(
            prompt=episode.observation.flat(),
            images=episode.observation.placed(),
            num_samples=1,
            params=own_params(episode, params),
            seed=seed,
            problem=streams[episode.group],
            first_index=episode.index,
        )
        requests.append(request)
        last = episode
    return requests


def _advance(live: Sequence[Playing], actions: Sequence[SampledSequence]) -> None:
    """Steps every environment, then waits for what they promised and for the scores together: they
    work side by side.
    """
    seats = [episode.env.seat for episode in live]
    promised = [episode.env.step(action) for episode, action in zip(live, actions, strict=True)]
    for episode, action, seat, promise in zip(live, actions, seats, promised, strict=True):
        try:
            result = promise if isinstance(promise, StepResult) else promise.result()
        except EpisodeFailed as failed:
            episode.error = str(failed)
            continue
        take(episode, action, seat, result)


def is_mixed(group: TrajectoryGroup) -> bool:
    """Whether the group's members earned different rewards."""
    return has_signal(group.get_total_rewards())
