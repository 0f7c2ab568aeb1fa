"""Kill an asynchronous run at random moments and resume it until it ends. Check that every group is
trained exactly once, that none is lost, and that ages stay within the bound.

    python bench/kill_asynchronous.py --kills 20 --out bench/results/kill_asynchronous.csv

Environments take random times, so that at a kill some groups have ended, some are being sampled and
some are awaited.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
ENVIRONMENT = """
import asyncio, random
from rl.envs import Environment, TurnResult

class Uneven(Environment):
    def start(self):
        self.left = 1 + self.rng.randrange(4)
        return f"{self.seed % 7}+{self.seed % 5}="

    async def step(self, answer):
        await asyncio.sleep(random.random() * 0.3)
        self.left -= 1
        return TurnResult("1+1=", reward=len(answer["content"] or "") + 0.1 * self.member, done=self.left == 0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bound", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "run")
        Path(home, "uneven.py").write_text(ENVIRONMENT)
        words = f"grpo --steps {args.steps} --batch-size 4 --group-size 2 --max-tokens 5 --quiet"
        words += " --eval-every 0 --save-every 1 --rollouts-every 1"
        words += (
            f" --environment {home}/uneven.py:Uneven --environment-isolation thread --renderer "
            f"plain --no-self-test --slice-steps 2"
        )
        words += f" --max-steps-off-policy {args.bound} --auto-resume --output-dir {folder}"
        kills, code, in_flight = 0, None, []
        while code != 0:
            run = subprocess.Popen(
                [sys.executable, str(REPO / "train.py"), *words.split()],
                stdout=subprocess.DEVNULL,
                cwd=REPO,
            )
            if kills < args.kills:
                steps_before = _steps(folder)
                while run.poll() is None and _steps(folder) == steps_before:
                    time.sleep(0.02)
                time.sleep(chance.random() * 1.5)
                run.send_signal(signal.SIGKILL)
                kills += run.wait() == -signal.SIGKILL
                in_flight.append(_under_way(folder))
            code = run.wait()
            print(f"{kills} kills, {_steps(folder)} steps", flush=True)
            if code not in (0, -signal.SIGKILL):
                raise SystemExit(f"the run ended with {code}")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        groups = [
            (json.loads(line)["problem"], json.loads(line)["index"])
            for path in sorted((folder / "rollouts").glob("step_*.jsonl"))
            for line in path.read_text().splitlines()
        ]
    wanted = args.steps * 4 * 2
    row = {
        "kills": kills,
        "steps": args.steps,
        "bound": args.bound,
        "episodes_wanted": wanted,
        "episodes_trained": len(groups),
        "distinct": len(set(groups)),
        "oldest_token": max(r["async/age/max"] for r in rows),
        "under_way_at_a_kill": round(sum(in_flight) / max(1, len(in_flight)), 1),
    }
    print(row)
    if args.out:
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
            writer.writerow(row)
    assert len(groups) == len(set(groups)) == wanted and row["oldest_token"] <= args.bound


def _steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def _under_way(folder: Path) -> int:
    """Return the number of groups that the newest checkpoint holds."""
    found = sorted(folder.glob("checkpoints/grpo-*/*.json"), key=lambda path: path.stat().st_mtime)
    for path in reversed(found):
        try:
            state = json.loads(path.read_text())
        except ValueError:  # incomplete: the run was killed while writing it
            continue
        if isinstance(state, dict) and "in_flight" in (state.get("metadata") or {}):
            return len(state["metadata"]["in_flight"]["flow"]["groups"])
    return 0


if __name__ == "__main__":
    main()
