"""Measure samples per second of a training loop under several role assignments, on the same work.

Ranks sample and learn together, in turn or concurrently.

    # three seeds, about forty minutes on two cores
    python bench/roles.py --out bench/results/roles.csv

The work: two-digit sums, from a policy that answers badly (trained once on noisy answers), 8
answers to each of 16 sums per step. Rewards take a log-normal time (mean 0.25 s, sigma 1), or no
time with `instant`. Every form trains on the same number of samples. Accuracy is that of sampled
answers to 512 held-out sums after training. Samples per second cover all steps except the first
five.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO)]
from rl.data.synthetic.addition_dataset import is_test  # noqa: E402
from rl.envs import Environment, TurnResult  # noqa: E402

GROUPS, SIZE, SKIPPED = 16, 8, 5
LATE = "--max-steps-off-policy 3"
FORMS = {  # short name -> (description, processes, flags)
    "one": ("synchronous, one process", 1, ""),
    "roles": ("one samples, one learns", 2, f"{LATE} --sampler-ranks 1"),
    "roles2": (
        "one samples, one learns, two updates late at most",
        2,
        "--max-steps-off-policy 2 --sampler-ranks 1",
    ),
    "roles1": (
        "one samples, one learns, one update late at most",
        2,
        "--max-steps-off-policy 1 --sampler-ranks 1",
    ),
    "two": ("synchronous, two processes", 2, ""),
    "late": ("asynchronous, one process", 1, LATE),
}


class SlowSum(Environment):
    """Simulate a slow reward: the grading of a sum waits for a random time."""

    def start(self) -> str:
        while True:
            a, b = self.rng.randint(10, 99), self.rng.randint(10, 99)
            if not is_test(a, b):
                self.sum = str(a + b)
                return f"{a}+{b}="

    async def step(self, answer: Any) -> TurnResult:
        mean = float(os.environ.get("PYTHON_ROLES_MEAN_SECONDS", "0"))
        if mean:
            await asyncio.sleep(mean * random.lognormvariate(-0.5, 1.0))
        return TurnResult(
            "", reward=float((answer["content"] or "").strip() == self.sum), done=True
        )


def run(words: str, processes: int = 1, **env: str) -> None:
    launch = [] if processes == 1 else ["-m", "accelerate.commands.launch", "--config_file", str(REPO / "accelerate_configs/ddp.yaml"),
                                        "--num_processes", str(processes), "--main_process_port", "0"]  # fmt: skip
    done = subprocess.run([sys.executable, *launch, *words.split()], cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": "1", **env},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1800)  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{words} ended with {done.returncode}:\n{done.stdout[-3000:]}")


def accuracy(folder: Path) -> float:
    # Evaluate a copy outside the run's folder; otherwise evaluate.py uses the run's environment.
    with tempfile.TemporaryDirectory() as single:
        weights, result = Path(single, "model"), Path(single, "found.json")
        shutil.copytree(
            folder / "checkpoints" / f"{folder.name.partition('-')[0]}-final" / "model", weights
        )
        run(f"evaluate.py {weights} --dataset addition --reward exact_match --limit 512 --renderer plain --temperature 1 --max-tokens 4 "
            f"--output {result}")  # fmt: skip
        return float(json.loads(result.read_text())["correct"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--first-steps",
        type=int,
        default=750,
        help="of supervised training, before: one policy for all seeds and forms",
    )
    parser.add_argument(
        "--start", type=Path, help="the folder of that training's run, where it has been done"
    )
    parser.add_argument(
        "--work", nargs="+", choices=["slow", "instant"], default=["slow", "instant"]
    )
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        start = args.start or Path(home, "sft-0")
        if args.start is None:
            run(f"train.py sft --base-model tiny:addition --lora-rank 0 --dataset addition:noise=0.7,from=7 --learning-rate 3e-3 "
                f"--schedule cosine --warmup-steps 30 --beta2 0.99 --steps {args.first_steps} --batch-size 256 --max-tokens 4 "
                f"--eval-every 0 --save-every 0 --rollouts-every 0 --quiet --output-dir {start}")  # fmt: skip
        before = accuracy(start)
        for seed in args.seeds:
            for work in args.work:
                for name in args.forms:
                    form, processes, words = FORMS[name]
                    folder = Path(home, f"grpo-{seed}-{work}-{name}")
                    run(f"train.py grpo --base-model {start}/checkpoints/sft-final/model --lora-rank 0 --steps {args.steps} "
                        f"--batch-size {GROUPS} --group-size {SIZE} --max-tokens 4 --temperature 1 --learning-rate 5e-4 --schedule linear "
                        f"--warmup-steps 10 --advantage mean_std --eval-every 0 "
                        f"--save-every 0 --rollouts-every 0 --quiet --no-self-test --environment {Path(__file__)}:SlowSum --renderer plain "
                        f"--environment-isolation thread --seed {seed} --output-dir {folder} {words}",
                        processes, PYTHON_ROLES_MEAN_SECONDS="0.25" if work == "slow" else "0")  # fmt: skip
                    steps = [
                        json.loads(line)
                        for line in (folder / "metrics.jsonl").read_text().splitlines()
                    ][SKIPPED:]
                    seconds = sum(step["time/step"] for step in steps)
                    rows.append({"work": work, "seed": seed, "form": form, "samples": args.steps * GROUPS * SIZE,
                                 "samples_per_second": round(len(steps) * GROUPS * SIZE / seconds, 1),
                                 "age_mean": round(sum(step.get("async/age/mean", 0.0) for step in steps) / len(steps), 3),
                                 "accuracy_before": round(before, 4), "accuracy": round(accuracy(folder), 4)})  # fmt: skip
                    print(rows[-1], flush=True)
                    if args.out:
                        write(rows, args.out)


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """Write the rows with each form's speedup over the synchronous loop.

    The speedup divides samples per second by those of the synchronous loop, with a single process
    and with two, on the same work and seed.
    """
    rates = {(row["work"], row["seed"], row["form"]): row["samples_per_second"] for row in rows}
    for row in rows:
        for processes in ("one process", "two processes"):
            rate = rates.get((row["work"], row["seed"], f"synchronous, {processes}"))
            row[f"times_synchronous_{processes.replace(' ', '_')}"] = (
                round(row["samples_per_second"] / rate, 2) if rate else ""
            )
    with out.open("w", newline="") as file:
        # Omit --start from the recorded command: without it, the script trains the same
        # start model.
        words = [
            word for i, word in enumerate(sys.argv) if "--start" not in (word, sys.argv[i - 1])
        ]
        file.write(f"# python {' '.join(words)}\n")
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
