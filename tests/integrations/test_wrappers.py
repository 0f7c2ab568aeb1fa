"""Test the wrappers of third-party environments against stubs with the same interface."""

import asyncio
import enum
import json
import random
import re
import subprocess
import sys
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from test_reward_endings import wait_until
from wrapper_scripted import ScriptedSampler, play_environment
from wrapper_scripted import renderer as make_renderer

from rl.config import SettingsError
from rl.envs import EpisodeLimits, parse_environment, resolve_environment
from rl.errors import UserError
from rl.integrations import TinkerGroup
from rl.integrations.client_session import ClientSession
from rl.rollout import EpisodeFailed, rollout
from rl.types import ModelInput, Problem, SamplingParams

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def renderer():
    return make_renderer()


@pytest.fixture
def package(monkeypatch):
    def install(name, **contents):
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


# ------------------------------------------------------------------------------------ reasoning-gym


class SumDataset:
    """A reasoning-gym dataset: sums of two numbers below 10 to the power of config["digits"]. It
    takes at most 20,000 items, as word_ladder does.
    """

    def __init__(self, config):
        assert config["size"] <= 20_000
        self.config = config

    def __getitem__(self, index):
        rng = random.Random(self.config["seed"] + index)
        a, b = (rng.randrange(10 ** self.config.get("digits", 1)) for _ in range(2))
        return {"question": f"{a}+{b}=", "answer": str(a + b), "metadata": {}}

    def score_answer(self, answer, entry):
        return 1.0 if answer == entry["answer"] else 0.01


class Curriculum:
    attributes = {"digits": SimpleNamespace(levels=[1, 2, 3])}

    def set_global_level(self, level):
        self.level = level

    def generate_configuration(self, defaults, context):
        return {**defaults, "digits": self.level + 1, "mode": context.mode}


@pytest.fixture
def fake_gym(package):
    factory = SimpleNamespace(
        DATASETS={"sums": (SumDataset, dict)},
        CURRICULA={"sums": Curriculum},
        create_curriculum=lambda name: Curriculum(),
    )
    package("reasoning_gym.coaching")
    package(
        "reasoning_gym.coaching.base_curriculum",
        DefaultCurriculumContext=lambda mode: SimpleNamespace(mode=mode),
        RangeAttributeMode=SimpleNamespace(UPPER_BOUND="upper", INCLUSIVE="inclusive"),
    )
    return package(
        "reasoning_gym", factory=factory, create_dataset=lambda name, **config: SumDataset(config)
    )


def add_operands(prompt):
    a, b = prompt.rsplit("=", 1)[0].rsplit("\n", 1)[-1].split(":")[-1].strip().split("+")
    return str(int(a) + int(b))


def test_a_generated_task_pays_right_answers_and_its_levels_grow(fake_gym, renderer):
    spec = resolve_environment("reasoning_gym", task="sums", levels=3)
    rows = spec.make().rows("train", 9)
    assert [row["level"] for row in rows] == [0, 1, 2] * 3
    result = play_environment(spec, add_operands, rows=rows)
    assert [item.get_total_rewards() for item in result.groups] == [[1.0]] * 9
    (wrong,) = play_environment(spec, lambda prompt: "-1", rows=rows[:1]).groups
    assert wrong.get_total_rewards() == [0.01]
    assert wrong.trajectories_G[0].transitions[-1].metrics["correct"] == 0.0

    def request(row):
        made = spec.make()
        made.row = row
        return made.start()

    assert [len(request(row)) <= 2 * (row["level"] + 1) + 2 for row in rows] == [True] * 9
    tests = spec.make().rows("test", 9)
    assert not set(map(request, rows[2::3])) & set(map(request, tests[2::3]))


def test_each_task_gets_each_level(fake_gym):
    fake_gym.factory.DATASETS["more"] = fake_gym.factory.DATASETS["sums"]
    fake_gym.factory.CURRICULA["more"] = Curriculum
    made = resolve_environment("reasoning_gym", task="sums,more", levels=2).make()
    pairs = [(row["task"], row["level"]) for row in made.rows("train", 8)]
    assert sorted(pairs) == sorted(2 * [("sums", 0), ("sums", 1), ("more", 0), ("more", 1)])


@pytest.mark.parametrize("settings", [{"level": 3}, {"levels": 4}])
def test_a_level_beyond_the_curriculum_is_refused_before_training(fake_gym, settings):
    with pytest.raises(UserError, match="curriculum of sums has levels 0 to 2, got level 3"):
        resolve_environment("reasoning_gym", task="sums", **settings)


def test_an_answer_in_tags_is_taken_out_of_them(fake_gym):
    made = resolve_environment("reasoning_gym", task="sums", suffix="Say the number.").make()
    made.row = {"index": 0}
    assert made.start().endswith("=\nSay the number.")
    answer = made.entry["answer"]
    text = f"<answer>0</answer> no, <answer> {answer} </answer>."
    turn = made.step({"role": "assistant", "content": text})
    assert turn.reward == 1.0 and turn.done and turn.logs == {"answer": answer}


@pytest.mark.parametrize("error", [SyntaxError, RecursionError, ZeroDivisionError, Exception])
def test_an_answer_at_which_a_scorer_raises_is_wrong(fake_gym, monkeypatch, error):
    def score_answer(self, answer, entry):
        raise error("unexpected token")

    monkeypatch.setattr(SumDataset, "score_answer", score_answer)
    made = resolve_environment("reasoning_gym", task="sums").make()
    made.row = {"index": 0}
    made.start()
    turn = made.step({"role": "assistant", "content": "1 +"})
    assert turn.done and turn.reward == 0.0 and turn.metrics == {"correct": 0.0, "score": 0.0}


# ---------------------------------------------------------------------------------------- textarena

Kind = enum.Enum("Kind", "PROMPT PLAYER_ACTION GAME_MESSAGE")


class NimEnv:
    """Players take 1 to 3 of the sticks in turn; the player of the last stick wins."""

    def __init__(self, most=9):
        self.most = most

    def reset(self, num_players, seed=None):
        assert num_players == 2, "two play"
        rng = vars(sys.modules["textarena.nim"])["random"]
        rng.seed(seed)
        time.sleep(0.002)
        self.sticks = rng.randint(5, self.most) + rng.randint(0, 1)
        self.player, self.rewards, self.invalid = 0, None, False
        count = (-1, f"{self.sticks} sticks.", Kind.GAME_MESSAGE)
        self.seen = {p: [(-1, f"You are {p}.", Kind.PROMPT), count] for p in (0, 1)}

    def get_observation(self):
        seen, self.seen[self.player] = self.seen[self.player], []
        return self.player, seen

    def step(self, action):
        taken = int(action.strip("[]")) if action.strip("[]").isdigit() else 0
        for player in (0, 1):
            self.seen[player].append((self.player, action, Kind.PLAYER_ACTION))
        self.invalid = not 1 <= taken <= min(3, self.sticks)
        self.sticks -= taken
        if self.invalid or not self.sticks:
            won = 1 - self.player if self.invalid else self.player
            self.rewards = {won: 1, 1 - won: -1}
            return True, {}
        self.player = 1 - self.player
        self.seen[self.player].append((-1, f"{self.sticks} sticks.", Kind.GAME_MESSAGE))
        return False, {}

    def close(self):
        invalid = [self.invalid and p == self.player for p in (0, 1)]
        return self.rewards, {p: {"invalid_move": invalid[p], "turn_count": 3} for p in (0, 1)}


@pytest.fixture
def fake_textarena(package):
    package("textarena.nim", random=random)
    registry = SimpleNamespace(ENV_REGISTRY={"Nim-v0": 1, "Nim-v0-raw": 1})
    made = []

    def make(name, **config):
        made.append(name)
        return NimEnv(**config)

    return package("textarena", envs=SimpleNamespace(registration=registry), make=make, made=made)


def choose_best_move(prompt):
    sticks = int(prompt.rsplit(" sticks.", 1)[0].split()[-1].split(":")[-1])
    return str(sticks % 4 or 1)


def test_self_play_has_a_trajectory_for_each_seat_which_sees_its_own_side(fake_textarena, renderer):
    spec = resolve_environment("textarena", game="Nim-v0")
    result = play_environment(spec, choose_best_move, rows=[{}] * 4)
    assert set(fake_textarena.made) == {"Nim-v0-raw"} and not result.errors
    rewards = [reward for group in result.groups for reward in group.get_total_rewards()]
    assert len(result.groups) == 8 and sorted(rewards) == [-1.0] * 4 + [1.0] * 4
    for group in result.groups:
        turns = group.trajectories_G[0].transitions
        seat = turns[0].seat
        read = renderer.tokenizer.decode(turns[-1].ob.to_ints())
        assert f"You are {seat}." in read and f"You are {1 - seat}." not in read
        assert f"Player {seat}:" not in read  # its moves appear as its answers


def test_a_random_player_moves_by_itself_and_a_game_is_a_function_of_its_seed(
    fake_textarena, renderer
):
    others = {"others": "random", "moves": "1 2 3"}
    spec = resolve_environment("textarena", game="Nim-v0", rules=False, **others)
    first, again = (
        play_environment(spec, choose_best_move, rows=[{}] * 6, group=4) for _ in range(2)
    )
    assert [len(group.trajectories_G) for group in first.groups] == [4] * 6

    def tokens(result):
        episodes = [episode for group in result.groups for episode in group.trajectories_G]
        return [[t.ob.to_ints() for t in episode.transitions] for episode in episodes]

    assert tokens(first) == tokens(again)
    # a player with the best strategy wins most games
    assert sum(sum(g.get_total_rewards()) for g in first.groups) > 6
    text = renderer.tokenizer.decode(first.groups[0].trajectories_G[1].transitions[0].ob.to_ints())
    assert "You are" not in text and "Player 0:" in text  # the second member has the second seat


def test_the_global_generator_is_left_alone(fake_textarena, renderer):
    random.seed(3)
    before = random.getstate()
    play_environment(resolve_environment("textarena", game="Nim-v0"), choose_best_move)
    assert random.getstate() == before


def test_the_player_of_the_other_seats_is_known_before_an_episode(fake_textarena, renderer):
    """The run loads the models that a new environment names."""
    for others, models in (("policy", []), ("pool", ["pool"]), ("some/model", ["some/model"])):
        made = resolve_environment("textarena", game="Nim-v0", others=others).make()
        assert list(made.models) == models
    random_player = {"others": "random", "moves": "1 2 3"}
    assert not resolve_environment("textarena", game="Nim-v0", **random_player).make().models


def test_an_answer_without_brackets_gets_them_and_a_bad_one_is_counted(fake_textarena, renderer):
    settings = {"brackets": True, "config": '{"most": 5}'}
    made = resolve_environment("textarena", game="Nim-v0", **settings).make()
    made.seed = 1
    turn = made.start()
    assert "sticks" in turn.messages and made.seats == (None, None)
    turn = made.step({"role": "assistant", "content": "9"})
    assert turn.done and turn.reward == -1.0 and turn.rewards == {1: 1.0}
    assert turn.metrics == {"won": 0.0, "invalid_move": 1.0, "moves": 3.0}


@pytest.mark.parametrize(
    ("wins_only", "won", "reference", "other"),
    [(False, 1, 1.0, -0.9), (True, 1, 1.0, 0.0), (False, 0, -0.9, 1.0), (True, 0, 0.0, 1.0)],
)
def test_wins_alone_are_paid_where_that_is_asked_for(
    fake_textarena, monkeypatch, wins_only, won, reference, other
):
    """The game's reward also pays a loser that came close."""
    close = NimEnv.close

    def nearly(self):
        rewards, info = close(self)
        return {player: 1 if reward == 1 else -0.9 for player, reward in rewards.items()}, info

    monkeypatch.setattr(NimEnv, "close", nearly)
    made = resolve_environment("textarena", game="Nim-v0", wins_only=wins_only).make()
    made.seed = 1
    made.start()
    made.wrapped_env.sticks = 1
    # "0" is no move: the opponent has won
    turn = made.step({"role": "assistant", "content": str(won)})
    assert (turn.reward, turn.metrics["won"]) == (reference, float(won))
    assert list(turn.rewards.values()) == [other]
    assert sorted(turn.logs["rewards"].values()) == [-0.9, 1]


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("reasoning_gym", {"task": "sum"}, "did you mean sums"),
    ("reasoning_gym", {"task": "sums", "level": 1, "levels": 2}, "set only level or levels"),
    ("reasoning_gym", {"task": "sums", "config": "[1]"}, "JSON object"),
    ("reasoning_gym", {"task": "sums", "config": "{"}, "JSON object"),
    ("textarena", {"game": "Nim-v1"}, "did you mean Nim-v0"),
    ("textarena", {"game": "Nim-v0", "others": "random"}, "give them, such as"),
])  # fmt: skip
def test_settings_that_cannot_be(fake_gym, fake_textarena, name, settings, message):
    with pytest.raises(UserError, match=message):
        resolve_environment(name, **settings).make()


def test_a_task_without_levels_is_named(fake_gym):
    fake_gym.factory.CURRICULA.clear()
    with pytest.raises(UserError, match="no curriculum of sums"):
        resolve_environment("reasoning_gym", task="sums", level=0).make()


# ---------------------------------------------------------------------------------------- SkyRL-Gym


class RetryEnv:
    """Ask again until the answer is right, as often as the config says."""

    closed = 0

    def __init__(self, env_config, extras):
        self.truth, self.turns = extras["reward_spec"]["ground_truth"], 0
        self.most = env_config.limits.most  # as search and text2sql read OmegaConf's DictConfig
        assert env_config["limits"]["most"] == self.most and not hasattr(env_config, "least")

    def init(self, prompt):
        return prompt, {}

    def step(self, action):
        self.turns += 1
        right = action == self.truth
        done = right or self.turns == self.most
        messages = [] if done else [{"role": "user", "content": f"No. {self.turns}"}]
        return {
            "observations": messages,
            "reward": 1.0 if right else -0.25,
            "done": done,
            "metadata": {"seen": {action}},
        }

    def get_metrics(self):
        several = {"each": np.zeros(2), "complex": torch.tensor(1j)}
        return {"turns": self.turns, "name": "thrice", **several}

    def close(self):
        RetryEnv.closed += 1


def test_an_environment_of_skyrl_gym_plays_on_a_data_sets_rows(package, renderer):
    package("skyrl_gym", registry={"thrice": 1}, make=lambda name, **inputs: RetryEnv(**inputs))
    spec = resolve_environment("skyrl_gym", env="thrice", config='{"limits": {"most": 3}}')
    assert spec.needs_rows
    row = {"messages": [{"role": "user", "content": "2*3?"}], "answer": "2"}

    def say(prompt):
        return prompt.rsplit("No. ", 1)[1][0] if "No." in prompt else "x"

    (group,) = play_environment(spec, say, rows=[row]).groups
    turns = group.trajectories_G[0].transitions
    assert [t.reward for t in turns] == [-0.25, -0.25, 1.0]
    assert turns[-1].metrics["turns"] == 3.0 and turns[-1].metrics.keys().isdisjoint(
        {"name", "each", "complex"}
    )
    assert wait_until(lambda: RetryEnv.closed == 1, 2)
    with pytest.raises(UserError, match="did you mean thrice"):
        resolve_environment("skyrl_gym", env="thrise").make()


# ------------------------------------------------------------------------------------------ servers


class Client:
    """An OpenEnv client: its methods are coroutines, and the same task must enter and exit it."""

    remaining = 0

    def __init__(self, base_url, connect_timeout_s=10.0, message_timeout_s=60.0):
        self.count = 0
        Client.limits = connect_timeout_s, message_timeout_s

    async def __aenter__(self):
        self.task = asyncio.current_task()
        return self

    async def __aexit__(self, *_):
        assert asyncio.current_task() is self.task
        Client.remaining += 1

    async def reset(self, seed, **more):
        return SimpleNamespace(observation={"text": "Say 1", "n": 1}, reward=None, done=False)

    async def step(self, action):
        if action.get("message") == "break":
            raise ConnectionError("gone")
        if action.get("message") == "hang":
            await asyncio.sleep(1000)
        self.count += 1
        right, observation = action["message"] == str(self.count), {"text": f"Say {self.count + 1}"}
        return SimpleNamespace(observation=observation, reward=float(right), done=self.count == 2)


@pytest.fixture
def fake_openenv(package):
    Client.remaining = 0
    for name in ("openenv", "openenv.core"):
        package(name)
    return package("openenv.core.generic_client", GenericEnvClient=Client)


def say_number(prompt):
    return prompt.rsplit("Say ", 1)[1][0]


def test_episodes_on_a_server(fake_openenv, renderer):
    spec = resolve_environment("openenv", url="http://x", wait_seconds=300.0)
    result = play_environment(spec, say_number, rows=[{}] * 2, group=2)
    assert [item.get_total_rewards() for item in result.groups] == [[2.0, 2.0]] * 2
    assert wait_until(lambda: Client.remaining == 4, 4)
    assert min(Client.limits) > 300.0
    with pytest.raises(UserError, match="has a URL"):
        resolve_environment("openenv", url="localhost").make()


def test_every_json_action_is_counted(fake_openenv, renderer):
    spec = resolve_environment("openenv", url="http://x", action="json")
    answers = iter(["no json", "[" * 9000, "[1]", '{"message": "1"}', '{"message": "2"}'])
    (group,) = play_environment(spec, lambda prompt: next(answers)).groups
    turns = group.trajectories_G[0].transitions
    assert [turn.metrics["malformed_action"] for turn in turns] == [1.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(("say", "why"), [("break", "gone"), ("hang", "within")])
def test_a_server_that_breaks_costs_its_episode(fake_openenv, renderer, say, why):
    spec = resolve_environment("openenv", url="http://x", wait_seconds=0.5)
    turn = iter([say])
    result = play_environment(spec, lambda prompt: next(turn, "1"), rows=[{}, {}])
    assert len(result.groups) == 1 and len(result.errors) == 1 and why in result.errors[0]


def test_a_session_takes_calls_of_many_threads_and_says_what_failed():
    async def slow(client, n):
        await asyncio.sleep(0.3)
        return n * 10

    session, begin = ClientSession(lambda: Client("x"), 5.0), time.monotonic()
    with ThreadPoolExecutor(20) as pool:
        results = pool.map(lambda n: session.call(lambda client: slow(client, n)), range(20))
    assert list(results) == [n * 10 for n in range(20)] and time.monotonic() - begin < 4
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        session.call(lambda c: asyncio.sleep(10), 0.05)
    session.close()

    class RefusingClient(Client):
        async def __aenter__(self):
            raise ConnectionRefusedError("nobody")

    with pytest.raises(ConnectionRefusedError, match="nobody"):
        ClientSession(lambda: RefusingClient("x"), 5.0)


@pytest.mark.parametrize("hangs", ["opened", "closed"])
def test_a_session_that_is_not_opened_or_closed_in_time_leaves_nothing(hangs, monkeypatch):
    closed = threading.Event()
    monkeypatch.setattr("rl.integrations.client_session._END_SECONDS", 0.05)

    class SilentClient(Client):
        async def __aenter__(self):
            try:
                await asyncio.sleep(1000)
            finally:
                closed.set()

    class StuckClient(Client):
        async def __aexit__(self, *error):
            await SilentClient.__aenter__(self)

    before = set(threading.enumerate())
    if hangs == "closed":
        ClientSession(lambda: StuckClient("x"), 5.0).close()
    else:
        with pytest.raises(TimeoutError, match=r"did not answer within 0\.05 s"):
            ClientSession(lambda: SilentClient("x"), 0.05)
    assert closed.wait(5)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_a_client_is_called_inside_its_event_loop():
    """Outside an event loop, OpenEnv's client runs a call at once, and again when it is awaited."""

    class Counts(Client):
        steps = 0

        def step(self):
            asyncio.get_running_loop()  # raises RuntimeError outside
            return self._step()

        async def _step(self):
            self.steps += 1
            return self.steps

    session = ClientSession(lambda: Counts("x"), 5.0)
    assert [session.call(lambda client: client.step()) for _ in range(3)] == [1, 2, 3]
    session.close()


class McpClient(Client):
    def __init__(self, target, read_timeout_seconds):
        self.target = target

    async def list_tools(self, cursor=None):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        name, after = ("double", "more") if cursor is None else ("fail", None)
        item = SimpleNamespace(name=name, description=f"{name} it", input_schema=schema)
        return SimpleNamespace(tools=[item], next_cursor=after)

    async def call_tool(self, name, arguments):
        if name == "fail":
            return SimpleNamespace(content=[SimpleNamespace(text="no luck")], is_error=True)
        content = [SimpleNamespace(text=str(2 * arguments["a"])), SimpleNamespace(type="image")]
        return SimpleNamespace(content=content, is_error=False)


def test_the_tools_of_a_server_are_a_models_tools(package):
    from rl.envs.tools import run_calls

    package("mcp", Client=McpClient, StdioServerParameters=lambda command, args: (command, *args))
    made = resolve_environment("mcp", server="python 'my server.py' -x").make()
    made.row, made.calls = {"messages": [{"role": "user", "content": "2*3?"}], "answer": "6"}, []
    assert made.start() == [{"role": "user", "content": "2*3?"}]
    assert made.connection.session._client.target == ("python", "my server.py", "-x")
    tools = {item.name: item for item in made.tools}
    assert tools["double"].schema["function"]["parameters"]["required"] == ["a"]
    requests = [{"function": {"name": name, "arguments": {"a": 21}}} for name in ("double", "fail")]
    calls = run_calls({"tool_calls": requests}, tools)
    assert calls[0].answer == "42\n[image that is not text]" and "no luck" in calls[1].error
    assert made.step({"role": "assistant", "content": "6"}).reward == 1.0
    made.close()
    some = resolve_environment("mcp", server="http://x/mcp", only="double dubble").make()
    with pytest.raises(UserError, match="no tool dubble; it has double, fail"):
        some.start()
    some.close()


# ---------------------------------------------------------------------------------- tinker-cookbook


@dataclass
class FakeStepResult:
    reward: float
    episode_done: bool
    next_observation: ModelInput
    next_stop_condition: list
    metrics: dict = field(default_factory=dict)
    logs: dict = field(default_factory=dict)


def make_env_classes(renderer, seen):
    class Count:
        def __init__(self, left):
            self.remaining = left

        def observation(self):
            return renderer.build_generation_prompt(
                [{"role": "user", "content": f"Say {self.remaining}"}]
            )

        async def initial_observation(self):
            return self.observation(), []

        async def step(self, action, *, extra=None):
            seen.append((action, extra))
            right = renderer.parse_response(action)[0]["content"] == str(self.remaining)
            self.remaining -= 1
            metrics = {"stop/max_turns": 1.0} if self.remaining == 0 else {}
            return FakeStepResult(
                float(right), self.remaining == 0, self.observation(), [], metrics
            )

    class LegacyEnv(Count):
        def step(self, action):  # an older signature without `extra`, returning a Future
            return asyncio.get_running_loop().run_in_executor(
                None, lambda: asyncio.run(Count.step(self, action))
            )

    class FailingEnv(Count):
        async def step(self, action, *, extra=None):
            raise KeyError("no luck")

    class HangingEnv(Count):
        async def step(self, action, *, extra=None):
            await asyncio.sleep(1000)

    class OverflowEnv(Count):
        async def initial_observation(self):
            return SimpleNamespace(reward=0.0)

    return Count, LegacyEnv, FailingEnv, HangingEnv, OverflowEnv


class Builder:
    def __init__(self, *kinds):
        self.kinds, self.cleaned, self.compared = kinds, 0, []

    async def make_envs(self):
        return [kind(2) for kind in self.kinds]

    async def compute_group_rewards(self, trajectory_group, env_group):
        self.compared.append((len(trajectory_group), [type(env).__name__ for env in env_group]))
        turns = [turn for trajectory in trajectory_group for turn in trajectory.transitions]
        self.stop_reasons = {turn.ac.stop_reason for turn in turns}
        return [(10.0 * i, {"place": i}) for i, _ in enumerate(trajectory_group)]

    async def cleanup(self):
        self.cleaned += 1

    def logging_tags(self):
        return ["count", "all"]


def test_the_cookbooks_groups_are_played_token_by_token(renderer):
    seen = []
    count, old, breaks, hangs, overflows = make_env_classes(renderer, seen)
    builders = [
        Builder(count, old), Builder(count, breaks, count), Builder(hangs, count),
        Builder(overflows, count), Builder(breaks),
    ]  # fmt: skip
    groups = [TinkerGroup(item, i, seconds=1.0) for i, item in enumerate(builders)]
    sampler = ScriptedSampler(renderer, say_number)
    result = rollout(groups, sampler, SamplingParams(max_tokens=8), seed=0)
    rewards = [group.get_total_rewards() for group in result.groups]
    assert rewards == [[2.0, 12.0], [2.0, 12.0], [2.0], [2.0]]
    assert [item.compared for item in builders] == [
        [(2, ["Count", "LegacyEnv"])], [(2, ["Count", "Count"])], [(1, ["Count"])], [(1, ["Count"])], []
    ]  # fmt: skip
    assert [item.cleaned for item in builders] == [1] * 5
    assert builders[0].stop_reasons == {"stop"}
    assert len(result.errors) == 4
    assert "no luck" in result.errors[0] and "within its 1 s" in result.errors[1]
    assert {type(action) for action, _ in seen} == {list}
    assert {type(token) for action, _ in seen for token in action} == {int}
    assert {None if extra is None else extra["stop_reason"] for _, extra in seen} == {None, "stop"}
    assert result.groups[0].tag == "count"
    assert result.groups[0].trajectories_G[0].transitions[-1].truncated


def test_the_cookbooks_groups_by_name(tmp_path, renderer):
    path = tmp_path / "mine.py"
    path.write_text(
        "class Group:\n    async def make_envs(self):\n        return []\n"
        "def builders(row, group_size, renderer):\n    return Group()\n"
        "def nothing(row, group_size, renderer):\n    return 3\n"
    )
    spec = resolve_environment("tinker", builders=f"{path}:builders")
    rows = spec.make().rows("test", 2)
    limits = {"limits": EpisodeLimits(), "system_prompt": None}
    make_group = spec.make_token_level_group
    group = make_group(Problem((), rows[1], index=7), 4, renderer, **limits)
    assert isinstance(group, TinkerGroup) and group.problem_index == 7
    with pytest.raises(UserError, match="takes no system_prompt"):
        make_group(Problem((), rows[1]), 4, renderer, **limits | {"system_prompt": "Be brief."})
    make_group = resolve_environment("tinker", builders=f"{path}:nothing").make_token_level_group
    none = make_group(Problem((), rows[0]), 4, renderer, **limits)
    (env,) = none.make_envs()  # its only episode reports why it has no environment
    with pytest.raises(EpisodeFailed, match="returned 3; an EnvGroupBuilder is expected"):
        env.initial_observation().result()
    with pytest.raises(UserError, match="did you mean builders"):
        resolve_environment("tinker", builders=f"{path}:builder").make()


def test_the_cookbooks_groups_keep_the_limits_of_the_run(renderer, package):
    """Episodes of 2, 3 and 9 turns are truncated after 3 actions, and a call that hangs ends after
    0.5 s.
    """
    count, _, _, hangs, _ = make_env_classes(renderer, [])
    builder = Builder(*(lambda _, turns=turns: count(turns) for turns in (2, 3, 9)), hangs)
    package("limited_builders", builders=lambda row, group_size, renderer: builder)
    spec = resolve_environment("tinker", builders="limited_builders:builders")
    limits = EpisodeLimits(turns=3, tokens=1000, seconds=0.5)
    group = spec.make_token_level_group(
        Problem((), {}), 4, renderer, limits=limits, system_prompt=None
    )
    sampler = ScriptedSampler(renderer, say_number)
    result = rollout([group], sampler, SamplingParams(max_tokens=8), seed=0)
    turns = [episode.transitions for episode in result.groups[0].trajectories_G]
    assert [len(item) for item in turns] == [2, 3, 3] and turns[2][-1].truncated
    assert len(result.errors) == 1 and "within its 0.5 s" in result.errors[0]
    assert group.max_tokens == 1000


# ------------------------------------------------------------------------ requirements of a wrapper


def test_a_required_setting_is_named_by_its_flag():
    for name, setting in (("tinker", "builders"), ("endpoint", "program")):
        if name == "endpoint":
            pytest.importorskip("starlette", reason="needs the extra serve")
        with pytest.raises(SettingsError, match=rf"set it with --environment\.{setting} STR"):
            parse_environment(name, [])


# code that needs a package -> the extra that installs it
EXTRA_OF = {
    "resolve_environment('endpoint', program='true')": "serve",
    "McpServer('http://localhost:1')": "mcp",
    "resolve_environment('openenv', url='http://localhost:1').make()": "openenv",
    "resolve_environment('reasoning_gym', task='spell_backward').make()": "reasoning-gym",
    "resolve_environment('skyrl_gym', env='gsm8k').make()": "skyrl-gym",
    "resolve_environment('textarena', game='SpellingBee-v0').make()": "textarena",
}


@pytest.fixture(scope="module")
def missing_package_errors():
    """Return the error of each code of EXTRA_OF in a process without any of these packages."""
    code = f"""
import json, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in "starlette uvicorn mcp openenv reasoning_gym skyrl_gym textarena".split():
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hidden())
from rl.envs import resolve_environment
from rl.integrations.mcp_tools import McpServer
errors = {{}}
for code in {list(EXTRA_OF)}:
    try:
        eval(code)
    except Exception as error:
        errors[code] = f"{{type(error).__name__}}: {{error}}"
print(json.dumps(errors))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("code", EXTRA_OF)
def test_a_missing_package_is_named_with_an_extra_that_installs_it(missing_package_errors, code):
    extra, error = EXTRA_OF[code], missing_package_errors[code]
    pattern = rf'UserError: .*needs the package .*: pip install -e "\.\[{extra}\]" in the checkout$'
    assert re.fullmatch(pattern, error, re.DOTALL), error
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]
