"""Play interactive debugging: a small function with a planted bug, a failing test, and further
tries after a wrong fix.

    python train.py grpo --environment examples/games/debugging.py:DebuggingEnv

A program is a few numbered lines of Python. A fix is the complete function, or a line with its
number ("2: return a + b"). Fixes run in the sandbox.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl.envs import Game, check_choice
from rl.envs.python_env import get_sandbox
from rl.errors import UserError
from rl.sandbox import Calls, SandboxLimits

# Kinds of bugs, with the number of different calls of their functions (see `_sample_arguments`).
LEVELS = {"operator": 64, "bounds": 8, "start": 1548, "compare": 9288}
FUNCTION_NAME = "f"


@dataclass(frozen=True, slots=True)
class Case:
    """Hold a call of the function and its expected result."""

    arguments: tuple[Any, ...]
    expected: Any

    @property
    def call(self) -> str:
        """Return the call as source code."""
        return f"{FUNCTION_NAME}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True, slots=True)
class Bug:
    """Hold a function with a single wrong line: line number `line` (from 1), which should be
    `fixed_line`. The first of `cases` fails; it returns `wrong_result`.
    """

    lines: tuple[str, ...]
    line: int
    fixed_line: str
    cases: tuple[Case, ...]
    wrong_result: Any
    level: str

    @property
    def source(self) -> str:
        """Return the program with the bug."""
        return "\n".join(self.lines) + "\n"

    @property
    def solution(self) -> str:
        """Return the correct program."""
        return (
            "\n".join([*self.lines[: self.line - 1], self.fixed_line, *self.lines[self.line :]])
            + "\n"
        )

    def numbered_source(self) -> str:
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


def _sample_operator(rng: random.Random) -> tuple[tuple[str, ...], int, str, str]:
    """Sample a bug of the level "operator"."""
    right, wrong = rng.sample(_OPERATORS, 2)
    return ("def f(a, b):", "    return a {} b"), 2, right, wrong


def _sample_bounds(rng: random.Random) -> tuple[tuple[str, ...], int, str, str]:
    """Sample a bug of the level "bounds"."""
    right, wrong = rng.sample(("n", "n + 1", "1, n", "2, n"), 2)
    if {right, wrong} == {"n", "1, n"}:  # both sums are equal, since 0 adds nothing
        wrong = "n + 1"
    return _COUNT, 3, right, wrong


def _sample_start(rng: random.Random) -> tuple[tuple[str, ...], int, str, str]:
    """Sample a bug of the level "start"."""
    right, wrong = rng.sample(("0", "1", "-1", "len(xs)"), 2)
    return _TOTAL, 2, right, wrong


def _sample_compare(rng: random.Random) -> tuple[tuple[str, ...], int, str, str]:
    """Sample a bug of the level "compare"."""
    right, wrong = rng.sample(("<", ">", "<=", ">=", "=="), 2)
    return _ABOVE, 2, right, wrong


_TEMPLATES = {
    "operator": _sample_operator,
    "bounds": _sample_bounds,
    "start": _sample_start,
    "compare": _sample_compare,
}


def _sample_arguments(level: str, rng: random.Random) -> tuple[Any, ...]:
    """Sample arguments for the function of a level."""
    if level == "operator":
        return rng.randint(2, 9), rng.randint(2, 9)
    if level == "bounds":
        return (rng.randint(2, 9),)
    xs = [rng.randint(0, 5) for _ in range(rng.randint(2, 4))]
    return (xs,) if level == "start" else (xs, rng.randint(0, 5))


def _compute_expected(level: str, right: str, arguments: Sequence[Any]) -> Any:
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


def plant_bug(seed: int | str, levels: Sequence[str] = ("operator",), cases: int = 4) -> Bug:
    """Return a function with a planted bug and `cases` calls; the first call distinguishes the bug
    from the correct function. The result depends only on the arguments.
    """
    draw = random.Random(f"bug {seed}")
    level = draw.choice(list(levels))
    template, line, right, wrong = _TEMPLATES[level](draw)
    generated: list[Case] = []
    while len(generated) < cases:
        arguments = _sample_arguments(level, draw)
        expected = _compute_expected(level, right, arguments)
        if not generated and expected == _compute_expected(level, wrong, arguments):
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
        _compute_expected(level, wrong, generated[0].arguments),
        level,
    )


def apply_reply(bug: Bug, reply: str) -> str | None:
    """Return the program that results from a reply: the function that it contains, or the bug's
    program with the lines that it replaces.

    A replaced line keeps the indentation of the old line. Return None if the reply is neither.
    """
    fence = re.search(r"```[a-z]*\n(.*?)```", reply, re.DOTALL)
    text = (fence[1] if fence else reply).strip("\n")
    if re.match(rf"def {FUNCTION_NAME}\(", text.lstrip()):
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


def make_fix(bug: Bug) -> str:
    """Return the shortest correct reply: the fixed line with its number."""
    return f"{bug.line}: {bug.fixed_line.strip()}"


def sample_fix(bug: Bug, rng: random.Random) -> str:
    """Return a well-formed reply that replaces the wrong line with a random text of its kind,
    correct or not.
    """
    template = _TEMPLATES[bug.level](rng)
    return f"{bug.line}: {template[0][bug.line - 1].format(template[2]).strip()}"


def sample_untried_fix(bug: Bug, tried: Sequence[str], rng: random.Random) -> str:
    """Return a random reply as `sample_fix` does, but neither the unchanged line nor any reply in
    `tried`.

    A player with this rule only needs to remember the fixes that failed.
    """
    failed = {bug.source, *(apply_reply(bug, reply) for reply in tried)}
    while True:
        reply = sample_fix(bug, rng)
        if apply_reply(bug, reply) not in failed or make_fix(bug) in tried:
            return reply


def sample_careful_fix(bug: Bug, tried: Sequence[str], rng: random.Random) -> str:
    """Return `sample_untried_fix` with probability 0.8, else `sample_fix`."""
    return sample_untried_fix(bug, tried, rng) if rng.random() < 0.8 else sample_fix(bug, rng)


LIMITS = SandboxLimits(wall_s=2.0, cpu_s=2.0, memory_mb=256, processes=8, file_mb=8, total_s=6.0)


class DebuggingEnv(Game):
    """Fix a function that fails a test. Reward 1 for a fix that passes all tests within `tries`,
    else 0.

    levels: kinds of bugs, any of operator, bounds, start, compare. tries: number of replies; after
    each failing reply, a test that it fails is shown. tests: number of tests of each function; only
    failing tests are ever shown. A reply is the complete function, or lines with their numbers ("2:
    return a - b"). sandbox: isolation of the programs, see rl.sandbox (rlimits is weak isolation,
    for machines that support no other).
    """

    names = ("programmer",)
    PLAYERS = {
        "right": lambda match: make_fix(match.bug),
        "any_fix": lambda match: sample_fix(match.bug, match.rng),
        "untried": lambda match: sample_untried_fix(match.bug, match.replies, match.rng),
        "careful": lambda match: sample_careful_fix(match.bug, match.replies, match.rng),
    }

    def __init__(
        self,
        levels: tuple[str, ...] = ("operator",),
        tries: int = 2,
        tests: int = 4,
        sandbox: str = "auto",
    ):
        super().__init__()
        self.sandbox = sandbox
        self.levels = tuple(check_choice("levels", level, LEVELS) for level in levels or LEVELS)
        most = min(LEVELS[level] for level in self.levels)
        if tries < 1 or not 1 <= tests <= most:
            raise UserError(
                "--environment.tries must be at least 1 and --environment.tests from 1 to"
                f" {most} (the different calls of these levels), got {tries} and {tests}"
            )
        self.tries, self.tests, self.tries_used, self.malformed = tries, tests, 0, 0

    @property
    def replies(self) -> list[str]:
        """Return the replies until now."""
        return [text for _, text in self.record]

    def open(self) -> None:
        """Plant the bug and send the first text."""
        self.bug = plant_bug(self.seed, self.levels, self.tests)
        self.observe(
            0,
            f"Fix the bug.\n{self.bug.numbered_source()}\n"
            f"{_describe_failure(self.bug.cases[0], f'is {self.bug.wrong_result!r}')}",
        )

    def move(self, text: str) -> None:
        """Run a reply."""
        self.tries_used += 1
        source = apply_reply(self.bug, text)
        self.malformed += source is None
        reply = "That is no fix: reply with the function, or with a line and its number.\n> "
        if source is not None:
            failure = find_first_failure(self.bug, source, self.sandbox)
            if failure is None:
                self._finish(solved=True)
                return
            reply = _describe_failure(*failure)
        if self.tries_used >= self.tries:
            self._finish(solved=False)
        else:
            self.observe(0, reply)

    def _finish(self, *, solved: bool) -> None:
        """End the match with its reward and metrics."""
        first = float(solved and self.tries_used == 1)
        self.seat_metrics[0] = {
            "correct": float(solved),
            "correct_at_once": first,
            "malformed": self.malformed / self.tries_used,
        }
        self.end({0: float(solved)})


def _describe_failure(case: Case, happened: str) -> str:
    """Return the text that shows a failing test to the player."""
    return f"{case.call} should be {case.expected!r}, {happened}\n> "


def find_first_failure(bug: Bug, source: str, mode: str = "auto") -> tuple[Case, str] | None:
    """Return the first test that the program `source` fails in the sandbox, and the outcome; None
    if it passes all tests.
    """
    tests = Calls(FUNCTION_NAME, [(case.arguments, case.expected) for case in bug.cases])
    grade = get_sandbox(mode).grade(source, tests, limits=LIMITS, early_stop=True)
    for case, passed, reason in zip(bug.cases, grade.passed, grade.reasons, strict=True):
        if not passed:
            kind, _, what = reason.partition(": ")
            return case, f"is {ast.literal_eval(what)[:80]}" if kind == "wrong" and what[
                :1
            ] in "'\"" else f"{kind}: {what[:80]}"
    return None
