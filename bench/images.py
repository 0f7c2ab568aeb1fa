"""recipes/shapes.yaml as it sees and blind (every picture's pixels permuted): what is learnt by looking.

    python bench/images.py --seeds 0 1 --out bench/results/images.csv

A row a run: held-out accuracy (sampled and greedy) before and after, steps, CPU seconds of the whole run, wall seconds. `pass`: the run
that sees ends above the bar, the blind one below it.
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

REPO = Path(__file__).resolve().parent.parent
BAR = 0.7
FIELDS = ("dataset", "seed", "stage", "steps", "accuracy_first", "accuracy_last", "greedy_last", "cpu_seconds", "wall_seconds", "pass")


def run(dataset: str, seed: int, extra: list[str], folder: Path) -> list[dict[str, object]]:
    """The rows of one run, one a stage."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    words = ["recipes/shapes.yaml", "--dataset", dataset, "--seed", str(seed), "--output-dir", str(folder), *extra]
    done = subprocess.run([sys.executable, "train.py", *words], cwd=REPO, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows: list[dict[str, object]] = []
    for stage in dict.fromkeys(row["stage"] for row in metrics):
        own = [row for row in metrics if row["stage"] == stage]
        seen, greedy = ([row[name] for row in own if name in row] for name in ("test/env/all/correct", "test/greedy/all/correct"))
        last = max(seen[-1], greedy[-1] if greedy else 0.0) if seen else None
        row: dict[str, object] = {"dataset": dataset, "seed": seed, "stage": stage, "steps": max(row["step"] for row in own)}
        row |= {"accuracy_first": seen[0] if seen else "", "accuracy_last": seen[-1] if seen else ""}
        row |= {"greedy_last": greedy[-1] if greedy else ""}
        passes = "" if last is None else int((last < BAR) if "blind" in dataset else (last > BAR))
        rows.append(row | {"cpu_seconds": round(cpu), "wall_seconds": round(time.perf_counter() - start), "pass": passes})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--datasets", nargs="+", default=["shapes", "shapes:blind=1"])
    parser.add_argument("--out", type=Path, default=REPO / "bench" / "results" / "images.csv")
    args, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch, args.out.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, FIELDS)
        writer.writeheader()
        for seed in args.seeds:
            for i, dataset in enumerate(args.datasets):
                for row in run(dataset, seed, extra, Path(scratch) / f"{seed}-{i}"):
                    writer.writerow(row)
                    stream.flush()
                    print(row, flush=True)


if __name__ == "__main__":
    main()
