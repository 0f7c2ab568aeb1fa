"""Check the wrappers against the packages that they wrap, where a package is installed."""

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from wrapper_checks import CHECKS

CASES = [
    pytest.param(package, check, id=f"{package}, {title}")
    for package, checks in CHECKS.items()
    for title, check in checks
]
EXTRAS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {
    requirement.name: requirement
    for package in CHECKS
    for requirement in map(
        Requirement, EXTRAS["optional-dependencies"][package.removeprefix("tinker-")]
    )
} | {"tinker-cookbook": Requirement("tinker-cookbook==0.6.1")}
# Games that do not start on Python 3.11 lack an external requirement: the f-strings of a newer
# Python, nltk corpora, `gym`, or a judge's key.
GAMES_THAT_START = 69


@pytest.mark.campaign
@pytest.mark.extras
@pytest.mark.parametrize("package,check", CASES)
def test_a_wrapper_does_what_its_package_does(package, check):
    try:
        installed = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    if installed not in REQUIREMENTS[package].specifier:
        pytest.skip(f"{REQUIREMENTS[package]} is required, {installed} is installed")
    held, count, faults = check()
    least = GAMES_THAT_START if check.__name__ == "check_game_starts" else count
    assert held >= least, faults
