"""Test tinker-cookbook groups that raise, hang or return invalid values in any of their methods."""

import asyncio
import math
import threading
from types import SimpleNamespace

import pytest
from games import MadeUp, tokenizer

from rl import ServiceClient
from rl.client import SampleStream
from rl.envs import EpisodeLimits
from rl.integrations import TinkerGroup
from rl.integrations.tinker_cookbook_env import Tinker
from rl.renderers import get_renderer
from rl.rollout import EventLog, ReplayedEventLog, RolloutSchedule, rollout
from rl.types import Problem, SampledSequence, SamplingParams

TOKENIZER = tokenizer()
RENDERER = get_renderer("plain", TOKENIZER)


class One:
    def __init__(self, **inputs):
        self.inputs = inputs

    def observation(self):
        return RENDERER.build_generation_prompt([{"role": "user", "content": "go"}])

    async def initial_observation(self):
        return self.observation(), []

    async def step(self, action, *, extra=None):
        plain = {
            "reward": 1.0, "episode_done": True, "next_observation": None,
            "next_stop_condition": [], "metrics": {}, "logs": {},
        }  # fmt: skip
        return SimpleNamespace(**{**plain, **self.inputs})


class Group:
    """A group of two episodes. `made`, `compared`, `cleaned`: what each method does instead."""

    def __init__(self, made=None, compared=None, cleaned=None, **inputs):
        self.made, self.compared, self.cleaned, self.inputs = made, compared, cleaned, inputs

    async def make_envs(self):
        return [One(**self.inputs), One()] if self.made is None else await simulate_fault(self.made)

    async def compute_group_rewards(self, trajectory_group, env_group):
        return (
            [(0.5, {}) for _ in trajectory_group]
            if self.compared is None
            else await simulate_fault(self.compared)
        )

    async def cleanup(self):
        if self.cleaned is not None:
            await simulate_fault(self.cleaned)


async def simulate_fault(what):
    if what == "hang":
        await asyncio.sleep(1000)
    if what == "raise":
        raise OSError("no luck")
    if what == "exit":
        raise SystemExit(3)
    return what


def play(*groups):
    """Play groups against a policy that always answers "a"."""
    sampler = MadeUp(TOKENIZER, lambda *_: "a", cut_off=0.0)
    return rollout(groups, sampler, SamplingParams(max_tokens=4), seed=0)


FAULTS = {  # (group, expected errors, rewards of the remaining episodes)
    "made: raises": (Group(made="raise"), ["raised OSError: no luck"], None),
    "made: exits": (Group(made="exit"), ["SystemExit: 3"], None),
    "made: hangs": (Group(made="hang"), ["not done within its 0.5 s"], None),
    "made: nothing": (Group(made=[]), ["has no environments"], None),
    "made: a number": (Group(made=3), ["an invalid environment"], None),
    "made: no environments": (Group(made=[1, 2]), ["an invalid environment"], None),
    "compared: raises": (Group(compared="raise"), ["raised OSError: no luck"] * 2, None),
    "compared: hangs": (Group(compared="hang"), ["not done within its 0.5 s"] * 2, None),
    "compared: too few": (Group(compared=[(1.0, {})]), ["1 rewards for 2 episodes"] * 2, None),
    "compared: numbers alone": (Group(compared=[1.0, 2.0]), ["cannot be read"] * 2, None),
    "compared: no number": (
        Group(compared=[(math.nan, {}), (1.0, {})]),
        ["a finite number is expected"] * 2,
        None,
    ),
    "compared: beyond floats": (
        Group(compared=[(10**400, {}), (1.0, {})]),
        ["OverflowError"] * 2,
        None,
    ),
    "cleaned: raises": (Group(cleaned="raise"), [], [1.5, 1.5]),
    "cleaned: hangs": (Group(cleaned="hang"), [], [1.5, 1.5]),
    "reward: nan": (Group(reward=math.nan), ["a finite number is expected"], [1.5]),
    "reward: beyond floats": (Group(reward=10**400), ["OverflowError"], [1.5]),
    "reward: a text": (Group(reward="much"), ["cannot be read"], [1.5]),
    "metrics: infinite": (Group(metrics={"a": math.inf}), ["a finite number is expected"], [1.5]),
    "metrics: a list": (Group(metrics=[1]), ["cannot be read"], [1.5]),
    "logs: no JSON": (Group(logs={"a": object()}), ["cannot be read"], [1.5]),
    "logs: a long number": (Group(logs={"a": 10**5000}), ["cannot be read"], [1.5]),
    "no more to read": (Group(episode_done=False), ["cannot be read"], [1.5]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_breaks_costs_its_episode_or_its_group(name):
    broken, text, remaining = FAULTS[name]
    groups = [Group(), broken, Group()]
    result = play(*(TinkerGroup(group, i, seconds=0.5) for i, group in enumerate(groups)))
    rewards = {group.problem_index: group.get_total_rewards() for group in result.groups}
    assert rewards == {0: [1.5, 1.5], 2: [1.5, 1.5], **({1: remaining} if remaining else {})}
    assert len(result.errors) == len(text)
    for error, expected in zip(result.errors, text, strict=True):
        assert expected in error and ("group 1" in error or "One" in error), error


class Long(One):
    def observation(self):
        return RENDERER.build_generation_prompt([{"role": "user", "content": "go" * 1500}])


@pytest.mark.parametrize("long", [1, 2])
def test_an_episode_too_long_to_begin_is_not_compared(long):
    """The builder gets as many environments as episodes; a group without episodes is cleaned up."""
    seen = []

    class Mixed(Group):
        async def make_envs(self):
            self.ones = [One(), *[Long() for _ in range(long)]][-2:]
            return self.ones

        async def compute_group_rewards(self, trajectory_group, env_group):
            seen.append(env_group == self.ones[:1] and len(trajectory_group) == 1)
            return [(0.5, {})]

        async def cleanup(self):
            seen.append("clean")

    result = play(TinkerGroup(Mixed(), 0, seconds=5.0))
    assert len(result.errors) == long
    assert all("exceed the model's context of 2000" in error for error in result.errors)
    assert [group.get_total_rewards() for group in result.groups] == ([[1.5]] if long == 1 else [])
    assert seen == ([True, "clean"] if long == 1 else ["clean"])


BUILDERS = """
import time
from test_cookbook_faults import Group

class Untagged(Group):
    def logging_tags(self):
        raise OSError("no tags")

def builders(row, group_size, renderer):
    index = row["index"]
    if index == 1:
        raise KeyError("no such task")
    if index == 2:
        time.sleep(1000)
    if index == 3:
        return None
    if index == 4:
        raise SystemExit(3)
    return Untagged() if index == 5 else Group()
"""


def test_a_builder_that_cannot_be_made_costs_its_group(tmp_path):
    (tmp_path / "mine.py").write_text(BUILDERS)
    cookbook = Tinker(f"{tmp_path / 'mine.py'}:builders", call_seconds=1.0)
    limits = {"limits": EpisodeLimits(seconds=1.0), "system_prompt": None}
    problems = [Problem((), {"index": i, "split": "train"}, index=i) for i in range(7)]
    make_group = cookbook.make_token_level_group
    result = play(*(make_group(problem, 2, RENDERER, **limits) for problem in problems))
    rewards = {group.problem_index: group.get_total_rewards() for group in result.groups}
    assert rewards == {i: [1.5, 1.5] for i in (0, 5, 6)}
    text = [
        "raised KeyError: 'no such task'",
        "was not done within its 1 s",
        "returned None",
        "raised SystemExit: 3",
    ]
    assert len(result.errors) == 4
    for i, (error, expected) in enumerate(zip(result.errors, text, strict=True), start=1):
        assert expected in error and f"group {i}" in error, error


class RecordingGroupBuilder(Group):
    """Record what is compared and the number of cleanups."""

    def __init__(self, fails=False, **inputs):
        super().__init__(**inputs)
        self.fails, self.compares, self.cleans = fails, [], 0

    async def make_envs(self):
        return [FailingEnv() if self.fails else One(), One()]

    async def compute_group_rewards(self, trajectory_group, env_group):
        self.compares.append((len(trajectory_group), len(env_group)))
        return [(0.5, {}) for _ in trajectory_group]

    async def cleanup(self):
        self.cleans += 1


class FailingEnv(One):
    async def step(self, action, *, extra=None):
        raise OSError("no luck")


def test_a_failure_of_the_run_that_is_repeated_is_left_out_of_the_comparison(tmp_path):
    log, results = [], []
    with ServiceClient(output_dir=tmp_path) as service:
        client = service.create_full_training_client("tiny:ascii-small", seed=1)
        sampler = client.save_weights_and_get_sampling_client()
        form = {"schedule": RolloutSchedule(make_stream=SampleStream), "seed": 3}
        for fails in (True, False):
            group = RecordingGroupBuilder(fails)
            clock = EventLog(log.append) if fails else ReplayedEventLog(log)
            params = SamplingParams(max_tokens=2)
            result = rollout([TinkerGroup(group)], sampler, params, event_log=clock, **form)
            counts = [len(item.trajectories_G) for item in result.groups]
            results.append((counts, result.errors, group.compares, group.cleans))
    assert results[0] == results[1] and results[0][0] == [1] and results[0][2:] == ([(1, 1)], 1)


@pytest.mark.parametrize("ended", [[], [0], [0, 1]])
def test_a_group_that_is_given_back_is_cleaned_up_once(ended):
    """The group is cleaned up and its thread ends, whether none, some or all of its episodes have
    ended.
    """
    group = RecordingGroupBuilder()
    made = TinkerGroup(group, 7)
    envs = made.make_envs()
    for number, env in enumerate(envs):
        env.initial_observation().result()
        env.step(SampledSequence([3], [-1.0], "stop")).result()
        if number in ended:
            env.close()
    for number, env in enumerate(envs):
        if number not in ended:
            env.close()
    made.on_discard()
    made.on_discard()
    name = "the cookbook's group 7"
    for thread in [item for item in threading.enumerate() if item.name == name]:
        thread.join(5)
    assert group.cleans == 1
    assert group.compares == []
    assert name not in {item.name for item in threading.enumerate()}
