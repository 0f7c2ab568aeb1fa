"""Read the rows of a file in order, and those of .jsonl, .parquet and .arrow (as `datasets` writes)
by index.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from rl.data.row_readers import (
    BadRow,
    Columns,
    Row,
    get_suffix,
    parse_json_line,
    parse_json_lines,
    parse_json_list,
    read_lines,
)
from rl.errors import UserError

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_BINARY = (".parquet", ".arrow")
_CACHED_GROUPS = 16  # decoded row groups of a .parquet file to cache


def read_file(path: Path) -> Iterator[Row]:
    """Yield the rows of a file: a JSON object per line (.jsonl), a list of objects (.json) or a
    table (.csv, .tsv, .parquet, .arrow); .gz too.

    Raises UserError for a file that cannot be read to its end (cut off, damaged), even if bad rows
    are skipped, since the number of missing rows is unknown.
    """
    if path.name.endswith(_BINARY):
        table = open_table([path])
        yield from (table.row(i) for i in range(len(table)))
        return
    try:
        opened = gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    with opened as stream:
        suffix = get_suffix(path).removesuffix(".gz")
        if suffix == ".jsonl":
            yield from parse_json_lines(read_lines(stream, path), path)
        elif suffix in _DELIMITERS:
            yield from _read_delimited(stream, path, suffix)
        else:
            yield from parse_json_list(b"".join(read_lines(stream, path)), path)


def _read_delimited(stream: Any, path: Path, suffix: str) -> Iterator[Row]:
    """Yield the rows of a .csv or .tsv file; its first line names the columns.

    A cell that holds a JSON list of objects becomes that list. Raises UserError if the file has a
    syntax error, is not UTF-8, or has duplicate or empty column names.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    lines = (
        line.decode("utf-8-sig" if number == 0 else "utf-8")
        for number, line in enumerate(read_lines(stream, path))
    )
    reader = csv.reader(lines, delimiter=_DELIMITERS[suffix], strict=True)
    header: list[str] = []
    try:
        for cells in reader:
            if not header:
                header = _check_header([name.strip() for name in cells], path, suffix)
            elif cells:
                content = _parse_cells(header, cells)
                yield Row(f"{path.name} line {reader.line_num}", content, path.parent)
    except csv.Error as error:
        raise UserError(
            f"{path} line {reader.line_num} is not valid {suffix[1:]} ({error}): correct its quotes"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is no UTF-8 text after line {reader.line_num} ({error.reason}): "
            "save it as UTF-8"
        ) from error


def _check_header(header: list[str], path: Path, suffix: str) -> list[str]:
    """Return the names of the columns. Raises UserError if they are no names."""
    if len(set(header)) < len(header) or not all(header):
        index = header[:1] == [""] and all(header[1:])
        raise UserError(
            f"{path}: the first line names the columns, each once; "
            f"it is {', '.join(header)[:200]!r}"
            + ("; write the table without its index (pandas: index=False)" * index)
        )
    if len(header) == 1 and (
        other := re.search(rf"(?<=\S)(?!{_DELIMITERS[suffix]})[;\t|,](?=\S)", header[0])
    ):
        raise UserError(
            f"{path}: its cells are separated by {other[0]!r}, and those of a "
            f"{suffix} file by {_DELIMITERS[suffix]!r}: write it with that separator"
        )
    return header


def _parse_cells(header: Sequence[str], cells: Sequence[str]) -> Columns | BadRow:
    if len(cells) != len(header):
        return BadRow(f"it has {len(cells)} cells, the first line names {len(header)} columns")
    return {name: _cell(cell) for name, cell in zip(header, cells, strict=True)}


def _cell(text: str) -> Any:
    if not text.lstrip().startswith("[{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return (
        value if isinstance(value, list) and all(isinstance(item, dict) for item in value) else text
    )


@dataclass(frozen=True)
class Table:
    """Access `size` rows by index.

    blocks: the number of rows in each block, if reading a row costs as much as reading its block;
    empty if each row is read separately.
    """

    row: Callable[[int], Row]
    size: int
    blocks: Sequence[int] = ()

    def __len__(self) -> int:
        return self.size


def _open_jsonl(path: Path) -> Table:
    """Open a .jsonl file by the byte offsets of its lines."""
    stream = path.open("rb")
    lines: list[tuple[int, int]] = []  # (byte offset, line number from 1) of each non-empty line
    at = 0
    for number, line in enumerate(read_lines(stream, path), start=1):
        if line.strip():
            lines.append((at, number))
        at += len(line)

    def read_row(index: int) -> Row:
        at, number = lines[index]
        stream.seek(at)
        return parse_json_line(stream.readline(), number, path)

    return Table(read_row, len(lines))


def _open_arrow(path: Path) -> Table:
    """Open a memory-mapped .arrow file: a stream of record batches (as `datasets` writes) or the
    file format.
    """
    import pyarrow as pa

    source = pa.memory_map(str(path))
    try:
        try:
            columns = pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            columns = pa.ipc.open_file(source).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} is not an .arrow file, or is damaged ({error}): write it again"
        ) from error

    def read_row(index: int) -> Row:
        content = columns.slice(index, 1).to_pylist()[0]
        return Row(f"{path.name} row {index}", content, path.parent)

    return Table(read_row, columns.num_rows)


def _open_parquet(path: Path) -> Table:
    """Open a .parquet file. Each row group is decoded at once; the last used groups are cached."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(str(path))
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(
            f"{path} is not a .parquet file, or is damaged ({error}): fetch or write it again"
        ) from error
    groups = range(file.metadata.num_row_groups)
    blocks = [file.metadata.row_group(i).num_rows for i in groups]
    starts = list(accumulate(blocks, initial=0))

    @lru_cache(_CACHED_GROUPS)
    def read_group(number: int) -> list[dict[str, Any]]:
        try:
            return file.read_row_group(number).to_pylist()
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(
                f"{path} is damaged in its row group {number} ({error}): fetch or write it again"
            ) from error

    def read_row(index: int) -> Row:
        group = bisect_right(starts, index) - 1
        content = read_group(group)[index - starts[group]]
        return Row(f"{path.name} row {index}", content, path.parent)

    return Table(read_row, starts[-1], blocks)


_OPENERS = {".jsonl": _open_jsonl, ".parquet": _open_parquet, ".arrow": _open_arrow}


def open_table(paths: Sequence[Path]) -> Table:
    """Open files, one after the other, for access by row index.

    Raises UserError for a file type that can only be read from its beginning.
    """
    for path in paths:
        if path.suffix not in _OPENERS:
            raise UserError(
                f"{path} cannot be read row by row: stream supports {', '.join(_OPENERS)}; "
                "unpack or convert it, or leave out stream"
            )
    tables = [_OPENERS[path.suffix](path) for path in paths]
    starts = list(accumulate(map(len, tables), initial=0))

    def read_row(index: int) -> Row:
        part = bisect_right(starts, index) - 1
        return tables[part].row(index - starts[part])

    has_blocks = any(table.blocks for table in tables)
    blocks = [size for table in tables for size in table.blocks or [table.size]]
    return Table(read_row, starts[-1], blocks if has_blocks else ())
