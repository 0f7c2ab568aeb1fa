"""List the metrics of evaluations as tables, with their standard errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.errors import UserError
from rl.jsonl import Row
from rl.reporting.logbook import EVALUATIONS
from rl.reporting.paired_comparison import PairedComparison, average_by_problem, compare_paired
from rl.sanitize import sanitize_text

TABLE_COLUMNS = ("dataset", "metric", "mean", "standard_error", "problems", "answers", "truncated")
_ERROR = "standard error of "
_NAME_LIMIT = 200  # characters of a name in a table


def make_table_rows(
    dataset: str, metrics: Mapping[str, float], problems: int, answers: int
) -> list[dict[str, Any]]:
    """Return the rows of a data set: its accuracy (the mean reward if correctness is unknown),
    pass@k, and the accuracies of instructions, the first of which is the accuracy.

    `metrics`: those of `rl.trainer.compute_evaluation_metrics`. A row has the keys `TABLE_COLUMNS`;
    `standard_error` is None for a single problem, `truncated` the share of answers that reached
    max_tokens.
    """
    first = "correct" if "correct" in metrics else "mean reward"
    names = [
        name
        for name in metrics
        if (name == first and "prompt_level_strict_acc" not in metrics)
        or name.startswith(("pass@", "prompt_level_", "inst_level_"))
        and not name.startswith(_ERROR)
    ]
    return [
        {
            "dataset": dataset,
            "metric": name,
            "mean": metrics[name],
            "standard_error": metrics.get(_ERROR + name),
            "problems": problems,
            "answers": answers,
            "truncated": metrics.get("truncated"),
        }
        for name in names
    ]


def format_cells(row: Row) -> list[str]:
    """Return the cells of a row as text, in the order of `TABLE_COLUMNS`."""
    values = [row.get(column) for column in TABLE_COLUMNS]
    return [
        f"{value:.4f}"
        if isinstance(value, float)
        else sanitize_text("n/a" if value is None else str(value), _NAME_LIMIT)
        for value in values
    ]


def format_markdown(rows: Iterable[Row]) -> str:
    """Return a table of Markdown."""
    titles = [column.replace("_", " ") for column in TABLE_COLUMNS]
    lines = [titles, ["---"] * 2 + ["---:"] * (len(TABLE_COLUMNS) - 2), *map(format_cells, rows)]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n" for cells in lines
    )


def read_evaluation(path: Path) -> dict[str, Any]:
    """Read what `evaluate.py` wrote. Raises UserError if the file is another one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as an evaluation: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("table"), list):
        raise UserError(f"{path} is no evaluation: expected a .json file that evaluate.py wrote")
    return content


def list_evaluation_tables(folder: Path) -> list[dict[str, Any]]:
    """Return the evaluations in a run's folder, the oldest first: name, weights, temperature, seeds
    and the cells of the table. Files that hold no evaluation are left out.
    """
    existing = [path for path in (folder / EVALUATIONS).glob("*.json") if path.is_file()]
    paths = sorted(existing, key=lambda path: path.stat().st_mtime)
    tables = []
    for path in paths:
        try:
            content = read_evaluation(path)
        except UserError:
            continue
        rows = [row for row in content["table"] if isinstance(row, Mapping)]
        tables.append(
            {
                "name": path.name,
                "weights": str(content.get("weights", "")),
                "temperature": str(content.get("temperature", "")),
                "seeds": str(content.get("seeds", "")).strip("[]"),
                "rows": [format_cells(row) for row in rows],
                "sentences": [
                    str(row["sentence"])
                    for row in content.get("comparison") or []
                    if isinstance(row, dict) and "sentence" in row
                ],
            }
        )
    return tables


def compare_evaluations(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[tuple[str, PairedComparison]]:
    """Compare two evaluations on the problems that they share: a comparison for each data set.

    Data sets of the same requested name or the same loaded name (`source`) are compared, and two
    evaluations of a single data set directly.
    """
    first, second = _list_parts(before), _list_parts(after)
    is_single = len(first) == len(second) == 1
    comparisons = []
    for part in second:
        pairs = (
            compare_paired(other["scores"], part["scores"])
            for key in ("dataset", "source")
            for other in first
            if is_single or (part.get(key) is not None and part.get(key) == other.get(key))
        )
        comparison = next(filter(None, pairs), None)
        if comparison is not None:
            comparisons.append((str(part.get("dataset")), comparison))
    return comparisons


def _list_parts(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the data sets of an evaluation, each with the mean score of each problem as `scores`.

    The tags of the rows are left out: they derive from the name by which the set was requested.
    """
    parts: Sequence[Mapping[str, Any]] = evaluation.get("datasets") or [evaluation]
    return [
        {
            **part,
            "scores": average_by_problem(
                {
                    **row,
                    "tag": None,
                    "metrics": {"correct": row["correct"]} if "correct" in row else {},
                }
                for row in part.get("rows") or []
            ),
        }
        for part in parts
    ]
