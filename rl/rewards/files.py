"""Modules of .py files that are on no path."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType

from rl.errors import UserError


def load_file(path: str, what: str) -> ModuleType:
    """The module of a .py file, executed once per process and kept under a name of its own.
    UserError, of `what`, where it fails.
    """
    name = f"whetstone_file_{Path(path).stem}_{zlib.crc32(path.encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not Path(path).is_file():
        raise UserError(f"{what} file {path} does not exist")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # true of every .py path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickles in it look themselves up
    beside = str(Path(path).parent)
    if beside not in sys.path:
        # its neighbours can be imported; last, so that none stands in for a library
        sys.path.append(beside)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # boundary: the user's module
        del sys.modules[name]
        raise UserError(
            f"{what} file {path} failed to load: {type(error).__name__}: {error}"
        ) from error
    return module
