"""Advance episodes: an episode continues as soon as its turn, reward or tool result is ready, while
other episodes decode, or in lockstep with all others.

A tick takes the environment results that have arrived since the last tick, requests the turns that
follow, and lets the sampler take some steps. An `EventLog` decides which results had arrived; the
rest of the tick follows from that decision. The sampled tokens do not depend on the decisions: the
random stream of a sample is a function of (seed, turn, problem, member, position). In lockstep, the
sampler waits until every environment has answered, so that each turn is a single batch.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from rl.errors import warn_on_rank_zero
from rl.rewards import PendingScore
from rl.rollout.env_executor import EnvExecutor, EnvThread, EpisodeKey, trace_score
from rl.rollout.episode_state import (
    EpisodeState,
    add_final_result,
    build_groups,
    check_context,
    check_player,
    check_turns,
    get_sampling_params,
    name_episode,
    record_step,
)
from rl.rollout.event_log import EventLog, TickEvents
from rl.rollout.rollout_types import Env, EnvGroupBuilder, EpisodeFailed, RolloutBatch, StepResult
from rl.sanitize import describe_error
from rl.seed import derive_seed
from rl.types import SampledSequence, SamplingParams, merge_counters

if TYPE_CHECKING:
    from rl.sampler import SamplingRequest


@dataclass
class SamplingStep:
    """Hold the result of a slice of decoding: finished responses by ticket, and the engine's
    counters.
    """

    finished: dict[int, Any] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)


class ActionStream(Protocol):
    """Sample a slice at a time: the part of SampleStream that rollouts use."""

    @property
    def busy(self) -> bool: ...

    def add(self, request: SamplingRequest, /) -> int: ...

    def drop(self, ticket: int, /) -> None: ...

    def end_conversation(self, conversation: str, /) -> None: ...

    def unfinished(self) -> Mapping[int, SamplingRequest]: ...

    def recompute_cache(self) -> None: ...

    def switch_weights(self, client: Any, /, *, recompute: bool) -> None: ...

    def run_steps(self, steps: int, /) -> SamplingStep: ...


@dataclass
class PlayerStream:
    """Hold the sampling stream of a player, and the details (`info`) of the client that samples."""

    stream: ActionStream
    info: Mapping[str, Any]


@dataclass
class GroupState:
    """Hold the state of a running group. `seed`, `random_stream`: of its samples. `start_version`:
    the weight version when the group started.
    """

    number: int
    builder: EnvGroupBuilder
    seed: int
    random_stream: int
    start_version: int
    episodes: list[EpisodeState] = field(default_factory=list)
    running_episodes: int = 0  # number of episodes that have not ended


class RolloutEngine:
    """Run groups of episodes, each at its pace or all in lockstep. Call `tick` until
    `completed_groups()` lists the required groups, then take them with `take_rollouts`.

    `player_streams`: by player, None for the policy. `env_timeout`: timeout of an environment that
    blocks (other environments have their specific timeouts). `lockstep`: an episode continues when
    all have answered, so that each turn is a single batch. The thread that calls `tick` also calls
    the environments, in lockstep in the order of the episodes. An environment that blocks
    (`Env.blocks`) is called in a separate thread, unless in lockstep without `env_timeout`.
    """

    def __init__(
        self,
        player_streams: Mapping[str | None, PlayerStream],
        params: SamplingParams,
        executor: EnvExecutor,
        event_log: EventLog,
        *,
        steps: int = 16,
        env_timeout: float | None = None,
        max_turns: int | None = None,
        lockstep: bool = False,
    ):
        self.player_streams = player_streams
        self.params = params
        self.executor = executor
        self.event_log = event_log
        self.steps, self.env_timeout, self.max_turns = steps, env_timeout, max_turns
        self.lockstep = lockstep
        self._ready: list[EpisodeState] = []  # episodes whose next action is not requested yet
        self.groups: dict[int, GroupState] = {}
        # whether an update is running or its weights are in transit
        self.is_updating: Callable[[], bool] = lambda: False
        self.update_ended: Callable[[], bool] = lambda: False  # whether the update has ended
        # whether weights in transit have arrived; None if no weights are in transit
        self.weights_arrived: Callable[[], bool | None] = lambda: None
        self.counters: dict[str, int] = {}
        self.sample_seconds = self.score_seconds = 0.0
        # recorded actions that are replayed instead of sampled
        self.recorded_actions: dict[EpisodeKey, list[SampledSequence]] = {}
        # during a replay: the episodes that have no recorded actions left
        self.replayed_episodes: dict[EpisodeKey, EpisodeState] | None = None
        # of `_describe_action`: the last result, and the objects that it was made of
        self._last_description: tuple[tuple[Any, ...], tuple[Any, ...]] = ((None,) * 5, ())
        self._sampling: dict[
            tuple[str | None, int], EpisodeState
        ] = {}  # episodes with a sample in progress, by player and ticket
        # environment calls that are due; action None: the first or, if the episode awaits it, the
        # final result
        self.due_calls: deque[tuple[EpisodeState, SampledSequence | None]] = deque()
        self._running_calls: dict[
            EpisodeKey, tuple[EpisodeState, SampledSequence | None, int, Any]
        ] = {}

    # --------------------------------------------------------------------------------------- groups

    def start_group(
        self,
        number: int,
        builder: EnvGroupBuilder,
        *,
        seed: int,
        random_stream: int,
        start_version: int = 0,
    ) -> GroupState:
        """Start the episodes of a group. `number` must differ from the number of every other group.
        Raises ValueError if the builder makes no environments, or if they may take no turn.
        """
        name = f"the group of problem {builder.problem_index} ({builder.tag}) has"
        if (turns := self._max_turns(builder)) < 1:
            raise ValueError(f"{name} max_turns {turns}: at least 1")
        group = GroupState(number, builder, seed, random_stream, start_version)
        group.episodes = [EpisodeState(number, i, env) for i, env in enumerate(builder.make_envs())]
        if not group.episodes:
            raise ValueError(f"{name} no environments")
        group.running_episodes = len(group.episodes)
        self.groups[number] = group
        self.due_calls.extend((episode, None) for episode in group.episodes)
        return group

    def _max_turns(self, builder: EnvGroupBuilder) -> int:
        """Return the maximum number of turns of an episode."""
        return builder.max_turns if self.max_turns is None else self.max_turns

    def completed_groups(self) -> list[int]:
        """Return the numbers of the groups without running episodes, in order."""
        return sorted(number for number, group in self.groups.items() if not group.running_episodes)

    def take_rollouts(self, numbers: Sequence[int]) -> RolloutBatch:
        """Remove the groups `numbers` and return them in that order, with the counters since the
        last call.
        """
        taken = [self.groups.pop(number) for number in numbers]
        rollouts = RolloutBatch(
            *build_groups([(group.builder, group.episodes) for group in taken]),
            {"emitted_tokens": 0, **self.counters},
            self.sample_seconds,
            self.score_seconds,
        )
        self.counters, self.sample_seconds, self.score_seconds = {}, 0.0, 0.0
        return rollouts

    def count_sampled_tokens(self, numbers: Collection[int]) -> int:
        """Return the number of tokens sampled in these groups, with those of unfinished samples."""
        calls = (*self.due_calls, *(call[:2] for call in self._running_calls.values()))
        actions = [a for episode, a in calls if episode.group in numbers and a is not None]
        for number in numbers:
            actions += [turn.ac for e in self.groups[number].episodes for turn in e.transitions]
        for player, player_stream in self.player_streams.items():
            for ticket, request in player_stream.stream.unfinished().items():
                episode = self._sampling[player, ticket]
                if request.resume_from is not None and episode.group in numbers:
                    actions.append(request.resume_from)
        return sum(action.num_tokens for action in actions)

    def discard_group(self, number: int) -> None:
        """Discard a group at any stage, as if its episodes had not started."""
        group = self.groups[number]
        for (player, ticket), episode in list(self._sampling.items()):
            if episode.group == number:
                self.player_streams[player].stream.drop(ticket)
                del self._sampling[player, ticket]
        self.due_calls = deque(call for call in self.due_calls if call[0].group != number)
        self._ready = [episode for episode in self._ready if episode.group != number]
        for episode in group.episodes:
            self.executor.discard(episode.key)
            self._running_calls.pop(episode.key, None)
            if not episode.has_ended or episode.awaits_final_result:
                self._release_episode(episode)
        del self.groups[number]
        group.builder.on_discard()

    def close(self) -> None:
        """Discard all running groups."""
        for number in list(self.groups):
            self.discard_group(number)

    # ---------------------------------------------------------------------------------------- ticks

    def tick(self) -> TickEvents:
        """Advance as far as possible without waiting for episodes that are not ready; if no episode
        can continue, wait until an episode is ready.

        Return the events of the tick.
        """
        start = time.perf_counter()
        self._call_environments()
        if self.lockstep and self._running_calls:
            self.executor.wait(set(self._running_calls))
        awaited = bool(self.executor) or self.is_updating()
        blocked = awaited and not any(
            player_stream.stream.busy for player_stream in self.player_streams.values()
        )
        decision = self.event_log.next_events(
            self.executor, self.update_ended, self.weights_arrived, blocked=blocked
        )
        failed: dict[EpisodeKey, str] = {}
        for key in decision.arrived:
            self._receive_result(key, decision.failed.get(key), failed)
        self.event_log.log_events(replace(decision, failed=failed))
        self._call_environments()
        sampled = time.perf_counter()
        self.score_seconds += sampled - start
        for player, player_stream in self.player_streams.items():
            if not player_stream.stream.busy:
                continue
            sampling_step = player_stream.stream.run_steps(self.steps)
            for ticket, response in sampling_step.finished.items():
                if isinstance(response, Exception):
                    raise response
                self.due_calls.append((self._sampling.pop((player, ticket)), response.sequences[0]))
            if player is None:
                self.counters = merge_counters([self.counters, sampling_step.counters])
        self.sample_seconds += time.perf_counter() - sampled
        return decision

    @trace_score
    def _call_environments(self) -> None:
        """Call due environments, as many as may wait at the same time. An environment that returns
        immediately continues immediately.

        A reward of many answers starts when the first is waited for, so all environments step
        before the executor waits.
        """
        pending: dict[EpisodeKey, Any] = {}
        if self.lockstep:
            self.due_calls = deque(sorted(self.due_calls, key=lambda call: call[0].key))
        while self.due_calls and (
            self.executor.free_slots > len(pending)
            or (self.lockstep and not self._needs_thread(self.due_calls[0][0].env))
        ):
            episode, action = self.due_calls.popleft()
            env, seat = episode.env, episode.env.seat
            turn: Callable[[], Any]
            if episode.awaits_final_result:
                turn = env.on_context_overflow
            else:
                turn = env.initial_observation if action is None else partial(env.step, action)
            reply: Any = (
                partial(_run_turn, turn, self.executor)
                if self._needs_thread(env)
                else _begin_turn(turn)
            )
            if isinstance(reply, tuple | StepResult | None) and not _has_pending_reward(reply):
                self._record_result(episode, action, seat, reply)
                continue
            self._running_calls[episode.key] = (episode, action, seat, reply)
            pending[episode.key] = reply
        for key, reply in pending.items():
            if isinstance(reply, StepResult):
                reply = reply.reward
            elif not hasattr(reply, "add_done_callback"):
                name = name_episode(self.groups[key[0]].builder, key[1])
                thread = EnvThread(self.env_timeout if callable(reply) else None, name)
                if not callable(reply):  # a promise, or an awaitable
                    reply = partial(_run_turn, partial(lambda value: value, reply), self.executor)
                reply = thread.submit(reply)
                thread.finish()
            self.executor.watch(key, reply)
        if self.lockstep and (self.due_calls or self._running_calls):
            return
        ready, self._ready = self._ready, []
        for episode in sorted(ready, key=lambda e: e.key) if self.lockstep else ready:
            self.request_action(episode)

    def _needs_thread(self, env: Env) -> bool:
        """Return whether a thread calls the environment. In lockstep, a thread is only needed for a
        timeout.
        """
        return env.blocks and not (self.lockstep and self.env_timeout is None)

    def _receive_result(
        self, key: EpisodeKey, recorded_error: str | None, failed: dict[EpisodeKey, str]
    ) -> None:
        """Process an environment result. `recorded_error`: in a replay, the error message of an
        environment that failed in the recorded run.
        """
        episode, action, seat, reply = self._running_calls.pop(key)
        try:
            if recorded_error is not None:
                self.executor.discard(key)
                raise EpisodeFailed(recorded_error)
            result = self.executor.take_result(key)
        except EpisodeFailed as error:
            episode.error = failed[key] = str(error)
            self.finish_episode(episode)
            return
        if isinstance(result, BaseException):
            raise result
        if _has_pending_reward(result):  # the environment has answered, its reward has not
            self._running_calls[key] = (episode, action, seat, result)
            self.executor.watch(key, result.reward)
            return
        self._record_result(
            episode, action, seat, reply if isinstance(reply, StepResult) else result
        )

    def _record_result(
        self, episode: EpisodeState, action: SampledSequence | None, seat: int, result: Any
    ) -> None:
        """Record the turn that an environment result completes, and request the next turn."""
        builder = self.groups[episode.group].builder
        if episode.awaits_final_result:
            add_final_result(episode, builder, result)
            self.finish_episode(episode)
            return
        if action is None:
            episode.observation, episode.stop = result
        else:
            record_step(episode, builder, action, seat, result)
        if (
            episode.has_ended
            or not check_turns(episode, self._max_turns(builder))
            or not check_player(episode, builder, self.player_streams)
            or not check_context(
                episode, builder, self.params, self.player_streams[episode.player].info
            )
        ):
            if episode.awaits_final_result:
                self.due_calls.append((episode, None))
            else:
                self.finish_episode(episode)
        elif script := self.recorded_actions.get(episode.key):
            self.due_calls.append((episode, script.pop(0)))
        elif self.replayed_episodes is not None:
            self.replayed_episodes[episode.key] = episode
        else:
            self._ready.append(episode)

    def request_action(
        self, episode: EpisodeState, partial_action: SampledSequence | None = None
    ) -> None:
        """Request the next action of an episode from its sampler. `partial_action`: the part of the
        action that is already sampled.
        """
        group, turn, player = self.groups[episode.group], len(episode.transitions), episode.player
        # imported here: rl.sampler needs torch, which the help text and method settings must not
        # import
        from rl.sampler import SamplingRequest

        # in lockstep no cache outlives a turn
        keeps_cache = episode.env.several_turns and not self.lockstep
        prompt, images, params = self._describe_action(episode, group.builder)
        request = SamplingRequest(
            prompt=prompt,
            images=images,
            params=params,
            seed=derive_seed(group.seed, turn),
            problem=group.random_stream,
            first_index=episode.index,
            resume_from=partial_action,
            conversation=episode.conversation if keeps_cache else None,
            scoring=episode.env.scoring,
        )
        self._sampling[player, self.player_streams[player].stream.add(request)] = episode

    def _describe_action(self, episode: EpisodeState, builder: EnvGroupBuilder) -> tuple[Any, ...]:
        """Return (token ids and images of the prompt, sampling parameters) of the next action. The
        members of a group share theirs, which then are the same objects.
        """
        observation, stream = episode.observation, self.player_streams[episode.player]
        key = (observation, episode.stop, builder, stream, episode.env.max_action_tokens)
        same, (*last, most) = key[:-1], self._last_description[0]
        if most != key[-1] or any(a is not b for a, b in zip(same, last, strict=True)):
            params = get_sampling_params(episode, self.params, builder, stream.info)
            tokens, images = observation.token_ids(), observation.images_with_positions()
            self._last_description = key, (tokens, images, params)
        return self._last_description[1]

    def replay_actions(self) -> None:
        """Replay the recorded actions to every environment, and wait for the results."""
        while self.due_calls or self._running_calls:
            self._call_environments()
            if self._running_calls:
                self.executor.wait()
            for key in self.executor.finished_keys():
                self._receive_result(key, None, {})

    def finish_episode(self, episode: EpisodeState) -> None:
        """End an episode, for any reason."""
        episode.env.left_out = episode.error is not None
        episode.awaits_final_result = False
        self._release_episode(episode)
        self.recorded_actions.pop(episode.key, None)
        self.groups[episode.group].running_episodes -= 1

    def _release_episode(self, episode: EpisodeState) -> None:
        """Close an episode's environment and end its conversations. If `Env.close` raises, warn:
        the episode has its result, and the other environments must be closed too.
        """
        try:
            episode.env.close()
        except Exception as error:  # noqa: BLE001  (the user's code)
            name = name_episode(self.groups[episode.group].builder, episode.index)
            warn_on_rank_zero(f"{name} was not closed: {describe_error(error, 1000)}")
        for player_stream in self.player_streams.values():
            player_stream.stream.end_conversation(episode.conversation)


def _has_pending_reward(result: Any) -> bool:
    """Return whether the step's reward is still pending."""
    return (
        isinstance(result, StepResult)
        and isinstance(result.reward, PendingScore)
        and not result.reward.immediate
    )


def _begin_turn(turn: Callable[[], Any]) -> Any:
    """Call a turn of an environment in the caller's thread. Return its reply: the result, or what
    waits for it. A turn that fails its episode returns a failed future.
    """
    try:
        return turn()
    except EpisodeFailed as error:
        reply: Future[Any] = Future()
        reply.set_exception(error)
        return reply


def _run_turn(turn: Callable[[], Any], executor: EnvExecutor) -> Any:
    """Run a turn of an environment in a thread. Return the exception of an environment that raises,
    which ends the rollout.
    """
    try:
        reply = turn()
        if inspect.isawaitable(reply):
            reply = executor.run_awaitable(reply)
        return reply.result() if hasattr(reply, "result") else reply
    except EpisodeFailed:
        raise
    except BaseException as error:  # boundary: the thread of the rollout raises it
        return error


# --------------------------------------------------------------------------------------- the state


def save_engine_state(engine: RolloutEngine) -> dict[str, Any]:
    """Return the state of all running groups as JSON values. The samplers then prefill their
    partial samples again, as a run that resumes from this state does.

    A partially sampled action is saved with its logprobs, its experts and its weight versions, so
    that no token is sampled twice.
    """
    order = []
    for player, player_stream in engine.player_streams.items():
        for ticket, request in player_stream.stream.unfinished().items():
            episode = engine._sampling[player, ticket]
            begun = None if request.resume_from is None else request.resume_from.as_json()
            order.append([episode.group, episode.index, begun])
        player_stream.stream.recompute_cache()
    waiting = [(episode, action) for episode, action, *_ in engine._running_calls.values()]
    return {
        "groups": [
            {
                "number": group.number,
                "seed": group.seed,
                "problem": group.random_stream,
                "since": group.start_version,
                "episodes": [_episode_to_json(episode) for episode in group.episodes],
            }
            for group in engine.groups.values()
        ],
        "counters": dict(engine.counters),
        "acting": order,
        "asked": [
            [e.group, e.index, None if action is None else action.as_json()]
            for e, action in (*waiting, *engine.due_calls)
            if not e.awaits_final_result  # the replay calls on_context_overflow again
        ],
    }


def _episode_to_json(episode: EpisodeState) -> dict[str, Any]:
    """Return the state of an episode."""
    turns = episode.transitions
    return {
        "actions": [turn.ac.as_json() for turn in turns],
        "seen": [[turn.ob.length, turn.seat] for turn in turns],
        "ended": bool(turns and turns[-1].episode_done),
        "error": episode.error,
    }


def restore_engine_state(
    engine: RolloutEngine, state: Mapping[str, Any], get_builder: Callable[[int], EnvGroupBuilder]
) -> list[int]:
    """Restore the groups of `save_engine_state` in a new engine: replay the recorded actions to new
    environments. Return the numbers of the groups whose replay, or whose number of environments,
    differs from the saved state; these groups must start again.
    """
    requested = {(group, member): action for group, member, action in state["asked"]}
    engine.replayed_episodes, engine.counters = {}, dict(state["counters"])
    lost_groups: list[int] = []
    for saved in state["groups"]:
        number = saved["number"]
        group = engine.start_group(
            number,
            get_builder(number),
            seed=saved["seed"],
            random_stream=saved["problem"],
            start_version=saved["since"],
        )
        # a builder may fail, or have failed, to make its environments
        if len(group.episodes) != len(saved["episodes"]):
            engine.discard_group(number)
            lost_groups.append(number)
            continue
        for episode, saved_episode in zip(group.episodes, saved["episodes"], strict=True):
            key = (number, episode.index)
            engine.recorded_actions[key] = [
                SampledSequence.from_json(action) for action in saved_episode["actions"]
            ]
            unbegun = key in requested and requested[key] is None
            if saved_episode["error"] is not None or unbegun:
                engine.due_calls.remove((episode, None))
                episode.error = saved_episode["error"]
            if saved_episode["error"] is not None:
                engine.finish_episode(episode)
    engine.replay_actions()
    for saved in state["groups"]:
        number = saved["number"]
        if number not in lost_groups and not _replay_matches(engine, saved):
            engine.discard_group(number)
            lost_groups.append(number)
    parked, engine.replayed_episodes = engine.replayed_episodes, None
    for group_number, member, begun in state["acting"]:
        if group_number not in lost_groups:
            engine.request_action(
                parked[group_number, member],
                None if begun is None else SampledSequence.from_json(begun),
            )
    for group_number, member, action in state["asked"]:
        if group_number not in lost_groups:
            episode = engine.groups[group_number].episodes[member]
            sequence = None if action is None else SampledSequence.from_json(action)
            engine.due_calls.append((episode, sequence))
    return lost_groups


def _replay_matches(engine: RolloutEngine, saved: Mapping[str, Any]) -> bool:
    """Return whether every episode has read the same observations as before."""
    episodes: Sequence[EpisodeState] = engine.groups[saved["number"]].episodes
    same = ("seen", "ended", "error")
    return all(
        saved_episode["error"] is not None
        or all(_episode_to_json(episode)[key] == saved_episode[key] for key in same)
        for episode, saved_episode in zip(episodes, saved["episodes"], strict=True)
    )
