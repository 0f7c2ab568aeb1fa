"""Grade the reference solutions of HumanEval and MBPP, and empty bodies.

The output counts the passes and names the failures.

    python bench/sandbox_published.py --data DATA --out bench/results/sandbox_published.csv
"""

import argparse
import csv
import gzip
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.sandbox import Asserts, Sandbox, SandboxLimits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    with gzip.open(given.data / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
        human = [json.loads(line) for line in file]
    mbpp = [json.loads(line) for line in (given.data / "mbpp" / "mbpp.jsonl").open()]
    clean = json.loads((given.data / "mbpp" / "sanitized-mbpp.json").read_text())
    sets = {
        "HumanEval, canonical solution": [
            (r["task_id"], r["prompt"] + r["canonical_solution"], _check(r)) for r in human
        ],
        "HumanEval, empty body": [
            (r["task_id"], r["prompt"] + "    pass\n", _check(r)) for r in human
        ],
        "MBPP, reference": [
            (r["task_id"], r["code"], Asserts(r["test_setup_code"], r["test_list"])) for r in mbpp
        ],
        "MBPP sanitized, reference": [
            (r["task_id"], r["code"], Asserts("\n".join(r["test_imports"]), r["test_list"]))
            for r in clean
        ],
    }
    rows = []
    with Sandbox(limits=SandboxLimits(wall_s=60, cpu_s=30, total_s=120)) as sandbox:
        for name, items in sets.items():
            grades = sandbox.grade_many([(program, tests) for _, program, tests in items])
            failed = [
                (item[0], grade.reasons)
                for item, grade in zip(items, grades, strict=True)
                if not grade.all
            ]
            said = "" if "empty" in name else str(failed)[:1000]
            rows.append(
                {
                    "set": name,
                    "programs": len(items),
                    "pass": len(items) - len(failed),
                    "failed": said,
                }
            )
            print(rows[-1], flush=True)
    if given.out:
        with open(given.out, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


def _check(row: dict[str, str]) -> Asserts:
    return Asserts("", [row["test"]], row["entry_point"])


if __name__ == "__main__":
    main()
