"""Observe a long run from outside."""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
STEPS, OBSERVATIONS = 20_000, 40
# Sixteen samples per step: a service remembers the temperatures of 65,536 samples
# (rl.runtime.sample_temperatures), which are in memory before the second quarter begins.
WORDS = """train.py grpo --base-model tiny:addition --dataset addition --max-tokens 4 --batch-size 4
    --group-size 4 --temperature 1 --curriculum success --eval-every 500 --eval-limit 16
    --save-every 500 --rollouts-every 100 --quiet"""
# The reward comes from a file, so worker processes compute it.
REWARD = "def right(prompt, response, meta):\n    return float(response.strip() == str(meta['answer']))\n"
# Allowed growth from the second to the last quarter: the run writes a checkpoint now and then, and
# allocators keep freed memory.
SLACK = {
    "rss_mib": 1.05, "workers_rss_mib": 1.10, "descriptors": 1.0, "threads": 1.0, "processes": 1.0,
    "cpu_ms_per_step": 1.5,
}  # fmt: skip


def list_descendants(pid: int) -> list[int]:
    """Return the ids of the processes below `pid`."""
    pids = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            pids += [child, *list_descendants(child)]
    return pids


def read_resident_mib(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), 0.0)


def measure_process(pid: int) -> dict[str, Any]:
    """Return the resources that a process and its workers hold."""
    workers = list_descendants(pid)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return {
        "rss_mib": read_resident_mib(pid),
        "workers_rss_mib": sum(map(read_resident_mib, workers)),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "processes": 1 + len(workers),
        "cpu_seconds": (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
    }


def last_step(metrics: Path) -> int:
    """Return the step of the last complete line, 0 without one."""
    if not metrics.is_file():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 65_536))
        lines = file.read().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_long_run_stays_flat(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    words = [sys.executable, *WORDS.split(), "--steps", str(STEPS)]
    words += ["--reward", f"{tmp_path}/reward.py:right", "--output-dir", str(tmp_path / "run")]
    run = subprocess.Popen(
        words, cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    rows: list[dict[str, Any]] = []
    before = {"step": 0, "cpu_seconds": 0.0}
    while run.poll() is None:
        time.sleep(0.2)
        step = last_step(tmp_path / "run" / "metrics.jsonl")
        if step < before["step"] + STEPS // OBSERVATIONS:
            continue
        try:
            row = {"step": step, **measure_process(run.pid)}
        except OSError:
            continue
        spent = row["cpu_seconds"] - before["cpu_seconds"]
        row["cpu_ms_per_step"] = 1e3 * spent / (step - before["step"])
        rows.append(row)
        before = row
    assert run.returncode == 0 and len(rows) >= 8
    quarter = len(rows) // 4
    grown = {}
    for name, slack in SLACK.items():
        early, late = (
            statistics.median(row[name] for row in part)
            for part in (rows[quarter : 2 * quarter], rows[-quarter:])
        )
        if late > slack * early:
            grown[name] = (early, late)
    assert not grown
