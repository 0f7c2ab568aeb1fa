"""The house: rooms on floors, read from the files. Imports point down, and into rooms by their
doors.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent

# A room may import rooms of lower floors, never one of its own floor or above. A file that lies
# directly in rl/ is the ground, floor 1.
FLOORS = {
    7: ["run", "rlvr"],
    6: ["methods"],
    5: ["judges", "serve"],
    4: ["clients", "credit", "environments", "report", "memory"],
    3: ["learner", "episodes", "data"],
    2: ["sampler", "models", "losses", "rewards", "renderers", "settings", "ranks"],
    1: ["sandbox", "layers", "images"],
}
FACES = {"rl", "rl.lib"}  # doors of the house: they hand on what rooms hand on, to those outside
LONGEST_FILE, LONGEST_FUNCTION, FILES_ON_THE_GROUND = 350, 60, 8


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


class House:
    """The files below a folder as rooms on floors. Its checks return what is wrong, a text for each
    fault.
    """

    def __init__(self, root: Path, floors: dict[int, list[str]]):
        self.root = root
        self.floor = {room: floor for floor, rooms in floors.items() for room in rooms}
        paths = [*root.glob("rl/**/*.py"), *root.glob("kernels/**/*.py")]
        self.files = {
            ".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p
            for p in sorted(paths)
        }
        self.rooms = {
            p.name
            for p in (root / "rl").iterdir()
            if p.is_dir() and any(p.glob("*.py")) and p.name != "types"
        }
        self.modules = sorted(self.files)

    @cache  # noqa: B019  (a house is read once)
    def imports(self, module: str) -> frozenset[tuple[str, str | None]]:
        """(module, name) of rl and kernels that a file imports anywhere, for type checking too;
        name None: the module itself.
        """
        found: set[tuple[str, str | None]] = set()
        for node in ast.walk(tree(self.files[module])):
            if isinstance(node, ast.Import):
                found.update((alias.name, None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0 and node.module, f"{module}:{node.lineno}: relative import"
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    found.add(
                        (submodule, None) if submodule in self.files else (node.module, alias.name)
                    )
        return frozenset(
            (name, attribute)
            for name, attribute in found
            if name.split(".")[0] in ("rl", "kernels")
        )

    def room_of(self, module: str) -> str | None:
        """The room of a module of rl, None for the ground."""
        parts = module.split(".")
        return parts[1] if len(parts) > 1 and parts[1] in self.rooms else None

    @cache  # noqa: B019  (a house is read once)
    def handed_on(self, room: str) -> frozenset[str]:
        """What a room's door names: its __all__."""
        for node in tree(self.root / "rl" / room / "__init__.py").body:
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
            ):
                return frozenset(ast.literal_eval(node.value))
        return frozenset()

    # --------------------------------------------------------------------------------------- faults

    def rooms_without_a_place(self) -> list[str]:
        found = [
            f"the room {room} is in FLOORS or in rl/, and not in both"
            for room in sorted(self.rooms ^ set(self.floor))
        ]
        for room in sorted(self.rooms):
            door = self.root / "rl" / room / "__init__.py"
            if not door.is_file() or not ast.get_docstring(tree(door)):
                found.append(f"rl/{room}/__init__.py says in a sentence what happens there")
        return found

    def bad_imports(self, module: str) -> list[str]:
        """Those that point up or sideways, that go past a room's door, or that take from a face of
        the house.
        """
        here, found = self.room_of(module), []
        for name, attribute in sorted(self.imports(module), key=str):
            there = self.room_of(name)
            if name in FACES:
                found.append(
                    f"{module} imports {attribute} from {name}, which is for those outside"
                )
            elif not name.startswith("rl.") or there is None or there == here:
                continue  # the ground carries everybody
            elif here is None:
                found.append(f"{module} is on the ground and imports the room {there}")
            elif self.floor[there] >= self.floor[here]:
                found.append(
                    f"{module} (floor {self.floor[here]}) imports {name} (floor "
                    f"{self.floor[there]}): imports point down"
                )
            else:
                inside, wanted = name.count(".") > 1, attribute or name.rsplit(".", 1)[1]
                if inside and (attribute is not None or wanted not in self.handed_on(there)):
                    found.append(
                        f"{module} reaches into {name}: import what rl/{there}/__init__.py hands on"
                    )
                elif attribute is not None and attribute not in self.handed_on(there):
                    found.append(
                        f"rl/{there}/__init__.py does not hand on {attribute}, which {module} "
                        f"imports"
                    )
        return found

    def circles(self) -> list[str]:
        """Between files, doors included: a file imports no door of its own room. Types count: a
        reader follows them too.
        """
        arrows = {
            m: sorted({name for name, _ in self.imports(m) if name in self.files} - {m})
            for m in self.modules
            if m not in FACES
        }
        done: set[str] = set()
        found: list[str] = []

        def visit(module: str, path: tuple[str, ...]) -> None:
            if module in path:
                found.append("a circle: " + " -> ".join((*path[path.index(module) :], module)))
            elif module not in done:
                for name in arrows.get(module, ()):
                    visit(name, (*path, module))
                done.add(module)

        for module in arrows:
            visit(module, ())
        return found

    def crowd_on_the_ground(self) -> list[str]:
        files = sorted(p.name for p in (self.root / "rl").glob("*.py"))
        return (
            [f"{len(files)} files lie directly in rl/: {files}"]
            if len(files) > FILES_ON_THE_GROUND
            else []
        )

    def too_long(self, module: str) -> list[str]:
        path = self.files[module]
        place, lines = path.relative_to(self.root), len(path.read_text().splitlines())
        found = (
            [f"{place} has {lines} lines: a wall where its headings are"]
            if lines > LONGEST_FILE
            else []
        )
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node.end_lineno - node.lineno + 1 > LONGEST_FUNCTION
            ):
                found.append(
                    f"{place}:{node.lineno} {node.name} has {node.end_lineno - node.lineno + 1} "
                    f"lines"
                )
        return found

    def kernels_that_know_rl(self) -> list[str]:
        return [
            m
            for m in self.modules
            if m.startswith("kernels") and any(name.startswith("rl") for name, _ in self.imports(m))
        ]

    def users_of_torch_distributed(self) -> list[str]:
        """Modules that import it, or reach it by its full name."""

        def names_it(node: ast.AST) -> bool:
            if isinstance(node, ast.Import):
                return any(
                    f"{alias.name}.".startswith("torch.distributed.") for alias in node.names
                )
            if isinstance(node, ast.ImportFrom):
                return any(
                    f"{node.module}.{alias.name}.".startswith("torch.distributed.")
                    for alias in node.names
                )
            return (
                isinstance(node, ast.Attribute)
                and node.attr == "distributed"
                and ast.unparse(node) == "torch.distributed"
            )

        return [m for m in self.modules if any(map(names_it, ast.walk(tree(self.files[m]))))]


HOUSE = House(REPO, FLOORS)


def test_every_room_has_a_floor_and_a_sentence():
    assert not HOUSE.rooms_without_a_place()


@pytest.mark.parametrize(
    "module", [m for m in HOUSE.modules if m.startswith("rl.") and m not in FACES]
)
def test_imports_point_down_and_through_doors(module):
    assert not HOUSE.bad_imports(module)


def test_no_circles():
    assert not HOUSE.circles()


def test_few_files_on_the_ground():
    assert not HOUSE.crowd_on_the_ground()


@pytest.mark.parametrize("module", HOUSE.modules)
def test_files_and_functions_are_short(module):
    assert not HOUSE.too_long(module)


def test_kernels_know_nothing_of_rl():
    assert not HOUSE.kernels_that_know_rl()


def test_only_one_module_knows_torch_distributed():
    assert HOUSE.users_of_torch_distributed() == ["rl.ranks.distributed"]


def test_help_needs_no_torch():
    """What the command line reads before there is something to run imports neither torch nor
    transformers.
    """
    heavy = ("torch", "transformers", "accelerate")
    code = (
        f"import sys; import rl, rl.methods, rl.settings; print([m for m in {heavy} if m in "
        f"sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


# ------------------------------------------------------------------ the checks see what they should

SMALL = {  # two floors and a room beside: everything as it should be
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
    "rl/ranks/__init__.py": '"""Ranks."""',
    "rl/ranks/distributed.py": "import torch.distributed as dist",
    "kernels/__init__.py": "",
    "kernels/sums.py": "s = 1",
}
SMALL_FLOORS = {3: ["upper"], 2: ["lower", "beside", "ranks"]}
IF_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "
LATE = "def f():\n    "
PLANTS = {  # name: (files that differ, what the fault says)
    "nothing": ({}, None),
    "up": ({"rl/lower/tools.py": "from rl.upper import top"}, "imports point down"),
    "up, late": ({"rl/lower/tools.py": LATE + "from rl.upper import top"}, "imports point down"),
    "up, for types": (
        {"rl/lower/tools.py": IF_TYPES + "from rl.upper import top"},
        "imports point down",
    ),
    "up, the room": ({"rl/lower/tools.py": "from rl import upper"}, "imports point down"),
    "sideways": ({"rl/lower/tools.py": "from rl.beside import thing"}, "imports point down"),
    "past the door": ({"rl/upper/work.py": "from rl.lower.tools import tool"}, "reaches into"),
    "past the door, a file": ({"rl/upper/work.py": "from rl.lower import tools"}, "reaches into"),
    "past the door, by import": ({"rl/upper/work.py": "import rl.lower.tools"}, "reaches into"),
    "past the door, for types": (
        {"rl/upper/work.py": IF_TYPES + "from rl.lower.tools import tool"},
        "reaches into",
    ),
    "not handed on": ({"rl/upper/work.py": "from rl.lower import other"}, "does not hand on other"),
    "the ground": ({"rl/errors.py": "from rl.lower import tool"}, "on the ground"),
    "the types": ({"rl/types/words.py": "from rl.lower import tool"}, "on the ground"),
    "the face": ({"rl/upper/work.py": "from rl import top"}, "for those outside"),
    "two files": ({"rl/upper/work.py": "from rl.upper.more import top"}, "a circle"),
    "two files, late": ({"rl/upper/work.py": LATE + "from rl.upper.more import top"}, "a circle"),
    "two files, for types": (
        {"rl/upper/work.py": IF_TYPES + "from rl.upper.more import top"},
        "a circle",
    ),
    "two files, by import": ({"rl/upper/work.py": "import rl.upper.more"}, "a circle"),
    "three files": (
        {
            "rl/upper/work.py": IF_TYPES + "from rl.upper.third import a",
            "rl/upper/third.py": "from rl.upper.more import a",
        },
        "a circle",
    ),
    "a file and its own door": (
        {"rl/upper/work.py": LATE + "from rl.upper import top"},
        "a circle",
    ),
    "the ground in a circle": (
        {"rl/errors.py": "import rl.jsonl", "rl/jsonl.py": "import rl.errors"},
        "a circle",
    ),
    "kernels in a circle": (
        {"kernels/sums.py": "import kernels.more", "kernels/more.py": "import kernels.sums"},
        "a circle",
    ),
    "kernels and rl": ({"kernels/sums.py": LATE + "from rl import types"}, "kernels.sums"),
    "a long file": ({"rl/upper/more.py": "\n" * (LONGEST_FILE + 1)}, "351 lines"),
    "a long function": (
        {"rl/upper/more.py": "def f():\n" + "    x = 1\n" * LONGEST_FUNCTION},
        "f has 61 lines",
    ),
    "a long method": (
        {"rl/upper/more.py": "class A:\n  async def f():\n" + "    x = 1\n" * LONGEST_FUNCTION},
        "f has 61 lines",
    ),
    "a long kernel": ({"kernels/sums.py": "\n" * (LONGEST_FILE + 1)}, "351 lines"),
    "a ninth file on the ground": ({f"rl/more_{i}.py": "" for i in range(7)}, "9 files"),
    "a room without a floor": ({"rl/new/__init__.py": '"""New."""'}, "the room new"),
    "a room without a door": ({"rl/new/work.py": ""}, "rl/new/__init__.py says"),
    "a door without a sentence": (
        {"rl/beside/__init__.py": "thing = 1\n__all__ = ['thing']"},
        "rl/beside/__init__.py says",
    ),
    "collectives": ({"rl/lower/tools.py": "import torch.distributed"}, "rl.lower.tools"),
    "collectives, from torch": (
        {"rl/lower/tools.py": "from torch import distributed as d"},
        "rl.lower.tools",
    ),
    "collectives, by name": (
        {"rl/lower/tools.py": "import torch\ntorch.distributed.barrier()"},
        "rl.lower.tools",
    ),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_seen(name, tmp_path):
    planted, said = PLANTS[name]
    for place, text in {**SMALL, **planted}.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    house = House(tmp_path, SMALL_FLOORS)
    faults = [
        *house.rooms_without_a_place(),
        *house.crowd_on_the_ground(),
        *house.circles(),
        *house.kernels_that_know_rl(),
    ]
    faults += [m for m in house.users_of_torch_distributed() if m != "rl.ranks.distributed"]
    for module in house.modules:
        faults += house.too_long(module)
        if (
            module.startswith("rl.")
            and module not in FACES
            and (house.room_of(module) is None or house.room_of(module) in house.floor)
        ):
            faults += house.bad_imports(module)
    if said is None:
        assert not faults
    else:
        assert any(said in fault for fault in faults), faults
