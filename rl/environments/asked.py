"""What environments with one question and tools share: the question of a row, and how its answer is
scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.environments.environment import Environment, Turn
from rl.environments.graders import graded
from rl.environments.problem import prompt_text
from rl.types import Message


class Question(Environment):
    """A question and, after any number of calls of tools, an answer. Of a row of --dataset where
    `grader` is set, else of `ask`.
    """

    grader: str | None = None

    @property
    def needs_rows(self) -> bool:  # type: ignore[override]
        return self.grader is not None

    def ask(self) -> tuple[str, str]:
        """(question, right answer) of this episode's seed."""
        raise NotImplementedError(
            f"{type(self).__name__} makes no questions of its own: set grader, and name a --dataset"
        )

    def introduction(self) -> str:
        """What the model is told before the question; "" for nothing."""
        return ""

    def start(self) -> Sequence[Message]:
        said = self.introduction()
        system = [{"role": "system", "content": said}] if said else []
        if self.grader is not None:
            asked = [dict(message) for message in self.row["messages"]]
            self.question, self.right = prompt_text(asked), str(self.row.get("answer", ""))
            return asked if asked[0]["role"] == "system" or not said else [*system, *asked]
        self.question, self.right = self.ask()
        return [*system, {"role": "user", "content": self.question}]

    def step(self, answer: Message) -> Turn:
        reward, metrics = self.score(str(answer["content"]))
        used = float(any(call.error is None for call in self.calls))
        return Turn(
            reward=reward,
            done=True,
            metrics={**metrics, "used_tool": used},
            logs={"right answer": self.right},
        )

    def score(self, said: str) -> tuple[float, Mapping[str, float]]:
        """The reward of an answer, and metrics: whether its last number (or word) is the right one,
        or what the grader says.
        """
        if self.grader is None:
            correct = float(self.found(said) == self.right)
            return correct, {"correct": correct}
        return graded(self.grader, self.question, said, self.row)

    def found(self, said: str) -> Any:
        """What an answer comes to, to compare with the right one."""
        return said.strip()
