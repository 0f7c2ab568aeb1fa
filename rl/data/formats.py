"""The shapes that rows come in. Each format reads a row's columns to (messages, meta, response) or raises BadRow."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from rl.data.rows import BadRow
from rl.types import Message

Read = tuple[list[Message], dict[str, Any], str | None]

GSM8K_INSTRUCTION = "\n\nReason step by step, then write the final number alone inside \\boxed{}."


class RowFormat(ABC):
    """How to read a row."""

    @abstractmethod
    def read(self, columns: Mapping[str, Any]) -> Read:
        """Messages to ask, what reaches the reward, and the worked answer if there is one. Raises BadRow."""


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
        return messages, _meta(columns, self.answer, used), response


class Messages(RowFormat):
    """A chat in the column `messages`. Where the assistant speaks last, that message is the response."""

    def __init__(self, answer: str | None):
        self.answer = answer

    def read(self, columns: Mapping[str, Any]) -> Read:
        messages = _messages(_column(columns, "messages"), "messages")
        meta = _meta(columns, self.answer, {"messages"})
        if messages[-1]["role"] != "assistant":
            return messages, meta, None
        *asked, last = messages
        extra = sorted(key for key in last if key not in ("role", "content") and last[key])
        if not asked:
            raise BadRow("'messages' holds an assistant's message alone; it answers nothing")
        if extra or not isinstance(last["content"], str):
            what = ", ".join(extra) or f"content of type {type(last['content']).__name__}"
            raise BadRow(f"the last message is not text alone ({what}); only text can be learnt from here")
        return asked, meta, last["content"]


class Alpaca(RowFormat):
    """instruction, input (may be empty or absent) and output; the input follows the instruction after an empty line."""

    def __init__(self, answer: str | None):
        self.answer = answer

    def read(self, columns: Mapping[str, Any]) -> Read:
        prompt = _text(columns, "instruction")
        if columns.get("input"):
            prompt = f"{prompt}\n\n{_text(columns, 'input')}"
        meta = _meta(columns, self.answer, {"instruction", "input", "output"})
        return [{"role": "user", "content": prompt}], meta, _text(columns, "output")


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
        return [{"role": "user", "content": question + GSM8K_INSTRUCTION}], {"answer": number}, response


def _column(columns: Mapping[str, Any], name: str) -> Any:
    if name not in columns:
        raise BadRow(f"no column {name!r}; it has {', '.join(map(repr, columns)) or 'none'}")
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
