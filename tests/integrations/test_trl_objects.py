"""Test objects written for TRL's environment_factory."""

import asyncio
import textwrap
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scripted import ScriptedSampler
from whole_runs import train

from rl.config import DataSettings, EnvironmentSettings
from rl.envs import (
    Environment,
    EnvironmentGroup,
    isolate_environment,
    parse_environment,
    resolve_environment,
)
from rl.errors import UserError
from rl.integrations.trl_env import wrap_factory
from rl.models import load_tokenizer
from rl.renderers import get_renderer
from rl.rollout import rollout
from rl.trainer.stage_data import build_episode_groups
from rl.types import Problem, SamplingParams

FILE = textwrap.dedent('''
    import functools
    import random

    class Base:
        def reset(self, **row):
            self.row, self.reward, self.value = row, 0.0, 0
            return " Go."
        def add(self, by: int) -> str:
            """Adds.

            Args:
                by: how much
            """
            self.value += by
            self.reward = float(self.value)
            return str(self.value)

    class Counter(Base):
        """Properties that need a reset, methods of other kinds, no get_reward: the reward function of TRL's examples reads `reward`."""
        kept = 3
        def __init__(self):
            self.handler = print
        @property
        def left(self):
            return 10 - self.value
        @property
        def broken(self):
            raise RuntimeError("not before reset")
        @staticmethod
        def double(number: int) -> str:
            """Doubles.

            Args:
                number: what
            """
            return str(2 * number)
        async def later(self, by: int) -> str:
            """Adds, later.

            Args:
                by: how much
            """
            return self.add(by)
        @classmethod
        def made(cls):
            return cls()
        def _hidden(self):
            pass

    class Parts(Base):
        def reset(self, **row):
            super().reset(**row)
            return [{"type": "text", "text": " In"}, {"type": "text", "text": " parts."}]
        async def get_reward(self):
            return 0.5 + self.value

    class Unsaid(Base):
        def get_reward(self):
            return None

    class Own:
        """Brings its own episodes: no data set."""
        def reset(self, prompt, seed=None):
            assert prompt == [{"role": "user", "content": ""}]
            self.number = random.Random(seed).randrange(100)
            return f"{self.number}?"
        def get_reward(self) -> float:
            return self.number / 100

    class Sized(Own):
        def __init__(self, size):
            self.size = size
        def get_reward(self):
            return self.size

    class Speaker:
        def reset(self, **row):
            assert "environment" not in row
        def speak(self, word: str) -> str:
            \"\"\"Speaks.

            Args:
                word: which
            \"\"\"
            return word.upper()

    def made(size: float = 0.25):
        return Sized(size)

    halved = functools.partial(Sized, 0.5)
    several = {"count": Base, "speak": lambda: Speaker()}
    no_factories = {"count": 3}
''')


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    written = tmp_path_factory.mktemp("trl") / "objects.py"
    written.write_text(FILE)
    return written


def call(name, **arguments):
    import json

    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def play_episode():
    """Return a function that plays an episode of an object with scripted answers."""
    tokenizer = load_tokenizer("tiny:ascii")
    roots = []

    def run(spec, answers, *, process):
        if process:
            spec = isolate_environment(spec)
            roots.append(spec.fork_server)
        problem = Problem(({"role": "user", "content": "Hello."},), {"target": 5}, index=0)
        group = EnvironmentGroup(spec, problem, 1, get_renderer("plain", tokenizer))
        sampler = ScriptedSampler(tokenizer, lambda prompt, turn, *_: answers[turn])
        return rollout([group], sampler, SamplingParams(max_tokens=300, temperature=1.0), seed=0)

    yield run
    for root in roots:
        root.close()


def test_the_tools_are_the_classes_public_methods(file):
    """As in TRL, the tools are the functions of the class; close is not a tool."""
    spec = resolve_environment(f"{file}:Counter")
    assert {tool.__name__ for tool in spec.make().tools} == {"add", "double", "later"}
    assert spec.needs_rows


@pytest.mark.parametrize("process", [False, True])
def test_an_attribute_is_the_reward_where_there_is_no_method(file, play_episode, process):
    answers = [call("add", by=2) + call("double", number=4), call("later", by=1), "done"]
    result = play_episode(resolve_environment(f"{file}:Counter"), answers, process=process)
    assert not result.errors
    (episode,) = result.groups[0].trajectories_G
    messages = [m["content"] for turn in episode.transitions for m in turn.logs["new_messages"]]
    assert messages == ["Hello. Go.", "2", "8", "3"]
    assert result.groups[0].get_total_rewards() == [3.0]


@pytest.mark.parametrize("process", [False, True])
def test_reset_may_give_parts_which_go_on_the_rows_message(file, play_episode, process):
    result = play_episode(
        resolve_environment(f"{file}:Parts"), [call("add", by=1), "done"], process=process
    )
    assert not result.errors and result.groups[0].get_total_rewards() == [1.5]
    tokenizer = load_tokenizer("tiny:ascii")
    assert tokenizer.decode(
        result.groups[0].trajectories_G[0].transitions[0].ob.to_ints()
    ).endswith("Hello. In parts.")


@dataclass
class GroupSetting(Environment):
    group: int = 3


class GroupTool:
    def reset(self):
        return "Hello."

    def group(self, word: str) -> str:
        """Groups words.

        Args:
            word: a word
        """
        return word


@pytest.mark.parametrize("cls", [GroupSetting, GroupTool])
def test_a_setting_or_a_tool_may_be_called_group(cls):
    settings = SimpleNamespace(env=EnvironmentSettings(), data=DataSettings())
    spec, renderer = resolve_environment(cls), get_renderer("plain", load_tokenizer("tiny:ascii"))
    (group,) = build_episode_groups(spec, settings, [Problem((), {})], 2, renderer)
    assert isinstance(group, EnvironmentGroup) and len(group.make_envs()) == 2


@pytest.mark.parametrize(
    ("value", "expected"),
    [(np.array(1.5), 1.5), (torch.tensor(0.25), 0.25), (True, 1.0), (None, 0.0)],
)
def test_the_attribute_reward_is_a_number_of_any_library(play_episode, value, expected):
    class Rewarded:
        reward = value

        def reset(self, **row):
            return "Go."

    result = play_episode(resolve_environment(Rewarded), ["done"], process=False)
    assert not result.errors and result.groups[0].get_total_rewards() == [expected]


def test_no_reward_costs_the_episode(file, play_episode):
    result = play_episode(resolve_environment(f"{file}:Unsaid"), ["done"], process=False)
    assert not result.groups and "gave the reward nan" in result.errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_an_object_that_brings_its_own_episodes_needs_no_data_set(file, tmp_path, isolation):
    small = (
        "--base-model tiny:ascii --batch-size 3 --group-size 2 --max-tokens 4 --steps 1 "
        "--eval-every 0 --environment-rows 12"
    )
    rows = train(
        f"grpo {small} --environment {file}:Own --environment-isolation {isolation}",
        tmp_path / "run",
    )
    (row,) = [row for row in rows if "progress/batch" in row]
    assert row["env/all/total_episodes"] == 6 and row["reward/failed"] == 0
    # groups with different seeds got different numbers
    assert row["env/all/reward/max"] > row["env/all/reward/min"]


@pytest.mark.parametrize(("name", "settings", "reward", "process"), [
    ("made", {}, 0.25, False),
    ("made", {"size": 0.75}, 0.75, True),
    ("halved", {}, 0.5, False),
    ("halved", {}, 0.5, True),
])  # fmt: skip
def test_a_factory_may_be_a_function(file, name, settings, reward, process):
    """Its arguments become settings. Its objects may bring their episodes, as those of
    a class may.
    """
    spec = resolve_environment(f"{file}:{name}", **settings)
    assert spec.can_make_rows
    spec = isolate_environment(spec) if process else spec
    group = EnvironmentGroup(
        spec,
        Problem((), {"seed": 3}, index=0),
        2,
        get_renderer("plain", load_tokenizer("tiny:ascii")),
    )
    sampler = ScriptedSampler(load_tokenizer("tiny:ascii"), lambda *_: "done")
    result = rollout([group], sampler, SamplingParams(max_tokens=300, temperature=1.0), seed=0)
    if process:
        spec.fork_server.close()
    assert not result.errors and result.groups[0].get_total_rewards() == [reward, reward]
    with pytest.raises(UserError, match="did you mean --environment.size"):
        parse_environment(f"{file}:made", [("sise", "1")])
    assert parse_environment(f"{file}:made", [("size", "2")]).settings == {"size": 2.0}


@pytest.mark.parametrize("process", [False, True])
def test_a_dictionary_of_factories_is_chosen_from_by_the_row(file, process):
    """Each row gets its environment with that environment's tools, and reset does not see the
    column.
    """
    spec = resolve_environment(f"{file}:several")
    assert spec.needs_rows and not spec.can_make_rows
    spec = isolate_environment(spec) if process else spec
    tokenizer = load_tokenizer("tiny:ascii")
    renderer = get_renderer("plain", tokenizer)
    rows = [{"environment": "count", "target": 5}, *({"environment": e} for e in ("speak", "sing"))]
    hello = ({"role": "user", "content": "Hello."},)
    problems = [Problem(hello, row, index=i) for i, row in enumerate([*rows, {}])]
    answers = [call("add", by=2), call("speak", word="hi"), "done"]
    sampler = ScriptedSampler(tokenizer, lambda prompt, turn, *_: answers[turn])
    groups = [EnvironmentGroup(spec, p, 1, renderer) for p in problems]
    result = rollout(groups, sampler, SamplingParams(max_tokens=300), seed=0)
    if process:
        spec.fork_server.close()
    turns = [group.trajectories_G[0].transitions[1:] for group in result.groups]
    messages = [
        [m["content"] for turn in reference for m in turn.logs["new_messages"]]
        for reference in turns
    ]
    assert messages[0][0] == "2" and messages[1][1] == "HI"
    assert "no tool" in messages[0][1] and "no tool" in messages[1][0]
    assert [group.get_total_rewards() for group in result.groups] == [[2.0], [0.0]]
    assert len(result.errors) == 2 and "None" in result.errors[1]
    assert "'sing'; the dictionary has 'count', 'speak'" in result.errors[0]
    with pytest.raises(UserError, match="is not an environment in it"):
        resolve_environment(f"{file}:no_factories")


def test_what_can_be_called_but_says_not_how_is_a_factory_that_takes_nothing():
    """Examples are dict.fromkeys and iter: written in C, some without a signature."""
    made = wrap_factory(iter, "Made")
    assert isinstance(made, type)
    with pytest.raises(TypeError):
        made()


def test_an_environment_of_a_dictionary_has_the_episodes_seed():
    class SeededEnv:
        def reset(self, seed):
            return str(seed)

    several = wrap_factory({"one": SeededEnv}, "Several")()
    several.row, several.seed = {"environment": "one"}, 77
    assert asyncio.run(several.start()) == [{"role": "user", "content": "77"}]
