"""Plant faults in a copy of the tree, a single fault at a time, and run the quick tests that should
detect it: killed, survived, or stale.

    python bench/mutants.py [--only TEXT] [--first N] [--due] [--results FILE] [--list]

The copy holds the files that git lists, with uncommitted changes. Torch and transformers are
imported once; each mutant's tests run in a fork that imports `rl` from the copy. A test that fails
is run again without the fault: a test that fails then, too, has killed nothing.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutant_list import MUTANTS, Mutant

REPO = Path(__file__).resolve().parent.parent
RESULTS = REPO / "bench" / "results" / "mutants.csv"
SECONDS = 900.0  # per mutant; a mutant that makes its tests hang is detected, too


def copy_tree(folder: Path) -> None:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in names.splitlines():
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)


def import_once() -> None:
    """Import the slow libraries, which are not part of the tree, once. First remove this folder
    from sys.path: its kernels.py would shadow the package `kernels`.
    """
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != REPO / "bench"]
    import peft  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    torch.set_num_threads(1)


def files_of(tree: Path, tests: str) -> list[str]:
    return [
        f"tests/test_{name}.py"
        for name in tests.split()
        if (tree / "tests" / f"test_{name}.py").is_file()
    ]


def run_tests(tree: Path, what: list[str]) -> tuple[bool, str]:
    """Run the quick part of these files or tests in a fork; return (whether all passed, the name of
    the first failure).
    """
    log = tree / "mutant.log"
    child = os.fork()
    if child == 0:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        os.chdir(tree)
        # A mutant of the same size as the last, within a second, would be taken for it.
        sys.dont_write_bytecode = True
        sys.path[:0] = [str(tree)]
        os.environ |= {
            "WHETSTONE_DATA": os.environ.get(
                "WHETSTONE_DATA", str(REPO.parent / "shared" / "data")
            ),
            "OMP_NUM_THREADS": "1",
        }
        import pytest

        code = pytest.main(
            ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--no-header", *what]
        )
        os._exit(int(code))
    deadline = time.monotonic() + SECONDS
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False, f"no end within {SECONDS:g} s"
        time.sleep(0.1)
    lines = log.read_text(errors="replace").splitlines()
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if os.waitstatus_to_exitcode(status) == 5:
        return True, "no quick test"
    return status == 0, failed[0] if failed else ("" if status == 0 else "\n".join(lines[-5:]))


def plant(tree: Path, mutant: Mutant) -> str | None:
    """Plant the fault and return the file's original text; return None if the text to replace does
    not occur exactly once.
    """
    path = tree / mutant.file
    text = path.read_text() if path.is_file() else ""
    if text.count(mutant.old) != 1:
        return None
    path.write_text(text.replace(mutant.old, mutant.new))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="mutants whose file, description or tests hold this text"
    )
    parser.add_argument("--first", type=int, default=0, help="begin with this one of the list")
    parser.add_argument(
        "--due",
        action="store_true",
        help="only those that the results lack, or do not have as killed",
    )
    parser.add_argument(
        "--list", action="store_true", help="check that every text is there, and run nothing"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        help="a table with the rows of earlier runs, written after every mutant",
    )
    arguments = parser.parse_args()
    chosen = [
        m
        for m in MUTANTS[arguments.first :]
        if any(arguments.only in text for text in (m.file, m.breaks, m.tests))
    ]
    if arguments.due:
        killed = {key for key, row in read(arguments.results).items() if row["verdict"] == "killed"}
        chosen = [m for m in chosen if (m.file, m.breaks) not in killed]
    tree = Path(tempfile.mkdtemp(prefix="mutants-"))
    copy_tree(tree)
    if not arguments.list:
        import_once()
    sound: dict[str, str] = {}
    rows: list[dict[str, object]] = []
    try:
        for mutant in chosen:
            before = plant(tree, mutant)
            if before is None:
                verdict, by, seconds = "stale", "", 0.0
            elif arguments.list:
                verdict, by, seconds = "there", "", 0.0
            else:
                start = time.monotonic()
                passed, by = run_tests(tree, files_of(tree, mutant.tests))
                verdict, seconds = ("survived" if passed else "killed"), time.monotonic() - start
            if before is not None:
                (tree / mutant.file).write_text(before)
            if verdict == "killed" and by not in sound:
                # A test that fails without the fault has not detected it.
                name = by.split(" ")[-1]
                sound[by] = (
                    "" if "::" not in name or run_tests(tree, [name])[0] else "red without it, too"
                )
            if verdict == "killed" and sound[by]:
                verdict = "unknown"
            rows.append(
                {
                    "file": mutant.file,
                    "breaks": mutant.breaks,
                    "verdict": verdict,
                    "by": by,
                    "seconds": round(seconds, 1),
                }
            )
            print(f"{verdict:9} {mutant.file}: {mutant.breaks}  {by}", flush=True)
            if not arguments.list:
                write(rows, arguments.results)
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    counts = {
        name: sum(row["verdict"] == name for row in rows)
        for name in ("killed", "survived", "unknown", "stale")
    }
    print(counts)


def read(path: Path) -> dict[tuple[str, str], dict[str, object]]:
    """Return the rows of earlier runs."""
    if not path.is_file():
        return {}
    with path.open() as file:
        return {(row["file"], row["breaks"]): dict(row) for row in csv.DictReader(file)}


def write(rows: list[dict[str, object]], path: Path) -> None:
    """Write the table after every mutant; rows of earlier runs stay unless the mutant was run
    again.
    """
    known = read(path) | {(str(row["file"]), str(row["breaks"])): row for row in rows}
    order = [(m.file, m.breaks) for m in MUTANTS]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(known[key] for key in order if key in known)


if __name__ == "__main__":
    main()
