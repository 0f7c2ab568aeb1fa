"""A method of one's own: `train.py mine.py:Method`, a class with settings and hooks in a file,
beside those that are here by name.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

from rl.methods.spec import MethodSpec, method_spec
from rl.settings import SettingsError

_HOOKS = ("learn", "state", "load_state")


class Methods(dict[str, MethodSpec]):
    """The methods by name; `file.py:Class` and `module:Class` are names as well, and are imported
    when they are first asked for.
    """

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (is_address(name) and self[str(name)] is not None)

    def __missing__(self, name: str) -> MethodSpec:
        if not is_address(name):
            raise KeyError(name)
        return _spec(name)

    def get(self, name: str, default: Any = None) -> Any:  # type: ignore[override]
        return self[name] if name in self else default


def is_address(name: object) -> bool:
    """Whether a word names a method by where it lies."""
    place, colon, attribute = str(name).rpartition(":")
    return (
        isinstance(name, str)
        and bool(colon and place)
        and attribute.isidentifier()
        and not name.startswith("tiny:")
    )


def _spec(address: str) -> MethodSpec:
    """SettingsError where there is no such class, or it is no method."""
    place, _, attribute = address.rpartition(":")
    module = _file(place) if place.endswith(".py") else _module(place, address)
    found = getattr(module, attribute, None)
    if isinstance(found, MethodSpec):
        return found
    if not isinstance(found, type):
        there = ", ".join(
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        )
        raise SettingsError(
            [f"method {address}: {place} has no class {attribute}; it has {there or 'none'}"]
        )
    settings = getattr(found, "Settings", None)
    hooks = [*_HOOKS, "credit" if getattr(found, "online", False) else "datums"]
    if missing := [name for name in hooks if not callable(getattr(found, name, None))]:
        raise SettingsError(
            [
                f"method {address} has no {' and no '.join(missing)}: see rl/methods/base.py for what a method is"
            ]
        )
    if not dataclasses.is_dataclass(settings):
        raise SettingsError(
            [
                f"method {address} has no Settings, a dataclass of sections such as rl.methods.GrpoSettings (which it may be, or inherit from)"
            ]
        )
    summary = (found.__doc__ or address).strip().splitlines()[0]
    return method_spec(found, settings, summary)  # type: ignore[arg-type]


def _file(place: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    name = f"whetstone_method_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise SettingsError([f"method {place}: there is no such file (seen from {Path.cwd()})"])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # true of every .py path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses in it look themselves up
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # boundary: the user's module
        del sys.modules[name]
        raise SettingsError(
            [f"method file {place} failed to load: {type(error).__name__}: {error}"]
        ) from error
    return module


def _module(place: str, address: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise SettingsError(
            [f"method {address}: importing {place} failed ({error}); name a file as file.py:Class"]
        ) from error
