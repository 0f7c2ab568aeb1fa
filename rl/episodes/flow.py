"""Episodes that wait for nobody: each goes on as soon as its own turn, reward or tool is ready,
while others decode.

A tick takes what environments have answered since the last one, asks for the turns that follow, and
lets the sampler take some steps. Which answers were there is decided by a `Clock`; all else follows
from it. What is sampled does not depend on it at all: the random stream of a sample is a function
of (seed, turn, problem, member, position), as it is where all turns go in step
(rl.episodes.rollout).
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
    finished: dict[int, Any]
    counters: dict[str, int]


class DrawStream(Protocol):
    """What draws, a slice at a time: a SampleStream, as far as it is asked here."""

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
    """Who draws for a player, and how many tokens it may read."""

    stream: DrawStream
    context: int | None


@dataclass
class Begun:
    """A group under way. `seed`: of its samples; `problem`: their stream; `since`: the version of
    the weights when it began.
    """

    number: int
    builder: EnvGroupBuilder
    seed: int
    problem: int
    since: int
    episodes: list[Playing] = field(default_factory=list)
    open: int = 0  # episodes that have not ended


class Flow:
    """Groups of episodes on their way. Call `tick` until the groups that are wanted are `done`,
    then `take` them.

    `seats`: by player, None for the policy. `seconds`: what an environment that blocks has for an
    answer (others have limits of their own). Environments are called by the thread that ticks,
    those that block (`Env.blocks`) by one of the waiters'.
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
        # whether an update is under way, or its weights are,
        self.learning: Callable[[], bool] = lambda: False
        self.learned: Callable[[], bool] = lambda: False  # and has ended;
        # whether weights that are on their way have come
        self.landed: Callable[[], bool | None] = lambda: None
        self.counters: dict[str, int] = {}
        self.sample_seconds = self.score_seconds = 0.0
        # answers that are given again rather than drawn
        self.scripts: dict[Key, list[SampledSequence]] = {}
        # while scripts are played: those at their script's end
        self.parked: dict[Key, Playing] | None = None
        self._acting: dict[tuple[str | None, int], Playing] = {}  # by player and ticket
        # whose environment is to be asked; None: it begins
        self._to_step: deque[tuple[Playing, SampledSequence | None]] = deque()
        self._waiting: dict[Key, tuple[Playing, SampledSequence | None, int]] = {}

    # --------------------------------------------------------------------------------------- groups

    def begin(
        self, number: int, builder: EnvGroupBuilder, *, seed: int, problem: int, since: int = 0
    ) -> Begun:
        """Begins a group's episodes, under a number that no other group has."""
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
        """Numbers of the groups all of whose episodes have ended, in order."""
        return sorted(number for number, group in self.groups.items() if group.open == 0)

    def take(self, numbers: Sequence[int]) -> Rollouts:
        """These groups, in that order, which are no longer here; with what was counted since the
        last ones were taken.
        """
        taken = [self.groups.pop(number) for number in numbers]
        episodes = [episode for group in taken for episode in group.episodes]
        count_overflows(episodes)
        for place, group in enumerate(taken):
            for episode in group.episodes:
                episode.group = place
        groups, errors = finished([group.builder for group in taken], episodes)
        found = Rollouts(
            groups,
            errors,
            {"emitted_tokens": 0, **self.counters},
            self.sample_seconds,
            self.score_seconds,
        )
        self.counters, self.sample_seconds, self.score_seconds = {}, 0.0, 0.0
        return found

    def give_back(self, number: int) -> int:
        """Ends a group's episodes, whatever has become of them: as if they had not begun. How many
        tokens that costs.
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
        """Ends what is under way."""
        for number in list(self.groups):
            self.give_back(number)

    # ---------------------------------------------------------------------------------------- ticks

    def tick(self) -> Decision:
        """Goes on as far as it gets without waiting for whoever is not ready; where nothing can go
        on, until somebody is.

        Returns what the clock decided of it.
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
        found = seat.stream.slice(self.steps)
        for ticket, response in found.finished.items():
            if isinstance(response, Exception):
                raise response
            self._to_step.append((self._acting.pop((player, ticket)), response.sequences[0]))
        if player is None:
            for name, count in found.counters.items():
                before = self.counters.get(name, 0)
                self.counters[name] = (
                    max(before, count) if name.startswith("peak_") else before + count
                )

    def _ask(self) -> None:
        """Asks environments, as many as may wait at once; who answers at once goes on at once."""
        while self._to_step and self.waiters.free > 0:
            episode, action = self._to_step.popleft()
            env, seat = episode.env, episode.env.seat
            key = (episode.group, episode.index)
            if env.blocks:
                self._waiting[key] = (episode, action, seat)
                self.waiters.begin(
                    key, lambda env=env, action=action: _whole(env, action), self.seconds
                )  # type: ignore[misc]
                continue
            promise: Any = env.initial_observation() if action is None else env.step(action)
            if not hasattr(promise, "result") and not _owes(promise):
                self._heard(episode, action, seat, promise)
                continue
            self._waiting[key] = (episode, action, seat)
            self.waiters.begin(key, lambda promise=promise: _until_there(promise))  # type: ignore[misc]

    def _arrived(self, key: Key, failed_then: str | None, failed: dict[Key, str]) -> None:
        """Takes an answer; `failed_then`: of a replay, where it failed in the run that is repeated."""
        episode, action, seat = self._waiting.pop(key)
        try:
            if failed_then is not None:
                self.waiters.forget(key)
                raise EpisodeFailed(failed_then)
            found = self.waiters.take(key)
            answer = found.result() if hasattr(found, "wait") else found
        except EpisodeFailed as error:
            episode.error = failed[key] = str(error)
            episode.env.left_out = True
            self.finish(episode)
            return
        self._heard(episode, action, seat, answer)

    def _heard(
        self, episode: Playing, action: SampledSequence | None, seat: int, answer: Any
    ) -> None:
        """An environment has answered: the turn is noted, and the next one asked for."""
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
        """The next answer of an episode is to be drawn. `begun`: what is drawn of it already."""
        group, turn, player = self.groups[episode.group], len(episode.transitions), episode.player
        if turn >= (group.builder.max_turns if self.max_turns is None else self.max_turns):
            raise RuntimeError(
                f"an episode has not ended after {turn} turns (problem {group.builder.problem_index})"
            )
        # with torch, which the help and the settings of methods do without
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
        """The environment is to be asked what comes of an answer (None: how it begins)."""
        self._to_step.append((episode, action))

    def hold_back(self, episode: Playing) -> None:
        """Its environment is not to be asked for now."""
        self._to_step = deque(
            (other, action) for other, action in self._to_step if other is not episode
        )

    def play_scripts(self) -> None:
        """Gives every environment the answers of its script, and waits for what comes of them."""
        while self._to_step or self._waiting:
            self._ask()
            if self._waiting:
                self.waiters.wait()
            for key in self.waiters.ready():
                self._arrived(key, None, {})

    def finish(self, episode: Playing) -> None:
        """An episode has ended, whichever way."""
        episode.env.close()
        for seat in self.seats.values():
            seat.stream.leave(_name(episode))
        self.scripts.pop((episode.group, episode.index), None)
        self.groups[episode.group].open -= 1

    @staticmethod
    def _ended(episode: Playing) -> bool:
        return episode.error is not None or bool(
            episode.transitions and episode.transitions[-1].episode_done
        )


def _name(episode: Playing) -> str:
    """Of its conversation, as the sampler knows it."""
    return f"{episode.group}/{episode.index}"


def _owes(answer: Any) -> bool:
    """Whether a step's reward is still being worked out."""
    return (
        isinstance(answer, StepResult)
        and isinstance(answer.reward, PendingScore)
        and not answer.reward.at_once
    )


def _until_there(promise: Any) -> Any:
    """Waits for a promise, and for the reward that it holds. One with `wait` is asked for its
    result by whoever takes it.
    """
    if hasattr(promise, "wait"):
        promise.wait()
        return promise
    found = promise.result() if hasattr(promise, "result") else promise
    if _owes(found):
        found.reward.result()
    return found


def _whole(env: Env, action: SampledSequence | None) -> Any:
    """A turn of an environment that blocks, from the action to the reward; a coroutine where it is
    one.
    """
    found: Any = env.initial_observation() if action is None else env.step(action)
    if hasattr(found, "__await__"):
        return _once_awaited(found)
    return _until_there(found)


async def _once_awaited(found: Any) -> Any:
    return _until_there(await found)
