"""What a model is told of a function: its JSON schema, from type hints and docstring, in the form
that chat templates take.

As `transformers.utils.get_json_schema` gives it, without the imports that it brings: a process of
an episode does this as well.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

from rl.errors import UserError

_SIMPLE: dict[Any, dict[str, Any]] = {
    str: {"type": "string"}, int: {"type": "integer"}, float: {"type": "number"}, bool: {"type": "boolean"},
    type(None): {"type": "null"}, list: {"type": "array"}, dict: {"type": "object"}, Any: {},
}  # fmt: skip
_SECTION = re.compile(
    r"^\s*(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?):\s*$", re.MULTILINE
)


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """{"type": "function", "function": {name, description, parameters}}.

    UserError where an argument has no type, no line under "Args:", or there is no summary.
    """
    name = getattr(function, "__name__", type(function).__name__)
    summary, said = _docstring(inspect.getdoc(function) or "")
    if not summary:
        raise UserError(
            f"the tool {name} has no docstring: a model is told by it what the tool does"
        )
    hints = typing.get_type_hints(function)
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise UserError(
                f"the tool {name} takes *{parameter.name}: a model has to be told each argument by its name"
            )
        if parameter.name not in hints or parameter.name not in said:
            what = (
                "type hint"
                if parameter.name not in hints
                else "line under 'Args:' in the docstring"
            )
            raise UserError(
                f"the argument {parameter.name} of the tool {name} has no {what}, which says to a model what to give"
            )
        properties[parameter.name] = {
            **_of_type(hints[parameter.name], name),
            "description": said[parameter.name],
        }
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    parameters |= {"required": required} if required else {}
    return {
        "type": "function",
        "function": {"name": name, "description": summary, "parameters": parameters},
    }


def _docstring(text: str) -> tuple[str, Mapping[str, str]]:
    """(what stands before the first section, each argument's line under Args)."""
    parts = _SECTION.split(text)
    said: dict[str, str] = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            for entry in re.split(r"\n(?=\s{1,8}\*{0,2}\w+\s*(?:\([^)\n]*\))?:)", "\n" + body):
                found = re.match(r"\s*(\w+)\s*(?:\([^)\n]*\))?:\s*(.*)", entry, re.DOTALL)
                if found:
                    said[found[1]] = " ".join(found[2].split())
    return parts[0].strip(), said


def _of_type(hint: Any, name: str) -> dict[str, Any]:
    if hint in _SIMPLE:
        return dict(_SIMPLE[hint])
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        of = {type(value) for value in inner}
        return {**(_SIMPLE[of.pop()] if len(of) == 1 else {}), "enum": list(inner)}
    if origin in (Union, types.UnionType):
        real = [one for one in inner if one is not type(None)]
        kinds = [_of_type(one, name) for one in real]
        if len(kinds) == 1:
            found = kinds[0]
        elif all(set(kind) == {"type"} and isinstance(kind["type"], str) for kind in kinds):
            found = {"type": sorted(kind["type"] for kind in kinds)}
        else:
            found = {"anyOf": kinds}
        return {**found, "nullable": True} if len(real) < len(inner) else found
    if origin in (list, Sequence, tuple, set):
        items = _of_type(inner[0], name) if inner and inner[0] is not Any else {}
        return {"type": "array", **({"items": items} if items else {})}
    if origin in (dict, Mapping):
        values = _of_type(inner[1], name) if len(inner) == 2 and inner[1] is not Any else {}
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    raise UserError(
        f"the tool {name} has an argument of type {hint!r}, which JSON has not: str, int, float, bool, list, dict or Literal"
    )
