"""Test multi-turn episodes with a real sampler: observations and actions, step and group rewards,
ends, random streams.
"""

from dataclasses import replace

import numpy as np
import pytest

from rl import ServiceClient
from rl.client import SampleStream
from rl.rollout import (
    Env,
    EnvGroupBuilder,
    EpisodeFailed,
    RolloutBatch,
    RolloutSchedule,
    StepResult,
    TrajectoryGroup,
    compute_group_metrics,
    open_engine,
    rollout,
    trajectory_to_datums,
)
from rl.sampler.rope_switch import RopeLengthSwitch
from rl.types import ModelInput, SampledSequence, SamplingParams

PARAMS = SamplingParams(max_tokens=3, temperature=1.0, stop=[])
MARK = 13  # the environment's text between two answers


class CountdownEnv(Env):
    """Answers each action with a mark and ends after `turns` turns, truncated if `limit`. The
    reward of a step is its number.
    """

    def __init__(self, first: ModelInput, turns: int, limit: bool):
        self.first, self.turns, self.limit = first, turns, limit
        self.read, self.taken = first.to_ints(), 0

    def initial_observation(self):
        return self.first, None

    def step(self, action: SampledSequence) -> StepResult:
        self.taken += 1
        self.read = [*self.read, *action.tokens, MARK]
        done = self.taken >= self.turns
        following = ModelInput.from_ints(self.read)
        more = {"metrics": {"turn": self.taken}, "truncated": self.limit and done}
        return StepResult(float(self.taken), done, following, **more)


class CountdownGroupBuilder(EnvGroupBuilder):
    def __init__(self, index: int, turns: list[int], limit: bool = False):
        self.problem_index, self.tag, self.turns, self.limit = index, "count", turns, limit
        self.first = ModelInput.from_ints([3 + index, 4, 12])

    def make_envs(self):
        return [CountdownEnv(self.first, turns, self.limit) for turns in self.turns]

    def compute_group_rewards(self, trajectories_G):
        lengths = [float(len(t.transitions)) for t in trajectories_G]
        return [(10.0 * length, {"length": length}) for length in lengths]


class Of(CountdownGroupBuilder):
    """A group of environments of a class."""

    def __init__(self, kind, *words, **more):
        super().__init__(*words, **more)
        self.kind = kind

    def make_envs(self):
        return [self.kind(self.first, turns, self.limit) for turns in self.turns]


@pytest.fixture(scope="module")
def sampler(tmp_path_factory):
    with ServiceClient(output_dir=tmp_path_factory.mktemp("out"), seed=1) as service:
        client = service.create_full_training_client("tiny:addition", seed=1)
        yield client.save_weights_and_get_sampling_client()


def get_tokens(group):
    return [[turn.ac.tokens for turn in episode.transitions] for episode in group.trajectories_G]


def test_turns_follow_each_other_and_rewards_add_up(sampler):
    builders = [CountdownGroupBuilder(0, [1, 3]), CountdownGroupBuilder(1, [2, 2], limit=True)]
    result = rollout(builders, sampler, PARAMS, seed=5)
    ended, cut = result.groups
    counts = [[len(e.transitions) for e in g.trajectories_G] for g in (ended, cut)]
    assert counts == [[1, 3], [2, 2]]
    # step rewards: 1, and 1 + 2 + 3; group rewards: 10 per turn
    assert ended.get_total_rewards() == [1 + 10, 6 + 30]
    assert cut.get_total_rewards() == [3 + 20] * 2
    lengths = [[item["length"] for item in g.metrics_G] for g in result.groups]
    assert lengths == [[1.0, 3.0], [2.0, 2.0]]
    for group in result.groups:
        for episode in group.trajectories_G:
            read = [3 + group.problem_index, 4, 12]
            for i, turn in enumerate(episode.transitions):
                last = i == len(episode.transitions) - 1
                assert turn.ob.to_ints() == read and len(turn.ac.tokens) == 3
                assert turn.metrics == {"turn": i + 1}
                assert (turn.episode_done, turn.truncated) == (last, last and group is cut)
                read = [*read, *turn.ac.tokens, MARK]
            assert episode.final_ob.to_ints() == read
            # Each turn extends the previous one: a single datum, masked at every mark.
            episode.advantage = 1.0
            (datum,) = trajectory_to_datums(episode)
            assert datum.loss_fn_inputs["mask"].array.sum() == 3 * len(episode.transitions)


def test_an_answer_carries_its_logprobs_at_every_turn(sampler):
    """They equal the sampler's scores of the whole conversation afterwards."""
    (group,) = rollout([CountdownGroupBuilder(2, [3])], sampler, PARAMS, seed=1).groups
    (episode,) = group.trajectories_G
    whole = [*episode.transitions[-1].ob.to_ints(), *episode.transitions[-1].ac.tokens]
    scored = sampler.compute_logprobs(ModelInput.from_ints(whole)).result()
    for turn in episode.transitions:
        start = turn.ob.length
        np.testing.assert_allclose(turn.ac.logprobs, scored[start : start + 3], atol=1e-5)


def test_samples_depend_on_the_seed_and_not_on_the_batch(sampler):
    builders = [CountdownGroupBuilder(i, [2, 3]) for i in range(3)]
    together = rollout(builders, sampler, PARAMS, seed=9)
    single = rollout(builders[1:2], sampler, PARAMS, seed=9)
    other = rollout(builders[1:2], sampler, PARAMS, seed=10)
    expected = get_tokens(single.groups[0])
    assert get_tokens(together.groups[1]) == expected != get_tokens(other.groups[0])
    first, second = expected
    assert first != second[:2]  # each member of a group has its random stream
    # the same problem twice in a batch has two streams
    twice = rollout([builders[1], builders[1]], sampler, PARAMS, seed=9)
    assert get_tokens(twice.groups[0]) == expected != get_tokens(twice.groups[1])


class ForgetfulEnv(CountdownEnv):
    """Shows the same observation at every turn."""

    def step(self, action: SampledSequence) -> StepResult:
        result = super().step(action)
        result.next_observation = self.first
        return result


def test_each_turn_draws_from_a_stream_of_its_own(sampler):
    """The prompt is the same at every turn, so only the random streams can make the answers differ."""
    (group,) = rollout([Of(ForgetfulEnv, 3, [4, 4])], sampler, PARAMS, seed=6).groups
    answers = [tuple(tokens) for episode in get_tokens(group) for tokens in episode]
    assert len(set(answers)) == len(answers) == 8


def test_a_group_reads_its_prompt_once_and_later_turns_one_by_one(sampler):
    counters = rollout([CountdownGroupBuilder(0, [2, 2, 2])], sampler, PARAMS, seed=0).counters
    # 3 tokens once, then three conversations of 3 + 3 + 1 tokens; every answer has 3 tokens
    assert counters["prefill_tokens"] == 3 + 3 * 7 and counters["emitted_tokens"] == 6 * 3


def test_an_episode_without_end_is_truncated(sampler):
    builders = [CountdownGroupBuilder(1, [1]), CountdownGroupBuilder(7, [99, 4])]
    groups = rollout(builders, sampler, PARAMS, seed=0, max_turns=4).groups
    episodes = [episode.transitions for group in groups for episode in group.trajectories_G]
    assert [len(turns) for turns in episodes] == [1, 4, 4]
    assert [turns[-1].truncated for turns in episodes] == [False, True, False]
    assert all(turns[-1].episode_done for turns in episodes)


def test_a_group_without_members_is_named(sampler):
    with pytest.raises(ValueError, match="the group of problem 4 .count. has no environments"):
        rollout([CountdownGroupBuilder(4, [])], sampler, PARAMS, seed=0)


def test_an_episode_that_outgrows_the_context_ends_alone(sampler):
    """For several context lengths: completed turns are kept, and the other episodes continue with
    the same samples.
    """
    limit = sampler.info["max_context"]
    for room in (0, 1, 2, 3):
        # After one turn (3 tokens and a mark) these first observations lack `room` tokens of
        # context.
        long = CountdownGroupBuilder(0, [3, 3])
        long.first = ModelInput.from_ints([3] * (limit + 1 - 3 - 4 + room))
        result = rollout([long, CountdownGroupBuilder(1, [3, 2])], sampler, PARAMS, seed=2)
        grown, other = result.groups
        assert [len(e.transitions) for e in other.trajectories_G] == [3, 2] and not result.errors
        for episode in grown.trajectories_G:
            last = episode.transitions[-1]
            # if no token is missing, the second turn still fits and the third does not
            assert len(episode.transitions) == (2 if room == 0 else 1)
            assert last.episode_done and last.truncated
            assert last.metrics == {"turn": len(episode.transitions), "context_overflow": 1.0}
            assert episode.final_ob.length + 3 > limit + 1
        assert compute_group_metrics(result.groups)["env/all/context_overflow"] == 2 / 4
        # step rewards so far plus the group reward
        assert grown.get_total_rewards() == ([1 + 2 + 20] * 2 if room == 0 else [1 + 10] * 2)
        (single,) = rollout([CountdownGroupBuilder(1, [3, 2])], sampler, PARAMS, seed=2).groups
        assert get_tokens(other) == get_tokens(single)
    # parts of a batch in which no episode overflows count too
    builders = [long, *(CountdownGroupBuilder(i, [3, 2]) for i in (1, 2, 3))]
    result = rollout(builders, sampler, PARAMS, seed=2, parts=4)
    assert compute_group_metrics(result.groups)["env/all/context_overflow"] == 2 / 8


def test_a_first_observation_without_room_costs_its_own_episodes_alone(sampler):
    limit = sampler.info["max_context"]
    long = CountdownGroupBuilder(5, [1, 1])
    long.first = ModelInput.from_ints([3] * (limit - 1))
    result = rollout([long, CountdownGroupBuilder(1, [1])], sampler, PARAMS, seed=0)
    assert [g.problem_index for g in result.groups] == [1] and len(result.errors) == 2
    says = f"{limit - 1} tokens, which with max_tokens=3 exceed the model's context of {limit}"
    assert f"problem 5 has {says}" in result.errors[0]
    long.first = ModelInput.from_ints([3] * (limit - 2))  # the last sampled token is never fed
    assert len(rollout([long], sampler, PARAMS, seed=0).groups) == 1


@pytest.mark.parametrize("make_stream", [None, SampleStream])
def test_an_episode_that_outgrows_the_kv_cache_ends_alone(tmp_path, make_stream):
    schedule = RolloutSchedule(make_stream=make_stream)
    long = CountdownGroupBuilder(1, [2])
    long.first = ModelInput.from_ints([3] * 19)
    with ServiceClient(output_dir=tmp_path, seed=1) as service:
        service.set_cache_size(20)
        client = service.create_full_training_client("tiny:addition", seed=1)
        sampler = client.save_weights_and_get_sampling_client()
        builders = [CountdownGroupBuilder(0, [6, 2]), long]
        result = rollout(builders, sampler, PARAMS, seed=2, schedule=schedule)
    (group,) = result.groups
    # observations of 3, 7, 11, 15 and 19 tokens; the last token of an action takes no position
    assert [len(e.transitions) for e in group.trajectories_G] == [4, 2]
    overflows = [e.transitions[-1].metrics.get("context_overflow") for e in group.trajectories_G]
    assert overflows == [1.0, None]
    assert compute_group_metrics(result.groups)["env/all/context_overflow"] == 1 / 2
    (error,) = result.errors
    assert "exceed the KV cache (kv_cache_tokens) of 20" in error


class LimitedSampler:
    """A sampler with other details."""

    def __init__(self, sampler, **info):
        self.info, self.sample_many = {**sampler.info, **info}, sampler.sample_many


def test_an_episode_that_would_cross_the_rope_switch_ends_alone(sampler):
    limited = LimitedSampler(sampler, length_switch=RopeLengthSwitch("longrope", 12, True))
    beyond = CountdownGroupBuilder(1, [2])
    beyond.first = ModelInput.from_ints([3] * 13)
    groups = rollout([CountdownGroupBuilder(0, [6]), beyond], limited, PARAMS, seed=2).groups
    # observations of 3, 7 and 11 tokens: the third would reach 13 positions
    assert [len(g.trajectories_G[0].transitions) for g in groups] == [2, 2]


def test_an_action_without_max_tokens_ends_at_the_limit_of_the_episode(sampler):
    limit = sampler.info["max_context"]
    builders = [CountdownGroupBuilder(i, [1]) for i in range(2)]
    builders[0].max_tokens, builders[1].max_tokens = 10, limit + 9
    params = replace(PARAMS, max_tokens=None)
    groups = rollout(builders, sampler, params, seed=2).groups
    lengths = [len(tokens) for group in groups for (tokens,) in get_tokens(group)]
    assert lengths == [10 - 3, limit + 1 - 3]


@pytest.mark.parametrize("field", ["seat", "rewards", "metrics_of", "logs_of"])
@pytest.mark.parametrize("seat", [-1, 1])
def test_a_seat_that_does_not_exist_costs_its_episode(sampler, seat, field):
    class Faulty(CountdownEnv):
        def step(self, action):
            result = super().step(action)
            if self.turns == 2 and field == "seat":
                self.seat = seat
            elif self.turns == 2:
                value = 1.0 if field == "rewards" else {"x": 1.0}
                result = replace(result, **{field: {seat: value}})
            return result

    result = rollout([Of(Faulty, 3, [2, 1])], sampler, PARAMS, seed=2)
    assert result.groups[0].get_total_rewards() == [11.0]
    (error,) = result.errors
    assert f"{seat}" in error and "seats are numbered from 0 and their count is 1" in error


@pytest.mark.parametrize("place", ["builder", "rollout"])
def test_episodes_without_turns_are_refused(sampler, place):
    group, more = CountdownGroupBuilder(4, [1]), {}
    if place == "builder":
        group.max_turns = 0
    else:
        more["max_turns"] = 0
    with pytest.raises(ValueError, match="problem 4 .count. has max_turns 0: at least 1"):
        rollout([group], sampler, PARAMS, seed=0, **more)


def test_a_data_set_named_all_leaves_the_metrics_of_all(sampler):
    builders = [CountdownGroupBuilder(0, [1]), CountdownGroupBuilder(1, [2, 2])]
    builders[0].tag, builders[1].tag = "all", "other"
    metrics = compute_group_metrics(rollout(builders, sampler, PARAMS, seed=2).groups)
    counts = {name: n for name, n in metrics.items() if name.endswith("total_episodes")}
    assert counts == {
        "env/all/total_episodes": 3,
        "env/all-rows/total_episodes": 1,
        "env/other/total_episodes": 2,
    }


class FailingCloseEnv(CountdownEnv):
    closed = 0

    def close(self):
        FailingCloseEnv.closed += 1
        raise OSError("the container is gone")


@pytest.mark.filterwarnings("ignore:.*was not closed")
def test_an_environment_that_cannot_be_closed_costs_nothing_else(sampler):
    """The other environments are closed, and an error that ends the rollout is raised."""
    with pytest.warns(UserWarning, match="episode 0 of row 3, was not closed: OSError: the cont"):
        result = rollout([Of(FailingCloseEnv, 3, [1, 1])], sampler, PARAMS, seed=2)
    assert [group.get_total_rewards() for group in result.groups] == [[11.0, 11.0]]
    FailingCloseEnv.closed = 0
    with (
        pytest.raises(KeyboardInterrupt),
        open_engine({None: sampler}, PARAMS, RolloutSchedule()) as engine,
    ):
        for number in range(2):
            engine.start_group(number, Of(FailingCloseEnv, 3, [3, 3]), seed=1, random_stream=number)
        engine.tick()
        raise KeyboardInterrupt
    assert FailingCloseEnv.closed == 4


def test_the_context_error_names_the_limit_that_the_action_has(sampler):
    limit = sampler.info["max_context"]
    long = CountdownGroupBuilder(5, [1])
    long.first = ModelInput.from_ints([3] * limit)
    envs = long.make_envs()
    envs[0].max_action_tokens = 2
    long.make_envs = lambda: envs
    result = rollout([long], sampler, PARAMS, seed=0)
    assert f"has {limit} tokens, which with max_tokens=2 exceed" in result.errors[0]


def test_merged_rollouts_add_counts_and_keep_the_larger_peak_and_all_groups():
    made = [TrajectoryGroup([], [], [], problem_index=i) for i in range(4)]
    counters = {"emitted_tokens": 2, "peak_rows": 3, "prefix_cached_tokens": 1}
    first = RolloutBatch(
        made[:1], ["a"], {"emitted_tokens": 5, "peak_rows": 8}, 1.0, 2.0, made[1:2]
    )
    merged = first.merge(RolloutBatch(made[2:3], ["b"], counters, 0.5, 0.5, made[3:]))
    assert (merged.groups, merged.untrained_groups) == (made[::2], made[1::2])
    assert merged.errors == ["a", "b"]
    assert merged.counters == {"emitted_tokens": 7, "peak_rows": 8, "prefix_cached_tokens": 1}
    assert (merged.sample_seconds, merged.score_seconds) == (1.5, 2.5)


class DeferredResultEnv(CountdownEnv):
    """Returns what is due when the context is full: a result, a promise of a result, nothing, or a
    failure.
    """

    owes: object = None
    closed = 0

    def on_context_overflow(self):
        if isinstance(self.owes, Exception):
            raise self.owes
        return self.owes

    def close(self):
        self.closed += 1


class FakeFuture:
    def __init__(self, result):
        self.inputs = result

    def result(self):
        if isinstance(self.inputs, Exception):
            raise self.inputs
        return self.inputs


def owing_group(limit: int, kinds) -> CountdownGroupBuilder:
    """Return a group of episodes with room for a single turn."""
    group = CountdownGroupBuilder(0, [3] * len(kinds))
    group.first = ModelInput.from_ints([3] * (limit + 1 - 3 - 4 + 1))
    group.envs = [DeferredResultEnv(group.first, 3, False) for _ in kinds]
    for env, owes in zip(group.envs, kinds, strict=True):
        env.owes = owes
    group.make_envs = lambda: group.envs
    return group


def list_owed_results() -> list:
    last, lost = StepResult(5.0, True, metrics={"late": 2.0}), EpisodeFailed("lost the score")
    return [None, last, *map(FakeFuture, (last, lost, None)), lost]


def check_owed(result, group) -> None:
    (played,) = result.groups
    assert result.errors == ["lost the score"] * 2
    assert [env.left_out for env in group.envs] == [False, False, False, True, False, True]
    last = [episode.transitions[-1] for episode in played.trajectories_G]
    assert [turn.reward for turn in last] == [1.0, 6.0, 6.0, 1.0]
    assert [turn.metrics.get("late") for turn in last] == [None, 2.0, 2.0, None]
    assert all(turn.truncated and turn.metrics["context_overflow"] == 1.0 for turn in last)
    assert played.get_total_rewards() == [11.0, 16.0, 16.0, 11.0]
    assert [env.closed for env in group.envs] == [1] * 6


def test_the_last_reward_of_an_episode_that_outgrows_the_context_counts(sampler):
    group = owing_group(sampler.info["max_context"], list_owed_results())
    check_owed(rollout([group], sampler, PARAMS, seed=2), group)


@pytest.mark.parametrize("field", ["reward", "rewards"])
@pytest.mark.parametrize("reward", [float("nan"), None, "much", "7"])
def test_a_reward_that_is_no_finite_number_costs_its_episode(sampler, reward, field):
    """So does a reward of another seat."""

    class Faulty(CountdownEnv):
        players = (None, "other")

        def step(self, action):
            result = super().step(action)
            wrong = {field: {1: reward} if field == "rewards" else reward}
            return replace(result, **wrong) if self.turns == 2 else result

    result = rollout([Of(Faulty, 3, [2, 1])], sampler, PARAMS, seed=2)
    (group,) = result.groups
    assert group.get_total_rewards() == [11.0]
    (error,) = result.errors
    assert f"episode 0 of row 3, gave the reward {reward!r}; a finite number is expected" in error


@pytest.mark.parametrize(
    "rewards",
    [
        [(1.0, {})],
        [(1.0, {})] * 3,
        [1.0, 2.0],
        None,
        [(float("nan"), {}), (1.0, {})],
        [(1.0, None), (1.0, {})],
    ],
)
def test_group_rewards_that_cannot_be_read_cost_their_group(sampler, rewards):
    faulty = CountdownGroupBuilder(3, [1, 1])
    faulty.compute_group_rewards = lambda trajectories_G: rewards
    result = rollout([faulty, CountdownGroupBuilder(4, [1])], sampler, PARAMS, seed=2)
    assert [group.problem_index for group in result.groups] == [4]
    assert len(result.errors) == 2
    assert all("compute_group_rewards of count, row 3, returned" in e for e in result.errors)


@pytest.mark.parametrize("place", ["initial_observation", "make_envs", "step"])
def test_environments_are_closed_when_one_of_them_raises(sampler, place):
    """An environment's error ends the rollout. All environments are closed, including those of
    earlier groups.
    """
    groups = [owing_group(sampler.info["max_context"], [None, None]) for _ in range(2)]

    def fail(*arguments):
        raise LookupError("of the environment")

    if place == "make_envs":
        groups[1].make_envs = fail
    else:
        setattr(groups[1].envs[1], place, fail)
    with pytest.raises(LookupError, match="of the environment"):
        rollout(groups, sampler, PARAMS, seed=2)
    made = groups[:1] if place == "make_envs" else groups
    assert [env.closed for group in made for env in group.envs] == [1] * 2 * len(made)
