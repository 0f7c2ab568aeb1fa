"""Test published data sets from their files and from rows in their formats: what is read, from
which split, which reward scores it, and what splits share.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_helpers import get_contents, write_rows

from rl.data import (
    DATASET_REGISTRY,
    ProblemSet,
    countdown,
    find_contamination,
    find_default_reward,
    has_row_splits,
    load_problems,
    oneliners,
    sorting,
)
from rl.data import row_readers as rows_module
from rl.data.synthetic.sorting_dataset import is_test as sorting_is_test
from rl.errors import UserError
from rl.rewards import resolve_reward
from rl.rewards.math_text import evaluate_arithmetic
from rl.types import Problem

MBPP = {"task_id": 601, "text": "Double it.", "code": "def f(x):\r\n  return 2*x"}
MBPP |= {"test_list": ["assert f(1) == 2", "assert f(4) == 8"]}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "from math import pi\n\ndef g(x):\n    '''Its negative.'''\n",
    "canonical_solution": "    return -x\n",
    "test": "def check(candidate):\n    assert candidate(2) == -2\n",
    "entry_point": "g",
}
DIALOGUES = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}
APPS_STDIN = {"question": "Add them.", "input_output": json.dumps(DIALOGUES), "solutions": '["x"]'}
CALLS = {"fn_name": "best", "inputs": [[[1, 2], 3]], "outputs": [[12]]}
APPS_CALL = {"question": "Best.", "input_output": json.dumps(CALLS)}
APPS_CALL |= {"starter_code": "def best(a, b):"}
ECHO = [{"input": "a", "output": "a", "testtype": "stdin"}]
LCB_STDIN = {"question_content": "Echo.", "public_test_cases": json.dumps(ECHO), "starter_code": ""}
SUM = [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]
LCB_CALL = {"question_content": "Sum.", "public_test_cases": json.dumps(SUM)}
LCB_CALL |= {"starter_code": "class Solution:\n    def total(self, a, b):"}
LCB_CALL |= {"metadata": '{"func_name": "total"}'}
MATH = {"problem": "Half?", "solution": r"So $\boxed{\frac{1}{\sqrt{2}}}$.", "level": "Level 2"}


def load_row(folder: Path, row: dict[str, Any], **settings: Any) -> Problem:
    return load_problems(write_rows(folder / "rows.jsonl", row), **settings)[0]


def test_what_is_read_of_problems_with_code(tmp_path: Path):
    mbpp = load_row(tmp_path, MBPP)
    tests = {"style": "asserts", "setup": "", "asserts": MBPP["test_list"], "entry_point": None}
    assert mbpp.meta["tests"] == tests
    assert mbpp.response == "```python\ndef f(x):\n  return 2*x\n```"
    text = mbpp.messages[-1]["content"]
    # the other asserts are hidden
    assert "Double it." in text and "assert f(1) == 2" in text and "assert f(4)" not in text
    sanitized = {**MBPP, "prompt": MBPP["text"], "test_imports": ["import math"]}
    del sanitized["text"]
    assert load_row(tmp_path, sanitized).meta["tests"]["setup"] == "import math"

    human = load_row(tmp_path, HUMANEVAL, split="test")
    assert human.meta["head"] == HUMANEVAL["prompt"] and human.meta["tests"]["entry_point"] == "g"
    assert human.response == "```python\n" + HUMANEVAL["prompt"] + "    return -x\n```"
    assert "candidate" not in human.messages[-1]["content"]

    cases = [["1 2\n", "3\n"], ["3\n4", "7"]]
    assert load_row(tmp_path, APPS_STDIN).meta["tests"] == {"style": "dialogues", "cases": cases}
    call = load_row(tmp_path, APPS_CALL)
    cases = [[[[1, 2], 3], [12]]]
    tests = {"style": "calls", "function": "best", "cases": cases, "compare": "wrapped"}
    assert call.meta["tests"] == tests and "def best(a, b):" in call.messages[-1]["content"]
    tests = {"style": "dialogues", "cases": [["a", "a"]]}
    assert load_row(tmp_path, LCB_STDIN).meta["tests"] == tests
    assert load_row(tmp_path, LCB_CALL).meta["tests"]["cases"] == [[[[1, 2], 3], 6]]


@pytest.mark.parametrize(
    ("row", "meta", "response"),
    [
        (MATH, {"answer": r"\frac{1}{\sqrt{2}}", "level": "Level 2"}, MATH["solution"]),
        ({"problem": "2+2?", "answer": "4"}, {"answer": "4"}, None),
        ({"problem": "2+2?", "solution": "It is 4.", "answer": "4"}, {"answer": "4"},
         "It is 4.\nThe answer is \\boxed{4}."),
        ({"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2", "level": 3},
         {"answer": "2", "level": 3}, "1+1=2\nThe answer is \\boxed{2}."),
    ],
    ids=["math", "answer alone", "solution and answer", "gsm8k"],
)  # fmt: skip
def test_what_is_read_of_problems_with_an_answer(tmp_path: Path, row, meta, response):
    problem = load_row(tmp_path, row)
    assert problem.meta == meta
    if response is not None:
        assert problem.response == response


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


class Runs:
    """Creates a folder when unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_packed_private_tests_are_read_and_run_nothing(tmp_path: Path):
    private = json.dumps([{"input": "b", "output": "b", "testtype": "stdin"}])
    for form in (private, packed(private)):
        problem = load_row(tmp_path, {**LCB_STDIN, "private_test_cases": form})
        assert problem.meta["tests"]["cases"] == [["a", "a"], ["b", "b"]]
    row = {**LCB_STDIN, "private_test_cases": packed(Runs(str(tmp_path / "made")))}
    says = "rows.jsonl line 1: 'private_test_cases' is neither JSON nor packed .*mkdir"
    with pytest.raises(UserError, match=says):
        load_row(tmp_path, row)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("row", "change", "text"),
    [
        (MBPP, {"test_list": []}, "'test_list' is empty"),
        (MBPP, {"test_list": "assert f(1) == 2"}, "'test_list' is a list of texts"),
        (MBPP, {"test_list": ["assert f(1 =="]}, "no Python: 'assert f"),
        (MBPP, {"code": 3}, "'code' has the type int, text is expected: '3'"),
        (HUMANEVAL, {"entry_point": "h"}, "does not define the function 'h'"),
        (HUMANEVAL, {"test": "assert g(2) == -2"}, "no Python that defines check"),
        (APPS_STDIN, {"input_output": "{"}, "'input_output' is no JSON"),
        (APPS_STDIN, {"input_output": ""}, "'input_output' is no JSON"),
        (APPS_STDIN, {"input_output": '{"inputs": ["1"], "outputs": []}'},
         "no inputs with as many outputs"),
        (APPS_CALL, {"input_output": '{"fn_name": "a b", "inputs": [[1]], "outputs": [1]}'},
         "calls 'a b'"),
        (LCB_STDIN, {"public_test_cases": "[1]"}, "a list of {input, output, testtype}"),
        (LCB_STDIN, {"public_test_cases": '[{"input": "", "output": "", "testtype": "http"}]'},
         "stdin or functional"),
        (LCB_STDIN, {"private_test_cases": "bm90aGluZw=="}, "neither JSON nor packed"),
        (LCB_CALL, {"metadata": "{}"}, "no func_name"),
        (LCB_CALL, {"public_test_cases": json.dumps([{**SUM[0], "input": "[1"}])}, "is no JSON"),
        (LCB_CALL, {"public_test_cases": json.dumps([{**SUM[0], "input": "[" * 100_000}])},
         "is no JSON"),
        (MATH, {"solution": "So it is."}, "ends without an answer in"),
        (MATH, {"answer": " "}, "'answer' is empty"),
    ],
    ids=lambda value: str(value)[:200],
)  # fmt: skip
def test_a_malformed_row_is_named(
    tmp_path: Path, row: dict[str, Any], change: dict[str, Any], text: str
):
    path = write_rows(tmp_path / "rows.jsonl", row, {**row, **change})
    with pytest.raises(UserError, match="rows.jsonl line 2") as error:
        load_problems(path)
    assert text in str(error.value)
    assert len(load_problems(path, on_bad_row="skip")) == 1


PUBLISHED = {"train": (601, 974), "validation": (511, 600), "test": (11, 510), "prompt": (1, 10)}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("mbpp.jsonl", (374, 90, 500, 10)), ("sanitized-mbpp.json", (120, 43, 257, 7))],
)
def test_mbpps_files_have_their_published_splits(shared_data: Path, name: str, sizes):
    path, seen = shared_data / "mbpp" / name, set[int]()
    for (split, (first, last)), size in zip(PUBLISHED.items(), sizes, strict=True):
        numbers = {problem.meta["task_id"] for problem in load_problems(path, split=split)}
        assert len(numbers) == size and not numbers & seen
        assert first <= min(numbers) <= max(numbers) <= last
        seen |= numbers
    assert has_row_splits(path)
    for other in ("humaneval/HumanEval.jsonl.gz", "math"):
        assert not has_row_splits(shared_data / other)


def test_short_names_are_hub_names_with_their_config_and_splits(monkeypatch: pytest.MonkeyPatch):
    requests: list[tuple[Any, ...]] = []

    def read_hub(*words: Any) -> Any:
        requests.append(words)
        return iter([rows_module.Row("row 0", rows[formats.get(words[0], "gsm8k")])])

    gsm8k = {"question": "1+1?", "answer": "#### 2"}
    choice = {"Question": "1+1?", "Correct Answer": "2"}
    choice |= {f"Incorrect Answer {i}": f"{i + 2}" for i in (1, 2, 3)}
    instruction = {"prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    rows = {"gsm8k": gsm8k, "math": MATH, "mbpp": MBPP, "humaneval": HUMANEVAL}
    rows |= {"aime": {"problem": "p", "answer": "7"}}
    rows |= {"multiple_choice": choice, "ifeval": instruction}
    formats = {entry.hub: entry.format for entry in DATASET_REGISTRY.values()}
    monkeypatch.setattr("rl.data.problem_loader.read_hub", read_hub)
    for name, result in DATASET_REGISTRY.items():
        for split in result.splits:
            load_problems(name, split=split)
            assert requests.pop() == (result.hub, result.config, result.splits[split])
        assert find_default_reward(name) == find_default_reward(result.hub) == result.reward
        resolve_reward(result.reward)
    assert load_problems("openai/gsm8k", split="test")[0].tag == "gsm8k"
    load_problems("openai/gsm8k", config="socratic")
    load_problems("someone/things", config="small")
    assert requests == [
        ("openai/gsm8k", "main", "test"),
        ("openai/gsm8k", "socratic", "train"),
        ("someone/things", "small", "train"),
    ]


@pytest.mark.parametrize(
    ("name", "split", "says"),
    [
        ("humaneval", "train", "humaneval has no split 'train', only test: it is there to evaluate "
         "with; train on mbpp"),
        ("livecodebench", "test", "livecodebench is not read from the hub: download test.jsonl"),
        ("humanevall", "train", "no data source is named 'humanevall': did you mean 'humaneval'"),
    ],
)  # fmt: skip
def test_a_short_name_that_has_no_such_rows_is_refused(name: str, split: str, says: str):
    with pytest.raises(UserError, match=says):
        load_problems(name, split=split)


# ----------------------------------------------------------------------------------- generated ones


@pytest.mark.parametrize("make", [countdown, oneliners])
def test_generated_splits_share_nothing_and_are_always_the_same(make: Callable[..., ProblemSet]):
    options = {"size": "400"} if make is countdown else {}
    train, test = make("train", options), make("test", options)
    requests = [{str(problem.messages) for problem in part} for part in (train, test)]
    assert requests[0] and requests[1] and not requests[0] & requests[1]
    assert len(requests[0]) == len(train) and len(requests[1]) == len(test)
    assert list(make("train", options)) == list(train)
    if make is countdown:  # the same numbers in another order are the same problem
        first, second = (
            {(tuple(sorted(p.meta["numbers"])), p.meta["target"]) for p in part}
            for part in (train, test)
        )
        assert not first & second and len(test) == 40


def get_rows(problems: ProblemSet) -> list[str]:
    """Return the digits that are to be sorted."""
    return [text.removesuffix("=") for text in get_contents(problems)]


def test_sorting_holds_out_digits_in_every_order_and_shuffles_without_a_preference():
    train, test = load_problems("sorting:noise=1"), load_problems("sorting", split="test")
    rows = [set(get_rows(part)) for part in (train, test)]
    assert len(rows[0]) == len(train) == 10_000 and len(rows[1]) == len(test) == 1_000
    bags = [{tuple(sorted(row)) for row in part} for part in rows]
    assert bags[0] and bags[1] and not bags[0] & bags[1]
    for problem, row in zip(test, get_rows(test), strict=True):
        assert problem.meta["answer"] == problem.response == "".join(sorted(row))
    for index, problem in enumerate(train):
        assert sorted(str(problem.response)) == sorted(problem.meta["answer"])
        assert train.at(index, 0) == problem
    assert sum(train.at(i, 0).response != train.at(i, 1).response for i in range(100)) > 90
    # Five different digits have 120 orders: 1/120 of the answers are ascending, 1/120 descending.
    different = [i for i in range(10_000) if len(set(train[i].meta["answer"])) == 5]
    orders = [
        (str(train.at(i, epoch).response), train[i].meta["answer"])
        for i in different
        for epoch in range(4)
    ]
    for step in (1, -1):
        share = sum(order == answer[::step] for order, answer in orders) / len(orders)
        assert abs(share - 1 / 120) < 4 * (1 / 120 / len(orders)) ** 0.5
    late = load_problems("sorting:noise=1,from=2")
    assert late.at(5, 1).response == late.at(5, 1).meta["answer"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("sorting:noise=2", "sorting takes the options"),
        ("sorting:digits=1", "got 'digits=1'"),
        ("sorting:order=up", "got 'order=up'"),
        ("sorting:digits=2", "fewer than 10000 rows exist"),
        ("sorting:digits=²", "got 'digits=²'"),
        ("sorting:size=1²", "got 'size=1²'"),
        ("oneliners:noise=2", "oneliners takes the options"),
        ("oneliners:loud=1", "oneliners takes the options"),
        ("countdown:numbers=1", "countdown takes the options"),
        ("countdown:numbers=²", "countdown takes the options"),
    ],
)
def test_generated_sets_check_their_options(source: str, message: str):
    with pytest.raises(UserError, match=message):
        load_problems(source)


def test_a_sorting_size_that_no_split_has_is_refused_before_any_row_is_drawn(monkeypatch):
    """The largest accepted size yields every row of the split."""
    every = {f"{row:03d}" for row in range(1000)}
    held_out = {row for row in every if sorting_is_test(row)}
    for split, rows, size in (
        ("train", every - held_out, len(every - held_out)),
        ("test", held_out, 10 * len(held_out)),
    ):
        assert set(get_rows(sorting(split, {"digits": "3", "size": str(size)}))) == rows
        with monkeypatch.context() as patch:
            patch.setattr(random.Random, "choices", None)
            with pytest.raises(UserError, match=f"fewer than {len(rows) + 1} .*: {len(rows)};"):
                sorting(split, {"digits": "3", "size": str(size + 1)})


def test_countdowns_solutions_are_right_by_pythons_own_arithmetic():
    reward = resolve_reward("countdown")
    for problem in countdown("test", {"numbers": "5", "size": "1000"}):
        text = str(problem.response)
        expression = text.removeprefix("\\boxed{").removesuffix("}")
        assert eval(expression) == problem.meta["target"]  # generated here: digits, signs
        assert reward("", text, problem.meta) == 1.0
        # with different numbers
        assert reward("", f"\\boxed{{({expression})*1000/1000}}", problem.meta) == 0


@pytest.mark.parametrize(
    ("response", "correct", "has_format"),
    [
        (r"\boxed{(2+3)*4}", 1, 1), (r"\boxed{(2+3) \times 4 = 20}", 1, 1),
        ("<answer>4*(3+2)</answer>", 1, 1), ("#### 4*3+2*4", 0, 1),  # 20, with an extra 4
        (r"\boxed{20}", 0, 1), (r"\boxed{2+3}", 0, 1), (r"\boxed{4*5}", 0, 1), ("(2+3)*4", 0, 0),
        (r"\boxed{4/(2-2)}", 0, 0), (r"\boxed{2**3**4**99}", 0, 0), (r"\boxed{}", 0, 0),
        (r"\boxed{__import__('os').getpid()}", 0, 0),
        (r"\boxed{" + "(" * 150 + "2" + ")" * 49 + "}", 0, 0),
        (r"\boxed{(2+3)*4.}", 1, 1), (r"\boxed{$(2+3)*4$}", 1, 1), ("#### [2+3]*4.", 1, 1),
        (r"\boxed{4 \div \frac{2}{3} \cdot 20}", 0, 1), (r"\boxed{\frac{4}{3-2}}", 0, 1),
        ("<answer>(2+3)*4 = 21</answer>", 0, 1), ("<answer>(2+3)*4 = 20</answer>", 1, 1),
    ],
)  # fmt: skip
def test_countdown_by_hand(response: str, correct: int, has_format: int):
    meta = {"numbers": [2, 3, 4], "target": 20}
    result = resolve_reward("countdown").evaluate("", response, meta)
    assert result.metrics == {"correct": correct, "format": has_format}
    assert result.reward == pytest.approx(correct + 0.1 * (has_format - 1))


def test_what_countdown_evaluates_is_exact():
    assert evaluate_arithmetic("1/3+1/3+1/3") == (1, [1, 3, 1, 3, 1, 3])
    assert evaluate_arithmetic("-(2-5)*2") == (6, [2, 5, 2])
    assert evaluate_arithmetic(r"\frac{12}{4}+4") == (7, [12, 4, 4])


def test_one_liners_do_what_their_tests_say():
    for problem in oneliners("test"):
        scope: dict[str, Any] = {}
        exec(str(problem.response), scope)  # generated by this project
        for arguments, expected in problem.meta["tests"]["cases"]:
            assert scope["f"](*arguments) == expected, problem
    noisy = oneliners("train", {"noise": "1", "from": "2"})
    assert noisy.at(5, 1).response == noisy.at(5).response
    assert sum(noisy.at(i, 2).response != noisy.at(i).response for i in range(400)) > 200
    assert noisy.at(5, 2).meta == noisy.at(5).meta


# -------------------------------------------------------------------------------- what splits share


def make_problems(*texts: str) -> ProblemSet:
    messages = [({"role": "user", "content": text},) for text in texts]
    return ProblemSet([Problem(asked, {}, None, "t", i) for i, asked in enumerate(messages)])


def by_brute_force(train: ProblemSet, test: ProblemSet) -> set[int]:
    """Return held-out problems that share 13 consecutive words with a training problem, by
    comparing all pairs of runs.
    """

    def runs(text: str) -> list[list[str]]:
        words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
        return [words[i : i + 13] for i in range(len(words) - 12)]

    trained = [run for text in get_contents(train) for run in runs(text)]
    return {i for i, text in enumerate(get_contents(test)) if any(r in trained for r in runs(text))}


WORDS = [f"w{i}" for i in range(40)]


def test_an_overlap_is_found_by_thirteen_words_and_not_by_twelve():
    train = make_problems(" ".join(WORDS), "another thing altogether", "12+34=")
    for length, shared in ((13, 1), (12, 0)):
        text = "begin " + ", ".join(WORDS[5 : 5 + length]).upper() + "! end"
        test = make_problems(text, "12+35=")
        result = find_contamination(train, test)
        assert len(result.shared) == shared == len(by_brute_force(train, test))
        assert result.held_out == 2 and result.trained == 3
    whole = find_contamination(train, make_problems("1 2+34="))  # the whole text
    assert whole.shared == (("t 0", "t 2"),)
    assert find_contamination(train, make_problems("12-34=")).shared == ()
    said = str(find_contamination(train, make_problems(" ".join(WORDS))))
    assert "1 of 1 held-out problems share 13 words in a row" in said


def test_a_form_of_words_is_no_overlap():
    form = " ".join(WORDS[:20])
    train = make_problems(*(f"problem {i} is this\n\n{form}" for i in range(30)))
    other = make_problems(f"problem 99 is that\n\n{form}", f"problem 7 is this\n\n{form}")
    assert find_contamination(train, other).shared == (("t 1", "t 7"),)


@pytest.mark.slow
def test_the_overlaps_of_published_splits_are_those_of_a_brute_force_search(shared_data: Path):
    train, test = (load_problems(shared_data / "gsm8k", split=split) for split in ("train", "test"))
    shared = find_contamination(train, test).shared
    assert [place for place, _ in shared] == [test[i].place for i in (581, 602, 632)]
    bare = [
        make_problems(*(text.split("\n\nReason step")[0] for text in get_contents(part)))
        for part in (train, test)
    ]
    sample = bare[1].subset([581, 602, 632, *range(0, 40)])
    some = bare[0].subset([406, 1314, 20, *range(100, 160)])
    assert by_brute_force(some, sample) == {0, 1, 2}
    assert len(find_contamination(some, sample).shared) == 3
