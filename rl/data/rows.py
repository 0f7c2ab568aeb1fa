"""Rows out of files and hub data sets, each with the place it came from; bad rows are gathered and
named together.
"""

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
    """A row that cannot be used, and why."""


class NoColumn(BadRow):
    """A row that lacks the column `name`; it has `columns`. `remedy`: what else to do about such
    rows than to name the column.
    """

    def __init__(self, name: str, columns: Iterable[str], remedy: str = ""):
        self.name, self.columns, self.remedy = name, tuple(columns), remedy
        super().__init__(
            f"no column {name!r}; it has {self.there}" + (f"; {remedy}" if remedy else "")
        )

    @property
    def there(self) -> str:
        return ", ".join(map(repr, self.columns)) or "none"


# what data sets call what is asked
_PROMPTS = ("question", "problem", "instruction", "query", "input", "text")


class NoSplit(UserError):
    """A data set that is there, and has no split of the name."""


class FaultyRows(UserError):
    """Rows that cannot be used: `found`, each with its place and what is wrong, beside `good` ones.

    `rows`: the good ones (rl.types.Problem), where the others of their data set were never read on;
    what is wrong with them for other reasons can then be told in the same breath (`and_more`).
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
            or f"{summary(found, good, least=least)}\nMend them, or leave them out with on_bad_row skip."
        )

    def and_more(self, other: FaultyRows) -> FaultyRows:
        """Together with those of `other`, which are among the good rows here."""
        return FaultyRows(
            [*self.found, *other.found],
            self.good - len(other.found),
            least=self.least or other.least,
        )

    @staticmethod
    def of_all(faults: Sequence[FaultyRows]) -> FaultyRows:
        """Those of several data sets as one; of one themselves."""
        if len(faults) == 1:
            return faults[0]
        found, rows = (
            [text for one in faults for text in one.found],
            [row for one in faults for row in one.rows],
        )
        return FaultyRows(
            found, sum(one.good for one in faults), rows, least=any(one.least for one in faults)
        )


def summary(found: Sequence[str], good: int, *, least: bool = False) -> str:
    """How many rows are bad, and some of them: of each kind of fault one (ten kinds at most), or
    five. `least`: there may be more.
    """
    first: dict[str, int] = {}
    for i, text in enumerate(found):
        first.setdefault(kind_of_fault(text), i)
    shown = set(list(first.values())[:10])
    for i in range(len(found)):
        if len(shown) >= 5:
            break
        shown.add(i)
    lines = "\n  ".join(found[i] for i in sorted(shown)) + (
        "\n  ..." if len(found) > len(shown) else ""
    )
    return (
        f"{len(found)} bad rows{' at least' if least else ''} beside {good} good ones:\n  {lines}"
    )


_DIFFERS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d+")


def kind_of_fault(text: str) -> str:
    """What is said of a row without what two faults of one kind differ in: quotations and numbers."""
    return _DIFFERS.sub("", text)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: where it stands ("train.jsonl line 12"), and its columns, or why it has none."""

    place: str
    columns: Mapping[str, Any] | BadRow
    folder: Path | None = None  # where paths in it start


@dataclass(slots=True)
class BadRows:
    """What became of the bad rows of one data set."""

    on_bad_row: OnBadRow
    found: list[str] = field(default_factory=list)
    lacking: list[NoColumn] = field(default_factory=list)
    first_lacking: str = ""

    def add(self, place: str, reason: BadRow) -> None:
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
        """Raise FaultyRows for the bad rows (some of them, and how many), or log them where they
        are to be skipped.

        A column that no row has is one mistake, not one a row. `named`: the columns asked for, by
        setting; `example`: a row of the shape that was looked for; `rows`: see FaultyRows.
        """
        if not self.found:
            return
        if not good and len({one.name for one in self.lacking}) == 1:
            others = len(self.found) - len(self.lacking)
            beside = (
                f"; {others} more {'is' if others == 1 else 'are'} bad for other reasons"
                if others
                else ""
            )
            wanted = f"\nSuch a row is {example}" if example else ""
            raise UserError(
                f"{_nowhere(self.lacking[0], len(self.lacking), named)} (the first: {self.first_lacking}){beside}{wanted}"
            )
        if not good and self.on_bad_row == "skip":
            raise UserError(
                f"no row is left where bad ones are skipped; {summary(self.found, good)}"
            )
        if self.on_bad_row == "error":
            raise FaultyRows(self.found, good, rows)
        logger.warning("skipped %s", summary(self.found, good))


def _nowhere(lacking: NoColumn, rows: int, named: Mapping[str, str | None]) -> str:
    setting = next((setting for setting, column in named.items() if column == lacking.name), None)
    near = difflib.get_close_matches(lacking.name, lacking.columns, n=1)
    usual = (
        [name for name in _PROMPTS if name in lacking.columns]
        if lacking.name == "prompt" and setting is not None
        else []
    )
    hint = (
        f"; did you mean {near[0]!r}?"
        if near
        else f"; if it is {usual[0]!r}, say {setting} {usual[0]}"
        if usual
        else ""
    )
    shown = f" ({setting})" if setting is not None else ""
    remedy = f"; {lacking.remedy}" if lacking.remedy else ""
    return f"no column {lacking.name!r}{shown} in any of {rows} rows, which have {lacking.there}{hint}{remedy}"


def to_the_end(stream: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """The lines of a file. UserError where it cannot be read to its end: it is not known how many
    are missing.
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
    """The rows of a .jsonl file: one JSON object a line."""
    return (
        row_of_line(line, number, name)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )


def row_of_line(line: bytes, number: int, name: str) -> Row:
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark that some editors write
    return Row(f"{name} line {number}", _columns(line))


def _columns(line: bytes) -> Mapping[str, Any] | BadRow:
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
    """`text`: what the value was read from (or what it was read among); it tells whether a closer
    look is needed.
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
# JSON can write half of a surrogate pair, UTF-8 cannot
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _flaw(value: Any) -> str | None:
    """What makes a value of JSON unusable although it is JSON: its depth, a text that cannot be
    encoded.
    """
    left = [(value, 0)]
    while left:
        item, depth = left.pop()
        if isinstance(item, str):
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                return f"half of a surrogate pair, which is no text: {item[:60]!r}"
        elif isinstance(item, (dict, list)):
            if depth == _DEEPEST:
                return _TOO_DEEP
            left += [
                (inner, depth + 1)
                for inner in ([*item, *item.values()] if isinstance(item, dict) else item)
            ]
    return None


def json_list(text: bytes, path: Path) -> Iterator[Row]:
    """The rows of a .json file: a list of objects."""
    try:
        values = json.loads(text.decode("utf-8-sig"))
    except ValueError as error:
        raise UserError(
            f"{path} is no JSON ({error}); a file of one object a line is named .jsonl"
        ) from error
    except RecursionError as error:
        raise UserError(f"{path} has {_TOO_DEEP}") from error
    if not isinstance(values, list):
        raise UserError(f"{path} holds a {type(values).__name__}; a list of objects is expected")
    for number, value in enumerate(values, start=1):
        yield Row(f"{path.name} row {number}", _object(value, text))


def read_hub(name: str, config: str | None, split: str) -> Iterator[Row]:
    """The rows of a hub data set. Raises UserError with a remedy where it cannot be had."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"data set {name!r} is taken for a hub name, and hub data sets need the package `datasets`: pip install datasets"
        ) from error
    try:
        try:
            rows = datasets.load_dataset(name, config, split=split)
        except ConnectionError:
            # `datasets` looks for data that it prepared itself, not for files that `hf download`
            # left in the hub's cache.
            if (folder := _cached_snapshot(name)) is None:
                raise
            rows = datasets.load_dataset(str(folder), config, split=split)
    except (OSError, ValueError) as error:  # no network, no such data set, no such config or split
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "Unknown split" in reason:
            raise NoSplit(f"hub data set {name!r} has no split {split!r}: {reason}") from error
        raise UserError(
            f"hub data set {name!r} (config {config!r}, split {split!r}) cannot be loaded: {reason}. Without network it must "
            "be in the hub's cache (HF_HUB_OFFLINE=1 then keeps it from asking); or give the path of a .jsonl file instead"
        ) from error
    for number, row in enumerate(rows):
        yield Row(f"{name} {split} row {number}", row)


def _cached_snapshot(name: str) -> Path | None:
    """Return the folder of a hub data set's files in the hub's cache; None where it holds none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        return None
