"""Count the wrong programs that the tests of HumanEval and MBPP catch.

A mutant is a reference solution with a changed operator or constant. A mutant that passes gets a
class:
  equal      its values agree with the reference's on inputs that the tests do not have (variations
             of the tests' inputs)
  unreached  the tests never run the changed line
  missed     all others: the tests are too weak

    python bench/sandbox_mutants.py --data DATA --mutants 1200 \\
      --out bench/results/sandbox_mutants.csv
"""

import argparse
import ast
import collections
import copy
import csv
import gzip
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.sandbox import Asserts, Sandbox, SandboxLimits

_CHUNK = 100  # mutants between two progress reports
SWAPS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.USub: ast.UAdd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


def places(tree: ast.AST) -> list[tuple[int, str, int]]:
    """Return (index of the node, kind of change, line number) of every possible mutation."""
    found, docs = [], set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            docs.add(id(body[0].value))
    line = 0
    for number, node in enumerate(ast.walk(tree)):
        line = getattr(node, "lineno", line)
        if (
            isinstance(node, ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.AugAssign)
            and type(node.op) in SWAPS
        ):
            found.append(
                (number, f"{type(node.op).__name__} -> {SWAPS[type(node.op)].__name__}", line)
            )
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
            found.append(
                (
                    number,
                    f"{type(node.ops[0]).__name__} -> {SWAPS[type(node.ops[0])].__name__}",
                    line,
                )
            )
        elif (
            isinstance(node, ast.Constant)
            and id(node) not in docs
            and isinstance(node.value, bool | int | float | str)
        ):
            found.append((number, f"constant {type(node.value).__name__}", line))
    return found


def mutate(tree: ast.AST, place: int) -> str:
    changed = copy.deepcopy(tree)
    for number, node in enumerate(ast.walk(changed)):
        if number != place:
            continue
        if isinstance(node, ast.Compare):
            node.ops[0] = SWAPS[type(node.ops[0])]()
        elif isinstance(node, ast.Constant):
            value = node.value
            node.value = (
                (not value)
                if isinstance(value, bool)
                else value + 1
                if isinstance(value, int | float)
                else f"{value}x"
            )
        else:
            node.op = SWAPS[type(node.op)]()  # type: ignore[attr-defined]
    return ast.unparse(changed)


def problems(data: Path) -> list[tuple[str, str, Asserts]]:
    found = []
    with gzip.open(data / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        for row in map(json.loads, file):
            found.append(
                (
                    row["task_id"],
                    row["prompt"] + row["canonical_solution"],
                    Asserts("", [row["test"]], row["entry_point"]),
                )
            )
    for row in json.loads((data / "mbpp" / "sanitized-mbpp.json").read_text()):
        found.append(
            (
                f"MBPP/{row['task_id']}",
                row["code"],
                Asserts("\n".join(row["test_imports"]), row["test_list"]),
            )
        )
    return found


class Marked(ast.NodeTransformer):
    """Insert a process exit before every statement on `line`, to check if the tests run it."""

    def __init__(self, line: int):
        self.line = line

    def visit(self, node: ast.AST) -> ast.AST:
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                stop = ast.parse("import os; os._exit(9)").body
                new = []
                for statement in block:
                    inner = getattr(statement, "body", None)
                    last = (
                        inner[0].lineno - 1
                        if isinstance(inner, list)
                        else statement.end_lineno or 0
                    )
                    definition = isinstance(statement, ast.FunctionDef | ast.ClassDef)
                    if (
                        getattr(statement, "lineno", 0) <= self.line <= max(last, statement.lineno)
                        and not definition
                    ):
                        new += copy.deepcopy(stop)
                    new.append(self.visit(statement))
                setattr(node, name, new)
        return node


def other_inputs(tests: Asserts, seed: int) -> list[str]:
    """Return calls like those of the tests with other constants, as expressions.

    The caller compares two programs by the values of these calls.
    """
    found, chance = [], random.Random(seed)
    for text in tests.asserts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Call):
                for _ in range(6):
                    call = copy.deepcopy(node.left)
                    for part in ast.walk(call):
                        if isinstance(part, ast.Constant) and type(part.value) is int:
                            part.value = max(0, part.value + chance.choice([-2, -1, 0, 1, 2, 5]))
                        elif (
                            isinstance(part, ast.Constant)
                            and type(part.value) is str
                            and part.value
                        ):
                            part.value = part.value[
                                chance.randrange(len(part.value)) :
                            ] + chance.choice(["", "a", "Z", " ", "1"])
                    found.append(ast.unparse(call))
    return found


def agrees(sandbox: Sandbox, reference: str, mutant: str, tests: Asserts) -> bool:
    """Return whether both programs give the same values for inputs that the tests do not have."""
    calls = other_inputs(tests, 0)
    name = tests.entry_point
    lines = "\n".join(
        f"try: print(repr({call}))\nexcept Exception as e: print(type(e).__name__)"
        for call in calls
    )
    head = f"\ncandidate = {name}\n" if name else "\n"
    limits = SandboxLimits(wall_s=5, cpu_s=5)
    left, right = (
        sandbox.run(code + head + lines, limits=limits).stdout for code in (reference, mutant)
    )
    return left == right


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--mutants", type=int, default=1200)
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    chance, pool = random.Random(0), []
    for name, code, tests in problems(given.data):
        tree = ast.parse(code)
        pool += [(name, code, tests, tree, place) for place in places(tree)]
    chosen = chance.sample(pool, given.mutants)
    mutants = [mutate(tree, place[0]) for _, _, _, tree, place in chosen]
    rows: list[dict[str, object]] = []
    with Sandbox(limits=SandboxLimits(wall_s=4, cpu_s=3, total_s=12)) as sandbox:
        for first in range(0, len(chosen), _CHUNK):
            rows += judged(sandbox, mutants[first : first + _CHUNK], chosen[first : first + _CHUNK])
            report(rows)
            if given.out:
                with open(given.out, "w", newline="") as file:
                    writer = csv.DictWriter(file, rows[0].keys())
                    writer.writeheader()
                    writer.writerows(rows)


def judged(sandbox: Sandbox, mutants: list[str], chosen: list[Any]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    grades = sandbox.grade_many(
        [(text, item[2]) for text, item in zip(mutants, chosen, strict=True)], early_stop=True
    )
    for text, (name, code, tests, tree, place), grade in zip(mutants, chosen, grades, strict=True):
        if not grade.all:
            kind = next(reason for reason in grade.reasons if reason != "ok").split(":")[0]
        else:
            marked = ast.unparse(
                ast.fix_missing_locations(Marked(place[2]).visit(copy.deepcopy(tree)))
            )
            if sandbox.grade(marked, tests, early_stop=True).all:
                kind = "survives: unreached"
            else:
                kind = (
                    "survives: equal" if agrees(sandbox, code, text, tests) else "survives: missed"
                )
        rows.append(
            {
                "task": name,
                "set": name.split("/")[0],
                "change": place[1],
                "line": place[2],
                "outcome": kind,
            }
        )
    return rows


def report(rows: list[dict[str, object]]) -> None:
    for which in ("HumanEval", "MBPP"):
        ours = [row for row in rows if row["set"] == which]
        caught = sum(not str(row["outcome"]).startswith("survives") for row in ours)
        outcomes = dict(collections.Counter(row["outcome"] for row in ours))
        print(
            which,
            len(ours),
            "mutants,",
            f"{caught / max(1, len(ours)):.1%} caught",
            outcomes,
            flush=True,
        )


if __name__ == "__main__":
    main()
