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
    """`value` with numbers as Python's own, and null for what strict JSON cannot say (NaN,
    infinity).
    """
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
    """One line of strict JSON, keys in their given order. ValueError for NaN and infinity: pass the
    row through `finite`.

    Half of a surrogate pair, which UTF-8 has no bytes for, is written as JSON's own escape.
    """
    return (
        json.dumps(row, ensure_ascii=False, allow_nan=False)
        .encode("utf-8", "backslashreplace")
        .decode("utf-8")
        + "\n"
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file. An unfinished last line (a killed writer) is left out; any other
    bad line is an error.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    unfinished = lines.pop()  # b"" where the last line was finished
    rows = [_row(line, f"{path} line {number}") for number, line in enumerate(lines, start=1)]
    if unfinished:
        try:
            rows.append(_row(unfinished, ""))
        except UserError:
            pass
    return rows


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); repair or delete that line") from error
    if not isinstance(row, dict):
        raise UserError(
            f"{where} is no JSON object but a {type(row).__name__}; repair or delete that line"
        )
    return row


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl: "step" counts upwards, "stage" is a text, other values are
    numbers, texts or null.

    UserError naming the first line that is none of that.
    """
    rows = read_rows(path)
    last = 0
    for number, row in enumerate(rows, start=1):
        step, wrong = row.get("step"), None
        if not isinstance(step, int) or isinstance(step, bool) or step < last:
            wrong = f"its step is {step!r:.40} where a whole number from {last} on was expected"
        elif not isinstance(row.get("stage", ""), str):
            wrong = f"its stage is {row['stage']!r:.40} where a name was expected"
        else:
            odd = next((key for key, value in row.items() if not _is_metric(value)), None)
            wrong = (
                None
                if odd is None
                else f"its {odd[:40]} is {row[odd]!r:.40} where a number was expected"
            )
        if wrong is not None:
            raise UserError(f"{path} line {number}: {wrong}; repair that line")
        last = row["step"]
    return rows


def _is_metric(value: Any) -> bool:
    """No number beyond a float's: JSON's integers have no end, and some write infinity."""
    return (
        value is None
        or isinstance(value, (str, bool))
        or (isinstance(value, (int, float)) and -1.7e308 < value < 1.7e308)
    )
