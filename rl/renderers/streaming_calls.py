"""Parse tool calls while they are written: the name, and the certain part of the arguments.

A call counts once its name and the start of its arguments are written. Its arguments are then the
text that the model writes, whether or not it becomes valid JSON. So the partial result is always a
prefix of the final result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rl.renderers.response_parsing import (
    CALL_BEGIN,
    CALL_END,
    CHANNEL_TEXT,
    NEXT_MESSAGE,
    Tools,
    parse_json_call,
    parse_parameter,
)

_JSON_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)'
)
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\]]|' + re.escape(CALL_END), re.DOTALL)
_FUNCTION_HEADER = re.compile(r"\s*<function=([^>\n]+)>\n?")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_PARAMETER_END = ("\n</parameter>", "</parameter>")
_TO_FUNCTION = re.compile(r"to=functions\.([^\s<]+)")


@dataclass(frozen=True, slots=True)
class PartialCall:
    """Hold a partial tool call. `arguments` is the JSON text so far."""

    name: str
    arguments: str


def get_mark_overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `mark`."""
    return next(
        (n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0
    )


def trim_uncertain_end(text: str, marks: Sequence[str]) -> str:
    """Return a growing text up to a possible start of a mark or part of a character."""
    held = max((get_mark_overlap(text, mark) for mark in marks), default=0)
    return text[: len(text) - held].rstrip("\ufffd")


def parse_partial_calls(text: str, tools: Tools, ended: bool) -> tuple[str, list[PartialCall]]:
    """Return (the text without its calls, the calls) of an answer without its thoughts, like
    `split_calls` for complete calls.

    `ended`: no text follows. Otherwise a call without a known name, and everything after it, is
    left out.
    """
    content, calls = "", list[PartialCall]()
    before, opened, rest = text.partition(CALL_BEGIN)
    while opened:
        content += before
        by_parts = rest.lstrip().startswith("<function=")
        call, length = (
            _parse_xml_call(rest, tools, ended) if by_parts else _parse_json_call(rest, ended)
        )
        if call is None and length < 0:
            if not ended:
                return content, calls
            length = len(rest)
        if call is None:
            content += CALL_BEGIN + rest[:length]
            before, opened, rest = rest[length:].partition(CALL_BEGIN)
            continue
        calls.append(call)
        content = content.removesuffix("\n")
        content = content.removesuffix("\n") if by_parts else content
        if length < 0:
            return content, calls
        before, opened, rest = rest[length:].partition(CALL_BEGIN)
        before = "" if not before.strip() else before
    return content + before, calls


def _parse_json_call(text: str, ended: bool) -> tuple[PartialCall | None, int]:
    """Return (the call after its opening mark, its length). The call is None if it is not known yet
    or invalid; the length is -1 if the call has not ended.
    """
    closed = text.find(CALL_END)
    header = _JSON_HEADER.match(text)
    if header is None:
        whole, length = parse_json_call(text)
        if isinstance(whole, str):
            return None, -1 if closed < 0 else length
        return PartialCall(
            whole["function"]["name"],
            json.dumps(whole["function"]["arguments"], ensure_ascii=False),
        ), length
    try:
        name = json.loads(header[1])
    except ValueError:
        return None, -1 if closed < 0 else closed + len(CALL_END)
    depth, begin = 0, header.end()
    for piece in _JSON_TOKEN.finditer(text, begin):
        depth += piece[0] in ("{", "[")
        depth -= piece[0] in ("}", "]")
        if piece[0] == CALL_END:
            return PartialCall(name, text[begin : piece.start()].rstrip()), piece.end()
        if depth == 0:
            end = text.find(CALL_END, piece.end())
            return PartialCall(name, text[begin : piece.end()]), -1 if end < 0 else end + len(
                CALL_END
            )
    return PartialCall(
        name,
        text[begin:].rstrip() if ended else trim_uncertain_end(text[begin:], (CALL_END,)).rstrip(),
    ), -1


def _parse_xml_call(text: str, tools: Tools, ended: bool) -> tuple[PartialCall | None, int]:
    """Do the same as `_parse_json_call` for
    <function=NAME><parameter=NAME>..</parameter></function>. The arguments become JSON text.
    """
    closed = text.find(CALL_END)
    header = _FUNCTION_HEADER.match(text)
    if header is None:
        return None, -1 if closed < 0 else closed + len(CALL_END)
    name, at, arguments = header[1], header.end(), "{"
    while (parameter := _PARAMETER.match(text, at)) is not None:
        end = text.find("</parameter>", parameter.end())
        key = (
            ("" if arguments == "{" else ", ") + json.dumps(parameter[1], ensure_ascii=False) + ": "
        )
        if end < 0:
            value = parse_parameter(tools, name, parameter[1], None)
            begun = (
                text[parameter.end() :]
                if ended
                else trim_uncertain_end(text[parameter.end() :], _PARAMETER_END)
            )
            if value is not None or (
                not begun and not ended
            ):  # a number, for example, is read when it is complete
                return PartialCall(name, arguments), -1
            return PartialCall(
                name, arguments + key + json.dumps(begun, ensure_ascii=False)[:-1]
            ), -1
        value = parse_parameter(
            tools, name, parameter[1], text[parameter.end() : end].removesuffix("\n")
        )
        arguments += key + json.dumps(value, ensure_ascii=False)
        at = end + len("</parameter>")
    finish = re.compile(r"\s*</function>").match(text, at)
    end = text.find(CALL_END, at)
    return PartialCall(name, arguments + ("}" if finish else "")), -1 if end < 0 else end + len(
        CALL_END
    )


def parse_channel_calls(
    text: str, marks: Sequence[str], ended: bool
) -> tuple[str, list[PartialCall]]:
    """Return (the text without messages that are calls, the calls) of a gpt-oss answer. A message
    is a call if its arguments start with a brace.
    """
    parts, calls, last = [], [], 0
    bounds = [(match.start(), match.end()) for match in NEXT_MESSAGE.finditer(text)]
    for start, end in [*bounds, (len(text), len(text))]:
        header, begun, body = text[last:start].partition(CHANNEL_TEXT)
        called = _TO_FUNCTION.search(header) if begun else None
        if called is not None and body.lstrip().startswith("{"):
            open_end = start == len(text) and not ended
            calls.append(
                PartialCall(
                    called[1], (trim_uncertain_end(body, marks) if open_end else body).strip()
                )
            )
        else:
            parts.append(text[last:end])
        last = end
    return "".join(parts), calls
