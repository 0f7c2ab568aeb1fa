"""Import packages that only an adapter needs, when an environment of the package is made."""

from __future__ import annotations

import importlib
import json
from typing import Any

from rl.errors import UserError, install_command


def import_package(module: str, name: str) -> Any:
    """Return an imported module. Raises UserError, with the command that installs the package
    `name` (an extra of pyproject.toml), if it is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] != error.name.split(".")[0]:
            raise UserError(
                f"the package {name} is installed, but not {error.name}, which it needs:"
                f" pip install {error.name}"
            ) from error
        raise UserError(
            f"this environment needs the package {name}: {install_command(name)}"
        ) from error


def parse_json_options(text: str, setting: str) -> dict[str, Any]:
    """Parse settings written as a JSON object. Raises UserError if the text is not a JSON
    object.
    """
    problem = f'{setting} must be a JSON object such as {{"max_number": 8}}, got {text!r}'
    try:
        parsed = json.loads(text or "{}")
    except ValueError as error:
        raise UserError(f"{problem} ({error})") from error
    if not isinstance(parsed, dict):
        raise UserError(problem)
    return parsed


def to_float(value: Any) -> float | None:
    """Return a number of any library as a float; None for any other value."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except Exception:  # boundary: an array of several numbers, a complex tensor
        return None
