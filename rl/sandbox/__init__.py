"""Run untrusted programs in isolation, graded by expected values that only the grader holds."""

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
