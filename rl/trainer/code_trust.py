"""Check code that a run's files name: it is imported if it lies in the current folder, or if the
user trusts the run.
"""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from typing import Any

from rl.config import DataSettings
from rl.errors import UserError


def list_environment_addresses(settings: Any) -> list[str]:
    """Return the environment that a stage's settings name by an address."""
    named = getattr(getattr(settings, "env", None), "environment", None) or ""
    return [named] if ":" in named else []


def list_reward_addresses(data: DataSettings) -> list[str]:
    """Return the rewards that settings name by an address. Registered rewards belong to the
    project.
    """
    named = [name for name, _ in data.rewards] or [data.reward or ""]
    return [name for name in named if ":" in name]


def find_source_file(address: str) -> Path | None:
    """Return the file that `file.py:function` or `module:function` would import, or None. Nothing
    is imported.
    """
    place = address.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).expanduser().resolve()
    top, *inner = place.split(".")
    # Look up the top package only: to look inside of it, Python would import it.
    spec = importlib.machinery.PathFinder.find_spec(top, sys.path)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        folder = Path(next(iter(spec.submodule_search_locations)))
        inside = folder.joinpath(*inner)
        return next(
            (
                path.resolve()
                for path in (inside.with_suffix(".py"), inside / "__init__.py")
                if path.is_file()
            ),
            folder.resolve(),
        )
    return Path(spec.origin).resolve() if spec.origin else None


def check_method_code(address: str, source: str) -> None:
    """Raise UserError if a method's code that a run's files name lies outside the current folder:
    opening the run would execute it.
    """
    file = find_source_file(address)
    exists = file is not None and file.exists()
    if not exists or not file.is_relative_to(Path.cwd().resolve()):  # type: ignore[union-attr]
        raise UserError(
            f"{source} names the method {address}, which is "
            f"{file if exists else 'not available from this folder'}: only code in the current "
            "folder is imported for a run that is opened; change to its folder"
        )


def is_outside_current_folder(addresses: list[str]) -> bool:
    """Return whether the code at one of the addresses lies outside the current folder:
    `check_trusted` then needs --trust-run.
    """
    files = [find_source_file(address) for address in addresses]
    return any(file is not None and not file.is_relative_to(Path.cwd().resolve()) for file in files)


def check_trusted(
    addresses: list[str], source: str, trusted: bool, kind: str = "reward"
) -> list[str]:
    """Return messages that name the code which the files of a run import. Raises UserError if the
    code lies elsewhere and is not trusted.
    """
    messages = []
    for address in addresses:
        file = find_source_file(address)
        if file is None:
            raise UserError(
                f"{source} names the {kind} {address}, which is not available from this folder: "
                f"give --{kind}, or change to its folder"
            )
        if not trusted and not file.is_relative_to(Path.cwd().resolve()):
            raise UserError(
                f"{source} names the {kind} {address}, which is {file}: not in the current "
                "folder, and importing it runs it. Give --trust-run if you know that file, or "
                f"--{kind} with another one"
            )
        messages.append(f"{source} names the {kind} {address}: importing {file}")
    return messages
