"""Kill a random rank of two with kill -9 at a random point, for twenty seeds, and check that the
resumed run ends with the bits of the undisturbed run. `make campaign`.

    python bench/kill_campaign.py [--seeds 20]

Ranks are forks connected over gloo, as in tests/trainer/test_crash_safety.py, which runs three of these
seeds. The exit code is 1, with the seed's row, if a resumed run differs from the undisturbed run, a
rank does not end, or a process remains.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Put the repository before this folder on sys.path: the kernels.py of this folder would shadow
# the package `kernels`.
sys.path[0] = str(HERE.parent)
sys.path[1:1] = [str(HERE.parent / "tests"), str(HERE)]

from campaign import RESULTS, machine, write_table  # noqa: E402
from rank_server import Ranks  # noqa: E402
from test_crash_safety import killed_and_resumed, undisturbed_run  # noqa: E402


def one_seed(ranks: Ranks, whole: tuple[Path, float], folder: Path, seed: int) -> dict[str, object]:
    """Return a row of kill_campaign.csv."""
    folder.mkdir()
    begin = time.monotonic()
    try:
        happened, same = killed_and_resumed(ranks, whole, folder, seed), True
        left = ranks.nothing_left()
    except AssertionError as error:
        happened, same, left = str(error), False, []
    seconds = round(time.monotonic() - begin, 1)
    return {
        "seed": seed,
        "same_bits": same,
        "left_behind": len(left),
        "seconds": seconds,
        "what": happened,
        "machine": machine(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20, help="how many")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="kill_campaign-") as name:
        ranks = Ranks()
        (Path(name) / "whole").mkdir()
        whole = undisturbed_run(ranks, Path(name) / "whole")
        for seed in range(args.seeds):
            rows.append(one_seed(ranks, whole, Path(name) / f"seed-{seed}", seed))
            write_table(RESULTS / "kill_campaign.csv", rows)
            print(
                ", ".join(f"{key} {value}" for key, value in rows[-1].items() if key != "machine"),
                flush=True,
            )
        ranks.close()
    return int(not all(row["same_bits"] and not row["left_behind"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
