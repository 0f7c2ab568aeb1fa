"""Advance episodes asynchronously: an episode continues as soon as its turn, reward or tool result
is ready, while other episodes decode.

A tick takes the environment results that have arrived since the last tick, requests the turns that
follow, and lets the sampler take some steps. A `Clock` decides which results had arrived; the rest
of the tick follows from that decision. The sampled tokens do not depend on the decisions: the
random stream of a sample is a function of (seed, turn, problem, member, position), the same as in
lockstep rollouts (rl.episodes.rollout).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from rl.episodes.clock import Clock, Decision
from rl.episodes.episode import Env, EnvGroupBuilder, EpisodeFailed, StepResult
from rl.episodes.playing import Playing, count_overflows, finished, fits, own_params, seated, take
from rl.episodes.rollout import Rollouts
from rl.episodes.waiting import Key, Waiters
from rl.rewards import PendingScore
from rl.seeds import derive_seed
from rl.types import SampledSequence, SamplingParams

if TYPE_CHECKING:
    from rl.sampler import Request


class Drawn(Protocol):
    """Hold the result of a slice of decoding: finished responses by ticket, and the engine's
    counters.
    """

    finished: dict[int, Any]
    counters: dict[str, int]


class DrawStream(Protocol):
    """Sample a slice at a time: the part of SampleStream that rollouts use."""

    @property
    def busy(self) -> bool: ...

    def add(self, request: Request, /) -> int: ...

    def drop(self, ticket: int, /) -> None: ...

    def leave(self, conversation: str, /) -> None: ...

    def unfinished(self) -> Mapping[int, Request]: ...

    def renew(self) -> None: ...

    def switch(self, client: Any, /, *, anew: bool) -> None: ...

    def slice(self, steps: int, /) -> Drawn: ...


@dataclass
class Seat:
    """Hold the sampling stream of a player, and the maximum number of tokens that the player
    reads.
    """

    stream: DrawStream
    context: int | None


@dataclass
class Begun:
    """Hold the state of a running group. `seed`: of its samples. `problem`: their random stream.
    `since`: the weight version when the group started.
    """

    number: int
    builder: EnvGroupBuilder
    seed: int
    problem: int
    since: int
    episodes: list[Playing] = field(default_factory=list)
    open: int = 0  # number of episodes that have not ended


class Flow:
    """Run groups of episodes asynchronously. Call `tick` until the required groups are `done`, then
    `take` them.

    `seats`: by player, None for the policy. `seconds`: timeout of an environment that blocks (other
    environments have their specific timeouts). The thread that calls `tick` also calls the
    environments, except environments that block (`Env.blocks`): a thread of the waiters calls
    these.
    """

    def __init__(
        self,
        seats: Mapping[str | None, Seat],
        params: SamplingParams,
        waiters: Waiters,
        clock: Clock,
        *,
        steps: int = 16,
        seconds: float | None = None,
        max_turns: int | None = None,
    ):
        self.seats, self.params, self.waiters, self.clock = seats, params, waiters, clock
        self.steps, self.seconds, self.max_turns = steps, seconds, max_turns
        self.groups: dict[int, Begun] = {}
        # whether an update is running or its weights are in transit
        self.learning: Callable[[], bool] = lambda: False
        self.learned: Callable[[], bool] = lambda: False  # whether the update has ended
        # whether weights in transit have arrived; None if no weights are in transit
        self.landed: Callable[[], bool | None] = lambda: None
        self.counters: dict[str, int] = {}
        self.sample_seconds = self.score_seconds = 0.0
        # recorded actions that are replayed instead of sampled
        self.scripts: dict[Key, list[SampledSequence]] = {}
        # while scripts are replayed: the episodes that have reached the end of their script
        self.parked: dict[Key, Playing] | None = None
        self._acting: dict[
            tuple[str | None, int], Playing
        ] = {}  # episodes with a sample in progress, by player and ticket
        # environment calls that are due; action None: the first observation
        self._to_step: deque[tuple[Playing, SampledSequence | None]] = deque()
        self._waiting: dict[Key, tuple[Playing, SampledSequence | None, int]] = {}

    # --------------------------------------------------------------------------------------- groups

    def begin(
        self, number: int, builder: EnvGroupBuilder, *, seed: int, problem: int, since: int = 0
    ) -> Begun:
        """Start the episodes of a group. `number` must differ from the number of every other group.
        Raises ValueError if the builder makes no environments.
        """
        group = Begun(number, builder, seed, problem, since)
        group.episodes = [Playing(number, i, env) for i, env in enumerate(builder.make_envs())]
        if not group.episodes:
            raise ValueError(
                f"the group of problem {builder.problem_index} ({builder.tag}) has no environments"
            )
        group.open = len(group.episodes)
        self.groups[number] = group
        self._to_step.extend((episode, None) for episode in group.episodes)
        return group

    def done(self) -> list[int]:
        """Return the numbers of the groups without running episodes, in order."""
        return sorted(number for number, group in self.groups.items() if group.open == 0)

    def take(self, numbers: Sequence[int]) -> Rollouts:
        """Remove the groups `numbers` and return them in that order, with the counters since the
        last call.
        """
        taken = [self.groups.pop(number) for number in numbers]
        episodes = [episode for group in taken for episode in group.episodes]
        count_overflows(episodes)
        for place, group in enumerate(taken):
            for episode in group.episodes:
                episode.group = place
        groups, errors = finished([group.builder for group in taken], episodes)
        rollouts = Rollouts(
            groups,
            errors,
            {"emitted_tokens": 0, **self.counters},
            self.sample_seconds,
            self.score_seconds,
        )
        self.counters, self.sample_seconds, self.score_seconds = {}, 0.0, 0.0
        return rollouts

    def give_back(self, number: int) -> int:
        """Discard a group at any stage, as if its episodes had not started. Return the number of
        sampled tokens that this wastes.
        """
        group, lost = self.groups.pop(number), 0
        for (player, ticket), episode in list(self._acting.items()):
            if episode.group == number:
                self.seats[player].stream.drop(ticket)
                del self._acting[player, ticket]
        self._to_step = deque(
            (episode, action) for episode, action in self._to_step if episode.group != number
        )
        for episode in group.episodes:
            self.waiters.forget((number, episode.index))
            self._waiting.pop((number, episode.index), None)
            lost += sum(len(turn.ac.tokens) for turn in episode.transitions)
            if not self._ended(episode):
                episode.env.close()
                for seat in self.seats.values():
                    seat.stream.leave(_name(episode))
        group.builder.given_back()
        return lost

    def close(self) -> None:
        """Discard all running groups."""
        for number in list(self.groups):
            self.give_back(number)

    # ---------------------------------------------------------------------------------------- ticks

    def tick(self) -> Decision:
        """Advance as far as possible without waiting for episodes that are not ready; if no episode
        can continue, wait until an episode is ready.

        Return the clock's decision.
        """
        self._ask()
        start = time.perf_counter()
        awaited = len(self.waiters) > 0 or self.learning()
        blocked = awaited and not any(seat.stream.busy for seat in self.seats.values())
        decision = self.clock.decide(
            self.waiters, self.learned, blocked=blocked, landed=self.landed
        )
        failed: dict[Key, str] = {}
        for key in decision.arrived:
            self._arrived(key, decision.failed.get(key), failed)
        self.clock.note(replace(decision, failed=failed))
        self._ask()
        sampled = time.perf_counter()
        self.score_seconds += sampled - start
        for player, seat in self.seats.items():
            if seat.stream.busy:
                self._slice(player, seat)
        self.sample_seconds += time.perf_counter() - sampled
        return decision

    def _slice(self, player: str | None, seat: Seat) -> None:
        """Let the player's sampler take `steps` steps, and collect its finished responses and
        counters.
        """
        response_batch = seat.stream.slice(self.steps)
        for ticket, response in response_batch.finished.items():
            if isinstance(response, Exception):
                raise response
            self._to_step.append((self._acting.pop((player, ticket)), response.sequences[0]))
        if player is None:
            for name, count in response_batch.counters.items():
                before = self.counters.get(name, 0)
                self.counters[name] = (
                    max(before, count) if name.startswith("peak_") else before + count
                )

    def _ask(self) -> None:
        """Call due environments, as many as may wait at the same time. An environment that returns
        immediately continues immediately.
        """
        while self._to_step and self.waiters.free > 0:
            episode, action = self._to_step.popleft()
            env, seat = episode.env, episode.env.seat
            key = (episode.group, episode.index)
            if env.blocks:
                self._waiting[key] = (episode, action, seat)
                self.waiters.begin(
                    key,
                    lambda env=env, action=action: _whole(env, action),  # type: ignore[misc]
                    self.seconds,
                )
                continue
            promise: Any = env.initial_observation() if action is None else env.step(action)
            if not hasattr(promise, "result") and not _owes(promise):
                self._heard(episode, action, seat, promise)
                continue
            self._waiting[key] = (episode, action, seat)
            self.waiters.begin(key, lambda promise=promise: _until_there(promise))  # type: ignore[misc]

    def _arrived(self, key: Key, failed_then: str | None, failed: dict[Key, str]) -> None:
        """Process an environment result. `failed_then`: in a replay, the error message of an
        environment that failed in the recorded run.
        """
        episode, action, seat = self._waiting.pop(key)
        try:
            if failed_then is not None:
                self.waiters.forget(key)
                raise EpisodeFailed(failed_then)
            reply = self.waiters.take(key)
            answer = reply.result() if hasattr(reply, "wait") else reply
        except EpisodeFailed as error:
            episode.error = failed[key] = str(error)
            episode.env.left_out = True
            self.finish(episode)
            return
        self._heard(episode, action, seat, answer)

    def _heard(
        self, episode: Playing, action: SampledSequence | None, seat: int, answer: Any
    ) -> None:
        """Record the turn that an environment result completes, and request the next turn."""
        if action is None:
            episode.observation, episode.stop = answer
        else:
            take(episode, action, seat, answer)
        group = self.groups[episode.group]
        done = episode.error is not None or (
            episode.transitions and episode.transitions[-1].episode_done
        )
        goes_on = not done and seated(episode, group.builder, self.seats)
        if not goes_on or not fits(
            episode, group.builder, self.params, self.seats[episode.player].context
        ):
            self.finish(episode)
            return
        key = (episode.group, episode.index)
        if script := self.scripts.get(key):
            self._to_step.append((episode, script.pop(0)))
            return
        if self.parked is not None:
            self.parked[key] = episode
            return
        self.ask_for_turn(episode)

    def ask_for_turn(self, episode: Playing, begun: SampledSequence | None = None) -> None:
        """Request the next action of an episode from its sampler. `begun`: the part of the action
        that is already sampled. Raises RuntimeError if the episode exceeds the maximum number of
        turns.
        """
        group, turn, player = self.groups[episode.group], len(episode.transitions), episode.player
        if turn >= (group.builder.max_turns if self.max_turns is None else self.max_turns):
            raise RuntimeError(
                f"an episode has not ended after {turn} turns (problem "
                f"{group.builder.problem_index})"
            )
        # imported here: rl.sampler needs torch, which the help text and method settings must not
        # import
        from rl.sampler import Request

        request = Request(
            prompt=episode.observation.flat(),
            images=episode.observation.placed(),
            params=own_params(episode, self.params),
            seed=derive_seed(group.seed, turn),
            problem=group.problem,
            first_index=episode.index,
            begun=begun,
            conversation=_name(episode) if episode.env.several_turns else None,
        )
        self._acting[player, self.seats[player].stream.add(request)] = episode

    def ask_environment(self, episode: Playing, action: SampledSequence | None) -> None:
        """Queue a call of the episode's environment with an action (None: the first
        observation).
        """
        self._to_step.append((episode, action))

    def hold_back(self, episode: Playing) -> None:
        """Remove the episode's environment from the queue."""
        self._to_step = deque(
            (other, action) for other, action in self._to_step if other is not episode
        )

    def play_scripts(self) -> None:
        """Replay the recorded actions to every environment, and wait for the results."""
        while self._to_step or self._waiting:
            self._ask()
            if self._waiting:
                self.waiters.wait()
            for key in self.waiters.ready():
                self._arrived(key, None, {})

    def finish(self, episode: Playing) -> None:
        """End an episode, for any reason."""
        episode.env.close()
        for seat in self.seats.values():
            seat.stream.leave(_name(episode))
        self.scripts.pop((episode.group, episode.index), None)
        self.groups[episode.group].open -= 1

    @staticmethod
    def _ended(episode: Playing) -> bool:
        """Return whether the episode has failed or its last turn ended it."""
        return episode.error is not None or bool(
            episode.transitions and episode.transitions[-1].episode_done
        )


def _name(episode: Playing) -> str:
    """Return the conversation id that the sampler uses for the episode."""
    return f"{episode.group}/{episode.index}"


def _owes(answer: Any) -> bool:
    """Return whether the step's reward is still pending."""
    return (
        isinstance(answer, StepResult)
        and isinstance(answer.reward, PendingScore)
        and not answer.reward.at_once
    )


def _until_there(promise: Any) -> Any:
    """Wait for a promise and for the reward in its result. A promise with `wait` is returned as it
    is: the caller that takes it reads its result.
    """
    if hasattr(promise, "wait"):
        promise.wait()
        return promise
    reply = promise.result() if hasattr(promise, "result") else promise
    if _owes(reply):
        reply.reward.result()
    return reply


def _whole(env: Env, action: SampledSequence | None) -> Any:
    """Run a turn of an environment that blocks, from the action to the reward. Return a coroutine
    if the environment returns an awaitable.
    """
    reply: Any = env.initial_observation() if action is None else env.step(action)
    if hasattr(reply, "__await__"):
        return _once_awaited(reply)
    return _until_there(reply)


async def _once_awaited(found: Any) -> Any:
    """Await the environment's result, then wait for its reward."""
    return _until_there(await found)
