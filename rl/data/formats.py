"""The shapes that rows come in. Each format reads a row's columns to (messages, meta, response) or
raises BadRow.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from rl.data.rows import BadRow, NoColumn
from rl.errors import UserError
from rl.images import has_images, said
from rl.renderers import content_text
from rl.types import Message


class Read(NamedTuple):
    """What a row says: messages to ask, what reaches the reward, the worked answer, the answer it
    was preferred to.
    """

    messages: list[Message]
    meta: dict[str, Any]
    response: str | None = None
    rejected: str | None = None


class RowFormat(ABC):
    """How to read a row. `example`: one, as it would stand in a .jsonl file, where one helps who
    has rows of another shape.
    """

    example = ""

    @abstractmethod
    def read(self, columns: Mapping[str, Any]) -> Read:
        """Raises BadRow for a row that does not have this shape."""

    def split_of(self, columns: Mapping[str, Any]) -> str | None:
        """The published split that a row belongs to, where the row itself tells."""
        return None

    def read_all(self, columns: Mapping[str, Any]) -> list[Read]:
        """What a row asks; of most shapes one thing."""
        return [self.read(columns)]


class Columns(RowFormat):
    """Prompt (text, or a list of messages), response and answer in named columns.

    Where no column of the response is named, a `completion` (text, or one message of the assistant)
    is one, and stays in meta.
    """

    def __init__(self, prompt: str, response: str | None, answer: str | None):
        self.prompt, self.response, self.answer = prompt, response, answer
        self.example = json.dumps(
            {prompt: "2+2=", **{column: "4" for column in (response, answer) if column}}
        )

    def read(self, columns: Mapping[str, Any]) -> Read:
        prompt = _column(columns, self.prompt)
        if isinstance(prompt, list):
            messages = read_messages(prompt, self.prompt)
        else:
            messages = [{"role": "user", "content": text_of(columns, self.prompt)}]
        used = {self.prompt, self.response}
        return Read(messages, meta_of(columns, self.answer, used), self._response(columns))

    def _response(self, columns: Mapping[str, Any]) -> str | None:
        if self.response is None:
            completion = columns.get("completion")
            if isinstance(completion, str) and completion.strip():
                return completion
            return (
                _said(completion[0], "completion")
                if isinstance(completion, list) and len(completion) == 1
                else None
            )
        value = _column(columns, self.response)
        if isinstance(value, list) and len(value) == 1:
            return _said(value[0], self.response)
        return text_of(columns, self.response)


class Messages(RowFormat):
    """A chat in the column `messages`. Where the assistant speaks last, that message is the
    response.
    """

    def __init__(self, answer: str | None):
        self.answer = answer

    def read(self, columns: Mapping[str, Any]) -> Read:
        return _chat(
            _column(columns, "messages"), "messages", meta_of(columns, self.answer, {"messages"})
        )


class ShareGPT(RowFormat):
    """A chat in the column `conversations`: {"from": "human" or "gpt", "value": ...}, and the like;
    `system` may stand beside it.
    """

    def __init__(self, answer: str | None):
        self.answer = answer

    def read(self, columns: Mapping[str, Any]) -> Read:
        name = (
            "conversation"
            if "conversation" in columns and "conversations" not in columns
            else "conversations"
        )
        turns, system = _column(columns, name), columns.get("system")
        if not isinstance(turns, list):
            raise BadRow(f"{name!r} is a list of messages, this is {str(turns)[:60]!r}")
        messages = [
            self._message(turn, f"message {number} of {name!r}")
            for number, turn in enumerate(turns, start=1)
        ]
        if (
            isinstance(system, str)
            and system.strip()
            and (not messages or messages[0]["role"] != "system")
        ):
            messages = [{"role": "system", "content": system}, *messages]
        return _chat(messages, name, meta_of(columns, self.answer, {name, "system"}))

    @staticmethod
    def _message(turn: Any, where: str) -> Any:
        if not isinstance(turn, dict) or "from" not in turn:
            return turn  # a role and content, or nothing that read_messages would take
        role = _SPEAKERS.get(str(turn["from"]).lower())
        if role is None:
            raise BadRow(f"{where} is from {turn['from']!r}; known are {', '.join(_SPEAKERS)}")
        return {"role": role, "content": turn.get("value")}


_SPEAKERS = {
    **{name: "user" for name in ("human", "user")},
    **{name: "assistant" for name in ("gpt", "assistant", "model", "chatgpt", "bing", "bard")},
    **{name: "tool" for name in ("tool", "function_response", "observation")},
    "system": "system",
}


class Text(RowFormat):
    """A text in the column `text`, to be learnt as it stands, without a prompt."""

    def __init__(self, answer: str | None):
        self.answer = answer

    def read(self, columns: Mapping[str, Any]) -> Read:
        return Read([], meta_of(columns, self.answer, {"text"}), text_of(columns, "text"))


class Unpaired(Columns):
    """Prompt and completion with a `label` that says whether this is a good answer: true or false,
    1 or 0.
    """

    def __init__(self, prompt: str, response: str | None, answer: str | None):
        super().__init__(prompt, response, answer)
        self.example = json.dumps({prompt: "2+2=", response or "completion": "4", "label": True})

    def read(self, columns: Mapping[str, Any]) -> Read:
        if "label" not in columns and "chosen" in columns and "rejected" in columns:
            raise NoColumn(
                "label",
                columns,
                "these are pairs, of which --data-format preferences makes a good and a bad answer each",
            )
        read = super().read(columns)
        label = _LABELS.get(str(_column(columns, "label")).lower())
        if label is None:
            raise BadRow(f"'label' is true or false (1 or 0), this is {columns['label']!r}")
        if read.response is None:
            raise BadRow(
                "there is no answer that the label speaks of: it is in the column 'completion', or name it with --response-column"
            )
        return read._replace(meta={**read.meta, "label": label})


_LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


class Alpaca(RowFormat):
    """instruction, input (may be empty or absent) and output; the input follows the instruction
    after an empty line.

    Where `instances` holds several {input, output}, each is a problem of its own.
    """

    def __init__(self, answer: str | None):
        self.answer = answer

    def read(self, columns: Mapping[str, Any]) -> Read:
        prompt = _instruction(columns)
        meta = meta_of(columns, self.answer, {"instruction", "input", "output"})
        return Read([{"role": "user", "content": prompt}], meta, text_of(columns, "output"))

    def read_all(self, columns: Mapping[str, Any]) -> list[Read]:
        instances = columns.get("instances")
        if "output" in columns or instances is None:
            return [self.read(columns)]
        if (
            not isinstance(instances, list)
            or not instances
            or not all(isinstance(item, dict) for item in instances)
        ):
            raise BadRow(
                f"'instances' is a list of one or more {{'input', 'output'}}, this is {str(instances)[:60]!r}"
            )
        shared = {key: value for key, value in columns.items() if key != "instances"}
        found = []
        for number, item in enumerate(instances, start=1):
            try:
                found.append(self.read({**shared, **item}))
            except BadRow as error:
                raise BadRow(f"instance {number}: {error}") from error
        return found


class Preferences(RowFormat):
    """Two answers to one prompt, the preferred one and the other, in the usual shapes.

    - texts or one-message lists in `chosen` and `rejected`, the prompt (text or messages) in the
      column `prompt`, or in
      instruction and input;
    - whole conversations (lists of messages) in `chosen` and `rejected`, alike up to their last
      message;
    - whole dialogues as text, "\\n\\nHuman: ...\\n\\nAssistant: ...", alike up to their last answer
      (HH-RLHF);
    - input, output_1, output_2 and label, 1 or 2: the one preferred (LLMBar).
    """

    def __init__(self, prompt: str, chosen: str, rejected: str, answer: str | None):
        self.prompt, self.chosen, self.rejected, self.answer = prompt, chosen, rejected, answer
        self.example = json.dumps({prompt: "2+2=", chosen: "4", rejected: "5"})

    def read(self, columns: Mapping[str, Any]) -> Read:
        if self.chosen not in columns and "output_1" in columns:
            return self._labelled(columns)
        meta = meta_of(
            columns, self.answer, {self.prompt, self.chosen, self.rejected, "instruction", "input"}
        )
        pair = [_column(columns, name) for name in (self.chosen, self.rejected)]
        whole = all(
            isinstance(side, list) and side and _role(side[0]) != "assistant" for side in pair
        )
        if (
            whole
            or all(isinstance(side, str) and side.lstrip().startswith("Human:") for side in pair)
            and self.prompt not in columns
        ):
            sides = [
                read_messages(s, name) if whole else _dialogue(s, name)
                for s, name in zip(pair, self._names, strict=True)
            ]
            if sides[0][:-1] != sides[1][:-1]:
                raise BadRow(
                    f"{self.chosen!r} and {self.rejected!r} differ before their last message: they answer two prompts"
                )
            asked, answers = (
                sides[0][:-1],
                [_said(side[-1], name) for side, name in zip(sides, self._names, strict=True)],
            )
        else:
            asked, answers = (
                self._asked(columns),
                [self._answer_in(columns, name) for name in self._names],
            )
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
        if isinstance(prompt, list):
            return read_messages(prompt, self.prompt)
        return [{"role": "user", "content": text_of(columns, self.prompt)}]

    @staticmethod
    def _answer_in(columns: Mapping[str, Any], name: str) -> str:
        value = columns[name]
        if not isinstance(value, list):
            return text_of(columns, name)
        if len(value) != 1:
            raise BadRow(
                f"{name!r} is one message of the assistant, or a whole conversation; it has {len(value)} messages"
            )
        return _said(value[0], name)

    def _labelled(self, columns: Mapping[str, Any]) -> Read:
        label = _column(columns, "label")
        if type(label) is not int or label not in (1, 2):  # true and 1.0 name no column
            raise BadRow(f"'label' is 1 or 2, the output that is preferred; this is {label!r}")
        meta = meta_of(columns, self.answer, {"input", "output_1", "output_2", "label"})
        asked: list[Message] = [{"role": "user", "content": text_of(columns, "input")}]
        return Read(
            asked,
            meta,
            text_of(columns, f"output_{label}"),
            text_of(columns, f"output_{3 - label}"),
        )


def is_chat(columns: Mapping[str, Any], prompt: str | None) -> bool:
    """Whether a row's prompt is a list of messages."""
    return any(
        isinstance(columns.get(name), list)
        for name in (prompt or "prompt", "messages", "conversations", "conversation")
    )


def _chat(value: Any, name: str, meta: dict[str, Any]) -> Read:
    """A conversation; where the assistant speaks last, that message is the response."""
    messages = read_messages(value, name)
    if messages[-1]["role"] != "assistant":
        return Read(messages, meta)
    *asked, last = messages
    if not asked:
        raise BadRow(f"{name!r} holds an assistant's message alone; it answers nothing")
    return Read(asked, meta, _said(last, name))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _said(message: Any, name: str) -> str:
    """The text of an assistant's message."""
    if _role(message) != "assistant" or "content" not in message:
        raise BadRow(
            f"{name!r} ends with a message of the assistant; this ends with {str(message)[:60]!r}"
        )
    extra = sorted(key for key in message if key not in ("role", "content") and message[key])
    if extra:
        raise BadRow(
            f"the last message is not text alone ({', '.join(extra)}); only text can be learnt from here"
        )
    return _content(message["content"], f"the last message of {name!r}")


def _content(value: Any, where: str) -> str:
    try:
        return content_text(value, where)
    except UserError as error:
        raise BadRow(str(error)) from error


def _dialogue(text: str, name: str) -> list[Message]:
    """ "\n\nHuman: Hi\n\nAssistant: Hello" as messages."""
    parts = re.split(r"(?:^|\n\n)(Human|Assistant):", text)
    roles = {"Human": "user", "Assistant": "assistant"}
    messages: list[Message] = [
        {"role": roles[who], "content": said.strip()}
        for who, said in zip(parts[1::2], parts[2::2], strict=True)
    ]
    return read_messages(messages, name)


def _instruction(columns: Mapping[str, Any]) -> str:
    prompt = text_of(columns, "instruction")
    return f"{prompt}\n\n{text_of(columns, 'input')}" if columns.get("input") else prompt


def _column(columns: Mapping[str, Any], name: str) -> Any:
    if name not in columns:
        raise NoColumn(name, columns)
    return columns[name]


def text_of(columns: Mapping[str, Any], name: str) -> str:
    value = _column(columns, name)
    if not isinstance(value, str):
        raise BadRow(f"{name!r} is a {type(value).__name__}, text is expected: {str(value)[:60]!r}")
    if not value.strip():
        raise BadRow(f"{name!r} is empty")
    return value


def read_messages(value: Any, name: str) -> list[Message]:
    """A conversation from outside, its contents as text. BadRow for what no renderer could write."""
    if not isinstance(value, list) or not value:
        raise BadRow(f"{name!r} is a list of one or more messages, this is {str(value)[:60]!r}")
    found = []
    for number, message in enumerate(value, start=1):
        where = f"message {number} of {name!r}"
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or "content" not in message
        ):
            raise BadRow(f"{where} is no {{'role': ..., 'content': ...}}: {str(message)[:60]!r}")
        if not message["role"].strip():
            raise BadRow(f"{where} has an empty role")
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
            raise BadRow(
                f"{where} has tool_calls that are no list of calls (function: name, arguments): {str(calls)[:60]!r}"
            )
        if not isinstance(message.get("reasoning_content"), (str, type(None))):
            raise BadRow(
                f"{where} has a reasoning_content that is no text: {str(message['reasoning_content'])[:60]!r}"
            )
        content = message["content"]
        # those are looked at where the row's images are known (rl.data.images)
        if not has_images([message]):
            content = "" if content is None and calls else _content(content, where)
        # a table has every key in every message, empty where a message has none
        found.append(
            {
                **{key: given for key, given in message.items() if given is not None},
                "content": content,
            }
        )
    if not any(message["role"] == "user" and said(message["content"]).strip() for message in found):
        raise BadRow(f"{name!r} holds no message of the user")
    return found


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", {}), (dict, str))
    )


def meta_of(
    columns: Mapping[str, Any], answer: str | None, used: Collection[str | None]
) -> dict[str, Any]:
    """Every column not used up, and the answer as "answer"."""
    meta = {key: value for key, value in columns.items() if key not in used}
    if answer is not None:
        value = _column(columns, answer)
        # NaN: how tables write a missing value
        if value is None or isinstance(value, str) and not value.strip() or value != value:
            raise BadRow(f"{answer!r} is empty")
        meta["answer"] = value
    return meta
