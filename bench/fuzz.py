"""Run every family of fuzz tests with many inputs: recipes and lines, rows, requests, run files,
replies. Writes results/fuzz.csv.

    python bench/fuzz.py                            # 100,000 inputs, divided among the families
    python bench/fuzz.py --count 5000 --seed 7      # fewer inputs, another seed
    python bench/fuzz.py --only settings            # a single family (repeatable)

A family is a module tests/test_fuzz_<name>.py with `inputs(seed, count)` and `check(item)` (see
tests/fuzzing.py), and SHARE, less than 1 if an input takes long. Inputs come in rounds of 1,000,
each with a separate seed, so that its seed and number reproduce a fault. With --only, rows of other
families stay in the table. The exit code is 1 if any input has a fault.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent / "tests"
ROUND = 1000


def families(only: list[str] | None) -> dict[str, ModuleType]:
    """Return name and module of each family. Modules without `inputs` or `check` are printed and
    skipped.
    """
    found = {}
    for path in sorted(TESTS.glob("test_fuzz_*.py")):
        name = path.stem.removeprefix("test_fuzz_")
        if only and name not in only:
            continue
        module = importlib.import_module(path.stem)
        if callable(vars(module).get("inputs")) and callable(vars(module).get("check")):
            found[name] = module
        else:
            print(f"{path.name} has no inputs(seed, count) and check(item): left out", flush=True)
    return found


def fuzz(name: str, module: ModuleType, *, seed: int, count: int) -> dict[str, Any]:
    """Run a family and return its row of the table. Prints each fault to stderr after its round."""
    from fuzzing import run_family

    outcomes: Counter[str] = Counter()
    start, busy = time.monotonic(), time.process_time()
    for first in range(0, count, ROUND):
        number = seed + first // ROUND
        report = run_family(
            module.inputs, module.check, seed=number, count=min(ROUND, count - first)
        )
        outcomes += report.outcomes
        for at, item, raised in report.faults:
            print(
                f"{name}, seed {number}, input {at}: {raised}\n    {item}".encode(
                    "ascii", "backslashreplace"
                ).decode(),
                file=sys.stderr,
            )
        print(
            f"{name}: {first + ROUND if first + ROUND < count else count} of {count}, "
            f"{outcomes['fault']} faults",
            flush=True,
        )
    faults = outcomes.pop("fault", 0)
    row: dict[str, Any] = {"family": name, "first_seed": seed, "inputs": count, "faults": faults}
    row["outcomes"] = json.dumps(dict(sorted(outcomes.items())))
    return row | {
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(time.process_time() - busy, 1),
    }


def shares(chosen: dict[str, ModuleType], count: int) -> dict[str, int]:
    """Divide `count` inputs among the families: equal numbers, but scaled by SHARE."""
    weights = {name: float(vars(module).get("SHARE", 1.0)) for name, module in chosen.items()}
    found = {name: int(count * weight / sum(weights.values())) for name, weight in weights.items()}
    for name in list(found)[: count - sum(found.values())]:  # the remainder of rounding
        found[name] += 1
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=100_000, help="inputs of all families together"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1000,
        help="of the first round; those of `make test` are below 100",
    )
    parser.add_argument("--only", action="append", help="this family alone (repeatable)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "fuzz.csv")
    args = parser.parse_args()
    # comes before this folder: its kernels.py would shadow the package `kernels`
    sys.path[0] = str(HERE.parent)
    sys.path[1:1] = [str(TESTS), str(HERE)]
    from campaign import command_line, machine, write_table

    chosen = families(args.only)
    if not chosen:
        raise SystemExit(
            f"no family of fuzz tests in {TESTS}"
            + (f" is called {' or '.join(args.only)}" if args.only else "")
        )
    rows: list[dict[str, Any]] = []
    if args.only and args.out.is_file():
        with args.out.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["family"] not in chosen]
    faults = 0
    for name, share in shares(chosen, args.count).items():
        module = chosen[name]
        rows.append(
            {
                **fuzz(name, module, seed=args.seed, count=share),
                "machine": machine(),
                "command": command_line(),
            }
        )
        write_table(args.out, rows)
        print(
            ", ".join(
                f"{key} {value}"
                for key, value in rows[-1].items()
                if key not in ("machine", "command")
            ),
            flush=True,
        )
        faults += rows[-1]["faults"]
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
