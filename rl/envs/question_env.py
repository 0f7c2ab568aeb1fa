"""Define environments with a question and tools: the question of a row, and the score of its
answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl.envs.answer_score import grade_answer
from rl.envs.environment import Environment, TurnResult
from rl.envs.problem_env import last_user_text
from rl.types import Message


class QuestionEnv(Environment):
    """Ask a question and score the answer that follows any number of tool calls. The question comes
    from a row of --dataset if `grader` is set, else from `make_question`.
    """

    grader: str | None = None

    @property
    def needs_rows(self) -> bool:  # type: ignore[override]
        """Return True if questions come from a data set."""
        return self.grader is not None

    def make_question(self) -> tuple[str, str]:
        """Return (question, correct answer) for this episode's seed. Raises NotImplementedError if
        the class makes no questions.
        """
        raise NotImplementedError(
            f"{type(self).__name__} generates no questions: set grader, and name a --dataset"
        )

    def introduction(self) -> str:
        """Return the system prompt that precedes the question; "" for none."""
        return ""

    def start(self) -> Sequence[Message]:
        """Return the question, preceded by the introduction as a system message if the prompt has
        none.
        """
        introduction = self.introduction()
        system = [{"role": "system", "content": introduction}] if introduction else []
        if self.grader is not None:
            messages = [dict(message) for message in self.row["messages"]]
            self.question = last_user_text(messages)
            self.expected_answer = str(self.row.get("answer", ""))
            return (
                messages
                if messages[0]["role"] == "system" or not introduction
                else [*system, *messages]
            )
        self.question, self.expected_answer = self.make_question()
        return [*system, {"role": "user", "content": self.question}]

    def step(self, answer: Message) -> TurnResult:
        """Return the score of the final answer as a finished TurnResult."""
        reward, metrics = self.score(str(answer["content"]))
        used = float(any(call.error is None for call in self.calls))
        return TurnResult(
            reward=reward,
            done=True,
            metrics={**metrics, "used_tool": used},
            logs={"right answer": self.expected_answer},
        )

    def score(self, response: str) -> tuple[float, Mapping[str, float]]:
        """Return the reward of an answer, and metrics.

        Without a grader the reward is 1 if the answer's last number (or word) is correct, else 0.
        """
        if self.grader is None:
            correct = float(self.extract_answer(response) == self.expected_answer)
            return correct, {"correct": correct}
        return grade_answer(self.grader, self.question, response, self.row)

    def extract_answer(self, response: str) -> Any:
        """Extract the value of an answer that is compared with the correct answer."""
        return response.strip()


def find_last_number(response: str) -> str | None:
    """Return the last number in an answer, a whole number without decimals: 56 for 56.0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", response.replace(",", ""))
    return re.sub(r"\.0+$", "", numbers[-1]) if numbers else None
