"""Check for leaks over ten thousand short programs in a row.

The script measures memory, descriptors and processes of the caller and of its sandboxes.

    python bench/sandbox_long.py --programs 10000 --out bench/results/sandbox_long.csv
"""

import argparse
import csv
import gc
import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.sandbox import Asserts, Sandbox


def below(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *below(child)]
    return found


def resident_mb(pid: int) -> float:
    """Return the process's private memory in MB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def state(sandbox: Sandbox) -> dict[str, float]:
    gc.collect()
    zygotes = [
        slot.zygote.process.pid for slot in sandbox._worker_pool._workers if slot.zygote is not None
    ]
    inside = [pid for zygote in zygotes for pid in [zygote, *below(zygote)]]
    return {
        "caller_mb": round(resident_mb(os.getpid()), 1),
        "caller_descriptors": len(os.listdir("/proc/self/fd")),
        "caller_threads": threading.active_count(),
        "sandbox_processes": len(inside),
        "sandbox_mb": round(sum(resident_mb(pid) for pid in inside), 1),
        "sandbox_descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in inside),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
        "shm_files": len(os.listdir("/dev/shm")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    rows, start = [], time.monotonic()
    with Sandbox(workers=given.workers) as sandbox:
        for first in range(0, given.programs, given.every):
            pairs = [
                (
                    f"def f(x):\n    return x + {number}",
                    Asserts("", [f"assert f(1) == {number + 1}", f"assert f(2) == {number + 2}"]),
                )
                for number in range(first, first + given.every)
            ]
            grades = sandbox.grade_many(pairs, cache=False)
            wrong = [grade.reasons for grade in grades if not grade.all]
            row = {
                "programs": first + given.every,
                "seconds": round(time.monotonic() - start, 1),
                "wrong": len(wrong),
                **state(sandbox),
            }
            rows.append(row)
            print(row, wrong[:2], flush=True)
            if given.out:
                with open(given.out, "w", newline="") as file:
                    writer = csv.DictWriter(file, rows[0].keys())
                    writer.writeheader()
                    writer.writerows(rows)


if __name__ == "__main__":
    main()
