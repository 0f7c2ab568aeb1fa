"""Read rows of files and hub data sets, each with its origin; collect and report bad rows."""

from __future__ import annotations

import difflib
import json
import logging
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl.errors import UserError

logger = logging.getLogger(__name__)

OnBadRow = Literal["error", "skip"]
_PLAIN = (".jsonl", ".json", ".csv", ".tsv")
FILE_SUFFIXES = (*_PLAIN, *(f"{suffix}.gz" for suffix in _PLAIN), ".parquet", ".arrow")


class BadRow(ValueError):
    """Report a row that cannot be used, and the reason."""


class NoColumn(BadRow):
    """Report a row that has `columns`, but lacks the column `name`.

    remedy: an alternative to naming the column.
    """

    def __init__(self, name: str, columns: Iterable[str], remedy: str = ""):
        self.name, self.columns, self.remedy = name, tuple(columns), remedy
        super().__init__(
            f"no column {name!r}; it has {self.there}" + (f"; {remedy}" if remedy else "")
        )

    @property
    def there(self) -> str:
        """Return the quoted names of the row's columns, for messages."""
        return ", ".join(map(repr, self.columns)) or "none"


# common names of the prompt column
_PROMPTS = ("question", "problem", "instruction", "query", "input", "text")


class NoSplit(UserError):
    """Report that an existing data set lacks the requested split."""


class FaultyRows(UserError):
    """Report the bad rows of a data set.

    found: the bad rows, each as its place and its fault. good: the number of good rows.
    rows: the good rows (rl.types.Problem), so that later checks can report the faults of these in
    the same error (`and_more`).
    least: more bad rows may exist, because the check stopped early.
    text: the message; "": `summary` and the remedy.
    """

    def __init__(
        self,
        found: Sequence[str],
        good: int,
        rows: Sequence[Any] = (),
        *,
        least: bool = False,
        text: str = "",
    ):
        self.found, self.good, self.rows, self.least = tuple(found), good, tuple(rows), least
        super().__init__(
            text
            or f"{summary(found, good, least=least)}\nCorrect them, or leave them out with "
            "on_bad_row skip."
        )

    def and_more(self, other: FaultyRows) -> FaultyRows:
        """Merge with the faults of `other`, whose rows count as good rows here."""
        return FaultyRows(
            [*self.found, *other.found],
            self.good - len(other.found),
            least=self.least or other.least,
        )

    @staticmethod
    def of_all(faults: Sequence[FaultyRows]) -> FaultyRows:
        """Merge the faults of several data sets; return those of a single data set unchanged."""
        if len(faults) == 1:
            return faults[0]
        found, rows = (
            [text for fault in faults for text in fault.found],
            [row for fault in faults for row in fault.rows],
        )
        return FaultyRows(
            found,
            sum(fault.good for fault in faults),
            rows,
            least=any(fault.least for fault in faults),
        )


def summary(found: Sequence[str], good: int, *, least: bool = False) -> str:
    """Return the number of bad rows and a listing of some.

    The listing has a row for each kind of fault (at most 10 kinds), and at least 5 rows if so many
    are bad. least: state that more bad rows may exist.
    """
    first: dict[str, int] = {}
    for i, text in enumerate(found):
        first.setdefault(kind_of_fault(text), i)
    listed = set(list(first.values())[:10])
    for i in range(len(found)):
        if len(listed) >= 5:
            break
        listed.add(i)
    lines = "\n  ".join(found[i] for i in sorted(listed)) + (
        "\n  ..." if len(found) > len(listed) else ""
    )
    return (
        f"{len(found)} bad rows{' at least' if least else ''} beside {good} good ones:\n  {lines}"
    )


_DIFFERS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d+")


def kind_of_fault(text: str) -> str:
    """Remove quotations and numbers from a fault, so that two faults of a kind compare equal."""
    return _DIFFERS.sub("", text)


@dataclass(frozen=True, slots=True)
class Row:
    """Hold a row: its place ("train.jsonl line 12") and its columns, or the reason it is bad."""

    place: str
    columns: Mapping[str, Any] | BadRow
    folder: Path | None = None  # the folder that paths in the row are relative to


@dataclass(slots=True)
class BadRows:
    """Collect the bad rows of a data set, then raise or log them."""

    on_bad_row: OnBadRow
    found: list[str] = field(default_factory=list)
    lacking: list[NoColumn] = field(default_factory=list)
    first_lacking: str = ""

    def add(self, place: str, reason: BadRow) -> None:
        """Record a bad row."""
        self.found.append(f"{place}: {reason}")
        if isinstance(reason, NoColumn):
            self.first_lacking = self.first_lacking or place
            self.lacking.append(reason)

    def settle(
        self,
        good: int,
        named: Mapping[str, str | None],
        example: str = "",
        rows: Sequence[Any] = (),
    ) -> None:
        """Raise FaultyRows for the bad rows, or log them if on_bad_row is "skip".

        The message counts the bad rows and lists some. Raises UserError if all rows lack the same
        column (a single mistake), or if rows are skipped and no good row remains.
        named: the requested columns by setting. example: a row of the expected format. rows: see
        FaultyRows.
        """
        if not self.found:
            return
        if not good and len({missing.name for missing in self.lacking}) == 1:
            others = len(self.found) - len(self.lacking)
            other_faults = (
                f"; {others} more {'is' if others == 1 else 'are'} bad for other reasons"
                if others
                else ""
            )
            expected = f"\nSuch a row is {example}" if example else ""
            raise UserError(
                f"{_nowhere(self.lacking[0], len(self.lacking), named)} "
                f"(the first: {self.first_lacking}){other_faults}{expected}"
            )
        if not good and self.on_bad_row == "skip":
            raise UserError(
                f"no row is left where bad ones are skipped; {summary(self.found, good)}"
            )
        if self.on_bad_row == "error":
            raise FaultyRows(self.found, good, rows)
        logger.warning("skipped %s", summary(self.found, good))


def _nowhere(lacking: NoColumn, rows: int, named: Mapping[str, str | None]) -> str:
    """Return the message for a column that none of `rows` rows has, with a suggestion."""
    setting = next((setting for setting, column in named.items() if column == lacking.name), None)
    close_matches = difflib.get_close_matches(lacking.name, lacking.columns, n=1)
    likely_columns = (
        [name for name in _PROMPTS if name in lacking.columns]
        if lacking.name == "prompt" and setting is not None
        else []
    )
    hint = (
        f"; did you mean {close_matches[0]!r}?"
        if close_matches
        else f"; if it is {likely_columns[0]!r}, say {setting} {likely_columns[0]}"
        if likely_columns
        else ""
    )
    setting_note = f" ({setting})" if setting is not None else ""
    remedy = f"; {lacking.remedy}" if lacking.remedy else ""
    return (
        f"no column {lacking.name!r}{setting_note} in any of {rows} rows, "
        f"which have {lacking.there}{hint}{remedy}"
    )


def to_the_end(stream: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """Yield the lines of a file.

    Raises UserError if the file cannot be read to its end, since the number of missing lines is
    unknown.
    """
    number = 0
    try:
        for line in stream:
            number += 1
            yield line
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path} is cut off or damaged after line {number} ({error}): fetch or write it anew"
        ) from error


def json_lines(lines: Iterable[bytes], name: str) -> Iterator[Row]:
    """Return the rows of a .jsonl file: a JSON object per line, empty lines skipped."""
    return (
        row_of_line(line, number, name)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )


def row_of_line(line: bytes, number: int, name: str) -> Row:
    """Parse line `number` (from 1) of the .jsonl file `name`."""
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark that some editors write
    return Row(f"{name} line {number}", _columns(line))


def _columns(line: bytes) -> Mapping[str, Any] | BadRow:
    """Parse a line of JSON to columns; return the BadRow of an invalid line."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(f"no UTF-8 text (byte {error.start}: {error.reason})")
    except ValueError as error:
        return BadRow(f"no JSON ({error}): {line[:60].decode('utf-8', 'replace')!r}")
    except RecursionError:
        return BadRow(_TOO_DEEP)
    return _object(value, line)


def _object(value: Any, text: bytes) -> Mapping[str, Any] | BadRow:
    """Return a parsed value if it is a usable JSON object, else the BadRow.

    text: the JSON text that contains the value. A cheap scan of it decides whether the value needs
    the full check (`_flaw`).
    """
    if not isinstance(value, dict):
        return BadRow(
            f"a JSON object is expected, this is a {type(value).__name__}: {str(value)[:60]!r}"
        )
    suspect = text.count(b"[") + text.count(b"{") > _DEEPEST or _SURROGATE.search(text)
    flaw = _flaw(value) if suspect else None
    return value if flaw is None else BadRow(flaw)


_DEEPEST = 64
_TOO_DEEP = f"lists and objects within one another, more than {_DEEPEST} deep"
# JSON can encode half of a surrogate pair, UTF-8 cannot.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _flaw(value: Any) -> str | None:
    """Return why a valid JSON value is unusable (depth, text that UTF-8 cannot encode), or None."""
    pending = [(value, 0)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                return f"half of a surrogate pair, which is no text: {item[:60]!r}"
        elif isinstance(item, (dict, list)):
            if depth == _DEEPEST:
                return _TOO_DEEP
            pending += [
                (inner, depth + 1)
                for inner in ([*item, *item.values()] if isinstance(item, dict) else item)
            ]
    return None


def json_list(text: bytes, path: Path) -> Iterator[Row]:
    """Yield the rows of a .json file: a list of objects. Raises UserError for any other content."""
    try:
        values = json.loads(text.decode("utf-8-sig"))
    except ValueError as error:
        raise UserError(
            f"{path} is no JSON ({error}); name a file with an object per line .jsonl"
        ) from error
    except RecursionError as error:
        raise UserError(f"{path} has {_TOO_DEEP}") from error
    if not isinstance(values, list):
        raise UserError(f"{path} holds a {type(values).__name__}; a list of objects is expected")
    for number, value in enumerate(values, start=1):
        yield Row(f"{path.name} row {number}", _object(value, text))


def read_hub(name: str, config: str | None, split: str) -> Iterator[Row]:
    """Yield the rows of a hub data set. Raises UserError, with a remedy, if it cannot be loaded."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"data set {name!r} is read as a hub name, and hub data sets need the package "
            "`datasets`: pip install datasets"
        ) from error
    try:
        try:
            rows = datasets.load_dataset(name, config, split=split)
        except ConnectionError:
            # `datasets` searches only data that it prepared, not the files that `hf download`
            # put into the hub's cache.
            if (folder := _cached_snapshot(name)) is None:
                raise
            rows = datasets.load_dataset(str(folder), config, split=split)
    except (OSError, ValueError) as error:  # no network, no such data set, no such config or split
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "Unknown split" in reason:
            raise NoSplit(f"hub data set {name!r} has no split {split!r}: {reason}") from error
        raise UserError(
            f"hub data set {name!r} (config {config!r}, split {split!r}) "
            f"cannot be loaded: {reason}. Without a network the data set must be in the hub's "
            "cache (HF_HUB_OFFLINE=1 then prevents requests); or pass the path of a .jsonl file "
            "instead"
        ) from error
    for number, row in enumerate(rows):
        yield Row(f"{name} {split} row {number}", row)


def _cached_snapshot(name: str) -> Path | None:
    """Return the folder of a hub data set's files in the hub's cache; None if not cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        return None
