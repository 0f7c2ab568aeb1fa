"""Write docs/architectures.md from results/architectures.csv: `python tools/architectures_page.py`.

bench/architectures.py, which measures the table, writes the page as well.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
TABLE = REPO / "bench" / "results" / "architectures.csv"
SEEING = REPO / "bench" / "results" / "architectures_seeing.csv"
PAGE = REPO / "docs" / "architectures.md"
Row = Mapping[str, str]
SEES = {
    "exact": "Images, learnt and sampled as the plain model reads them",
    "text alone": "Text alone, as is said of it above; an image is refused by name",
    "refused": "Refused by name, for neither their images nor a class of their text alone is known",
}
BACK = {"resume": "resume", "reload": "transformers", "adapter": "PEFT"}

HEAD = """# Architectures

Every causal language model of transformers that `bench/architectures.py` can build small, from its own configuration class: does the
learner score and train it as the plain model does one sequence at a time, unpadded, in float32 (logprobs within 1e-4 nats, the gradient
within 1e-3), do samples score as they were drawn (within 1e-3 nats), and is what was written the same when it is read again? What is
not exact is refused by name before work begins.
`python bench/architectures.py` writes this page from `bench/results/architectures.csv`.

{counts}

* **learner**: the layouts in which it is trained exactly. *padded*: a row a sequence; *packed*: several in one row; *shared*: one prompt
  read once for all its answers. `--layout auto` takes one of them. *+ recompute*: also with `--gradient-checkpointing`.
* **sampler**: how its rows decode. *fast*: a forward of our own; *padded*: rows of any lengths side by side; *slots*: those, and a state
  for each row; *equal*: rows of one length; *recompute*: without a cache.
* **comes back**: *resume*: two steps, saved, and two more from what was saved are four steps, bit for bit, weights and optimizer;
  *transformers*: the folder written has the same logits in plain transformers; *PEFT*: and so has a LoRA's, read by PEFT alone.
* **LoRA leaves out**: the share of the weights that `--lora-rank` leaves without an adapter: experts, unless `--train-experts` asks for
  them, and a few tensors that are no linear layers.
"""

OTHERWISE = """A layout that the table does not name is refused when it is requested: a sequence depends on other sequences in
its row (no position says where it begins, or a state runs on)."""


def read(path: Path = TABLE) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def page(rows: Sequence[Row], seeing: Sequence[Row] = ()) -> str:
    """Return the text of the whole page. `seeing`: the rows of vision-language models."""
    built = [row for row in rows if row["parameters"]]
    trained = [row for row in built if _layouts(row)]
    sampled = [row for row in built if row["sampler"].startswith("exact")]
    counts = (
        f"{len(rows)} architectures; {len(built)} built; {len(trained)} train exactly in a layout "
        f"at least; samples of {len(sampled)} are exact; "
        f"{sum(len(_back(row)) == len(BACK) for row in trained)} come back in all three ways."
    )
    columns = (
        "architecture",
        "class",
        "layers",
        "learner",
        "sampler",
        "comes back",
        "LoRA leaves out",
    )
    lines = [HEAD.format(counts=counts), f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(map(_cell, _columns(row)))} |" for row in trained]
    lines += ["", "## Refused, and why", ""]
    for row in built:
        which = {
            "training": "" if row in trained else _first_refusal(row),
            "sampling": "" if row in sampled else row["sampler"],
        }
        which |= {
            what: row[column]
            for column, what in BACK.items()
            if row in trained and not row[column].startswith("exact")
        }
        lines += [
            f"* `{row['architecture']}`, {what}: {_reason(said)}"
            for what, said in which.items()
            if said
        ]
    lines += ["", OTHERWISE, "", "## Not built", ""]
    lines += [
        f"* `{row['architecture']}`: {_reason(row['class'])}"
        for row in rows
        if not row["parameters"]
    ]
    lines += ["", *_seeing(seeing)] if seeing else []
    return "\n".join(lines) + "\n"


def _seeing(rows: Sequence[Row]) -> list[str]:
    """Return the lines about vision-language models, measured by
    tests/models/test_architectures_seeing.py."""
    kinds = {
        kind: [f"`{row['architecture']}`" for row in rows if row["images"].startswith(kind)]
        for kind in SEES
    }
    others = [
        f"* `{row['architecture']}`: {row['images']}"
        for row in rows
        if not row["images"].startswith(tuple(SEES))
    ]
    head = [
        "## Models that see",
        "",
        f"{len(rows)} vision-language architectures (`tests/models/test_architectures_seeing.py`).",
        "",
    ]
    return [
        *head,
        *(f"* {SEES[kind]}, {len(names)}: {', '.join(names)}" for kind, names in kinds.items()),
        *others,
    ]


def _columns(row: Row) -> list[str]:
    sampler = (
        row["rows"]
        if row["sampler"] == "exact"
        else row["sampler"].replace("exact but", f"{row['rows']}, but")
    )
    share = (
        f"{float(row['lora_left_out']):.1%}"
        if re.fullmatch(r"[\d.]+", row["lora_left_out"])
        else _reason(row["lora_left_out"])
    )
    recompute = ["+ recompute"] if row["checkpointing"].startswith("exact") else []
    refused = "" if row["sampler"].startswith("exact") else "refused"
    learner = " ".join([*_layouts(row), *recompute])
    return [
        f"`{row['architecture']}`",
        row["class"],
        row["layers"],
        learner,
        refused or sampler,
        " ".join(_back(row)),
        share,
    ]


def _layouts(row: Row) -> list[str]:
    return [name for name in ("padded", "packed", "shared") if row[name].startswith("exact")]


def _back(row: Row) -> list[str]:
    return [what for column, what in BACK.items() if row[column].startswith("exact")]


def _first_refusal(row: Row) -> str:
    return next(row[name] for name in ("padded", "packed", "shared") if row[name])


def _reason(text: str) -> str:
    """Return the reason in a cell: its text without the prefix, on a single line, cut after 160
    characters.
    """
    text = re.sub(r"^refused: (UserError: )?", "", text)
    text = re.sub(r"tiny [\w-]+ \((\w+)\)", r"\1", text)
    short = text if len(text) <= 160 else f"{text[:160].rsplit(' ', 1)[0]} ..."
    return short.replace("\n", " ")


def _cell(text: str) -> str:
    return text.replace("|", "/")


def main() -> None:
    PAGE.write_text(page(read(), read(SEEING)))
    print(f"{PAGE.name} written, {len(read())} architectures")


if __name__ == "__main__":
    main()
