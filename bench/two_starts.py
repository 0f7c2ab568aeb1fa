"""Start two processes on a run's folder at random moments and compare the end with a clean run.

The script also checks that the second process gets a message about the first.

    python bench/two_starts.py --count 50      # writes bench/results/two_starts.csv

For each row, the script starts a run. At a random moment (also before the run, or long after it), a
second process starts with --resume, --overwrite, --auto-resume or no flag. In half of the rows, the
first is killed (SIGKILL) at another random moment. Then a third process continues with
--auto-resume, whatever state the first two end in. Columns:
  same    metrics (except times), weights and checkpoint names equal those of an undisturbed run
  second  "refused" (the message named the first process), "went on", "began anew", or
          "not asked for" (a run existed, and no flag selected an action)
The exit code is 1 if a row is not the same, or if a process ended in another way. If both processes
wrote at the same time, the files would match neither run.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", MPLBACKEND="agg")

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from rl.algorithms import METHODS  # noqa: E402
from rl.config import RunSettings, parse_run  # noqa: E402
from rl.errors import UserError  # noqa: E402
from rl.trainer.execute import execute  # noqa: E402

TABLE = HERE / "results" / "two_starts.csv"
WORDS = (
    "grpo --steps 8 --save-every 2 --batch-size 4 --group-size 2 --max-tokens 4 --eval-every 4 "
    "--eval-limit 4 --quiet"
)
FORK = multiprocessing.get_context("fork")


def _run(words: str, folder: Path, there: Any) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        execute(
            parse_run(
                [*words.split(), "--output-dir", str(folder)],
                METHODS,
                Path("none.yaml"),
                options=RunSettings,
            )
        )
        there.send("done")
    except UserError as error:
        there.send(str(error))


def start(words: str, folder: Path) -> tuple[Any, Any]:
    here, there = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_run, args=(words, folder, there))
    process.start()
    there.close()
    return process, here


def word_of(process: Any, here: Any) -> str:
    """Return a process's last message, or "killed" if it could not send a message."""
    try:
        said = here.recv()
    except EOFError:
        said = "killed"
    process.join()
    return str(said)


def left(folder: Path) -> tuple[Any, ...]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    figures = [
        {key: value for key, value in row.items() if not key.startswith("time/")} for row in rows
    ]
    weights = {
        key: tensor.tolist()
        for key, tensor in load_file(
            str(folder / "checkpoints/grpo-final/model/model.safetensors")
        ).items()
    }
    return figures, weights, sorted(path.name for path in (folder / "checkpoints").iterdir())


def second_of(said: str, how: str) -> str:
    if "in use by process" in said or "was taken over by" in said:
        return "refused"
    if "holds a run" in said:
        return "not asked for"
    if "nothing to resume" in said:
        return "nothing there"
    if said != "done":
        return f"WRONG: {said[:120]}"
    return {"--resume": "went on", "--overwrite": "began anew"}.get(how, "went on or began")


def interleaving(
    number: int, whole: tuple[Any, ...], seconds: float, parent: Path
) -> dict[str, Any]:
    rng = random.Random(number)
    folder, how = (
        parent / f"run{number}",
        rng.choice(["--resume", "--overwrite", "--auto-resume", ""]),
    )
    kill = rng.random() < 0.5
    moments = [("first", 0.3), ("second", rng.uniform(0.2, 0.3 + 1.2 * seconds))]
    if kill:
        moments.append(("kill", rng.uniform(0.3, 0.3 + seconds)))
    begin, started = time.monotonic(), dict[str, Any]()
    for what, moment in sorted(moments, key=lambda pair: pair[1]):
        time.sleep(max(0.0, begin + moment - time.monotonic()))
        if what == "kill":
            if "first" in started:
                started["first"][0].kill()
        else:
            started[what] = start(f"{WORDS} {how if what == 'second' else ''}", folder)
    said = {what: word_of(*pair) for what, pair in started.items()}
    third = word_of(*start(f"{WORDS} --auto-resume", folder))
    same = third == "done" and left(folder) == whole
    row = {
        "interleaving": number,
        "second_is": how or "(no flag)",
        "second_after": round(moments[1][1] - 0.3, 2),
        "killed": kill,
        "first": second_of(said["first"], "") if said["first"] != "killed" else "killed",
        "second": second_of(said["second"], how),
        "same": same,
    }
    shutil.rmtree(folder)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    parent = Path(tempfile.mkdtemp())
    begin = time.monotonic()
    said = word_of(*start(WORDS, parent / "whole"))
    seconds = time.monotonic() - begin
    if said != "done":
        sys.exit(said)
    whole = left(parent / "whole")
    rows = []
    if TABLE.is_file() and asked.first:
        with TABLE.open() as file:
            rows = [row for row in csv.DictReader(file) if int(row["interleaving"]) < asked.first]
    for number in range(asked.first, asked.first + asked.count):
        row = interleaving(number, whole, seconds, parent)
        rows.append(row)
        print(row, flush=True)
        with TABLE.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(row))
            writer.writeheader()
            writer.writerows(rows)
    shutil.rmtree(parent)
    sys.exit(
        any(
            str(row["same"]) != "True" or "WRONG" in f"{row['first']}{row['second']}"
            for row in rows
        )
    )


if __name__ == "__main__":
    main()
