"""Styles of tests. What is expected stays with the comparer: a candidate sees the inputs alone."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.errors import UserError
from rl.sandbox.compare import COMPARERS

Compare = str | Callable[[Any, Any], bool]
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Asserts:
    """Python statements that raise where the program is wrong (MBPP's asserts, HumanEval's
    `check(candidate)`), a test each.

    They run in a process of their own in which the program's names are references: a call goes over
    to the candidate, plain data comes back. `setup` runs once before them. `entry_point`: the name
    under test, which is then the program's even where Python or the setup has one; a text that only
    defines `check` is called with it.
    """

    setup: str
    asserts: Sequence[str]
    entry_point: str | None = None

    def entries(self) -> list[str]:
        """Names that are the program's in any case: the one given, or called ones that are built-in
        where no other name is called.
        """
        if self.entry_point is not None:
            return [self.entry_point]
        called: list[str] = []
        for text in self.asserts:
            try:
                tree = ast.parse(text)
            except (SyntaxError, ValueError) as error:
                raise UserError(f"a test is no Python: {text[:120]!r} ({error})") from error
            called += [
                n.func.id
                for n in ast.walk(tree)
                if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
            ]
        others = [name for name in called if not hasattr(builtins, name)]
        return sorted(set(others)) or sorted(set(called[:1]))


@dataclass(frozen=True)
class Dialogues:
    """Programs that read stdin and write stdout: (input, expected output) a test each. `compare`: a
    name of rl.sandbox.COMPARERS, or a function of (printed, expected), which is called outside the
    sandbox.
    """

    cases: Sequence[tuple[str, str]]
    compare: Compare = "tokens"
    language: str = "python"

    def __post_init__(self) -> None:
        _known(self.compare)


@dataclass(frozen=True)
class Calls:
    """Calls of `function` ("name", "Class.method"; a method of a class Solution by its own name):
    (arguments, expected value) a test each. Arguments are a list or tuple, or a mapping for named
    ones; values are plain data.
    """

    function: str
    cases: Sequence[tuple[Sequence[Any] | Mapping[str, Any], Any]]
    compare: Compare = "exact"

    def __post_init__(self) -> None:
        _known(self.compare)


@dataclass(frozen=True)
class Pytest:
    """Test files of pytest, which import the program by `module`. They run as Asserts do: in a
    process of their own, in which the module's names are references to the candidate's. One verdict
    for each test function of the files.
    """

    files: Mapping[str, str]
    module: str = "solution"


Tests = Asserts | Dialogues | Calls | Pytest


def _known(compare: Compare) -> None:
    if isinstance(compare, str) and compare not in COMPARERS:
        raise UserError(
            f"compare={compare!r} is unknown: one of {', '.join(COMPARERS)}, or a function of (value, expected)"
        )


def helpers_of(head: str, entry_point: str) -> str:
    """Return the source of `head` without the function `entry_point`, as a setup for its tests; ""
    if no function or class remains.

    A program that has to repeat the head's helpers could replace them: in a setup they are the
    tests' own.
    """
    tree = _parsed(head)
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


def _parsed(head: str) -> ast.Module:
    """`head` as Python; its last function may lack a body. An empty module if it is no Python."""
    for text in (head, f"{head.rstrip()} pass"):
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError):
            continue
    return ast.Module(body=[], type_ignores=[])
