"""Programs that nobody vouches for: run behind walls, and graded by what only the grader knows."""

from rl.sandbox.compare import COMPARERS
from rl.sandbox.results import Grade, Limits, Run
from rl.sandbox.sandbox import Sandbox
from rl.sandbox.session import Session, Turn
from rl.sandbox.styles import Asserts, Calls, Dialogues, Pytest, Tests, helpers_of

__all__ = [
    "COMPARERS",
    "Asserts",
    "Calls",
    "Dialogues",
    "Grade",
    "Limits",
    "Pytest",
    "Run",
    "Sandbox",
    "Session",
    "Tests",
    "Turn",
    "helpers_of",
]
