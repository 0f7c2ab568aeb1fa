"""The planted faults of bench/mutants.py are where its list says: one that has moved on would never
be planted.
"""

import runpy
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
MUTANTS = runpy.run_path(str(REPO / "bench" / "mutant_list.py"))["MUTANTS"]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.breaks}")
def test_every_planted_fault_has_its_place_and_its_tests(mutant):
    found = (REPO / mutant.file).read_text().count(mutant.old)
    assert found == 1, (
        f"the text to replace is {found} times in {mutant.file}: point the entry to where that code is now"
    )
    assert mutant.new != mutant.old
    files = {path.stem for path in (REPO / "tests").rglob("test_*.py")}
    missing = [name for name in mutant.tests.split() if f"test_{name}" not in files]
    assert not missing, f"no such tests: {missing}"
