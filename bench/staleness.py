"""Measure what old tokens cost, and what a rank that only samples gains: GRPO on two-digit sums,
from the model that the first stage of recipes/addition.yaml teaches.

    python bench/staleness.py            # staleness.csv; keeps existing rows
    python bench/staleness.py --ranks    # roles.csv: half an hour on two idle cores

staleness.csv: GRPO runs for STEPS steps with `--max-steps-off-policy K`, under each correction. The
synchronous run, K = 0, uses none: it is the limit. Rewards take no time here, so that nearly every
trained token is K updates old: the worst case. `after` is the held-out sampled accuracy after the
last step. The table of docs/corrections.md is printed at the end.

roles.csv (`--ranks`): samples per second of the synchronous loop on one process, and of a rank that
samples beside a rank that learns, at most two updates late, on the same number of samples. Rewards
take a log-normal time (mean 0.25 s, sigma 1). The first five steps are not timed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench import harness  # noqa: E402
from rl.data.synthetic.addition_dataset import is_test  # noqa: E402
from rl.envs import Environment, TurnResult  # noqa: E402

STEPS, STALENESS = 200, (0, 1, 4, 8)
CORRECTIONS = {
    "none": "--proximal sampler",
    "truncate": "--correction truncate --correction-high 2",
    "icepop": "--correction icepop --correction-low 0.5 --correction-high 2",
    "mask, geometric": (
        "--correction mask --correction-level geometric --correction-low 0.8 --correction-high 1.25"
    ),
    "proximal learner": "--proximal learner",
    "proximal interpolated": "--proximal interpolated",
}
GRPO = (
    "grpo --schedule linear --warmup-steps 10 --group-size 8 --advantage mean_std --save-every 0 "
    "--max-tokens 4 --temperature 1.0 --rollouts-every 0 "
)
SUMS = (
    f"--dataset addition --reward exact_match --learning-rate 1e-3 --steps {STEPS} --batch-size 64 "
    "--eval-every 25 --eval-limit 512"
)


def measure_correction(seed: int, staleness: int, correction: str, work: Path) -> dict[str, Any]:
    """Return the row of a GRPO run from the taught model."""
    words = [*(GRPO + SUMS).split(), "--base-model", str(harness.taught_model(seed, work))]
    words += ["--max-steps-off-policy", str(staleness), *CORRECTIONS[correction].split()]
    run = harness.train([*words, "--seed", str(seed)], work / "run")
    correct = run.values(harness.REWARD)
    return {
        "seed": seed,
        "staleness": staleness,
        "correction": correction,
        "before": round(correct[0], 4),
        "after": round(correct[-1], 4),
        "seconds": round(run.seconds, 1),
        "machine": harness.describe_machine(),
    }


def order(row: harness.Row) -> tuple[int, int, int]:
    correction = list(CORRECTIONS).index(row["correction"])
    return int(row["staleness"]), correction, int(row["seed"])


def format_page(rows: Sequence[harness.Row]) -> str:
    """Return the page's table: a row per correction, a column per age. A cell holds the mean of
    `after` over the seeds and the worst seed.
    """
    lines = ["| correction | " + " | ".join(map(str, STALENESS)) + " |"]
    lines.append("|---|" + "---|" * len(STALENESS))
    for name in CORRECTIONS:
        cells = []
        for age in STALENESS:
            key = name, str(age)
            some = [float(r["after"]) for r in rows if (r["correction"], r["staleness"]) == key]
            cells.append(f"{mean(some):.3f} ({min(some):.3f})" if some else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------- ranks

GROUPS, SIZE, RANK_STEPS, SKIPPED = 16, 8, 40, 5
SLOW = (
    f"--lora-rank 0 --learning-rate 5e-4 --steps {RANK_STEPS} --batch-size {GROUPS} --eval-every 0 "
    f"--no-self-test --environment {Path(__file__)}:SlowSum --renderer plain "
    "--environment-isolation thread"
)
DDP = f"-m accelerate.commands.launch --config_file {harness.REPO}/accelerate_configs/ddp.yaml"
FORMS = {
    "synchronous, one process": ("", ""),
    "one samples, one learns, two updates late at most": (
        f"{DDP} --main_process_port 0 --num_processes 2",
        "--sampler-ranks 1 --max-steps-off-policy 2",
    ),
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
        await asyncio.sleep(0.25 * random.lognormvariate(-0.5, 1.0))
        right = (answer["content"] or "").strip() == self.sum
        return TurnResult("", reward=float(right), done=True)


def measure_ranks(seed: int, work: Path) -> list[dict[str, Any]]:
    """Return the rows of both forms; the first is the reference of `times_synchronous`."""
    rows: list[dict[str, Any]] = []
    for form, (launcher, flags) in FORMS.items():
        words = [*(GRPO + SLOW).split(), "--base-model", str(harness.taught_model(0, work))]
        words += [*flags.split(), "--seed", str(seed)]
        run = harness.train(words, work / "run", [sys.executable, *launcher.split()])
        timed = run.rows[SKIPPED:]
        rate = len(timed) * GROUPS * SIZE / sum(row["time/step"] for row in timed)
        accuracy = harness.evaluate_sums(work / "run" / "checkpoints" / "grpo-final" / "model")
        row = {"seed": seed, "form": form, "samples": RANK_STEPS * GROUPS * SIZE}
        row |= {"samples_per_second": round(rate, 1), "accuracy": round(accuracy, 4)}
        base = rows[0]["samples_per_second"] if rows else rate
        rows.append(
            {**row, "times_synchronous": round(rate / base, 2), "command": harness.command_line()}
        )
        harness.show(rows[-1])
    return rows


def main() -> None:
    parser, names = harness.make_parser(__doc__, seeds=True), list(CORRECTIONS)
    parser.add_argument("--ranks", action="store_true", help="measure roles.csv instead")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="staleness-") as work:
        if args.ranks:
            os.environ["OMP_NUM_THREADS"] = "1"
            rows = [row for seed in args.seeds for row in measure_ranks(seed, Path(work))]
            return harness.write_table(harness.RESULTS / "roles.csv", rows)
        table = harness.RESULTS / "staleness.csv"
        measured = {order(row) for row in harness.read_table(table)}
        for seed, staleness, name in itertools.product(args.seeds, STALENESS, names):
            is_case = bool(staleness) or name == "none"
            if is_case and (staleness, names.index(name), seed) not in measured:
                row = measure_correction(seed, staleness, name, Path(work))
                harness.show(row)
                harness.replace_rows(table, [row], ("seed", "staleness", "correction"), order)
    print(format_page(harness.read_table(harness.RESULTS / "staleness.csv")))


if __name__ == "__main__":
    main()
