"""Test that each mutant of mutant_list.py applies to the code and is detected by its tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import REPO, copy_checkout
from mutant_list import MUTANTS

FILES = {path.stem: str(path.relative_to(REPO)) for path in (REPO / "tests").rglob("test_*.py")}
each_mutant = pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.breaks}"
)


@each_mutant
def test_every_planted_fault_has_its_place_and_its_tests(mutant):
    result = (REPO / mutant.file).read_text().count(mutant.old)
    assert result == 1, f"the text is {result} times in {mutant.file}: point it to that code"
    assert mutant.new != mutant.old
    missing = [name for name in mutant.tests.split() if f"test_{name}" not in FILES]
    assert not missing, f"no such tests: {missing}"


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Return a copy of the files that git lists."""
    return copy_checkout(tmp_path_factory.mktemp("tree"))


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@each_mutant
def test_a_planted_fault_is_seen(mutant, tree):
    path = tree / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    tests = [FILES[f"test_{name}"] for name in mutant.tests.split()]
    words = ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    # No bytecode: a cached file of the same size and time stamp would be mistaken for the mutant.
    env = {
        "WHETSTONE_DATA": str(REPO.parent / "shared" / "data"),
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        done = subprocess.run([sys.executable, *words], cwd=tree, env=env, capture_output=True)
    finally:
        path.write_text(text)
    assert done.returncode == 1, "its tests pass"
