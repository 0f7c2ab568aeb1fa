"""Load .py files that are not on sys.path as modules."""

from __future__ import annotations

import importlib.util
import sys
import zlib
from pathlib import Path
from types import ModuleType

from rl.errors import UserError, describe_import_error, suggest_path


def load_file(path: str, label: str) -> ModuleType:
    """Load a .py file as a module, executed once per process and stored under a unique module name.

    Raises UserError, naming `label`, if loading fails.
    """
    name = f"whetstone_file_{Path(path).stem}_{zlib.crc32(path.encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not Path(path).is_file():
        raise UserError(f"{label} file {path} does not exist{suggest_path(Path(path))}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # holds for every .py path
    module = importlib.util.module_from_spec(spec)
    # Before execution: dataclasses and pickles in the file look the module up
    sys.modules[name] = module
    folder = str(Path(path).parent)
    if folder not in sys.path:
        # Makes modules in the same folder importable; last, so that none shadows a library.
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # boundary: user code
        del sys.modules[name]
        raise UserError(
            f"{label} file {path} failed to load: {describe_import_error(error, path)}"
        ) from error
    return module
