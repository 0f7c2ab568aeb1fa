"""Time an evaluation in which environments are slow, paired with another commit.

    python bench/slow_evaluation.py --reference ../other --csv bench/results/slow_evaluation.csv

`--reference` is the folder of another commit. Each evaluation is the one before the first step of
train.py, on `--episodes` episodes of TURNS turns. Two kinds of episodes: in `one slow episode`,
every turn of a single episode takes SECONDS; in `a slow turn each`, one turn of every episode does.
An evaluation in which all episodes take each turn together waits TURNS times SECONDS, while nothing
is sampled. `bound_s` is the bound of any loop: the waits of the slowest episode.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TURNS, SECONDS = 6, 0.5
KINDS = {"one slow episode": "self.row['index'] == 0", "a slow turn each": "at == self.turn"}
ENVIRONMENT = """
import time
from rl.envs import Environment, TurnResult

class Slow(Environment):
    needs_rows = False

    def rows(self, split, count):
        return [{{"index": i}} for i in range(count)]

    def start(self):
        self.turn = 0
        return "go"

    def step(self, answer):
        at = self.row["index"] % {turns}
        if {condition}:
            time.sleep({seconds})
        self.turn += 1
        return TurnResult("more", reward=1.0, done=self.turn == {turns})
"""


def evaluate(folder: Path, environment: Path, episodes: int, output: Path) -> float:
    """Return the seconds of the evaluation before the first step, by the commit in `folder`."""
    flags = {
        "base-model": "tiny:ascii",
        "environment": f"{environment}:Slow",
        "max-turns": TURNS + 1,
        "max-tokens": 32,
        "steps": 1,
        "batch-size": 1,
        "group-size": 2,
        "eval-every": 1,
        "eval-limit": episodes,
        "save-every": 0,
        "rollouts-every": 0,
        "output-dir": output,
    }
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    command = [sys.executable, "train.py", "grpo", *words, "--no-eval-greedy", "--overwrite"]
    subprocess.run([*command, "--quiet"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    rows = (output / "metrics.jsonl").read_text().splitlines()
    return json.loads(rows[0])["time/test"]


def main() -> None:
    """Run the pairs and print a row for each kind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    here, rows = Path(__file__).resolve().parents[1], []
    with tempfile.TemporaryDirectory() as temporary:
        environment = Path(temporary) / "slow_env.py"
        for kind, condition in KINDS.items():
            environment.write_text(
                ENVIRONMENT.format(condition=condition, turns=TURNS, seconds=SECONDS)
            )
            pairs = [
                [
                    evaluate(folder, environment, args.episodes, Path(temporary) / "run")
                    for folder in (args.reference.resolve(), here)
                ]
                for _ in range(args.pairs)
            ]
            before, after = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
            rows.append(
                {
                    "kind": kind,
                    "episodes": args.episodes,
                    "pairs": args.pairs,
                    "reference_s": round(before, 3),
                    "this_s": round(after, 3),
                    "ratio": round(statistics.median(b / a for a, b in pairs), 3),
                    "bound_s": SECONDS * (TURNS if kind == "one slow episode" else 1),
                }
            )
            print(rows[-1], flush=True)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            file.write(f"# python {' '.join(sys.argv)}\n")
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
