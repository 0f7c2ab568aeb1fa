"""Check that memory, descriptors, threads and step time stay flat in a long run.

The run trains the smallest model. The script writes results/soak.csv.

    # 20,000 steps of grpo with evaluations, checkpoints, rollouts and a curriculum
    python bench/soak.py
    python bench/soak.py --steps 3000          # fewer steps
    # stop after so many seconds; the table says the number of steps
    python bench/soak.py --seconds 900

The run is a separate process, observed through /proc (Linux only). The CPU time of a step is the
process's CPU time between two observations, divided by the steps between them. The exit code is 1
if the last quarter of the run holds noticeably more than the second quarter.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
WORDS = """train.py grpo --base-model tiny:addition --dataset addition --max-tokens 4 --batch-size 4 --group-size 4 --temperature 1
    --reward bench/soak.py:right --curriculum success --eval-every 500 --eval-limit 16 --save-every 500 --rollouts-every 100
    --quiet""".split()
# Sixteen samples per step: a service remembers the temperatures of 65,536 samples
# (rl.runtime.sample_temperatures), which are in memory before the second quarter begins.
LOOKS = 40
# Allowed growth from the second to the last quarter: the run writes a checkpoint now and then, and
# allocators keep freed memory.
SLACK = {
    "rss_mib": 1.05,
    "workers_rss_mib": 1.10,
    "descriptors": 1.0,
    "threads": 1.0,
    "processes": 1.0,
    "cpu_ms_per_step": 1.5,
}


def right(prompt: str, response: str, meta: dict[str, Any]) -> float:
    """Compute the run's reward. The reward comes from a file, so worker processes compute it."""
    return float(response.strip() == str(meta["answer"]))


def children(pid: int) -> list[int]:
    """Return the descendants of process `pid`."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def resident(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def look(pid: int) -> dict[str, Any]:
    """Return the resources that process `pid` and its workers hold now.

    Raises OSError if a worker has just ended.
    """
    below = children(pid)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {
        "rss_mib": round(resident(pid), 1),
        "workers_rss_mib": round(sum(map(resident, below)), 1),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
        "processes": 1 + len(below),
        "cpu_seconds": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
    }


def last_step(metrics: Path) -> int:
    """Return the step of the last complete line, or 0 if no line is complete yet."""
    if not metrics.is_file() or not metrics.stat().st_size:
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 65_536))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def soak(steps: int, seconds: float | None, folder: Path) -> list[dict[str, Any]]:
    """Run and observe at least LOOKS times; return the rows of the table."""
    command = [sys.executable, *WORDS, "--steps", str(steps), "--output-dir", str(folder)]
    process = subprocess.Popen(
        command, cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    start, rows, asked = time.monotonic(), [], False
    every = max(1, steps // LOOKS) if seconds is None else 1
    while process.poll() is None:
        time.sleep(0.2)
        spent = time.monotonic() - start
        if seconds is not None and spent > seconds and not asked:
            process.send_signal(signal.SIGTERM)
            asked = True
        done = last_step(folder / "metrics.jsonl")
        due = spent >= (len(rows) + 1) * seconds / LOOKS if seconds is not None else True
        if not due or done < (rows[-1]["step"] if rows else 0) + every:
            continue
        try:
            seen = look(process.pid)
        except (OSError, StopIteration):
            continue
        row: dict[str, Any] = {"step": done, "seconds": round(spent, 1), **seen}
        before = rows[-1] if rows else {"step": 0, "cpu_seconds": 0.0}
        row["cpu_ms_per_step"] = round(
            1e3 * (row["cpu_seconds"] - before["cpu_seconds"]) / (done - before["step"]), 2
        )
        rows.append(row)
    if process.returncode not in (0, 75):
        raise SystemExit(
            f"the run ended with exit code {process.returncode}: {shlex.join(command)}"
        )
    return rows


def judged(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float, bool]]:
    """Compare each figure's median in the second and in the last quarter.

    Returns (second, last, whether the growth is within the figure's slack).
    """
    quarter = len(rows) // 4
    early, late = rows[quarter : 2 * quarter], rows[-quarter:]
    found = {}
    for name, slack in SLACK.items():
        before, after = (statistics.median(row[name] for row in part) for part in (early, late))
        found[name] = (before, after, after <= slack * before)
    return found


def main() -> int:
    # Imported here, so that a worker that loads the reward does not import it.
    from campaign import RESULTS, command_line, machine

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument(
        "--seconds", type=float, default=None, help="ask the run to stop after so long"
    )
    parser.add_argument("--out", type=Path, default=None, help="results/soak.csv")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        rows = soak(args.steps, args.seconds, Path(name) / "run")
    if len(rows) < 8:
        raise SystemExit(f"{len(rows)} looks are too few to judge: more steps, or more seconds")
    with (args.out or RESULTS / "soak.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*rows[0], "machine", "command"])
        writer.writeheader()
        writer.writerows({**row, "machine": machine(), "command": command_line()} for row in rows)
    found = judged(rows)
    print(f"{rows[-1]['step']} steps in {rows[-1]['seconds']:.0f} s")
    for name, (before, after, flat) in found.items():
        print(
            f"  {name:16s} {before:10.2f} in the second quarter, {after:10.2f} in the "
            f"last{'' if flat else '   GROWS'}"
        )
    return int(not all(flat for *_, flat in found.values()))


if __name__ == "__main__":
    sys.exit(main())
