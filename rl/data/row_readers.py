"""Read rows of files and hub data sets, each with its origin; collect and report bad rows."""

from __future__ import annotations

import json
import logging
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl.config import nearest_name
from rl.data.dataset_registry import DATASET_REGISTRY, find_dataset
from rl.errors import UserError, check_hub_access, suggest_hub_name

logger = logging.getLogger(__name__)

OnBadRow = Literal["error", "skip"]
Columns = Mapping[str, Any]  # a row: the value of each column by name
_PLAIN = (".jsonl", ".json", ".csv", ".tsv")
# Names of a split in folders and on the hub, in order of preference.
SPLIT_ALIASES = {
    "test": ("test", "validation", "valid", "val", "dev", "eval"),
    "train": ("train", "training"),
}
FILE_SUFFIXES = (*_PLAIN, *(f"{suffix}.gz" for suffix in _PLAIN), ".parquet", ".arrow")


def get_suffix(path: Path) -> str:
    """Return the data suffix of a file name; "" if it has none."""
    return next((suffix for suffix in FILE_SUFFIXES if path.name.endswith(suffix)), "")


class BadRow(ValueError):
    """Report a row that cannot be used, and the reason."""


class MissingColumn(BadRow):
    """Report a row that has `columns`, but lacks the column `name`.

    remedy: an alternative to naming the column.
    """

    def __init__(self, name: str, columns: Iterable[str], remedy: str = ""):
        self.name, self.columns, self.remedy = name, tuple(columns), remedy
        super().__init__(
            f"no column {name!r}; it has {self.column_listing}" + (f"; {remedy}" if remedy else "")
        )

    @property
    def column_listing(self) -> str:
        """Return the quoted names of the row's columns, for messages."""
        return ", ".join(map(repr, self.columns)) or "none"


# common names of the prompt column
_PROMPTS = ("question", "problem", "instruction", "query", "input", "text")


class MissingSplit(UserError):
    """Report that an existing data set lacks the requested split."""


class FaultyRows(UserError):
    """Report the bad rows of a data set.

    faults: the bad rows, each as its place and its fault. good: the number of good rows.
    rows: the good rows (rl.types.Problem), so that later checks can report the faults of these in
    the same error (`merge`).
    is_partial: more bad rows may exist, because the check stopped early.
    text: the message; "": `summarize_faults` and the remedy.
    """

    def __init__(
        self,
        faults: Sequence[str],
        good: int,
        rows: Sequence[Any] = (),
        *,
        is_partial: bool = False,
        text: str = "",
    ):
        self.faults, self.rows = tuple(faults), tuple(rows)
        self.good, self.is_partial = good, is_partial
        super().__init__(
            text
            or f"{summarize_faults(faults, good, is_partial=is_partial)}\n"
            "Correct them, or leave them out with on_bad_row skip."
        )

    def merge(self, other: FaultyRows) -> FaultyRows:
        """Merge with the faults of `other`, whose rows count as good rows here."""
        return FaultyRows(
            [*self.faults, *other.faults],
            self.good - len(other.faults),
            is_partial=self.is_partial or other.is_partial,
        )

    @staticmethod
    def merge_all(faults: Sequence[FaultyRows]) -> FaultyRows:
        """Merge the faults of several data sets; return those of a single data set unchanged."""
        if len(faults) == 1:
            return faults[0]
        return FaultyRows(
            [text for fault in faults for text in fault.faults],
            sum(fault.good for fault in faults),
            [row for fault in faults for row in fault.rows],
            is_partial=any(fault.is_partial for fault in faults),
        )


def summarize_faults(faults: Sequence[str], good: int, *, is_partial: bool = False) -> str:
    """Return the number of bad rows and a listing of some.

    The listing has a row for each kind of fault (at most 10 kinds), and at least 5 rows if so many
    are bad. is_partial: state that more bad rows may exist.
    """
    first: dict[str, int] = {}
    for i, text in enumerate(faults):
        first.setdefault(kind_of_fault(text), i)
    listed = list(first.values())[:10]
    others = [i for i in range(len(faults)) if i not in listed]
    listed += others[: max(0, 5 - len(listed))]
    lines = "\n  ".join(faults[i] for i in sorted(listed)) + (
        "\n  ..." if len(faults) > len(listed) else ""
    )
    return (
        f"{len(faults)} bad rows{' at least' if is_partial else ''} beside {good} "
        f"good ones:\n  {lines}"
    )


_VARIABLE_PARTS = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d+")


def kind_of_fault(text: str) -> str:
    """Remove quotations and numbers from a fault, so that two faults of a kind compare equal."""
    return _VARIABLE_PARTS.sub("", text)


@dataclass(frozen=True, slots=True)
class Row:
    """Hold a row: its place ("train.jsonl line 12") and its columns, or the reason it is bad."""

    place: str
    content: Columns | BadRow
    folder: Path | None = None  # the folder that paths in the row are relative to

    @property
    def columns(self) -> Columns:
        """Return the columns. Raises BadRow if the row is bad."""
        if isinstance(self.content, BadRow):
            raise self.content
        return self.content


@dataclass(slots=True)
class BadRowCollector:
    """Collect the bad rows of a data set, then raise or log them."""

    on_bad_row: OnBadRow
    faults: list[str] = field(default_factory=list)
    missing_columns: list[MissingColumn] = field(default_factory=list)
    first_missing_place: str = ""

    def add(self, place: str, reason: BadRow) -> None:
        """Record a bad row."""
        self.faults.append(f"{place}: {reason}")
        if isinstance(reason, MissingColumn):
            self.first_missing_place = self.first_missing_place or place
            self.missing_columns.append(reason)

    def raise_or_log(
        self,
        good: int,
        columns_by_setting: Mapping[str, str | None],
        example: str = "",
        rows: Sequence[Any] = (),
    ) -> None:
        """Raise FaultyRows for the bad rows, or log them if on_bad_row is "skip".

        The message counts the bad rows and lists some. Raises UserError if all rows lack the same
        column (a single mistake), or if rows are skipped and no good row remains.
        columns_by_setting: the requested columns. example: a row of the expected format. rows: see
        FaultyRows.
        """
        if not self.faults:
            return
        count = len(self.missing_columns)
        if not good and len({missing.name for missing in self.missing_columns}) == 1:
            text = _missing_column_message(self.missing_columns[0], count, columns_by_setting)
            text += f" (the first: {self.first_missing_place})"
            if others := len(self.faults) - count:
                text += f"; {others} more {'is' if others == 1 else 'are'} bad for other reasons"
            raise UserError(text + (f"\nSuch a row is {example}" if example else ""))
        if not good and self.on_bad_row == "skip":
            raise UserError(
                f"no row is left where bad ones are skipped; {summarize_faults(self.faults, good)}"
            )
        if self.on_bad_row == "error":
            raise FaultyRows(self.faults, good, rows)
        logger.warning("skipped %s", summarize_faults(self.faults, good))


def _missing_column_message(
    missing: MissingColumn, rows: int, columns_by_setting: Mapping[str, str | None]
) -> str:
    """Return the message for a column that none of `rows` rows has, with a suggestion."""
    setting = next(
        (setting for setting, column in columns_by_setting.items() if column == missing.name), None
    )
    hint = ""
    if near := nearest_name(missing.name, missing.columns):
        hint = f"; did you mean {near!r}?"
    elif missing.name == "prompt" and setting is not None:  # the prompt has a default name
        candidates = [name for name in missing.columns if name != "answer"]
        if likely := [name for name in _PROMPTS if name in candidates]:
            hint = f"; if it is {likely[0]!r}, say {setting} {likely[0]}"
        elif candidates:
            hint = f"; name the column that has it, such as {setting} {candidates[0]}"
    elif "prompt" in missing.columns and setting == "prompt_column":
        hint = f"; without {setting} their column 'prompt' is read"
    setting_note = f" ({setting})" if setting is not None else ""
    remedy = f"; {missing.remedy}" if missing.remedy else ""
    return (
        f"no column {missing.name!r}{setting_note} in any of {rows} rows, "
        f"which have {missing.column_listing}{hint}{remedy}"
    )


def read_lines(stream: Iterable[bytes], path: Path) -> Iterator[bytes]:
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


def parse_json_lines(lines: Iterable[bytes], path: Path) -> Iterator[Row]:
    """Return the rows of a .jsonl file: a JSON object per line, empty lines skipped."""
    return (
        parse_json_line(line, number, path)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )


def parse_json_line(line: bytes, number: int, path: Path) -> Row:
    """Parse line `number` (from 1) of the .jsonl file `path`."""
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark that some editors write
    return Row(f"{path.name} line {number}", _parse_columns(line), path.parent)


def _parse_columns(line: bytes) -> Columns | BadRow:
    """Parse a line of JSON to columns; return the BadRow of an invalid line."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(f"no UTF-8 text (byte {error.start}: {error.reason})")
    except ValueError as error:
        return BadRow(f"no JSON ({error}): {line[:60].decode('utf-8', 'replace')!r}")
    except RecursionError:
        return BadRow(_TOO_DEEP)
    return _check_object(value, _may_have_flaw(line))


def _may_have_flaw(text: bytes) -> bool:
    """Return whether the value of a JSON text needs the full check, by a cheap scan."""
    return text.count(b"[") + text.count(b"{") > _DEEPEST or bool(_SURROGATE.search(text))


def _check_object(value: Any, may_have_flaw: bool) -> Columns | BadRow:
    """Return a parsed value if it is a usable JSON object, else the BadRow."""
    if not isinstance(value, dict):
        return BadRow(
            f"a JSON object is expected, this is a {type(value).__name__}: {str(value)[:60]!r}"
        )
    flaw = _find_json_flaw(value) if may_have_flaw else None
    return value if flaw is None else BadRow(flaw)


_DEEPEST = 64
_TOO_DEEP = f"lists and objects within one another, more than {_DEEPEST} deep"
# JSON can encode half of a surrogate pair, UTF-8 cannot.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def _find_json_flaw(value: Any) -> str | None:
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


def parse_json_list(text: bytes, path: Path) -> Iterator[Row]:
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
    may_have_flaw = _may_have_flaw(text)  # once for the file, not for each row
    for number, value in enumerate(values, start=1):
        content = _check_object(value, may_have_flaw)
        yield Row(f"{path.name} row {number}", content, path.parent)


def read_hub(name: str, config: str | None, split: str) -> Iterator[Row]:
    """Yield the rows of a hub data set, of the first name of the split that it has.

    Raises MissingSplit if it has no such split, and UserError, with a remedy, if it cannot be
    loaded.
    """
    missing: MissingSplit | None = None
    for alias in SPLIT_ALIASES.get(split, (split,)):
        try:
            rows = _load_hub_split(name, config, alias)
        except MissingSplit as error:
            missing = missing or error
            continue
        for number, row in enumerate(rows):
            yield Row(f"{name} {alias} row {number}", row)
        return
    assert missing is not None
    raise missing


def _load_hub_split(name: str, config: str | None, split: str) -> Iterable[Columns]:
    """Return the rows of a split of a hub data set. Raises as `read_hub`."""
    import datasets  # takes a second, which local files do not wait for

    known = [*DATASET_REGISTRY, *(entry.hub for entry in DATASET_REGISTRY.values())]
    check_hub_access(name, "dataset", known)
    try:
        try:
            return datasets.load_dataset(name, config, split=split)
        except ConnectionError:
            # `datasets` searches only data that it prepared, not the files that `hf download`
            # put into the hub's cache.
            if (folder := _cached_snapshot(name)) is None:
                raise
            return datasets.load_dataset(str(folder), config, split=split)
    # no network, no such data set, no such config or split, a loading script, damaged files
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if "Unknown split" in reason:
            raise MissingSplit(
                f"hub data set {name!r} has no split {split!r}: {reason} To use another split, "
                "download its files into a folder and pass the folder"
            ) from error
        suggestion = suggest_hub_name(name, known, "dataset")
        entry = find_dataset(name)
        access = f"; {entry.access}" if entry is not None and entry.access else ""
        short = next((key for key, value in DATASET_REGISTRY.items() if value == entry), None)
        raise UserError(
            f"hub data set {name!r} (config {config!r}, split {split!r}) cannot be "
            f"loaded{suggestion}: {reason}{access}. Without a network the data set must be in the "
            "hub's cache (HF_HUB_OFFLINE=1 then prevents requests); or pass the path of a .jsonl "
            "file instead" + (f", as {short}:FILE with the same columns" if short else "")
        ) from error


def _cached_snapshot(name: str) -> Path | None:
    """Return the folder of a hub data set's files in the hub's cache; None if not cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, repo_type="dataset", local_files_only=True))
    except LocalEntryNotFoundError:
        return None
