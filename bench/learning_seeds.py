"""Run the tests that learn with three seeds: record whether each figure passes its bar, and its
margin.

    python bench/learning_seeds.py                            # all, about 20 minutes on one core
    python bench/learning_seeds.py --only offline --seeds 3   # a single test, another seed

Both options accept several values. A seed is added to the seed of the test (tests/learning.py). A
row is a figure of a single seed: `margin` is its distance beyond the bar, negative if it misses the
bar. Rows of other tests and seeds stay. The exit code is 1 if a figure misses its bar or a test
fails otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import (  # noqa: E402
    REPO,
    RESULTS,
    Row,
    describe_machine,
    make_parser,
    replace_rows,
    show,
)

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


def run_test(name: str, seed: int) -> tuple[list[dict[str, Any]], bool]:
    """Return (rows of the table, whether the test failed)."""
    with tempfile.TemporaryDirectory(prefix="learning_seeds-") as folder:
        figures = Path(folder) / "figures.jsonl"
        names = {"WHETSTONE_LEARNING_SEED": str(seed), "WHETSTONE_LEARNING_FIGURES": str(figures)}
        words = ["-m", "pytest", "-q", f"--basetemp={folder}/base", f"tests/{TESTS[name]}"]
        options: dict[str, Any] = {"env": {**os.environ, **names}, "stdout": subprocess.DEVNULL}
        done = subprocess.run([sys.executable, *words], cwd=REPO, timeout=3600, **options)
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
                "machine": describe_machine(),
            }
        )
    return rows, done.returncode != 0


def order(row: Row) -> tuple[int, str, str, int]:
    return list(TESTS).index(row["test"]), row["case"], row["figure"], int(row["seed"])


def main() -> int:
    parser = make_parser(__doc__, True, RESULTS / "learning_seeds.csv")
    parser.add_argument("--only", nargs="+", choices=list(TESTS), default=list(TESTS))
    args = parser.parse_args()
    bad = 0
    for name in args.only:
        for seed in args.seeds:
            rows, failed = run_test(name, seed)
            bad += failed
            if rows:
                replace_rows(args.output, rows, ("test", "seed"), order)
            for row in rows:
                show(row)
            print(f"{name}, seed {seed}: {'FAILED' if failed else 'passed'}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
