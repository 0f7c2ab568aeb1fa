"""Run the tests that are too long for `make test-all`, marked `campaign`: `python bench/long_tests.py`.
Writes results/long_tests.csv.

The table has a row for each test: its outcome and its seconds. learning_seeds.py runs the tests
that learn with more seeds. The exit code is pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Replace this folder on sys.path: its kernels.py would shadow the package `kernels`.
sys.path[0] = str(HERE.parent)
from bench.campaign import REPO, RESULTS, command_line, machine, write_table  # noqa: E402


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="long_tests-") as folder:
        report = Path(folder) / "report.xml"
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "campaign",
            f"--junitxml={report}",
            f"--basetemp={folder}/base",
            *sys.argv[1:],
        ]
        code = subprocess.run(
            words, cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": "1"}
        ).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    rows = []
    for case in cases:
        ended = next(
            (child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed"
        )
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        rows.append(
            {
                "test": name,
                "ended": ended,
                "seconds": round(float(case.get("time", 0))),
                "machine": machine(),
                "command": command_line(),
            }
        )
    if rows:
        write_table(RESULTS / "long_tests.csv", rows)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
