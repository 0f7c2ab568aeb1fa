"""Test invalid values in the fields of a TurnResult: each fails only its episode, in threads and in
processes, and the error names it.
"""

import gc
import os
import textwrap
import time

import pytest
from games import MadeUp, tokenizer

from rl.envs import EnvironmentGroup, EpisodeLimits, isolate_environment, parse_environment
from rl.renderers import get_renderer
from rl.rollout import compute_group_metrics, rollout
from rl.types import Problem, SamplingParams

TOKENIZER = tokenizer()

# Pair: member 1 returns what its row says. Reason: ends with a reason for the truncation. Talk:
# plays three turns and reports metrics and logs for both seats. Crowded: the second fork of a group's
# process fails.
FILE = textwrap.dedent("""
    import numpy, os, random
    from rl.envs import Environment, TurnResult

    class Mute:
        def __repr__(self): raise RuntimeError("no word")
        def __float__(self): raise RuntimeError("no number")
    class Deaf(dict):
        def get(self, *_): raise KeyError("no item")

    class Pair(Environment):
        seats = (None, None)
        def start(self):
            if self.member == 1 and self.row["when"] == "start":
                if self.row["code"].startswith("self."): exec(self.row["code"], {"self": self, "Mute": Mute})
                else: return eval(self.row["code"])
            self.drawn = random.random(), float(numpy.random.random())
            return "go"
        def step(self, answer):
            if self.member == 1 and self.row["when"] == "step":
                return eval(self.row["code"])
            return TurnResult(reward=1.0, done=True, metrics={"first": 1.0, "drawn": self.drawn[0], "other": self.drawn[1]})
    class Reason(Environment):
        def start(self): return "go"
        def step(self, answer): return TurnResult(reward=1.0, done=True, truncated="time limit", logs_of={0: {"own": "kept"}})
    class Talk(Environment):
        seats = (None, None)
        def start(self):
            self.turns = 0
            return "go"
        def step(self, answer):
            self.turns += 1
            if self.turns < 3:
                return TurnResult("on", reward=0.25, seat=self.turns % 2, rewards={1: -0.5})
            return TurnResult(done=True, metrics={"m": 1.0}, logs={"l": "first"}, metrics_of={1: {"m": 2.0}}, logs_of={1: {"l": "second"}})
    class Crowded(Pair):
        def share(self):
            forks = iter((os.fork, None, os.fork))
            def fork():
                if (present := next(forks)) is None: raise BlockingIOError("no further process")
                return present()
            os.fork = fork
""")

NONSENSE = {
    "None": "",
    "('a', 1.0)": "",
    "TurnResult()": "returned no messages",
    "TurnResult('a' * 100_000_000)": "characters",
    "TurnResult(done=True, reward=float('nan'))": "gave the reward nan",
    "TurnResult(done=True, reward='much')": "gave the reward 'much'",
    "TurnResult(done=True, metrics={'a': float('inf')})": "gave the metric 'a' inf",
    "TurnResult(done=True, logs={'a': object()})": "JSON",
    "TurnResult(done=True, logs={'a': 10**5000})": "JSON",
    "TurnResult('a', seat=3)": "names the seat 3",
    "TurnResult(done=True, metrics=None)": "gave the metrics None",
    "TurnResult(done=True, metrics=[('a', 1.0)])": "gave the metrics [",
    "TurnResult(done=True, metrics={'a': 'much'})": "gave the metric 'a' 'much'",
    "TurnResult(done=True, metrics={'a': numpy.zeros(2)})": "gave the metric 'a' ",
    "TurnResult(done=True, reward=[1.0])": "gave the reward [1.0]",
    "TurnResult(done=True, reward=1j)": "",
    "TurnResult(done=True, reward=Mute())": "",
    "TurnResult(done=True, reward=10**400)": "",
    "TurnResult(done=True, rewards=3)": "gave the rewards",
    "TurnResult(done=True, rewards={7: 1.0})": "gives results for the seat 7; "
    "seats are numbered from 0 and their count is 2",
    "TurnResult(done=True, rewards={1: float('nan')})": "gave the reward of seat 1",
    "TurnResult(done=True, metrics_of={1: 5})": "gave the metric of seat 1",
    "TurnResult(done=True, metrics_of={1: {'a': float('inf')}})": "gave the metric of seat 1, 'a'",
    "TurnResult(done=True, logs_of={1: {'a': float}})": "",
    "TurnResult(done=True, logs=5)": "gave the logs 5",
    "TurnResult(done=True, logs_of='all')": "gave the logs_of",
    "TurnResult([{'role': 'user', 'content': 5}])": "cannot be rendered",
    "TurnResult([{'role': 'user', 'content': None}])": "cannot be rendered",
    "TurnResult([{'role': 'user'}])": "cannot be rendered",
    "TurnResult([{'role': 'user', 'content': [{'type': 'text'}]}])": "cannot be rendered",
    "TurnResult([{'role': 'user', 'content': [{'type': 'text', 'text': 'a' * 10**7}]}])": "characters",
    "TurnResult({'role': 'user', 'content': 'a'})": "neither a text nor a list",
    "TurnResult('a', seat='x')": "names the seat 'x'",
    "TurnResult('a', seat=None)": "names the seat None",
    "TurnResult(done=numpy.zeros(2))": "gave for done ",
    "TurnResult(done=True, truncated=numpy.zeros(2))": "gave for truncated ",
    "TurnResult('\\ud800')": "half of a surrogate pair",
    "TurnResult([Deaf(role='user', content='a')])": "no item",
    "TurnResult(done=True, metrics={Mute(): 1.0})": "",
    "TurnResult(done=True, logs={'a': [Mute()]})": "",
    "[TurnResult(done=True)]": "",
    "Mute()": "",
    "type": "",
}
AT_START = {
    "None": "",
    "3": "gave 3",
    "b'a'": "",
    "[]": "returned no messages",
    "[{'content': 'a'}]": "gave [{",
    "TurnResult('a', seat=9)": "names the seat 9",
    "TurnResult('a', rewards={3: 1.0})": "gives results for the seat 3",
    "Mute()": "",
    "self.seats = 5": "",
    "self.seats = ()": "names the seat 0; seats are numbered from 0 and their count is 0",
    "self.seats = (5, None)": "has the seats (5, None)",
    "self.seats = ('nobody', None)": "assigned seat 0 to 'nobody', which is no available player (available: none)",
    "self.tools = 5": "tools is a tuple of functions, such as (search,), got 5",
    "self.tools = (5,)": "a tool is a function, got 5",
}


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    file = tmp_path_factory.mktemp("pair") / "pair.py"
    file.write_text(FILE)
    names = ("Pair", "Talk", "Reason", "Crowded")
    threads = {name: parse_environment(f"{file}:{name}", []) for name in names}
    processes = {name: isolate_environment(spec) for name, spec in threads.items()}
    yield {"threads": threads, "processes": processes}
    for spec in processes.values():
        spec.fork_server.close()


def play_groups(spec, rows, members):
    problems = [Problem((), row, index=i) for i, row in enumerate(rows)]
    renderer, limits = get_renderer("plain", TOKENIZER), EpisodeLimits(seconds=20)
    builders = [
        EnvironmentGroup(spec, problem, members, renderer, limits=limits) for problem in problems
    ]
    return rollout(
        builders,
        MadeUp(TOKENIZER, lambda *_: "a", cut_off=0.0),
        SamplingParams(max_tokens=4),
        seed=0,
    )


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_nonsense_costs_its_own_episode_and_is_named(specs, where):
    """All kinds of invalid values are in one batch, each in a separate group: every other episode
    keeps its reward.
    """
    rows = [{"when": "step", "code": code} for code in NONSENSE] + [
        {"when": "start", "code": code} for code in AT_START
    ]
    result = play_groups(specs[where]["Pair"], rows, 3)
    text = [*NONSENSE.values(), *AT_START.values()]
    for number, (row, expected) in enumerate(zip(rows, text, strict=True)):
        (error,) = [item for item in result.errors if f"episode 1 of row {number}," in item]
        assert expected in error and len(error) < 2000, (row, error)
    assert len(result.errors) == len(rows)
    assert [group.get_total_rewards() for group in result.groups] == [[1.0, 1.0]] * len(rows)
    assert compute_group_metrics(result.groups)["env/all/first"] == 1.0


def test_a_fork_that_fails_costs_its_own_episode(specs):
    result = play_groups(specs["processes"]["Crowded"], [{"when": "never"}], 3)
    (error,) = result.errors
    assert "of row 0, died" in error  # any of the three: their threads fork
    assert [group.get_total_rewards() for group in result.groups] == [[1.0, 1.0]]


def test_episodes_leave_no_open_sockets(specs):
    play_groups(specs["processes"]["Crowded"], [{"when": "never"}], 3)  # starts the root
    gc.collect()
    gc.disable()  # a run collects garbage rarely
    try:
        before = len(os.listdir("/dev/fd"))
        play_groups(specs["processes"]["Crowded"], [{"when": "never"}] * 4, 3)
        deadline = time.monotonic() + 20
        while (count := len(os.listdir("/dev/fd"))) > before and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        gc.enable()
    assert count <= before


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_what_seats_earn_and_are_told_of_themselves_comes_through(specs, where):
    result = play_groups(specs[where]["Talk"], [{}], 2)
    assert not result.errors
    first, second = result.groups
    assert first.get_total_rewards() == [0.25, 0.25]
    assert second.get_total_rewards() == [0.25 - 0.5 - 0.5] * 2
    for group, figure, log in ((first, 1.0, "first"), (second, 2.0, "second")):
        last = group.trajectories_G[0].transitions[-1]
        assert last.episode_done and last.metrics["m"] == figure and last.logs["l"] == log


@pytest.mark.parametrize("where", ["threads", "processes"])
def test_a_reason_in_words_cuts_an_episode_short(specs, where):
    result = play_groups(specs[where]["Reason"], [{}], 2)
    assert not result.errors
    for item in result.groups[0].trajectories_G:
        assert item.transitions[-1].metrics["truncated"] == 1.0
        assert item.transitions[-1].logs["own"] == "kept"


def test_modules_generators_in_processes_are_the_groups(specs):
    """With a plain fork, all episodes would draw the same numpy numbers, and different ones from
    random.
    """
    result = play_groups(specs["processes"]["Pair"], [{"when": "never", "code": ""}] * 3, 3)
    again = play_groups(specs["processes"]["Pair"], [{"when": "never", "code": ""}] * 3, 3)
    for name in ("drawn", "other"):
        drawn = [
            [item.transitions[-1].metrics[name] for item in group.trajectories_G]
            for group in result.groups
        ]
        assert all(len(set(group)) == 1 for group in drawn)
        assert len({group[0] for group in drawn}) == 3
        assert drawn == [
            [item.transitions[-1].metrics[name] for item in group.trajectories_G]
            for group in again.groups
        ]
