"""Test that every built-in reward returns a number for every text: 0 and the metric `gave_up` if it
cannot grade the answer.
"""

from __future__ import annotations

import math
import os
import time

import pytest
from hostile_answers import ANSWERS, GOLD

import rl
from rl.processes import find_descendants, kill_process
from rl.rewards import Scorer, math_reward, register_reward, registered_rewards, resolve_reward
from rl.rewards.reward_registry import _REGISTRY

SETTINGS = {
    "exact_match": {},
    "gsm8k": {},
    "math_correctness": {},
    "countdown": {},
    "keyword_contains": {"keywords": ["a"]},
    "length_penalty": {"target_length": 3},
    "format_compliance": {"patterns": ["^a+$"], "json": True, "numbered_list": True},
    "repetition": {},
    "script": {"script": "latin"},
    "language": {"language": "en"},
    "composite": {"weights": {"math_correctness": 1.0, "gsm8k": 0.5}},
    "cosine_length": {"max_length": 100, "reward": "math_correctness"},
    "multiple_choice": {},
    "ifeval": {},
}
META = {
    "answer": "7",
    "numbers": [1, 2, 3],
    "target": 7,
    "instruction_id_list": ["punctuation:no_comma", "detectable_format:json_format"],
    "kwargs": [{}, {}],
}


def test_every_built_in_grader_of_texts_is_listed():
    built_in = {name for name in registered_rewards() if _REGISTRY[name].builtin}
    assert built_in - {"code_tests", "code_output"} == set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_text_gets_a_number_in_time(name: str):
    if name == "language":
        pytest.importorskip("py3langid")
    reward = resolve_reward(name, **SETTINGS[name])
    meta = {**META, "answer": "B" if name == "multiple_choice" else "8"}
    for answer in ANSWERS:
        for response in (answer, f"\\boxed{{{answer}}}", f"#### {answer}"):
            begin = time.process_time()
            result = reward.evaluate("", response, meta)
            assert math.isfinite(result.reward), ascii(response[:80])
            assert all(map(math.isfinite, result.metrics.values())), ascii(response[:80])
            assert time.process_time() - begin < 8, ascii(response[:80])


@pytest.mark.parametrize("gold", [GOLD[::4], pytest.param(GOLD, marks=pytest.mark.campaign)])
def test_no_ungraded_answer_is_right(gold: tuple[str, ...]):
    reward = resolve_reward("math_correctness")
    given_up = 0
    for expected in gold:
        for answer in ANSWERS:
            begin = time.process_time()
            result = reward.evaluate("", f"\\boxed{{{answer}}}", {"answer": expected})
            assert result.reward == 0.0, (expected, ascii(answer[:80]))
            assert time.process_time() - begin < 8, (expected, ascii(answer[:80]))
            given_up += result.metrics["gave_up"] == 1.0
    assert given_up > len(ANSWERS) // 2


ENDLESS = {"patterns": ["^(a+)+$"]}  # Python's matcher, in C, tries 2^40 ways for this pattern


def test_a_built_in_grader_that_hangs_scores_0_and_the_next_answer_is_graded():
    with Scorer(resolve_reward("format_compliance", **ENDLESS), timeout=1.0, workers=1) as scorer:
        scores = scorer.score_many([("", "a" * 40 + "b", {}), ("", "aaa", {})])
    assert [score.reward for score in scores] == [0.0, 1.0]
    assert [score.error for score in scores] == [None, None]
    assert scores[0].metrics == {"gave_up": 1.0} and scorer.counts["timeouts"] == 1


def test_a_combined_grader_whose_part_hangs_scores_as_if_the_part_gave_up():
    reward = resolve_reward(
        "cosine_length", max_length=100, reward="format_compliance", settings=ENDLESS
    )
    composite = resolve_reward(
        "composite",
        weights={"format_compliance": 1.0, "cosine_length": 0.5},
        settings={"format_compliance": ENDLESS, "cosine_length": {"max_length": 100}},
    )
    hangs = ("", "a" * 40 + " b", {"answer": "7"})
    wrong = reward("", "b b", {})  # as long as `hangs`
    assert wrong < -9
    for combined, expected in ((reward, wrong), (composite, 0.5 * wrong)):
        with Scorer(combined, timeout=0.7, workers=1) as scorer:
            (score,) = scorer.score_many([hangs])
        assert score.reward == pytest.approx(expected) and score.metrics["gave_up"] == 1.0
        assert score.metrics["format_compliance"] == 0.0 and score.metrics["length"] == 2.0


def test_a_built_in_grader_whose_worker_is_killed_scores_0():
    others = set(find_descendants(os.getpid()))
    with Scorer(resolve_reward("format_compliance", **ENDLESS), timeout=60.0, workers=1) as scorer:
        pending = scorer.submit("", "a" * 40 + "b", {})
        with pytest.raises(TimeoutError):
            pending.result(timeout=1.0)
        for pid in set(find_descendants(os.getpid())) - others:
            kill_process(pid)
        score = pending.result(timeout=30.0)
    assert score.reward == 0.0 and score.metrics == {"gave_up": 1.0}
    assert scorer.counts["deaths"] == 1


@pytest.fixture
def failing_reward():
    """Yield the name of a built-in reward that raises or overflows."""

    def breaks(prompt, response, meta=None):
        return math_reward.RewardResult(10**400 if response == "large" else {}[response], {})

    breaks.__module__ = "rl.rewards.breaks"
    before = dict(_REGISTRY)
    yield register_reward("breaks", bounded=True, reports=("correct",))(breaks).__name__
    _REGISTRY.clear()
    _REGISTRY.update(before)


def test_a_built_in_grader_that_raises_scores_0_with_its_metrics(failing_reward):
    with Scorer(failing_reward) as scorer:
        scores = scorer.score_many([("", "large", {}), ("", "missing", {})])
    assert [(score.reward, score.metrics) for score in scores] == [
        (0.0, {"correct": 0.0, "gave_up": 1.0})
    ] * 2


def test_a_run_counts_what_its_grader_gave_up_on(failing_reward, tmp_path):
    small = {
        "steps": 1,
        "batch_size": 2,
        "group_size": 2,
        "max_tokens": 4,
        "eval_every": 0,
        "quiet": True,
    }
    row = rl.train("grpo", reward=failing_reward, output_dir=tmp_path / "run", **small).metrics[-1]
    assert (row["reward/gave_up"], row["reward/failed"], row["env/all/correct"]) == (4, 0, 0.0)


def test_a_fault_of_the_problem_and_a_reward_of_ones_own_stay_not_scored():
    def reference(prompt, response, meta):
        raise KeyError(response)

    with Scorer("math_correctness", workers=1) as scorer:
        (score,) = scorer.score_many([("", "5", {"anser": "5"})])
    assert score.reward is None and "no expected answer" in (score.error or "")
    with Scorer(reference) as scorer:
        (score,) = scorer.score_many([("", "5", {})])
    assert score.reward is None and score.failure == "error"
