"""What is put around a prompt: a system message, a template, a suffix."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl.types import Message, Problem

# columns that would give the answer away
_HELD_BACK = ("answer", "response", "completion", "output", "solution")


@dataclass(frozen=True)
class Dress:
    """`system`: put before conversations without a system message of their own. Of the last message
    of the user:

    template   a text in which {prompt} stands for it, and {name} for the text or number in another
    column; what is no column, and
               columns of answers, stay as they are written (such as \\boxed{answer})
    suffix     what follows it
    """

    system: str | None = None
    template: str | None = None
    suffix: str | None = None
    answer_column: str | None = None

    @property
    def changes(self) -> bool:
        return self.system is not None or self.template is not None or self.suffix is not None

    def __call__(
        self, messages: Sequence[Message], columns: Mapping[str, Any]
    ) -> tuple[Message, ...]:
        """The messages as they are asked. A text without a prompt has none, and stays without."""
        if not messages:
            return ()
        found = list(messages)
        if self.system is not None and found[0]["role"] != "system":
            found = [{"role": "system", "content": self.system}, *found]
        at = next((i for i in reversed(range(len(found))) if found[i]["role"] == "user"), None)
        if at is not None and (self.template is not None or self.suffix is not None):
            found[at] = {**found[at], "content": self._dressed(found[at]["content"], columns)}
        return tuple(found)

    def problem(self, problem: Problem) -> Problem:
        """A problem of a generated set."""
        return replace(problem, messages=self(problem.messages, problem.meta))

    def _dressed(self, content: Any, columns: Mapping[str, Any]) -> Any:
        """Of content with images in it the last text is what is asked."""
        if not isinstance(content, list):
            return self._asked(content, columns)
        at = max(
            (i for i, part in enumerate(content) if part.get("type") == "text"),
            default=len(content),
        )
        asked = self._asked(content[at]["text"] if at < len(content) else "", columns)
        return [*content[:at], {"type": "text", "text": asked}, *content[at + 1 :]]

    def _asked(self, prompt: str, columns: Mapping[str, Any]) -> str:
        held_back = {*_HELD_BACK, self.answer_column}
        known = {
            name: value
            for name, value in columns.items()
            if isinstance(value, (str, int, float)) and name not in held_back
        }
        known["prompt"] = prompt
        if self.template is not None:
            prompt = re.sub(
                r"\{(\w+)\}", lambda m: str(known[m[1]]) if m[1] in known else m[0], self.template
            )
        return prompt + (self.suffix or "")
