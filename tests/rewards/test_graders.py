"""Test the graders on published text: math answers of MATH and of models against their published
grades, reference solutions and empty bodies of HumanEval and MBPP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl.data import load_problems
from rl.rewards import Scorer, resolve_reward
from rl.rewards.math_reward import extract_boxed_answer, extract_marked_answer


@dataclass(frozen=True)
class GradedResponse:
    """A solution, the answer that it is compared with, and the published grade. `read`: the answer
    that the published grader extracted.
    """

    place: str
    response: str
    answer: str
    correct: bool
    read: str = ""


def gsm8k(data: Path) -> Iterator[GradedResponse]:
    """Yield four models' solutions of 1,319 problems. Their mark of the answer, "A:", is replaced
    by the mark of the data set.
    """
    lines = (data / "gsm8k" / "example_model_solutions.jsonl").read_text().splitlines()
    for number, row in enumerate(map(json.loads, lines)):
        answer = row["ground_truth"].rpartition("A:")[2].strip()
        for model, judged in row.items():
            if isinstance(judged, dict):
                response = "####".join(judged["solution"].rsplit("A:", 1))
                right = str(judged["is_correct"]).lower() in ("true", "1")
                yield GradedResponse(f"{number} {model}", response, answer, right)


def qwen(data: Path, column: str) -> Iterator[GradedResponse]:
    """Yield eight solutions of each of 100 problems. `column`: "gt", the answer that the published
    score was computed with, or "answer", MATH's answer.
    """
    lines = (data / "rollouts" / "qwen25math" / "math_cot_100.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        samples = zip(row["code"], row["pred"], row["score"], strict=True)
        for i, (text, read, score) in enumerate(samples):
            place = f"{row['idx']} sample {i}"
            yield GradedResponse(place, text, row[column], bool(score), read)


def math500(data: Path, shift: int) -> Iterator[GradedResponse]:
    """Yield MATH's solutions with the answer of the problem `shift` places later: right for 0,
    otherwise wrong unless both answers are spelled alike.
    """
    rows = json.loads((data / "math" / "math500_test.json").read_text())
    for row, other in zip(rows, [*rows[shift:], *rows[:shift]], strict=True):
        right = row["answer"] == other["answer"]
        yield GradedResponse(row["unique_id"], row["solution"], other["answer"], right)


def find_reason(item: GradedResponse, grade: bool) -> str:
    """Explain from the compared texts why our grade differs; "" if the reason is unknown."""
    marked = extract_marked_answer(item.response) or ""
    if grade and ("m." in marked or "m." in item.answer) and item.read in marked:
        return "the published grade cut a unit from the solution's answer only"
    if grade and item.answer.replace("{,}", "") == marked:
        return "the published grade compared the spellings of a thousands separator"
    if grade and marked in (item.answer.rpartition("=")[2], item.answer):
        return "the two problems have the same answer, spelled in two ways"
    return ""


def find_differences(
    reward: str, solutions: Iterable[GradedResponse]
) -> tuple[int, list[tuple[str, str]]]:
    """Return (number of solutions, (place, reason) of each that we grade otherwise)."""
    differ, resolved, count = [], resolve_reward(reward), 0
    for item in solutions:
        scored = resolved.evaluate("", item.response, {"answer": item.answer})
        grade = scored.metrics["correct"] == 1.0
        count += 1
        if grade != item.correct:
            differ.append((item.place, find_reason(item, grade)))
    return count, differ


@pytest.mark.parametrize(("text", "answer"), [
    (r"$\boxed{\frac{1}{\sqrt{2}}}$", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{\left\{1, \{2\}\right\}}", r"\left\{1, \{2\}\right\}"),
    (r"\boxed{\begin{pmatrix} 1 \\ \frac{2}{3} \end{pmatrix}}",
     r"\begin{pmatrix} 1 \\ \frac{2}{3} \end{pmatrix}"),
    (r"\fbox{4}", "4"),
    (r"\boxed {5}", "5"),
    (r"is $\boxed 5$.", "5"),
    (r"is $\boxed5$.", "5"),
    (r"\boxed{3} and $\boxed 7.$", "7"),
    (r"$\boxed 7$, so \boxed{3}", "3"),
    (r"\boxed{1} then \boxed {2", "1"),
    (r"} \boxed{3}", "3"),
    (r"\boxed{\left\{ x=1 \right.}", r"\left\{ x=1 \right."),
    (r"\boxed{x \in \{1, 2)}", r"x \in \{1, 2)"),
    (r"\boxed{}", None),
    (r"\boxed", None),
    ("4", None),
])  # fmt: skip
def test_boxes_as_math_writes_them(text: str, answer: str | None):
    assert extract_boxed_answer(text) == extract_marked_answer(text) == answer


@pytest.mark.parametrize(("text", "answer"), [
    ("#### 5\n\nbye", "5"),
    (r"\boxed{1}" + "\n#### 2", "2"),
    ("#### 2\n" + r"\boxed{1}", "1"),
    ("####", None),
    ("##### 5", None),
    ("\\boxed{25}. ######\n rest", "25"),  # a rule
    ("\\boxed{25}\n\n#### **Check**\nfine", "25"),  # a heading
    ("#### east", "east"),
    ("#### Final Answer\n\n42", "42"),
    ("#### **Answer:** 42", "42"),
    ("#### The final answer is 42", "42"),
    ("#### answered", "answered"),
])  # fmt: skip
def test_the_last_mark_counts_and_a_rule_is_none(text: str, answer: str | None):
    assert extract_marked_answer(text) == answer


def test_every_box_of_maths_solutions_is_read(shared_data: Path):
    rows = json.loads((shared_data / "math" / "math500_test.json").read_text())
    assert [extract_boxed_answer(row["solution"]) for row in rows] == [
        row["answer"].strip() for row in rows
    ]


def test_a_sample_of_published_grades(shared_data: Path):
    """Grade every twentieth solution, and all solutions of the two problems with different grades."""
    chosen = [
        item
        for i, item in enumerate(qwen(shared_data, "answer"))
        if i % 20 == 0 or item.place.split()[0] in ("3", "72")
    ]
    count, differ = find_differences("math_correctness", chosen)
    assert count == 55
    # Our grades are right: the published ones misread a unit and a thousands separator.
    assert [place for place, reason in differ if reason] == [
        *(f"3 sample {i}" for i in range(8)),
        "72 sample 7",
    ]
    assert len(differ) == 9


# name -> (reward, solutions, their number, the grades that differ); docs/datasets.md quotes these.
PUBLISHED = {
    "gsm8k, four models": ("gsm8k", gsm8k, 5276, 0),
    "MATH, Qwen's answers": ("math_correctness", lambda data: qwen(data, "gt"), 800, 1),
    "MATH, MATH's answers": ("math_correctness", lambda data: qwen(data, "answer"), 800, 9),
    "MATH-500, right": ("math_correctness", lambda data: math500(data, 0), 500, 0),
    "MATH-500, wrong": ("math_correctness", lambda data: math500(data, 1), 500, None),
}


QUICK = "gsm8k, four models"


@pytest.mark.parametrize(
    "name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in PUBLISHED]
)
def test_graders_agree_with_published_grades_or_are_right(name: str, shared_data: Path):
    reward, solutions, number, different = PUBLISHED[name]
    count, differ = find_differences(reward, solutions(shared_data))
    assert count == number and different in (None, len(differ))
    assert [place for place, reason in differ if not reason] == []


def make_empty(problem) -> str:
    """Return the function of a problem with an empty body."""
    name = problem.meta["tests"]["entry_point"]
    return f"```python\n{problem.meta['head']}    pass\n```" if name else "```python\n\n```"


MBPP_SPLITS = ("test", "train", "validation", "prompt")


@pytest.mark.slow
@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize(
    ("name", "splits", "number"),
    [
        ("humaneval/HumanEval.jsonl.gz", ("test",), 164),
        pytest.param("mbpp/mbpp.jsonl", MBPP_SPLITS, 974, marks=pytest.mark.campaign),
        pytest.param("mbpp/sanitized-mbpp.json", MBPP_SPLITS, 427, marks=pytest.mark.campaign),
    ],
)
def test_reference_programs_pass_and_empty_bodies_fail(name, splits, number, shared_data: Path):
    """The reward gets each program as an answer: fenced, through worker processes, in a sandbox."""
    problems = [p for split in splits for p in load_problems(shared_data / name, split=split)]
    assert len(problems) == number
    with Scorer(resolve_reward("code_tests", seconds=40.0), timeout=60.0) as scorer:

        def list_passing(texts: list[str]) -> list[str]:
            items = zip(problems, texts, strict=True)
            scores = scorer.score_many((p.messages[-1]["content"], t, p.meta) for p, t in items)
            pairs = zip(problems, scores, strict=True)
            return [p.meta["task_id"] for p, score in pairs if score.metrics.get("correct") == 1.0]

        everyone = [p.meta["task_id"] for p in problems]
        assert list_passing([str(p.response) for p in problems]) == everyone
        assert list_passing([make_empty(p) for p in problems]) == []
