"""Ask questions that a few lines of Python answer, with a Python tool that keeps its state over the
turns of an episode.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from rl.envs.locked_cache import cache_once
from rl.envs.question_env import QuestionEnv, find_last_number
from rl.envs.tools import Tool
from rl.sandbox import PythonSession, Sandbox, SandboxLimits
from rl.types import Message


@cache_once
def get_sandbox(mode: str) -> Sandbox:
    """Return the sandbox of a mode, shared by all episodes of this process and made on first use.
    Raises UserError if this host does not support the mode.
    """
    made = Sandbox(mode)
    atexit.register(made.close)
    return made


@dataclass
class Python(QuestionEnv):
    """Ask for a sum over numbers that a line of Python computes. The tool `python` runs code in a
    sandbox.
    """

    largest: int = 100
    """Largest number in the questions."""
    seconds: float = 6.0
    """Time limit of a call in seconds."""
    sandbox: str = "auto"
    """Isolation of the code: see rl.sandbox. rlimits is weak, for machines that support no other.
    """
    grader: str | None = None
    """Use the rows of --dataset, and score answers with this reward (gsm8k, ...)."""

    def __post_init__(self) -> None:
        if self.largest < 2 or not 0 < self.seconds <= 3600:
            raise ValueError(
                f"largest must be at least 2 and seconds in (0, 3600], got {self.largest} and"
                f" {self.seconds}"
            )
        self._session: PythonSession | None = None
        self._lock = threading.Lock()
        self.tools = (Tool(self.python, seconds=self.seconds + 15),)

    def start(self) -> Sequence[Message]:
        # A missing sandbox raises here, before any training, instead of in each call of the model.
        """Check that the sandbox exists, then return the question."""
        get_sandbox(self.sandbox)
        return super().start()

    def make_question(self) -> tuple[str, str]:
        """Return a random question about a sum, and its answer."""
        a, b = sorted(self.rng.randrange(1, self.largest + 1) for _ in range(2))
        divisor, power = self.rng.randrange(2, 10), self.rng.randrange(1, 4)
        kind = {1: "numbers", 2: "squares of the numbers", 3: "cubes of the numbers"}[power]
        right = sum(n**power for n in range(a, b + 1) if n % divisor == 0)
        return f"What is the sum of the {kind} from {a} to {b} that {divisor} divides?", str(right)

    def python(self, code: str) -> str:
        """Runs Python code and returns what it prints, and the value of its last line. Variables
        are kept for the next call.

        Args:
            code: the code
        """
        with self._lock:  # the calls of an answer run concurrently
            self._session = self._session or get_sandbox(self.sandbox).session(
                limits=SandboxLimits(wall_s=self.seconds, cpu_s=self.seconds)
            )
            turn = self._session.run(code, wall_s=self.seconds)
        ended = (
            f"\n(the interpreter was ended by {turn.ended_by}; variables are lost)"
            if turn.ended_by
            else ""
        )
        return (turn.text + ended).strip() or "(nothing was printed)"

    def extract_answer(self, response: str) -> str | None:
        """Return the last number in an answer."""
        return find_last_number(response)

    def close(self) -> None:
        """Close the interpreter."""
        if self._session is not None:
            self._session.close()
