"""Rows of JSON in files, strict and whole, and the names of a run's metrics file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl.errors import UserError

METRICS = "metrics.jsonl"


def write_atomically(path: Path, text: str) -> None:
    """Write the whole file or leave the old one, also after a power cut."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w", encoding="utf-8", errors="replace") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name itself: what it replaces may be removed next
    finally:
        os.close(folder)


def finite(value: Any) -> Any:
    """`value` with numbers as Python's own, and null for what strict JSON cannot say (NaN, infinity)."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return finite(value.tolist())
    number = float(value)
    return number if math.isfinite(number) else None


def json_line(row: Mapping[str, Any]) -> str:
    """One line of strict JSON, keys in their given order. ValueError for NaN and infinity: pass the row through `finite`."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file. An unfinished last line (a killed writer) is left out; any other bad line is an error."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    unfinished = lines.pop()  # "" where the last line was finished
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UserError(f"{path} line {number} is not JSON ({error}); repair or delete that line") from error
    if unfinished:
        try:
            rows.append(json.loads(unfinished))
        except json.JSONDecodeError:
            pass
    return rows
