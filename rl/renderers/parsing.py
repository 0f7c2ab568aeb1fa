"""What a model wrote, taken apart: thoughts between <think> and </think>, calls of tools between
<tool_call> and </tool_call>.

A call is written as JSON, or (Qwen3.5 and those after it) as <function=NAME> with its
<parameter=NAME> one by one. gpt-oss writes thoughts, calls and answer as messages of their own,
each with its channel (`split_channels`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
CHANNEL, CHANNEL_TEXT = "<|channel|>", "<|message|>"
# What stands around thoughts, as far as it is known: of most families, and of Gemma 4.
THOUGHTS = ((THOUGHT_BEGIN, THOUGHT_END), ("<|channel>thought\n", "<channel|>"))
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
NEXT_MESSAGE = re.compile(r"<\|end\|>(?:<\|start\|>assistant)?|<\|start\|>assistant")


def thought_marks(template: str) -> tuple[str, str] | None:
    """What a chat template writes around thoughts; None where it writes none."""
    return next((marks for marks in THOUGHTS if marks[1] in template), None)


def split_thoughts(text: str, marks: tuple[str, str] = THOUGHTS[0]) -> tuple[str, str | None]:
    """(the text without its thoughts, the thoughts, an empty line between them); None where no
    thought ended.

    `marks`: what stands around them. The first may have been opened by the prompt. One that never
    ended stays in the text.
    """
    begin, end = marks
    head, ended, rest = text.partition(end)
    if not ended:
        return text, None
    before, opened, thought = head.rpartition(begin)
    content = before if opened and before.strip() else ""
    thoughts = [thought.strip()]
    while True:
        said, opened, inner = rest.partition(begin)
        thought, ended, after = inner.partition(end)
        if not (opened and ended):
            return content + rest.lstrip("\n"), "\n\n".join(part for part in thoughts if part)
        content += said.lstrip("\n")
        thoughts.append(thought.strip())
        rest = after


def split_calls(
    text: str, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[str, list[dict[str, Any]], list[dict[str, str]]]:
    """(the text without calls, the calls, what looks like a call and is none).

    A call is {"type": "function", "function": {"name": ..., "arguments": {...}}}, the form that
    templates render back. What is none (cut off, or no JSON of that form) stays in the text, and is
    named as {"raw_text": ..., "error": ...}. `tools`: those that may be called; what a parameter
    that is written by itself holds is read by its type there, and a text where none is given.
    """
    content, calls, unparsed = "", [], []
    said, opened, rest = text.partition(CALL_BEGIN)
    while opened:
        content += said
        by_parts = rest.lstrip().startswith("<function=")
        found, length = _call_by_parts(rest, tools) if by_parts else call_of_json(rest)
        if isinstance(found, str):
            unparsed.append({"raw_text": CALL_BEGIN + rest[:length], "error": found})
            content += CALL_BEGIN + rest[:length]
            said, opened, rest = rest[length:].partition(CALL_BEGIN)
        else:
            calls.append(found)
            content = content.removesuffix("\n")  # templates put a call on a line of its own,
            # and one by parts after an empty line
            content = content.removesuffix("\n") if by_parts else content
            said, opened, rest = rest[length:].partition(CALL_BEGIN)
            said = "" if not said.strip() else said
    return content + said, calls, unparsed


def call_of_json(text: str) -> tuple[dict[str, Any] | str, int]:
    """The call that `text` begins with (after its opening mark) or why it is none, and how long it
    is, closing mark included.
    """
    closed = text.find(CALL_END)
    until = len(text) if closed < 0 else closed + len(CALL_END)
    start = len(text) - len(text.lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return ("was not finished" if closed < 0 else f"no JSON ({error})"), until
    after = text[end:].lstrip()
    if not after.startswith(CALL_END):
        return (
            "was not finished" if closed < 0 else f"more than one JSON value before {CALL_END}"
        ), until
    length = len(text) - len(after) + len(CALL_END)
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("name"), str)
        or not isinstance(value.get("arguments"), dict)
    ):
        return 'a call is {"name": text, "arguments": {...}}', length
    return {
        "type": "function",
        "function": {"name": value["name"], "arguments": value["arguments"]},
    }, length


def _call_by_parts(
    text: str, tools: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any] | str, int]:
    """As `call_of_json`, of <function=NAME><parameter=NAME>..</parameter></function>."""
    closed = text.find(CALL_END)
    until = len(text) if closed < 0 else closed + len(CALL_END)
    found = _FUNCTION.match(text)
    if found is None:
        return (
            "was not finished" if closed < 0 else "no <function=...> that ends before the call does"
        ), until
    name, body = found.groups()
    if _PARAMETER.sub("", body).strip():
        return "something beside its <parameter=...>", found.end()
    arguments = {
        key: _typed(value, _schema(tools, name, key)) for key, value in _PARAMETER.findall(body)
    }
    return {"type": "function", "function": {"name": name, "arguments": arguments}}, found.end()


def _schema(tools: Sequence[Mapping[str, Any]], name: str, parameter: str) -> Mapping[str, Any]:
    """What the description of a tool says of one of its parameters."""
    told: Mapping[str, Any] = next(
        (tool["function"] for tool in tools if tool.get("function", {}).get("name") == name), {}
    )
    found = (told.get("parameters") or {}).get("properties", {}).get(parameter)
    return found if isinstance(found, Mapping) else {"type": "string"}


def parameter_value(
    tools: Sequence[Mapping[str, Any]], name: str, parameter: str, text: str | None
) -> Any:
    """What a parameter that is written as `text` is read as; of None: None where it is a text, and
    can be read before it has ended.
    """
    schema = _schema(tools, name, parameter)
    if text is None:
        return None if schema.get("type") == "string" else schema
    return _typed(text, schema)


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    """A parameter's value: the text where its type is one, or where it is no JSON."""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def split_channels(text: str) -> tuple[str, str | None, list[dict[str, Any]], list[dict[str, str]]]:
    """gpt-oss: (what is said to the user, the thoughts or None, the calls, what was to be a call
    and is none), in the forms above.

    A message whose text has not begun stays as it is, in what is said.
    """
    said, thoughts, calls, unparsed = [], [], [], []
    for part in filter(None, NEXT_MESSAGE.split(text)):
        header, begun, body = part.partition(CHANNEL_TEXT)
        called = re.search(r"to=functions\.([^\s<]+)", header)
        if begun and called:
            try:
                arguments = json.loads(body)
                if not isinstance(arguments, dict):
                    raise ValueError("arguments are no JSON object")
                calls.append(
                    {"type": "function", "function": {"name": called[1], "arguments": arguments}}
                )
            except (ValueError, RecursionError) as error:
                unparsed.append({"raw_text": part, "error": f"no JSON ({error})"})
                said.append(part)
        elif begun and header.startswith(f"{CHANNEL}analysis"):
            thoughts.append(body)
        else:
            said.append(body if begun else part)
    return "\n\n".join(said), "\n\n".join(thoughts) if thoughts else None, calls, unparsed


def begun_channels(text: str) -> str:
    """Of an answer in such messages that is still being drawn: without the last one where its text
    has not begun, or is a call.
    """
    starts = [0, *(found.end() for found in NEXT_MESSAGE.finditer(text))]
    header, begun, _ = text[starts[-1] :].partition(CHANNEL_TEXT)
    if begun and "to=" not in header:
        return text
    before = [found.start() for found in NEXT_MESSAGE.finditer(text)]
    return text[: before[-1]] if before else ""


def broken_call(function: Mapping[str, Any]) -> str:
    """A call whose arguments (a text) are no JSON, as a model wrote it."""
    return f'{CALL_BEGIN}\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": {function["arguments"]}'


def with_calls(message: Mapping[str, Any]) -> str:
    """A parsed message as text again, calls included: what a reward reads."""
    calls = [
        f"{CALL_BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CALL_END}"
        for call in message.get("tool_calls") or ()
    ]
    content = str(message["content"])
    return "\n".join([*([content] if content or not calls else []), *calls])
