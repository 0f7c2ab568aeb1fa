"""Test environments in the rollout: prompts and answers, tools, limits, settings and failures."""

import asyncio
import importlib
import json
import os
import re
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
from scripted import ScriptedSampler
from test_reward_endings import wait_until

from rl.config import SettingsError
from rl.envs import (
    Environment,
    EnvironmentGroup,
    EpisodeLimits,
    Game,
    KeyValueStore,
    TurnResult,
    isolate_environment,
    list_environments,
    parse_environment,
    register_environment,
    resolve_environment,
    tool,
)
from rl.envs.env_runner import EpisodeTask
from rl.envs.tools import Tool, run_calls
from rl.errors import UserError
from rl.images import make_image_chunk, open_image
from rl.integrations.trl_env import MultiTrlEnvironment
from rl.judges import add_episode_rewards
from rl.models import load_tokenizer
from rl.processes import find_descendants, kill_process
from rl.renderers import get_renderer
from rl.rewards import Scorer, register_reward, resolve_reward
from rl.rollout import build_rollout_rows, compute_group_metrics, rollout, trajectory_to_datums
from rl.seed import derive_seed
from rl.types import Problem, SamplingParams

PARAMS = SamplingParams(max_tokens=200, temperature=1.0)


@pytest.fixture(scope="module")
def ascii_tokenizer():
    return load_tokenizer("tiny:ascii")


@pytest.fixture
def play(ascii_tokenizer):
    """Return a function that plays groups of an environment against scripted answers."""

    def run(spec, say, *, members=1, rows=({},), limits=None, system_prompt=None):
        spec = resolve_environment(spec) if isinstance(spec, type) else spec
        renderer = get_renderer("plain", ascii_tokenizer)
        form = {"limits": limits, "system_prompt": system_prompt}
        builders = [
            EnvironmentGroup(spec, Problem((), row, index=i), members, renderer, **form)
            for i, row in enumerate(rows)
        ]
        return rollout(builders, ScriptedSampler(ascii_tokenizer, say), PARAMS, seed=0)

    return run


@pytest.fixture
def resolve():
    """Return `resolve_environment` with processes that end with the test."""
    made = []

    def run(name, **more):
        made.append(resolve_environment(name, **more))
        return made[-1]

    yield run
    for spec in made:
        if spec.fork_server is not None:
            spec.fork_server.close()


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a module and returns its path."""

    def run(source, name="mine"):
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(source))
        return path

    return run


@dataclass
class GuessEnvironment(Environment):
    """The number that the seed says."""

    high: int = 100

    def start(self):
        self.number = self.rng.randrange(self.high)
        return "Guess."

    def step(self, answer):
        guess = int(answer["content"])
        if guess == self.number:
            logs = {"number": self.number}
            return TurnResult(reward=1.0, done=True, metrics={"found": 1.0}, logs=logs)
        return TurnResult("higher" if guess < self.number else "lower", reward=-0.1)


def guess_middle(prompt, *_):
    """Return the midpoint of the range that the conversation leaves."""
    low, high = 0, 99
    for guess, answer in re.findall(r"(\d+)\D*?(higher|lower)", prompt):
        low, high = (int(guess) + 1, high) if answer == "higher" else (low, int(guess) - 1)
    return str((low + high) // 2)


def test_a_files_place_does_not_change_its_episodes(tmp_path):
    seeds = []
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "mine.py"
        file.write_text(
            "from rl.envs.calculator_env import CalculatorEnv\nclass Mine(CalculatorEnv): pass\n"
        )
        spec = resolve_environment(f"{file}:Mine")
        group = EnvironmentGroup(spec, Problem((), {}, index=3), 1, None)
        seeds.append((spec.seed_stream, group.seed))
    assert seeds[0] == seeds[1] == ("mine.py:Mine", derive_seed("environment", "mine.py:Mine", 3))
    assert resolve_environment("calculator").seed_stream == "calculator"


def test_a_reward_of_whole_episodes_gets_the_columns_of_the_row(play):
    def length(episode, meta):
        return float(len(episode.turns) == meta["turns"])

    rows = [{"turns": 1, "seed": 3}, {"turns": 99, "seed": 4}]
    (first, _) = play(GuessEnvironment, guess_middle, rows=rows).groups
    rows[0]["turns"] = len(first.trajectories_G[0].transitions)
    result = play(GuessEnvironment, guess_middle, rows=rows)
    with Scorer(register_reward("length_of_this_test", episode=True)(length)) as scorer:
        scored = add_episode_rewards(result, scorer)
    assert [group.metrics_G[0]["reward/episode"] for group in scored.groups] == [1.0, 0.0]
    rows = build_rollout_rows(scored, None, 1.0)
    assert [row["metrics"]["reward/episode"] for row in rows] == [1.0, 0.0]


class InParts(Environment):
    def start(self):
        parts = [{"type": "text", "text": text} for text in ("What is ", "2+2?")]
        return [{"role": "user", "content": parts}]

    def step(self, answer):
        return TurnResult(done=True)


def test_a_question_in_parts_is_a_text_in_rewards_and_rollouts(play):
    result = play(InParts, lambda *_: "4")
    (turn,) = result.groups[0].trajectories_G[0].transitions
    # the text renderer of this test reads no images
    turn.logs["new_messages"][0]["content"].append({"type": "image", "image": "cat.png"})
    seen = []

    def record(episode, meta):
        seen.append(episode.messages[0]["content"])
        return 0.0

    def check_prompt(prompt, response, meta):
        return float(prompt == "What is 2+2?[image]")

    kinds = (("images_of_this_test", True, record), ("prompt_of_this_test", False, check_prompt))
    for name, episode, function in kinds:
        with Scorer(register_reward(name, episode=episode)(function)) as scorer:
            scored = add_episode_rewards(result, scorer)
    assert scored.groups[0].get_total_rewards() == [1.0]
    assert seen == ["What is 2+2?[image]"]
    (row,) = build_rollout_rows(result, None, 1.0)
    assert row["turns"][0]["text"] == "What is 2+2?[image]"


def test_a_conversation_is_played_to_its_end(play):
    result = play(GuessEnvironment, guess_middle, members=2, rows=[{}, {}, {}])
    assert not result.errors and len(result.groups) == 3
    for group in result.groups:
        first, second = group.trajectories_G
        # both members of a group get the number of the group's seed, so they play identically
        assert [t.ac.tokens for t in first.transitions] == [t.ac.tokens for t in second.transitions]
        wrong = len(first.transitions) - 1
        assert group.get_total_rewards() == [pytest.approx(1.0 - 0.1 * wrong)] * 2 and wrong <= 6
        assert [t.reward for t in first.transitions] == [-0.1] * wrong + [1.0]
        assert [t.episode_done for t in first.transitions] == [False] * wrong + [True]
        assert not first.transitions[-1].truncated
        first.advantage = 1.0
        # every prompt continued where the previous answer ended
        (datum,) = trajectory_to_datums(first)
        sampled = sum(len(t.ac.tokens) for t in first.transitions)
        assert datum.loss_fn_inputs["mask"].array.sum() == sampled
    numbers = {group.trajectories_G[0].transitions[-1].logs["number"] for group in result.groups}
    assert len(numbers) > 1
    assert compute_group_metrics(result.groups)["env/all/found"] == 1.0


def test_rows_tell_an_episode_turn_by_turn(play, ascii_tokenizer):
    result = play(GuessEnvironment, guess_middle)
    (group,) = result.groups
    (episode,) = group.trajectories_G
    episode.advantage = 0.5
    renderer = get_renderer("plain", ascii_tokenizer)
    (row,) = json.loads(json.dumps(list(build_rollout_rows(result, renderer, 1.0))))
    turns = row["turns"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * len(episode.transitions)
    assert [turn["sampled"] for turn in turns] == [False, True] * len(episode.transitions)
    assert turns[0]["text"] == "Guess." and turns[1]["text"] == "49"
    assert turns[1]["observation_tokens"] == len("Guess.")
    assert [turn["reward"] for turn in turns[1::2]] == [t.reward for t in episode.transitions]
    assert turns[-1]["logs"]["number"] == episode.transitions[-1].logs["number"]
    for turn, transition in zip(turns[1::2], episode.transitions, strict=True):
        assert turn["token_ids"] == transition.ac.tokens
        assert "".join(turn["tokens"][:-1]) == turn["text"]
        assert turn["logprobs"] == transition.ac.logprobs and "restarts" not in turn
    assert row["reward"] == pytest.approx(sum(turn["reward"] for turn in turns if turn["sampled"]))

    # for reading only: the same without tokens, so that no token is decoded
    (short,) = json.loads(json.dumps(list(build_rollout_rows(result, None, 1.0))))
    by_token = {"prompt_tokens", "response_tokens", "tokens", "token_ids", "logprobs"}
    drop = [
        {key: value for key, value in entry.items() if key not in by_token}
        for entry in (row, *turns)
    ]
    assert short == {**drop[0], "turns": drop[1:]}


# ------------------------------------------------------------------------------------------- limits


class EndlessEnvironment(Environment):
    def start(self):
        return [{"role": "system", "content": "S"}, {"role": "user", "content": "go"}]

    def step(self, answer):
        return TurnResult("more", reward=1.0, metrics={"cut": float("cut_off" in answer)})


def test_turns_and_tokens_are_limited_and_what_was_earned_counts(play):
    def run(**limits):
        return play(EndlessEnvironment, lambda *_: "a", limits=EpisodeLimits(**limits))

    (episode,) = run(turns=3).groups[0].trajectories_G
    assert [(t.reward, t.episode_done, t.truncated) for t in episode.transitions] == [
        (1.0, False, False), (1.0, False, False), (1.0, True, True),
    ]  # fmt: skip
    assert episode.transitions[-1].metrics["truncated"] == 1.0
    # "Sgo" is 3 tokens; each turn adds an answer, its end and "more", 6 tokens. After n turns the
    # prompt has 3 + 6 n tokens, and 200 are reserved for the answer.
    (group,) = run(turns=99, tokens=215).groups
    (episode,) = group.trajectories_G
    assert len(episode.transitions) == 3 and episode.transitions[-1].truncated
    assert episode.transitions[-1].metrics["context_overflow"] == 1.0
    assert episode.transitions[-1].metrics["truncated"] == 1.0
    assert group.get_total_rewards() == [3.0]
    none = run(tokens=202)
    assert not none.groups and "episode's limit of 202" in none.errors[0]


class LongToolResult(Environment):
    """Member 0 calls a tool whose result leaves no room for a further answer."""

    def start(self):
        self.tools = (self.look,)
        return "go"

    def look(self, place: str) -> str:
        """Looks.

        Args:
            place: where
        """
        return "x" * 300

    def step(self, answer):
        return TurnResult(reward=1.0, done=True)


def test_an_episode_that_outgrows_its_tokens_counts_in_the_metrics_of_episodes(play):
    call = '<tool_call>\n{"name": "look", "arguments": {"place": "up"}}\n</tool_call>'
    (group,) = play(
        LongToolResult,
        lambda prompt, turn, problem, member: "done" if member else call,
        members=2,
        limits=EpisodeLimits(tokens=400),
    ).groups
    metrics = compute_group_metrics([group])
    assert metrics["env/all/context_overflow"] == metrics["env/all/truncated"] == 0.5
    assert metrics["env/all/tool/calls"] == 0.5


def test_an_answer_that_was_cut_off_is_known_as_such(play):
    (group,) = play(EndlessEnvironment, lambda *_: "abc...", limits=EpisodeLimits(turns=2)).groups
    (episode,) = group.trajectories_G
    assert [t.metrics["cut"] for t in episode.transitions] == [1.0, 1.0]
    assert episode.transitions[0].metrics["ended"] == 0.0
    # its end mark is inserted as an observed token, not as a token that the model sampled
    first, second = episode.transitions
    assert second.ob.to_ints()[: first.ob.length + 3] == [*first.ob.to_ints(), *first.ac.tokens]
    assert len(first.ac.tokens) == 3


def test_system_prompts_and_async_environments(play):
    closed = []

    class AsyncEnvironment(Environment):
        async def start(self):
            self.loop = asyncio.get_running_loop()
            await asyncio.sleep(0.01)
            return "q"

        async def step(self, answer):
            assert asyncio.get_running_loop() is self.loop
            await asyncio.sleep(0.01)
            return TurnResult(reward=2.0, done=True)

        async def close(self):
            closed.append(asyncio.get_running_loop() is self.loop)

    (group,) = play(AsyncEnvironment, lambda *_: "a", members=3, system_prompt="Be brief. ").groups
    assert group.get_total_rewards() == [2.0] * 3
    assert group.trajectories_G[0].transitions[0].ob.length == len("Be brief. q")
    assert wait_until(lambda: len(closed) == 3, 5) and closed == [True] * 3


def test_what_a_group_shares_is_made_once(play):
    made = []

    class SharedStateEnvironment(Environment):
        def share(self):
            made.append(self.seed)
            return {"words": [self.rng.random()]}

        def start(self):
            self.shared["words"].append(self.member)
            return "q"

        def step(self, answer):
            return TurnResult(reward=self.shared["words"][0], done=True)

    rows = [{"seed": 5}, {"seed": 6}]
    result = play(SharedStateEnvironment, lambda *_: "a", members=4, rows=rows)
    assert sorted(made) == [5, 6]
    first, second = (set(group.get_total_rewards()) for group in result.groups)
    assert len(first) == len(second) == 1 and first != second


# -------------------------------------------------------------------------------------------- tools


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class WithTools(Environment):
    def __init__(self):
        self.tools = (tool(nap, seconds=0.3), boom, self.note, tool(shout, characters=50))
        self.notes = {}

    def note(self, key: str, value: str) -> str:
        """Keeps a value.

        Args:
            key: its name
            value: what is kept
        """
        self.notes[key] = value
        return f"{key} is kept"

    def start(self):
        return "go"

    def step(self, answer):
        return TurnResult(reward=len(self.calls), done=True, logs={"notes": self.notes})


def nap(seconds: float) -> str:
    """Sleeps.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "slept"


def boom() -> str:
    """Fails."""
    raise RuntimeError("no way")


def shout(times: int) -> str:
    """Says much.

    Args:
        times: how often
    """
    return "A" * times


# text with calls -> the beginning of each answer, or a part of it
CALLS = {
    "several at once": (
        call("note", key="a", value="1") + "\n" + call("boom"),
        ["a is kept", "Error: RuntimeError: no way"],
    ),
    "a hang": (call("nap", seconds=60), ["Error: nap took longer than 0.3 s"]),
    "no such tool": (call("nott"), ["Error: no tool is named 'nott', did you mean 'note'?"]),
    "no value": (call("note", key="a"), ["Error: note: missing a required argument: 'value'"]),
    "one too many": (call("boom", x=1), ["Error: boom: got an unexpected keyword argument 'x'"]),
    "no JSON": (
        "<tool_call>\nnote(1)\n</tool_call>",
        ["Error: the call <tool_call>\nnote(1)\n</tool_call> is not a valid call: no JSON"],
    ),
    "cut off": ('<tool_call>\n{"name": "no...', ["was not finished"]),
    "much": (call("shout", times=100_000_000), ["characters omitted"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_answered_each_within_its_limits(play, name):
    output, expected = CALLS[name]
    begin = time.monotonic()
    result = play(WithTools, lambda prompt, turn, *_: "done" if turn else output)
    assert not result.errors and time.monotonic() - begin < 15
    first, last = result.groups[0].trajectories_G[0].transitions
    messages = last.logs["new_messages"]
    assert [message["role"] for message in messages] == ["tool"] * len(expected)
    for message, part in zip(messages, expected, strict=True):
        assert part in message["content"]
    assert len(first.logs["tool_calls"]) == len(expected) == last.reward
    malformed = name in ("no such tool", "no value", "one too many", "no JSON", "cut off")
    assert last.metrics["tool/calls"] == len(expected)
    assert last.metrics["tool/malformed"] == malformed
    assert last.metrics["tool/failed"] == (name in ("several at once", "a hang"))
    # the model has read each tool result as logged, after its answer
    before = [*first.ob.to_ints(), *first.ac.tokens]
    assert last.ob.to_ints()[: len(before)] == before


def test_the_tools_descriptions_are_those_of_transformers():
    from typing import Literal

    from transformers.utils import get_json_schema

    from rl.envs.tool_schema import make_tool_schema

    def plain(a: int, b: float = 1.0, c: bool = False) -> str:
        """Adds.

        And more of it.

        Args:
            a: the first
            b: the second, which
                goes on in another line
            c: whether
        Returns:
            A text
        """

    def nested(
        words: list[str], table: dict[str, int], near: int | None = None, both: int | str = 1
    ) -> list:
        """Does it

        Args:
            words: some (or none): words
            table: numbers
            near: or nothing
            both: one of them
        """

    def chosen(kind: Literal["a", "b"], anything: dict, rest: list) -> None:
        """Chooses.

        Args:
            kind: which
            anything: what
            rest: the others
        """

    def several(pair: tuple[int, str], drink: str, number: int | None = None) -> None:
        """Takes several.

        Args:
            pair: a number and its name
            drink: what to drink (choices: ["tea", " coffee"])
            number: one of them (Choices: [1, 2])
        """

    for function in (plain, nested, chosen, several, boom, nap):
        expected = get_json_schema(function)
        expected["function"].pop("return", None)
        # transformers takes an enum's values from "(choices: ...)" in the text, and the type from
        # the hint
        if function is chosen:
            kind = expected["function"]["parameters"]["properties"]["kind"]
            assert kind["enum"] == ["a", "b"]
        assert make_tool_schema(function) == expected

    def untyped(a):
        """Does it.

        Args:
            a: what
        """

    def undescribed(a: int):
        """Does it."""

    def silent():
        pass

    def unknown(a: "Missing"):  # noqa: F821
        """Does it.

        Args:
            a: what
        """

    def listed(a: [int, str]):
        """Does it.

        Args:
            a: what
        """

    for function, text in (
        (unknown, "the type hints of the tool unknown cannot be evaluated .NameError.*'Missing'"),
        (listed, "the tool listed has an argument of type .*, which JSON does not have"),
        (untyped, "has no type hint"),
        (undescribed, "has no line under"),
        (silent, "no docstring"),
    ):
        with pytest.raises(UserError, match=text):
            make_tool_schema(function)


class Adder:
    """Adds a number that it keeps."""

    def __init__(self, kept: int):
        self.kept = kept

    def __call__(self, number: int) -> int:
        """Adds.

        Args:
            number: the number
        """
        return self.kept + number


class Clock:
    """Tells the time."""

    def __call__(self) -> str:
        return "noon"


def test_callable_objects_and_partial_functions_are_tools():
    add = tool(Adder(3))
    add_four = tool(partial(Adder.__call__, Adder(4)))
    for made, name in ((add, "Adder"), (add_four, "__call__")):
        expected = {"number": {"type": "integer", "description": "the number"}}
        assert made.name == name and made.schema["function"]["description"] == "Adds."
        assert made.schema["function"]["parameters"]["properties"] == expected
    assert tool(Clock()).schema["function"]["description"] == "Tells the time."
    request = {"function": {"name": "Adder", "arguments": {"number": 4}}}
    (answer,) = run_calls({"tool_calls": [request]}, {"Adder": add})
    assert (answer.answer, answer.error) == ("7", None)


class SameNames(Environment):
    def start(self):
        self.tools = tuple(partial(Adder.__call__, Adder(number)) for number in (1, 2))
        return "go"


def test_two_tools_of_the_same_name_are_named(play):
    result = play(SameNames, lambda *_: "a")
    assert not result.groups and "two tools are named '__call__'" in result.errors[0]


def test_a_tool_that_captures_variables_may_change_them():
    kept = []

    def keep(word: str) -> str:
        """Keep a word.

        Args:
            word: to keep
        """
        kept.append(word)
        return "kept"

    calls = [{"function": {"name": "keep", "arguments": {"word": "a"}}}]
    (made,) = run_calls({"tool_calls": calls}, {"keep": tool(keep)}, forks=True)
    assert (made.answer, made.error, kept) == ("kept", None, ["a"])


def test_the_name_of_a_tool_is_the_one_that_the_model_reads():
    assert Tool(shout, name="cry").schema["function"]["name"] == "cry"
    assert tool(shout).schema["function"]["name"] == "shout"


def test_a_long_result_of_a_forked_call_arrives():
    calls = [{"function": {"name": "shout", "arguments": {"times": 2 << 20}}}]
    tools = {"shout": tool(shout, characters=3 << 20)}
    (made,) = run_calls({"tool_calls": calls}, tools, forks=True)
    assert made.error is None and made.answer == "A" * (2 << 20)


def test_notes_are_kept_by_their_keys():
    put, get, remove, keys = (item.function for item in KeyValueStore().tools)
    put("b", "1"), put("a", "2"), put("b", "3")
    assert keys() == "a, b" and get("b") == "3"
    remove("a")
    with pytest.raises(ValueError, match="nothing is kept under 'a': the keys are b"):
        get("a")
    with pytest.raises(ValueError, match="at most 100000 characters"):
        put("c", "x" * 100_000)
    assert keys() == "b"


def test_concurrent_calls_lose_no_note():
    store, interval = KeyValueStore(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda i: [store.put(f"{i}/{j}", "") for j in range(50)], range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert len(store.values) == 400


# ------------------------------------------------------------------------------------------- search


@pytest.fixture
def indexes(monkeypatch):
    """Replace bm25s by a library that takes a while, and finds every document. Return the indexed
    lists.
    """
    indexed = []

    class BM25:
        def index(self, documents, **_):
            time.sleep(0.2)
            indexed.append(documents)

        def retrieve(self, words, k, **_):
            return [range(k)], [[1.0] * k]

    library = SimpleNamespace(BM25=BM25, tokenize=lambda documents, **_: documents)
    monkeypatch.setitem(sys.modules, "bm25s", library)
    return indexed


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_corpus_has_a_document_a_line(indexes, tmp_path, suffix):
    """Separators that only str.splitlines knows are parts of a document."""
    documents = ["one\u2028two\x85three\x0cfour", "five"]
    corpus, is_json = tmp_path / f"corpus{suffix}", suffix == ".jsonl"
    lines = [json.dumps(text, ensure_ascii=False) if is_json else text for text in documents]
    corpus.write_text("\r\n".join(lines) + "\n", encoding="utf-8-sig", newline="")
    made = resolve_environment("search", corpus=str(corpus), grader="exact_match").make()
    made.search("one")
    assert indexes == [documents]


def test_concurrent_groups_build_an_index_once(indexes, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("one\ntwo\n")
    spec = resolve_environment("search", corpus=str(corpus), grader="exact_match")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: spec.make().share(), range(4)))
    assert indexes == [["one", "two"]]


# ---------------------------------------------------------------------------------- names, settings


def test_a_setting_that_no_shell_can_split_is_a_problem():
    with pytest.raises(SettingsError, match="--environment.digits '1: No closing quotation"):
        parse_environment("calculator", [("digits", "'1")])


def test_inherited_settings_have_their_types(write):
    file = write("""
        from rl.envs.guess_number_env import GuessNumber
        class Mine(GuessNumber):
            pass
    """)
    assert parse_environment(f"{file}:Mine", [("guesses", "5")]).settings == {"guesses": 5}


def test_settings_beside_any_others_have_their_types(write):
    file = write("""
        from collections.abc import Callable
        from rl.envs import Environment
        class Open(Environment):
            def __init__(self, high: int = 5, rate=0.5, **others): self.high = high
        class Odd(Environment):
            def __init__(self, judge: Callable = None, **others): pass
    """)
    spec = parse_environment(f"{file}:Open", [("high", "7"), ("rate", "2"), ("other", "3")])
    assert spec.settings == {"high": 7, "rate": 2.0, "other": "3"}
    assert resolve_environment(f"{file}:Open", high=7, other=3).settings == {"high": 7, "other": 3}
    assert parse_environment(f"{file}:Odd", [("judge", "7")]).settings == {"judge": "7"}


def test_environments_are_found_by_name_and_address(write):
    # the others need a package, rows or a server
    single = {"calculator", "guess_number", "tic_tac_toe"}
    assert single < set(list_environments())
    for name in single:
        assert resolve_environment(name).make() is not None
    file = write("""
        from rl.envs import Environment
        class Mine(Environment):
            def __init__(self, size: int, *, on: bool = False): ...
    """)
    (file.parent / "raises_at_import.py").write_text("raise RuntimeError('broken')")
    spec = parse_environment(f"{file}:Mine", [("size", "3"), ("on", "True")])
    assert spec.settings == {"size": 3, "on": True} and spec.address == f"{file}:Mine"
    spec = parse_environment(f"{file}:Mine", [("size", "3"), ("no_on", "True")])
    assert spec.settings["on"] is False
    with pytest.raises(SettingsError, match="--environment.no_size: size is no switch$"):
        parse_environment(f"{file}:Mine", [("no_size", "True")])
    with pytest.raises(UserError) as error:
        parse_environment(f"{file}:Mine", [("sizes", "x"), ("on", "maybe")])
    text = str(error.value)
    assert "did you mean --environment.size?" in text and "size is required" in text
    assert "--environment.on: maybe is not" in text
    for name, text in (
        ("calculater", "did you mean 'calculator'"),
        ("debate", "examples/games/debate.py:DebateEnv"),
        (f"{file}:Mime", "'Mime' is not an environment in it; did you mean 'Mine'"),
        (f"{file.parent}/none.py:Mine", "does not exist"),
        (":Mine", "importing '' failed"),
        ("raises_at_import:Mine", r"importing 'raises_at_import' failed \(RuntimeError: broken\)"),
    ):
        with pytest.raises(UserError, match=text):
            resolve_environment(name)
    with pytest.raises(UserError, match="called 'calculator' already"):
        register_environment("calculator")(GuessEnvironment)
    register_environment("guess for this test")(GuessEnvironment)
    assert resolve_environment("guess for this test", high=7).make().high == 7
    with pytest.raises(UserError, match="did you mean --environment.high"):
        resolve_environment(GuessEnvironment, hihg=7)


def test_addresses_from_before_the_adapters_moved_are_resolved():
    """An address in an older run's config.json still resolves to its class. A script that imports
    from the old module gets an error that names the new module.
    """
    for module in ("rl.integrations.trl_env", "rl.envs.trl_env"):
        assert resolve_environment(f"{module}:MultiTrlEnvironment").cls is MultiTrlEnvironment
    with pytest.raises(
        UserError, match="'McpTool' is not an environment in it; did you mean 'McpTools'"
    ):
        resolve_environment("rl.envs.wrappers.mcp_tools:McpTool")
    with pytest.raises(ImportError, match=r"from rl\.integrations import McpServer"):
        importlib.import_module("rl.envs.wrappers.mcp_tools")


# ----------------------------------------------------------------------------------------- failures


def test_a_module_that_runs_a_program_at_its_import_sees_its_exit_code(play, resolve, write):
    file = write("""
        import subprocess, sys
        from rl.envs import Environment, TurnResult
        code = subprocess.run([sys.executable, "-c", "raise SystemExit(3)"]).returncode
        class Code(Environment):
            def start(self):
                return "go"
            def step(self, answer):
                return TurnResult(reward=float(code), done=True)
    """)
    result = play(resolve(f"{file}:Code"), lambda *_: "a")
    assert result.groups[0].get_total_rewards() == [3.0]


BAD = textwrap.dedent('''
    import os, time, sys
    from rl.envs import Environment, TurnResult, tool

    def dies() -> str:
        """Dies."""
        os._exit(3)

    def prints() -> str:
        """Prints 100 MB."""
        for _ in range(100):
            sys.stdout.write("x" * 1_000_000)
            os.write(1, b"y" * 100)
        return "printed"

    class Bad(Environment):
        """Member 1 does what its row says, the others are well."""
        tools = (dies, prints)
        how = property(lambda self: self.row["how"])
        when = property(lambda self: self.row["when"])
        def misbehave(self):
            if self.how == "raise": raise KeyError("mine")
            if self.how == "exit": sys.exit(0)
            if self.how == "hang": time.sleep(600)
            if self.how == "spin":
                while True: pass
            if self.how == "die": os._exit(0)
            if self.how == "kill": os.kill(os.getpid(), 9)
            if self.how == "print":
                for _ in range(100): sys.stdout.write("x" * 1_000_000)
        def start(self):
            if self.member == 1 and self.when == "start": self.misbehave()
            return "go"
        def step(self, answer):
            if self.member == 1 and self.when == "step": self.misbehave()
            return TurnResult(reward=float(self.member), done=True)
        def close(self):
            if self.member == 1 and self.when == "close": self.misbehave()
''')

# what member 1 does, and when -> what its error says, or None if its episode is not lost
IN_A_THREAD = {
    ("raise", "step"): "raised KeyError: 'mine'",
    ("raise", "start"): "raised KeyError: 'mine'",
    ("raise", "close"): None,
    ("exit", "step"): "raised SystemExit",
    ("hang", "step"): "not done within its 2 s",
    ("hang", "start"): "not done within its 2 s",
    ("hang", "close"): None,
}
IN_A_PROCESS = IN_A_THREAD | {
    ("spin", "step"): "not done within its 2 s",
    ("die", "step"): "died",
    ("die", "start"): "died",
    ("die", "close"): None,
    ("kill", "step"): "died",
    ("print", "step"): None,
}


@pytest.fixture(scope="module")
def bad_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("bad") / "bad.py"
    file.write_text(BAD)
    return file


@pytest.fixture(scope="module")
def bad_process(bad_file):
    spec = isolate_environment(parse_environment(f"{bad_file}:Bad", []))
    yield spec
    spec.fork_server.close()


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_what_breaks_costs_its_own_episode(play, bad_file, bad_process, isolation):
    """Episode 1 of three is lost and named; the others keep their rewards."""
    begin = time.monotonic()
    in_thread = isolation == "thread"
    spec = parse_environment(f"{bad_file}:Bad", []) if in_thread else bad_process
    cases = IN_A_THREAD if in_thread else IN_A_PROCESS
    rows = [{"how": how, "when": when} for how, when in cases]
    result = play(spec, lambda *_: "a", members=3, rows=rows, limits=EpisodeLimits(seconds=2))
    assert len(result.errors) == sum(says is not None for says in cases.values()), result.errors
    for row, (case, group) in enumerate(zip(cases, result.groups, strict=True)):
        says = cases[case]
        assert group.get_total_rewards() == ([0.0, 2.0] if says else [0.0, 1.0, 2.0]), case
        if says:
            (error,) = [text for text in result.errors if f"episode 1 of row {row}," in text]
            assert says in error and len(error) < 2000, case
    assert time.monotonic() - begin < 60


def test_a_close_that_hangs_leaves_no_process(play, bad_process, monkeypatch):
    monkeypatch.setattr("rl.envs.fork_server.CLOSE_SECONDS", 0.5)
    assert not play(bad_process, lambda *_: "a", rows=[{"how": "", "when": ""}]).errors
    others = set(find_descendants(os.getpid()))
    rows = [{"how": "hang", "when": "close"}] * 3
    assert not play(bad_process, lambda *_: "a", members=2, rows=rows).errors
    deadline = time.monotonic() + 20
    while set(find_descendants(os.getpid())) - others and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not set(find_descendants(os.getpid())) - others


def test_a_tool_that_dies_costs_its_call(play, bad_process):
    """A plain function runs in a separate process there, and its printed output is discarded."""
    text, rows = call("dies") + call("prints") + call("dies"), [{"how": "", "when": ""}]
    result = play(bad_process, lambda _, turn, *rest: "a" if turn else text, members=2, rows=rows)
    (group,) = result.groups
    assert not result.errors and group.get_total_rewards() == [0.0, 1.0]
    for episode in group.trajectories_G:
        messages = [message["content"] for message in episode.transitions[-1].logs["new_messages"]]
        assert messages == ["Error: dies died", "printed", "Error: dies died"]


def test_the_process_gone_it_is_begun_again(play, resolve, bad_file):
    spec, rows = resolve(f"{bad_file}:Bad"), [{"how": "", "when": ""}]
    others = set(find_descendants(os.getpid()))
    assert not play(spec, lambda *_: "a", rows=rows).errors
    while remaining := set(find_descendants(os.getpid())) - others:
        for pid in remaining:
            kill_process(pid)
    assert not play(spec, lambda *_: "a", rows=rows).errors


# ------------------------------------------------------------------- the same, resolved in a script

COUNTING = textwrap.dedent('''
    import os
    from rl.envs import Environment, TurnResult

    EPISODES = []

    class Counting(Environment):
        """Ends with the number of episodes that its module has seen."""
        def __init__(self, judge=None):
            self.judge = judge
        def start(self):
            EPISODES.append(self.seed)
            return "go"
        def step(self, answer):
            return TurnResult(reward=float(len(EPISODES)), done=True, metrics={"elsewhere": float(os.getpid() != self.row["pid"])})
''')


@pytest.mark.parametrize("form", ["file", "module", "thread", "class"])
def test_a_modules_state_is_that_of_one_episode_unless_threads_are_asked_for(
    play, resolve, write, monkeypatch, form
):
    file = write(COUNTING, f"counting_{form}")
    monkeypatch.syspath_prepend(str(file.parent))
    spec = {
        "file": lambda: resolve(f"{file}:Counting"),
        "module": lambda: resolve(f"{file.stem}:Counting"),
        "thread": lambda: resolve(f"{file}:Counting", environment_isolation="thread"),
        "class": lambda: resolve(importlib.import_module(file.stem).Counting),
    }[form]()
    result = play(spec, lambda *_: "a", members=2, rows=[{"pid": os.getpid()}] * 2)
    rewards = sorted(reward for group in result.groups for reward in group.get_total_rewards())
    apart = form in ("file", "module")
    assert not result.errors and (rewards == [1.0] * 4) == apart
    assert (spec.fork_server is not None) == apart
    episodes = [item for group in result.groups for item in group.trajectories_G]
    assert {item.transitions[0].metrics["elsewhere"] for item in episodes} == {float(apart)}


def test_a_setting_that_no_other_process_can_read_is_an_error_with_a_remedy(resolve, write):
    name, judge = f"{write(COUNTING)}:Counting", lambda text: 1.0
    remedy = r"'judge'.*another process.*environment_isolation='thread'"
    with pytest.raises(ValueError, match=remedy):
        resolve(name, judge=judge)
    made = resolve(name, judge=judge, environment_isolation="thread").make()
    assert made.judge("") == 1.0
    expected = r"environment_isolation is one of auto, thread, process.*'fork'"
    with pytest.raises(ValueError, match=expected):
        resolve(name, environment_isolation="fork")
    once = resolve(name)
    assert resolve_environment(once) is once
    assert resolve_environment(once, environment_isolation="thread").fork_server is None
    with pytest.raises(ValueError, match="class of this script"):
        resolve(GuessEnvironment, environment_isolation="process")


@pytest.mark.parametrize(("line", "reason"), [
    ("time.sleep(1000)", "was not ready after 2 s"),
    ("[os.write(fd, b'x' * 99) for fd in fds]", "sent an invalid reply: it begins with b'xxx"),
    ("os._exit(3)", "died: exit code 3"),
])  # fmt: skip
def test_an_environment_whose_process_does_not_start_is_described(
    monkeypatch, resolve, write, line, reason
):
    if "time.sleep" in line:
        monkeypatch.setattr("rl.envs.fork_server._START_SECONDS", 2.0)
    file = write(f"""
        import os, stat, time
        from rl.envs import Environment
        class Unready(Environment):
            pass
        if os.getpid() != {os.getpid()}:
            fds = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
            fds = [fd for fd in fds if os.path.exists(f"/proc/self/fd/{{fd}}")]
            fds = [fd for fd in fds if stat.S_ISSOCK(os.fstat(fd).st_mode)]
            {line}
    """)
    spec = resolve(f"{file}:Unready")
    with pytest.raises(UserError) as caught:
        spec.fork_server.begin()
    assert f"process of environment {spec.name} {reason}" in str(caught.value)


def test_what_a_group_shares_is_made_once_in_its_own_process(play, resolve, write):
    file = write("""
        import os
        from rl.envs import Environment, TurnResult
        class Sharing(Environment):
            def share(self):
                return {"by": os.getpid(), "number": self.rng.random()}
            def start(self):
                return "q"
            def step(self, answer):
                metrics = {"by": self.shared["by"], "mine": os.getpid(), "above": os.getppid()}
                return TurnResult(reward=self.shared["number"], done=True, metrics=metrics)
    """)
    result = play(resolve(f"{file}:Sharing"), lambda *_: "a", members=3, rows=[{}, {}])
    assert not result.errors
    makers = set()
    for group in result.groups:
        metrics = [episode.transitions[0].metrics for episode in group.trajectories_G]
        (maker,) = {m["by"] for m in metrics}
        assert len({m["mine"] for m in metrics}) == 3 and {m["above"] for m in metrics} == {maker}
        assert len(set(group.get_total_rewards())) == 1
        makers.add(maker)
    assert len(makers) == 2


def test_the_processes_of_a_group_that_shares_are_closed(play, resolve, write, tmp_path):
    """They are forked from the group's process, which ends them with itself."""
    file = write("""
        import time
        from pathlib import Path
        from rl.envs import Environment, TurnResult
        class Closing(Environment):
            def __init__(self, folder: str):
                self.folder = folder
            def share(self):
                return 1
            def start(self):
                return "q"
            def step(self, answer):
                return TurnResult(reward=1.0, done=True)
            def close(self):
                time.sleep(0.3)
                Path(self.folder, str(self.member)).touch()
    """)
    folder = tmp_path / "closed"
    folder.mkdir()
    play(resolve(f"{file}:Closing", folder=str(folder)), lambda *_: "a", members=3)
    assert wait_until(lambda: len(list(folder.iterdir())) == 3, 10)


def test_episodes_after_an_async_share_have_loops_of_their_own(play, resolve, write):
    """A loop that forks shared would lose the wake-ups of its threads to other episodes."""
    file = write("""
        import asyncio
        from rl.envs import Environment, TurnResult
        async def wait():
            for _ in range(60):
                await asyncio.to_thread(sum, [1])
        class Waiting(Environment):
            async def share(self):
                await asyncio.sleep(0)
            async def start(self):
                await wait()
                return "q"
            async def step(self, answer):
                await wait()
                return TurnResult(reward=1.0, done=True)
    """)
    spec = resolve(f"{file}:Waiting")
    result = play(spec, lambda *_: "a", members=4, limits=EpisodeLimits(seconds=20))
    assert not result.errors and result.groups[0].get_total_rewards() == [1.0] * 4


def test_results_of_a_process_are_those_of_a_thread(play, resolve, write):
    file = write("""
        from pathlib import Path
        import numpy as np
        from PIL import Image
        from rl.envs import Environment, TurnResult
        class Keys(Environment):
            def start(self):
                return "q"
            def step(self, answer):
                logs = {np.int64(3): {(1, 2): [1]}, "at": Path("a")}
                return TurnResult(done=True, metrics={np.int64(4): 1.0}, logs=logs)
        class Picture(Environment):
            def start(self):
                image = {"type": "image", "image": Image.new("RGB", (8, 8), "red")}
                return [{"role": "user", "content": [image]}]
    """)
    for isolation in ("thread", "process"):
        spec = resolve(f"{file}:Keys", environment_isolation=isolation)
        result = play(spec, lambda *_: "a")
        (turn,) = result.groups[0].trajectories_G[0].transitions
        seen = (turn.metrics["4"], turn.logs["3"], turn.logs["at"])
        assert not result.errors and seen == (1.0, {"(1, 2)": [1]}, "a")
    picture = resolve(f"{file}:Picture")
    picture.fork_server.begin()
    (message,) = picture.fork_server.fork().ask("it", "start", task=EpisodeTask({}, 0)).first_turn
    image = open_image(make_image_chunk(message["content"][0]["image"]))
    assert image.size == (8, 8) and image.getpixel((0, 0)) == (255, 0, 0)


class Ended(Environment):
    def start(self):
        return TurnResult(done=True)


class Silent(Environment):
    def start(self):
        return []

    def step(self, answer):
        return TurnResult(done=True)


def test_what_start_cannot_return_is_named(play):
    for environment, says in ((Ended, "ended its episode in start()"), (Silent, "no messages")):
        (error,) = play(environment, lambda *_: "a").errors
        assert says in error
    assert not play(Silent, lambda *_: "a", system_prompt="Be brief.").errors


class RuleFirst(Game):
    names = ("rule", "policy")

    def __init__(self):
        super().__init__()
        self.assign(0, "first", {"first": lambda match: "x"})

    def open(self):
        self.observe(1, "q")

    def move(self, text):
        if self.turn == 0:
            self.reward(1, 0.5)
            self.turn = 1
        else:
            self.end({1: 1.0})


def test_a_game_pays_the_rewards_of_moves_before_the_first_answer(play):
    (group,) = play(RuleFirst, lambda *_: "a").groups
    assert group.get_total_rewards() == [1.5]


class WithSystem(Environment):
    def start(self):
        return [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]

    def step(self, answer):
        return TurnResult(done=True)


def test_an_environments_own_system_message_replaces_the_system_prompt(play):
    result = play(WithSystem, lambda *_: "a", system_prompt="Be brief.")
    assert result.groups[0].trajectories_G[0].transitions[0].ob.length == len("sq")


def test_a_column_seed_that_is_no_number_is_an_ordinary_column():
    spec = resolve_environment(GuessEnvironment)
    seeds = [
        EnvironmentGroup(spec, Problem((), row, index=2), 1, None).seed
        for row in ({"seed": "blue"}, {"seed": None}, {}, {"seed": "7"})
    ]
    assert seeds == [derive_seed("environment", spec.seed_stream, 2)] * 3 + [7]


def asked_row(answer: str) -> dict:
    return {"messages": [{"role": "user", "content": "?"}], "answer": answer}


@pytest.mark.parametrize("name", ["calculator", "python"])
def test_a_grader_that_spins_for_ever_scores_0_and_the_next_episode_is_graded(
    play, monkeypatch, name
):
    """Python's regex matcher tries 2^40 ways in C and holds the interpreter, so a thread of this
    process could not be stopped.
    """
    endless = resolve_reward("format_compliance", patterns=["^(a+)+$"])
    monkeypatch.setattr("rl.envs.answer_score.resolve_reward", lambda name: endless)
    monkeypatch.setattr("rl.envs.answer_score.Scorer", partial(Scorer, timeout=1.0, workers=1))
    rows = [asked_row(""), asked_row("")]
    answers = iter(["a" * 40 + "b", "aaa"])
    spec = resolve_environment(name, grader=f"spins in {name}")
    result = play(spec, lambda *_: next(answers), rows=rows)
    assert not result.errors
    assert [group.get_total_rewards() for group in result.groups] == [[0.0], [1.0]]
    last = [group.trajectories_G[0].transitions[-1].metrics for group in result.groups]
    assert (last[0]["gave_up"], last[0]["correct"], last[1]["correct"]) == (1.0, 0.0, 1.0)
    assert "gave_up" not in last[1]


@pytest.mark.parametrize("options", ["thread", "process"])
def test_answers_of_a_built_in_environment_are_graded_wherever_it_runs(play, resolve, options):
    spec = resolve("calculator", environment_isolation=options, grader="math_correctness")
    answers = iter([r"\boxed{14/2}", r"\boxed{9^{9^{9^9}}}", r"\boxed{"])
    result = play(spec, lambda *_: next(answers), rows=[asked_row("7")] * 3)
    assert not result.errors
    assert [group.get_total_rewards() for group in result.groups] == [[1.0], [0.0], [0.0]]


@pytest.mark.parametrize(
    "answer, is_right",
    [("7", True), ("It is 7.", True), ("14 - 7 = 7.0", True), ("1,4; 7", True),
     ("2.7", False), ("7.5", False), ("70", False), ("-7", False)],
)  # fmt: skip
def test_a_calculators_answer_is_its_last_number(play, resolve, answer, is_right, monkeypatch):
    question = staticmethod(lambda: ("14-7=", "7"))
    monkeypatch.setattr("rl.envs.calculator_env.CalculatorEnv.make_question", question)
    result = play(resolve("calculator"), lambda *_: answer)
    assert result.groups[0].get_total_rewards() == [float(is_right)]


def test_a_grader_of_ones_own_reads_its_variables_and_what_it_raises_is_named(
    play, write, monkeypatch
):
    monkeypatch.setenv("MY_SERVICE_KEY", "k")
    file = write("""
        import os
        def mine(prompt, response, meta):
            return {"k": 0.5}[response[:1] and os.environ["MY_SERVICE_KEY"] + response[1:]]
    """)
    answers = iter(["a", "bad"])
    spec = resolve_environment("calculator", grader=f"{file}:mine")
    result = play(spec, lambda *_: next(answers), rows=[asked_row("7")] * 2)
    assert [group.get_total_rewards() for group in result.groups] == [[0.5]]
    assert len(result.errors) == 1 and "KeyError" in result.errors[0]
