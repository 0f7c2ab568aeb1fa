"""The shapes that rows come in. Each format reads a row's columns to (messages, meta, response) or raises BadRow."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from rl.data.rows import BadRow, NoColumn
from rl.types import Message


class Read(NamedTuple):
    """What a row says: messages to ask, what reaches the reward, the worked answer, the answer it was preferred to."""

    messages: list[Message]
    meta: dict[str, Any]
    response: str | None = None
    rejected: str | None = None


GSM8K_INSTRUCTION = "\n\nReason step by step, then write the final number alone inside \\boxed{}."


class RowFormat(ABC):
    """How to read a row."""

    @abstractmethod
    def read(self, columns: Mapping[str, Any]) -> Read:
        """Raises BadRow for a row that does not have this shape."""


class Columns(RowFormat):
    """Prompt (text, or a list of messages), response and answer in named columns."""

    def __init__(self, prompt: str, response: str | None, answer: str | None):
        self.prompt, self.response, self.answer = prompt, response, answer

    def read(self, columns: Mapping[str, Any]) -> Read:
        prompt = _column(columns, self.prompt)
        if isinstance(prompt, list):
            messages = _messages(prompt, self.prompt)
        else:
            messages = [{"role": "user", "content": _text(columns, self.prompt)}]
        response = None if self.response is None else _text(columns, self.response)
        used = {self.prompt, self.response}
        return Read(messages, _meta(columns, self.answer, used), response)


class Messages(RowFormat):
    """A chat in the column `messages`. Where the assistant speaks last, that message is the response."""

    def __init__(self, answer: str | None):
        self.answer = answer

    def read(self, columns: Mapping[str, Any]) -> Read:
        messages = _messages(_column(columns, "messages"), "messages")
        meta = _meta(columns, self.answer, {"messages"})
        if messages[-1]["role"] != "assistant":
            return Read(messages, meta)
        *asked, last = messages
        if not asked:
            raise BadRow("'messages' holds an assistant's message alone; it answers nothing")
        return Read(asked, meta, _said(last, "messages"))


class Alpaca(RowFormat):
    """instruction, input (may be empty or absent) and output; the input follows the instruction after an empty line."""

    def __init__(self, answer: str | None):
        self.answer = answer

    def read(self, columns: Mapping[str, Any]) -> Read:
        prompt = _instruction(columns)
        meta = _meta(columns, self.answer, {"instruction", "input", "output"})
        return Read([{"role": "user", "content": prompt}], meta, _text(columns, "output"))


class GSM8K(RowFormat):
    """question, and an answer that is worked out and ends in "#### N".

    meta["answer"] is N without commas; the response is the solution without its <<...>> notes, ending in \\boxed{N}.
    """

    def read(self, columns: Mapping[str, Any]) -> Read:
        question, worked = _text(columns, "question"), _text(columns, "answer")
        solution, marker, number = worked.rpartition("####")
        number = number.strip().replace(",", "")
        if not marker or not re.fullmatch(r"[-+]?\d+(\.\d+)?", number):
            raise BadRow(f"'answer' does not end in '#### ' and a number: {worked[-40:]!r}")
        solution = re.sub(r"<<[^<>]*>>", "", solution).strip()
        response = f"{solution}\nThe answer is \\boxed{{{number}}}.".lstrip()
        return Read([{"role": "user", "content": question + GSM8K_INSTRUCTION}], {"answer": number}, response)


class Preferences(RowFormat):
    """Two answers to one prompt, the preferred one and the other, in the usual shapes.

    - texts or one-message lists in `chosen` and `rejected`, the prompt (text or messages) in the column `prompt`, or in
      instruction and input;
    - whole conversations (lists of messages) in `chosen` and `rejected`, alike up to their last message;
    - whole dialogues as text, "\\n\\nHuman: ...\\n\\nAssistant: ...", alike up to their last answer (HH-RLHF);
    - input, output_1, output_2 and label, 1 or 2: the one preferred (LLMBar).
    """

    def __init__(self, prompt: str, chosen: str, rejected: str, answer: str | None):
        self.prompt, self.chosen, self.rejected, self.answer = prompt, chosen, rejected, answer

    def read(self, columns: Mapping[str, Any]) -> Read:
        if self.chosen not in columns and "output_1" in columns:
            return self._labelled(columns)
        meta = _meta(columns, self.answer, {self.prompt, self.chosen, self.rejected, "instruction", "input"})
        pair = [_column(columns, name) for name in (self.chosen, self.rejected)]
        whole = all(isinstance(side, list) and side and _role(side[0]) != "assistant" for side in pair)
        if whole or all(isinstance(side, str) and side.lstrip().startswith("Human:") for side in pair) and self.prompt not in columns:
            sides = [_messages(s, name) if whole else _dialogue(s, name) for s, name in zip(pair, self._names, strict=True)]
            if sides[0][:-1] != sides[1][:-1]:
                raise BadRow(f"{self.chosen!r} and {self.rejected!r} differ before their last message: they answer two prompts")
            asked, answers = sides[0][:-1], [_said(side[-1], name) for side, name in zip(sides, self._names, strict=True)]
        else:
            asked, answers = self._asked(columns), [self._answer_in(columns, name) for name in self._names]
        for answer, name in zip(answers, self._names, strict=True):
            if not answer.strip():
                raise BadRow(f"the answer in {name!r} is empty")
        return Read(asked, meta, *answers)

    @property
    def _names(self) -> tuple[str, str]:
        return self.chosen, self.rejected

    def _asked(self, columns: Mapping[str, Any]) -> list[Message]:
        if self.prompt not in columns and "instruction" in columns:
            return [{"role": "user", "content": _instruction(columns)}]
        prompt = _column(columns, self.prompt)
        return _messages(prompt, self.prompt) if isinstance(prompt, list) else [{"role": "user", "content": _text(columns, self.prompt)}]

    @staticmethod
    def _answer_in(columns: Mapping[str, Any], name: str) -> str:
        value = columns[name]
        if not isinstance(value, list):
            return _text(columns, name)
        if len(value) != 1:
            raise BadRow(f"{name!r} is one message of the assistant, or a whole conversation; it has {len(value)} messages")
        return _said(value[0], name)

    def _labelled(self, columns: Mapping[str, Any]) -> Read:
        label = _column(columns, "label")
        if label not in (1, 2):
            raise BadRow(f"'label' is 1 or 2, the output that is preferred; this is {label!r}")
        meta = _meta(columns, self.answer, {"input", "output_1", "output_2", "label"})
        asked: list[Message] = [{"role": "user", "content": _text(columns, "input")}]
        return Read(asked, meta, _text(columns, f"output_{label}"), _text(columns, f"output_{3 - label}"))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _said(message: Any, name: str) -> str:
    """The text of an assistant's message."""
    if _role(message) != "assistant" or "content" not in message:
        raise BadRow(f"{name!r} ends with a message of the assistant; this ends with {str(message)[:60]!r}")
    extra = sorted(key for key in message if key not in ("role", "content") and message[key])
    if extra or not isinstance(message["content"], str):
        what = ", ".join(extra) or f"content of type {type(message['content']).__name__}"
        raise BadRow(f"the last message is not text alone ({what}); only text can be learnt from here")
    return str(message["content"])


def _dialogue(text: str, name: str) -> list[Message]:
    """"\n\nHuman: Hi\n\nAssistant: Hello" as messages."""
    parts = re.split(r"(?:^|\n\n)(Human|Assistant):", text)
    roles = {"Human": "user", "Assistant": "assistant"}
    messages: list[Message] = [{"role": roles[who], "content": said.strip()} for who, said in zip(parts[1::2], parts[2::2], strict=True)]
    return _messages(messages, name)


def _instruction(columns: Mapping[str, Any]) -> str:
    prompt = _text(columns, "instruction")
    return f"{prompt}\n\n{_text(columns, 'input')}" if columns.get("input") else prompt


def _column(columns: Mapping[str, Any], name: str) -> Any:
    if name not in columns:
        raise NoColumn(name, columns)
    return columns[name]


def _text(columns: Mapping[str, Any], name: str) -> str:
    value = _column(columns, name)
    if not isinstance(value, str):
        raise BadRow(f"{name!r} is a {type(value).__name__}, text is expected: {str(value)[:60]!r}")
    if not value.strip():
        raise BadRow(f"{name!r} is empty")
    return value


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadRow(f"{name!r} is a list of one or more messages, this is {str(value)[:60]!r}")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise BadRow(f"message {number} of {name!r} is no {{'role': ..., 'content': ...}}: {str(message)[:60]!r}")
    if not any(message["role"] == "user" and message["content"] for message in value):
        raise BadRow(f"{name!r} holds no message of the user")
    return [dict(message) for message in value]


def _meta(columns: Mapping[str, Any], answer: str | None, used: Collection[str | None]) -> dict[str, Any]:
    """Every column not used up, and the answer as "answer"."""
    meta = {key: value for key, value in columns.items() if key not in used}
    if answer is not None:
        value = _column(columns, answer)
        if value is None or isinstance(value, str) and not value.strip():
            raise BadRow(f"{answer!r} is empty")
        meta["answer"] = value
    return meta
