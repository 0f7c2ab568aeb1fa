"""Wrap prompts in a system message, a template or a suffix."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from rl.config import DataSettings
from rl.data.problem_set import ProblemSet
from rl.data.row_readers import Columns
from rl.types import Message, Messages

# columns that would reveal the answer
_ANSWER_COLUMNS = ("answer", "response", "completion", "output", "solution")


@dataclass(frozen=True)
class PromptTemplate:
    """Wrap the prompt of each row.

    system: the first message of conversations without a system message.
    template: replaces the text of the last user message. {prompt} is replaced by that text, {name}
        by the text or number in column `name`. Braces with any other content, or with the name of
        an answer column, stay as written (such as \\boxed{answer}).
    suffix: appended to the last user message.
    """

    system: str | None = None
    template: str | None = None
    suffix: str | None = None
    answer_column: str | None = None

    @classmethod
    def from_settings(cls, data: DataSettings) -> PromptTemplate:
        """Return the template of the data settings."""
        return cls(data.system_prompt, data.prompt_template, data.prompt_suffix, data.answer_column)

    def __call__(self, messages: Messages, columns: Columns) -> tuple[Message, ...]:
        """Return the wrapped messages. A text without a prompt has no messages: returns ()."""
        if not messages:
            return ()
        prompt_messages = list(messages)
        if self.system is not None and prompt_messages[0]["role"] != "system":
            prompt_messages = [{"role": "system", "content": self.system}, *prompt_messages]
        users = [i for i, message in enumerate(prompt_messages) if message["role"] == "user"]
        if users and (self.template is not None or self.suffix is not None):
            message = prompt_messages[users[-1]]
            content = self._apply_to_content(message["content"], columns)
            prompt_messages[users[-1]] = {**message, "content": content}
        return tuple(prompt_messages)

    def apply_to_set(self, problems: ProblemSet) -> ProblemSet:
        """Return a generated set with its prompts wrapped."""
        if self.system is None and self.template is None and self.suffix is None:
            return problems
        return problems.with_rows(
            {
                i: replace(problem, messages=self(problem.messages, problem.meta))
                for i, problem in enumerate(problems._problems)  # without noise
            }
        )

    def _apply_to_content(self, content: Any, columns: Columns) -> Any:
        """Wrap a message's content; in content with images, wrap the last text."""
        if not isinstance(content, list):
            return self._apply_to_text(content, columns)
        texts = [i for i, part in enumerate(content) if part.get("type") == "text"]
        at = texts[-1] if texts else len(content)
        prompt = self._apply_to_text(content[at]["text"] if texts else "", columns)
        return [*content[:at], {"type": "text", "text": prompt}, *content[at + 1 :]]

    def _apply_to_text(self, prompt: str, columns: Columns) -> str:
        """Apply template and suffix to a text."""
        excluded = {*_ANSWER_COLUMNS, self.answer_column}
        substitutions = {
            name: value
            for name, value in columns.items()
            if isinstance(value, (str, int, float)) and name not in excluded
        }
        substitutions["prompt"] = prompt
        if self.template is not None:
            prompt = re.sub(
                r"\{(\w+)\}",
                lambda m: str(substitutions[m[1]]) if m[1] in substitutions else m[0],
                self.template,
            )
        return prompt + (self.suffix or "")
