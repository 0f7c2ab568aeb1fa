"""Objects written for TRL's environment_factory: their tools, what reset gets and gives, rewards, runs without a data set."""

import textwrap

import pytest
from scripted import Scripted
from whole_runs import train

from rl.environments import EnvironmentGroup, isolated, resolve_environment
from rl.episodes import rollout
from rl.models import load_tokenizer
from rl.renderers import get_renderer
from rl.types import Problem, SamplingParams

FILE = textwrap.dedent('''
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
''')


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    written = tmp_path_factory.mktemp("trl") / "objects.py"
    written.write_text(FILE)
    return written


def call(name, **arguments):
    import json

    return f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'


@pytest.fixture
def played():
    """Plays an object's episode of a row with these answers."""
    tokenizer = load_tokenizer("tiny:ascii")
    roots = []

    def run(spec, answers, *, process):
        if process:
            spec = isolated(spec)
            roots.append(spec.root)
        problem = Problem(({"role": "user", "content": "Hello."},), {"target": 5}, index=0)
        group = EnvironmentGroup(spec, problem, 1, get_renderer("plain", tokenizer))
        sampler = Scripted(tokenizer, lambda prompt, turn, *_: answers[turn])
        return rollout([group], sampler, SamplingParams(max_tokens=300, temperature=1.0), seed=0)

    yield run
    for root in roots:
        root.close()


def test_the_tools_are_the_classes_public_methods(file):
    """As TRL finds them: functions of the class, so that no property is asked before reset; its clean-up, close, is none here."""
    names = {tool.__name__ for tool in resolve_environment(f"{file}:Counter").make().tools}
    assert names == {"add", "double", "later"}


@pytest.mark.parametrize("process", [False, True])
def test_an_attribute_is_the_reward_where_there_is_no_method(file, played, process):
    answers = [call("add", by=2) + call("double", number=4), call("later", by=1), "done"]
    found = played(resolve_environment(f"{file}:Counter"), answers, process=process)
    assert not found.errors
    (episode,) = found.groups[0].trajectories_G
    assert [m["content"] for turn in episode.transitions[1:] for m in turn.logs["told"]] == ["2", "8", "3"]
    assert found.groups[0].get_total_rewards() == [3.0]


@pytest.mark.parametrize("process", [False, True])
def test_reset_may_give_parts_which_go_on_the_rows_message(file, played, process):
    found = played(resolve_environment(f"{file}:Parts"), [call("add", by=1), "done"], process=process)
    assert not found.errors and found.groups[0].get_total_rewards() == [1.5]
    tokenizer = load_tokenizer("tiny:ascii")
    assert tokenizer.decode(found.groups[0].trajectories_G[0].transitions[0].ob.to_ints()).endswith("Hello. In parts.")


def test_no_reward_costs_the_episode(file, played):
    found = played(resolve_environment(f"{file}:Unsaid"), ["done"], process=False)
    assert not found.groups and "gave the reward nan" in found.errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_an_object_that_brings_its_own_episodes_needs_no_data_set(file, tmp_path, isolation):
    small = "--base-model tiny:ascii --batch-size 3 --group-size 2 --max-tokens 4 --steps 1 --eval-every 0 --environment-rows 12"
    rows = train(f"grpo {small} --environment {file}:Own --environment-isolation {isolation}", tmp_path / "run")
    (row,) = [row for row in rows if "progress/batch" in row]
    assert row["env/all/total_episodes"] == 6 and row["reward/failed"] == 0
    assert row["env/all/reward/max"] > row["env/all/reward/min"]  # groups of other seeds met other numbers
