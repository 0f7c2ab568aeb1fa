"""Read .csv and .tsv in order; .jsonl, .parquet and .arrow (as `datasets` writes) by index."""

from __future__ import annotations

import csv
import json
import sys
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rl.data.row_readers import BadRow, Row, parse_json_line, read_lines
from rl.errors import UserError

DELIMITERS = {".csv": ",", ".tsv": "\t"}
BINARY = (".parquet", ".arrow")
_CACHED_GROUPS = 16  # decoded row groups of a .parquet file to cache


def read_delimited(stream: Any, path: Path, suffix: str) -> Iterator[Row]:
    """Yield the rows of a .csv or .tsv file; its first line names the columns.

    A cell that holds a JSON list of objects becomes that list. Raises UserError if the file has a
    syntax error, is not UTF-8, or has duplicate or empty column names.
    """
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    lines = (
        line.decode("utf-8-sig" if number == 0 else "utf-8")
        for number, line in enumerate(read_lines(stream, path))
    )
    reader = csv.reader(lines, delimiter=DELIMITERS[suffix], strict=True)
    header: list[str] | None = None
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise UserError(
                f"{path} line {reader.line_num} is not valid {suffix[1:]} ({error}): "
                "correct its quotes"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path} is no UTF-8 text after line {reader.line_num} ({error.reason}): "
                "save it as UTF-8"
            ) from error
        if cells is None:
            return
        if header is None:
            header = [name.strip() for name in cells]
            if len(set(header)) < len(header) or not all(header):
                raise UserError(
                    f"{path}: the first line names the columns, each once; "
                    f"it is {', '.join(header)[:200]!r}"
                )
        elif cells:
            yield Row(f"{path.name} line {reader.line_num}", _parse_cells(header, cells))


def _parse_cells(header: Sequence[str], cells: Sequence[str]) -> Mapping[str, Any] | BadRow:
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


class Table(ABC):
    """Access rows by index.

    blocks: the number of rows in each block, if reading a row costs as much as reading its block;
    empty if each row is read separately.
    """

    blocks: Sequence[int] = ()

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> Row: ...


class JsonLinesTable(Table):
    """Read a .jsonl file by the byte offsets of its lines."""

    def __init__(self, path: Path):
        self.path = path
        self._stream = path.open("rb")
        # (byte offset, line number from 1) of each non-empty line
        self._lines: list[tuple[int, int]] = []
        at = 0
        for number, line in enumerate(read_lines(self._stream, path), start=1):
            if line.strip():
                self._lines.append((at, number))
            at += len(line)

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, index: int) -> Row:
        at, number = self._lines[index]
        self._stream.seek(at)
        return parse_json_line(self._stream.readline(), number, self.path.name)


class ArrowTable(Table):
    """Read a memory-mapped .arrow file: a stream of record batches (as `datasets` writes) or the
    file format.
    """

    def __init__(self, path: Path):
        import pyarrow as pa

        self.path = path
        source = pa.memory_map(str(path))
        try:
            try:
                record_stream = pa.ipc.open_stream(source)
                self._batches = list(record_stream)
            except pa.ArrowInvalid:
                opened = pa.ipc.open_file(source)
                self._batches = [opened.get_batch(i) for i in range(opened.num_record_batches)]
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(
                f"{path} is not an .arrow file, or is damaged ({error}): write it again"
            ) from error
        self._ends = list(accumulate(batch.num_rows for batch in self._batches))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> Row:
        at = bisect_right(self._ends, index)
        first = self._ends[at] - self._batches[at].num_rows
        (columns,) = self._batches[at].slice(index - first, 1).to_pylist()
        return Row(f"{self.path.name} row {index}", columns)


class ParquetTable(Table):
    """Read a .parquet file. Each row group is decoded at once; the last used groups are cached."""

    def __init__(self, path: Path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path = path
        try:
            self._file = pq.ParquetFile(str(path))
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(
                f"{path} is not a .parquet file, or is damaged ({error}): fetch or write it again"
            ) from error
        groups = range(self._file.metadata.num_row_groups)
        self.blocks = [self._file.metadata.row_group(i).num_rows for i in groups]
        self._ends = list(accumulate(self.blocks))
        self._cached_groups: OrderedDict[int, list[dict[str, Any]]] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> Row:
        at = bisect_right(self._ends, index)
        return Row(
            f"{self.path.name} row {index}",
            self._read_group(at)[index - (self._ends[at] - self.blocks[at])],
        )

    def _read_group(self, number: int) -> list[dict[str, Any]]:
        """Return the rows of a row group, from the cache if possible."""
        import pyarrow as pa

        if number not in self._cached_groups:
            while len(self._cached_groups) >= _CACHED_GROUPS:
                self._cached_groups.popitem(last=False)
            try:
                self._cached_groups[number] = self._file.read_row_group(number).to_pylist()
            except (pa.ArrowInvalid, OSError) as error:
                raise UserError(
                    f"{self.path} is damaged in its row group {number} ({error}): "
                    "fetch or write it again"
                ) from error
        self._cached_groups.move_to_end(number)
        return self._cached_groups[number]


class ConcatenatedTable(Table):
    """Concatenate several tables."""

    def __init__(self, parts: Sequence[Table]):
        self.parts = list(parts)
        self._ends = list(accumulate(len(part) for part in parts))
        if any(part.blocks for part in parts):
            self.blocks = [size for part in parts for size in (part.blocks or [len(part)])]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> Row:
        at = bisect_right(self._ends, index)
        return self.parts[at].row(index - (self._ends[at] - len(self.parts[at])))


def open_table(paths: Sequence[Path]) -> Table:
    """Open files for access by row index.

    Raises UserError for a file type that can only be read from its beginning.
    """
    kinds: Mapping[str, Callable[[Path], Table]] = {
        ".jsonl": JsonLinesTable,
        ".parquet": ParquetTable,
        ".arrow": ArrowTable,
    }
    tables = []
    for path in paths:
        if path.suffix not in kinds:
            raise UserError(
                f"{path} cannot be read row by row: stream supports {', '.join(kinds)}; "
                "unpack or convert it, or leave out stream"
            )
        tables.append(kinds[path.suffix](path))
    return tables[0] if len(tables) == 1 else ConcatenatedTable(tables)
