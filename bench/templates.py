"""Compare each family's chat template with our renderer in 200 random conversations.

The table counts the compared prompts, answers and next turns, and the differences (none expected).

    # writes results/templates.csv; the package trl holds the templates that the data folder lacks
    python bench/templates.py
    python bench/templates.py --only gemma4 glm4moe    # some families; replaces their existing rows

The comparison is that of tests/renderers/test_templates.py. Columns:
  prompts  prompts that equal apply_chat_template token for token
  forged   prompts where a participant's text held a special token
  answers  answers that parse to what was rendered (with thoughts and calls where `read back` says
           so)
  bridged  next turns that extend the tokens read and written so far, token for token
  anew     next turns that cannot extend them and are rendered from the beginning
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]
# This folder's kernels.py would shadow the package.
sys.path.remove(str(HERE))

import pytest  # noqa: E402
from test_templates import COUNT, FOLDER, PACKAGE, abilities, check, of_folder, of_package  # noqa: E402

COLUMNS = (
    "family",
    "template",
    "read_back",
    "conversations",
    "prompts",
    "forged",
    "answers",
    "bridged",
    "anew",
    "outcome",
)


def row(name: str, source: str, tokenizers: Path) -> dict[str, object]:
    found: dict[str, object] = {"family": name, "template": source, "conversations": COUNT}
    try:
        renderer = (
            of_folder(name, tokenizers) if source == "tokenizer" else of_package(name, tokenizers)
        )
        found["read_back"] = " ".join(
            sorted(abilities(renderer, name) & {"calls", "thoughts", "thoughts_of_calls", "tools"})
        )
        return found | check(renderer, name) | {"outcome": "equal"}
    except pytest.skip.Exception as skipped:
        return found | {"conversations": 0, "outcome": f"not run: {skipped}"}
    except AssertionError as error:
        return found | {"outcome": f"DIFFERENT: {str(error).splitlines()[0][:120]}"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(os.environ.get("WHETSTONE_DATA", "data")),
        help="folder with tokenizers/",
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "templates.csv")
    parser.add_argument("--only", nargs="+", help="families, by their names in the table")
    asked = parser.parse_args()
    every = [*((name, "tokenizer") for name in FOLDER), *((name, "trl") for name in PACKAGE)]
    rows: dict[tuple[str, str], dict[str, object]] = {}
    if asked.only and asked.out.is_file():
        with asked.out.open(newline="") as file:
            rows = {(one["family"], one["template"]): dict(one) for one in csv.DictReader(file)}
    for name, source in every:
        if asked.only and name not in asked.only:
            continue
        rows[name, source] = row(name, source, asked.data / "tokenizers")
        print(
            *(f"{key} {value}" for key, value in rows[name, source].items()), sep="  ", flush=True
        )
        with asked.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows[key] for key in every if key in rows)
    sys.exit(any(str(one["outcome"]).startswith("DIFFERENT") for one in rows.values()))


if __name__ == "__main__":
    main()
