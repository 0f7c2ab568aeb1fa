"""Test the architecture: imports point to lower layers and to public names of packages."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

# A package may import packages of lower layers only. Files directly in rl/ are the base, which
# every package may import.
LAYERS = {
    9: ["trainer", "rlvr"],
    8: ["algorithms", "programs"],
    7: ["judges", "serve", "chat"],
    6: ["client", "integrations"],
    5: ["envs", "reporting", "memory_plan", "runtime"],
    4: ["learner", "rollout", "data", "vllm"],
    3: ["sampler"],
    2: ["models", "losses", "rewards", "renderers", "config", "distributed"],
    1: ["sandbox", "layers", "images"],
    0: ["processes"],
}
# Modules for scripts, which re-export what packages export: no package imports from them.
PUBLIC = {"rl", "rl.lib"}
MOST_BASE_FILES = 8


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


class Architecture:
    """Read the packages and imports below a folder. Its checks return one text per violation."""

    def __init__(self, root: Path, layers: dict[int, list[str]]):
        self.root = root
        self.layer = {package: layer for layer, packages in layers.items() for package in packages}
        paths = [*root.glob("rl/**/*.py"), *root.glob("kernels/**/*.py")]
        self.files = {
            ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p
            for p in sorted(paths)
        }
        self.packages = {
            p.name
            for p in (root / "rl").iterdir()
            if p.is_dir() and any(p.glob("*.py")) and p.name != "types"
        }
        self.modules = sorted(self.files)

    @cache  # noqa: B019  (an architecture is read once)
    def imports(self, module: str) -> frozenset[tuple[str, str | None]]:
        """Return the (module, name) pairs of rl and kernels that a file imports anywhere, for type
        checking too. The name is None for an import of the module itself.
        """
        pairs: set[tuple[str, str | None]] = set()
        for node in ast.walk(tree(self.files[module])):
            if isinstance(node, ast.Import):
                pairs.update((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module, f"{module}:{node.lineno}: relative import"
                for alias in node.names:
                    submodule, name = f"{node.module}.{alias.name}", (node.module, alias.name)
                    pairs.add((submodule, None) if submodule in self.files else name)
        return frozenset(pair for pair in pairs if pair[0].split(".")[0] in ("rl", "kernels"))

    def package_of(self, module: str) -> str | None:
        """Return the package of a module of rl, None for a file of the base."""
        parts = module.split(".")
        return parts[1] if len(parts) > 1 and parts[1] in self.packages else None

    @cache  # noqa: B019  (an architecture is read once)
    def exports(self, package: str) -> frozenset[str]:
        """Return the public names of a package: its __all__."""
        for node in tree(self.root / "rl" / package / "__init__.py").body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
            ):
                return frozenset(ast.literal_eval(node.value))
        return frozenset()

    # --------------------------------------------------------------------------------------- faults

    def packages_without_a_layer(self) -> Iterator[str]:
        for package in sorted(self.packages ^ set(self.layer)):
            yield f"the package {package} is in LAYERS or in rl/, and not in both"
        for package in sorted(self.packages):
            init = self.root / "rl" / package / "__init__.py"
            if not init.is_file() or not ast.get_docstring(tree(init)):
                yield f"rl/{package}/__init__.py needs a docstring that says what the package does"

    def bad_imports(self, module: str) -> Iterator[str]:
        """Return the imports that point up or sideways, that bypass a package's public API, or that
        take a name from a module for scripts.
        """
        source = self.package_of(module)
        for name, attribute in sorted(self.imports(module), key=str):
            target, last = self.package_of(name), name.rsplit(".", 1)[1:]
            what = f"{module} imports {attribute or name} from {name}"
            if name in PUBLIC:
                yield f"{what}, which is for scripts alone"
            elif not name.startswith("rl.") or target is None or target == source:
                continue  # every package may import the base
            elif source is None:
                yield f"{what}: what is in the base imports no package"
            elif self.layer[target] >= self.layer[source]:
                yield f"{what} (layer {self.layer[target]}): imports point down"
            elif name.count(".") > 1 and (attribute or last[0] not in self.exports(target)):
                yield f"{what}, past the public API of rl/{target}/__init__.py"
            elif attribute is not None and attribute not in self.exports(target):
                yield f"{what}: rl/{target}/__init__.py does not export {attribute}"

    def cycles(self) -> list[str]:
        """Return the import cycles between files, including __init__ files and imports for type
        checking.

        A file must not import the __init__ of its package either.
        """
        arrows = {
            m: sorted({name for name, _ in self.imports(m) if name in self.files} - {m})
            for m in self.modules
            if m not in PUBLIC
        }
        done: set[str] = set()
        faults: list[str] = []

        def visit(module: str, path: tuple[str, ...]) -> None:
            if module in path:
                faults.append("a cycle: " + " -> ".join((*path[path.index(module) :], module)))
            elif module not in done:
                for name in arrows.get(module, ()):
                    visit(name, (*path, module))
                done.add(module)

        for module in arrows:
            visit(module, ())
        return faults

    def too_many_base_files(self) -> list[str]:
        files = sorted(p.name for p in (self.root / "rl").glob("*.py"))
        if len(files) <= MOST_BASE_FILES:
            return []
        return [f"{len(files)} files lie directly in rl/: {files}"]

    def kernels_that_import_rl(self) -> list[str]:
        return [
            m
            for m in self.modules
            if m.startswith("kernels") and any(name.startswith("rl") for name, _ in self.imports(m))
        ]

    def users_of_torch_distributed(self) -> list[str]:
        """Return the modules that import torch.distributed, or use it by its full name."""

        def names_it(node: ast.AST) -> bool:
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and node.attr == "distributed":
                return ast.unparse(node) == "torch.distributed"
            return any(f"{name}.".startswith("torch.distributed.") for name in names)

        return [m for m in self.modules if any(map(names_it, ast.walk(tree(self.files[m]))))]


ARCHITECTURE = Architecture(REPO, LAYERS)


def test_the_page_shows_the_layers():
    page = (REPO / "docs" / "architecture.md").read_text().split("## The folders")[0]
    packages = {"base": ["types"], **{str(layer): sorted(p) for layer, p in LAYERS.items()}}
    shown = {layer: [] for layer in packages}
    for layer, places in re.findall(r"^\| (\w+) \| (`.*?) \|", page, re.MULTILINE):
        shown.setdefault(layer, []).extend(re.findall(r"`rl/(\w+)/`", places))
    assert {layer: sorted(names) for layer, names in shown.items() if names} == packages


def test_every_package_has_a_layer_and_a_docstring():
    assert not [*ARCHITECTURE.packages_without_a_layer()]


def test_imports_point_down_and_to_public_names():
    modules = [m for m in ARCHITECTURE.modules if m.startswith("rl.") and m not in PUBLIC]
    assert len(modules) > 300
    assert not [fault for module in modules for fault in ARCHITECTURE.bad_imports(module)]


def test_no_cycles():
    assert not ARCHITECTURE.cycles()


def test_few_files_in_the_base():
    assert not ARCHITECTURE.too_many_base_files()


def test_kernels_import_nothing_of_rl():
    assert not ARCHITECTURE.kernels_that_import_rl()


def test_only_one_module_imports_torch_distributed():
    assert ARCHITECTURE.users_of_torch_distributed() == ["rl.distributed.collectives"]


@pytest.mark.parametrize(
    ("imports", "heavy"),
    [
        # what the command line reads before a run starts
        ("rl, rl.algorithms, rl.config", ["torch", "transformers", "accelerate"]),
        ("rl.model_info", ["torch", "rl.models"]),
    ],
)
def test_help_needs_no_torch(imports, heavy):
    code = f"import sys, {imports}; print([name for name in {heavy} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# --------------------------------------------------------------------- the checks detect violations

SMALL = {  # a valid tree of two layers and a sibling package
    "rl/__init__.py": "from rl.upper import top",
    "rl/errors.py": "",
    "rl/types/__init__.py": "from rl.types.words import word",
    "rl/types/words.py": "word = 1",
    "rl/upper/__init__.py": '"""Above."""\nfrom rl.upper.work import top\n__all__ = ["top"]',
    "rl/upper/work.py": "from rl.lower import tool\nfrom rl import types\ntop = tool",
    "rl/upper/more.py": "from rl.upper.work import top",
    "rl/lower/__init__.py": '"""Below."""\nfrom rl.lower.tools import tool\n__all__ = ["tool"]',
    "rl/lower/tools.py": "from rl.errors import x\nfrom kernels.sums import s\ntool = 1\nother = 2",
    "rl/beside/__init__.py": '"""Beside."""\nthing = 1\n__all__ = ["thing"]',
    "rl/distributed/__init__.py": '"""Ranks."""',
    "rl/distributed/collectives.py": "import torch.distributed as dist",
    "kernels/__init__.py": "",
    "kernels/sums.py": "s = 1",
}
SMALL_LAYERS = {3: ["upper"], 2: ["lower", "beside", "distributed"]}
IF_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
LATE = "def f():\n    "
API, UP = "past the public API of", "imports point down"
WORK, TOOLS, SUMS = "rl/upper/work.py", "rl/lower/tools.py", "kernels/sums.py"
PLANTS = {  # name: (changed files, expected violation)
    "nothing": ({}, None),
    "up": ({TOOLS: "from rl.upper import top"}, UP),
    "up, late": ({TOOLS: LATE + "from rl.upper import top"}, UP),
    "up, for types": ({TOOLS: IF_TYPES + "from rl.upper import top"}, UP),
    "up, the package": ({TOOLS: "from rl import upper"}, UP),
    "sideways": ({TOOLS: "from rl.beside import thing"}, UP),
    "past the public API": ({WORK: "from rl.lower.tools import tool"}, API),
    "past the public API, a file": ({WORK: "from rl.lower import tools"}, API),
    "past the public API, by import": ({WORK: "import rl.lower.tools"}, API),
    "past the public API, for types": ({WORK: IF_TYPES + "from rl.lower.tools import tool"}, API),
    "not exported": ({WORK: "from rl.lower import other"}, "does not export other"),
    "the base": ({"rl/errors.py": "from rl.lower import tool"}, "in the base"),
    "the types": ({"rl/types/words.py": "from rl.lower import tool"}, "in the base"),
    "the public module": ({WORK: "from rl import top"}, "for scripts alone"),
    "two files": ({WORK: "from rl.upper.more import top"}, "a cycle"),
    "two files, late": ({WORK: LATE + "from rl.upper.more import top"}, "a cycle"),
    "two files, for types": ({WORK: IF_TYPES + "from rl.upper.more import top"}, "a cycle"),
    "two files, by import": ({WORK: "import rl.upper.more"}, "a cycle"),
    "three files": ({WORK: IF_TYPES + "from rl.upper.third import a",
                     "rl/upper/third.py": "from rl.upper.more import a"}, "a cycle"),
    "a file and its own package": ({WORK: LATE + "from rl.upper import top"}, "a cycle"),
    "the base in a cycle": ({"rl/errors.py": "import rl.jsonl",
                             "rl/jsonl.py": "import rl.errors"}, "a cycle"),
    "kernels in a cycle": ({SUMS: "import kernels.more", "kernels/more.py": "import kernels.sums"},
                           "a cycle"),
    "kernels and rl": ({SUMS: LATE + "from rl import types"}, "kernels.sums"),
    "a ninth file in the base": ({f"rl/more_{i}.py": "" for i in range(7)}, "9 files"),
    "a package without a layer": ({"rl/new/__init__.py": '"""New."""'}, "the package new"),
    "a package without an __init__": ({"rl/new/work.py": ""},
                                      "rl/new/__init__.py needs a docstring"),
    "an __init__ without a docstring": (
        {"rl/beside/__init__.py": "thing = 1\n__all__ = ['thing']"},
        "rl/beside/__init__.py needs a docstring"),
    "collectives": ({TOOLS: "import torch.distributed"}, "rl.lower.tools"),
    "collectives, from torch": ({TOOLS: "from torch import distributed as d"}, "rl.lower.tools"),
    "collectives, by name": ({TOOLS: "import torch\ntorch.distributed.barrier()"},
                             "rl.lower.tools"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_seen(name, tmp_path):
    files, expected = PLANTS[name]
    for place, text in {**SMALL, **files}.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    architecture = Architecture(tmp_path, SMALL_LAYERS)
    faults = [
        *architecture.packages_without_a_layer(),
        *architecture.too_many_base_files(),
        *architecture.cycles(),
        *architecture.kernels_that_import_rl(),
    ]
    faults += [
        m for m in architecture.users_of_torch_distributed() if m != "rl.distributed.collectives"
    ]
    for module in architecture.modules:
        layered = architecture.package_of(module) in (None, *architecture.layer)
        if module.startswith("rl.") and module not in PUBLIC and layered:
            faults += architecture.bad_imports(module)
    if expected is None:
        assert not faults
    else:
        assert any(expected in fault for fault in faults), faults
