"""Train recipes/shapes.yaml with its images and blind (every image's pixels permuted), to show what
is learned from the images.

    python bench/images.py --seeds 0 1 2    # into results/images.csv; --only seeing (or blind)

The table has a row for each stage of each run, written when the run has ended (a run's rows replace
its earlier rows): held-out accuracy (sampled and greedy) before and after, steps, CPU seconds of
the whole run, wall seconds. `pass`: the run with images ends above the bar, the blind run below it.
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

REPO = Path(__file__).resolve().parent.parent
BAR = 0.7
PICTURES = ("seeing", "blind")
FIELDS = (
    "pictures",
    "seed",
    "stage",
    "steps",
    "accuracy_first",
    "accuracy_last",
    "greedy_last",
    "cpu_seconds",
    "wall_seconds",
    "pass",
)


def recipe(blind: bool, folder: Path) -> Path:
    """Return the path of recipes/shapes.yaml; if `blind`, of a copy with every image's pixels
    permuted, in training and held out.
    """
    own = REPO / "recipes" / "shapes.yaml"
    if not blind:
        return own
    content = yaml.safe_load(own.read_text())
    for part in (content, *content["stages"]):
        if "dataset" in part:
            name, _, options = part["dataset"].partition(":")
            part["dataset"] = f"{name}:{','.join(filter(None, [options, 'blind=1']))}"
    other = folder / "blind.yaml"
    other.write_text(yaml.safe_dump(content))
    return other


def run(which: str, seed: int, extra: list[str], folder: Path) -> list[dict[str, object]]:
    """Return the rows of a run, a row for each stage. Raises RuntimeError if the run fails."""
    folder.mkdir()
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    words = [
        str(recipe(which == "blind", folder)),
        "--seed",
        str(seed),
        "--output-dir",
        str(folder / "run"),
        *extra,
    ]
    done = subprocess.run(
        [sys.executable, "train.py", *words], cwd=REPO, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    metrics = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    rows: list[dict[str, object]] = []
    for stage in dict.fromkeys(row["stage"] for row in metrics):
        own = [row for row in metrics if row["stage"] == stage]
        seen, greedy = (
            [row[name] for row in own if name in row]
            for name in ("test/env/all/correct", "test/greedy/all/correct")
        )
        last = max(seen[-1], greedy[-1] if greedy else 0.0) if seen else None
        row: dict[str, object] = {
            "pictures": which,
            "seed": seed,
            "stage": stage,
            "steps": max(row["step"] for row in own),
        }
        row |= {
            "accuracy_first": seen[0] if seen else "",
            "accuracy_last": seen[-1] if seen else "",
        }
        row |= {"greedy_last": greedy[-1] if greedy else ""}
        passes = "" if last is None else int((last < BAR) if which == "blind" else (last > BAR))
        rows.append(
            row
            | {
                "cpu_seconds": round(cpu),
                "wall_seconds": round(time.perf_counter() - start),
                "pass": passes,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", choices=PICTURES, nargs="+", default=PICTURES)
    parser.add_argument("--out", type=Path, default=REPO / "bench" / "results" / "images.csv")
    args, extra = parser.parse_known_args()
    known: list[dict[str, object]] = (
        list(csv.DictReader(args.out.open(newline=""))) if args.out.is_file() else []
    )
    for seed in args.seeds:
        for which in args.only:
            with tempfile.TemporaryDirectory() as scratch:
                rows = run(which, seed, extra, Path(scratch) / "one")
            print(*rows, sep="\n", flush=True)
            known = [
                row for row in known if (row["pictures"], str(row["seed"])) != (which, str(seed))
            ] + rows
            with args.out.open("w", newline="") as stream:
                writer = csv.DictWriter(stream, FIELDS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(
                    sorted(
                        known,
                        key=lambda row: (
                            PICTURES.index(str(row["pictures"])),
                            int(str(row["seed"])),
                        ),
                    )
                )
    sys.exit(any(str(row["pass"]) == "0" for row in known if row["stage"] == known[-1]["stage"]))


if __name__ == "__main__":
    main()
