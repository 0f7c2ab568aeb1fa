"""Load a data source, by name or path and in any common row format, as a `ProblemSet`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from rl.config import DataFormat
from rl.data.data_files import find_files
from rl.data.dataset_registry import (
    DATASET_REGISTRY,
    GENERATED_REWARDS,
    DatasetEntry,
    find_dataset,
    split_named_file,
)
from rl.data.problem_set import ProblemSet
from rl.data.prompt_template import PromptTemplate
from rl.data.row_formats import ColumnNames, RowFormat
from rl.data.row_parser import ROW_FORMATS, RowParser, choose_format, detect_format
from rl.data.row_readers import (
    FILE_SUFFIXES,
    BadRow,
    BadRowCollector,
    Columns,
    OnBadRow,
    Row,
    read_hub,
)
from rl.data.streaming import StreamedProblemSet
from rl.data.synthetic import addition, countdown, oneliners, shapes, sorting
from rl.data.table_readers import open_table, read_file
from rl.errors import UserError, suggest_path
from rl.types import Problem

FORMATS = get_args(DataFormat)
GENERATED = {
    "addition": addition,
    "countdown": countdown,
    "oneliners": oneliners,
    "shapes": shapes,
    "sorting": sorting,
}


def load_problems(
    source: str | Path,
    *,
    split: str = "train",
    format: DataFormat = "auto",
    prompt_column: str = "prompt",
    response_column: str | None = None,
    answer_column: str | None = "answer",
    chosen_column: str = "chosen",
    rejected_column: str = "rejected",
    config: str | None = None,
    limit: int | None = None,
    system_prompt: str | None = None,
    tag: str | None = None,
    on_bad_row: OnBadRow = "error",
    prompt_template: str | None = None,
    prompt_suffix: str | None = None,
    stream: bool = False,
    image_column: str | None = None,
) -> ProblemSet:
    """Load a data source as a `ProblemSet`.

    source: one of
        - a generated set: "addition" or "addition:noise=0.7"; also "countdown", "oneliners",
          "shapes", "sorting";
        - a file: .jsonl, .json, .csv, .tsv, .gz of these, .parquet or .arrow. If the rows of a file
          name their split (MBPP's task_id), only the rows of `split` are read;
        - a folder (rl.data.data_files.find_files);
        - a name of rl.data.dataset_registry ("mbpp"), or such a name and a file with its columns
          ("aime:problems.jsonl"), which is read in the format of that data set;
        - otherwise a hub name, with `config` if the data set has several.
    format: by default that of a listed data set, else chosen by the columns; one of
        - "columns": prompt, response and answer in the named columns. A prompt may be text or a
          list of messages;
        - "text": trained on as it is, without a prompt;
        - "messages" and "sharegpt": a chat; if its last message is the assistant's, that message is
          the response;
        - "alpaca": instruction, input, output;
        - "gsm8k": question, answer ending in "#### N";
        - "math": problem, solution or answer;
        - "preferences": two answers to a prompt, see rl.data.row_formats.PreferencesFormat;
        - "unpaired": an answer and whether it is good;
        - "mbpp", "humaneval", "apps", "livecodebench": programs to write (rl.data.code_formats);
        - "aime", "multiple_choice", "ifeval": rl.data.evaluation_formats;
        - "auto": chosen by the columns of the first good row.
    answer_column: the column that reaches the reward as meta["answer"]. The default column may be
        absent, a column that the caller names may not, except in rows of gsm8k, math, aime and
        multiple_choice, which have an answer of their own. None: no answer but that. All other
        columns reach the reward under their names.
    limit: the number of rows to read, from the first; None: all rows.
    system_prompt: the first message of a prompt that has no system message.
    tag: the name in metrics; default: the name of the source.
    on_bad_row: "error" raises an error that lists the bad rows (bad JSON, missing column, wrong
        type, empty prompt) by file and line; "skip" logs the bad rows and continues.
    prompt_template, prompt_suffix: see rl.data.prompt_template.PromptTemplate.
    image_column: see rl.data.row_images.RowImages.
    stream: read each row when it is accessed (rl.data.streaming). A file whose rows
        name their split cannot be streamed, nor a row that holds several problems.

    Raises UserError if an option is invalid, or if the source cannot be read or has no rows.
    """
    _check_options(format, on_bad_row, limit)
    source, entry = _resolve_source(str(source))
    if entry is not None and format == "auto" and (prompt_column, response_column) == _DEFAULTS:
        format = entry.format
    template = PromptTemplate(system_prompt, prompt_template, prompt_suffix, answer_column)
    name, _, options = source.partition(":")
    if name in GENERATED:
        generated = GENERATED[name](split, _parse_options(options), tag=tag or name)
        return template.apply_to_set(generated if limit is None else generated.first(limit))
    names = ColumnNames(
        prompt_column, response_column, answer_column, chosen_column, rejected_column
    )
    if stream:
        paths, label = _find_source_files(source, split, config)
        table = open_table(paths)
        if not len(table):
            raise UserError(f"{source} (split {split!r}) holds no row")
        reader = _choose_stream_format(source, table.row(0), format, names)
        parser = RowParser(template, tag or label, image_column)
        streamed = StreamedProblemSet(
            table, reader, parser, name=f"{label}/{split}", on_bad_row=on_bad_row
        )
        return streamed if limit is None else streamed.first(limit)
    rows, label = _read_source(source, split, config)
    parser = RowParser(template, tag or label, image_column)
    # Rows of a file may name their split; other sources were read by split.
    file_split = split if Path(source).expanduser().is_file() else None
    problems = _parse_problems(rows, format, names, limit, parser, on_bad_row, file_split)
    if not problems:
        raise UserError(f"{source} (split {split!r}) holds no row")
    return ProblemSet(problems, name=f"{label}/{split}")


_DEFAULTS = ("prompt", None)  # prompt_column and response_column that no caller named


def _resolve_source(source: str) -> tuple[str, DatasetEntry | None]:
    """Return a source, of NAME:FILE the file, and the listed data set whose columns it has; None if
    it is not listed. Raises UserError for an empty name, which would be that of the current folder.
    """
    if not source.strip():
        raise UserError("the name of a data set is empty: name a file, a folder or a data set")
    if (named_file := split_named_file(source)) is not None:
        entry, file = named_file
        return file, entry
    return source, None if Path(source).expanduser().exists() else find_dataset(source)


def _check_options(format: str, on_bad_row: str, limit: int | None) -> None:
    if format not in FORMATS:
        raise UserError(f"format must be one of {', '.join(FORMATS)}; got {format!r}")
    if on_bad_row not in ("error", "skip"):
        raise UserError(f"on_bad_row must be 'error' or 'skip', got {on_bad_row!r}")
    if limit is not None and limit < 1:
        raise UserError(f"limit must be at least 1 (None: all rows), got {limit}")


def _choose_stream_format(source: str, first: Row, format: str, names: ColumnNames) -> RowFormat:
    """Return the reader of a stream's rows by its first row. Raises UserError if that row is bad,
    or if the rows of a file name their split.
    """
    try:
        columns = first.columns
    except BadRow as error:
        raise UserError(
            f"{first.place}: {error}; the first row of a stream determines the format of all rows, "
            "so it must be valid"
        ) from error
    reader = choose_format(format, columns, names)
    if Path(source).expanduser().is_file() and reader.split_of(columns) is not None:
        raise UserError(
            f"{source}: its rows name their split, which a stream does not read: leave out "
            "stream, or write each split to a file of a folder (train.jsonl, test.jsonl)"
        )
    return reader


def has_row_splits(
    source: str | Path, *, format: DataFormat = "auto", **columns: str | None
) -> bool:
    """Return whether the source is a file whose first good row names its published split.

    columns: the column arguments of `load_problems`.
    """
    source, _ = _resolve_source(str(source))
    if not Path(source).expanduser().is_file():
        return False
    names = {key: name for key in asdict(ColumnNames()) if (name := columns.get(f"{key}_column"))}
    first = _first_good_row(source)
    if first is None:
        return False
    return choose_format(format, first, ColumnNames(**names)).split_of(first) is not None


def find_default_reward(source: str) -> str | None:
    """Return the name of the reward that scores a source; None if no reward is known for it.

    Known sources: catalogued data sets (by short name, hub name, or name and file), generated sets,
    and files of programs to write, of multiple choice or of instructions.
    """
    source, entry = _resolve_source(source)
    if entry is not None:
        return entry.reward
    if (name := source.partition(":")[0]) in GENERATED_REWARDS:
        return GENERATED_REWARDS[name]
    first = _first_good_row(source) if Path(source).expanduser().is_file() else None
    return None if first is None else ROW_FORMATS[detect_format(first, ColumnNames())].reward


def _first_good_row(source: str) -> Columns | None:
    """Return the columns of a file's first good row; None if it has no good row."""
    rows, _ = _read_source(source, "train", None)
    return next((row.columns for row in rows if not isinstance(row.content, BadRow)), None)


def _parse_options(text: str) -> dict[str, str]:
    """Parse "a=1,b=2" to {"a": "1", "b": "2"}."""
    return {
        key.strip(): value.strip()
        for key, _, value in (part.partition("=") for part in text.split(",") if part)
    }


def _read_source(source: str, split: str, config: str | None) -> tuple[Iterator[Row], str]:
    """Return the rows of a path or hub name, and the label of the source."""
    if not _is_local_path(source):
        name = source
        if (entry := find_dataset(source)) is not None:
            name, split = entry.hub, entry.hub_split(source, split)
            config = entry.config if config is None else config
        return read_hub(name, config, split), source.rpartition("/")[2]
    paths, label = _find_source_files(source, split, config)
    return (row for path in paths for row in read_file(path)), label


def _find_source_files(source: str, split: str, config: str | None) -> tuple[list[Path], str]:
    """Return the data files of a path, and the label of the source.

    Raises UserError if the path is no file or folder, or has an unknown suffix.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return find_files(path, split, config), path.resolve().name
    if not path.is_file():
        raise UserError(
            f"{source} is no file or folder, and only files can be streamed: leave out stream"
        )
    if not path.name.endswith(FILE_SUFFIXES):
        raise UserError(f"data file {path} must have a suffix among {', '.join(FILE_SUFFIXES)}")
    return [path], path.name.split(".")[0]


def _is_local_path(source: str) -> bool:
    """Return whether a source is an existing file or folder.

    Raises UserError if the source looks like a path that does not exist, or like a misspelled name
    of a generated or catalogued set.
    """
    path = Path(source).expanduser()
    if path.exists():
        return True
    starts_like_path = source.startswith((os.sep, "./", "../", "~"))
    if starts_like_path or source.endswith(FILE_SUFFIXES) or source.count("/") > 1:
        raise UserError(
            f"data file or folder {source} does not exist (current directory: {Path.cwd()})"
            f"{suggest_path(path)}"
        )
    close_matches = difflib.get_close_matches(
        source.partition(":")[0], [*GENERATED, *DATASET_REGISTRY], n=1, cutoff=0.75
    )
    if close_matches and "/" not in source and find_dataset(source) is None:
        raise UserError(f"no data source is named {source!r}: did you mean {close_matches[0]!r}?")
    return False


def _parse_problems(
    rows: Iterator[Row],
    format: str,
    names: ColumnNames,
    limit: int | None,
    parser: RowParser,
    on_bad_row: OnBadRow,
    split: str | None,
) -> list[Problem]:
    """Convert rows to problems. Bad rows are raised or logged after the last row.

    split: skip rows that name another split; None: keep all rows.
    """
    problems: list[Problem] = []
    bad = BadRowCollector(on_bad_row)
    reader: RowFormat | None = None
    for row in rows:
        if limit is not None and len(problems) >= limit:
            break
        try:
            reader = reader or choose_format(format, row.columns, names)
            if split is not None and reader.split_of(row.columns) not in (None, split):
                continue
            problems += parser.parse(row, reader, len(problems))
        except BadRow as error:
            bad.add(row.place, error)
    example = "" if reader is None else reader.example
    bad.raise_or_log(len(problems), names.by_setting(), example, problems)
    return problems if limit is None else problems[:limit]
