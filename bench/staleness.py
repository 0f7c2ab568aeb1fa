"""Measure the cost of stale tokens, and the gain of each correction: GRPO on the problems of
recipes/addition.yaml, at several ages of the tokens.

    python bench/staleness.py                              # keeps existing rows
    python bench/staleness.py --seeds 0 --staleness 8      # a part of the runs

From the model that the recipe's first stage teaches, GRPO runs for STEPS steps with
`--max-steps-off-policy K`, under each correction. The synchronous run, K = 0, uses no correction,
because it has nothing to correct. Rewards take no time here, so that nearly every trained token is
K updates old: the worst case. `after` is the held-out sampled accuracy after the last step; `mean`
is the mean over all evaluations of the run. The table of docs/corrections.md is printed at the end.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import (  # noqa: E402
    RESULTS,
    Row,
    describe_machine,
    make_parser,
    read_table,
    replace_rows,
    show,
    train,
)
from bench.learning import REWARD, taught_model  # noqa: E402

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
    "grpo --dataset addition --reward exact_match --learning-rate 1e-3 --schedule linear "
    f"--warmup-steps 10 --steps {STEPS} --batch-size 64 --group-size 8 --advantage mean_std "
    "--eval-every 25 --save-every 0 --max-tokens 4 --temperature 1.0 --eval-limit 512 "
    "--rollouts-every 0"
)


def measure(seed: int, staleness: int, correction: str, work: Path) -> dict[str, Any]:
    """Return the row of a GRPO run from the taught model."""
    words = [*GRPO.split(), "--base-model", str(taught_model(seed, work)), "--seed", str(seed)]
    words += ["--max-steps-off-policy", str(staleness), *CORRECTIONS[correction].split()]
    run = train(words, work / "run")
    correct, greedy = run.values(REWARD), run.values("test/greedy/all/reward/total")
    ages = run.values("async/age/mean") if staleness else [0]
    return {
        "seed": seed,
        "staleness": staleness,
        "correction": correction,
        "before": round(correct[0], 4),
        "after": round(correct[-1], 4),
        "mean": round(mean(correct[1:]), 4),
        "least": round(min(correct[1:]), 4),
        "greedy_after": round(greedy[-1], 4),
        "age_mean": round(mean(ages), 2),
        "seconds": round(run.seconds, 1),
        "machine": describe_machine(),
    }


def order(row: Row) -> tuple[int, int, int]:
    correction = list(CORRECTIONS).index(row["correction"])
    return int(row["staleness"]), correction, int(row["seed"])


def format_page(rows: Sequence[Row]) -> str:
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


def main() -> None:
    parser, names = make_parser(__doc__, True, RESULTS / "staleness.csv"), list(CORRECTIONS)
    parser.add_argument("--staleness", nargs="+", type=int, default=list(STALENESS))
    parser.add_argument("--corrections", nargs="+", choices=names, default=names)
    args = parser.parse_args()
    measured = {order(row) for row in read_table(args.output)}
    with tempfile.TemporaryDirectory(prefix="staleness-") as work:
        for seed in args.seeds:
            for staleness in args.staleness:
                for name in args.corrections if staleness else ["none"]:
                    if (staleness, names.index(name), seed) not in measured:
                        row = measure(seed, staleness, name, Path(work))
                        show(row)
                        keys = "seed", "staleness", "correction"
                        replace_rows(args.output, [row], keys, order)
    print(format_page(read_table(args.output)))


if __name__ == "__main__":
    main()
