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
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Replace this folder on sys.path: its kernels.py would shadow the package `kernels`.
sys.path[0] = str(HERE.parent)
from bench.campaign import REPO, RESULTS, SEEDS, machine, write_table  # noqa: E402

TABLE = RESULTS / "learning_seeds.csv"
TESTS = {
    "minimal_loop": "test_minimal_loop.py::test_it_learns",
    "rlvr": "test_rlvr.py::test_a_script_learns",
    "comparison": "test_reward_model.py::test_the_comparison_form_learns_the_same_preferences",
    "rlhf": "test_reward_model.py::test_rlhf_raises_the_learned_reward_and_the_true_one",
    "offline": "test_offline.py::test_it_improves_on_the_behaviour_policy_from_mixed_rollouts",
    "null_controls": "test_null_controls.py::test_only_true_rewards_raise_accuracy",
    "own_answers": "test_own_answers.py::test_addition_is_learnt_from_ones_own_answers",
    "guess_number": "test_games_learn.py::test_guess_number_is_learnt",
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
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            f"--basetemp={folder}/base",
            f"tests/{TESTS[name]}",
        ]
        failed = (
            subprocess.run(
                words, cwd=REPO, env=env, stdout=subprocess.DEVNULL, timeout=3600
            ).returncode
            != 0
        )
        found = (
            [json.loads(line) for line in figures.read_text().splitlines()]
            if figures.is_file()
            else []
        )
    rows = []
    for one in found:
        side = "above" if "above" in one else "below"
        margin = one["value"] - one["above"] if side == "above" else one["below"] - one["value"]
        case = one["test"].partition("[")[2].removesuffix("]")
        rows.append(
            {
                "test": name,
                "case": case,
                "figure": one["figure"],
                "seed": seed,
                "value": round(one["value"], 4),
                "side": side,
                "bar": round(one[side], 4),
                "margin": round(margin, 4),
                "machine": machine(),
            }
        )
    return rows, failed


def keep(found: list[dict[str, Any]], name: str, seed: int) -> None:
    """Write a run's rows into the table, replacing those of the same test and seed, and compute the
    least margins.
    """
    rows: list[dict[str, Any]] = []
    if TABLE.is_file():
        with TABLE.open(newline="") as file:
            rows = [
                row
                for row in csv.DictReader(file)
                if (row["test"], int(row["seed"])) != (name, seed)
            ]
    rows += found
    for row in rows:
        row["least_margin"] = min(
            float(r["margin"])
            for r in rows
            if all(r[key] == row[key] for key in ("test", "case", "figure"))
        )
    order = list(TESTS)
    rows.sort(
        key=lambda row: (order.index(row["test"]), row["case"], row["figure"], int(row["seed"]))
    )
    columns = [
        "test",
        "case",
        "figure",
        "seed",
        "value",
        "side",
        "bar",
        "margin",
        "least_margin",
        "machine",
    ]
    write_table(TABLE, [{column: row[column] for column in columns} for row in rows])


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
                print(
                    ", ".join(f"{key} {value}" for key, value in row.items() if key != "machine"),
                    flush=True,
                )
            print(f"{name}, seed {seed}: {'FAILED' if failed else 'passed'}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
