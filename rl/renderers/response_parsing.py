"""Parse the text of an answer: thoughts between <think> and </think>, tool calls between
<tool_call> and </tool_call>.

A call is JSON, or (Qwen3.5 and later) <function=NAME> with a <parameter=NAME> for each argument.
gpt-oss writes thoughts, calls and answer as separate messages, each with a channel
(`split_channels`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rl.types import Message

Tools = Sequence[Mapping[str, Any]]
Call = dict[str, Any]
CallParser = Callable[[str], tuple[Call | str, int]]
# (text without calls, calls, failed calls)
ParsedCalls = tuple[str, list[Call], list[dict[str, str]]]

THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
CHANNEL, CHANNEL_TEXT = "<|channel|>", "<|message|>"
# Known marks around thoughts: most families, and Gemma 4.
THOUGHTS = ((THOUGHT_BEGIN, THOUGHT_END), ("<|channel>thought\n", "<channel|>"))
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\n?(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_JSON_TYPES: dict[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    type(None): frozenset({"null"}),
    dict: frozenset({"object"}),
    list: frozenset({"array"}),
}
# as templates of the form <parameter=NAME> write these values
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
NEXT_MESSAGE = re.compile(r"<\|end\|>(?:<\|start\|>assistant)?|<\|start\|>assistant")
CALL_HEADER = re.compile(r"to=functions\.([^\s<]+)")


def make_call(name: str, arguments: Any) -> Call:
    """Return a call as a chat template expects it."""
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def build_answer(
    content: str,
    thoughts: str | None = None,
    calls: Sequence[Call] = (),
    unparsed: Sequence[Mapping[str, str]] = (),
) -> Message:
    """Return the assistant message of a parsed answer: its text, thoughts, calls and failed calls
    (see `split_calls`).
    """
    message: Message = {"role": "assistant", "content": content}
    message |= {} if thoughts is None else {"reasoning_content": thoughts}
    message |= {"tool_calls": calls} if calls else {}
    return message | ({"unparsed_tool_calls": unparsed} if unparsed else {})


def parse_arguments(message: Message) -> Message:
    """Return a message with the arguments of its calls as objects. OpenAI's format has them as JSON
    text, which most templates would encode as JSON once more.
    """
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call.get("function", call))
        if isinstance(function.get("arguments"), str):
            try:
                parsed = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError):
                parsed = None
            function["arguments"] = parsed if isinstance(parsed, dict) else function["arguments"]
        calls.append({**call, "type": "function", "function": function})
    return {**message, "tool_calls": calls} if calls else message


def find_thought_marks(template: str) -> tuple[str, str] | None:
    """Return the marks that a chat template writes around thoughts, or None."""
    return next((marks for marks in THOUGHTS if marks[1] in template), None)


def split_thoughts(text: str, marks: tuple[str, str] = THOUGHTS[0]) -> tuple[str, str | None]:
    """Return (the text without its thoughts, the thoughts joined by empty lines). The thoughts are
    None if no thought ended.

    `marks`: the marks around thoughts. The prompt may contain the opening mark of the first
    thought. An unfinished thought stays in the text.
    """
    begin, end = marks
    head, ended, rest = text.partition(end)
    if not ended:
        return text, None
    before, opened, thought = head.rpartition(begin)
    content = before if opened and before.strip() else ""
    thoughts = [thought.strip()]
    while True:
        before_thought, opened, inner = rest.partition(begin)
        thought, ended, after = inner.partition(end)
        if not (opened and ended):
            return content + rest.lstrip("\n"), "\n\n".join(part for part in thoughts if part)
        content += before_thought.lstrip("\n")
        thoughts.append(thought.strip())
        rest = after


def split_calls(text: str, tools: Tools = ()) -> ParsedCalls:
    """Return (the text without calls, the calls, the failed calls).

    A call is {"type": "function", "function": {"name": ..., "arguments": {...}}}, the form that
    templates render. A failed call (cut off, or not JSON of this form) stays in the text and is
    reported as {"raw_text": ..., "error": ...}. `tools`: the tools that may be called. In a call of
    the form <function=NAME><parameter=NAME>, each parameter is converted to its type in the tool's
    schema (text if the schema lacks the parameter).
    """

    return split_parsed_calls(text, parse_json_call, lambda rest: _parse_xml_call(rest, tools))


def split_parsed_calls(
    text: str, parse_json: CallParser, parse_xml: CallParser, ended: bool = True
) -> ParsedCalls:
    """Do as `split_calls` with parsers of a call in JSON and of one in <function=...>.

    A parser receives the text after an opening mark. It returns (the call, or the reason why there
    is none; its length with the closing mark, -1 without one). `ended`: no text follows. Otherwise
    a failed call without a closing mark, and what follows it, is left out.
    """
    content, calls, unparsed = "", [], []
    before, opened, rest = text.partition(CALL_BEGIN)
    while opened:
        content += before
        by_parts = rest.lstrip().startswith("<function=")
        call, length = parse_xml(rest) if by_parts else parse_json(rest)
        raw = rest if length < 0 else rest[:length]
        before, opened, rest = rest[len(raw) :].partition(CALL_BEGIN)
        if not isinstance(call, str):
            calls.append(call)
            content = content.removesuffix("\n")  # templates put a call on a separate line,
            # and a call in parts after an empty line
            content = content.removesuffix("\n") if by_parts else content
            before = "" if not before.strip() else before
        elif length < 0 and not ended:
            break
        else:
            unparsed.append({"raw_text": CALL_BEGIN + raw, "error": call})
            content += CALL_BEGIN + raw
    return content + before, calls, unparsed


def find_call_end(text: str, at: int = 0) -> int:
    """Return the position after the closing mark of a call, searched from `at` on; -1 if it is not
    written yet.
    """
    end = text.find(CALL_END, at)
    return -1 if end < 0 else end + len(CALL_END)


def parse_json_call(text: str) -> tuple[Call | str, int]:
    """Return (the call at the start of `text`, after its opening mark, or the reason why it is
    invalid; its length including the closing mark, -1 without one).
    """
    until = find_call_end(text)
    start = len(text) - len(text.lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return ("was not finished" if until < 0 else f"no JSON ({error})"), until
    after = text[end:].lstrip()
    if not after.startswith(CALL_END):
        return (
            "was not finished" if until < 0 else f"more than one JSON value before {CALL_END}"
        ), until
    length = len(text) - len(after) + len(CALL_END)
    match value:
        case {"name": str(name), "arguments": dict(arguments)}:
            return make_call(name, arguments), length
    return 'a call is {"name": text, "arguments": {...}}', length


def _parse_xml_call(text: str, tools: Tools) -> tuple[Call | str, int]:
    """Do as `parse_json_call` for <function=NAME><parameter=NAME>..</parameter></function>."""
    until = find_call_end(text)
    match = _FUNCTION.match(text)
    if match is None:
        return (
            "was not finished" if until < 0 else "no <function=...> that ends before the call ends"
        ), until
    name, body = match.groups()
    if _PARAMETER.sub("", body).strip():
        return "unexpected text outside <parameter=...>", match.end()
    arguments = {
        key: parse_parameter(tools, name, key, value) for key, value in _PARAMETER.findall(body)
    }
    return make_call(name, arguments), match.end()


def list_parameter_types(tools: Tools, name: str, parameter: str) -> set[str]:
    """Return the JSON types that a tool's schema names for a parameter (default: a string)."""
    function: Mapping[str, Any] = next(
        (tool["function"] for tool in tools if tool.get("function", {}).get("name") == name), {}
    )
    schema = ((function.get("parameters") or {}).get("properties") or {}).get(parameter)
    if not isinstance(schema, Mapping):
        return {"string"}
    types: set[str] = set()
    options = (item for word in ("anyOf", "oneOf", "allOf") for item in schema.get(word) or ())
    for option in (schema, *options):
        if not isinstance(option, Mapping):  # true or false: any or no value
            continue
        named = option.get("type", "object" if "$ref" in option else [])
        types.update(map(str, named if isinstance(named, list) else [named]))
    return types


def parse_parameter(tools: Tools, name: str, parameter: str, text: str) -> Any:
    """Return the value of a tool's parameter: the text if it is not JSON, or if it may be a string
    and is not JSON of another type that the parameter's schema names, else the parsed JSON. True,
    False and None are read as JSON's words.
    """
    types = list_parameter_types(tools, name, parameter)
    try:
        value = json.loads(_PYTHON_WORDS.get(text, text))
    except (ValueError, RecursionError):
        return text
    is_other = _JSON_TYPES.get(type(value), frozenset()) & types
    return value if is_other or "string" not in types else text


def split_channels(text: str) -> tuple[str, str | None, list[Call], list[dict[str, str]]]:
    """Return (the text for the user, the thoughts or None, the calls, the failed calls) of a
    gpt-oss answer, in the forms above.

    A message without the start of its text stays unchanged in the text for the user.
    """
    contents, thoughts, calls, unparsed = [], [], [], []
    for part in filter(None, NEXT_MESSAGE.split(text)):
        header, begun, body = part.partition(CHANNEL_TEXT)
        called = CALL_HEADER.search(header)
        if begun and called:
            try:
                arguments = json.loads(body)
                if not isinstance(arguments, dict):
                    raise ValueError("arguments are not a JSON object")
                calls.append(make_call(called[1], arguments))
            except (ValueError, RecursionError) as error:
                unparsed.append({"raw_text": part, "error": f"no JSON ({error})"})
                contents.append(part)
        elif begun and header.startswith(f"{CHANNEL}analysis"):
            thoughts.append(body)
        else:
            contents.append(body if begun else part)
    return "\n\n".join(contents), "\n\n".join(thoughts) if thoughts else None, calls, unparsed


def format_broken_call(function: Mapping[str, Any]) -> str:
    """Return a call with invalid JSON arguments (a text) as the model wrote it."""
    return (
        f'{CALL_BEGIN}\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, '
        f'"arguments": {function["arguments"]}'
    )


def format_with_calls(message: Mapping[str, Any]) -> str:
    """Return the text of a parsed message with its calls, which a reward reads."""
    calls = [
        f"{CALL_BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CALL_END}"
        for call in message.get("tool_calls") or ()
    ]
    content = str(message["content"])
    return "\n".join([*([content] if content or not calls else []), *calls])
