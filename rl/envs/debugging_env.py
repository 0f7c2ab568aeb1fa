"""Play interactive debugging: a small function with a planted bug, a failing test, and further
tries after a wrong fix.
"""

from __future__ import annotations

import ast

from rl.envs.game_env import Game, Rule, check_choice
from rl.envs.rules import bug_generator
from rl.envs.shared_sandbox import get_sandbox
from rl.errors import UserError
from rl.sandbox import Calls, SandboxLimits

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
    PLAYERS: dict[str, Rule] = {
        "right": lambda match: bug_generator.make_fix(match.bug),
        "any_fix": lambda match: bug_generator.sample_fix(match.bug, match.rng),
        "untried": lambda match: bug_generator.sample_untried_fix(
            match.bug, match.replies, match.rng
        ),
        "careful": lambda match: bug_generator.sample_careful_fix(
            match.bug, match.replies, match.rng
        ),
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
        self.levels = (
            tuple(check_choice("levels", level, bug_generator.LEVELS) for level in levels)
            or bug_generator.LEVELS
        )
        if tries < 1 or tests < 1:
            raise UserError(
                f"--environment.tries and --environment.tests must be at least 1, got {tries} and"
                f" {tests}"
            )
        self.tries, self.tests, self.tries_used, self.malformed = tries, tests, 0, 0

    @property
    def replies(self) -> list[str]:
        """Return the replies until now."""
        return [text for _, text in self.record]

    def open(self) -> None:
        """Plant the bug and send the first text."""
        self.bug = bug_generator.plant_bug(self.seed, self.levels, self.tests)
        self.observe(
            0,
            f"Fix the bug.\n{self.bug.numbered_source()}\n"
            f"{_describe_failure(self.bug.cases[0], f'is {self.bug.wrong_result!r}')}",
        )

    def move(self, text: str) -> None:
        """Run a reply."""
        self.tries_used += 1
        source = bug_generator.apply_reply(self.bug, text)
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


def _describe_failure(case: bug_generator.Case, happened: str) -> str:
    """Return the text that shows a failing test to the player."""
    return f"{case.call} should be {case.expected!r}, {happened}\n> "


def find_first_failure(
    bug: bug_generator.Bug, source: str, mode: str = "auto"
) -> tuple[bug_generator.Case, str] | None:
    """Return the first test that the program `source` fails in the sandbox, and the outcome; None
    if it passes all tests.
    """
    tests = Calls(
        bug_generator.FUNCTION_NAME, [(case.arguments, case.expected) for case in bug.cases]
    )
    grade = get_sandbox(mode).grade(source, tests, limits=LIMITS, early_stop=True)
    for case, passed, reason in zip(bug.cases, grade.passed, grade.reasons, strict=True):
        if not passed:
            kind, _, what = reason.partition(": ")
            return case, f"is {ast.literal_eval(what)[:80]}" if kind == "wrong" and what[
                :1
            ] in "'\"" else f"{kind}: {what[:80]}"
    return None
