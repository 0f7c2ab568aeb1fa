"""Test rewards of batches, coroutines and whole episodes: values computed by hand, and the effect
of a single bad answer.
"""

import asyncio
import copy
import json
import logging
import math
import pickle
import sys
import time

import numpy as np
import pytest
from whole_runs import train

from rl.envs import ProblemGroupBuilder
from rl.errors import UserError
from rl.judges import add_episode_rewards, make_episode
from rl.models import load_model
from rl.renderers import get_renderer
from rl.rewards import (
    Episode,
    EpisodeTurn,
    SampleScore,
    Score,
    Scorer,
    hash_beginning,
    register_reward,
    resolve_reward,
)
from rl.rollout import RolloutBatch, Trajectory, TrajectoryGroup, Transition
from rl.types import ModelInput, Problem, SampledSequence

RIGHT = [("p", "x" * n, {"n": n}) for n in range(12)]

REWARDS = """
import asyncio, os, sys, time
from rl.rewards import register_reward, RewardResult

@register_reward("lengths", batched=True)
def lengths(prompts, responses, metas, factor=1.0):
    if any("raise" in r for r in responses):
        raise ValueError("a bad one among %d" % len(responses))
    if any("die" in r for r in responses):
        os._exit(3)
    if any("hang" in r for r in responses):
        time.sleep(1000)
    if any("print" in r for r in responses):
        print("x" * 30_000_000)
    found = [RewardResult(factor * len(r), {"calls": float(len(responses)), "n": meta["n"]}) for r, meta in zip(responses, metas)]
    for i, r in enumerate(responses):
        if "nonsense" in r: found[i] = "seven"
        if "nan" in r: found[i] = float("nan")
    return [one for one, r in zip(found, responses) if "drop" not in r]

async def waits(prompt, response, meta, factor=1.0):
    if "raise" in response: raise KeyError("x")
    if "exit" in response: sys.exit(3)
    if "block" in response: time.sleep(1000)
    await asyncio.sleep(1000 if "hang" in response else 0.3)
    if "nonsense" in response: return [1]
    return factor * len(response)

LOCK = asyncio.Semaphore(1)  # bound to the event loop of its first contention

async def waits_in_turn(prompt, response, meta):
    async with LOCK:
        await asyncio.sleep(0.01)
    return 1.0

def slow(prompt, response, meta):
    time.sleep(1000 if "hang" in response else 0.3)
    return 1.0

@register_reward("size_of_call", batched=True)
def size_of_call(prompts, responses, metas):
    return [len(responses)] * len(responses)

@register_reward("turns", episode=True)
def turns(episode, meta, factor=1.0):
    return RewardResult(factor * len(episode.turns), {"tools": float(sum(m["role"] == "tool" for m in episode.messages))})

@register_reward("all_turns", episode=True, batched=True)
def all_turns(episodes, metas):
    return [len(e.turns) + len(episodes) / 100 for e in episodes]
"""


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "kinds_of_rewards.py"
    path.write_text(REWARDS)
    return str(path)


def score_items(reward, items, timeout=30.0, workers=1):
    with Scorer(reward, timeout=timeout, workers=workers) as scorer:
        return scorer.score_many(items), scorer


def test_a_batched_reward_is_called_once_with_all_that_was_submitted(reward_file):
    result, scorer = score_items(resolve_reward(f"{reward_file}:lengths", factor=2.0), RIGHT)
    assert [score.reward for score in result] == [2.0 * n for n in range(12)]
    assert [score.metrics for score in result] == [
        {"calls": 12.0, "n": float(n)} for n in range(12)
    ]
    assert scorer.place == "process" and scorer.counts["calls"] == 12
    assert set(scorer.take_seconds()) == {"lengths"} and scorer.take_seconds() == {}


@pytest.mark.parametrize(("kind", "says"), [
    ("raise", "a bad one among 1"),
    ("die", "exit code 3"),
    ("nonsense", "'seven'"),
    ("nan", "nan"),
    ("drop", "0 rewards for 1"),
    ("print", None),
])  # fmt: skip
def test_one_bad_answer_of_a_batch_costs_itself_alone(reward_file, kind, says, caplog):
    caplog.set_level(logging.ERROR)
    items = [*RIGHT[:5], ("the bad one", kind, {"n": 0}), *RIGHT[5:]]
    result, scorer = score_items(f"{reward_file}:lengths", items)
    bad = result.pop(5)
    assert [score.reward for score in result] == [float(n) for n in range(12)]
    if says is None:
        assert bad.reward == len("print")
        return
    assert bad.reward is None and "the bad one" in bad.error and says in bad.error
    assert sum(scorer.counts[name] for name in ("errors", "timeouts", "nan", "deaths")) == 1


@pytest.mark.slow
def test_an_answer_on_which_a_batch_hangs_costs_itself_alone(reward_file):
    items = [*RIGHT[:2], ("p", "hang", {"n": 0}), RIGHT[3]]
    result, scorer = score_items(f"{reward_file}:lengths", items, timeout=1.0, workers=2)
    assert [score.reward for score in result] == [0.0, 1.0, None, 3.0]
    assert scorer.counts["timeouts"] == 1 and "did not end within 1 s" in result[2].error


@pytest.mark.slow
def test_each_answer_of_a_sum_has_its_limit_and_a_batched_part_sees_all(reward_file, monkeypatch):
    monkeypatch.setattr("rl.rewards.reward_scorer._CANCEL_GRACE_SECONDS", 0.5)
    weights = {f"{reward_file}:slow": 1.0, f"{reward_file}:size_of_call": 1.0}
    both = resolve_reward("composite", weights=weights)
    # 6 answers take 1.8 s; a reply may take 0.5 s and the grace of 0.5 s
    items = [("p", "x", None)] * 6
    result, scorer = score_items(both, items, timeout=0.5)
    assert [score.reward for score in result] == [7.0] * 6
    assert scorer.counts["timeouts"] == scorer.counts["deaths"] == 0
    result, scorer = score_items(both, [*items[:2], ("p", "hang", None), *items[:1]], timeout=0.5)
    assert [score.failure for score in result] == [None, None, "timeout", None]
    assert [score.reward for score in result] == [5.0, 5.0, None, 2.0]


def test_coroutines_beyond_those_that_run_at_a_time_have_their_limits(monkeypatch):
    monkeypatch.setattr("rl.rewards.reward_calls._MAX_CONCURRENT", 2)
    monkeypatch.setattr("rl.rewards.reward_scorer._CANCEL_GRACE_SECONDS", 0.4)
    calls = []

    async def waits(prompt, response, meta):
        calls.append(response)
        await asyncio.sleep(0.4)
        return 1.0

    # 1.6 s; a reply may take 0.8 s and the grace of 0.4 s
    result, _ = score_items(waits, [("p", "x", None)] * 8, timeout=0.8)
    assert [score.reward for score in result] == [1.0] * 8 == [1.0] * len(calls)


def test_coroutines_wait_side_by_side_each_within_its_limit(reward_file):
    items = [(f"p{n}", "x" * n, None) for n in range(40)]
    for place, text in [(3, "raise"), (7, "hang"), (11, "nonsense"), (12, "exit")]:
        items[place] = (f"p{place}", text, None)
    with Scorer(f"{reward_file}:waits", timeout=2.0) as scorer:
        begin = time.monotonic()
        result = scorer.score_many(items)
        # sequentially they would take 37 * 0.3 s = 11 s and more
        assert time.monotonic() - begin < 9
    failures = {i: score.failure for i, score in enumerate(result) if score.failure}
    assert failures == {3: "error", 7: "timeout", 11: "error", 12: "error"}
    assert "KeyError" in result[3].error and "did not end within 2 s" in result[7].error
    assert "[1]" in result[11].error
    assert all(score.reward == n for n, score in enumerate(result) if n not in failures)


def test_a_coroutine_of_the_script_itself_runs_in_a_thread_and_by_itself():
    async def mean(prompt, response, meta=None):
        await asyncio.sleep(0.01)
        return len(response) / 2

    result, scorer = score_items(mean, [("p", "four", None), ("p", "ab", None)])
    assert scorer.place == "thread" and [score.reward for score in result] == [2.0, 1.0]
    assert resolve_reward(mean)("p", "four") == 2.0

    async def inside():
        return resolve_reward(mean)("p", "four")

    assert asyncio.run(inside()) == 2.0


def test_coroutines_of_later_calls_share_the_event_loop_of_the_first(reward_file):
    reward = resolve_reward(f"{reward_file}:waits_in_turn")
    items = [("p", "x", None)] * 3

    async def inside():
        return [*reward.iter_results(items)]

    for results in (*([*reward.iter_results(items)] for _ in range(2)), asyncio.run(inside())):
        assert [getattr(result, "reward", result) for result in results] == [1.0] * 3


@pytest.mark.parametrize("name", ["lengths", "waits", "all_turns"])
def test_a_call_without_items_has_no_results(reward_file, name):
    assert [*resolve_reward(f"{reward_file}:{name}").iter_results([])] == []


EPISODE = Episode(
    [
        {"role": "user", "content": "2*3?"},
        {"role": "assistant", "content": "calc"},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "6"},
    ],
    [EpisodeTurn("calc", 0.25, 3), EpisodeTurn("6", 0.5, 1, "length")],
)


def test_a_reward_sees_the_whole_episode(reward_file):
    reward = resolve_reward(f"{reward_file}:turns", factor=3.0)
    assert reward.episode and not reward.batched
    with Scorer(reward) as scorer:
        pending = scorer.submit("2*3?", "6", {}, EPISODE)
        without = scorer.submit("2*3?", "6", {}).result()
        assert pending.result().reward == 6.0 and pending.result().metrics == {"tools": 1.0}
        assert "takes whole episodes" in without.error
    assert EPISODE.reward == 0.75
    with Scorer(f"{reward_file}:all_turns") as scorer:
        assert [
            p.result().reward for p in [scorer.submit("p", "6", None, EPISODE) for _ in range(5)]
        ] == [2.05] * 5


def test_a_sum_of_all_kinds_at_once(reward_file):
    weights = {
        "exact_match": 1.0,
        f"{reward_file}:lengths": 0.5,
        f"{reward_file}:waits": 0.1,
        f"{reward_file}:turns": 10.0,
    }
    reward = resolve_reward("composite", weights=weights)
    assert reward.batched and reward.episode and not reward.bounded
    with Scorer(reward) as scorer:
        pending = [
            scorer.submit("p", response, {"answer": "6", "n": n}, EPISODE)
            for n, response in enumerate(("6", "raise", "12"), start=1)
        ]
        results = [each.result() for each in pending]
        seconds = scorer.take_seconds()
    assert [score.reward for score in results] == [
        pytest.approx(1 + 0.5 + 0.1 + 20), None, pytest.approx(0 + 1 + 0.2 + 20),
    ]  # fmt: skip
    assert results[0].metrics.pop("calls") > 0
    assert results[0].metrics == {
        "exact_match": 1.0, "correct": 1.0, "lengths": 1.0, "n": 1.0, "waits": 1.0, "turns": 2.0,
        "tools": 1.0,
    }  # fmt: skip
    assert set(seconds) == {"exact_match", "lengths", "waits", "turns"}
    assert seconds["waits"] > 0.15 > seconds["exact_match"] >= 0


def test_each_of_several_rewards_has_its_time_wherever_it_runs():
    def slow(prompt, response, meta=None):
        time.sleep(0.05)
        return 1.0

    for name, reward in (
        ("slow", slow),
        ("exact_match", resolve_reward("composite", weights={"exact_match": 1.0})),
        ("math_correctness", resolve_reward("composite", weights={"math_correctness": 1.0})),
    ):
        with Scorer(reward) as scorer:
            scores = scorer.score_many([("p", "1", {"answer": "1"})] * 3)
            assert not any(key.startswith("time/") for score in scores for key in score.metrics)
            ((timed, seconds),) = scorer.take_seconds().items()
            assert timed == name and seconds >= (0.15 if name == "slow" else 0.0)


# --------------------------------------------------------------------- rewards for style and length


def test_repetition_by_hand_and_against_brute_force():
    words = resolve_reward("repetition", n=2)
    assert words("", "a b a b a") == -0.5  # ab ba ab ba: two of four are repeats
    assert words("", "The the THE") == -0.5
    assert words("", "one") == 0.0 and words("", "") == 0.0
    assert resolve_reward("repetition", n=3, unit="characters", scale=2.0)("", "aaaa") == -1.0
    rng = np.random.default_rng(0)
    for n in (1, 2, 5):
        reward = resolve_reward("repetition", n=n)
        for _ in range(20):
            text = rng.integers(0, 3, rng.integers(0, 30)).astype(str).tolist()
            grams = [" ".join(text[i : i + n]) for i in range(len(text)) if i + n <= len(text)]
            again = sum(gram in grams[:i] for i, gram in enumerate(grams))
            assert reward("", " ".join(text)) == pytest.approx(
                -again / len(grams) if grams else 0.0
            )


def test_length_by_correctness_is_the_papers_curve():
    """CosFn(t, T, a, b) = a + (b - a) (1 + cos(t pi / T)) / 2, from b at length 0 to a at length T."""
    reward = resolve_reward("cosine_length", max_length=8)
    for words in range(8):
        text, cosine = " ".join(["46"] * words), (1 + math.cos(words * math.pi / 8)) / 2
        right = words == 1
        low, high = (1.0, 2.0) if right else (0.0, -10.0)
        assert reward("", text, {"answer": "46"}) == pytest.approx(low + (high - low) * cosine)
    assert reward("", "46 " * 8, {"answer": "46"}) == -10.0
    result = reward.evaluate("", "46", {"answer": "46"})
    assert result.metrics == {"exact_match": 1.0, "correct": 1.0, "length": 1.0}
    assert reward.bounded is True


def test_the_share_of_a_script():
    text = "Привет, мир! ok 42"  # 9 Cyrillic letters and 2 Latin letters
    assert resolve_reward("script", script="cyrillic")("", text) == pytest.approx(9 / 11)
    assert resolve_reward("script", script=["Latin", "cyrillic"])("", text) == 1.0
    assert resolve_reward("script", script="han")("", "答案 is 7") == pytest.approx(2 / 4)
    assert resolve_reward("script", script="latin")("", "42") == 1.0
    assert resolve_reward("script", script="latin", without=0.0)("", "42") == 0.0


@pytest.mark.parametrize(("spec", "settings", "message"), [
    ("repetition", {"n": 0}, "n is a whole number from 1"),
    ("length_penalty", {"target_length": "9"}, "target_length is a number .* got '9'"),
    ("composite", {"weights": {"exact_match": "x"}}, "each weight a number, got {'exact_match"),
    ("composite", {"weights": ["exact_match"]}, "each weight a number, got \\['exact_match"),
    ("repetition", {"scale": -1.0}, "scale is at least 0"),
    ("repetition", {"unit": "tokens"}, "'words' or 'characters'"),
    ("cosine_length", {"max_length": 0}, "max_length is at least 1"),
    ("cosine_length", {}, "needs the setting 'max_length'"),
    ("cosine_length", {"max_length": 5, "reward": "exact_mach"}, "did you mean 'exact_match'"),
    ("script", {"script": "latn"}, r"unknown script \['latn'\]"),
    ("script", {"script": []}, "latin, cyrillic"),
    ("language", {"language": "english"}, "a code of two letters"),
])  # fmt: skip
def test_a_bad_setting_says_what_is_expected(spec, settings, message):
    with pytest.raises(UserError, match=message):
        resolve_reward(spec, **settings)


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "py3langid", None)
    with pytest.raises(UserError, match=r'py3langid: pip install -e "\.\[language\]"'):
        Scorer(resolve_reward("language"))


def test_a_language_is_told_by_its_library():
    pytest.importorskip("py3langid")
    german = "Der schnelle braune Fuchs springt über den faulen Hund."
    english = "The quick brown fox jumps over the lazy dog."
    of_german, of_prompt = resolve_reward("language", language="de"), resolve_reward("language")
    assert of_german("", german) > 0.9 > 0.1 > of_german("", english)
    assert of_prompt(english, english) > 0.9 > 0.1 > of_prompt(english, german)


# --------------------------------------------------------------------- with an environment's reward


def trajectory(*turns):
    """Return a trajectory of turns (messages, answer, reward)."""
    made = []
    for messages, answer, reward in turns:
        new = [{"role": role, "content": text} for role, text in messages]
        sampled = SampledSequence([2, 3], [-1.0, -1.0])
        logs = {"new_messages": new, "response": answer}
        made.append(Transition(ModelInput.from_ints([1]), sampled, reward, False, {}, logs))
    return Trajectory(made)


def test_whole_episodes_earn_beside_what_their_environment_gave(reward_file):
    first = trajectory(
        ([("system", "s"), ("user", "2*3?")], "call", 0.25), ([("tool", "6")], "6", 0.5)
    )
    second = trajectory(([("user", "2*3?")], "6", 1.0))
    episode = make_episode(first, "sums")
    roles = [m["role"] for m in episode.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert [turn.response for turn in episode.turns] == ["call", "6"] and episode.reward == 0.75
    assert episode.tag == "sums"
    inputs = RolloutBatch(
        [TrajectoryGroup([first, second], [0.0, 2.0], [{}, {"x": 1.0}], "sums", 4)],
        ["lost"],
        {},
        0.0,
        0.0,
    )
    assert add_episode_rewards(inputs, None) is inputs
    with Scorer(resolve_reward(f"{reward_file}:turns", factor=10.0)) as scorer:
        result = add_episode_rewards(inputs, scorer)
    (group,) = result.groups
    assert group.get_total_rewards() == [0.75 + 20, 1 + 2 + 10] and result.errors == ["lost"]
    assert group.metrics_G == [
        {"tools": 1.0, "reward/episode": 20.0},
        {"x": 1.0, "tools": 0.0, "reward/episode": 10.0},
    ]


def test_an_episode_on_which_a_reward_fails_is_left_out_and_named():
    def picky(episode, meta):
        return 1.0 / (len(episode.turns) - 1)

    reward = register_reward("picky_of_this_test", episode=True)(picky)
    first = trajectory(([("user", "hi")], "a", 1.0))
    second = trajectory(([("user", "hi")], "a", 1.0), ([("user", "ho")], "b", 1.0))
    groups = [
        TrajectoryGroup([first, second], [0.0, 0.0], [{}, {}]),
        TrajectoryGroup([first], [0.0], [{}]),
    ]
    with Scorer(reward) as scorer:
        result = add_episode_rewards(RolloutBatch(groups, [], {}, 0.0, 0.0), scorer)
    assert [g.get_total_rewards() for g in result.groups] == [[3.0]]
    assert len(result.errors) == 2 and all("ZeroDivisionError" in error for error in result.errors)


def test_a_single_answer_is_an_episode_of_one_turn(reward_file):
    renderer = get_renderer("plain", load_model("tiny:ascii").tokenizer)
    with Scorer(f"{reward_file}:turns") as scorer:
        problem = Problem([{"role": "user", "content": "2*3="}], {"answer": "6"})
        (env,) = ProblemGroupBuilder(problem, 1, renderer, scorer).make_envs()
        result = env.step(SampledSequence(renderer.encode("6"), [-1.0], "stop"))
        assert result.reward.result().reward == 1.0


class DecodeCounter:
    """Count how often a renderer parses an answer."""

    def __init__(self, renderer):
        self.renderer, self.count = renderer, 0

    def __getattr__(self, name):
        return getattr(self.renderer, name)

    def parse_response(self, tokens):
        self.count += 1
        return self.renderer.parse_response(tokens)


READS = [
    json.dumps, lambda logs: json.dumps(logs, indent=1), repr, dict, list, copy.copy, copy.deepcopy,
    lambda logs: pickle.loads(pickle.dumps(logs)), lambda logs: dict(**logs),
    lambda logs: logs | {"own": 1}, lambda logs: {"own": 1} | logs, lambda logs: {**logs, "own": 1},
    lambda logs: {"own": 1, "response": "6"} == logs, lambda logs: [*logs.values()],
    lambda logs: logs.get("response"), lambda logs: logs["response"],
    lambda logs: logs.pop("response"), lambda logs: logs.update(own=1),
    lambda logs: logs.__setitem__("response", "own"),
]  # fmt: skip


def test_the_logs_of_an_answer_that_its_rank_scored_are_a_dict():
    """Its text is decoded when they are first read."""
    counter = DecodeCounter(get_renderer("plain", load_model("tiny:ascii").tokenizer))
    problem = Problem([{"role": "user", "content": "2*3="}], {"answer": "6"})
    scores = (None, SampleScore(True, hash_beginning("6"), Score(1.0)))
    with Scorer("math_correctness") as scorer:
        builder = ProblemGroupBuilder(problem, 1, counter, scorer)
        for i, read in enumerate(READS):
            expected, received = (
                builder.make_envs()[0]
                .step(SampledSequence(counter.encode("6"), [-1.0], "stop", score=score))
                .logs
                for score in scores
            )
            assert len(received) == len(expected) and counter.count == 2 * i + 1
            result = read(received)
            assert result == read(expected) and received == expected, i
            assert not isinstance(result, dict) or type(result) is dict
            assert counter.count == 2 * i + 2 and expected.get("response") in ("6", "own", None)


@pytest.mark.slow
def test_a_run_adds_an_episodes_reward_to_its_environments(reward_file, tmp_path):
    words = (
        "grpo --base-model tiny:ascii --environment calculator --environment.without_tool "
        "--steps 2 --batch-size 2 --group-size 2 --max-tokens 4 --eval-every 0 --save-every 0"
    )
    rows = train(f"{words} --reward {reward_file}:turns", tmp_path)
    rows = [row for row in rows if "progress/batch" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["env/all/reward/episode"] == 1.0
        assert row["reward/total"] == pytest.approx(1.0 + row["env/all/correct"])
    with pytest.raises(UserError, match="episode=True"):
        train(f"{words} --reward gsm8k", tmp_path / "other")
