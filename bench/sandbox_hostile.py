"""Count the results of the hostile programs by family, and measure a hostile neighbor's slowdown.

The hostile set is tests/hostile_programs.py and tests/hostile_grading.py. The counts are rewards,
secrets, lost sandboxes and seconds beyond the limit. The script also runs the honest programs
(tests/honest_programs.py). It measures the slowdown of a program on another worker, next to a
hostile neighbor and next to a neighbor that is merely busy.

    python bench/sandbox_hostile.py --out bench/results/sandbox_hostile.csv
    python bench/sandbox_hostile.py --part neighbours --out bench/results/sandbox_neighbours.csv
"""

import argparse
import csv
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from honest_programs import HONEST
from hostile_grading import FAMILIES as GRADING_FAMILIES
from hostile_grading import cheats
from hostile_programs import ASSERTS, BENIGN, CALLS, CASES, FAMILIES, PYTESTS, Program, hostile
from hostile_replies import IN_PLACE, SORTS

from rl.sandbox import Asserts, Calls, Grade, Pytest, Sandbox, SandboxLimits, StdinStdoutTests

LIMITS = SandboxLimits(
    wall_s=1.0,
    cpu_s=1.0,
    total_s=2.0,
    memory_mb=192,
    processes=32,
    file_mb=16,
    files=300,
    output_kb=1024,
)
STYLES = {
    "asserts": Asserts("import math", ASSERTS, "f"),
    "calls": Calls("f", CALLS),
    "dialogue": StdinStdoutTests(CASES),
    "pytest": Pytest(PYTESTS),
    "sorting": Asserts("", SORTS, "f"),
    "in place": Asserts("", IN_PLACE, "f"),
}
WORK = "s = 0\nfor i in range(3 * 10**6): s += i\nprint(s)"
NEIGHBOURS = (
    "fork bomb",
    "threads without end",
    "setsid and busy children",
    "all memory, by processes",
    "zombies",
    "one endless line",
    "files without end",
)


def grade(sandbox: Sandbox, program: Program, limits: SandboxLimits) -> Grade:
    return sandbox.grade(
        program.text,
        STYLES[program.style],
        limits=limits,
        early_stop=program.family in (8, 9),
        cache=False,
    )


def counted(sandbox: Sandbox) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    programs = hostile()
    grades = []
    for program in programs:
        grades.append(grade(sandbox, program, LIMITS))
    for family, name in FAMILIES.items():
        ours = [(p, g) for p, g in zip(programs, grades, strict=True) if p.family == family]
        reasons = [reason.split(":")[0] for _, g in ours for reason in g.reasons]
        most = ", ".join(
            f"{word} {reasons.count(word)}"
            for word in sorted(set(reasons), key=reasons.count, reverse=True)
        )
        slowest = max(g.wall_s for p, g in ours if p.style != "pytest")
        rows.append(
            {
                "family": family,
                "name": name,
                "programs": len(ours),
                "texts": len({p.text for p, _ in ours}),
                "rewards": sum(any(g.passed) for _, g in ours),
                "sandboxes_lost": reasons.count("lost"),
                "slowest_s": round(slowest, 2),
                "verdicts": most,
            }
        )
        print(rows[-1], flush=True)
    return rows + counted_gradings(sandbox) + [counted_honest(sandbox)]


def counted_gradings(sandbox: Sandbox) -> list[dict[str, object]]:
    """Count as `rewards` the programs that pass a larger share of their tests than they earn."""
    rows: list[dict[str, object]] = []
    for family, name in GRADING_FAMILIES.items():
        programs = [program for program in cheats() if program.family == family]
        grades = [
            sandbox.grade(program.text, program.tests, limits=LIMITS, cache=False)
            for program in programs
        ]
        reasons = [reason.split(":")[0] for g in grades for reason in g.reasons]
        most = ", ".join(
            f"{word} {reasons.count(word)}"
            for word in sorted(set(reasons), key=reasons.count, reverse=True)
        )
        rewards = sum(g.fraction > p.earns for p, g in zip(programs, grades, strict=True))
        slowest = max(g.wall_s for g in grades)
        rows.append(
            {
                "family": family,
                "name": name,
                "programs": len(programs),
                "texts": len({p.text for p in programs}),
                "rewards": rewards,
                "sandboxes_lost": reasons.count("lost"),
                "slowest_s": round(slowest, 2),
                "verdicts": most,
            }
        )
        print(rows[-1], flush=True)
    return rows


def counted_honest(sandbox: Sandbox) -> dict[str, object]:
    limits = SandboxLimits(wall_s=20, cpu_s=10)
    grades = [grade(sandbox, program, limits) for program in BENIGN]
    for program in HONEST:
        tests = (
            StdinStdoutTests(CASES, language=program.language)
            if program.style == "dialogue"
            else STYLES[program.style]
        )
        grades.append(sandbox.grade(program.text, tests, limits=limits, cache=False))
    row: dict[str, object] = {
        "family": 0,
        "name": "honest programs",
        "programs": len(grades),
        "texts": len({p.text for p in (*BENIGN, *HONEST)}),
        "rewards": sum(g.all for g in grades),
        "sandboxes_lost": 0,
        "slowest_s": round(max(g.wall_s for g in grades), 2),
        "verdicts": "",
    }
    print(row, flush=True)
    return row


def beside(sandbox: Sandbox, neighbour: str, rounds: int) -> float:
    """Return the median seconds of a fixed work while `neighbour` runs on the other worker."""
    seconds, done = [], threading.Event()

    def keep_running() -> None:
        while not done.is_set():
            sandbox.run(
                neighbour, limits=SandboxLimits(wall_s=3, cpu_s=3, memory_mb=192, processes=32)
            )

    thread = threading.Thread(target=keep_running)
    thread.start()
    time.sleep(0.2)
    for _ in range(rounds):
        seconds.append(sandbox.run(WORK, limits=SandboxLimits(wall_s=60, cpu_s=60)).wall_s)
    done.set()
    thread.join()
    return statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--part", choices=["table", "neighbours"], default="table")
    parser.add_argument("--out", default="")
    given = parser.parse_args()
    with Sandbox(workers=2) as sandbox:
        rows = counted(sandbox) if given.part == "table" else []
        programs = {p.name: p.text for p in hostile() if p.style == "dialogue"}
        for name in NEIGHBOURS if given.part == "neighbours" else ():
            polite, rude = [], []
            # Take turns, so that other load on the machine affects both.
            for _ in range(given.turns):
                polite.append(beside(sandbox, "while True: pass", given.rounds))
                rude.append(beside(sandbox, programs[name], given.rounds))
            ratio = statistics.median(rude) / statistics.median(polite)
            rows.append(
                {
                    "neighbour": name,
                    "rounds": given.turns * given.rounds,
                    "beside_a_busy_loop_s": round(statistics.median(polite), 3),
                    "beside_it_s": round(statistics.median(rude), 3),
                    "ratio": round(ratio, 3),
                }
            )
            print(rows[-1], flush=True)
    if given.out:
        with open(given.out, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
