"""Test continuous rollouts: the samples equal those of the turn-by-turn loop if environments are
slow, block, fail or never answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest
from test_rollout import (
    PARAMS,
    CountdownEnv,
    CountdownGroupBuilder,
    Of,
    check_owed,
    get_tokens,
    list_owed_results,
    owing_group,
)

from rl import ServiceClient
from rl.client import SampleStream
from rl.envs import (
    Environment,
    EnvironmentGroup,
    ProblemGroupBuilder,
    TurnResult,
    parse_environment,
    resolve_environment,
)
from rl.integrations import TinkerGroup
from rl.renderers import get_renderer
from rl.rewards import PendingScore, Score, Scorer
from rl.rollout import (
    EnvExecutor,
    EnvThread,
    EpisodeFailed,
    EventLog,
    EventLoopThread,
    ReplayedEventLog,
    RolloutSchedule,
    StepResult,
    open_engine,
    restore_engine_state,
    rollout,
    save_engine_state,
)
from rl.types import Problem, SamplingParams


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    with ServiceClient(output_dir=tmp_path_factory.mktemp("out"), seed=1) as service:
        client = service.create_full_training_client("tiny:addition", seed=1)
        yield client.save_weights_and_get_sampling_client()


def run_continuous(builders, sampler, *, params=PARAMS, seed, event_log=None, **more):
    schedule = RolloutSchedule(make_stream=SampleStream, **more)
    return rollout(builders, sampler, params, seed=seed, schedule=schedule, event_log=event_log)


def describe_rollouts(rollouts):
    """Return all results except logprobs."""

    def describe(t):
        ends = t.ac.stop_reason, t.reward, t.episode_done, t.truncated, t.metrics
        return t.ob.to_ints(), t.ac.tokens, *ends

    groups = []
    for g in rollouts.groups:
        turns = [[describe(t) for t in e.transitions] for e in g.trajectories_G]
        groups.append((turns, g.final_rewards_G, g.metrics_G, g.tag, g.problem_index))
    return groups, rollouts.errors


def logprobs(rollouts):
    episodes = [episode for group in rollouts.groups for episode in group.trajectories_G]
    return [lp for episode in episodes for turn in episode.transitions for lp in turn.ac.logprobs]


class SlowEnv(CountdownEnv):
    """Each step takes a random time."""

    chance = random.Random(0)

    def step(self, action):
        time.sleep(self.chance.random() * 0.02)
        return super().step(action)


class AsyncEnv(CountdownEnv):
    async def step(self, action):
        await asyncio.sleep(0.01)
        return super().step(action)


@pytest.mark.parametrize("kind", [CountdownEnv, SlowEnv, AsyncEnv])
def test_the_same_samples_as_turn_by_turn_whoever_is_slow(sampler, kind):
    turns = [[1, 3], [2, 2, 5], [4], [1, 1, 1]]
    builders = [CountdownGroupBuilder(i, t, limit=i == 1) for i, t in enumerate(turns)]
    expected = rollout(builders, sampler, PARAMS, seed=5)
    for limit, steps in ((256, 16), (2, 1)):
        builders = [Of(kind, i, t, limit=i == 1) for i, t in enumerate(turns)]
        sizes = {"max_environments": limit, "steps": steps}
        result = run_continuous(builders, sampler, seed=5, **sizes)
        assert describe_rollouts(result) == describe_rollouts(expected)
        np.testing.assert_allclose(logprobs(result), logprobs(expected), atol=1e-5)
        for name in ("emitted_tokens", "finished_samples"):
            assert result.counters[name] >= expected.counters[name]


@pytest.mark.parametrize("place", ["inline", "process"])
def test_answers_to_problems_are_scored_as_they_come(sampler, place):
    renderer = get_renderer("plain", sampler.get_tokenizer())
    problems = [
        Problem([{"role": "user", "content": f"{i}+{i}="}], {"answer": str(2 * i)}, index=i)
        for i in range(4)
    ]
    with Scorer("exact_match" if place == "inline" else "rl.rewards.text:exact_match") as scorer:
        builders = [ProblemGroupBuilder(p, 4, renderer, scorer) for p in problems]
        expected = rollout(builders, sampler, PARAMS, seed=2)
        result = run_continuous(builders, sampler, seed=2)
    assert describe_rollouts(result) == describe_rollouts(expected) and scorer.counts["calls"] == 32
    # the prompt of a group is prefilled once for all members
    assert result.counters["prefill_tokens"] == expected.counters["prefill_tokens"]


def test_a_built_in_game_plays_alike(sampler):
    renderer = get_renderer("plain", sampler.get_tokenizer())
    spec = parse_environment("guess_number", {})
    params = SamplingParams(max_tokens=3, temperature=1.0)

    def groups():
        problems = [Problem((), {"seed": i}, index=i) for i in range(3)]
        return [EnvironmentGroup(spec, problem, 3, renderer) for problem in problems]

    expected = rollout(groups(), sampler, params, seed=4)
    result = run_continuous(groups(), sampler, params=params, seed=4)
    assert describe_rollouts(result) == describe_rollouts(expected)


class HangingEnv(CountdownEnv):
    """The second member never answers, the third fails."""

    count = 0

    def step(self, action):
        if self.turns == 2:
            threading.Event().wait()
        if self.turns == 3:
            raise EpisodeFailed("broke")
        return super().step(action)


def test_an_environment_that_never_answers_costs_its_episode_within_its_limit(sampler):
    start, groups = time.monotonic(), [Of(HangingEnv, 0, [1, 2, 3, 1]), Of(HangingEnv, 1, [1, 1])]
    result = run_continuous(groups, sampler, seed=1, max_environments=2, env_timeout=0.5)
    assert time.monotonic() - start < 10
    assert [len(g.trajectories_G) for g in result.groups] == [2, 2]
    late = "the environment count, episode 1 of row 0, was not done within its 0.5 s"
    assert sorted(result.errors) == ["broke", late]


class ConcurrencyCountingEnv(CountdownEnv):
    """Counts how many environments of this class work at the same time."""

    lock, working, most = threading.Lock(), 0, 0

    def step(self, action):
        counts = ConcurrencyCountingEnv
        with self.lock:
            counts.working += 1
            counts.most = max(counts.most, counts.working)
        time.sleep(0.01)
        with self.lock:
            counts.working -= 1
        return super().step(action)


def test_at_most_max_environments_work_at_the_same_time(sampler):
    groups = [Of(ConcurrencyCountingEnv, 0, [2] * 12)]
    result = run_continuous(groups, sampler, seed=1, max_environments=3)
    assert len(result.groups[0].trajectories_G) == 12 and 1 < ConcurrencyCountingEnv.most <= 3


def test_the_streams_are_closed_before_the_last_part_is_processed(sampler):
    events = []

    @contextmanager
    def make_stream(client):
        with SampleStream(client) as stream:
            yield stream
        events.append("closed")

    def process(part):
        events.append(len(part.groups))
        return part

    builders = [CountdownGroupBuilder(problem, [2]) for problem in range(4)]
    schedule = RolloutSchedule(make_stream=make_stream)
    result = rollout(builders, sampler, PARAMS, seed=1, schedule=schedule, parts=2, process=process)
    assert events == [2, "closed", 2] and len(result.groups) == 4


class RandomDelayEnv(CountdownEnv):
    def step(self, action):
        time.sleep(self.chance())
        return super().step(action)


def test_a_rollout_repeated_from_its_log_is_the_same_bit_for_bit(sampler):
    """The replay includes logprobs. Step times differ between the two runs, and the environment
    that failed in the first run would answer in the second.
    """
    turns, log = [[3, 1, 4], [2, 5], [1, 2, 3]], []

    def groups(chances, fails):
        made = []
        for i, t in enumerate(turns):
            group = Of(RandomDelayEnv, i, t)
            envs = group.make_envs()
            for j, env in enumerate(envs):
                env.chance = lambda chances=chances, hang=fails and (i, j) == (1, 1): (
                    5.0 if hang else chances.random() * 0.03
                )
            group.make_envs = lambda envs=envs: envs
            made.append(group)
        return made

    def play(chances, fails, event_log, **more):
        made = groups(random.Random(chances), fails)
        return run_continuous(made, sampler, seed=3, steps=2, event_log=event_log, **more)

    first = play(1, True, EventLog(log.append), env_timeout=0.6)
    second: list = []
    again = play(2, False, ReplayedEventLog(log, second.append), env_timeout=9)
    assert len(first.errors) == 1 and second == log and len(log) > 5
    assert describe_rollouts(again) == describe_rollouts(first)
    assert logprobs(again) == logprobs(first) and again.counters == first.counters
    other = play(2, False, EventLog())
    assert get_tokens(other.groups[0]) == get_tokens(first.groups[0])


class DelayedEnv(CountdownEnv):
    """The step and the close of each environment take its `delays` in seconds; only `step` blocks."""

    blocks, delays = False, (0.0, 0.0)

    def initial_observation(self):
        self.blocks = True
        return super().initial_observation()

    def step(self, action):
        time.sleep(self.delays[0])
        return super().step(action)

    def close(self):
        time.sleep(self.delays[1])


class SlowEventLog(EventLog):
    def next_events(self, *words, **more):
        time.sleep(0.02)
        return super().next_events(*words, **more)


def test_a_run_with_more_calls_than_environments_is_repeated_from_its_log(sampler):
    """A result that arrives while the first is closed does not let a further call start."""

    def play(event_log, steps, first_close=0.0):
        group = Of(DelayedEnv, 0, [1] * 4)
        envs = group.make_envs()
        for env, seconds in zip(envs, steps, strict=True):
            env.delays = (seconds, first_close if env is envs[0] else 0.0)
        group.make_envs = lambda: envs
        return run_continuous([group], sampler, seed=1, event_log=event_log, max_environments=2)

    log: list = []
    first = play(SlowEventLog(log.append), [0.03, 0.06, 0, 0], first_close=0.1)
    again = play(ReplayedEventLog(log), [0.03, 0.1, 0.1, 0])
    assert describe_rollouts(again) == describe_rollouts(first)
    assert logprobs(again) == logprobs(first)


def test_a_log_of_another_run_is_refused(sampler):
    log = [{"tick": 0, "arrived": [[0, 0], [0, 1]]}, {"tick": 1, "arrived": [[5, 0]]}]
    group = CountdownGroupBuilder(0, [2, 2])
    with pytest.raises(Exception, match="log of decisions belongs to another run"):
        run_continuous([group], sampler, seed=3, event_log=ReplayedEventLog(log))


class WrongSeatEnvironment(Environment):
    """Its second member gives its next turn to somebody who does not play."""

    seats = (None, None)

    def start(self):
        self.seats = (None, "nobody" if self.member == 1 else None)
        return "1+"

    def step(self, answer):
        if self.member == 1:
            return TurnResult("2", reward=1.0, seat=1)
        return TurnResult(reward=2.0, done=True)


def test_a_seat_of_nobody_costs_its_episode_and_a_group_that_is_not_made_itself(sampler):
    renderer = get_renderer("plain", sampler.get_tokenizer())

    class FailingGroupBuilder:
        async def make_envs(self):
            raise OSError("no luck")

    spec = resolve_environment(WrongSeatEnvironment)
    game = EnvironmentGroup(spec, Problem((), {}, index=0), 2, renderer)
    result = run_continuous([game, TinkerGroup(FailingGroupBuilder(), 1)], sampler, seed=1)
    assert [group.get_total_rewards() for group in result.groups] == [[2.0]], result.errors
    first, second = result.errors
    assert "assigned seat 1 to 'nobody'" in first and "raised OSError: no luck" in second


class CloseCountingEnv(CountdownEnv):
    """Counts its close calls. `options`: the call that fails, if any."""

    options, closed = "", 0

    def initial_observation(self):
        return self._answer("start", super().initial_observation())

    def step(self, action):
        return self._answer("step", super().step(action))

    def _answer(self, where, answer):
        if self.options == where:
            raise EpisodeFailed(f"no {where}")
        return (
            answer if self.blocks else DeferredResult(self.options == f"promised {where}", answer)
        )

    def close(self):
        self.closed += 1


class DeferredResult:
    def __init__(self, fails, answer):
        self.fails, self.answer = fails, answer

    def wait(self):
        pass

    def result(self):
        if self.fails:
            raise EpisodeFailed("a promise that was not held")
        return self.answer


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("play", [rollout, run_continuous])
def test_every_environment_is_closed_once_however_its_episode_ends(sampler, play, blocks):
    """Episodes end normally, or fail at the first observation or at a step, directly or in a
    promise.
    """
    hows = ["", "start", "step"] if blocks else ["", "promised start", "promised step"]
    group = CountdownGroupBuilder(0, [2] * len(hows))
    envs = [CloseCountingEnv(group.first, 2, False) for _ in hows]
    for env, options in zip(envs, hows, strict=True):
        env.options, env.blocks = options, blocks
    group.make_envs = lambda: envs
    result = play([group], sampler, params=PARAMS, seed=3)
    assert len(result.errors) == len(hows) - 1 and len(result.groups[0].trajectories_G) == 1
    assert [env.closed for env in envs] == [1] * len(hows)


def test_the_last_reward_of_an_episode_that_outgrows_the_context_counts(sampler):
    group = owing_group(sampler.info["max_context"], list_owed_results())
    check_owed(run_continuous([group], sampler, seed=2), group)


@pytest.mark.parametrize("play", [rollout, run_continuous])
def test_the_last_result_of_an_episode_may_be_awaited_or_late(sampler, play):
    """An overflow costs no other episode: a call that hangs has the time limit of a turn."""

    class Awaited(CountdownEnv):
        async def on_context_overflow(self):
            return StepResult(5.0, True)

    class Hanging(CountdownEnv):
        def on_context_overflow(self):
            threading.Event().wait()

    more = {"params": PARAMS, "seed": 1}
    if play is rollout:
        more["schedule"] = RolloutSchedule(env_timeout=0.5)
    else:
        more["env_timeout"] = 0.5
    groups = [Of(Awaited, 0, [6]), Of(Hanging, 1, [6]), Of(Hanging, 2, [2])]
    for group in groups:
        group.max_tokens = 12  # observations of 3, 7 and 11 tokens: two turns
    result = play(groups, sampler, **more)
    assert [group.get_total_rewards() for group in result.groups] == [[1 + 2 + 5 + 20], [3 + 20]]
    (error,) = result.errors
    assert "episode 0 of row 1, was not done within its 0.5 s" in error


def test_a_last_result_that_is_due_is_due_again_after_a_restart(sampler):
    """Until then its environment is open."""
    proceed, schedule = threading.Event(), RolloutSchedule(make_stream=SampleStream)
    closed = []

    class Waiting(CountdownEnv):
        def on_context_overflow(self):
            proceed.wait()
            return StepResult(5.0, True)

        def close(self):
            closed.append(self)

    def make_group(number=0):
        group = Of(Waiting, 0, [6])
        group.max_tokens = 12
        return group

    with open_engine({None: sampler}, PARAMS, schedule) as engine:
        group = engine.start_group(0, make_group(), seed=1, random_stream=0)
        while not group.episodes[0].has_ended:
            engine.tick()
        engine._call_environments()
        state = json.loads(json.dumps(save_engine_state(engine)))
        assert not engine.completed_groups() and not closed
    assert len(closed) == 1
    proceed.set()
    with open_engine({None: sampler}, PARAMS, schedule) as engine:
        assert restore_engine_state(engine, state, make_group) == []
        assert engine.completed_groups() == [0]
        result = engine.take_rollouts([0])
    assert result.groups[0].get_total_rewards() == [1 + 2 + 5 + 20]


class LateRewardEnv(CountdownEnv):
    def step(self, action):
        result = super().step(action)
        result.reward = PendingScore("", None)
        threading.Timer(1.5, result.reward.set_result, [Score(reward=2.0)]).start()
        return result


def test_the_time_of_a_reward_is_not_that_of_its_environment(sampler):
    result = run_continuous([Of(LateRewardEnv, 0, [1, 1])], sampler, seed=1, env_timeout=1)
    assert not result.errors and result.groups[0].get_total_rewards() == [2 + 10] * 2


def test_sampled_tokens_are_counted_at_every_stage_of_an_episode(sampler):
    """Unfinished samples, actions whose environment has not answered, and recorded turns."""
    proceed, params = threading.Event(), SamplingParams(max_tokens=12, temperature=1.0, stop=[])

    class Waiting(CountdownEnv):
        def step(self, action):
            if self.turns == 2:
                proceed.wait()
            return super().step(action)

    schedule = RolloutSchedule(make_stream=SampleStream, steps=5)
    with open_engine({None: sampler}, params, schedule) as engine:
        group = engine.start_group(0, Of(Waiting, 0, [2, 1, 2]), seed=1, random_stream=0)
        engine.start_group(1, Of(Waiting, 1, [2]), seed=1, random_stream=1)
        counts = []
        while group.running_episodes == 3:
            engine.tick()
            counts.append(engine.count_sampled_tokens([0]))
        assert 0 < counts[0] < 36 and counts == sorted(counts) and counts[-1] == 36
        assert engine.count_sampled_tokens([0, 1]) == 48
        proceed.set()


class SleepingEnv(CountdownEnv):
    blocks = False

    def step(self, action):
        time.sleep(0.02)
        return super().step(action)


def test_steps_in_the_callers_thread_count_as_scoring(sampler):
    assert rollout([Of(SleepingEnv, 0, [1, 1])], sampler, PARAMS, seed=1).score_seconds >= 0.04


class ThreadBoundEnv(CountdownEnv):
    """Has a connection that only the thread that created it may use. `order` covers all episodes."""

    order: list = []

    def __init__(self, *words):
        super().__init__(*words)
        self.connection = sqlite3.connect(":memory:")

    def step(self, action):
        self.connection.execute("select 1")
        self.order.append(self.turns)
        return super().step(action)

    def close(self):
        self.connection.close()


def test_lockstep_calls_environments_in_its_thread_in_their_order(sampler):
    groups = [Of(ThreadBoundEnv, 0, [2, 3]), Of(ThreadBoundEnv, 1, [4])]
    result = rollout(groups, sampler, PARAMS, seed=1)
    assert not result.errors and ThreadBoundEnv.order == [2, 3, 4, 2, 3, 4, 3, 4, 4]


class BatchRewardEnv(CountdownEnv):
    """Has rewards computed in batches: requesting a reward computes all pending rewards."""

    batches: list = []
    waiting: list = []

    def step(self, action):
        def compute():
            batch, self.waiting[:] = list(self.waiting), []
            if batch:
                self.batches.append(len(batch))
            for score in batch:
                score.set_result(Score(reward=2.0))

        result = super().step(action)
        result.reward = PendingScore("", None, compute)
        self.waiting.append(result.reward)
        return result


def test_lockstep_scores_a_turn_in_a_single_batch(sampler):
    groups = [Of(BatchRewardEnv, 0, [1] * 5), Of(BatchRewardEnv, 1, [1] * 3)]
    result = rollout(groups, sampler, PARAMS, seed=1)
    assert not result.errors and BatchRewardEnv.batches == [8]


class DeferredEnv(CountdownEnv):
    """Returns what `promise` makes of the result, and does not block."""

    blocks = False

    def step(self, action):
        return self.promise(super().step(action))


@pytest.mark.parametrize("play", [rollout, run_continuous])
def test_a_future_is_a_promise_and_an_error_of_a_promise_ends_the_rollout(sampler, play):
    class Done(DeferredEnv):
        def promise(self, result):
            future = Future()
            threading.Timer(0.02, future.set_result, [result]).start()
            return future

    class FailingDeferredEnv(DeferredEnv):
        def promise(self, result):
            return self

        def result(self):
            raise LookupError("a bug")

    more = {"params": PARAMS, "seed": 1}
    assert not play([Of(Done, 0, [1, 2])], sampler, **more).errors
    with pytest.raises(LookupError, match="a bug"):
        play([Of(FailingDeferredEnv, 0, [1, 2])], sampler, **more)


def test_a_call_that_is_cancelled_fails_and_calls_in_a_queue_have_their_whole_time():
    async def cancelled():
        raise asyncio.CancelledError

    async def works():
        time.sleep(0.12)
        return 1

    async def hangs():
        time.sleep(1.5)

    loop = EventLoopThread("a loop", 0.4)
    with pytest.raises(EpisodeFailed, match="a loop raised CancelledError"):
        loop.submit(cancelled).result()
    executor = EnvExecutor(9)
    for i in range(5):  # 0.6 s in total
        executor.watch((0, i), loop.submit(works))
    executor.wait({(0, i) for i in range(5)})
    assert [executor.take_result((0, i)) for i in range(5)] == [1] * 5
    start = time.monotonic()
    for call in [loop.submit(hangs) for _ in range(3)]:
        with pytest.raises(EpisodeFailed, match="was not done within its 0.4 s"):
            call.result()
    assert time.monotonic() - start < 1.2
    loop.close()


def test_an_environment_whose_call_ends_late_is_closed_and_leaves_no_thread():
    released, closed = threading.Event(), threading.Event()
    thread = EnvThread(0.05, "the late environment")
    call = thread.submit(released.wait)
    with pytest.raises(EpisodeFailed, match="not done within its 0.05 s"):
        call.result()
    thread.finish(closed.set)
    assert not closed.is_set()  # a call is still running
    (late,) = [t for t in threading.enumerate() if t.name == "the late environment"]
    released.set()
    assert closed.wait(10)
    late.join(10)
    assert not late.is_alive()
