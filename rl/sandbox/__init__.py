"""Run untrusted programs in isolation, graded by expected values that only the grader holds."""

from rl.sandbox.compare_values import COMPARERS
from rl.sandbox.python_session import PythonSession, SessionTurn
from rl.sandbox.sandbox import Sandbox
from rl.sandbox.sandbox_types import (
    Asserts,
    Calls,
    Grade,
    ProgramRun,
    Pytest,
    SandboxLimits,
    StdinStdoutTests,
    Tests,
    extract_helpers,
    is_python,
)

__all__ = [
    "COMPARERS",
    "Asserts",
    "Calls",
    "StdinStdoutTests",
    "Grade",
    "SandboxLimits",
    "Pytest",
    "ProgramRun",
    "Sandbox",
    "PythonSession",
    "Tests",
    "SessionTurn",
    "extract_helpers",
    "is_python",
]
