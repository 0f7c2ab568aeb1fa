"""Questions that a few lines of Python answer, with a Python at hand that keeps its state over the
turns of an episode.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl.environments.asked import Question
from rl.environments.programs import sandbox
from rl.environments.tools import Tool
from rl.sandbox import Limits, Session
from rl.types import Message


@dataclass
class Python(Question):
    """A sum over numbers is asked for, which a line of Python works out; the tool `python` runs
    code in a sandbox.
    """

    largest: int = 100
    """Numbers go up to this."""
    seconds: float = 6.0
    """That one call may take."""
    sandbox: str = "auto"
    """How code is walled in: see rl.sandbox. rlimits is a weak wall, for machines that have no other."""
    grader: str | None = None
    """Ask the rows of --dataset instead, and score answers with this reward (gsm8k, math_correctness, ...)."""

    def __post_init__(self) -> None:
        if self.largest < 2 or not 0 < self.seconds <= 3600:
            raise ValueError(
                f"largest is at least 2 and seconds lie above 0, got {self.largest} and {self.seconds}"
            )
        self._session: Session | None = None
        self.tools = (Tool(self.python, seconds=self.seconds + 15),)

    def start(self) -> Sequence[Message]:
        # where there is none, that is said before anything is trained, and not to the model at each
        # call
        sandbox(self.sandbox)
        return super().start()

    def ask(self) -> tuple[str, str]:
        a, b = sorted(self.rng.randrange(1, self.largest + 1) for _ in range(2))
        divisor, power = self.rng.randrange(2, 10), self.rng.randrange(1, 4)
        what = {1: "numbers", 2: "squares of the numbers", 3: "cubes of the numbers"}[power]
        right = sum(n**power for n in range(a, b + 1) if n % divisor == 0)
        return f"What is the sum of the {what} from {a} to {b} that {divisor} divides?", str(right)

    def python(self, code: str) -> str:
        """Runs Python code and returns what it prints, and the value of its last line. Variables
        are kept for the next call.

        Args:
            code: the code
        """
        self._session = self._session or sandbox(self.sandbox).session(
            limits=Limits(wall_s=self.seconds, cpu_s=self.seconds)
        )
        turn = self._session.run(code, wall_s=self.seconds)
        ended = (
            f"\n(the interpreter was ended by {turn.ended_by}; variables are lost)"
            if turn.ended_by
            else ""
        )
        return (turn.text + ended).strip() or "(nothing was printed)"

    def found(self, said: str) -> str | None:
        """The last whole number in it."""
        numbers = re.findall(r"-?\d+", said.replace(",", ""))
        return numbers[-1] if numbers else None

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
