"""Test that paths, modules and names exist wherever docs, docstrings, comments and test scripts
mention them.
"""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

import rl
import rl.types  # registers modules below rl.types in sys.modules

REPO = Path(__file__).resolve().parents[2]
PATTERNS = "*.md docs/*.md bench/*.* tools/*.py *.py rl/**/*.py kernels/**/*.py tests/**/*.py"
TEXTS = [
    path
    for pattern in (*PATTERNS.split(), "recipes/*.yaml")
    for path in sorted(REPO.glob(pattern))
    # these two name missing paths on purpose
    if path.suffix in (".md", ".py", ".yaml")
    and path.name not in ("test_architecture.py", "test_places.py")
]
MODULE = re.compile(r"(?<![\w./\"'-])(rl(?:\.[A-Za-z_]\w*)+)(?!\w*[\"'(]?/)")
FILE = re.compile(r"(?<![\w./-])((?:rl|kernels)/(?:[\w.-]+/)*[\w-]+\.py)(?:::([\w.]+))?")
FOLDER = re.compile(
    r"`((?:rl|kernels|docs|tests|bench|tools|recipes|slurm|accelerate_configs|ds_configs)/(?:[\w-]+/)*)`"
)


@cache
def names_in(file: Path) -> set[str]:
    """Return the names that a file defines or re-exports at its top level, and its classes' members
    as Class.member.
    """
    result = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                result.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                result.update(prefix + (alias.asname or alias.name) for alias in node.names)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [name for target in targets for name in ast.walk(target)]
                result.update(prefix + name.id for name in names if isinstance(name, ast.Name))
            elif isinstance(node, ast.If | ast.With | ast.Try):
                visit(node.body, prefix)

    visit(ast.parse(file.read_text()).body, "")
    return result


def is_there(dotted: str) -> bool:
    """Return whether a dotted name is a module or a name in a module. Attributes of that name are
    not checked.
    """
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        place = REPO.joinpath(*parts[:end])
        file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
        if file.is_file():
            if end == len(parts):
                return True
            is_exported = parts[:end] == ["rl"] and parts[end] in rl.__all__
            return parts[end] in names_in(file) or is_exported or is_client_address(dotted)
    return False


def is_client_address(dotted: str) -> bool:
    """Return whether a name is an address of Tinker's client, which has no file here."""
    known = [
        "rl.model_info",
        "rl.lib.public_interfaces",
        *(name for name in sys.modules if name.startswith("rl.types.")),
    ]
    return any(f"{dotted}.".startswith(f"{name}.") for name in known)


def find_wrong_places(line: str) -> list[str]:
    """Return the modules, folders, files and names of a line that do not exist."""
    wrong = [name for name in MODULE.findall(line) if not is_there(name.removesuffix(".py"))]
    wrong += [path for path in FOLDER.findall(line) if not (REPO / path).is_dir()]
    for path, name in FILE.findall(line):
        if not (REPO / path).is_file() or (name and name not in names_in(REPO / path)):
            wrong.append(f"{path}::{name}")
    return wrong


def test_what_a_text_names_is_there():
    assert len(TEXTS) > 500
    assert [
        f"{text.relative_to(REPO)}:{number}: {place}"
        for text in TEXTS
        for number, line in enumerate(text.read_text().splitlines(), 1)
        for place in find_wrong_places(line)
    ] == []


def test_the_architecture_page_lists_every_package():
    """Check that docs/architecture.md lists each package of rl/ and nothing else."""
    text = set(re.findall(r"`rl/(\w+)/`", (REPO / "docs" / "architecture.md").read_text()))
    assert text == {path.parent.name for path in REPO.glob("rl/*/__init__.py")}


@pytest.mark.parametrize(
    ("line", "result"),
    [
        ("see rl.probe):", False),
        ("from rl.interrupts import StopRequest", False),
        ("rl.learner.layout_probe.ProbeSequences", True),
        ("rl.rewards.measure_nothing", False),
        ("rl.rewards.Scorer", True),
        ("rl.ServiceClient", True),
        ("rl.Nothing", False),
        ("from rl.types.tensor_data import TensorData", True),
        ("from rl.lib.public_interfaces import ServiceClient", True),
        ("in `rl/probe/` and", False),
        ("in `rl/trainer/` and", True),
        ("rl/trainer/probe.py", False),
        ("rl/data/problem_set.py::ProblemSet.batch", True),
        ("rl/data/problem_set.py::ProblemSet.batches", False),
    ],
)
def test_a_wrong_place_is_seen(line, result):
    assert (find_wrong_places(line) == []) is result


def test_modules_that_scripts_import_by_their_old_names_are_there():
    from rl.model_info import get_recommended_lora_lr

    from rl import model_info

    assert model_info.get_recommended_lora_lr is get_recommended_lora_lr
