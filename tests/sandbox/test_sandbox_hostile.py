"""Test that no hostile program gets a reward, a secret, or more time or memory than its limits, and
that every benign program gets its reward.
"""

import collections
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hostile_programs import (
    ASSERTS,
    BENIGN,
    CALLS,
    CASES,
    FAMILIES,
    PYTESTS,
    HostileProgram,
    list_hostile_programs,
)
from hostile_replies import IN_PLACE, SORTS

from rl.sandbox import Asserts, Calls, Grade, Pytest, Sandbox, SandboxLimits, StdinStdoutTests

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bubblewrap")]

SPACE = {"memory_mb": 192, "file_mb": 16, "files": 300, "output_kb": 1024}
LIMITS = SandboxLimits(wall_s=0.6, cpu_s=0.6, total_s=1.5, processes=32, **SPACE)
GENEROUS = SandboxLimits(wall_s=20.0, cpu_s=10.0, total_s=60.0)
SECRET = "SECRET-" + "3fd1c9"


def grade(sandbox: Sandbox, program: HostileProgram, limits: SandboxLimits) -> Grade:
    tests = {
        "asserts": Asserts("import math", ASSERTS, "f"),
        "calls": Calls("f", CALLS),
        "dialogue": StdinStdoutTests(CASES),
        "pytest": Pytest(PYTESTS),
        "sorting": Asserts("", SORTS, "f"),
        "in place": Asserts("", IN_PLACE, "f"),
    }[program.style]
    return sandbox.grade(
        program.text, tests, limits=limits, early_stop=program.family in (8, 9), cache=False
    )


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2) as made:
        yield made


@pytest.fixture(scope="module")
def planted_secrets(tmp_path_factory):
    """Plant a secret in a file, in the environment, on a port, on an abstract socket, and in the
    memory of this process.
    """
    folder = tmp_path_factory.mktemp("home")
    (folder / "secret.txt").write_text(SECRET)
    os.environ["WSX_SECRET"] = SECRET
    port, name = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    name.bind(f"\0wsx-{os.getpid()}")
    name.listen()

    def tell(listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(SECRET.encode())

    for listener in (port, name):
        threading.Thread(target=tell, args=(listener,), daemon=True).start()
    yield {"{SECRET}": str(folder), "{PORT}": str(port.getsockname()[1]), "{PID}": str(os.getpid())}
    os.environ.pop("WSX_SECRET")
    port.close()
    name.close()


def left_behind() -> dict[str, list[str]]:
    """Return files, shared memory segments and mounts that a program could leave on the host."""
    names = [str(p) for place in ("/tmp", "/dev/shm", "/var/tmp") for p in Path(place).glob("wsx*")]
    segments = (
        Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
        if Path("/proc/sysvipc/shm").exists()
        else []
    )
    return {
        "files": names,
        "segments": segments,
        "mounts": sorted(line.split()[4] for line in Path("/proc/self/mountinfo").open()),
    }


def list_descendants(pid: int) -> list[int]:
    results = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            results += [child, *list_descendants(child)]
    return results


def test_the_set_is_large_enough():
    programs = list_hostile_programs()
    assert len({p.text for p in programs}) >= 150 and {p.family for p in programs} == set(FAMILIES)
    assert min(collections.Counter(p.family for p in programs).values()) >= 3
    assert len(BENIGN) >= 30


def find_faults(sandbox: Sandbox, program: HostileProgram, secrets: dict[str, str]) -> list[str]:
    """Run a program; return what it got that it should not have."""
    for key, value in secrets.items():
        program = program._replace(text=program.text.replace(key, value))
    result = grade(sandbox, program, LIMITS)
    output = list(result.reasons)
    if program.style == "dialogue" and program.family in (5, 6, 7, 10, 11):
        run = sandbox.run(program.text, stdin="2", limits=LIMITS)
        output += [run.stdout, run.stderr]
    faults = {
        "has a reward": any(result.passed),
        "has a secret": any("SECRET-" in text for text in output),
        "ended its sandbox": any(reason.startswith("lost") for reason in result.reasons),
        f"took {result.wall_s:.1f} s": result.wall_s > LIMITS.total_s + 1.0
        and program.style != "pytest",
    }
    named = f"{program.family} {program.name} ({program.style})"
    return [f"{named} {fault}: {output}" for fault, is_fault in faults.items() if is_fault]


@pytest.mark.timeout(400)
def test_no_hostile_program_gets_anything(sandbox, planted_secrets):
    before = left_behind()
    with ThreadPoolExecutor(2) as pool:
        results = pool.map(
            lambda program: find_faults(sandbox, program, planted_secrets), list_hostile_programs()
        )
        faults = [fault for found in results for fault in found]
    assert not faults, "\n".join(faults)
    assert left_behind() == before
    remaining = [
        len(list_descendants(slot.zygote.process.pid))
        for slot in sandbox._worker_pool._workers
        if slot.zygote is not None
    ]
    assert all(count <= 3 for count in remaining), remaining  # 2 of bubblewrap and the zygote


def test_the_set_fools_a_grader_that_trusts_the_program(sandbox):
    """Control: with the asserts at the end of a single file and the exit code as the verdict, many
    of these programs get a reward.
    """
    programs = [
        p for p in list_hostile_programs() if p.style in ("asserts", "calls") and p.family in (2, 4)
    ]
    runs = [sandbox.run("\n".join([p.text, *ASSERTS[:2]]), limits=LIMITS) for p in programs]
    fooled = {p.name for p, run in zip(programs, runs, strict=True) if run.ok}
    assert (
        len(fooled) >= 15
        and {"os._exit", "equals everything", "an int that equals everything"} <= fooled
    ), sorted(fooled)


@pytest.mark.parametrize("program", BENIGN, ids=[f"{p.name}, {p.style}" for p in BENIGN])
def test_benign_programs_get_their_reward(sandbox, program):
    result = grade(sandbox, program, GENEROUS)
    assert result.all, result.reasons
