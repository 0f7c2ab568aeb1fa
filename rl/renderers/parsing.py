"""What a model wrote, taken apart: thoughts between <think> and </think>, calls of tools between <tool_call> and </tool_call>."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"


def split_thoughts(text: str) -> tuple[str, str | None]:
    """(the text without its thoughts, the thoughts, an empty line between them); None where no thought ended.

    The first may have been opened by the prompt. One that never ended stays in the text.
    """
    head, ended, rest = text.partition(THOUGHT_END)
    if not ended:
        return text, None
    before, opened, thought = head.rpartition(THOUGHT_BEGIN)
    content = before if opened and before.strip() else ""
    thoughts = [thought.strip()]
    while True:
        said, opened, inner = rest.partition(THOUGHT_BEGIN)
        thought, ended, after = inner.partition(THOUGHT_END)
        if not (opened and ended):
            return content + rest.lstrip("\n"), "\n\n".join(part for part in thoughts if part)
        content += said.lstrip("\n")
        thoughts.append(thought.strip())
        rest = after


def split_calls(text: str) -> tuple[str, list[dict[str, Any]], list[dict[str, str]]]:
    """(the text without calls, the calls, what looks like a call and is none).

    A call is {"type": "function", "function": {"name": ..., "arguments": {...}}}, the form that templates render back. What is
    none (cut off, or no JSON of that form) stays in the text, and is named as {"raw_text": ..., "error": ...}.
    """
    content, calls, unparsed = "", [], []
    said, opened, rest = text.partition(CALL_BEGIN)
    while opened:
        content += said
        found, length = _call(rest)
        if isinstance(found, str):
            unparsed.append({"raw_text": CALL_BEGIN + rest[:length], "error": found})
            content += CALL_BEGIN + rest[:length]
            said, opened, rest = rest[length:].partition(CALL_BEGIN)
        else:
            calls.append(found)
            content = content.removesuffix("\n")  # templates put a call on a line of its own
            said, opened, rest = rest[length:].partition(CALL_BEGIN)
            said = "" if not said.strip() else said
    return content + said, calls, unparsed


def _call(text: str) -> tuple[dict[str, Any] | str, int]:
    """The call that `text` begins with (after its opening mark) or why it is none, and how long it is, closing mark included."""
    closed = text.find(CALL_END)
    until = len(text) if closed < 0 else closed + len(CALL_END)
    start = len(text) - len(text.lstrip())
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        return ("was not finished" if closed < 0 else f"no JSON ({error})"), until
    after = text[end:].lstrip()
    if not after.startswith(CALL_END):
        return ("was not finished" if closed < 0 else f"more than one JSON value before {CALL_END}"), until
    length = len(text) - len(after) + len(CALL_END)
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get("arguments"), dict):
        return 'a call is {"name": text, "arguments": {...}}', length
    return {"type": "function", "function": {"name": value["name"], "arguments": value["arguments"]}}, length


def with_calls(message: Mapping[str, Any]) -> str:
    """A parsed message as text again, calls included: what a reward reads."""
    calls = [
        f"{CALL_BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CALL_END}" for call in message.get("tool_calls") or ()
    ]
    content = str(message["content"])
    return "\n".join([*([content] if content or not calls else []), *calls])
