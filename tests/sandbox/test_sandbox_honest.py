"""Test that honest programs get their reward with any kind of input, threads, recursion, packages,
and in four languages.
"""

import importlib.util

import pytest
from honest_programs import HONEST, HonestProgram
from hostile_programs import ASSERTS, BENIGN, CALLS, CASES

from rl.errors import UserError
from rl.rewards import code, resolve_reward
from rl.sandbox import Asserts, Calls, Pytest, Sandbox, SandboxLimits, StdinStdoutTests
from rl.sandbox.program_language import find_command

pytestmark = pytest.mark.usefixtures("bubblewrap")

LIMITS = SandboxLimits(wall_s=30.0, cpu_s=10.0, total_s=90.0)
STAR = {
    "test_it.py": "from solution import *\ndef test_two(): assert f(2) == 5\n"
    "def test_three(): assert sorted([f(3), f(1)]) == [2, 10]\n"
}


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(limits=LIMITS, workers=2) as made:
        yield made


def test_there_are_more_than_a_hundred():
    texts = {(p.text, p.style) for p in (*HONEST, *BENIGN)}
    assert len(texts) >= 100
    assert {p.language for p in HONEST} == {"python", "bash", "javascript", "c++"}


@pytest.mark.parametrize(
    "program", HONEST, ids=[f"{p.name}, {p.style}, {p.language}" for p in HONEST]
)
def test_an_honest_program_gets_its_reward(sandbox: Sandbox, program: HonestProgram):
    try:
        find_command(program.language)
    except UserError as error:
        pytest.skip(str(error))
    if program.package and importlib.util.find_spec(program.package) is None:
        pytest.skip(f"{program.package} is not installed")
    tests = {
        "asserts": Asserts("import math", ASSERTS, "f"),
        "calls": Calls("f", CALLS),
        "dialogue": StdinStdoutTests(CASES, "trimmed", program.language),
        "pytest": Pytest(STAR),
    }[program.style]
    grade = sandbox.grade(program.text, tests)
    assert grade.all, grade.reasons


@pytest.mark.parametrize("memory_mb", [192, 512])
def test_as_many_threads_as_memory_has_room_for(sandbox: Sandbox, memory_mb: int):
    """Each thread counts 8 MB of stack against the address space limit, and no malloc arena."""
    threads = (memory_mb - 64) // 8
    text = (
        f"import threading\nbarrier, r = threading.Barrier({threads}), []\n"
        "def work():\n    barrier.wait()\n    r.append([0] * 10000)\n"
        f"t = [threading.Thread(target=work) for _ in range({threads})]\n"
        "[x.start() for x in t]\n[x.join() for x in t]\nprint(len(r))"
    )
    run = sandbox.run(text, limits=SandboxLimits(memory_mb=memory_mb, wall_s=20, cpu_s=10))
    assert run.stdout == f"{threads}\n", run


def run_in_child(sandbox: Sandbox, text: str) -> str:
    """Return what a program prints that runs in a process of a program."""
    child = f"[sys.executable, '-c', {text!r}], text=True, capture_output=True"
    return sandbox.run(
        f"import subprocess, sys\nprint(subprocess.run({child}).stdout, end='')"
    ).stdout


def test_a_program_sees_its_own_processes_alone(sandbox: Sandbox):
    text = (
        "import os, subprocess\n"
        "names = os.listdir('/proc')\n"
        "print(sorted(n for n in names if not n.isdigit()), os.path.exists('/proc/1'))\n"
        "print([n for n in names if n.isdigit() and int(n) != os.getpid()])\n"
        "print(subprocess.run(['cat', '/dev/stdin'], input='x', text=True, "
        "capture_output=True).stdout)\n"
    )
    assert sandbox.run(text).stdout == "['self', 'thread-self'] False\n[]\nx\n"
    text = (
        "for name in ('oom_score_adj', 'coredump_filter'):\n"
        "    try: open(f'/proc/self/{name}', 'w').write('0')\n"
        "    except OSError: print('refused')\n"
    )
    assert sandbox.run(text).stdout == run_in_child(sandbox, text) == "refused\nrefused\n"


# ----------------------------------------------------------------------------------------- packages


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Install two packages, the first requiring the second, and a third that only an extra of the
    first requires.
    """
    places = tmp_path / "installed"
    requires = {
        "first-one": ["second>=1", "third; extra == 'more'", "absent; sys_platform == 'win32'"],
        "second": [],
        "third": [],
    }
    for name, needs in requires.items():
        module = name.replace("-", "_")
        file = "second.py" if name == "second" else f"{module}/__init__.py"
        info = f"{module}-1.0.dist-info"
        needed = "".join(f"Requires-Dist: {need}\n" for need in needs)
        record = [f"{info}/METADATA", f"{info}/top_level.txt", "../../bin/tool", file]
        for path, text in {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needed}",
            f"{info}/top_level.txt": module,
            f"{info}/RECORD": "".join(f"{item},,\n" for item in record),
            file: "VALUE = 4" if name == "second" else "VALUE = 3",
        }.items():
            (places / path).parent.mkdir(parents=True, exist_ok=True)
            (places / path).write_text(text)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tool").write_text("x")
    monkeypatch.syspath_prepend(places)


@pytest.mark.parametrize("name", ["first-one", "first_one"])
def test_packages_may_be_imported_with_what_they_require(installed, name):
    importing = (
        "try:\n    import {0}\n    print({0}.VALUE)\n"
        "except ImportError as error: print(error.name)\n"
    )
    text = "".join(importing.format(module) for module in ("first_one", "second", "third"))
    with Sandbox(workers=1, packages=[name]) as sandbox:
        assert sandbox.packages == (name,)
        assert sandbox.run(text).stdout == run_in_child(sandbox, text) == "3\n4\nthird\n"
        # the setup of the tests may import them too
        tests = Asserts("import second", ["assert f() == second.VALUE == 4"])
        assert sandbox.grade("from second import VALUE\ndef f(): return VALUE", tests).all
        write = "open(os.path.join(os.path.dirname(first_one.__file__), 'x'), 'w')"
        writing = sandbox.run(f"import first_one, os\n{write}")
        assert "Read-only file system" in writing.stderr
        with sandbox.session() as python:
            assert python.run("import second\nsecond.VALUE").value == "4"


def test_packages_that_are_not_there_are_named():
    missing = "'no-such-package', which is not installed here: pip install no-such-package"
    for packages, mode, says in (
        (["no-such-package"], "auto", missing),
        (["../x"], "auto", "names such as numpy, got '../x'"),
        (["scipy"], "http://127.0.0.1:1", "provides its packages itself"),
    ):
        with pytest.raises(UserError, match=says):
            Sandbox(mode, packages=packages)
    with Sandbox(workers=1, packages=[]) as sandbox:
        assert "ModuleNotFoundError" in sandbox.run("import numpy").stderr


def test_a_reward_offers_the_packages_of_its_settings():
    from rl.config import DataSettings
    from rl.trainer import resolve_stage_reward

    program = "```python\nimport numpy as np\ndef f(n): return np.int64(n + 1)\n```"
    meta = {"tests": ["assert f(1) == 2"]}
    for packages, reward in ((("numpy",), 1.0), ((), 0.0)):
        data = DataSettings(reward="code_tests", sandbox_packages=packages)
        made = resolve_stage_reward(data)
        assert made.evaluate("", program, meta).reward == reward  # type: ignore[union-attr]
    assert resolve_reward("code_tests").evaluate("", program, meta).reward == 1.0
    with pytest.raises(ValueError, match="no reward runs programs"):
        DataSettings(sandbox_packages=("scipy",))


def test_a_byte_order_mark_is_no_part_of_a_program():
    fenced = "```python\nx = 1\n```"
    assert (
        code.extract_program("\ufeff" + fenced, "fenced")
        == code.extract_program(fenced.replace("x", "\ufeffx"), "fenced")
        == "x = 1\n"
    )
    assert code.extract_program("\ufeffx = 1", "any") == "x = 1"
    with Sandbox(workers=1) as sandbox, sandbox.session() as python:
        assert python.run("\ufeff6 * 7").value == "42"


CONTAINERS = """
from collections import namedtuple
class Stack(list):
    def push(self, item): self.append(item)
    def peek(self): return self[-1]
class Names(dict):
    def register(self, name): self[name] = len(self)
class Equal(list):
    def __eq__(self, other): return True
    def label(self): return "equal"
class Row(list): pass
Point = namedtuple("Point", "x y")
def make_stack(items): return Stack(items)
"""


def test_a_container_class_of_the_program_keeps_its_methods_and_fields(sandbox: Sandbox):
    asserts = [
        "s = Stack()\ns.push(3)\nassert s.peek() == 3 and len(s) == 1 and list(s) == [3]",
        "s = Stack()\ns.push(3)\nassert s == [3] and [3] == s and s != [4] and isinstance(s, Stack)",
        "n = Names()\nn.register('a')\nassert n['a'] == 0 and n == {'a': 0}",
        "assert Point(1, 2).y == 2 and Point(1, 2) == (1, 2)",
        "assert make_stack([1]) == [1] and make_stack([1, 2])[1:] == [2]",
        "assert Row([1, 2])[1:] == [2] and isinstance(Row([1]), list)",
        "assert Equal([1]).label() == 'equal' and Equal([1]) != [2]",
        "assert Point(1, 2) + (3,) == (1, 2, 3) and (0,) + Point(1, 2) == (0, 1, 2)",
        "assert Point(1, 2) < (2, 3) and Point(1, 2) >= (1, 2) and Point(1, 2)[1:] == (2,)",
        "assert Point(1, 2) < Point(2, 0) and sorted([Point(2, 1), Point(1, 2)])[0] == (1, 2)",
    ]
    grade = sandbox.grade(CONTAINERS, Asserts("", asserts))
    assert grade.all, grade.reasons
    assert sandbox.grade(CONTAINERS, Calls("Stack", [([[1]], [1]), ([[2]], [2])])).all
    assert not sandbox.grade(CONTAINERS, Asserts("", ["assert Equal([1]) == [2]"])).all


RAISES = """
class Low(ValueError): pass
def check(n):
    if n == "b": return {}[n]
    if n < 0: raise Low(f"{n} is low")
    if n == 0: raise ValueError("zero")
"""


def test_an_exception_of_the_program_has_its_own_text(sandbox: Sandbox):
    text = "try:\n    check({})\nexcept ValueError as error:\n    assert str(error) == {!r}, str(error)"
    key = "try:\n    check('b')\nexcept KeyError as error:\n    assert error.args == ('b',)"
    asserts = [text.format(0, "zero"), text.format(-1, "-1 is low"), key, "check(0)"]
    grade = sandbox.grade(RAISES, Asserts("", asserts))
    assert grade.passed == [True, True, True, False], grade.reasons
    assert grade.reasons[3] == "error: ValueError: zero"
    matched = (
        "import pytest\nfrom solution import check\ndef test_it():\n"
        "    with pytest.raises(ValueError, match='^zero$'): check(0)\n"
    )
    assert sandbox.grade(RAISES, Pytest({"test_it.py": matched})).all
