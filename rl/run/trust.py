"""Code that a run's files name: it is imported where it lies in the current folder, or where the
user says that the run may be trusted.
"""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path
from typing import Any

from rl.errors import UserError
from rl.settings import DataSettings


def environment_address(settings: Any) -> list[str]:
    """The environment that a stage's settings name by an address."""
    named = getattr(getattr(settings, "env", None), "environment", None) or ""
    return [named] if ":" in named else []


def rewards_of(data: DataSettings) -> list[str]:
    """The rewards that settings name by an address; registered ones are the project's own."""
    named = [name for name, _ in data.rewards] or [data.reward or ""]
    return [name for name in named if ":" in name]


def source_of(address: str) -> Path | None:
    """The file that `file.py:function` or `module:function` would import; None where there is none.
    Nothing is imported.
    """
    place = address.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).expanduser().resolve()
    top, *inner = place.split(".")
    # of the package alone: to ask for what is in it, Python would import it
    found = importlib.machinery.PathFinder.find_spec(top, sys.path)
    if found is None:
        return None
    if found.submodule_search_locations:
        folder = Path(next(iter(found.submodule_search_locations)))
        inside = folder.joinpath(*inner)
        return next(
            (
                path.resolve()
                for path in (inside.with_suffix(".py"), inside / "__init__.py")
                if path.is_file()
            ),
            folder.resolve(),
        )
    return Path(found.origin).resolve() if found.origin else None


def check_code(address: str, where: str) -> None:
    """UserError where a method of one's own that a run's files name lies outside of the current
    folder: to open the run would run it.
    """
    file = source_of(address)
    there = file is not None and file.exists()
    if not there or not file.is_relative_to(Path.cwd().resolve()):  # type: ignore[union-attr]
        raise UserError(
            f"{where} names the method {address}, which is {file if there else 'not to be found from here'}: only code in the current "
            "folder is imported for a run that is opened; go to its folder"
        )


def is_outside_current_folder(addresses: list[str]) -> bool:
    """Return whether the code at one of the addresses lies outside the current folder:
    `check_trusted` then needs --trust-run.
    """
    files = [source_of(address) for address in addresses]
    return any(file is not None and not file.is_relative_to(Path.cwd().resolve()) for file in files)


def check_trusted(named: list[str], where: str, trusted: bool, what: str = "reward") -> list[str]:
    """What code the files of a run make us import, in words; UserError where some of it lies
    elsewhere and nobody said to trust it.
    """
    said = []
    for address in named:
        file = source_of(address)
        if file is None:
            raise UserError(
                f"{where} names the {what} {address}, which is not to be found from here: give --{what}, or go to its folder"
            )
        if not trusted and not file.is_relative_to(Path.cwd().resolve()):
            raise UserError(
                f"{where} names the {what} {address}, which is {file}: not in the current folder, and importing it runs it. Give "
                f"--trust-run if you know that file, or --{what} with one of your own"
            )
        said.append(f"{where} names the {what} {address}: importing {file}")
    return said
