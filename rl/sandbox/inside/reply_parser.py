"""Parse the messages that a candidate's server sends. `candidate.Server` writes them; every reader
parses them here.

The program has access to the pipe, hence each message may hold arbitrary bytes. A message of any
other form raises `ForgedMessageError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl.sandbox.inside.message_framing import JsonObject, parse_object
from rl.sandbox.inside.value_codec import ForgedMessageError, is_family, is_name
from rl.sandbox.inside.value_display import show

_MAX_TEXT_LENGTH = 1000


@dataclass(frozen=True)
class ErrorReply:
    """Hold the exception of a request: class name, names of the base classes, text."""

    name: str
    family: list[str]
    text: str


@dataclass(frozen=True)
class ResultReply:
    """Hold the encoded result of a request. `arguments`: the encoded arguments of a call after the
    call; None if the answer has none.
    """

    value: Any
    arguments: list[Any] | None


def parse(body: bytes | str) -> JsonObject:
    """Return the JSON object of a frame. Raises ForgedMessageError."""
    return parse_object(body, ForgedMessageError)


def read_loaded(message: JsonObject) -> tuple[str, str] | None:
    """Return the reason that the program failed to load (load or exit, and a text), None if it
    loaded. Raises ForgedMessageError.
    """
    match message:
        case {"loaded": True, **rest} if not rest:
            return None
        case {"failed": [("load" | "exit") as word, str(text)], **rest} if not rest:
            if len(text) <= _MAX_TEXT_LENGTH:
                return word, text
    raise ForgedMessageError(f"not a load report: {show(message, 80)}")


def read_answer(
    message: JsonObject, number: int, arguments: int | None
) -> ResultReply | ErrorReply:
    """Return the answer to request `number`. `arguments`: the number of values passed to a call,
    None if the request is not a call.

    Only a call that returns None may report changed arguments: any other call could change the
    values that its result is compared with. Raises ForgedMessageError.
    """
    keys = message.keys()
    if type(message.get("id")) is not int or message["id"] != number:
        raise ForgedMessageError(
            f"a reply to request {show(message.get('id'), 40)}, expected {number}"
        )
    if keys == {"id", "raised"}:
        return _parse_raised(message["raised"])
    if keys == {"id", "value"}:
        return ResultReply(message["value"], None)
    if keys != {"id", "value", "arguments"}:
        raise ForgedMessageError(f"a reply with {show(sorted(keys), 80)}")
    changed = message["arguments"]
    if (
        message["value"] is not None
        or arguments is None
        or type(changed) is not list
        or len(changed) != arguments
    ):
        raise ForgedMessageError("arguments that this request cannot have changed")
    return ResultReply(None, changed)


def read_callback(message: JsonObject) -> tuple[str, list[Any]]:
    """Return the name of a tester's function and its encoded arguments. Raises ForgedMessageError."""
    match message:
        case {"call": str(name), "arguments": list(arguments), **rest} if not rest:
            return name, arguments
    raise ForgedMessageError(f"not a call of a test's function: {show(message, 80)}")


def _parse_raised(raised: Any) -> ErrorReply:
    match raised:
        case [name, family, str(text)] if is_name(name) and is_family(family):
            if len(text) <= _MAX_TEXT_LENGTH:
                return ErrorReply(name, family, text)
    raise ForgedMessageError(f"no exception: {show(raised, 80)}")
