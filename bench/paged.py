"""Run random workloads through the engines. Check that samples equal those of a request by itself
and that no page leaks; count the waits of rows.

    python bench/paged.py --workloads 1000          # into bench/results/paged.csv

The table has a row for each hundred workloads of each kind. The kind "paged beside plain" runs
groups with few pages through `PagedEngine` and `Engine`. The other kinds run everything at once
through `Engine`, `PagedEngine` and `MultiStepEngine` (tests/sampler_anything.py): requests of all
kinds, steps, aborts, new weights, engines abandoned midway. If a sample differs, a page leaks, or
more than 1.1 times the tokens plus a page per row are held, the script raises and writes no row.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Replace this folder on sys.path by the repository: bench/kernels.py would shadow the package
# `kernels`.
sys.path[0] = str(HERE.parent)
sys.path.append(str(HERE.parent / "tests"))

import torch  # noqa: E402

COLUMNS = [
    "waited",
    "looks",
    "dropped",
    "changed",
    "moved",
    "kept",
    "begun",
    "compared",
    "requests",
]
KINDS = ["paged beside plain", "plain", "paged", "stepped"]


def runner(kind: str) -> Callable[[range], Counter[str]]:
    """Return a function that runs the workloads of some seeds and counts the events in them."""
    if kind == KINDS[0]:
        from test_sampler_paged import perturbed_decoder, same_samples

        decoder = perturbed_decoder()
        return lambda seeds: Counter(waited=same_samples(decoder, seeds))
    from sampler_anything import play, two_weights

    decoders, changes = two_weights(), ("none", "same", "other")

    def run(seeds: range) -> Counter[str]:
        found = Counter[str]()
        for seed in seeds:
            found.update(play(kind, seed, decoders, changes[seed % 3]))
        return found

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", type=int, default=1000, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "paged.csv")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with args.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["kind", "first", "workloads", "unlike_samples", "pages_left", *COLUMNS, "seconds"]
        )
        for kind in args.kinds:
            run = runner(kind)
            for first in range(1000, 1000 + args.workloads, 100):
                count, began = min(100, 1000 + args.workloads - first), time.process_time()
                # Raises if a sample differs or a page leaks.
                found = run(range(first, first + count))
                counted = [found[name] if name in found else "" for name in COLUMNS]
                writer.writerow(
                    [kind, first, count, 0, 0, *counted, f"{time.process_time() - began:.1f}"]
                )
                file.flush()
                print(
                    f"{kind}: {first + count - 1000} workloads, {found['waited']} times a row of "
                    f"the last {count} waited",
                    flush=True,
                )


if __name__ == "__main__":
    main()
