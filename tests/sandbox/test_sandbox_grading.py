"""Test that a program gets the grade it earned, also if it dies midway, replaces helpers of the
tests, or returns almost the right value.
"""

import collections
import json

import pytest
from grading import grade_many
from hostile_grading import DEATHS, FAMILIES, HEADS, REPLACED, STYLES, list_cheating_programs

from rl.data import load_problems
from rl.rewards import resolve_reward
from rl.rewards.code import parse_tests
from rl.sandbox import COMPARERS, Asserts, Calls, Pytest, Sandbox, SandboxLimits, extract_helpers

pytestmark = pytest.mark.usefixtures("bubblewrap")

LIMITS = SandboxLimits(wall_s=2.0, cpu_s=2.0, total_s=20.0, memory_mb=192, output_kb=256)
HONEST = "def f(n):\n    return n * n + 1\n"


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(limits=LIMITS, workers=2) as made:
        yield made


def test_no_program_gets_more_than_it_earns(sandbox):
    programs = list_cheating_programs()
    assert {p.family for p in programs} == set(FAMILIES)
    assert min(collections.Counter(p.family for p in programs).values()) >= 18
    grades = grade_many(sandbox, [(p.text, p.tests) for p in programs], cache=False)
    faults = [
        f"{p.family} {p.name} earns {grade.fraction:g} for {p.earns:g}: {grade.reasons}"
        for p, grade in zip(programs, grades, strict=True)
        if grade.fraction > p.earns or any(reason.startswith("lost") for reason in grade.reasons)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("style", STYLES)
def test_the_tests_that_dying_programs_meet_are_passed_by_an_honest_one(sandbox, style):
    grade = sandbox.grade(HONEST, STYLES[style])
    assert grade.passed == [True] * 10, grade.reasons


def test_a_program_that_dies_in_its_second_test_of_ten_earns_a_tenth(sandbox):
    text = f"def f(n):\n    if n == 0: return 1\n    {DEATHS['os._exit(0)']}\n"
    for style, tests in STYLES.items():
        grade = sandbox.grade(text, tests)
        assert grade.passed == [True] + [False] * 9, (style, grade.reasons)
        if style in ("pytest", "asserts", "calls"):
            early = sandbox.grade(text, tests, early_stop=True)
            assert early.passed == [True] + [False] * 9 and not early.all, (style, early.reasons)
    grade = sandbox.grade(text, STYLES["pytest"])
    assert grade.reasons[1].startswith("exit:")
    assert set(grade.reasons[2:]) == {"exit: not run, the program had ended"}
    early = sandbox.grade(
        "def f(n): return n * n + 1 if n < 3 else 0", STYLES["pytest"], early_stop=True
    )
    assert early.passed == [True] * 3 + [False] * 7 and early.reasons[4:] == ["skipped"] * 6


def test_a_program_that_ends_while_tests_are_collected_fails(sandbox):
    text = (
        "from solution import f\nFIRST = f(0)\ndef test_a(): assert FIRST == 1\ndef test_b(): "
        "assert f(1) == 2\n"
    )
    at_import = Pytest({"test_it.py": text})
    assert sandbox.grade(HONEST, at_import).passed == [True, True]
    for text in (
        "import os\ndef f(n): os._exit(0)",
        "def f(n): raise ValueError",
        "import time\ndef f(n): time.sleep(60)",
    ):
        grade = sandbox.grade(text, at_import, limits=SandboxLimits(wall_s=0.5, total_s=2))
        assert grade.passed and not any(grade.passed), grade.reasons
    parts = {
        "test_a.py": "def test_free(): pass\n",
        "test_b.py": "from solution import missing\ndef test_b(): missing()\n",
    }
    grade = sandbox.grade(HONEST, Pytest(parts))
    assert len(grade.passed) == 2 and not any(grade.passed), grade.reasons


# --------------------------------------------------------------------------------- replaced helpers


ROOT = (
    "def find_zero(xs):\n    low, high = -1.0, 1.0\n    while poly(xs, low) * poly(xs, high) > 0: "
    "low, high = low * 2, high * 2\n"
    "    while high - low > 1e-10:\n        middle = (low + high) / 2\n"
    "        if poly(xs, middle) * poly(xs, low) > 0: low = middle\n        else: high = middle\n "
    "   return low\n"
)
SOLUTIONS = {
    "32": ROOT,
    "38": "def decode_cyclic(s): return encode_cyclic(encode_cyclic(s))\n",
    "50": (
        "def decode_shift(s): return ''.join(chr((ord(ch) - 5 - ord('a')) % 26 + ord('a')) for ch "
        "in s)\n"
    ),
}


@pytest.mark.parametrize("number", HEADS)
def test_honest_programs_pass_where_helpers_are_the_tests_own(sandbox, number):
    head, name, check = HEADS[number]
    helpers = extract_helpers(head, name)
    assert name not in helpers and "def " in helpers
    assert sandbox.grade(
        f"{head}    pass\n{SOLUTIONS[number]}", Asserts(helpers, [check], name)
    ).reasons == ["ok"]


def test_helpers_of_a_head():
    # no helper that a test could call
    assert extract_helpers('import math\n\ndef f(x):\n    """Doc."""\n', "f") == ""
    head = (
        "import math\nN = 3\n\n@staticmethod\ndef g():\n    return 'é'  # kept\n\nasync def "
        "f(x):\n    '''Doc.'''\n"
    )
    head += "\nclass A:\n    pass\n"
    assert extract_helpers(head, "f") == (
        "import math\nN = 3\n@staticmethod\ndef g():\n    return 'é'  # kept\nclass A:\n    pass\n"
    )
    # a head without a body
    assert (
        extract_helpers("def helper(x):\n    return x\n\ndef f(x):\n", "f")
        == "def helper(x):\n    return x\n"
    )
    assert extract_helpers("no Python at all", "f") == ""


@pytest.mark.parametrize("number", HEADS)
def test_a_row_of_humaneval_gives_no_reward_for_a_replaced_helper(tmp_path, number):
    head, name, check = HEADS[number]
    row = {
        "task_id": number,
        "prompt": head,
        "entry_point": name,
        "canonical_solution": "    pass\n",
        "test": check,
    }
    (tmp_path / "human.jsonl").write_text(json.dumps(row) + "\n")
    (problem,) = load_problems(tmp_path / "human.jsonl", split="test")
    reward = resolve_reward("code_tests")
    assert problem.meta["tests"]["setup"] == extract_helpers(head, name) != ""
    rows = [
        problem.meta,
        {"head": head, "tests": {"style": "asserts", "asserts": [check], "entry_point": name}},
    ]
    for meta in rows:
        cheat = f"```python\n{REPLACED[number][0]}\n```"
        assert reward.evaluate("", cheat, meta).reward == 0.0, meta
        assert reward.evaluate("", f"```python\n{SOLUTIONS[number]}\n```", meta).reward == 1.0


# ------------------------------------------------------------------------------------- star imports


# (imports of a test file, its test)
STAR_IMPORTS = [
    ("from solution import *", "def test(): assert f(2) == 5 and g(1) == [1]"),
    ("import math\nfrom solution import *", "def test(): assert math.isclose(f(2), 5)"),
    # a module that the program imports
    ("from solution import *", "def test(): assert math.isclose(f(2), 5)"),
    ("import solution\nfrom solution import *", "def test(): assert solution.f(2) == f(2) == 5"),
    ("if True:\n    from solution import *  # of both",
     "class TestF:\n    def test(self): assert [f(n) for n in (1, 2)] == [2, 5]"),
    ("x = 1; from solution import *; y = 2", "def test(): assert f(x) == 2 and f(y) == 5"),
    ("from solution import \\\n    *",
     "def test(é=1): assert f(é) == 2 and copy([1]) == [1, 1]"),
    ("from solution import *\nfrom solution import f as h",
     "def test(f=None): assert h(2) == 5 and E is not None"),
    ("import pytest\nfrom solution import *", "def test():\n    with pytest.raises(E): g('x')"),
    ("from solution import *",
     "def test():\n    def inner(): return f(2)\n    assert inner() == LIMIT"),
    ("from helper import *\nfrom solution import *", "def test(): assert check(f(2), 5)"),
    ("from again import *", "def test(): assert f(2) == LIMIT == 5"),
    ("if False:\n    from solution import *\nelse:\n    from solution import *",
     "def test(): assert f(2) == 5"),
    ("try:\n    from nowhere import *\nexcept ImportError:\n    from solution import *",
     "def test(): assert f(2) == 5"),
    # a helper from another file
    ("from helper import check\nfrom solution import *", "def test(): assert check(f(2), 5)"),
]  # fmt: skip


def test_everything_may_be_imported_from_the_program(sandbox):
    """The cases are files of one pytest, whose start takes longer than all of them."""
    program = (
        "import math\nLIMIT = 5\nclass E(Exception): pass\n"
        "def f(n): return n * n + 1\ndef g(x):\n    if x == 'x': raise E\n    return [x]\n"
        "def copy(xs): return xs * 2\n"
    )
    wrong = (
        "import math\nLIMIT = 0\nclass E(Exception): pass\ndef f(n): return 1\ndef g(x): pass\n"
        "def check(a, b): return True\n"
    )
    files = {
        "helper.py": "def check(a, b): return a == b\n",
        "again.py": "from solution import *\n",
        "other.py": "from helper import *\ndef unused(): check(1, 2)\n",
    }
    for i, (head, test) in enumerate(STAR_IMPORTS):
        files[f"test_{i:02}.py"] = f"{head}\n\n{test}\n"
    for text, passes in ((program, True), (wrong, False)):
        grade = sandbox.grade(text, Pytest(files), limits=SandboxLimits(wall_s=30, total_s=60))
        results = zip(STAR_IMPORTS, grade.passed, strict=True)
        assert [case for case, passed in results if passed != passes] == [], grade.reasons


# -------------------------------------------------------------------------------------- comparators


def test_an_integer_is_expected_exactly_whatever_its_size(sandbox):
    """Random integers and distances are compared with Python's exact integers, also as printed
    text.
    """
    import random

    chance = random.Random(5)
    for _ in range(2000):
        expected = chance.randrange(-(10 ** chance.randrange(1, 40)), 10 ** chance.randrange(1, 40))
        value = expected + chance.choice([0, 0, 1, -1, chance.randrange(-1000, 1000)])
        for compare in ("floats", "exact", "tokens", "sets"):
            assert COMPARERS[compare]([value], [expected]) is (value == expected)
            assert COMPARERS[compare](str(value), str(expected)) is (value == expected)
    calls = Calls("f", [([10**9 + 5], 10**9 + 6), ([10**9 + 6], 10**9 + 6)], "floats")
    assert sandbox.grade("def f(n): return n", calls).passed == [False, True]


@pytest.mark.parametrize(("outputs", "returned", "passed"), [
    ([[12], [3]], [12, 3], [True, True]),  # each result is wrapped in a list
    ([[12], [3]], [[12], [3]], [True, True]),  # or is a list
    ([[12], [3]], [[[12]], [4]], [False, False]),
    ([12, 3], [12, [3]], [True, False]),
    ([[[1, 2]], [["a"]]], [[1, 2], [["a"]]], [True, True]),
    ([["a", "b"], ["c"]], [["a", "b"], "c"], [True, False]),  # the first has two items
    ([["a", "b"], ["c"]], ["a", ["c"]], [False, True]),
    ([["c"], []], ["c", []], [False, True]),
    ([["c"], "d"], [["c"], "d"], [True, True]),
])  # fmt: skip
def test_results_of_apps_that_are_lists(sandbox, tmp_path, outputs, returned, passed):
    cases = {"fn_name": "f", "inputs": [[0], [1]], "outputs": outputs}
    (tmp_path / "apps.jsonl").write_text(
        json.dumps({"question": "Do.", "input_output": json.dumps(cases)}) + "\n"
    )
    (problem,) = load_problems(tmp_path / "apps.jsonl", split="test")
    tests, _ = parse_tests(problem.meta)
    assert sandbox.grade(f"def f(i): return {returned!r}[i]", tests).passed == passed
