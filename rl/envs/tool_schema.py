"""Convert a function to a JSON schema, from its type hints and docstring, in the form of chat
templates.

For hints and docstrings that `transformers.utils.get_json_schema` takes, the result equals its
result without "return". transformers is not imported, which would be slow in the process of an
episode.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

from rl.errors import UserError
from rl.sanitize import describe_error

_SIMPLE_TYPES: dict[Any, dict[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"}, list: {"type": "array"}, dict: {"type": "object"}, Any: {},
}  # fmt: skip
_SECTION = re.compile(
    r"^\s*(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?):\s*$", re.MULTILINE
)


def make_tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return {"type": "function", "function": {name, description, parameters}}.

    Raises UserError if an argument has no type or no line under "Args:", if a type hint cannot be
    evaluated, or if the docstring has no summary.
    """
    described: Any = function  # has the hints and the docstring
    while isinstance(described, functools.partial):
        described = described.func
    name = getattr(described, "__name__", type(described).__name__)
    docstring = inspect.getdoc(described)
    if not (inspect.isroutine(described) or inspect.isclass(described)):
        described = described.__call__  # of a callable object
        docstring = inspect.cleandoc(described.__doc__ or "") or docstring
    summary, descriptions = _parse_docstring(docstring or inspect.getdoc(function) or "")
    if not summary:
        raise UserError(
            f"the tool {name} has no docstring: add it, it describes the tool to the model"
        )
    try:
        hints = typing.get_type_hints(described)
    except Exception as error:  # boundary: a hint in quotes is evaluated here
        raise UserError(
            f"the type hints of the tool {name} cannot be evaluated "
            f"({describe_error(error, 200)}): import their names in its module"
        ) from error
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError(
                f"the tool {name} takes *{parameter.name}: each argument needs a name, which the"
                " model sees"
            )
        if parameter.name not in hints or parameter.name not in descriptions:
            missing = (
                "type hint"
                if parameter.name not in hints
                else "line under 'Args:' in the docstring"
            )
            raise UserError(
                f"the argument {parameter.name} of the tool {name} has no {missing}, which"
                " describes the argument to the model"
            )
        properties[parameter.name] = {
            **_type_schema(hints[parameter.name], name),
            **_parse_description(descriptions[parameter.name]),
        }
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    parameters |= {"required": required} if required else {}
    return {
        "type": "function",
        "function": {"name": name, "description": summary, "parameters": parameters},
    }


def _parse_docstring(text: str) -> tuple[str, Mapping[str, str]]:
    """Return the text before the first section, and the description of each argument under Args."""
    parts = _SECTION.split(text)
    descriptions: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            for entry in re.split(r"\n(?=\s{1,8}\*{0,2}\w+\s*(?:\([^)\n]*\))?:)", "\n" + body):
                match = re.match(r"\s*(\w+)\s*(?:\([^)\n]*\))?:\s*(.*)", entry, re.DOTALL)
                if match:
                    descriptions[match[1]] = " ".join(match[2].split())
    return parts[0].strip(), descriptions


def _parse_description(text: str) -> dict[str, Any]:
    """Return the description of an argument, and as "enum" the values of a JSON list at its end:
    (choices: ["tea", "coffee"]).
    """
    match = re.search(r"\(choices:\s*(\[.*?\])\)\s*$", text, re.IGNORECASE)
    try:
        choices = json.loads(match[1]) if match is not None else None
    except ValueError:  # no JSON: a part of the text
        choices = None
    if match is None or choices is None:
        return {"description": text}
    choices = [choice.strip() if isinstance(choice, str) else choice for choice in choices]
    return {"enum": choices, "description": text[: match.start()].strip()}


def _type_schema(hint: Any, name: str) -> dict[str, Any]:
    """Return the schema of a type hint. Raises UserError for types that JSON cannot express."""
    if hint in list(_SIMPLE_TYPES):  # a list: a wrong hint may have no hash
        return dict(_SIMPLE_TYPES[hint])
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    value_types = {type(value) for value in arguments}
    if origin is Literal and value_types <= _SIMPLE_TYPES.keys():
        return {
            **(_SIMPLE_TYPES[value_types.pop()] if len(value_types) == 1 else {}),
            "enum": list(arguments),
        }
    if origin in (Union, types.UnionType):
        non_null = [member_type for member_type in arguments if member_type is not type(None)]
        kinds = [_type_schema(member_type, name) for member_type in non_null]
        if len(kinds) == 1:
            schema = kinds[0]
        elif all(set(kind) == {"type"} and isinstance(kind["type"], str) for kind in kinds):
            schema = {"type": sorted(kind["type"] for kind in kinds)}
        else:
            schema = {"anyOf": kinds}
        return {**schema, "nullable": True} if len(non_null) < len(arguments) else schema
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return {"type": "array", "prefixItems": [_type_schema(kind, name) for kind in arguments]}
    if origin in (list, Sequence, tuple, set):
        items = _type_schema(arguments[0], name) if arguments and arguments[0] is not Any else {}
        return {"type": "array", **({"items": items} if items else {})}
    if origin in (dict, Mapping):
        values = (
            _type_schema(arguments[1], name)
            if len(arguments) == 2 and arguments[1] is not Any
            else {}
        )
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    raise UserError(
        f"the tool {name} has an argument of type {hint!r}, which JSON does not have: use str, int,"
        " float, bool, list, dict or Literal"
    )
