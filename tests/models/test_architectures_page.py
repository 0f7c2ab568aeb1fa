"""Test that docs/architectures.md matches the table in bench/results."""

import csv
from pathlib import Path

from tools import architectures_page as pages

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_table_says():
    text = pages.page(pages.read(), pages.read(pages.SEEING))
    assert (ROOT / "docs" / "architectures.md").read_text() == text, (
        "write it anew: python tools/architectures_page.py"
    )


def test_counts_and_layouts_are_those_of_the_cells():
    """Count from the text of the CSV file, row by row."""
    with (ROOT / "bench" / "results" / "architectures.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    at = {name: i for i, name in enumerate(header)}
    text = pages.page(pages.read())
    lines = {
        line.split("`")[1]: line.split(" | ")
        for line in text.splitlines()
        if line.startswith("| `")
    }
    exact = [
        row
        for row in rows
        if any(row[at[name]].startswith("exact") for name in ("padded", "packed", "shared"))
    ]
    assert set(lines) == {row[0] for row in exact} and len(exact) >= 60
    assert (
        f"{len(exact)} train exactly" in text
        and f"samples of {sum(row[at['sampler']].startswith('exact') for row in rows)} are" in text
    )
    for row in exact:
        layouts = lines[row[0]][3].removesuffix(" + recompute").split()
        assert layouts == [
            name for name in ("padded", "packed", "shared") if row[at[name]].startswith("exact")
        ]
        assert ("refused" in lines[row[0]][4]) == row[at["sampler"]].startswith("refused")
        assert lines[row[0]][5].split() == [
            w for c, w in pages.BACK.items() if row[at[c]].startswith("exact")
        ]
    all_three = [
        row
        for row in exact
        if all(row[at[column]].startswith("exact") for column in ("resume", "reload", "adapter"))
    ]
    assert f"{len(all_three)} come back in all three ways" in text
    output = text.split("## Refused")[1]
    for row in rows:
        if row not in exact or not row[at["sampler"]].startswith("exact"):
            assert f"* `{row[0]}`" in output, row[0]


def test_models_that_see_stand_in_one_list_each():
    cells = {"a": "exact", "b": "text alone", "c": "refused: x", "d": "WRONG: learner 1 nats"}
    rows = [{"architecture": name, "images": output} for name, output in cells.items()]
    text = pages.page([], rows).split("## Models that see")[1]
    assert "4 vision-language" in text and "* `d`: WRONG" in text
    assert [line.split(": ")[1] for line in text.splitlines() if ", 1: " in line] == [
        "`a`",
        "`b`",
        "`c`",
    ]


def test_what_is_wrong_is_never_called_exact():
    row = dict.fromkeys(["class", "layers", "lora_left_out"], "x") | {
        "architecture": "one",
        "parameters": "5",
        "rows": "padded",
    }
    row |= {
        "padded": "WRONG: 1 nats, gradient 0.5",
        "packed": "",
        "shared": "",
        "checkpointing": "",
        "sampler": "WRONG: 2 nats",
    }
    row |= dict.fromkeys(pages.BACK, "exact")
    text = pages.page([row])
    assert (
        "| `one`" not in text
        and "`one`, training: WRONG: 1 nats" in text
        and "`one`, sampling: WRONG: 2 nats" in text
    )
    row |= {
        "padded": "exact",
        "sampler": "exact",
        "resume": "WRONG: 3 of 4 tensors differ, a first",
    }
    text = pages.page([row])
    assert "| `one` | x | x | padded | padded | transformers PEFT | x |" in text
    assert "`one`, resume: WRONG: 3 of 4" in text and "0 come back in all three ways" in text
