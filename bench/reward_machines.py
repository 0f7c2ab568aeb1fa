"""Measure how long rank 0 needs to have a batch scored with reward workers on several machines.

    python bench/reward_machines.py      # results/reward_machines.csv: about two minutes

A machine is a process here that runs its own workers and is connected over loopback, as on another
host. The reward sleeps, so that the workers share this machine's cores as if they had their own.
`cpu_us_per_answer` is the CPU time of rank 0, which no machine takes over: it bounds the answers
per second of a launch, and tools/scaling.py takes it from here.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.harness import RESULTS, make_parser, write_rows  # noqa: E402
from rl.rewards import Scorer, serve_reward_workers  # noqa: E402
from rl.rewards.reward_machines import RewardMachines  # noqa: E402

WORKERS, ROUNDS = 8, 3  # workers of a machine; batches of which the median counts
CHARACTERS = 4096  # of an answer: about 1,024 tokens


def wait(prompt: str, response: str, meta: dict | None = None) -> float:
    """Score an answer in `meta["seconds"]` seconds that need no core. With a folder in `meta`, wait
    until `meta["workers"]` workers wait there, each for an item of its own.
    """
    assert meta is not None
    if "folder" in meta:
        (Path(meta["folder"]) / str(os.getpid())).touch()
        while len(os.listdir(meta["folder"])) < meta["workers"]:
            time.sleep(0.1)
    else:
        time.sleep(meta["seconds"])
    return float(len(response))


def measure(machines: int, answers: int, seconds: float) -> dict[str, Any]:
    """Return a row of the table: the median over ROUNDS batches of `answers` answers."""
    launch, others, total = RewardMachines(), [], machines * WORKERS
    launch.listen()
    assert launch.address is not None
    command = [sys.executable, __file__, "--machine", *map(str, launch.address)]
    try:
        with Scorer(f"{__file__}:wait", workers=WORKERS, timeout=300.0, machines=launch) as scorer:
            others = [subprocess.Popen(command) for _ in range(machines - 1)]
            while len(scorer._threads) < total:
                time.sleep(0.05)
            with tempfile.TemporaryDirectory() as folder:
                scorer.score_many([("", "", {"folder": folder, "workers": total})] * total)
            items = [("x" * (CHARACTERS // 2), "x" * CHARACTERS, {"seconds": seconds})] * answers
            spent = []
            for _ in range(ROUNDS):
                begin, cpu = time.perf_counter(), time.process_time()
                assert all(score.reward == CHARACTERS for score in scorer.score_many(items))
                spent.append((time.perf_counter() - begin, time.process_time() - cpu))
    finally:
        for process in others:
            process.kill()
            process.wait()
    wall, cpu = (statistics.median(column) for column in zip(*spent, strict=True))
    return {
        "machines": machines,
        "workers_per_machine": WORKERS,
        "answers": answers,
        "reward_ms": 1e3 * seconds,
        "seconds": round(wall, 3),
        "ideal_seconds": round(answers * seconds / total, 3),
        "cpu_us_per_answer": round(1e6 * cpu / answers, 1),
    }


def main() -> None:
    if sys.argv[1:2] == ["--machine"]:
        return serve_reward_workers("127.0.0.1", int(sys.argv[2]), sys.argv[3]).join()
    output = make_parser(__doc__, output=RESULTS / "reward_machines.csv").parse_args().output
    cases = itertools.product((0.05, 0.005), (1, 2, 4, 8))
    write_rows(output, (measure(machines, 2048, seconds) for seconds, machines in cases))


if __name__ == "__main__":
    main()
