"""Packages that only a wrapper needs, imported when an environment of theirs is made."""

from __future__ import annotations

import importlib
import json
from typing import Any

from rl.errors import UserError


def package(module: str, name: str) -> Any:
    """The module. UserError with the line that installs `name` (as the package index knows it)
    where it is not there.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] != error.name.split(".")[0]:
            raise UserError(
                f"the package {name} is installed, but not {error.name}, which it needs: pip install {error.name}"
            ) from error
        file = f"requirements-{name}.txt"
        raise UserError(
            f"this environment needs the package {name}: pip install -r {file}"
        ) from error


def options(given: str, what: str) -> dict[str, Any]:
    """Settings written as a JSON object. UserError where they are none."""
    try:
        found = json.loads(given or "{}")
    except ValueError as error:
        raise UserError(
            f'{what} is a JSON object such as {{"max_number": 8}}, got {given!r} ({error})'
        ) from error
    if not isinstance(found, dict):
        raise UserError(f'{what} is a JSON object such as {{"max_number": 8}}, got {given!r}')
    return found


def plain_number(value: Any) -> float | None:
    """A number of any library as a float; None where it is none."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    return float(value)
