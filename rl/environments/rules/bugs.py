"""Small functions with a planted bug: generated, with the calls that show it. What runs them is
elsewhere.

A program is a few numbered lines of Python; a fix is the whole function, or one line with its
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
    """A call of the function and what it should return."""

    arguments: tuple[Any, ...]
    expected: Any

    @property
    def call(self) -> str:
        return f"{NAME}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True, slots=True)
class Bug:
    """A function with one wrong line. `line` (from 1) is where, `fixed` what it was. `cases`: the
    first one fails, and returns `got`.
    """

    lines: tuple[str, ...]
    line: int
    fixed: str
    cases: tuple[Case, ...]
    got: Any
    level: str

    @property
    def source(self) -> str:
        return "\n".join(self.lines) + "\n"

    @property
    def solution(self) -> str:
        return (
            "\n".join([*self.lines[: self.line - 1], self.fixed, *self.lines[self.line :]]) + "\n"
        )

    def numbered(self) -> str:
        return "\n".join(f"{number}: {text}" for number, text in enumerate(self.lines, 1))


# Each level: lines, the number of that with {}, and what stands there when it is right, and when it
# is wrong.
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
    right, wrong = draw.sample(_OPERATORS, 2)
    return ("def f(a, b):", "    return a {} b"), 2, right, wrong


def _bounds(draw: random.Random) -> tuple[tuple[str, ...], int, str, str]:
    right, wrong = draw.sample(("n", "n + 1", "1, n", "2, n"), 2)
    if {right, wrong} == {"n", "1, n"}:  # the same sums: 0 adds nothing
        wrong = "n + 1"
    return _COUNT, 3, right, wrong


def _start(draw: random.Random) -> tuple[tuple[str, ...], int, str, str]:
    right, wrong = draw.sample(("0", "1", "-1", "len(xs)"), 2)
    return _TOTAL, 2, right, wrong


def _compare(draw: random.Random) -> tuple[tuple[str, ...], int, str, str]:
    right, wrong = draw.sample(("<", ">", "<=", ">=", "=="), 2)
    return _ABOVE, 2, right, wrong


_TEMPLATES = {"operator": _operator, "bounds": _bounds, "start": _start, "compare": _compare}


def _arguments(level: str, draw: random.Random) -> tuple[Any, ...]:
    if level == "operator":
        return draw.randint(2, 9), draw.randint(2, 9)
    if level == "bounds":
        return (draw.randint(2, 9),)
    xs = [draw.randint(0, 5) for _ in range(draw.randint(2, 4))]
    return (xs,) if level == "start" else (xs, draw.randint(0, 5))


def _expected(level: str, right: str, arguments: Sequence[Any]) -> Any:
    """What the right function returns, computed here without running its text."""
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
    """A function with a planted bug and `cases` calls, of which the first tells right and wrong
    apart. A function of `seed`.
    """
    draw = random.Random(f"bug {seed}")
    level = draw.choice(list(levels))
    template, line, right, wrong = _TEMPLATES[level](draw)
    found: list[Case] = []
    while len(found) < cases:
        arguments = _arguments(level, draw)
        expected = _expected(level, right, arguments)
        if not found and expected == _expected(level, wrong, arguments):
            continue
        case = Case(arguments, expected)
        if case not in found:
            found.append(case)
    lines = tuple(
        text.format(wrong) if number == line else text for number, text in enumerate(template, 1)
    )
    return Bug(
        lines,
        line,
        template[line - 1].format(right),
        tuple(found),
        _expected(level, wrong, found[0].arguments),
        level,
    )


def patched(bug: Bug, reply: str) -> str | None:
    """The program that a reply makes of the bug's: the function that it holds, or the program with
    the lines that it replaces.

    A replaced line keeps the old one's indentation. None where the reply is neither.
    """
    fence = re.search(r"```[a-z]*\n(.*?)```", reply, re.DOTALL)
    text = (fence[1] if fence else reply).strip("\n")
    if re.match(rf"def {NAME}\(", text.lstrip()):
        return text.strip() + "\n"
    lines = list(bug.lines)
    written = [line for line in text.splitlines() if line.strip()]
    for one in written:
        match = re.match(r"\s*(\d{1,3})\s*:\s*(\S.*)$", one)
        if match is None or not 1 <= int(match[1]) <= len(lines):
            return None
        old = lines[int(match[1]) - 1]
        lines[int(match[1]) - 1] = old[: len(old) - len(old.lstrip())] + match[2].rstrip()
    return "\n".join(lines) + "\n" if written else None


def fix_of(bug: Bug) -> str:
    """The shortest right reply: the line with its number."""
    return f"{bug.line}: {bug.fixed.strip()}"


def other_fix(bug: Bug, draw: random.Random) -> str:
    """A reply of the right form that changes the wrong line to anything of its kind, right or not."""
    template = _TEMPLATES[bug.level](draw)
    return f"{bug.line}: {template[0][bug.line - 1].format(template[2]).strip()}"


def untried_fix(bug: Bug, tried: Sequence[str], draw: random.Random) -> str:
    """As `other_fix`, but not the line as it stands, nor one of the replies `tried`: it asks for no
    more than remembering what failed.
    """
    failed = {bug.source, *(patched(bug, reply) for reply in tried)}
    while True:
        reply = other_fix(bug, draw)
        if patched(bug, reply) not in failed or fix_of(bug) in tried:
            return reply


def careful_fix(bug: Bug, tried: Sequence[str], draw: random.Random) -> str:
    """`untried_fix` four times of five, else any fix of its kind."""
    return untried_fix(bug, tried, draw) if draw.random() < 0.8 else other_fix(bug, draw)
