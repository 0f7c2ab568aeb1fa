"""Define the inputs and outputs of a sandbox: kinds of tests, limits, outcomes of runs and tests.

Expected values of tests stay with the comparer: a candidate receives only the inputs.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.errors import UserError
from rl.sandbox.compare_values import COMPARERS
from rl.sandbox.inside.value_display import show

Compare = str | Callable[[Any, Any], bool]
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Asserts:
    """Test by Python statements that raise if the program is wrong (MBPP's asserts, HumanEval's
    `check(candidate)`), a test each.

    The statements run in a separate process in which the program's names are references: a call is
    forwarded to the candidate, plain data comes back. `setup` runs once before them. `entry_point`:
    the name under test, which refers to the program even if Python or the setup defines the same
    name; a text that only defines `check` is called with it.
    """

    setup: str
    asserts: Sequence[str]
    entry_point: str | None = None

    def list_entry_points(self) -> list[str]:
        """Return the names that always refer to the program.

        They are `entry_point` if set, else the called names that are not built-in, else the first
        called name. Raises UserError if a test is not valid Python.
        """
        if self.entry_point is not None:
            return [self.entry_point]
        called: list[str] = []
        for text in self.asserts:
            try:
                tree = ast.parse(text)
            except (SyntaxError, ValueError) as error:
                raise UserError(f"a test is not valid Python: {text[:120]!r} ({error})") from error
            called += [
                n.func.id
                for n in ast.walk(tree)
                if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
            ]
        others = [name for name in called if not hasattr(builtins, name)]
        return sorted(set(others)) or sorted(set(called[:1]))


@dataclass(frozen=True)
class StdinStdoutTests:
    """Test programs that read stdin and write stdout, by (input, expected output) for each test.

    `compare`: a name in rl.sandbox.COMPARERS, or a function of (printed, expected), which is called
    outside the sandbox.
    """

    cases: Sequence[tuple[str, str]]
    compare: Compare = "tokens"
    language: str = "python"

    def __post_init__(self) -> None:
        """Raise UserError for an unknown comparer, or for a case that is not two texts."""
        _check_comparer(self.compare)
        for case in self.cases:
            if not all(isinstance(text, str) for text in case):
                raise UserError(f"a case is a pair of texts (stdin, stdout), got {show(case)}")


@dataclass(frozen=True)
class Calls:
    """Test by calls of `function`, with (arguments, expected value) for each test.

    `function`: "name" or "Class.method"; a method of a class Solution by its plain name. Arguments
    are a list or tuple, or a mapping for keyword arguments. Values are plain data.
    """

    function: str
    cases: Sequence[tuple[Sequence[Any] | Mapping[str, Any], Any]]
    compare: Compare = "exact"

    def __post_init__(self) -> None:
        """Raise UserError for an unknown comparer, or for arguments that are not a collection."""
        _check_comparer(self.compare)
        for arguments, _ in self.cases:
            if not isinstance(arguments, list | tuple | Mapping):
                raise UserError(
                    f"the arguments of {self.function} are a list, a tuple or a mapping, got "
                    f"{show(arguments)} ({type(arguments).__name__}): write [[argument], result]"
                )


@dataclass(frozen=True)
class Pytest:
    """Test by files of pytest, which import the program by `module`.

    They run as Asserts do: in a separate process, in which the module's names are references to the
    candidate's. Each test function of the files gives a verdict.
    """

    files: Mapping[str, str]
    module: str = "solution"


Tests = Asserts | StdinStdoutTests | Calls | Pytest


def _check_comparer(compare: Compare) -> None:
    if isinstance(compare, str) and compare not in COMPARERS:
        raise UserError(
            f"compare={compare!r} is unknown, expected: {', '.join(COMPARERS)}, "
            "or a function of (value, expected)"
        )


def extract_helpers(head: str, entry_point: str) -> str:
    """Return the source of `head` without the function `entry_point`, as a setup for its tests; ""
    if no function or class remains.

    A program that has to repeat the helpers of the head could replace them; in a setup they belong
    to the tests.
    """
    tree = _parse_head(head)
    rest = [node for node in tree.body if getattr(node, "name", None) != entry_point]
    if not any(isinstance(node, _DEFINITIONS) for node in rest):
        return ""
    lines = head.split("\n")
    parts = []
    for node in rest:
        first = min(
            [node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]
        )
        parts.append("\n".join(lines[first - 1 : node.end_lineno]) + "\n")
    return "".join(parts)


def is_python(text: str) -> bool:
    """Return whether a text is a Python program."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _parse_head(head: str) -> ast.Module:
    """Parse `head`, the last function of which may lack a body. Return an empty module if `head` is
    not valid Python.
    """
    for text in (head, f"{head.rstrip()} pass"):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            continue
    return ast.Module(body=[], type_ignores=[])


@dataclass(frozen=True)
class SandboxLimits:
    """Limit a program: a run, a test case, a call, an assert or a turn. Raises UserError for a
    number that is not positive.

    `wall_s`, `cpu_s`: seconds of wall time, and of processor time of all its processes together.
    `memory_mb`: MB of all its processes together, beyond the memory of the interpreter itself.
    `processes`: processes at a time, threads included if the kernel counts them.
    `file_mb`: total size of its /tmp (which is memory), hence also the size of the longest file.
    `files`: number of files that it may create.
    `output_kb`: stdout and stderr together, and a returned value.
    `total_s`: wall time of all tests of a candidate, the time to compile included.
    """

    wall_s: float = 6.0
    cpu_s: float = 5.0
    memory_mb: int = 512
    processes: int = 64
    file_mb: int = 64
    files: int = 1000
    output_kb: int = 1024
    total_s: float = 60.0

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int | float) or not value > 0 or value == float("inf"):
                raise UserError(
                    f"the sandbox limit {name} must be a positive number, got {value!r}"
                )


@dataclass(frozen=True)
class ProgramRun:
    """Describe the end of a program.

    `ended_by`: "" if the program ended by itself, else the limit that ended it (timeout, cpu,
    memory, processes, output), or "lost" if the sandbox itself ended. `returncode`: its exit code,
    None if a signal ended it (`signal`).
    """

    stdout: str
    stderr: str
    returncode: int | None
    signal: int | None
    timed_out: bool
    ended_by: str
    wall_s: float
    cpu_s: float
    memory_mb: float = 0.0

    @property
    def ok(self) -> bool:
        """Return whether the program ended by itself with exit code 0. Its output may still be
        wrong.
        """
        return self.returncode == 0 and not self.ended_by


@dataclass(frozen=True)
class Grade:
    """Hold the verdicts of a candidate's tests.

    `passed`: a verdict for each test, False also for tests not run after an early stop. `reasons`:
    for each test "ok", or a word with details: wrong, error, load, timeout, cpu, memory, processes,
    output, exit, signal, forged, lost, skipped.
    """

    passed: list[bool]
    reasons: list[str]
    wall_s: float
    cached: bool = field(default=False, compare=False)

    @property
    def all(self) -> bool:
        """Return whether every test passed; False without tests."""
        return bool(self.passed) and all(self.passed)

    @property
    def fraction(self) -> float:
        """Return the share of tests that passed; 0 without tests."""
        return sum(self.passed) / len(self.passed) if self.passed else 0.0
