"""Check code that a run's files name: it is imported if it lies in the current folder, or if the
user trusts the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.config import DataSettings, StageConfig, find_source_file, is_method_address
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


def list_method_addresses(stages: Sequence[StageConfig]) -> list[str]:
    """Return the methods of stages that are named by an address."""
    return [stage.method for stage in stages if is_method_address(stage.method)]


def check_method_code(address: str, source: str, trusted: bool = False) -> None:
    """Raise UserError if a method's code that a run's files name does not exist, or lies outside
    the current folder and is not trusted: opening the run would execute it.
    """
    file = find_source_file(address)
    if file is None or not file.exists():
        raise UserError(
            f"{source} names the method {address}, which is not available from this folder: "
            "change to its folder"
        )
    if not trusted and not file.is_relative_to(Path.cwd().resolve()):
        raise UserError(
            f"{source} names the method {address}, which is {file}: only code in the current "
            "folder is imported for a run that is opened; change to its folder, or give "
            "--trust-run (sample.py, evaluate.py, export.py) or trusted=True (rl.sample, "
            "rl.open_run) if you know that file"
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
