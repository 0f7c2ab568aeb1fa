"""Test published problems: reference solutions pass the tests, and an empty body passes none."""

import gzip
import json

import pytest

from rl.sandbox import Asserts, Sandbox, SandboxLimits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]

LIMITS = SandboxLimits(wall_s=40, cpu_s=30, total_s=120)  # a problem runs for seconds


@pytest.mark.timeout(400)
def test_humaneval(shared_data):
    with gzip.open(shared_data / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    tests = [Asserts("", [row["test"]], row["entry_point"]) for row in rows]
    with Sandbox(limits=LIMITS) as sandbox:
        right = sandbox.grade_many(
            [
                (row["prompt"] + row["canonical_solution"], test)
                for row, test in zip(rows, tests, strict=True)
            ]
        )
        empty = sandbox.grade_many(
            [(row["prompt"] + "    pass\n", test) for row, test in zip(rows, tests, strict=True)]
        )
    assert len(rows) == 164
    assert [
        (row["task_id"], grade.reasons)
        for row, grade in zip(rows, right, strict=True)
        if not grade.all
    ] == []
    assert [row["task_id"] for row, grade in zip(rows, empty, strict=True) if grade.all] == []


@pytest.mark.timeout(400)
def test_mbpp_sanitized(shared_data):
    rows = json.loads((shared_data / "mbpp" / "sanitized-mbpp.json").read_text())
    with Sandbox(limits=LIMITS) as sandbox:
        grades = sandbox.grade_many(
            [
                (row["code"], Asserts("\n".join(row["test_imports"]), row["test_list"]))
                for row in rows
            ]
        )
    assert len(rows) == 427
    assert [
        (row["task_id"], grade.reasons)
        for row, grade in zip(rows, grades, strict=True)
        if not grade.all
    ] == []


def test_mbpp_solutions_whose_setup_builds_on_their_class(shared_data):
    """Two solutions fail if the setup runs before the solution, since the solution defines `Node`.
    Here a setup may use names of the program.
    """
    with open(shared_data / "mbpp" / "mbpp.jsonl") as file:
        rows = [row for row in map(json.loads, file) if row["task_id"] in (367, 927, 533)]
    with Sandbox(limits=LIMITS) as sandbox:
        for row in rows:
            grade = sandbox.grade(row["code"], Asserts(row["test_setup_code"], row["test_list"]))
            assert grade.all, (row["task_id"], grade.reasons)
            assert not sandbox.grade(
                row["code"].replace("return", "return not"),
                Asserts(row["test_setup_code"], row["test_list"]),
            ).all
