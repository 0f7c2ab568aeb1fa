"""Read and write rows of strict JSON, and name a run's metrics file."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl.errors import UserError

Row = Mapping[str, Any]  # of a file of JSON lines: metrics, samples, checkpoints
METRICS_FILE = "metrics.jsonl"
TEMPORARY = ".tmp"  # ends the names of files that are being written
# held-out answers: <stage>-eval-<step>.jsonl, greedy ones <stage>-eval-greedy-<step>.jsonl
_EVALUATION_FILE = re.compile(r".+-eval-(?:greedy-)?(\d{6,})\.jsonl")

# samples of a training step, and their page: step_000010.jsonl, step_000010_<stage>.html
_ROLLOUT_FILE = re.compile(r"step_(\d+)(?:[._].*)?")


def name_evaluation_file(stage: str, step: int, *, greedy: bool = False) -> str:
    """Return the name of the file that holds a stage's held-out answers at a step of the run."""
    return f"{stage}-eval-{'greedy-' if greedy else ''}{step:06d}.jsonl"


def get_evaluation_step(name: str) -> int | None:
    """Return the step of a file of held-out answers by its name; None for any other file."""
    match = _EVALUATION_FILE.fullmatch(name)
    return None if match is None else int(match[1])


def get_rollout_step(name: str) -> int | None:
    """Return the step of a run's file of rollouts by its name (step_000010.jsonl,
    step_000010_grpo.html); None for any other file.
    """
    match = _ROLLOUT_FILE.fullmatch(name)
    return None if match is None else int(match[1])


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace the file atomically: after a crash or power cut, it has its old or new content. Each
    of several writers has a temporary file of its own.
    """
    data = content.encode("utf-8", "replace") if isinstance(content, str) else content
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{TEMPORARY}")
    try:
        temporary.write_bytes(data)
        flush_to_disk(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_to_disk(path.parent)  # the directory entry: the caller may remove the replaced data next


def flush_to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk. No-op for a folder of a file system
    (FUSE, CIFS) that does not flush folders.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def replace_nonfinite(value: Any) -> Any:
    """Convert numbers to Python's types, and NaN and infinity, which strict JSON lacks, to None."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(key): replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_nonfinite(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return replace_nonfinite(value.tolist())
    number = float(value)
    return number if math.isfinite(number) else None


def format_json_line(row: Row) -> str:
    """Return a line of strict JSON, with keys in their order.

    Half of a surrogate pair, which UTF-8 cannot encode, is written as a JSON escape. Raises
    ValueError for NaN and infinity: pass the row through `replace_nonfinite`.
    """
    return (
        json.dumps(row, ensure_ascii=False, allow_nan=False)
        .encode("utf-8", "backslashreplace")
        .decode("utf-8")
        + "\n"
    )


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    """Replace a .jsonl file atomically. Raises ValueError for NaN and infinity."""
    write_atomically(path, "".join(map(format_json_line, rows)))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a .jsonl file.

    An unfinished last line (of a killed writer) is skipped; any other malformed line raises
    UserError.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    unfinished = lines.pop()  # b"" if the last line is complete
    rows = [_parse_row(line, f"{path} line {number}") for number, line in enumerate(lines, start=1)]
    if unfinished:
        try:
            rows.append(_parse_row(unfinished, ""))
        except UserError:
            pass
    return rows


def _parse_row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}); repair or delete that line") from error
    if not isinstance(row, dict):
        raise UserError(
            f"{where} is a {type(row).__name__}, expected a JSON object; repair or delete that line"
        )
    return row


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a metrics.jsonl and validate them.

    "step" is ascending, "stage" is a string, other values are numbers, strings or null. Raises
    UserError naming the first invalid line.
    """
    rows = read_jsonl(path)
    last = 0
    for number, row in enumerate(rows, start=1):
        step, problem = row.get("step"), None
        if not isinstance(step, int) or isinstance(step, bool) or step < last:
            problem = f"its step is {step!r:.40}, expected a whole number of at least {last}"
        elif not isinstance(row.get("stage", ""), str):
            problem = f"its stage is {row['stage']!r:.40}, expected a name"
        else:
            problem = find_bad_metric(row)
        if problem is not None:
            raise UserError(f"{path} line {number}: {problem}; repair that line")
        last = row["step"]
    return rows


def find_bad_metric(row: Row) -> str | None:
    """Return what is wrong with the first value that is no metric; None if all are metrics: null, a
    text, or a number within float's range (JSON's integers are unbounded, and some writers emit
    infinity).
    """
    for name, value in row.items():
        is_number = isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
        if not (value is None or isinstance(value, str) or is_number):
            return f"its {name[:40]} is {value!r:.40}, expected a number"
    return None
