"""Plant mutants that operators draw by seed, one at a time in a copy of the tree, and run the quick
tests that execute the mutated line: killed, survived, or out of time.

    make test ARGS="--cov=rl --cov=kernels --cov-context=test"   # needs pytest-cov; into .coverage
    python tools/mutants.py --count 300 --workers 2       # into results/mutants.csv
    python tools/mutants.py --count 20 --only rl/losses   # of files whose path holds this text

Operators: another comparison, arithmetic or boolean operator, a number plus one, the other boolean,
no `not`, `return None`, a call left out, `continue` for `break`. Mutants are drawn uniformly over
all places in `rl` and `kernels`, so that a package has as many as its size. `.coverage` says which
tests execute a line. At most 150 of them run, those that execute little else first. If fewer than
ten do (the code runs when a module is imported, in another process, or in a test of an extra), the
test files that name the module or use most of what it defines run, too. Tests run in a fork of a process that has torch
imported. A row is written after each mutant; a mutant that the table has is not run again. A test
that fails without the mutant, too, has killed nothing ("unknown"). A test that exceeds the time
limit with the mutant and passes without it has killed the mutant.
"""

from __future__ import annotations

import ast
import copy
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
import pytest  # noqa: E402
import transformers  # noqa: E402, F401  # a fork has it imported; it imports torch

from bench.harness import (  # noqa: E402
    DATA,
    REPO,
    RESULTS,
    make_parser,
    read_table,
    show,
    write_table,
)

SECONDS, TESTS, FEW_TESTS, TEST_FILES = 400, 150, 10, 8
MEMORY = 6 << 30  # bytes: a mutant may allocate without end
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


class Coverage:
    """Answer which tests execute a line, from a database of coverage.py with contexts."""

    def __init__(self, path: Path) -> None:
        self.lines: dict[str, dict[str, set[int]]] = {}  # file -> test -> lines of the file
        self.total = Counter[str]()  # test -> lines of all files
        query = "select path, context, numbits from line_bits join file on file.id = file_id"
        for name, context, bits in sqlite3.connect(path).execute(
            f"{query} join context on context.id = context_id"
        ):
            if "::" not in context:
                continue
            parts = Path(name).parts
            start = max(i for i, part in enumerate(parts) if part in ("rl", "kernels"))
            while start and parts[start - 1] in ("rl", "kernels"):
                start -= 1
            test = context.rsplit("|", 1)[0]
            # Bit i of byte j: line 8 j + i was executed.
            lines = {8 * j + i for j, byte in enumerate(bits) for i in range(8) if byte >> i & 1}
            self.total[test] += len(lines)
            self.lines.setdefault("/".join(parts[start:]), {}).setdefault(test, set()).update(lines)

    def find_tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that execute a mutant's line, those that execute little else first."""
        files = self.lines.get(mutant.file, {})
        last = mutant.line + mutant.old.count("\n")
        span = set(range(mutant.line, last + 1))
        tests = [test for test, lines in files.items() if lines & span]
        return sorted(tests, key=lambda test: (-len(files[test]) / self.total[test], test))[:TESTS]


def find_test_files(tree: Path, file: str) -> list[str]:
    """Return the test files that name a module, then those that use most of what it defines."""
    module = file.removesuffix(".py").replace("/", ".")
    package, _, stem = module.rpartition(".")
    names_it = re.compile(rf"\b{module}\b|from {package} import [^\n]*\b{stem}\b")
    body = ast.parse((tree / file).read_bytes()).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    scores = Counter[str]()
    for path in sorted((tree / "tests").rglob("test_*.py")):
        text = path.read_text()
        uses = len(defined & set(re.findall(r"\w+", text)))
        scores[str(path.relative_to(tree))] = uses + 1000 * bool(names_it.search(text))
    return [name for name, score in scores.most_common(TEST_FILES) if score]


class Watcher:
    """Write the test that runs, and the first that fails, to a file, for the parent process."""

    def __init__(self, path: Path, order: Sequence[str]) -> None:
        self.path, self.order = path, {name: index for index, name in enumerate(order)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the chosen tests, and the tests of chosen files, in the order of the choice."""
        last, order = len(self.order), self.order

        def place(item: pytest.Item) -> int:
            return order.get(item.nodeid, order.get(item.nodeid.split("::")[0], last))

        items[:] = sorted((item for item in items if place(item) < last), key=place)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.path.write_text(f"runs {nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.path.write_text(f"failed {report.nodeid}")
            os._exit(1)  # of a fork: the parent process ends what the test started

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.path.write_text(f"failed {report.nodeid}")


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[str, str]:
    """Run the quick ones of these tests in a fork; return (verdict, the first failure, or the test
    that exceeded the time limit).
    """
    status = tree / ".status"
    status.write_text("")
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.chdir(tree)
        # No bytecode: that of a file of the same size and second would be taken for the mutant's.
        sys.dont_write_bytecode = True
        os.environ.update(WHETSTONE_DATA=str(DATA), PYTHONPATH=str(tree))
        os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
        sys.path[0] = str(tree)
        for name in [name for name in sys.modules if name.split(".")[0] in ("rl", "bench")]:
            del sys.modules[name]
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(quiet, descriptor)
        files = dict.fromkeys(test.split("::")[0] for test in tests)
        words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not slow", *files]
        os._exit(int(pytest.main(words, plugins=[Watcher(status, tests)])))
    begin, code = time.monotonic(), None
    while code is None and time.monotonic() - begin < SECONDS:
        done, value = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(value) if done else time.sleep(0.05)
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if code is None:
        os.waitpid(child, 0)
    word, _, test = status.read_text().partition(" ")
    if code is None:
        return "out of time", test
    if code in (0, 5):
        return "survived", ""
    return ("killed", test) if test or code < 0 else ("unknown", "")


def judge(tree: Path, mutant: Mutant, coverage: Coverage | None) -> dict[str, object]:
    """Plant a mutant, run its tests, and return its row."""
    path, begin = tree / mutant.file, time.monotonic()
    tests = coverage.find_tests(mutant) if coverage else []
    if len(tests) < FEW_TESTS:
        tests += find_test_files(tree, mutant.file)
    raw = path.read_bytes()
    path.write_bytes(raw[: mutant.start] + mutant.new.encode() + raw[mutant.end :])
    verdict, test = run_tests(tree, tests) if tests else ("survived", "no test names it")
    path.write_bytes(raw)
    if verdict != "survived" and "::" in test:
        sound = run_tests(tree, [test])[0] == "survived"
        verdict = "killed" if sound else "unknown"
    cells = {"file": mutant.file, "line": mutant.line, "old": mutant.old, "new": mutant.new}
    more = {"tests": len(tests), "seconds": round(time.monotonic() - begin)}
    return {**cells, "verdict": verdict, "by": test, **more}


def judge_all(mutants: Sequence[Mutant], coverage: Coverage | None, rows: object) -> None:
    """Judge mutants in a copy of the tree, and put their rows into a queue, at the end None."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy_tree(Path(folder))
        for mutant in mutants:
            rows.put(judge(Path(folder), mutant, coverage))  # type: ignore[attr-defined]
    rows.put(None)  # type: ignore[attr-defined]


def main() -> None:
    parser = make_parser(__doc__, output=RESULTS / "mutants.csv")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", default="", help="a text in the path of the file")
    parser.add_argument("--coverage", type=Path, default=REPO / ".coverage")
    args = parser.parse_args()
    rows: list[dict[str, object]] = list(read_table(args.output))
    known = {(row["file"], row["line"], row["old"], row["new"]) for row in rows}
    paths = [path for package in ("rl", "kernels") for path in (REPO / package).rglob("*.py")]
    files = sorted(str(p.relative_to(REPO)) for p in paths if not p.name.endswith("_pb2.py"))
    places = [m for file in files if args.only in file for m in list_mutants(REPO, file)]
    drawn = random.Random(args.seed).sample(places, min(args.count, len(places)))
    mutants = [m for m in drawn if (m.file, str(m.line), m.old, m.new) not in known]
    coverage = Coverage(args.coverage) if args.coverage.is_file() else None
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    for index in range(args.workers):
        part = mutants[index :: args.workers]
        context.Process(target=judge_all, args=(part, coverage, queue)).start()
    for _ in range(args.workers):
        for row in iter(queue.get, None):  # a worker ends with None; the order does not matter
            rows.append(row)
            show(row)
            write_table(args.output, rows)
    print(f"of {len(places)} places:", dict(Counter(str(row["verdict"]) for row in rows)))


if __name__ == "__main__":
    main()
