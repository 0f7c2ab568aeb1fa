"""Test published problems: reference solutions pass the tests, and an empty body passes none."""

import json

import pytest
from grading import grade_many

from rl.sandbox import Asserts, Sandbox, SandboxLimits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]

LIMITS = SandboxLimits(wall_s=40, cpu_s=30, total_s=120)  # a problem runs for seconds


def grade_rows(items: list[tuple[dict, str, Asserts]]) -> tuple[list, list]:
    """Grade (row, program, tests); return the ids that pass, and those that do not with reasons."""
    with Sandbox(limits=LIMITS) as sandbox:
        grades = grade_many(sandbox, [(program, tests) for _, program, tests in items])
    named = [(row["task_id"], grade) for (row, *_), grade in zip(items, grades, strict=True)]
    passed = [name for name, grade in named if grade.all]
    return passed, [(name, grade.reasons) for name, grade in named if not grade.all]


@pytest.mark.timeout(400)
def test_mbpp_sanitized(shared_data):
    rows = json.loads((shared_data / "mbpp" / "sanitized-mbpp.json").read_text())
    tests = [Asserts("\n".join(row["test_imports"]), row["test_list"]) for row in rows]
    assert len(rows) == 427
    assert grade_rows([(row, row["code"], t) for row, t in zip(rows, tests, strict=True)])[1] == []


def test_mbpp_solutions_whose_setup_builds_on_their_class(shared_data):
    """Two solutions fail if the setup runs before the solution, since the solution defines `Node`.
    Here a setup may use names of the program.
    """
    with open(shared_data / "mbpp" / "mbpp.jsonl") as file:
        rows = [row for row in map(json.loads, file) if row["task_id"] in (367, 927, 533)]
    tests = [Asserts(row["test_setup_code"], row["test_list"]) for row in rows]
    right = [(row, row["code"], test) for row, test in zip(rows, tests, strict=True)]
    wrong = [(row, text.replace("return", "return not"), test) for row, text, test in right]
    assert len(rows) == 3 and grade_rows(right)[1] == [] and grade_rows(wrong)[0] == []
