"""Check code that a run's files name: it is imported if it lies in the current folder, or if the
user trusts the run.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.config import DataSettings, StageConfig
from rl.errors import UserError

LAUNCH_FOLDER_KEY = "launched_from"  # in config.json: the folder in which the run was started


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


def locate_recorded_files(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config.json for use in another folder than the one that it was started in.

    Relative files that do not exist here (code and data) are replaced by those of the run's
    starting folder. Nothing is imported: `check_trusted` decides about code.
    """
    start = config.get(LAUNCH_FOLDER_KEY)
    if not isinstance(start, str):
        return dict(config)

    def locate(word: Any) -> Any:
        if not isinstance(word, str):
            return word
        place, colon, name = word.rpartition(":") if ".py:" in word else (word, "", "")
        path = Path(start, place)
        if not place or Path(place).expanduser().exists() or not path.exists():
            return word
        return f"{path}{colon}{name}"

    stages = []
    for stage in config["stages"]:
        settings = dict(stage["settings"])
        settings |= {key: locate(settings[key]) for key in _FILE_SETTINGS if key in settings}
        if isinstance(rewards := settings.get("rewards"), list):
            settings["rewards"] = [
                [locate(pair[0]), *pair[1:]] if isinstance(pair, list) and pair else pair
                for pair in rewards
            ]
        stages.append({**stage, "method": locate(stage["method"]), "settings": settings})
    return {**config, "stages": stages}


_FILE_SETTINGS = ("reward", "environment", "dataset", "eval_dataset")


def list_code_addresses(stage: StageConfig) -> list[str]:
    """Return all code that a stage names by an address: its method, rewards and environment."""
    return [
        *([stage.method] if ":" in stage.method else []),
        *list_reward_addresses(stage.settings.data),
        *list_environment_addresses(stage.settings),
    ]


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
