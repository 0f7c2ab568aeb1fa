"""Environments and a sampler to trajectory groups: all episodes advance together, turn by turn, each turn one batch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl.advantages import has_signal
from rl.episodes import Env, EnvGroupBuilder, StepResult, Trajectory, TrajectoryGroup, Transition
from rl.renderers import Renderer
from rl.rewards import PendingScore, Score
from rl.sampler import Request
from rl.sampling_client import SamplingClient
from rl.seeds import derive_seed
from rl.types import ModelInput, SampledSequence, SamplingParams


@dataclass(slots=True)
class _Episode:
    """An episode under way: member `index` of group `group`."""

    group: int
    index: int
    env: Env
    observation: ModelInput
    stop: Sequence[str] | Sequence[int] | None
    transitions: list[Transition] = field(default_factory=list)
    error: str | None = None


@dataclass(slots=True)
class Rollouts:
    """Groups whose failed members are already taken out, and what happened on the way.

    `errors`: one text for each sample that a failing reward cost. `counters`: the engine's. `seconds`: sampling, scoring.
    """

    groups: list[TrajectoryGroup]
    errors: list[str]
    counters: dict[str, int]
    sample_seconds: float
    score_seconds: float
    left_out: list[TrajectoryGroup] = field(default_factory=list)  # sampled, but not to be trained on (dynamic sampling)

    @property
    def sampled(self) -> list[TrajectoryGroup]:
        """All of them: what metrics describe."""
        return [*self.groups, *self.left_out]

    def with_more(self, more: Rollouts) -> Rollouts:
        """These and those that were sampled after them."""
        return Rollouts(
            [*self.groups, *more.groups],
            [*self.errors, *more.errors],
            {name: self.counters.get(name, 0) + more.counters.get(name, 0) for name in {**self.counters, **more.counters}},
            self.sample_seconds + more.sample_seconds,
            self.score_seconds + more.score_seconds,
        )


def rollout(
    builders: Sequence[EnvGroupBuilder], sampler: SamplingClient, params: SamplingParams, *, seed: int, max_turns: int = 100
) -> Rollouts:
    """Plays every group to its end and returns their trajectories and rewards, in the order of `builders`.

    The random stream of a sample is a function of (seed, turn, problem, index in the group, position) alone; a problem
    that stands in the batch twice gets a second stream. Raises ValueError for a group without members.
    """
    episodes = _start(builders)
    streams = _streams([builder.problem_index for builder in builders])
    counters: Counter[str] = Counter()
    sample_seconds = score_seconds = 0.0
    live, turn = episodes, 0
    while live:
        if turn == max_turns:
            first = builders[live[0].group].problem_index
            raise RuntimeError(f"{len(live)} episodes have not ended after {max_turns} turns (problem {first} first)")
        start = time.perf_counter()
        actions, counts = _sample(live, streams, sampler, params, derive_seed(seed, turn))
        counters.update(counts)
        sampled = time.perf_counter()
        _advance(live, actions)
        sample_seconds += sampled - start
        score_seconds += time.perf_counter() - sampled
        live = [e for e in live if e.error is None and not e.transitions[-1].episode_done]
        turn += 1
    groups, errors = _finish(builders, episodes)
    return Rollouts(groups, errors, dict(counters), sample_seconds, score_seconds)


def _start(builders: Sequence[EnvGroupBuilder]) -> list[_Episode]:
    episodes = []
    for g, builder in enumerate(builders):
        envs = builder.make_envs()
        if not envs:
            raise ValueError(f"the group of problem {builder.problem_index} ({builder.tag}) has no environments")
        for i, env in enumerate(envs):
            observation, stop = env.initial_observation()
            episodes.append(_Episode(g, i, env, observation, stop))
    return episodes


def _streams(problem_indices: Sequence[int]) -> list[int]:
    """One stream a group: the problem's index, or for its k-th repetition in the batch a number derived from both."""
    seen: Counter[int] = Counter()
    streams = []
    for index in problem_indices:
        streams.append(index if seen[index] == 0 else derive_seed(index, seen[index]))
        seen[index] += 1
    return streams


def _sample(
    live: Sequence[_Episode], streams: Sequence[int], sampler: SamplingClient, params: SamplingParams, seed: int
) -> tuple[list[SampledSequence], dict[str, int]]:
    """One action for each live episode. Neighbours of a group with the same observation share one request (one prefill)."""
    requests: list[Request] = []
    last: _Episode | None = None
    for episode in live:
        shared = (
            last is not None
            and last.group == episode.group
            and last.index + requests[-1].num_samples == episode.index
            and last.observation is episode.observation
            and last.stop == episode.stop
        )
        if shared:
            requests[-1] = replace(requests[-1], num_samples=requests[-1].num_samples + 1)
            continue
        request = Request(
            prompt=episode.observation.to_ints(),
            num_samples=1,
            params=params if episode.stop is None else replace(params, stop=episode.stop),
            seed=seed,
            problem=streams[episode.group],
            first_index=episode.index,
        )
        requests.append(request)
        last = episode
    responses, counters = sampler.sample_many(requests).result()
    return [sequence for response in responses for sequence in response.sequences], counters


def _advance(live: Sequence[_Episode], actions: Sequence[SampledSequence]) -> None:
    """Steps every environment, then waits for the scores together: rewards of a whole turn are computed side by side."""
    results = [episode.env.step(action) for episode, action in zip(live, actions, strict=True)]
    for episode, action, result in zip(live, actions, results, strict=True):
        reward, metrics, error = _settle(result)
        episode.error = error
        episode.transitions.append(
            Transition(episode.observation, action, reward, result.episode_done, metrics, result.logs, result.truncated)
        )
        episode.observation, episode.stop = result.next_observation, result.next_stop_condition


def _settle(result: StepResult) -> tuple[float, dict[str, float], str | None]:
    """(reward, metrics, error): a number as it is, a pending score once it is there."""
    if not isinstance(result.reward, PendingScore):
        return float(result.reward), result.metrics, None
    score: Score = result.reward.result()
    return score.reward if score.reward is not None else 0.0, {**result.metrics, **score.metrics}, score.error


def _finish(builders: Sequence[EnvGroupBuilder], episodes: Sequence[_Episode]) -> tuple[list[TrajectoryGroup], list[str]]:
    members: list[list[_Episode]] = [[] for _ in builders]
    errors: list[str] = []
    for episode in episodes:
        if episode.error is None:
            members[episode.group].append(episode)
        else:
            errors.append(episode.error)
    groups = []
    for builder, group in zip(builders, members, strict=True):
        if not group:
            continue  # every member's reward failed: the errors say so
        trajectories = [Trajectory(episode.transitions, episode.observation) for episode in group]
        extra: list[tuple[float, dict[str, Any]]] = builder.compute_group_rewards(trajectories)
        groups.append(
            TrajectoryGroup(trajectories, [r for r, _ in extra], [m for _, m in extra], builder.tag, builder.problem_index)
        )
    return groups, errors


def is_mixed(group: TrajectoryGroup) -> bool:
    """Whether the group's members earned different rewards."""
    return has_signal(group.get_total_rewards())


def rollout_rows(rollouts: Rollouts, renderer: Renderer, temperature: float) -> Iterator[dict[str, Any]]:
    """One row for each trajectory: what was asked, answered, drawn (at `temperature`) and earned, to read and to train on again."""
    for g, group in enumerate(rollouts.groups):
        for i, (trajectory, reward) in enumerate(zip(group.trajectories_G, group.get_total_rewards(), strict=True)):
            turn = trajectory.transitions[-1]
            yield {
                "group": g,
                "index": i,
                "tag": group.tag,
                "problem": group.problem_index,
                "prompt": turn.logs.get("prompt", ""),
                "response": turn.logs.get("response", ""),
                "reward": reward,
                "advantage": trajectory.advantage,
                "stop_reason": turn.ac.stop_reason,
                "version": turn.ac.version,
                "temperature": temperature,
                "metrics": turn.metrics,
                "prompt_tokens": turn.ob.to_ints(),
                "response_tokens": turn.ac.tokens,
                "tokens": [renderer.tokenizer.decode([token]) for token in turn.ac.tokens],
                "logprobs": turn.ac.logprobs,
            }
