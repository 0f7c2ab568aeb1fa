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

    def list_exact(row, columns):
        return [name for name in columns if row[at[name]].startswith("exact")]

    layouts = ("padded", "packed", "shared")
    exact = [row for row in rows if list_exact(row, layouts)]
    assert set(lines) == {row[0] for row in exact} and len(exact) >= 60
    sampled = [row for row in rows if list_exact(row, ["sampler"])]
    assert f"{len(exact)} train exactly" in text and f"samples of {len(sampled)} are" in text
    for row in exact:
        line = lines[row[0]]
        assert line[3].removesuffix(" + recompute").split() == list_exact(row, layouts)
        assert ("refused" in line[4]) == row[at["sampler"]].startswith("refused")
        assert line[5].split() == [pages.BACK[name] for name in list_exact(row, pages.BACK)]
    all_three = [row for row in exact if len(list_exact(row, ("resume", "reload", "adapter"))) == 3]
    assert f"{len(all_three)} come back in all three ways" in text
    output = text.split("## Refused")[1]
    for row in rows:
        assert row in exact and row in sampled or f"* `{row[0]}`" in output, row[0]


def test_models_that_see_stand_in_one_list_each():
    cells = {"a": "exact", "b": "text alone", "c": "refused: x", "d": "WRONG: learner 1 nats"}
    rows = [{"architecture": name, "images": output} for name, output in cells.items()]
    text = pages.page([], rows).split("## Models that see")[1]
    assert "4 vision-language" in text and "* `d`: WRONG" in text
    listed = [line.split(": ")[1] for line in text.splitlines() if ", 1: " in line]
    assert listed == ["`a`", "`b`", "`c`"]


def test_what_is_wrong_is_never_called_exact():
    row = dict.fromkeys(["class", "layers", "lora_left_out"], "x")
    row |= dict.fromkeys(["packed", "shared", "checkpointing"], "")
    row |= dict.fromkeys(pages.BACK, "exact")
    row |= {"architecture": "one", "parameters": "5", "rows": "padded"}
    text = pages.page([row | {"padded": "WRONG: 1 nats, gradient 0.5", "sampler": "WRONG: 2 nats"}])
    assert "| `one`" not in text
    assert "`one`, training: WRONG: 1 nats" in text and "`one`, sampling: WRONG: 2 nats" in text
    row |= {"resume": "WRONG: 3 of 4 tensors differ, a first"}
    text = pages.page([row | {"padded": "exact", "sampler": "exact"}])
    assert "| `one` | x | x | padded | padded | transformers PEFT | x |" in text
    assert "`one`, resume: WRONG: 3 of 4" in text and "0 come back in all three ways" in text
