"""Check for each architecture that the weights that a run exports compute what the run's model
does.

    python bench/merges.py tables      # LoRA on everything, merged, written, read again
    python bench/merges.py chains      # sft -> dpo -> grpo under LoRA -> export --merge

"tables" covers all of architectures.csv that build. "chains" covers ten architectures, tied and
untied, with a different LoRA rank in a later stage. Rows go to bench/results/merges.csv and
chains.csv after each architecture; `--only NAME ...` selects some. `difference` is the largest
difference of a logit between plain transformers, reading the written folder, and the run's model
(adapters unmerged on their bases), in fp32. For chains, `against_float64` compares with float64
sums of the adapters' files. The exit code is 1 if a difference is above 1e-5 of the largest logit
(at least 1).
"""

from __future__ import annotations

import argparse
import csv
import logging
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)
sys.path.append(str(HERE.parent / "tests"))
os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1"
)

import torch  # noqa: E402
from chains import CHAINED, chain  # noqa: E402
from test_export import merged_as_trained  # noqa: E402
from tiny_models import tiny_model  # noqa: E402

from rl.errors import UserError  # noqa: E402

BOUND = 1e-5


def table_row(name: str) -> dict[str, Any]:
    tied = bool(getattr(tiny_model(name).config.get_text_config(), "tie_word_embeddings", False))
    with tempfile.TemporaryDirectory() as folder:
        return {
            "architecture": name,
            "tied": tied,
            "difference": f"{merged_as_trained(name, Path(folder) / 'out'):.1e}",
        }


def chain_row(name: str) -> dict[str, Any]:
    kind, _, tied = name.partition(":")
    folder = Path(tempfile.mkdtemp())
    try:
        ours, exact = chain(kind, tied == "tied", folder)
    finally:
        shutil.rmtree(folder)
    return {
        "architecture": kind,
        "tied": tied == "tied",
        "difference": f"{ours:.1e}",
        "against_float64": f"{exact:.1e}",
    }


def _send(work: Any, name: str, there: Any) -> None:
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (the runs' consoles)
    try:
        there.send(work(name))
    except Exception as error:  # noqa: BLE001  (models run third-party code)
        how = "refused" if isinstance(error, UserError) else f"not tried: {type(error).__name__}"
        there.send(
            {"architecture": name, "difference": f"{how}: {str(error).splitlines()[0][:250]}"}
        )


def in_its_own_process(work: Any, name: str, limit: float) -> dict[str, Any]:
    here, there = multiprocessing.get_context("fork").Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_send, args=(work, name, there))
    process.start()
    there.close()
    try:
        return (
            here.recv()
            if here.poll(limit)
            else {"architecture": name, "difference": f"not tried: no row within {limit:g} s"}
        )
    except EOFError:
        return {"architecture": name, "difference": "not tried: the process ended"}
    finally:
        process.kill()
        process.join()


def _key(row: dict[str, Any]) -> tuple[str, str]:
    return row["architecture"], str(row.get("tied", ""))


def names(which: str) -> list[str]:
    if which == "chains":
        return [f"{name}:{tied}" for name in CHAINED for tied in ("tied", "untied")]
    with (HERE / "results" / "architectures.csv").open() as file:
        return [
            row["architecture"]
            for row in csv.DictReader(file)
            if not row["class"].startswith("not ")
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", choices=["tables", "chains"])
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one architecture")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    table = HERE / "results" / ("merges.csv" if asked.which == "tables" else "chains.csv")
    rows = {}
    if table.is_file():
        with table.open() as file:
            rows = {_key(row): row for row in csv.DictReader(file)}
    for name in asked.only or names(asked.which):
        begin = time.perf_counter()
        row = in_its_own_process(
            table_row if asked.which == "tables" else chain_row, name, asked.limit
        )
        row["seconds"] = round(time.perf_counter() - begin, 1)
        if asked.which == "tables":
            rows = {key: old for key, old in rows.items() if key[0] != name}
        rows[_key(row)] = row
        print(row, flush=True)
        with table.open("w", newline="") as out:
            more = ["against_float64"] if asked.which == "chains" else []
            writer = csv.DictWriter(out, ["architecture", "tied", "difference", *more, "seconds"])
            writer.writeheader()
            writer.writerows(rows[key] for key in sorted(rows))
    cells = [
        str(row.get(key) or "0")
        for row in rows.values()
        for key in ("difference", "against_float64")
    ]
    sys.exit(
        any(not cell.startswith(("not ", "refused")) and not float(cell) <= BOUND for cell in cells)
    )


if __name__ == "__main__":
    main()
