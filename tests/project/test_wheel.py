"""Test the wheel: build it and use it from a folder outside the checkout."""

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from checkout import REPO, copy_checkout
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import whetstone


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Return the wheel of the tracked files, as pip builds it without an isolated environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = copy_checkout(folder / "source", leave_out=("tests", "bench", "tools", "docs"))
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    command = [sys.executable, "-c", code, str(folder)]
    subprocess.run(command, cwd=source, check=True, timeout=300, capture_output=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


# The installed command, with the packages of this environment as a fallback.
RUN = """
import json, sys
target, commands = sys.argv[1:]
sys.path.insert(0, target)
import rl as package
from whetstone import main
assert package.__file__.startswith(target)
for command in json.loads(commands):
    print(f"\\n#### {command}", flush=True)
    sys.argv = ["whetstone", *command.split()]
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    assert not code, f"{command}: {code}"
"""
COMMANDS = [
    "--version",
    "train --help",
    "train grpo --dataset addition --steps 1 --batch-size 2 --eval-every 0 --quiet --output-dir o",
    "sample o --prompt 1+1= --max-tokens 4",
]


@pytest.mark.slow
def test_the_wheel_trains_samples_and_knows_its_version(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    libraries = Path("rl", "sampler", "__pycache__")  # a compilation takes ten seconds
    if (REPO / libraries).is_dir():
        shutil.copytree(REPO / libraries, tmp_path / "site" / libraries)
    command = [sys.executable, "-c", RUN, str(tmp_path / "site"), json.dumps(COMMANDS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    _, version, help_page, _, sampled = done.stdout.split("\n#### ")
    name, number = version.splitlines()[1].split()
    assert name == "whetstone" and number in wheel.filename
    assert "grpo" in help_page and "gsm8k.yaml" in help_page  # the recipes are available
    assert len(sampled.splitlines()) > 1


@pytest.mark.slow
def test_the_wheel_holds_what_the_package_reads_and_nothing_else(wheel):
    names = set(wheel.namelist())
    packages = {
        str(path.relative_to(REPO))
        for folder in ("rl", "kernels")
        for path in (REPO / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".cpp", ".html", ".css", ".js")
    }
    recipes = {f"whetstone_scripts/recipes/{p.name}" for p in (REPO / "recipes").glob("*.yaml")}
    scripts = {f"whetstone_scripts/{name.replace('-', '_')}.py" for name in whetstone.SCRIPTS}
    assert packages | recipes | scripts | {"whetstone.py"} <= names
    (metadata,) = (name.split("/")[0] for name in names if name.endswith("/METADATA"))
    roots = {"rl", "kernels", "whetstone_scripts", "whetstone.py", metadata}
    assert {name.split("/")[0] for name in names} == roots


def read_requirements(name: str) -> dict[str, Requirement]:
    """Return the requirements of a file of the repository by canonical name."""
    lines = (line.partition("#")[0].strip() for line in (REPO / name).read_text().splitlines())
    requirements = [Requirement(line) for line in lines if line]
    return {canonicalize_name(item.name): item for item in requirements}


def read_extras() -> dict[str, list[Requirement]]:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    return {
        name: [Requirement(text) for text in requirements]
        for name, requirements in project["optional-dependencies"].items()
    }


def test_the_ranges_contain_the_versions_of_the_constraints():
    constraints = read_requirements("constraints.txt")
    assert all(str(item.specifier).startswith("==") for item in constraints.values())
    # pyproject.toml and constraints.txt explain why no version of these fits all environments.
    unpinned = {"mcp", "vllm", "flash-attn"}
    ranges = [*read_requirements("requirements.txt").values()]
    ranges += [item for extra in read_extras().values() for item in extra]
    for item in (item for item in ranges if item.name != "whetstone"):
        name = canonicalize_name(item.name)
        assert (name in constraints) != (name in unpinned), (
            f"{name} needs a line in constraints.txt"
        )
        if name in constraints:
            version = str(constraints[name].specifier).removeprefix("==")
            assert version in item.specifier, f"constraints.txt has {name} {version}: not in {item}"


@pytest.mark.slow
def test_the_wheel_requires_ranges_and_what_training_needs_alone(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist")]
    training = {
        canonicalize_name(item.name): item.specifier
        for item in requirements
        if item.marker is None or "extra" not in str(item.marker)
    }
    listed = read_requirements("requirements.txt")
    assert training == {name: item.specifier for name, item in listed.items()}
    assert not any("==" in str(item.specifier) for item in requirements)  # == might replace torch
    assert not {"pytest", "pytest-xdist", "ruff", "mypy", "wandb", "trl", "tinker"} & set(training)


def test_one_file_has_ranges_and_one_has_versions():
    files = {
        path.name for word in ("requirements", "constraints") for path in REPO.glob(f"*{word}*")
    }
    assert files == {"requirements.txt", "constraints.txt"}
