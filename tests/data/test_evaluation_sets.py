"""Test AIME, multiple choice and IFEval by short names and by files: columns and grading."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from data_helpers import get_contents, write_rows

from rl.config import DataSettings
from rl.data import find_default_reward, has_row_splits, load_problems
from rl.errors import UserError
from rl.rewards import resolve_reward
from rl.rewards.multiple_choice_reward import extract_choice
from rl.trainer import load_training_problems

GPQA = {"Record ID": "rec1", "Question": "Which is even?", "Correct Answer": "four"}
GPQA |= {"Incorrect Answer 1": "three", "Incorrect Answer 2": "five", "Incorrect Answer 3": "nine"}
GPQA |= {"Subdomain": "Numbers", "Explanation": "4 = 2 * 2"}
IFEVAL = {"key": 1, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"]}
IFEVAL |= {"kwargs": [{"num_words": None}]}


def write(folder: Path, *rows: dict[str, Any]) -> str:
    return str(write_rows(folder / "rows.jsonl", *rows))


# -------------------------------------------------------------------------------------------- aime


def test_aime_reads_whole_numbers_to_999(tmp_path: Path):
    file = write(
        tmp_path,
        {"problem": "Find it.", "solution": "It is 73.", "answer": "073", "year": "2024"},
        {"ID": "2024-I-2", "Problem": "And this.", "Answer": 0},
    )
    assert find_default_reward(f"aime:{file}") == "math_correctness"
    first, second = load_problems(f"aime:{file}", split="test")
    assert first.meta == {"answer": "73", "year": "2024"} and second.meta["answer"] == "0"
    assert first.messages[0]["content"].startswith("Find it.\n\n")
    reward = resolve_reward("math_correctness")
    for response, value in (
        ("\\boxed{073}", 1), ("\\boxed{73}", 1), ("So it is 73.", 1), ("\\boxed{730}", 0),
        ("\\boxed{73} or \\boxed{74}", 0), ("\\boxed{-73}", 0), ("\\boxed{73, 74}", 0), ("", 0),
    ):  # fmt: skip
        assert reward("", response, first.meta) == value, response
    for answer in ("336^\\circ", "336^{\\circ}", "336\u00b0", "336 ^ \\circ "):
        degrees = write(tmp_path, {"problem": "p", "answer": answer})
        assert load_problems(f"aime:{degrees}")[0].meta["answer"] == "336"
    for answer in ("1000", "\u00b0", "1000^\\circ", "3\u00b0 4", "-1", "3.5", "x", "", None, True):
        bad = write(tmp_path, {"problem": "p", "answer": answer})
        with pytest.raises(UserError, match="'answer' is an integer from 0 to 999"):
            load_problems(f"aime:{bad}", split="test")


def test_a_named_file_of_training_data_holds_out_its_last_tenth(tmp_path: Path):
    rows = [{"problem": f"Find {i}.", "answer": str(i)} for i in range(20)]
    source = f"math:{write(tmp_path, *rows)}"
    train, test = load_training_problems(DataSettings(dataset=source), True)
    assert test is not None and [len(train), len(test)] == [18, 2]
    assert not has_row_splits(source)
    with pytest.raises(UserError, match="gone.jsonl does not exist"):
        load_problems(f"math:{tmp_path / 'gone.jsonl'}")


# --------------------------------------------------------------------------------- multiple choice


def test_choices_are_shuffled_by_the_question_alone(tmp_path: Path):
    rows = [{**GPQA, "Question": f"Which of {i} is even?"} for i in range(400)]
    file = write(tmp_path, *rows)
    problems = load_problems(file, split="test")
    assert find_default_reward(file) == find_default_reward(f"gpqa:{file}") == "multiple_choice"
    letters = Counter()
    for row, problem in zip(rows, problems, strict=True):
        choices, letter = problem.meta["choices"], problem.meta["answer"]
        assert sorted(choices) == ["five", "four", "nine", "three"]
        assert choices["ABCD".index(letter)] == "four"
        listing = "\n".join(f"{name}) {text}" for name, text in zip("ABCD", choices, strict=True))
        assert problem.messages[0]["content"].startswith(f"{row['Question']}\n\n{listing}\n\n")
        assert "Explanation" not in problem.meta  # only the choices reach the prompt
        letters[letter] += 1
    # each position is equally likely: 100 +- 4 standard deviations of 8.7
    assert set(letters) == set("ABCD") and all(65 < count < 135 for count in letters.values())
    # other rows, their order and a limit have no effect
    few = write_rows(tmp_path / "few.jsonl", *rows[7:2:-1])
    again = load_problems(few, split="test", limit=4)
    assert [p.meta for p in again] == [problems[i].meta for i in (7, 6, 5, 4)]


def test_choices_in_a_list_keep_their_order(tmp_path: Path):
    row = {"question": "Even?", "choices": ["one", "two", "three"], "answer": 1, "subject": "maths"}
    (problem,) = load_problems(write(tmp_path, row))
    assert problem.meta == {"answer": "B", "choices": row["choices"], "subject": "maths"}
    letter = {"question": "Even?", "options": ["one", "two"], "answer": "b"}
    assert load_problems(write(tmp_path, letter))[0].meta["answer"] == "B"
    for change, message in (
        ({"answer": 3}, "'answer' is a letter from A to C or a position from 0 to 2, this is 3"),
        ({"answer": "ß"}, "'answer' is a letter from A to C"),  # two letters in upper case
        ({"answer": "D"}, "this is 'D'"),
        ({"answer": True}, "this is True"),
        ({"choices": ["one"]}, "'choices' is a list of 2 to 26 texts"),
        ({"choices": "one, two"}, "'choices' is a list"),
    ):
        with pytest.raises(UserError, match=message):
            load_problems(write(tmp_path, {**row, **change}))


def test_a_named_answer_column_holds_the_answer_of_every_format(tmp_path: Path):
    math = {"problem": "1+1", "answer": "wrong", "gold": "2"}
    for row, name, answer in (
        (math, "gold", "2"),
        (math, "answer", "wrong"),
        (math, None, "wrong"),
        ({"problem": "1+1", "solution": "It is \\boxed{2}."}, "solution", "2"),
        ({"problem": "1+1", "solution": "It is \\boxed{2}.", "gold": 3}, "gold", "3"),
        ({"problem": "1+1", "solution": "It is \\boxed{2}."}, "gold", "2"),  # the row lacks it
        ({"question": "1+1", "answer": "It is 2.\n#### 2", "gold": "3"}, "gold", "3"),
        ({"question": "1+1", "answer": "It is 2.\n#### 2"}, "gold", "2"),
        ({"question": "1+1", "choices": ["1", "2"], "answer": 0, "gold": "B"}, "gold", "B"),
    ):
        (problem,) = load_problems(write(tmp_path, row), answer_column=name)
        assert problem.meta["answer"] == answer, row
    aime = f"aime:{write(tmp_path, {'Problem': '1+1', 'Answer': 1, 'gold': '002'})}"
    assert load_problems(aime, answer_column="gold")[0].meta["answer"] == "2"
    assert load_problems(aime, answer_column="Answer")[0].meta["answer"] == "1"
    for empty in (" ", float("nan")):
        with pytest.raises(UserError, match="'gold' is empty"):
            load_problems(write(tmp_path, {**math, "gold": empty}), answer_column="gold")


def test_a_row_with_a_prompt_is_no_multiple_choice(tmp_path: Path):
    row = {"prompt": "Say B.", "question": "Even?", "choices": ["1", "2"], "answer": "B"}
    file = write(tmp_path, row)
    (problem,) = load_problems(file)
    assert list(problem.messages) == [{"role": "user", "content": "Say B."}]
    assert problem.meta["question"] == "Even?" and find_default_reward(file) is None


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("B", "B"), ("(b)", "B"), ("B.", "B"), ("Answer: B", "B"), ("**Answer:** B", "B"),
        ("**Answer: B**", "B"), ("So the answer is (B).", "B"), ("The answer is: B", "B"),
        ("Answer:\nB", "B"), ("Answer: B) 12 m", "B"), ("Answer: B. Because (A) is wrong.", "B"),
        ("\\boxed{B}", "B"), ("Answer: $\\boxed{\\text{(B)}}$", "B"), ("#### B", "B"),
        ("<answer>B</answer>", "B"), ("Answer: A\nNo, wait.\nAnswer: B", "B"),
        ("Answer: B\nI hope the answer is helpful.", "B"), ("Final answer: `B`", "B"),
        ("Answer: B (foo)", "B"), ("Answer: B - foo", "B"), ("**Answer:** **B** - foo.", "B"),
        ("The correct answer is **B**: because", "B"), ("The answer is option B", "B"),
        ("Answer: Choice (B)", "B"), ("The answer is B, because 4 is even.", "B"),
        ("Answer: B \u2014 12 m", "B"), ("Answer: B because of x", "B"),
        ("\\boxed{\\text{B (12 m)}}", "B"), ("Answer: **Option B**", "B"),
        ("\\boxed{\\textrm{B}}", "B"),
        ("Answer: \\(B\\)", "B"), ("Answer: \\(\\text{B}\\).", "B"),
        ("The answer is \\[B\\]", "B"),
        # not a single letter
        ("Answer: Apples", None), ("Answer: B, not A", None), ("Answer: B (or A)", None),
        ("Answer: B - or maybe C", None), ("Answer: B, C", None), ("Answer: B, c", None),
        ("Answer: B (a)", None), ("Answer: B (or c)", None), ("Answer: options A and B", None),
        ("Answer: option A or option B", None), ("Answer: B because not A", None),
        ("Answer: B-cells", None), ("Answer: A good question", None), ("Answer: A(n) apple", None),
        ("Answer: A 5% rise", None), ("The answer is option", None), ("Answer: B? C?", None),
        ("Option B", None), ("B (foo)", None), ("Answer: B \u2013 A", None),
        ("Answer: **B** / **C**", None), ("Answer: B; A", None), ("Answer: optional B", None),
        ("Answer: E (foo)", None), ("Answer: B: A, C", None),
        ("", None), ("I think B", None), ("A\nB\nC\nD", None), ("Answer: A or B", None),
        ("Answer: A, B", None), ("Answer: A/B", None), ("Answer: A B", None), ("Answer: ABCD", None),
        ("Answer: B (A)", None), ("Answer: B) 1 or C) 2", None), ("\\boxed{A, B}", None),
        ("Answer: B\nAnswer: A or B", None), ("Answer: Because", None), ("Answer: E", None),
        ("The answer is a matter of taste", None), ("\\boxed{}", None), ("Answer:", None),
        ("Answer: \\(B\\) or \\(C\\)", None), ("Answer: \\(B, C\\)", None),
        ("Answer: not B", None), ("<answer></answer>", None),
    ],
)  # fmt: skip
def test_the_letter_of_an_answer_by_hand(response: str, letter: str | None):
    assert extract_choice(response, 4) == letter
    result = resolve_reward("multiple_choice").evaluate("", response, {"answer": "B"})
    assert result.reward == result.metrics["correct"] == float(letter == "B")
    assert result.metrics["format"] == float(letter is not None)


def test_a_multiple_choice_needs_a_letter_of_its_choices():
    reward = resolve_reward("multiple_choice")
    assert reward("", "Answer: F", {"answer": "F", "choices": list("uvwxyz")}) == 1
    for meta in ({"answer": "4"}, {"answer": "E"}, {"answer": "C", "choices": ["x", "y"]}):
        with pytest.raises(UserError, match="is a letter from A to"):
            reward("", "Answer: A", meta)


# ------------------------------------------------------------------------------------------ ifeval


def test_ifeval_is_read_by_its_columns(tmp_path: Path):
    file = write(tmp_path, IFEVAL)
    (problem,) = load_problems(file)
    assert get_contents([problem]) == ["No commas."] and len(problem.messages) == 1
    instructions = {"instruction_id_list": IFEVAL["instruction_id_list"], "kwargs": [{}]}
    assert problem.meta == {"key": 1, **instructions}
    assert find_default_reward(file) == find_default_reward(f"ifeval:{file}") == "ifeval"
    bad = {**IFEVAL, "instruction_id_list": ["punctuation:no_dash"]}
    with pytest.raises(UserError, match="line 2: unknown instruction 'punctuation:no_dash'"):
        load_problems(write(tmp_path, IFEVAL, bad))
