"""Plant mutants that operators draw by seed, one at a time in a copy of the tree, and run the quick
tests of the mutated module: killed, survived, or out of time.

    python bench/mutants.py --count 300                   # into results/mutants.csv
    python bench/mutants.py --count 20 --only rl/losses   # of files whose path holds this text

Operators: another comparison, arithmetic or boolean operator, a number plus one, the other boolean,
no `not`, `return None`, a call left out, `continue` for `break`. Mutants are drawn uniformly over
all places in `rl` and `kernels`, so that a package has as many as its size. The tests of a module
are the files of tests/ that name it or use most of what it defines. A row is written after each
mutant; a mutant that the table has is not run again. A test that fails without the mutant, too, has
killed nothing ("unknown").
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import REPO, RESULTS, read_table, show, write_table  # noqa: E402

SECONDS, TEST_FILES = 600, 8
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div, ast.Mod: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
SKIPPED = (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """Hold a replacement of a node's text. `start`, `end`: byte offsets in the file."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str


def mutate(node: ast.AST) -> ast.AST | None:
    """Return the mutated copy of a node, None if no operator applies."""
    other = copy.deepcopy(node)
    match other:
        case ast.Compare(ops=[op]) if type(op) in SWAPS:
            other.ops = [SWAPS[type(op)]()]
        case ast.BinOp() | ast.BoolOp() if type(other.op) in SWAPS:
            other.op = SWAPS[type(other.op)]()
        case ast.UnaryOp(op=ast.Not()):
            return other.operand
        case ast.Constant(value=bool()):
            other.value = not other.value
        case ast.Constant(value=int() | float()):
            other.value += 1
        case ast.Return(value=ast.expr()) if not isinstance(other.value, ast.Constant):
            other.value = None
        case ast.Expr(value=ast.Call()):
            return ast.Pass()
        case ast.Break():
            return ast.Continue()
        case _:
            return None
    return other


def walk_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below a node, without annotations, messages of errors and imports."""
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, SKIPPED):
                if name not in ("annotation", "returns", "decorator_list"):
                    yield child
                    yield from walk_nodes(child)


def list_mutants(tree: Path, file: str) -> list[Mutant]:
    raw = (tree / file).read_bytes()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants = []
    for node in walk_nodes(ast.parse(raw)):
        other = mutate(node)
        if other is None:
            continue
        start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        new = ast.unparse(other)
        new = f"({new})" if isinstance(node, ast.expr) else new
        mutants.append(Mutant(file, node.lineno, start, end, raw[start:end].decode(), new))  # type: ignore[attr-defined]
    return mutants


def copy_tree(folder: Path) -> None:
    """Copy the files that git lists, with uncommitted changes."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in names.splitlines():
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)


def find_tests(tree: Path, file: str) -> list[str]:
    """Return the test files that name a module, then those that use most of what it defines."""
    module = file.removesuffix(".py").replace("/", ".")
    body = ast.parse((tree / file).read_bytes()).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    scores = Counter[str]()
    for path in sorted((tree / "tests").rglob("test_*.py")):
        text = path.read_text()
        uses = len(defined & set(re.findall(r"\w+", text)))
        scores[str(path.relative_to(tree))] = uses + 1000 * bool(re.search(rf"\b{module}\b", text))
    return [name for name, score in scores.most_common(TEST_FILES) if score]


def run_tests(tree: Path, tests: list[str]) -> tuple[str, str]:
    """Run the quick part of these tests; return (verdict, the first failure)."""
    words = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--no-header", *tests]
    data = os.environ.get("WHETSTONE_DATA", str(REPO.parent / "shared" / "data"))
    # No bytecode: that of a file of the same size and second would be taken for the mutant's.
    more = {"WHETSTONE_DATA": data, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = ["timeout", "--signal=KILL", str(SECONDS), sys.executable, "-m", "pytest", *words]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, **more}, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    first = lines[0].split(" - ")[0].split(" ", 1)[1] if lines else ""
    if done.returncode in (137, -9):
        return "out of time", ""
    return ("survived" if done.returncode in (0, 5) else "killed"), first


def judge(tree: Path, mutant: Mutant, sound: dict[str, bool]) -> dict[str, object]:
    """Plant a mutant, run its tests, and return its row. `sound`: whether a test passes without a
    mutant.
    """
    path, begin = tree / mutant.file, time.monotonic()
    raw, tests = path.read_bytes(), find_tests(tree, mutant.file)
    path.write_bytes(raw[: mutant.start] + mutant.new.encode() + raw[mutant.end :])
    verdict, failure = run_tests(tree, tests) if tests else ("survived", "no test names it")
    path.write_bytes(raw)
    if verdict == "killed" and "::" in failure:
        if failure not in sound:
            sound[failure] = run_tests(tree, [failure])[0] == "survived"
        verdict = verdict if sound[failure] else "unknown"
    cells = {"file": mutant.file, "line": mutant.line, "old": mutant.old, "new": mutant.new}
    return {**cells, "verdict": verdict, "by": failure, "seconds": round(time.monotonic() - begin)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a text in the path of the file")
    parser.add_argument("--results", type=Path, default=RESULTS / "mutants.csv")
    args = parser.parse_args()
    rows: list[dict[str, object]] = list(read_table(args.results))
    known = {(row["file"], str(row["line"]), row["old"], row["new"]) for row in rows}
    sound: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        files = sorted(
            str(path.relative_to(tree))
            for package in ("rl", "kernels")
            for path in (tree / package).rglob("*.py")
            if not path.name.endswith("_pb2.py") and args.only in str(path.relative_to(tree))
        )
        mutants = [mutant for file in files for mutant in list_mutants(tree, file)]
        for mutant in random.Random(args.seed).sample(mutants, min(args.count, len(mutants))):
            if (mutant.file, str(mutant.line), mutant.old, mutant.new) in known:
                continue
            rows.append(judge(tree, mutant, sound))
            show(rows[-1])
            write_table(args.results, rows)
    print(f"of {len(mutants)} places:", dict(Counter(str(row["verdict"]) for row in rows)))


if __name__ == "__main__":
    main()
