"""Parse an answer while it is sampled, for streaming to a client. Each partial message is a prefix
of the final message.

A tool call counts once its name and the start of its arguments are written. Its arguments are then
the text that the model writes, whether or not it becomes valid JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from rl.renderers.renderer import Renderer
from rl.renderers.response_parsing import (
    CALL_END,
    CALL_HEADER,
    CHANNEL,
    CHANNEL_TEXT,
    NEXT_MESSAGE,
    Call,
    Tools,
    build_answer,
    find_call_end,
    list_parameter_types,
    make_call,
    parse_json_call,
    parse_parameter,
    split_channels,
    split_parsed_calls,
    split_thoughts,
)
from rl.renderers.tool_call_formats import PYTHON_TAG, TAGGED_CALLS, ToolCallFormat
from rl.types import Message

_JSON_HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)'
)
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"?|[{}\[\]]|' + re.escape(CALL_END), re.DOTALL)
_FUNCTION_HEADER = re.compile(r"\s*<function=([^>\n]+)>\n?")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_PARAMETER_END = ("\n</parameter>", "</parameter>")


def trim_uncertain_end(text: str, marks: Sequence[str]) -> str:
    """Return a growing text up to a possible start of a mark or part of a character."""
    held = (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
    return text[: len(text) - max(held, default=0)].rstrip("\ufffd")


def _parse_json_call(text: str, ended: bool) -> tuple[Call | str, int]:
    """Return (the call after its opening mark, or the reason why it is not known yet or invalid;
    its length, -1 if the call has not ended).
    """
    header = _JSON_HEADER.match(text)
    if header is None:
        whole, length = parse_json_call(text)
        return whole if isinstance(whole, str) else _with_text_arguments(whole), length
    try:
        name = json.loads(header[1])
    except ValueError as error:
        return f"no JSON ({error})", find_call_end(text)
    depth, begin = 0, header.end()
    for piece in _JSON_TOKEN.finditer(text, begin):
        depth += piece[0] in ("{", "[")
        depth -= piece[0] in ("}", "]")
        if piece[0] == CALL_END:
            return make_call(name, text[begin : piece.start()].rstrip()), piece.end()
        if depth == 0:
            return make_call(name, text[begin : piece.end()]), find_call_end(text, piece.end())
    arguments = text[begin:] if ended else trim_uncertain_end(text[begin:], (CALL_END,))
    return make_call(name, arguments.rstrip()), -1


def _with_text_arguments(call: Call) -> Call:
    """Return a call with its arguments as JSON text."""
    function = call["function"]
    return make_call(function["name"], json.dumps(function["arguments"], ensure_ascii=False))


def _parse_xml_call(text: str, tools: Tools, ended: bool) -> tuple[Call | str, int]:
    """Do the same as `_parse_json_call` for
    <function=NAME><parameter=NAME>..</parameter></function>. The arguments become JSON text.
    """
    header = _FUNCTION_HEADER.match(text)
    if header is None:
        return "has no name", find_call_end(text)
    name, at, arguments = header[1], header.end(), "{"
    while (parameter := _PARAMETER.match(text, at)) is not None:
        end = text.find("</parameter>", parameter.end())
        separator = "" if arguments == "{" else ", "
        key = f"{separator}{json.dumps(parameter[1], ensure_ascii=False)}: "
        if end < 0:
            begun = text[parameter.end() :]
            begun = begun if ended else trim_uncertain_end(begun, _PARAMETER_END)
            # a text can be streamed
            is_text = list_parameter_types(tools, name, parameter[1]) == {"string"}
            if is_text and (begun or ended):
                arguments += key + json.dumps(begun, ensure_ascii=False)[:-1]
            # a number, for example, is read when it is complete
            return make_call(name, arguments), -1
        value = parse_parameter(
            tools, name, parameter[1], text[parameter.end() : end].removesuffix("\n")
        )
        arguments += key + json.dumps(value, ensure_ascii=False)
        at = end + len("</parameter>")
    finish = re.compile(r"\s*</function>").match(text, at)
    return make_call(name, arguments + ("}" if finish else "")), find_call_end(text, at)


def _split_partial_channels(
    text: str, marks: Sequence[str], ended: bool
) -> tuple[str, str | None, list[Call]]:
    """Return (the text for the user, the thoughts or None, the calls) of a gpt-oss answer. A
    message is a call if its arguments start with a brace. The last message of an answer that has
    not `ended` is left out if it has no text yet, or will be a call.
    """
    parts, calls = [], []
    messages = NEXT_MESSAGE.split(text)
    for number, part in enumerate(messages, start=1):
        is_open = number == len(messages) and not ended
        part = trim_uncertain_end(part, marks) if is_open else part
        header, begun, body = part.partition(CHANNEL_TEXT)
        called = CALL_HEADER.search(header) if begun else None
        if called is not None and body.lstrip().startswith("{"):
            calls.append(make_call(called[1], body.strip()))
        elif not is_open or (begun and "to=" not in header):
            parts.append(part)
    return *split_channels("<|end|>".join(parts))[:2], calls


def prompt_opens_thoughts(renderer: Renderer, prompt: Sequence[int]) -> bool:
    """Return whether a prompt (token ids) ends with the opening mark of thoughts, so that the
    answer starts there. The same mark within a message opens nothing.
    """
    thought = renderer.thought_marks()
    if thought is None:
        return False
    return renderer.decode(prompt[-64:]).rstrip().endswith(thought[0].rstrip())


def parse_partial_answer(
    renderer: Renderer, tokens: Sequence[int], within_thoughts: bool, ended: bool
) -> Message:
    """Return the message of an answer's first tokens, as far as it is certain, or of all tokens if
    it has `ended`.

    Thoughts (`reasoning_content`) and text are streamed as they are written. Calls (`tool_calls`)
    have their arguments as text, which is streamed too; a call is included once its name is known.
    A thought that never ended counts as thought, not as text. `within_thoughts`: the result of
    `prompt_opens_thoughts`. At the end of a text, these are held back: spaces, parts of characters,
    and possible starts of a mark. A single exception to the prefix property remains: a closing mark
    of thoughts without an opening mark turns the preceding text into thoughts.
    """
    marks, text = renderer.marks(), renderer.get_answer_text(tokens)
    if CHANNEL in marks:
        content, thoughts, calls = _split_partial_channels(text, marks, ended)
        return build_answer(renderer.cut_at_stop(content), thoughts, calls)
    around = renderer.thought_marks()
    form = renderer.call_format()
    content, thoughts, inside = text, None, ""
    if around is not None:
        content, thoughts = split_thoughts(text, around)
        content, thoughts, thinking = _split_open_thought(
            content, thoughts, around[0], within_thoughts, ended
        )
        if thinking and thoughts is not None:
            # A call within thoughts counts as a call only if the thoughts never end.
            if form is not None:
                thoughts, called, rest = thoughts.partition(form.begin)
                inside = called + rest if ended else ""
            thoughts = thoughts if ended else trim_uncertain_end(thoughts, (around[1], *marks))
        thoughts = None if thoughts is None else thoughts.strip()
    content = content if ended else trim_uncertain_end(content, marks)
    calls = []
    if form is not None:
        tools = renderer.available_tools()
        content, calls = _split_partial_calls(form, tools, content, ended)
        after, more_calls = _split_partial_calls(form, tools, inside, True)
        content, calls = content + after, calls + more_calls
    content = content if ended else content.rstrip()
    return build_answer(renderer.cut_at_stop(content), thoughts, calls)


def _split_partial_calls(
    form: ToolCallFormat, tools: Tools, text: str, ended: bool
) -> tuple[str, list[Call]]:
    """Return (the text without its calls, the calls) of an answer without its thoughts.

    `ended`: no text follows. Otherwise a call without a known name, and everything after it, is
    left out, and so are calls in a special format (`rl.renderers.tool_call_formats`).
    """
    if form == TAGGED_CALLS:
        return split_parsed_calls(
            text,
            lambda rest: _parse_json_call(rest, ended),
            lambda rest: _parse_xml_call(rest, tools, ended),
            ended,
        )[:2]
    if ended:
        content, parsed_calls, _ = form.parse(text, tools)
        return content, list(map(_with_text_arguments, parsed_calls))
    if form.begin == PYTHON_TAG and tools and text.lstrip().startswith("{"):
        return "", []  # the whole answer may be a call
    return text.partition(form.begin)[0], []


def _split_open_thought(
    content: str, thoughts: str | None, begin: str, within: bool, ended: bool
) -> tuple[str, str | None, bool]:
    """Return (the remaining content, the thoughts including an unfinished thought, whether an
    unfinished thought exists).
    """
    if within and thoughts is None:
        return "", content.removeprefix(begin), True
    before, opened, thought = content.partition(begin)
    if opened:
        thought = thought.lstrip()
        joined = thought if not thoughts else f"{thoughts}\n\n{thought}" if thought else thoughts
        return before if before.strip() else "", joined, True
    if not ended and thoughts is None and begin.startswith(content.lstrip()):
        return "", None, True  # no text yet, or part of a mark
    return content, thoughts, False
