"""`load_problems`: a source by name or path, and rows of any of the usual shapes, to a `ProblemSet`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rl.data.addition import addition
from rl.data.formats import GSM8K, Alpaca, Columns, Messages, Preferences, RowFormat
from rl.data.problem_set import ProblemSet
from rl.data.rows import FILE_SUFFIXES, BadRow, BadRows, OnBadRow, Row, find_file, read_file, read_hub
from rl.errors import UserError
from rl.types import Problem

Format = Literal["auto", "columns", "messages", "alpaca", "gsm8k", "preferences"]
FORMATS = ("auto", "columns", "messages", "alpaca", "gsm8k", "preferences")
GENERATED = ("addition",)


def load_problems(
    source: str | Path,
    *,
    split: str = "train",
    format: Format = "auto",
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
) -> ProblemSet:
    """Problems from a source.

    source: "addition" or "addition:noise=0.7" (generated); a .jsonl or .json file (.gz too); a folder with <split>.jsonl or
        <split>.json; else a hub name, with `config` if the data set has several ("openai/gsm8k" takes "main" by itself).
    format: "columns" (prompt, response and answer in the named columns; a prompt may be text or a list of messages),
        "messages" (a chat; a last message of the assistant is the response), "alpaca" (instruction, input, output),
        "gsm8k" (question, answer ending in "#### N"), "preferences" (two answers to a prompt, see rl.data.formats.Preferences).
        "auto": by the columns of the first good row.
    answer_column: reaches the reward as meta["answer"]. The default one may be absent, a column named by you may not; None: no
        answer. All other columns reach it under their own names.
    limit: the first that many rows. system_prompt: the first message of problems that have no system message of their own.
    tag: the name in metrics; default the source's.
    on_bad_row: "error" names the bad rows (bad JSON, missing column, wrong type, empty prompt) by file and line; "skip" logs
        them and goes on.
    """
    if format not in FORMATS:
        raise UserError(f"format is one of {', '.join(FORMATS)}; got {format!r}")
    if on_bad_row not in ("error", "skip"):
        raise UserError(f"on_bad_row is 'error' or 'skip', got {on_bad_row!r}")
    if limit is not None and limit < 1:
        raise UserError(f"limit is at least 1 (None: all rows), got {limit}")
    name, _, options = str(source).partition(":")
    if name in GENERATED:
        generated = addition(split, _options(options), tag=tag or name, system_prompt=system_prompt)
        return generated if limit is None else generated.first(limit)
    rows, label = _rows(str(source), split, config)
    named = dict(prompt_column=prompt_column, response_column=response_column, answer_column=answer_column)
    named |= dict(chosen_column=chosen_column, rejected_column=rejected_column)
    problems = _problems(rows, format, named, limit, system_prompt, tag or label, BadRows(on_bad_row))
    if not problems:
        raise UserError(f"{source} (split {split!r}) holds no row")
    return ProblemSet(problems, name=f"{label}/{split}")


def _options(text: str) -> dict[str, str]:
    """"a=1,b=2" to {"a": "1", "b": "2"}."""
    return {key.strip(): value.strip() for key, _, value in (part.partition("=") for part in text.split(",") if part)}


def _rows(source: str, split: str, config: str | None) -> tuple[Iterator[Row], str]:
    """The rows of a path or hub name, and the name to call them by."""
    path = Path(source).expanduser()
    if path.is_dir():
        path = find_file(path, split)
        return read_file(path), path.parent.resolve().name
    if path.is_file():
        if not path.name.endswith(FILE_SUFFIXES):
            raise UserError(f"data file {path} has none of the suffixes {', '.join(FILE_SUFFIXES)}")
        return read_file(path), path.name.split(".")[0]
    looks_like_path = source.startswith((os.sep, "./", "../", "~")) or source.endswith(FILE_SUFFIXES) or source.count("/") > 1
    if looks_like_path:
        raise UserError(f"data file or folder {source} does not exist (seen from {Path.cwd()})")
    near = difflib.get_close_matches(source.partition(":")[0], GENERATED, n=1, cutoff=0.75)
    if near:
        raise UserError(f"no data source is named {source!r}: did you mean {near[0]!r}?")
    if config is None and source in ("openai/gsm8k", "gsm8k"):
        source, config = "openai/gsm8k", "main"
    return read_hub(source, config, split), source.rpartition("/")[2]


def _format_of(columns: Mapping[str, Any], named: Mapping[str, str | None]) -> str:
    """Which format a row has, by its columns; columns that were named are what is wanted, there or not."""
    if named["prompt_column"] != "prompt" or named["response_column"] is not None or "prompt" in columns:
        return "columns"
    if "messages" in columns:
        return "messages"
    if "instruction" in columns and "output" in columns:
        return "alpaca"
    if "question" in columns and "####" in str(columns.get("answer")):
        return "gsm8k"
    if named["chosen_column"] in columns and named["rejected_column"] in columns:
        return "preferences"
    return "columns"


def _row_format(format: str, columns: Mapping[str, Any], named: Mapping[str, str | None]) -> RowFormat:
    """The reader of rows, settled by the first one."""
    if format == "auto":
        format = _format_of(columns, named)
    answer = named["answer_column"]
    if answer == "answer" and "answer" not in columns:
        answer = None  # the default column may be absent
    if format == "messages":
        return Messages(answer)
    if format == "alpaca":
        return Alpaca(answer)
    if format == "gsm8k":
        return GSM8K()
    if format == "preferences":
        return Preferences(str(named["prompt_column"]), str(named["chosen_column"]), str(named["rejected_column"]), answer)
    return Columns(str(named["prompt_column"]), named["response_column"], answer)


def _problems(
    rows: Iterator[Row],
    format: str,
    named: Mapping[str, str | None],
    limit: int | None,
    system_prompt: str | None,
    tag: str,
    bad: BadRows,
) -> list[Problem]:
    """Read rows into problems; raises, or logs, for the bad ones at the end."""
    problems: list[Problem] = []
    reader: RowFormat | None = None
    for row in rows:
        if limit is not None and len(problems) >= limit:
            break
        try:
            if isinstance(row.columns, BadRow):
                raise row.columns
            reader = reader or _row_format(format, row.columns, named)
            messages, meta, response, rejected = reader.read(row.columns)
        except BadRow as error:
            bad.add(row.place, error)
            continue
        if system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system_prompt}, *messages]
        problems.append(Problem(tuple(messages), meta, response, tag, len(problems), rejected))
    bad.settle(len(problems), named)
    return problems
