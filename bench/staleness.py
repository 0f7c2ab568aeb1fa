"""Measure the cost of stale tokens, and the gain of each correction.

The task is GRPO on the problems of recipes/addition.yaml, at several ages of the tokens. Part of
`make campaign`.

    # writes bench/results/staleness.csv and .png; keeps existing rows
    python bench/staleness.py
    python bench/staleness.py --seeds 0 --staleness 8      # a part of the runs
    # only the plot and the table of docs/corrections.md
    python bench/staleness.py --draw

The script trains the recipe's SFT once per seed. From that checkpoint, GRPO runs for STEPS steps
with `--max-steps-off-policy K`, under each correction. The synchronous run, K = 0, uses no
correction, because it has nothing to correct. Rewards take no time here, so that nearly every
trained token is K updates old: the worst case. `after` is the held-out sampled accuracy after the
last step; `mean` is the mean over all evaluations of the run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import (  # noqa: E402
    REPO,
    RESULTS,
    SEEDS,
    describe_machine,
    make_parser,
    read_table,
    replace_rows,
    show,
    train,
)

TABLE, PICTURE = RESULTS / "staleness.csv", RESULTS / "staleness.png"
PAGE = REPO / "docs" / "corrections.md"
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
SFT = (
    "sft --base-model tiny:addition --dataset addition:noise=0.7,from=7 --learning-rate 3e-3 "
    "--schedule cosine --warmup-steps 30 "
    "--beta2 0.99 --steps 750 --batch-size 256 --eval-every 0 --save-every 0 --max-tokens 4"
)
GRPO = (
    "grpo --dataset addition --reward exact_match --learning-rate 1e-3 --schedule linear "
    f"--warmup-steps 10 --steps {STEPS} --batch-size 64 --group-size 8 --advantage mean_std "
    "--eval-every 25 --save-every 0 --max-tokens 4 --temperature 1.0 --eval-limit 512 "
    "--rollouts-every 0"
)


def make_one_item(
    base: Path, folder: Path, seed: int, staleness: int, correction: str
) -> dict[str, Any]:
    """Return the row of a GRPO run from the checkpoint in `base`."""
    words = [*GRPO.split(), "--base-model", str(base), "--seed", str(seed)]
    words += ["--max-steps-off-policy", str(staleness), *CORRECTIONS[correction].split()]
    run = train(words, folder)
    correct = run.values("test/env/all/reward/total")
    greedy = [r[name] for r in run.rows if (name := "test/greedy/all/reward/total") in r]
    ages = [r["async/age/mean"] for r in run.rows if "async/age/mean" in r]
    return {
        "seed": seed,
        "staleness": staleness,
        "correction": correction,
        "before": round(correct[0], 4),
        "after": round(correct[-1], 4),
        "mean": round(mean(correct[1:]), 4),
        "least": round(min(correct[1:]), 4),
        "greedy_after": round(greedy[-1], 4) if greedy else "",
        "age_mean": round(mean(ages), 2) if ages else 0,
        "seconds": round(run.seconds, 1),
        "machine": describe_machine(),
    }


def order(row: Any) -> tuple[int, int, int]:
    correction = list(CORRECTIONS).index(row["correction"])
    return int(row["staleness"]), correction, int(row["seed"])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--staleness", nargs="+", type=int, default=list(STALENESS))
    names = list(CORRECTIONS)
    parser.add_argument("--corrections", nargs="+", choices=names, default=names)
    parser.add_argument("--draw", action="store_true")
    request = parser.parse_args()
    if not request.draw:
        with tempfile.TemporaryDirectory(prefix="staleness-") as parent:
            measure(request, Path(parent))
    draw(read_table(TABLE))


def measure(request: argparse.Namespace, parent: Path) -> None:
    measured = {order(row) for row in read_table(TABLE)}
    for seed in request.seeds:
        base = parent / f"sft-{seed}"
        for staleness in request.staleness:
            for correction in request.corrections if staleness else ["none"]:
                if (staleness, list(CORRECTIONS).index(correction), seed) in measured:
                    continue
                if not (base / "metrics.jsonl").is_file():
                    train([*SFT.split(), "--seed", str(seed)], base)
                folder = parent / f"{seed}-{staleness}-{list(CORRECTIONS).index(correction)}"
                row = make_one_item(base, folder, seed, staleness, correction)
                show(row)
                replace_rows(TABLE, [row], ("seed", "staleness", "correction"), order)


def group_cells(
    rows: list[dict[str, str]], what: str = "after"
) -> dict[tuple[int, str], list[float]]:
    result: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        result.setdefault((int(row["staleness"]), row["correction"]), []).append(float(row[what]))
    return result


def draw(rows: list[dict[str, str]]) -> None:
    """Plot held-out accuracy after the last step over staleness, and write the page's table.

    Each correction has a line, each seed a dot.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    result = group_cells(rows)
    ages = [age for age in STALENESS if age in {at for at, _ in result}]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, name in enumerate(CORRECTIONS):
        values = [result.get((age, name if age else "none"), []) for age in ages]
        shift = (i - (len(CORRECTIONS) - 1) / 2) * 0.06
        at = [j + shift for j, some in enumerate(values) if some]
        line = axes.plot(at, [mean(some) for some in values if some], marker="o", label=name)[0]
        for j, some in enumerate(values):
            axes.scatter([j + shift] * len(some), some, s=10, color=line.get_color(), alpha=0.6)
    axes.set_xticks(range(len(ages)), [str(age) for age in ages])
    axes.set_xlabel("--max-steps-off-policy: trained tokens are so many updates old")
    axes.set_ylabel(f"held-out accuracy after {STEPS} steps")
    axes.grid(alpha=0.3)
    axes.legend(title="correction", fontsize=8)
    figure.savefig(PICTURE, dpi=120)
    page = PAGE.read_text()
    begin, end = "<!-- staleness -->\n", "<!-- end of staleness -->"
    if begin in page:
        before, after = page.index(begin) + len(begin), page.index(end)
        PAGE.write_text(page[:before] + as_page(rows) + page[after:])


def as_page(rows: list[dict[str, str]]) -> str:
    """Return the page's table: a row per correction, a column per age.

    A cell holds the mean over the seeds and the worst seed.
    """
    result = group_cells(rows)
    lines = [
        "| correction | " + " | ".join(f"{age}" for age in STALENESS) + " |",
        "|---|" + "---|" * len(STALENESS),
    ]
    for name in CORRECTIONS:
        shown = [result.get((age, name), []) for age in STALENESS]
        texts = (f"{mean(some):.3f} ({min(some):.3f})" if some else "" for some in shown)
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
