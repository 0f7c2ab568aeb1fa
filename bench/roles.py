"""Measure samples per second of a training loop under several role assignments, on the same work.

Ranks sample and learn together, in turn or concurrently.

    # three seeds, about forty minutes on two cores
    python bench/roles.py --work slow --steps 40 --forms one roles2

The work: two-digit sums, from the model that the first stage of recipes/addition.yaml teaches (one
for all seeds and forms), 8 answers to each of 16 sums per step. Rewards take a log-normal time
(mean 0.25 s, sigma 1), or no time with `instant`. Every form trains on the same number of samples.
Accuracy is that of sampled answers to 512 held-out sums after training. Samples per second cover
all steps except the first five. `times_synchronous_...` divides them by those of the synchronous
loop, with a single process and with two, on the same work and seed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import (  # noqa: E402
    REPO,
    RESULTS,
    command_line,
    make_parser,
    show,
    train,
    write_table,
)
from bench.learning import evaluate_sums, taught_model  # noqa: E402
from rl.data.synthetic.addition_dataset import is_test  # noqa: E402
from rl.envs import Environment, TurnResult  # noqa: E402

GROUPS, SIZE, SKIPPED = 16, 8, 5
ROLES = "--sampler-ranks 1 --max-steps-off-policy"
FORMS = {  # short name -> (description, processes, flags)
    "one": ("synchronous, one process", 1, ""),
    "roles": ("one samples, one learns", 2, f"{ROLES} 3"),
    "roles2": ("one samples, one learns, two updates late at most", 2, f"{ROLES} 2"),
    "roles1": ("one samples, one learns, one update late at most", 2, f"{ROLES} 1"),
    "two": ("synchronous, two processes", 2, ""),
    "late": ("asynchronous, one process", 1, "--max-steps-off-policy 3"),
}
GRPO = (
    f"grpo --lora-rank 0 --batch-size {GROUPS} --group-size {SIZE} --max-tokens 4 --temperature 1 "
    "--learning-rate 5e-4 --schedule linear --warmup-steps 10 --advantage mean_std --eval-every 0 "
    f"--save-every 0 --rollouts-every 0 --no-self-test --environment {Path(__file__)}:SlowSum "
    "--renderer plain --environment-isolation thread"
)


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
        right = (answer["content"] or "").strip() == self.sum
        return TurnResult("", reward=float(right), done=True)


def measure(start: Path, work: str, seed: int, name: str, steps: int) -> dict[str, Any]:
    """Return the row of a run."""
    form, processes, flags = FORMS[name]
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "accelerate.commands.launch", "--main_process_port", "0"]
        launcher += ["--config_file", str(REPO / "accelerate_configs" / "ddp.yaml")]
        launcher += ["--num_processes", str(processes)]
    os.environ["PYTHON_ROLES_MEAN_SECONDS"] = "0.25" if work == "slow" else "0"
    words = [*GRPO.split(), "--base-model", str(start), "--steps", str(steps), *flags.split()]
    with tempfile.TemporaryDirectory() as folder:
        run = train([*words, "--seed", str(seed)], Path(folder), launcher)
        after = evaluate_sums(Path(folder) / "checkpoints" / "grpo-final" / "model")
    timed = run.rows[SKIPPED:]
    seconds = sum(row["time/step"] for row in timed)
    age = sum(row.get("async/age/mean", 0.0) for row in timed) / len(timed)
    return {
        "work": work,
        "seed": seed,
        "form": form,
        "samples": steps * GROUPS * SIZE,
        "samples_per_second": round(len(timed) * GROUPS * SIZE / seconds, 1),
        "age_mean": round(age, 3),
        "accuracy": round(after, 4),
    }


def add_speedups(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with each form's speedup over the synchronous loop."""
    rates = {(row["work"], row["seed"], row["form"]): row["samples_per_second"] for row in rows}
    results = []
    for row in rows:
        columns = {}
        for processes in ("one process", "two processes"):
            rate = rates.get((row["work"], row["seed"], f"synchronous, {processes}"))
            ratio = round(row["samples_per_second"] / rate, 2) if rate else ""
            columns[f"times_synchronous_{processes.replace(' ', '_')}"] = ratio
        results.append({**row, **columns, "command": command_line()})
    return results


def main() -> None:
    parser = make_parser(__doc__, True, RESULTS / "roles.csv")
    parser.add_argument("--steps", type=int, default=40)
    kinds = ["slow", "instant"]
    parser.add_argument("--work", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        start = taught_model(0, Path(home))
        before = round(evaluate_sums(start), 4)
        for seed, work, name in itertools.product(args.seeds, args.work, args.forms):
            row = measure(start, work, seed, name, args.steps)
            rows.append({**row, "accuracy_before": before})
            write_table(args.output, add_speedups(rows))
            show(rows[-1])


if __name__ == "__main__":
    main()
