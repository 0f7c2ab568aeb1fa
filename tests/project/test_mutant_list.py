"""Test that each mutant of mutant_list.py applies to the code and is detected by its tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutant_list import MUTANTS

REPO = Path(__file__).resolve().parents[2]
FILES = {path.stem: str(path.relative_to(REPO)) for path in (REPO / "tests").rglob("test_*.py")}
each_mutant = pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.breaks}"
)


@each_mutant
def test_every_planted_fault_has_its_place_and_its_tests(mutant):
    result = (REPO / mutant.file).read_text().count(mutant.old)
    assert result == 1, (
        f"the text to replace is {result} times in {mutant.file}: point the entry to where that code is now"
    )
    assert mutant.new != mutant.old
    missing = [name for name in mutant.tests.split() if f"test_{name}" not in FILES]
    assert not missing, f"no such tests: {missing}"


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """Return a copy of the files that git lists."""
    folder = tmp_path_factory.mktemp("tree")
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((REPO / name).read_bytes())
    return folder


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
