"""Generate small functions with a planted bug, and the calls that expose it. Nothing here runs
code.

A program is a few numbered lines of Python. A fix is the complete function, or a line with its
number ("2: return a + b").
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LEVELS = ("operator", "bounds", "start", "compare")
NAME = "f"


@dataclass(frozen=True, slots=True)
class Case:
    """Hold a call of the function and its expected result."""

    arguments: tuple[Any, ...]
    expected: Any

    @property
    def call(self) -> str:
        """Return the call as source code."""
        return f"{NAME}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True, slots=True)
class Bug:
    """Hold a function with a single wrong line: line number `line` (from 1), which should be
    `fixed`. The first of `cases` fails; it returns `got`.
    """

    lines: tuple[str, ...]
    line: int
    fixed: str
    cases: tuple[Case, ...]
    got: Any
    level: str

    @property
    def source(self) -> str:
        """Return the program with the bug."""
        return "\n".join(self.lines) + "\n"

    @property
    def solution(self) -> str:
        """Return the correct program."""
        return (
            "\n".join([*self.lines[: self.line - 1], self.fixed, *self.lines[self.line :]]) + "\n"
        )

    def numbered(self) -> str:
        """Return the lines of the program with their numbers."""
        return "\n".join(f"{number}: {text}" for number, text in enumerate(self.lines, 1))


# Each function of a level returns: lines, the number of the line with {}, and its correct and its
# wrong replacement.
_OPERATORS = ("+", "-", "*")
_TOTAL = (
    "def f(xs):",
    "    total = {}",
    "    for x in xs:",
    "        total += x",
    "    return total",
)
_COUNT = (
    "def f(n):",
    "    total = 0",
    "    for i in range({}):",
    "        total += i",
    "    return total",
)
_ABOVE = ("def f(xs, k):", "    return len([x for x in xs if x {} k])")


def _operator(draw: random.Random) -> tuple[tuple[str, ...], int, str, str]:
    """Sample a bug of the level "operator"."""
    right, wrong = draw.sample(_OPERATORS, 2)
    return ("def f(a, b):", "    return a {} b"), 2, right, wrong


def _bounds(draw: random.Random) -> tuple[tuple[str, ...], int, str, str]:
    """Sample a bug of the level "bounds"."""
    right, wrong = draw.sample(("n", "n + 1", "1, n", "2, n"), 2)
    if {right, wrong} == {"n", "1, n"}:  # both sums are equal, since 0 adds nothing
        wrong = "n + 1"
    return _COUNT, 3, right, wrong


def _start(draw: random.Random) -> tuple[tuple[str, ...], int, str, str]:
    """Sample a bug of the level "start"."""
    right, wrong = draw.sample(("0", "1", "-1", "len(xs)"), 2)
    return _TOTAL, 2, right, wrong


def _compare(draw: random.Random) -> tuple[tuple[str, ...], int, str, str]:
    """Sample a bug of the level "compare"."""
    right, wrong = draw.sample(("<", ">", "<=", ">=", "=="), 2)
    return _ABOVE, 2, right, wrong


_TEMPLATES = {"operator": _operator, "bounds": _bounds, "start": _start, "compare": _compare}


def _arguments(level: str, draw: random.Random) -> tuple[Any, ...]:
    """Sample arguments for the function of a level."""
    if level == "operator":
        return draw.randint(2, 9), draw.randint(2, 9)
    if level == "bounds":
        return (draw.randint(2, 9),)
    xs = [draw.randint(0, 5) for _ in range(draw.randint(2, 4))]
    return (xs,) if level == "start" else (xs, draw.randint(0, 5))


def _expected(level: str, right: str, arguments: Sequence[Any]) -> Any:
    """Return the result of the correct function, computed here without running its source."""
    if level == "operator":
        a, b = arguments
        return {"+": a + b, "-": a - b, "*": a * b}[right]
    if level == "bounds":
        (n,) = arguments
        return sum(
            {"n": range(n), "n + 1": range(n + 1), "1, n": range(1, n), "2, n": range(2, n)}[right]
        )
    if level == "start":
        (xs,) = arguments
        return {"0": 0, "1": 1, "-1": -1, "len(xs)": len(xs)}[right] + sum(xs)
    xs, k = arguments
    return sum(
        {"<": x < k, ">": x > k, "<=": x <= k, ">=": x >= k, "==": x == k}[right] for x in xs
    )


def planted(seed: int | str, levels: Sequence[str] = ("operator",), cases: int = 4) -> Bug:
    """Return a function with a planted bug and `cases` calls; the first call distinguishes the bug
    from the correct function. The result depends only on the arguments.
    """
    draw = random.Random(f"bug {seed}")
    level = draw.choice(list(levels))
    template, line, right, wrong = _TEMPLATES[level](draw)
    generated: list[Case] = []
    while len(generated) < cases:
        arguments = _arguments(level, draw)
        expected = _expected(level, right, arguments)
        if not generated and expected == _expected(level, wrong, arguments):
            continue
        case = Case(arguments, expected)
        if case not in generated:
            generated.append(case)
    lines = tuple(
        text.format(wrong) if number == line else text for number, text in enumerate(template, 1)
    )
    return Bug(
        lines,
        line,
        template[line - 1].format(right),
        tuple(generated),
        _expected(level, wrong, generated[0].arguments),
        level,
    )


def patched(bug: Bug, reply: str) -> str | None:
    """Return the program that results from a reply: the function that it contains, or the bug's
    program with the lines that it replaces.

    A replaced line keeps the indentation of the old line. Return None if the reply is neither.
    """
    fence = re.search(r"```[a-z]*\n(.*?)```", reply, re.DOTALL)
    text = (fence[1] if fence else reply).strip("\n")
    if re.match(rf"def {NAME}\(", text.lstrip()):
        return text.strip() + "\n"
    lines = list(bug.lines)
    written = [line for line in text.splitlines() if line.strip()]
    for reply_line in written:
        numbered = re.match(r"\s*(\d{1,3})\s*:\s*(\S.*)$", reply_line)
        if numbered is None or not 1 <= int(numbered[1]) <= len(lines):
            return None
        old = lines[int(numbered[1]) - 1]
        lines[int(numbered[1]) - 1] = old[: len(old) - len(old.lstrip())] + numbered[2].rstrip()
    return "\n".join(lines) + "\n" if written else None


def fix_of(bug: Bug) -> str:
    """Return the shortest correct reply: the fixed line with its number."""
    return f"{bug.line}: {bug.fixed.strip()}"


def other_fix(bug: Bug, draw: random.Random) -> str:
    """Return a well-formed reply that replaces the wrong line with a random text of its kind,
    correct or not.
    """
    template = _TEMPLATES[bug.level](draw)
    return f"{bug.line}: {template[0][bug.line - 1].format(template[2]).strip()}"


def untried_fix(bug: Bug, tried: Sequence[str], draw: random.Random) -> str:
    """Return a random reply as `other_fix` does, but neither the unchanged line nor any reply in
    `tried`.

    A player with this rule only needs to remember the fixes that failed.
    """
    failed = {bug.source, *(patched(bug, reply) for reply in tried)}
    while True:
        reply = other_fix(bug, draw)
        if patched(bug, reply) not in failed or fix_of(bug) in tried:
            return reply


def careful_fix(bug: Bug, tried: Sequence[str], draw: random.Random) -> str:
    """Return `untried_fix` with probability 0.8, else `other_fix`."""
    return untried_fix(bug, tried, draw) if draw.random() < 0.8 else other_fix(bug, draw)
