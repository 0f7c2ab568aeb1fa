"""Write and read the files of update records: arrays, and metadata as JSON."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl.errors import RunFolderError

_UPDATE_FILE = re.compile(r"step_(\d{6,})(?:_.+)?\.update\.safetensors")
_METADATA_KEY = "update"


def name_update_file(stage: str, step: int) -> str:
    """Return the name of the record of the update of a step; `stage`: name of a later stage."""
    return f"step_{step:06d}{f'_{stage}' if stage else ''}.update.safetensors"


def write_update_file(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]
) -> None:
    """Replace a record atomically."""
    from safetensors.numpy import save

    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    data = save(contiguous, metadata={_METADATA_KEY: json.dumps(metadata)})
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def list_update_files(folder: Path) -> dict[int, Path]:
    """Return the records below a `folder` of rollouts by step, in order."""
    return {
        int(match[1]): path
        for path in sorted(folder.glob("step_*.update.safetensors"))
        if (match := _UPDATE_FILE.fullmatch(path.name))
    }


def read_update_file(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and the metadata of a record. Raises RunFolderError if it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = json.loads((file.metadata() or {})[_METADATA_KEY])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RunFolderError(
            f"{path} cannot be read as the record of an update: {error}"
        ) from error
    return arrays, metadata
