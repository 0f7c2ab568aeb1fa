"""Define the row formats. Each format converts a row's columns to problems or raises BadRow.

Their `meta` reaches the reward, their `response` is the reference answer, and `rejected` the answer
that it was preferred to.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from rl.data.row_readers import BadRow, Columns, MissingColumn
from rl.errors import UserError
from rl.images import content_to_text, has_images
from rl.renderers import get_content_text
from rl.types import Message, Problem


@dataclass(frozen=True)
class ColumnNames:
    """Hold the names of the columns that a caller may choose.

    answer: None if no column has the answer.
    """

    prompt: str = "prompt"
    response: str | None = None
    answer: str | None = "answer"
    chosen: str = "chosen"
    rejected: str = "rejected"

    def by_setting(self) -> dict[str, str | None]:
        """Return the name of each column by the setting that chooses it."""
        return {f"{column}_column": name for column, name in vars(self).items()}


class RowFormat(ABC):
    """Read rows of one format.

    example: a row of the format as a line of a .jsonl file, for error messages; "" if a format has
    none. required: the sets of columns by which the format is detected: a row has all columns of
    one of them. reward: the name of the reward that scores such rows, if their columns decide it.
    """

    example = ""
    required: tuple[set[str], ...] = ()
    reward: str | None = None

    def __init__(self, names: ColumnNames = ColumnNames()):
        self.names = names

    @classmethod
    def matches(cls, columns: Columns, names: ColumnNames) -> bool:
        """Return whether a row has this format, by its columns."""
        return any(columns.keys() >= required for required in cls.required)

    @abstractmethod
    def read(self, columns: Columns) -> Problem:
        """Return the content of a row. Raises BadRow if the row does not have this format."""

    def split_of(self, columns: Columns) -> str | None:
        """Return the published split that the row names; None if it names none."""
        return None

    def read_all(self, columns: Columns) -> list[Problem]:
        """Return all problems of a row; most formats have a single problem per row."""
        return [self.read(columns)]


class ColumnsFormat(RowFormat):
    """Read prompt (text, or a list of messages), response and answer from named columns.

    If no response column is named, the column `completion` (text, or a list of a single assistant
    message) is the response, and also stays in meta.
    """

    required: tuple[set[str], ...] = ({"prompt"},)

    def __init__(self, names: ColumnNames):
        super().__init__(names)
        answers = {column: "4" for column in (names.response, names.answer) if column}
        self.example = json.dumps({names.prompt: "2+2=", **answers})

    def read(self, columns: Columns) -> Problem:
        used = {self.names.prompt, self.names.response}
        messages = _read_prompt(columns, self.names.prompt)
        meta = collect_meta(columns, self.names.answer, used)
        return Problem(messages, meta, self._read_response(columns))

    def _read_response(self, columns: Columns) -> str | None:
        """Return the response of a row; None if it has none."""
        if self.names.response is not None:
            return _read_answer(columns, self.names.response)
        completion = columns.get("completion")
        if isinstance(completion, str) and completion.strip():
            return completion
        is_message = isinstance(completion, list) and len(completion) == 1
        return _read_answer(columns, "completion") if is_message else None


class MessagesFormat(RowFormat):
    """Read a chat from the column `messages`.

    If the last message is the assistant's, that message is the response.
    """

    required = ({"messages"},)

    def read(self, columns: Columns) -> Problem:
        messages = get_column(columns, "messages")
        meta = collect_meta(columns, self.names.answer, {"messages"})
        return _parse_chat(messages, "messages", meta)


class ShareGPTFormat(RowFormat):
    """Read a chat from the column `conversations` (or `conversation`).

    Each message is {"from": "human" or "gpt", "value": ...} or uses another name of _SPEAKERS. The
    row may also have a column `system`.
    """

    @classmethod
    def matches(cls, columns: Columns, names: ColumnNames) -> bool:
        return "conversations" in columns or isinstance(columns.get("conversation"), list)

    def read(self, columns: Columns) -> Problem:
        is_plural = "conversations" in columns or "conversation" not in columns
        name = "conversations" if is_plural else "conversation"
        turns, system = get_column(columns, name), columns.get("system")
        if not isinstance(turns, list):
            raise BadRow(f"{name!r} must be a list of messages, this is {str(turns)[:60]!r}")
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
        return _parse_chat(
            messages, name, collect_meta(columns, self.names.answer, {name, "system"})
        )

    @staticmethod
    def _message(turn: Any, where: str) -> Any:
        """Convert {"from", "value"} to {"role", "content"}.

        Raises BadRow for an unknown speaker.
        """
        if not isinstance(turn, dict) or "from" not in turn:
            return turn  # has role and content, or read_messages rejects it
        role = _SPEAKERS.get(str(turn["from"]).lower())
        if role is None:
            raise BadRow(
                f"{where} is from {turn['from']!r}; known speakers are {', '.join(_SPEAKERS)}"
            )
        return {"role": role, "content": turn.get("value")}


_SPEAKERS = {
    **{name: "user" for name in ("human", "user")},
    **{name: "assistant" for name in ("gpt", "assistant", "model", "chatgpt", "bing", "bard")},
    **{name: "tool" for name in ("tool", "function_response", "observation")},
    "system": "system",
}


class TextFormat(RowFormat):
    """Read a text from the column `text`, to be trained on as it is, without a prompt."""

    required = ({"text"},)

    def read(self, columns: Columns) -> Problem:
        meta = collect_meta(columns, self.names.answer, {"text"})
        return Problem([], meta, read_text(columns, "text"))


class UnpairedFormat(ColumnsFormat):
    """Read prompt, completion and `label`: whether the answer is good (true or false, 1 or 0)."""

    required = ()  # never detected: a prompt and a completion are also without label

    def __init__(self, names: ColumnNames):
        super().__init__(names)
        row = {names.prompt: "2+2=", names.response or "completion": "4", "label": True}
        self.example = json.dumps(row)

    def read(self, columns: Columns) -> Problem:
        if "label" not in columns and "chosen" in columns and "rejected" in columns:
            raise MissingColumn(
                "label",
                columns,
                "these are pairs, of which --data-format preferences makes a good and a bad answer "
                "each",
            )
        read = super().read(columns)
        label = read_label(get_column(columns, "label"))
        if read.response is None:
            raise BadRow(
                "the row has a label but no answer: put the answer into the column 'completion', "
                "or name its column with --response-column"
            )
        return replace(read, meta={**read.meta, "label": label})


_LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


def read_label(value: Any) -> bool:
    """Return whether a column `label` says that an answer is good: true or false, 1 or 0, or their
    text. Raises BadRow, a ValueError, for other values.
    """
    label = _LABELS.get(str(value).lower())
    if label is None:
        raise BadRow(f"'label' is true or false (1 or 0), this is {value!r}")
    return label


class AlpacaFormat(RowFormat):
    """Read instruction, input (may be empty or absent) and output.

    The input follows the instruction after an empty line. If the row has a list `instances` of
    {input, output}, each instance is a separate problem.
    """

    required = ({"instruction", "output"}, {"instruction", "instances"})

    def read(self, columns: Columns) -> Problem:
        prompt = make_prompt(_instruction(columns))
        meta = collect_meta(columns, self.names.answer, {"instruction", "input", "output"})
        return Problem(prompt, meta, read_text(columns, "output"))

    def read_all(self, columns: Columns) -> list[Problem]:
        instances = columns.get("instances")
        if "output" in columns or instances is None:
            return [self.read(columns)]
        is_list = isinstance(instances, list) and instances
        if not is_list or not all(isinstance(item, dict) for item in instances):
            raise BadRow(
                f"'instances' must be a non-empty list of {{'input', 'output'}}, "
                f"this is {str(instances)[:60]!r}"
            )
        shared = {key: value for key, value in columns.items() if key != "instances"}
        problems_read = []
        for number, item in enumerate(instances, start=1):
            try:
                problems_read.append(self.read({**shared, **item}))
            except BadRow as error:
                raise BadRow(f"instance {number}: {error}") from error
        return problems_read


class PreferencesFormat(RowFormat):
    """Read the preferred and the rejected answer to a prompt, in any of these forms:

    - texts or single-message lists in `chosen` and `rejected`; the prompt (text or messages) is in
      the column `prompt`, or in instruction and input;
    - complete conversations (lists of messages) in `chosen` and `rejected`, identical up to their
      last message; if they have no system message, that of the messages in `prompt` precedes them;
    - complete dialogues as text, "\\n\\nHuman: ...\\n\\nAssistant: ...", identical up to their last
      answer (HH-RLHF);
    - input, output_1, output_2 and label: the number of the preferred output, 1 or 2 (LLMBar).
    """

    def __init__(self, names: ColumnNames):
        super().__init__(names)
        self.example = json.dumps({names.prompt: "2+2=", names.chosen: "4", names.rejected: "5"})

    @classmethod
    def matches(cls, columns: Columns, names: ColumnNames) -> bool:
        return {names.chosen, names.rejected} <= columns.keys() or _LABELLED <= columns.keys()

    def read(self, columns: Columns) -> Problem:
        prompt_column, *pair = self.names.prompt, self.names.chosen, self.names.rejected
        if self.names.chosen not in columns and "output_1" in columns:
            return self._parse_labelled(columns)
        used = {prompt_column, *pair, "instruction", "input"}
        meta = collect_meta(columns, self.names.answer, used)
        sides = [get_column(columns, name) for name in pair]
        whole = all(
            isinstance(side, list) and side and _role(side[0]) != "assistant" for side in sides
        )
        if whole or (
            prompt_column not in columns
            and all(isinstance(side, str) and side.lstrip().startswith("Human:") for side in sides)
        ):
            chats = list(map(read_messages if whole else _parse_dialogue, sides, pair))
            prompt = chats[0][:-1]
            if prompt != chats[1][:-1]:
                raise BadRow(
                    f"{pair[0]!r} and {pair[1]!r} differ before their last message: "
                    "they must answer the same prompt"
                )
            if prompt and _role(prompt[0]) != "system":
                prompt = [*_read_system(columns, prompt_column), *prompt]
            answers = list(map(_assistant_text, (chat[-1] for chat in chats), pair))
        else:
            is_instruction = prompt_column not in columns and "instruction" in columns
            prompt = (
                make_prompt(_instruction(columns))
                if is_instruction
                else _read_prompt(columns, prompt_column)
            )
            answers = []
            for name, side in zip(pair, sides, strict=True):
                if isinstance(side, list) and len(side) != 1:
                    raise BadRow(
                        f"{name!r} must hold a single assistant message or a complete "
                        f"conversation; it has {len(side)} messages"
                    )
                answers.append(_read_answer(columns, name))
        for answer, name in zip(answers, pair, strict=True):
            if not answer.strip():
                raise BadRow(f"the answer in {name!r} is empty")
        return Problem(prompt, meta, answers[0], rejected=answers[1])

    def _parse_labelled(self, columns: Columns) -> Problem:
        """Read a row of input, output_1, output_2 and label."""
        label = get_column(columns, "label")
        if type(label) is not int or label not in (1, 2):  # true and 1.0 name no output
            raise BadRow(
                f"'label' is 1 or 2, the number of the preferred output; this is {label!r}"
            )
        meta = collect_meta(columns, self.names.answer, _LABELLED)
        prompt = make_prompt(read_text(columns, "input"))
        chosen, rejected = (read_text(columns, f"output_{n}") for n in (label, 3 - label))
        return Problem(prompt, meta, chosen, rejected=rejected)


_LABELLED = frozenset({"input", "output_1", "output_2", "label"})


def is_chat(columns: Columns, prompt: str | None) -> bool:
    """Return whether a row's prompt is a list of messages."""
    return any(
        isinstance(columns.get(name), list)
        for name in (prompt or "prompt", "messages", "conversations", "conversation")
    )


def _parse_chat(value: Any, name: str, meta: dict[str, Any]) -> Problem:
    """Read a conversation. If its last message is the assistant's, that message is the response."""
    messages = read_messages(value, name)
    if messages[-1]["role"] != "assistant":
        return Problem(messages, meta)
    *prompt, last = messages
    if not prompt:
        raise BadRow(f"{name!r} holds only an assistant message; a prompt must precede it")
    return Problem(prompt, meta, _assistant_text(last, name))


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _assistant_text(message: Any, name: str) -> str:
    """Return the text of an assistant message. Raises BadRow for any other message."""
    if not isinstance(message, dict):
        raise BadRow(
            f"{name!r} is a list, but no list of messages; a text is expected, without the list: "
            f"{str(message)[:60]!r}"
        )
    if _role(message) != "assistant" or "content" not in message:
        raise BadRow(
            f"{name!r} ends with a message of the assistant; this ends with {str(message)[:60]!r}"
        )
    extra = sorted(key for key in message if key not in ("role", "content") and message[key])
    if extra:
        raise BadRow(
            f"the last message is not text alone ({', '.join(extra)}); "
            "only text can be trained on here"
        )
    return _content(message["content"], f"the last message of {name!r}")


def _content(value: Any, where: str) -> str:
    try:
        return get_content_text(value, where)
    except UserError as error:
        raise BadRow(str(error)) from error


def _parse_dialogue(text: str, name: str) -> list[Message]:
    """Parse "\n\nHuman: Hi\n\nAssistant: Hello" to messages."""
    parts = re.split(r"(?:^|\n\n)(Human|Assistant):", text.lstrip())
    roles = {"Human": "user", "Assistant": "assistant"}
    messages: list[Message] = [
        {"role": roles[speaker], "content": text_after.strip()}
        for speaker, text_after in zip(parts[1::2], parts[2::2], strict=True)
    ]
    return read_messages(messages, name)


def make_prompt(text: str) -> list[Message]:
    """Return a prompt of a single user message."""
    return [{"role": "user", "content": text}]


def _read_prompt(columns: Columns, name: str) -> list[Message]:
    """Return the prompt in a column: a text, or a list of messages."""
    value = get_column(columns, name)
    if isinstance(value, list):
        return read_messages(value, name)
    return make_prompt(read_text(columns, name))


def _read_system(columns: Columns, name: str) -> list[Message]:
    """Return the system message that begins the messages in a column, in a list; an empty list if
    there is none.
    """
    value = columns.get(name)
    if not isinstance(value, list) or not value or _role(value[0]) != "system":
        return []
    content = _content(value[0].get("content"), f"message 1 of {name!r}")
    return [{"role": "system", "content": content}]


def _read_answer(columns: Columns, name: str) -> str:
    """Return the answer in a column: a text, or a list of a single assistant message."""
    value = get_column(columns, name)
    if isinstance(value, list) and len(value) == 1:
        return _assistant_text(value[0], name)
    return read_text(columns, name)


def _instruction(columns: Columns) -> str:
    prompt = read_text(columns, "instruction")
    has_input = str(columns.get("input") or "").strip()  # spaces alone are none
    return f"{prompt}\n\n{read_text(columns, 'input')}" if has_input else prompt


def get_column(columns: Columns, name: str) -> Any:
    """Return the value of a column. Raises MissingColumn if it is absent."""
    if name not in columns:
        raise MissingColumn(name, columns)
    return columns[name]


def read_text(columns: Columns, name: str) -> str:
    """Return the text of a column. Raises BadRow if it is absent, empty or not text."""
    return check_text(get_column(columns, name), name)


def check_text(value: Any, name: str) -> str:
    """Return the text in `name`. Raises BadRow if the value is empty or not text."""
    if not isinstance(value, str):
        kind = type(value).__name__
        raise BadRow(f"{name!r} has the type {kind}, text is expected: {str(value)[:60]!r}")
    if not value.strip():
        raise BadRow(f"{name!r} is empty")
    return value


def read_messages(value: Any, name: str) -> list[Message]:
    """Parse an untrusted conversation; contents without images become text.

    Raises BadRow if no renderer could render the conversation, or if no user message has text.
    """
    if not isinstance(value, list) or not value:
        raise BadRow(f"{name!r} must be a list of at least 1 message, this is {str(value)[:60]!r}")
    parsed_messages = []
    for number, message in enumerate(value, start=1):
        where = f"message {number} of {name!r}"
        match message:
            case {"role": str(role), "content": content}:
                if not role.strip():
                    raise BadRow(f"{where} has an empty role")
            case _:
                raise BadRow(
                    f"{where} is not {{'role': ..., 'content': ...}}: {str(message)[:60]!r}"
                )
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
            raise BadRow(
                f"{where} has tool_calls that are no list of calls (function: name, arguments): "
                f"{str(calls)[:60]!r}"
            )
        # In a table the arguments of a call have the keys of all calls.
        calls = _without_nulls(calls)
        if not isinstance(message.get("reasoning_content"), (str, type(None))):
            raise BadRow(
                f"{where} has a reasoning_content that is no text: "
                f"{str(message['reasoning_content'])[:60]!r}"
            )
        # Contents with images are checked in rl.data.row_images, which knows the row's images.
        if not has_images([message]):
            content = "" if content is None and calls else _content(content, where)
        # In a table every message has every key; the absent values are None.
        parsed = {key: value for key, value in message.items() if value is not None}
        parsed |= {} if calls is None else {"tool_calls": calls}
        parsed_messages.append({**parsed, "content": content})
    if not any(
        message["role"] == "user" and content_to_text(message["content"]).strip()
        for message in parsed_messages
    ):
        raise BadRow(f"{name!r} holds no message of the user")
    return parsed_messages


def read_tools(columns: Columns) -> tuple[dict[str, Any], ...]:
    """Return the tools of a row: a list of schemas in the column `tools`, or its JSON text.

    A column of this name that holds anything but objects is not about tools. Raises BadRow if an
    object is no schema of a function.
    """
    tools = columns.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            return ()
    elif isinstance(tools, list):
        tools = [_without_nulls(tool) for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return ()
    for number, tool in enumerate(tools, start=1):
        match tool:
            case {"function": {"name": str()}}:
                continue
        raise BadRow(
            f"tool {number} of 'tools' is not "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}: '
            f"{str(tool)[:60]!r}"
        )
    return tuple(tools)


def _without_nulls(value: Any) -> Any:
    """Return a nested value without the keys that are null: a table adds the keys that only other
    rows have.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", {}), (dict, str))
    )


def collect_meta(
    columns: Columns, answer: str | None, used: Collection[str | None]
) -> dict[str, Any]:
    """Return the columns that are not in `used`, and the answer as "answer".

    Raises BadRow if the answer is absent or empty.
    """
    meta = {key: value for key, value in columns.items() if key not in used}
    if answer is not None:
        value = get_column(columns, answer)
        # NaN: a missing value in a table
        if value is None or isinstance(value, str) and not value.strip() or value != value:
            raise BadRow(f"{answer!r} is empty")
        meta["answer"] = value
    return meta
