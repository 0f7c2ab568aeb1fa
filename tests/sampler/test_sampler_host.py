"""Test that bench/sampler_host.py still counts what its committed table says."""

import csv
import subprocess
import sys

import pytest

from bench.harness import REPO


def read_counts(path):
    """Return the counts of a table. Times depend on the machine and are left out."""
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["unit"] != "idle ms"]
    return {(row["row"], row["case"], row["unit"]): row["now"] for row in rows}


@pytest.mark.slow
def test_the_host_does_what_the_table_says(tmp_path):
    script, counts = REPO / "bench" / "sampler_host.py", tmp_path / "counts.csv"
    command = [sys.executable, str(script), "--output", str(counts)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert read_counts(counts) == read_counts(REPO / "bench" / "results" / "sampler_host.csv")
