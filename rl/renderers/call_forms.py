"""Calls of tools as other families write them, taken out of an answer: each form is known by what
its chat template writes.

    GLM 4.5  <tool_call>NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value> ... </tool_call>; what a value is, its tool's schema says
    Llama 3  {"name": NAME, "parameters": {...}} as the whole answer, or <|python_tag|> and that, or NAME.call(KEY="VALUE")
    Gemma 4  <|tool_call>call:NAME{KEY:VALUE,...}<tool_call|>, texts between <|"|>
    LFM2     <|tool_call_start|>[NAME(KEY='VALUE', ...), ...]<|tool_call_end|>
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.renderers.parsing import CALL_BEGIN, CALL_END, parameter_value

Tools = Sequence[Mapping[str, Any]]
Call = dict[str, Any]
# the text without calls, the calls, what was to be one and is none
Taken = tuple[str, list[Call], list[dict[str, str]]]

PYTHON_TAG = "<|python_tag|>"
_QUOTE = '<|"|>'
_ENDS_TRIED = 16  # an end mark may stand in an argument's text: so many are looked at


@dataclass(frozen=True)
class CallForm:
    """`begin`: its opening mark; `end`: the token that ends an answer which calls, where that is
    not the one that ends others.
    """

    name: str
    begin: str
    take: Callable[[str, Tools], Taken]
    end: str | None = None


def form_of(template: str) -> CallForm | None:
    """The form that a chat template writes; None where it is none of these (JSON within
    <tool_call>, say, or no calls at all).
    """
    return next((form for sign, form in _FORMS if sign in template), None)


def as_call(name: str, arguments: dict[str, Any]) -> Call:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _between(
    begin: str, end: str, read: Callable[[str, Tools], list[Call]]
) -> Callable[[str, Tools], Taken]:
    """Takes what stands between two marks and `read` reads (it raises ValueError for what is no
    call).
    """

    def take(text: str, tools: Tools) -> Taken:
        content, calls, unparsed = "", [], []
        said, opened, rest = text.partition(begin)
        while opened:
            content += said
            length, found = _first_readable(rest, end, lambda body: read(body, tools))
            if isinstance(found, str):
                raw = begin + rest[:length]
                unparsed.append({"raw_text": raw, "error": found})
                content += raw
            else:
                calls += found
                content = content.rstrip("\n") if not rest[length:].strip() else content
            said, opened, rest = rest[length:].partition(begin)
        return content + (said if said.strip() or not calls else ""), calls, unparsed

    return take


def _first_readable(
    text: str, end: str, read: Callable[[str], list[Call]]
) -> tuple[int, list[Call] | str]:
    """(how long it is with its end mark, the calls or why they are none): up to the first end mark
    before which it is readable.
    """
    at, length, why = -1, len(text), "was not finished"
    for _ in range(_ENDS_TRIED):
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


def _glm(body: str, tools: Tools) -> list[Call]:
    name, opened, rest = body.partition("<arg_key>")
    name, rest = name.strip(), opened + rest
    if not re.fullmatch(r"[^\s<>{}]+", name):
        raise ValueError("a call begins with its tool's name, on a line of its own")
    if _ARGUMENT.sub("", rest).strip():
        raise ValueError("something beside its <arg_key>...</arg_key><arg_value>...</arg_value>")
    return [
        as_call(
            name,
            {
                key.strip(): parameter_value(tools, name, key.strip(), value)
                for key, value in _ARGUMENT.findall(rest)
            },
        )
    ]


# ------------------------------------------------------------------------------------------ Llama 3


def _llama(text: str, tools: Tools) -> Taken:
    """A call is the whole answer. Without the tag it is one where there are tools and it is JSON
    with a name and parameters.
    """
    body = text.strip()
    tagged = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).strip()
    if not tagged and not (tools and body.startswith("{")):
        return text, [], []
    try:
        return "", [_llama_json(body) if body.startswith("{") else _called_method(body)], []
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        # another JSON object is an answer like any other
        meant = tagged or re.match(r'\{\s*"(name|type)"\s*:', body)
        return (
            text,
            [],
            [{"raw_text": text, "error": str(error).partition("\n")[0]}] if meant else [],
        )


def _llama_json(body: str) -> Call:
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
    return as_call(value["name"], value["parameters"])


def _called_method(body: str) -> Call:
    call = _python_call(_parsed(body))
    name, called, rest = call["function"]["name"].rpartition(".call")
    if not called or rest:
        raise ValueError("a call of a built-in tool is NAME.call(KEY=VALUE, ...)")
    return as_call(name, call["function"]["arguments"])


# --------------------------------------------------------------------------------------------- LFM2


def _lfm(body: str, tools: Tools) -> list[Call]:
    found = _parsed(body.strip())
    if not isinstance(found, ast.List) or not found.elts:
        raise ValueError("calls are a list, [NAME(KEY=VALUE, ...), ...]")
    return [_python_call(node) for node in found.elts]


def _parsed(text: str) -> ast.expr:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of backslashes in texts
        return ast.parse(text, mode="eval").body


def _python_call(node: ast.expr) -> Call:
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
    return as_call(
        name, {str(keyword.arg): _python_value(keyword.value) for keyword in node.keywords}
    )


def _python_value(node: ast.expr) -> Any:
    """A literal of Python or JSON."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _python_value(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(item) for item in node.elts]
    if isinstance(node, ast.Dict) and all(
        isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys
    ):
        keys = [key.value for key in node.keys]  # type: ignore[union-attr]
        return dict(zip(keys, map(_python_value, node.values), strict=True))
    raise ValueError("an argument is a text, a number, true, false, null, a list or an object")


# ------------------------------------------------------------------------------------------ Gemma 4


def _gemma(body: str, tools: Tools) -> list[Call]:
    found = re.match(r"\s*call:([^\s{}<>]+)(?=\{)", body)
    if found is None:
        raise ValueError("a call is call:NAME{KEY:VALUE,...}")
    arguments, end = _gemma_value(body, found.end())
    if body[end:].strip():
        raise ValueError("something after its arguments")
    return [as_call(found[1], arguments)]


def _gemma_value(text: str, at: int) -> tuple[Any, int]:
    """(the value that begins there, where it ends)."""
    if text.startswith(_QUOTE, at):
        end = text.find(_QUOTE, at + len(_QUOTE))
        if end < 0:
            raise ValueError("a text was not finished")
        return text[at + len(_QUOTE) : end], end + len(_QUOTE)
    if text[at : at + 1] in ("{", "["):
        return _gemma_many(text, at)
    found = re.compile(r"[^,\[\]{}<>]+").match(text, at)
    if found is None:
        raise ValueError("a value is missing")
    return json.loads(found[0].strip()), found.end()


def _gemma_many(text: str, at: int) -> tuple[Any, int]:
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
            values[key[2] if key[1] is None else key[1]], at = _gemma_value(text, key.end())
        else:
            value, at = _gemma_value(text, at)
            values.append(value)
        mark, at = text[at : at + 1], at + 1
        if mark == closing:
            return values, at
        if mark != ",":
            raise ValueError(f"after a value comes a comma or {closing}")


# A sign in the template, and the form that it tells of.
_FORMS: tuple[tuple[str, CallForm], ...] = (
    (
        "<arg_key>",
        CallForm("glm", CALL_BEGIN, _between(CALL_BEGIN, CALL_END, _glm), "<|observation|>"),
    ),
    (
        "<|tool_call>call:",
        CallForm(
            "gemma",
            "<|tool_call>",
            _between("<|tool_call>", "<tool_call|>", _gemma),
            "<|tool_response>",
        ),
    ),
    (
        "<|tool_call_start|>[",
        CallForm(
            "lfm", "<|tool_call_start|>", _between("<|tool_call_start|>", "<|tool_call_end|>", _lfm)
        ),
    ),
    ("""'"parameters": '""", CallForm("llama", PYTHON_TAG, _llama, "<|eom_id|>")),
)
