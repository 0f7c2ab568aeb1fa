"""Test that bench/sampler_host.py still counts what its committed table says."""

import csv
import subprocess
import sys

import pytest

from bench.harness import REPO

# Times depend on the machine: they are neither compared nor measured.
CODE = """
import sys
from bench import sampler_host
sampler_host.host_seconds = lambda *args, **options: 0.0
sys.argv = ["sampler_host.py", "--output", sys.argv[1]]
sampler_host.main()
"""


def read_counts(path):
    """Return the counts of a table."""
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["unit"] != "idle ms"]
    return {(row["row"], row["case"], row["unit"]): row["now"] for row in rows}


@pytest.mark.slow
def test_the_host_does_what_the_table_says(tmp_path):
    counts = tmp_path / "counts.csv"
    command = [sys.executable, "-c", CODE, str(counts)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert read_counts(counts) == read_counts(REPO / "bench" / "results" / "sampler_host.csv")
