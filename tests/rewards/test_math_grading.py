"""Test the rules of the math graders (docs/rewards.md) on pairs judged by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from judged_answers import NUMBERS, PAIRS

from rl.rewards import resolve_reward


def test_math_correctness_agrees_with_every_judged_pair():
    reward = resolve_reward("math_correctness")
    differ = [
        (expected, answer, right)
        for expected, answer, right in PAIRS
        if (reward("", f"\\boxed{{{answer}}}", {"answer": expected}) == 1.0) != right
    ]
    assert len(PAIRS) > 500 and sum(right for _, _, right in PAIRS) > 250
    assert differ == []


@pytest.mark.parametrize("answer", ["", ",", "()"])
def test_an_empty_answer_is_wrong_without_giving_up(answer):
    reward = resolve_reward("math_correctness")
    for expected in ("5", "x=18", "1,2", "(1,2]"):
        result = reward.evaluate("", f"Hm. \\boxed{{{answer} }}", {"answer": expected})
        assert result.reward == result.metrics["gave_up"] == 0.0


def test_gsm8k_agrees_with_every_judged_pair():
    reward = resolve_reward("gsm8k")
    differ = [
        (expected, answer, right)
        for expected, answer, right in NUMBERS
        if (reward.evaluate("", f"#### {answer}", {"answer": expected}).metrics["correct"] == 1.0)
        != right
    ]
    assert len(NUMBERS) > 90 and differ == []


@pytest.mark.parametrize(("response", "answer"), [
    ("so it is 0.5", "1/2"),
    ("The answer is $x=5$.", "5"),
    (r"Hence \(\frac{1}{2}\).", "0.5"),
    ("The final answer is: x+1", "1+x"),
    ("We get 3 and then $1{,}200$ of them", "1200"),
    ("it is 12.", "12"),
    ("The answer is **12**.", "12"),
    ("**Answer:** 12", "12"),
    ("**Answer: 12**", "12"),
    ("**Final answer:** $x_1 = 12$", "12"),
    ("Answer: `12`", "12"),
    ("Final Answer: The final answer is $12$. I hope it is correct.", "12"),
    ("The answer is: the final answer is 12", "12"),
    (r"we get 25\%", r"25\%"),
    ("She has $5 and $7, so 12", "12"),
    ("$5 + $7 = $12", "12"),
    ("it costs $5, so the total is 7", "7"),
    ("$5-$7, then 6", "6"),
    (r"so $\frac{1}{2}$", "1/2"),
    (r"so $ \frac{1}{2} $.", "1/2"),
    ("thus $$x=5$$ holds", "5"),
    ("The answer is\n\\[\nx = 5\n\\]", "5"), ("The answer is: \\[\nx = 5\n\\]", "5"),
    ("**Answer:**\n12", "12"), ("**Answer:** \\[\n12\n\\]", "12"), ("**Answer**: **12**", "12"),
    ("The answer is\n$$\n5\n$$", "5"), ("Answer:\n$$x=5$$", "5"), ("The answer is <answer>5</answer>", "5"),
    ("<answer>The answer is 5.</answer>", "5"), (r"<answer>\sin x</answer>", r"\sin(x)"),
    (r"<answer>\frac{1}{2}</answer>", "1/2"), ("<answer> 1+x </answer>", "x+1"),
    ("<answer>she has 12 cats</answer>", "12"), ("<answer>12 cm</answer>", "12"),
])  # fmt: skip
def test_an_unmarked_answer_is_the_last_expression(response: str, answer: str):
    reward = resolve_reward("math_correctness")
    assert reward.evaluate("", response, {"answer": answer}).metrics == {
        "correct": 1.0,
        "format": 0.0,
        "gave_up": 0.0,
    }
    assert reward("", response, {"answer": "77"}) == 0.0


def _other_spelling(answer: str) -> str:
    """Return the same answer in other LaTeX, so that the test needs more than a text comparison."""
    return (
        answer.replace("\\frac", "\\dfrac")
        .replace("(", "\\left(")
        .replace(")", "\\right)")
        .replace("{,}", ",\\!")
        + " "
    )


# adjacent rows with equal answers
ALIKE = {("50", "50^{\\circ}"), ("\\frac12", "\\frac{1}{2}"), ("80 \\%", "80"), (" \\$ 5", "5")}


@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.campaign)])
def test_answers_of_math_are_right_for_themselves_and_wrong_for_others(shared_data, every: int):
    lines = (shared_data / "math" / "MATH_train.jsonl").read_text().splitlines()
    answers = [answer for line in lines if (answer := json.loads(line)["answer"])][::every]
    reward = resolve_reward("math_correctness")

    def is_right(answer: str, expected: str) -> bool:
        return reward("", f"\\boxed{{{answer}}}", {"answer": expected}) == 1.0

    assert [answer for answer in answers if not is_right(_other_spelling(answer), answer)] == []
    neighbours = zip(answers, [*answers[1:], answers[0]], strict=True)
    positives = {pair for pair in neighbours if pair[0] != pair[1] and is_right(pair[1], pair[0])}
    assert positives <= ALIKE


def test_all_answers_of_gsm8k_are_right_for_themselves(shared_data: Path):
    reward = resolve_reward("gsm8k")
    for name in ("train", "test"):
        for line in (shared_data / "gsm8k" / f"{name}.jsonl").read_text().splitlines():
            worked = json.loads(line)["answer"]
            answer = worked.rpartition("####")[2].strip()
            assert reward("", worked, {"answer": answer}) == 1.0


@pytest.mark.parametrize("reward", ["gsm8k", "math_correctness"])
@pytest.mark.parametrize(
    "response", [r"\boxed{**72**}", "#### **72**", "**#### 72**", "#### `72`", "#### *72*"]
)
def test_a_marked_answer_may_be_emphasized(reward, response):
    assert resolve_reward(reward)("", response, {"answer": "72"}) == 1.0
