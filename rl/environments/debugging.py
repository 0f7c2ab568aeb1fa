"""Interactive debugging: a small function with a planted bug, a test that fails, and another try
where the fix is none.
"""

from __future__ import annotations

import ast

from rl.environments.match import Match, Rule, chosen
from rl.environments.programs import sandbox
from rl.environments.rules import bugs
from rl.errors import UserError
from rl.sandbox import Calls, Limits

LIMITS = Limits(wall_s=2.0, cpu_s=2.0, memory_mb=256, processes=8, file_mb=8, total_s=6.0)


class Debugging(Match):
    """Fix a function that a test shows to be wrong. Reward 1 for one that passes all its tests
    within `tries`, else 0.

    levels: kinds of bugs, any of operator, bounds, start, compare. tries: replies; after each that
    fails, a test that it fails is shown. tests: of each function, of which only those that fail are
    ever shown. A reply is the whole function, or lines with their numbers ("2: return a - b").
    sandbox: what it runs in, see rl.sandbox (rlimits is a weak one, for machines that have no
    other).
    """

    names = ("programmer",)
    PLAYERS: dict[str, Rule] = {
        "right": lambda match: bugs.fix_of(match.bug),
        "any_fix": lambda match: bugs.other_fix(match.bug, match.rng),
        "untried": lambda match: bugs.untried_fix(match.bug, match.replies, match.rng),
        "careful": lambda match: bugs.careful_fix(match.bug, match.replies, match.rng),
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
        self.levels = tuple(chosen("levels", level, bugs.LEVELS) for level in levels) or bugs.LEVELS
        if tries < 1 or tests < 1:
            raise UserError(
                f"--environment.tries and --environment.tests are at least 1, got {tries} and {tests}"
            )
        self.tries, self.tests, self.tried, self.malformed = tries, tests, 0, 0

    @property
    def replies(self) -> list[str]:
        """So far."""
        return [text for _, text in self.record]

    def open(self) -> None:
        self.bug = bugs.planted(self.seed, self.levels, self.tests)
        self.tell(
            0,
            f"Fix the bug.\n{self.bug.numbered()}\n{_failed(self.bug.cases[0], f'is {self.bug.got!r}')}",
        )

    def move(self, text: str) -> None:
        self.tried += 1
        source = bugs.patched(self.bug, text)
        self.malformed += source is None
        failed = "That is no fix: reply with the function, or with a line and its number.\n> "
        if source is not None:
            found = first_failure(self.bug, source, self.sandbox)
            if found is None:
                self._settle(solved=True)
                return
            failed = _failed(*found)
        if self.tried >= self.tries:
            self._settle(solved=False)
        else:
            self.tell(0, failed)

    def _settle(self, *, solved: bool) -> None:
        first = float(solved and self.tried == 1)
        self.figures[0] = {
            "correct": float(solved),
            "correct_at_once": first,
            "malformed": self.malformed / self.tried,
        }
        self.end({0: float(solved)})


def _failed(case: bugs.Case, happened: str) -> str:
    return f"{case.call} should be {case.expected!r}, {happened}\n> "


def first_failure(bug: bugs.Bug, source: str, mode: str = "auto") -> tuple[bugs.Case, str] | None:
    """The first test of the bug that the program `source` fails, run in the sandbox, and what
    happened; None where it passes all.
    """
    tests = Calls(bugs.NAME, [(case.arguments, case.expected) for case in bug.cases])
    grade = sandbox(mode).grade(source, tests, limits=LIMITS, early_stop=True)
    for case, passed, reason in zip(bug.cases, grade.passed, grade.reasons, strict=True):
        if not passed:
            kind, _, what = reason.partition(": ")
            return case, f"is {ast.literal_eval(what)[:80]}" if kind == "wrong" and what[
                :1
            ] in "'\"" else f"{kind}: {what[:80]}"
    return None
