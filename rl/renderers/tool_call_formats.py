"""Parse tool calls in the formats of several model families; the chat template determines the
format.

    GLM 4.5  <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>;
             the tool's schema gives the type of each value
    Llama 3  {"name": NAME, "parameters": {...}} as the whole answer, or <|python_tag|> followed
             by it, or NAME.call(KEY="VALUE")
    Gemma 4  <|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>, texts between <|"|>
    LFM2     <|tool_call_start|>[NAME(KEY='VALUE', ...), ...]<|tool_call_end|>
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl.renderers.response_parsing import (
    CALL_BEGIN,
    CALL_END,
    Call,
    ParsedCalls,
    Tools,
    make_call,
    parse_parameter,
    split_calls,
)

PYTHON_TAG = "<|python_tag|>"
_QUOTE = '<|"|>'
_MAX_END_MARKS = 16  # maximum number of end marks to try: an argument's text may contain the mark


@dataclass(frozen=True)
class ToolCallFormat:
    """Describe a format of tool calls. `begin`: its opening mark. `parse`: its parser. `end`: the
    token that ends an answer with calls, if it differs from the usual end token.
    """

    name: str
    begin: str
    parse: Callable[[str, Tools], ParsedCalls]
    end: str | None = None


def find_call_format(template: str) -> ToolCallFormat | None:
    """Return the format that a chat template writes, or None for TAGGED_CALLS or a template without
    calls.
    """
    return next((form for sign, form in _FORMATS if sign in template), None)


def _make_parser(
    begin: str, end: str, read: Callable[[str, Tools], list[Call]]
) -> Callable[[str, Tools], ParsedCalls]:
    """Return a parser of calls between two marks. `read` parses the text between them and raises
    ValueError if it is not a call.
    """

    def take(text: str, tools: Tools) -> ParsedCalls:
        content, calls, unparsed = "", [], []
        before, opened, rest = text.partition(begin)
        while opened:
            content += before
            length, parsed = _parse_first_valid(rest, end, lambda body: read(body, tools))
            if isinstance(parsed, str):
                raw = begin + rest[:length]
                unparsed.append({"raw_text": raw, "error": parsed})
                content += raw
            else:
                calls += parsed
                content = content.rstrip("\n") if not rest[length:].strip() else content
            before, opened, rest = rest[length:].partition(begin)
        return content + (before if before.strip() or not calls else ""), calls, unparsed

    return take


def _parse_first_valid(
    text: str, end: str, read: Callable[[str], list[Call]]
) -> tuple[int, list[Call] | str]:
    """Return (length including the end mark, the calls or the reason why parsing failed), for the
    first end mark at which `read` succeeds.
    """
    at, length, why = -1, len(text), "was not finished"
    for _ in range(_MAX_END_MARKS):
        at = text.find(end, at + 1)
        if at < 0:
            break
        try:
            return at + len(end), read(text[:at])
        except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
            if length == len(text):
                length, why = at + len(end), str(error).partition("\n")[0] or type(error).__name__
    return length, why


# ---------------------------------------------------------------------------------------------- GLM

_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _parse_glm(body: str, tools: Tools) -> list[Call]:
    """Parse a GLM call."""
    name, opened, rest = body.partition("<arg_key>")
    name, rest = name.strip(), opened + rest
    if not re.fullmatch(r"[^\s<>{}]+", name):
        raise ValueError("a call begins with its tool's name, on a separate line")
    if _ARGUMENT.sub("", rest).strip():
        raise ValueError("unexpected text outside <arg_key>...</arg_key><arg_value>...</arg_value>")
    pairs = ((key.strip(), value) for key, value in _ARGUMENT.findall(rest))
    return [make_call(name, {k: parse_parameter(tools, name, k, value) for k, value in pairs})]


# ------------------------------------------------------------------------------------------ Llama 3


def _parse_llama(text: str, tools: Tools) -> ParsedCalls:
    """Parse a Llama 3 answer that is a call as a whole. Without the tag it is a call if tools exist
    and it is JSON with a name and parameters.
    """
    body = text.strip()
    tagged = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).strip()
    if not tagged and not (tools and body.startswith("{")):
        return text, [], []
    try:
        parse = _parse_llama_json if body.startswith("{") else _parse_llama_builtin
        return "", [parse(body)], []
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        # any other JSON object is an ordinary answer
        meant = tagged or re.match(r'\{\s*"(name|type)"\s*:', body)
        unparsed = {"raw_text": text, "error": str(error).partition("\n")[0]}
        return text, [], [unparsed] if meant else []


def _parse_llama_json(body: str) -> Call:
    """Parse a Llama 3 call written as JSON."""
    try:
        value = json.loads(body)
    except ValueError as error:
        raise ValueError(f"no JSON ({error})") from None
    if (
        not isinstance(value, dict)
        or value.keys() - {"type"} != {"name", "parameters"}
        or not isinstance(value["name"], str)
    ):
        raise ValueError('a call is {"name": text, "parameters": {...}}')
    if not isinstance(value["parameters"], dict):
        raise ValueError('"parameters" is an object, {"key": value, ...}')
    return make_call(value["name"], value["parameters"])


def _parse_llama_builtin(body: str) -> Call:
    """Parse a Llama 3 call of a built-in tool, NAME.call(KEY=VALUE)."""
    call = _convert_python_call(_parse_expression(body))
    name, called, rest = call["function"]["name"].rpartition(".call")
    if not called or rest:
        raise ValueError("a call of a built-in tool is NAME.call(KEY=VALUE, ...)")
    return make_call(name, call["function"]["arguments"])


# --------------------------------------------------------------------------------------------- LFM2


def _parse_lfm(body: str, tools: Tools) -> list[Call]:
    """Parse a list of LFM2 calls."""
    parsed = _parse_expression(body.strip())
    if not isinstance(parsed, ast.List) or not parsed.elts:
        raise ValueError("calls are a list, [NAME(KEY=VALUE, ...), ...]")
    return [_convert_python_call(node) for node in parsed.elts]


def _parse_expression(text: str) -> ast.expr:
    """Return the syntax tree of a Python expression."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about backslashes in strings
        return ast.parse(text, mode="eval").body


def _convert_python_call(node: ast.expr) -> Call:
    """Return the call of a Python call expression with keyword arguments."""
    if (
        not isinstance(node, ast.Call)
        or node.args
        or any(keyword.arg is None for keyword in node.keywords)
    ):
        raise ValueError("a call is NAME(KEY=VALUE, ...)")
    inner, parts = node.func, []
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if not isinstance(inner, ast.Name):
        raise ValueError("a call begins with its tool's name")
    name = ".".join([inner.id, *reversed(parts)])
    return make_call(
        name, {str(keyword.arg): _convert_python_value(keyword.value) for keyword in node.keywords}
    )


def _convert_python_value(node: ast.expr) -> Any:
    """Return the value of a literal of Python or JSON."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id="true" | "false" | "null" as word):
            return json.loads(word)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = _convert_python_value(operand)
            if isinstance(number, int | float) and not isinstance(number, bool):
                return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_convert_python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [key.value for key in keys if isinstance(key, ast.Constant)]
            if len(names) == len(keys) and all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_convert_python_value, values), strict=True))
    raise ValueError("an argument is a text, a number, true, false, null, a list or an object")


# ------------------------------------------------------------------------------------------ Gemma 4


def _parse_gemma(body: str, tools: Tools) -> list[Call]:
    """Parse a Gemma 4 call."""
    header = re.match(r"\s*call:([^\s{}<>]+)(?=\{)", body)
    if header is None:
        raise ValueError("a call is call:NAME{KEY:VALUE,...}")
    arguments, end = _parse_gemma_value(body, header.end())
    if body[end:].strip():
        raise ValueError("unexpected text after its arguments")
    return [make_call(header[1], arguments)]


def _parse_gemma_value(text: str, at: int) -> tuple[Any, int]:
    """Return (the value that begins at position `at`, its end position)."""
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise ValueError("a text was not finished")
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text[at : at + 1] in ("{", "["):
        return _parse_gemma_container(text, at)
    literal = re.compile(r"[^,\[\]{}<>]+").match(text, at)
    if literal is None:
        raise ValueError("a value is missing")
    return json.loads(literal[0].strip()), literal.end()


def _parse_gemma_container(text: str, at: int) -> tuple[Any, int]:
    """Return (the object or list that begins at position `at`, its end position)."""
    closing = {"{": "}", "[": "]"}[text[at]]
    values: dict[str, Any] | list[Any] = {} if closing == "}" else []
    at += 1
    if text[at : at + 1] == closing:
        return values, at + 1
    while True:
        if isinstance(values, dict):
            key = re.compile(r'<\|"\|>(.*?)<\|"\|>:|([^:,\[\]{}]+):', re.DOTALL).match(text, at)
            if key is None:
                raise ValueError("an argument is KEY:VALUE")
            values[key[2] if key[1] is None else key[1]], at = _parse_gemma_value(text, key.end())
        else:
            value, at = _parse_gemma_value(text, at)
            values.append(value)
        mark, at = text[at : at + 1], at + 1
        if mark == closing:
            return values, at
        if mark != ",":
            raise ValueError(f"after a value comes a comma or {closing}")


# JSON, or <function=...>, within <tool_call>
TAGGED_CALLS = ToolCallFormat("tagged", CALL_BEGIN, split_calls)
# (text in a chat template, the format that it identifies)
_FORMATS: tuple[tuple[str, ToolCallFormat], ...] = (
    (
        "<arg_key>",
        ToolCallFormat(
            "glm", CALL_BEGIN, _make_parser(CALL_BEGIN, CALL_END, _parse_glm), "<|observation|>"
        ),
    ),
    (
        "<|tool_call>call:",
        ToolCallFormat(
            "gemma",
            "<|tool_call>",
            _make_parser("<|tool_call>", "<tool_call|>", _parse_gemma),
            "<|tool_response>",
        ),
    ),
    (
        "<|tool_call_start|>[",
        ToolCallFormat(
            "lfm",
            "<|tool_call_start|>",
            _make_parser("<|tool_call_start|>", "<|tool_call_end|>", _parse_lfm),
        ),
    ),
    ("""'"parameters": '""", ToolCallFormat("llama", PYTHON_TAG, _parse_llama, "<|eom_id|>")),
)
