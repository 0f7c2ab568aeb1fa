"""Test the wheel: build it and use it from a folder outside the checkout."""

import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import whetstone

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Return the folder into which the wheel of the tracked files is installed, and the wheel."""
    work = tmp_path_factory.mktemp("wheel")
    source = work / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    for name in tracked:
        if (REPO / name).is_file() and not name.startswith(("tests/", "bench/", "tools/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((REPO / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(work), "."]
    subprocess.run([*pip, *build], cwd=source, check=True, timeout=300)
    (wheel,) = work.glob("*.whl")
    target = work / "site"
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)],
        check=True,
        timeout=300,
    )
    return target, wheel


def run(target: Path, cwd: Path, *words: str) -> subprocess.CompletedProcess:
    """Run the installed command, with the packages of this environment as a fallback."""
    line = (
        f"import sys; sys.path.insert(0, {str(target)!r}); import rl as package; "
        f"assert package.__file__.startswith({str(target)!r}); from whetstone import main; "
        "sys.exit(main())"
    )
    return subprocess.run(
        [sys.executable, "-c", line, *words], cwd=cwd, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_the_wheel_trains_samples_and_knows_its_version(installed, tmp_path):
    target, wheel = installed
    version = run(target, tmp_path, "--version").stdout.strip()
    assert version.startswith("whetstone ") and version.split()[1] in wheel.name
    help_page = run(target, tmp_path, "train", "--help")
    assert help_page.returncode == 0 and "grpo" in help_page.stdout
    assert "gsm8k.yaml" in help_page.stdout  # the recipes are available
    words = "train grpo --dataset addition --steps 1 --batch-size 2 --output-dir out --quiet"
    trained = run(target, tmp_path, *words.split())
    assert trained.returncode == 0, trained.stderr
    sampled = run(target, tmp_path, *"sample out --prompt 1+1= --max-tokens 4".split())
    assert sampled.returncode == 0, sampled.stderr


@pytest.mark.slow
def test_the_wheel_holds_what_the_package_reads_and_nothing_else(installed):
    _, wheel = installed
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = {
        str(path.relative_to(REPO))
        for folder in ("rl", "kernels")
        for path in (REPO / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".cpp", ".html", ".css", ".js")
    }
    recipes = {f"whetstone_scripts/recipes/{p.name}" for p in (REPO / "recipes").glob("*.yaml")}
    scripts = {f"whetstone_scripts/{name.replace('-', '_')}.py" for name in whetstone.SCRIPTS}
    assert packages | recipes | scripts | {"whetstone.py"} <= names
    assert {name.split("/")[0] for name in names} - {"rl", "kernels", "whetstone_scripts"} == {
        "whetstone.py",
        f"whetstone-{wheel.name.split('-')[1]}.dist-info",
    }


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
def test_the_wheel_requires_ranges_and_what_training_needs_alone(installed):
    _, wheel = installed
    (metadata,) = (
        zipfile.ZipFile(wheel).read(name).decode()
        for name in zipfile.ZipFile(wheel).namelist()
        if name.endswith(".dist-info/METADATA")
    )
    requirements = [
        Requirement(text) for text in Parser().parsestr(metadata).get_all("Requires-Dist")
    ]
    training = {
        canonicalize_name(item.name): item.specifier
        for item in requirements
        if item.marker is None or "extra" not in str(item.marker)
    }
    listed = read_requirements("requirements.txt")
    assert training == {name: item.specifier for name, item in listed.items()}
    assert not any("==" in str(item.specifier) for item in requirements)  # == might replace torch
    tools = {"pytest", "pytest-xdist", "ruff", "mypy", "wandb", "trl", "tinker"}
    assert not tools & set(training)


def test_one_file_has_ranges_and_one_has_versions():
    files = {path.name for path in REPO.glob("*requirements*")} | {
        path.name for path in REPO.glob("*constraints*")
    }
    assert files == {"requirements.txt", "constraints.txt"}
