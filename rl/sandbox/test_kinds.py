"""Define the kinds of tests. Expected values stay with the comparer: a candidate receives only the
inputs.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.errors import UserError
from rl.sandbox.compare_values import COMPARERS

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
        _check_comparer(self.compare)


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
        _check_comparer(self.compare)


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
