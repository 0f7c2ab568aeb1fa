"""Run the tests that learn with three seeds: record whether each figure passes its bar, and its
margin. Writes results/learning_seeds.csv. `make campaign`.

    python bench/learning_seeds.py                            # all, about 20 minutes on one core
    python bench/learning_seeds.py --only offline --seeds 3   # a single test, another seed

Both options accept several values. A seed is added to the seed of the test (tests/learning.py). A
row is a figure of a single seed: `margin` is its distance beyond the bar, negative if it misses the
bar, and `least_margin` is the smallest margin of the figure over the seeds. Rows of other tests and
seeds stay. The exit code is 1 if a figure misses its bar or a test fails otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Replace this folder on sys.path: its kernels.py would shadow the package `kernels`.
sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import (  # noqa: E402
    REPO,
    RESULTS,
    SEEDS,
    describe_machine,
    read_table,
    show,
    write_table,
)

TABLE = RESULTS / "learning_seeds.csv"
TESTS = {
    "minimal_loop": "trainer/test_minimal_loop.py::test_it_learns",
    "rlvr": "client/test_rlvr.py::test_a_script_learns",
    "comparison": "judges/test_reward_model.py::test_the_comparison_form_learns_the_same_preferences",
    "rlhf": "judges/test_reward_model.py::test_rlhf_raises_the_learned_reward_and_the_true_one",
    "offline": "algorithms/test_offline.py::test_it_improves_on_the_behaviour_policy_from_mixed_rollouts",
    "null_controls": "algorithms/test_null_controls.py::test_only_true_rewards_raise_accuracy",
    "own_answers": "algorithms/test_own_answers.py::test_addition_is_learnt_from_ones_own_answers",
    "guess_number": "envs/test_games_learn.py::test_guess_number_is_learnt",
}


def one_run(name: str, seed: int) -> tuple[list[dict[str, Any]], bool]:
    """Return (rows of the table, whether the test failed)."""
    with tempfile.TemporaryDirectory(prefix="learning_seeds-") as folder:
        figures = Path(folder) / "figures.jsonl"
        env = {
            **os.environ,
            "WHETSTONE_LEARNING_SEED": str(seed),
            "WHETSTONE_LEARNING_FIGURES": str(figures),
        }
        words = ["-m", "pytest", "-q", f"--basetemp={folder}/base", f"tests/{TESTS[name]}"]
        done = subprocess.run(
            [sys.executable, *words], cwd=REPO, env=env, stdout=subprocess.DEVNULL, timeout=3600
        )
        lines = figures.read_text().splitlines() if figures.is_file() else []
    rows = []
    for figure in map(json.loads, lines):
        side = "above" if "above" in figure else "below"
        margin = (figure["value"] - figure[side]) * (1 if side == "above" else -1)
        rows.append(
            {
                "test": name,
                "case": figure["test"].partition("[")[2].removesuffix("]"),
                "figure": figure["figure"],
                "seed": seed,
                "value": round(figure["value"], 4),
                "side": side,
                "bar": round(figure[side], 4),
                "margin": round(margin, 4),
                "least_margin": "",
                "machine": describe_machine(),
            }
        )
    return rows, done.returncode != 0


def keep(rows: list[dict[str, Any]], name: str, seed: int) -> None:
    """Write a run's rows into the table, replacing those of the same test and seed, and compute the
    least margins.
    """
    earlier = (r for r in read_table(TABLE) if (r["test"], int(r["seed"])) != (name, seed))
    rows = [*rows, *earlier]
    same = ("test", "case", "figure")
    for row in rows:
        figures = (r for r in rows if all(r[key] == row[key] for key in same))
        row["least_margin"] = min(float(r["margin"]) for r in figures)
    order = list(TESTS)
    rows.sort(key=lambda r: (order.index(r["test"]), r["case"], r["figure"], int(r["seed"])))
    write_table(TABLE, rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(TESTS), default=list(TESTS), help="these tests"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    args = parser.parse_args()
    bad = 0
    for name in args.only:
        for seed in args.seeds:
            rows, failed = one_run(name, seed)
            bad += failed
            if rows:
                keep(rows, name, seed)
            for row in rows:
                show(row)
            print(f"{name}, seed {seed}: {'FAILED' if failed else 'passed'}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
