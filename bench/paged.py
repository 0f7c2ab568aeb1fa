"""Random workloads through the engine over pages and the plain one: the same samples, no page left, how often rows waited.

    python bench/paged.py --workloads 1000          # bench/results/paged.csv: a row a hundred workloads
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# The repository in place of this folder, whose kernels.py would be taken for the package of that name.
sys.path[0] = str(HERE.parent)
sys.path.append(str(HERE.parent / "tests"))

import torch  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "paged.csv")
    args = parser.parse_args()
    from test_sampler_paged import perturbed_decoder, same_samples

    torch.set_num_threads(1)
    decoder = perturbed_decoder()
    with args.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["first", "workloads", "unlike_samples", "pages_left", "rows_that_waited", "seconds"])
        for first in range(0, args.workloads, 100):
            count, began = min(100, args.workloads - first), time.process_time()
            waited = same_samples(decoder, range(1000 + first, 1000 + first + count))  # raises where a sample differs or a page is left
            writer.writerow([1000 + first, count, 0, 0, waited, f"{time.process_time() - began:.1f}"])
            file.flush()
            print(f"{first + count} workloads, {waited} times a row of the last {count} waited", flush=True)


if __name__ == "__main__":
    main()
