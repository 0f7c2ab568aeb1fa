"""Learning proofs of wrapped environments: a tiny model passes a bar that it misses untrained, on training's own held-out episodes.

    python bench/wrapper_learning.py textarena --seeds 0 1 2 --out bench/results/wrapper_learning.csv

textarena: its GuessTheNumber of 1 to 8 in four guesses, from random weights; the bar is the share of games won.
reasoning_gym: its chain_sum by curriculum (--curriculum success over two levels), after a few steps of supervised learning on rows of
the easier one; the bar is the share of right answers over both.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
FIELDS = ("task", "seed", "what", "bar", "untrained", "trained", "passes", "steps", "seconds", "command")

GUESS = (
    "grpo --base-model tiny:ascii --environment textarena --environment.game GuessTheNumber-v0 --environment.no_rules "
    "--environment.brackets --max-turns 6 --environment-rows 400 --eval-limit 64 --max-tokens 1 --batch-size 6 --group-size 8 "
    "--learning-rate 2e-3 --save-every 0 --rollouts-every 0 --quiet"
)
SUMS = (
    "grpo --base-model tiny:ascii --environment reasoning_gym --environment.task chain_sum --environment.levels 2 "
    "--curriculum success --curriculum-up 0.6 --curriculum-window 3 --environment-rows 2000 --eval-limit 64 --max-tokens 3 "
    "--batch-size 8 --group-size 8 --learning-rate 1e-3 --save-every 0 --rollouts-every 0 --quiet"
)
TASKS = {
    "textarena": (GUESS, ["--environment.config", '{"min_number": 1, "max_number": 8, "max_turns": 4}'], "won", 0.3, 30),
    "reasoning_gym": (SUMS, [], "correct", 0.3, 60),
}


def rows_of_sums(path: Path, count: int) -> None:
    """Right answers to the easier level, of seeds that training does not meet."""
    import reasoning_gym

    curriculum = reasoning_gym.factory.create_curriculum("chain_sum")
    curriculum.set_global_level(0)
    data = reasoning_gym.factory.DATASETS["chain_sum"][0](curriculum.generate_configuration({"seed": 12345, "size": count}))
    with path.open("w") as file:
        for item in data:
            file.write(json.dumps({"prompt": item["question"], "response": item["answer"], "answer": item["answer"]}) + "\n")


def run(task: str, seed: int, steps: int | None) -> dict:
    words, more, figure, bar, default = TASKS[task]
    steps = steps or default
    with tempfile.TemporaryDirectory() as scratch:
        folder, first = Path(scratch) / "run", []
        begin = time.perf_counter()
        if task == "reasoning_gym":
            rows_of_sums(Path(scratch) / "sums.jsonl", 2000)
            sft = f"sft --base-model tiny:ascii --dataset {scratch}/sums.jsonl --response-column response --steps 60 --batch-size 32"
            sft += f" --learning-rate 2e-3 --eval-every 0 --save-every 0 --seed {seed} --output-dir {scratch}/sft --quiet"
            subprocess.run([sys.executable, "train.py", *sft.split()], check=True, cwd=REPO, stdout=subprocess.DEVNULL)
            first = ["--base-model", f"{scratch}/sft"]
        command = [*words.split(), *more, "--steps", str(steps), "--eval-every", str(steps), "--seed", str(seed), *first]
        subprocess.run([sys.executable, "train.py", *command, "--output-dir", str(folder)], check=True, cwd=REPO, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begin
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = [row[f"test/env/all/{figure}"] for row in rows if f"test/env/all/{figure}" in row]
    untrained, trained = values[0], values[-1]
    shown = f"train.py {words} {' '.join(map(repr, more))} --steps {steps} --seed {seed}"
    found = (task, seed, figure, bar, untrained, trained, untrained < bar <= trained, steps, round(seconds), shown)
    return dict(zip(FIELDS, found, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for seed in args.seeds:
        row = run(args.task, seed, args.steps)
        print(*(f"{field} {row[field]}" for field in FIELDS[:-1]), flush=True)
        if args.out is not None:
            new = not args.out.exists()
            with args.out.open("a", newline="") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                if new:
                    writer.writeheader()
                writer.writerow(row)


if __name__ == "__main__":
    main()
