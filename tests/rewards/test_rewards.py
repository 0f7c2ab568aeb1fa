"""Test the reward registry, and the built-in rewards against values computed by hand."""

import pickle
import warnings
from pathlib import Path

import pytest

from rl.errors import UserError
from rl.rewards import RewardResult, Scorer, register_reward, registered_rewards, resolve_reward
from rl.rewards.reward_registry import _REGISTRY


@pytest.fixture
def registry():
    """Yield the registry, and restore it after the test."""
    before = dict(_REGISTRY)
    yield _REGISTRY
    _REGISTRY.clear()
    _REGISTRY.update(before)


def shout(prompt, response, meta=None, *, factor=1.0):
    return factor * response.count("!")


def test_unknown_name_lists_what_exists_and_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'exact_match'") as error:
        resolve_reward("exact_mach")
    assert all(name in str(error.value) for name in registered_rewards())


def test_the_three_kinds_of_spec_give_the_same_reward(registry, tmp_path):
    register_reward("shout")(shout)
    path = tmp_path / "mine.py"
    path.write_text(
        "def shout(prompt, response, meta, factor=1.0):\n    return factor * response.count('!')\n"
    )
    for spec in ("shout", f"{__name__}:shout", f"{path}:shout", shout):
        assert resolve_reward(spec)("p", "hey!!") == 2.0
        assert resolve_reward(spec, factor=0.5)("p", "hey!!", {}) == 1.0


FILE_OF_REWARDS = """
from rl.rewards import register_reward, resolve_reward
@register_reward("file_size", batched=True)
def size(prompts, responses, metas): return [len(responses)] * len(responses)
@register_reward("file_turns", episode=True)
def turns(episode, meta): return len(episode.turns)
@register_reward("file_needs", needs=("json",))
def needs(prompt, response, meta): return 1.0
tuned = resolve_reward("gsm8k")
fraction = resolve_reward("code_tests", score="fraction")
batched, episode = resolve_reward("file_size"), resolve_reward("file_turns")
both = resolve_reward("composite", weights={"file_needs": 1.0, "file_size": 1.0})
"""


@pytest.mark.parametrize("as_file", [True, False])
def test_a_resolved_reward_of_a_file_or_module_keeps_all_that_it_is(
    registry, tmp_path, monkeypatch, as_file
):
    path = tmp_path / f"rewards_{as_file}.py".lower()
    path.write_text(FILE_OF_REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    where = str(path) if as_file else path.stem
    rewards = {
        name: pickle.loads(pickle.dumps(resolve_reward(f"{where}:{name}")))
        for name in ("tuned", "fraction", "batched", "episode", "both")
    }
    result = rewards["tuned"].evaluate("p", "\\boxed{4}", {"answer": "4"})
    assert result.metrics == resolve_reward("gsm8k").evaluate(
        "p", "\\boxed{4}", {"answer": "4"}
    ).metrics != {}  # fmt: skip
    assert rewards["tuned"].builtin and rewards["tuned"].short_name == "tuned"
    assert [name for name, reward in rewards.items() if reward.runs_programs] == ["fraction"]
    assert [name for name, reward in rewards.items() if reward.batched] == ["batched", "both"]
    assert [name for name, reward in rewards.items() if reward.episode] == ["episode"]
    assert rewards["both"].needs == ("json",) and len(list(rewards["both"].parts())) == 2
    with Scorer(f"{where}:batched", workers=1) as scorer:
        assert [s.reward for s in scorer.score_many([("", "x", None)] * 3)] == [3.0] * 3
    with pytest.raises(UserError, match="already resolved and takes no settings"):
        resolve_reward(f"{where}:tuned", x=1)


@pytest.mark.parametrize(("spec", "settings", "message"), [
    ("keyword_contains", {"keyword": ["a"]},
     "no setting 'keyword': it takes keywords, case_sensitive"),
    ("keyword_contains", {}, "needs the setting 'keywords'"),
    ("exact_match", {"x": 1}, "no setting 'x': it takes none"),
    ("keyword_contains", {"keywords": "abc"}, "list"),
    ("format_compliance", {"patterns": ["("]}, "not a regular expression"),
    ("format_compliance", {}, "nothing to check"),
    ("no_such_module_x:f", {}, "importing 'no_such_module_x' failed"),
    ("math:sqroot", {}, "did you mean 'sqrt'"),
    ("/nowhere/r.py:f", {}, "does not exist"),
    ("composite", {"weights": {"exact_mach": 1.0}}, "did you mean 'exact_match'"),
    (3, {}, "callable, got 3"),
])  # fmt: skip
def test_a_bad_spec_or_setting_says_what_is_expected(spec, settings, message):
    with pytest.raises(ValueError, match=message):
        resolve_reward(spec, **settings)


def test_a_reward_file_that_is_missing_or_broken_is_named_once(tmp_path, monkeypatch):
    broken = tmp_path / "my_reward.py"
    broken.write_text("raise SystemExit(3)")
    for _ in range(2):  # the half-loaded module is not kept
        with pytest.raises(ValueError, match=r"my_reward\.py failed to load: SystemExit: 3"):
            resolve_reward(f"{broken}:f")
    monkeypatch.syspath_prepend(tmp_path)
    for spec in ("my_reward:f", ".my_reward:f"):
        with pytest.raises(ValueError, match=f"importing '{spec[:-2]}' failed"):
            resolve_reward(spec)
    assert resolve_reward(max).name == "max"  # a function in C has no signature
    broken.write_text("x = 1\ndef f(:\n")
    with pytest.raises(
        ValueError, match=r"my_reward\.py failed to load: SyntaxError in line 2"
    ) as e:
        resolve_reward(f"{broken}:f")
    assert str(e.value).count("my_reward.py") == 1
    with pytest.raises(ValueError, match=r"does not exist; did you mean .*my_reward\.py\?"):
        resolve_reward(f"{tmp_path}/my_rewards.py:f")

    def refuse(folder):
        raise PermissionError(f"{folder} cannot be read")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ValueError, match=r"my_rewards\.py does not exist$"):
        resolve_reward(f"{tmp_path}/my_rewards.py:f")


def test_a_taken_name_needs_replace_and_a_built_in_gives_way_with_a_warning(registry):
    def first(prompt, response, meta=None):
        return 1.0

    def second(prompt, response, meta=None):
        return 2.0

    register_reward("mine")(first)
    register_reward("mine")(first)  # the same function again, as after a module reload
    with pytest.raises(ValueError, match="already registered by .*first"):
        register_reward("mine")(second)
    register_reward("mine", replace=True)(second)
    assert resolve_reward("mine")("", "") == 2.0

    with pytest.warns(UserWarning, match="math_correctness.*built-in"):
        register_reward("math_correctness")(first)
    assert resolve_reward("math_correctness")("", "") == 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_reward("another")(first)


def test_exact_match_by_hand():
    reward = resolve_reward("exact_match")
    assert reward.evaluate("12+34=", " 46\n", {"answer": "46"}) == RewardResult(
        1.0, {"correct": 1.0}
    )
    assert reward.evaluate("12+34=", "46", {"answer": 46}).reward == 1.0
    assert reward.evaluate("12+34=", "46!", {"answer": "46"}) == RewardResult(0.0, {"correct": 0.0})
    with pytest.raises(ValueError, match="meta needs 'answer'"):
        reward("12+34=", "46", {"anser": "46"})


def test_text_rewards_by_hand():
    # the examples of the guide
    keywords = resolve_reward("keyword_contains", keywords=["solution", "answer"])
    assert [keywords("", text) for text in ("The Answer", "answer and solution", "none")] == [
        0.5,
        1.0,
        0.0,
    ]
    length = resolve_reward("length_penalty", target_length=4, penalty_scale=0.25)
    assert [length("", text) for text in ("a b c d", "a", "a b c d e f")] == [0.0, -0.75, -0.5]
    assert resolve_reward("length_penalty", target_length=2, unit="characters")(
        "", "abcd"
    ) == pytest.approx(-0.02)
    steps = resolve_reward("format_compliance", patterns=[r"^\d+\.", r"Step \d+:"])
    assert steps.evaluate("", "intro\n1. one", None) == RewardResult(0.5, {"format": 0.0})
    assert steps.evaluate("", "1. Step 1: go", None) == RewardResult(1.0, {"format": 1.0})


@pytest.mark.parametrize(("response", "is_json", "is_list"), [
    ('{"a": [1, 2]}', 1, 0),
    ('```json\n{"a": 1}\n```', 1, 0),
    ("{'a': 1}", 0, 0),
    ('{"a": 1} and more', 0, 0),
    ("7", 0, 0),  # a number is JSON, but not a structured answer
    ("[" * 100_000, 0, 0),
    ("1. one\n2. two", 0, 1),
    ("Steps:\n 1) one\n 2) two\n", 0, 1),
    ("1. one\n3. three", 0, 0),
    ("1. one", 0, 0),
])  # fmt: skip
def test_json_and_numbered_lists(response, is_json, is_list):
    assert resolve_reward("format_compliance", json=True)("", response) == is_json
    assert resolve_reward("format_compliance", numbered_list=True)("", response) == is_list


def test_composite_is_the_weighted_sum_and_logs_each_part():
    weights = {"exact_match": 2.0, "length_penalty": 0.5}
    reward = resolve_reward(
        "composite", weights=weights, settings={"length_penalty": {"target_length": 3}}
    )
    result = reward.evaluate("", "46", {"answer": "46"})
    assert result.reward == pytest.approx(2.0 * 1 + 0.5 * -0.02)
    assert result.metrics == {
        "exact_match": 1.0,
        "correct": 1.0,
        "length_penalty": pytest.approx(-0.02),
        "length": 1.0,
    }
    assert reward.bounded and not reward.needs
    heavy = resolve_reward("composite", weights={"math_correctness": 1.0, "exact_match": 1.0})
    assert not heavy.bounded and heavy.needs == ("math_verify",)


def test_metrics_of_parts_with_the_same_names_are_all_logged():
    def parts(value):
        def part(prompt, response, meta=None):
            return RewardResult(value, {"correct": value})

        return resolve_reward(part)

    composite = resolve_reward("composite", weights={"exact_match": 1.0}).function
    composite.parts = [(parts(value), 1.0) for value in (1.0, 2.0, 3.0)]
    assert composite("", "").metrics == {
        "part": 1.0, "correct": 1.0, "part/part": 2.0, "part/correct": 2.0,
        "part/part/part": 3.0, "part/part/correct": 3.0,
    }  # fmt: skip


def test_gsm8k_by_hand():
    reward, meta = resolve_reward("gsm8k"), {"answer": "1200"}
    assert reward.evaluate("", r"\boxed{1,200}", meta) == RewardResult(
        1.0, {"correct": 1.0, "format": 1.0}
    )
    assert reward.evaluate("", "#### $1200", meta) == RewardResult(
        1.0, {"correct": 1.0, "format": 1.0}
    )
    assert reward.evaluate("", r"\boxed{7}", meta) == RewardResult(
        0.0, {"correct": 0.0, "format": 1.0}
    )
    assert reward.evaluate("", "1200", meta) == RewardResult(-0.1, {"correct": 0.0, "format": 0.0})
    with pytest.raises(ValueError, match="is not a number"):
        reward("", r"\boxed{7}", {"answer": "x+1"})


@pytest.mark.parametrize(
    ("response", "correct"),
    [("#### 72", 1), (r"72 \boxed{73}", 0), (r"\boxed{\frac{}{}}", 0), ("", 0)],
)
def test_math_correctness_by_hand(response, correct):
    result = resolve_reward("math_correctness").evaluate("", response, {"expected_answer": "72"})
    assert result.reward == result.metrics["correct"] == correct
