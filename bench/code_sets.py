"""Score published programs with `code_tests`, reference solutions and empty bodies: `python
bench/code_sets.py [DATA]`.

DATA is the folder with humaneval/ and mbpp/ (default: $WHETSTONE_DATA). The reward receives every
program in the form of an answer: fenced, through worker processes, in a sandbox. The script writes
results/code_sets.csv. The exit code is 1 if fewer solutions pass than expected, or if an empty body
passes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
from bench.harness import RESULTS, data_argument, show, write_table  # noqa: E402
from rl.data import load_problems  # noqa: E402
from rl.rewards import Score, Scorer, resolve_reward  # noqa: E402
from rl.types import Problem  # noqa: E402

MBPP = ("test", "train", "validation", "prompt")
# Reference solutions that must pass. 367 and 927 of MBPP build their trees before the program that
# defines Node; they pass if, as in this script, the set-up runs together with the whole program.
EXPECTED = {"HumanEval": 164, "MBPP": 972, "MBPP sanitized": 427}


def load_sets(data: Path) -> dict[str, list[Problem]]:
    """Return all problems by data set; MBPP includes all its splits."""
    mbpp, sanitized = data / "mbpp" / "mbpp.jsonl", data / "mbpp" / "sanitized-mbpp.json"
    return {
        "HumanEval": list(load_problems(data / "humaneval" / "HumanEval.jsonl.gz", split="test")),
        "MBPP": [p for split in MBPP for p in load_problems(mbpp, split=split)],
        "MBPP sanitized": [p for split in MBPP for p in load_problems(sanitized, split=split)],
    }


def scores(scorer: Scorer, pairs: list[tuple[Problem, str]]) -> tuple[list[Score], float]:
    begin = time.perf_counter()
    result = scorer.score_many((str(p.messages[-1]["content"]), text, p.meta) for p, text in pairs)
    return result, time.perf_counter() - begin


def empty(problem: Problem) -> str:
    """Return the function of a problem with an empty body."""
    name = problem.meta["tests"]["entry_point"]
    return f"```python\n{problem.meta['head']}    pass\n```" if name else "```python\n\n```"


def main(data: Path) -> int:
    rows: list[dict[str, object]] = []
    good = True

    def add(name: str, programs: str, number: int, earned: int, seconds: float, note: str) -> None:
        row = {"data set": name, "programs": programs, "number": number}
        row |= {"earned the reward": earned, "seconds": f"{seconds:.1f}", "note": note}
        rows.append({**row, "command": "python bench/code_sets.py"})
        show(rows[-1])
        write_table(RESULTS / "code_sets.csv", rows)

    with Scorer(resolve_reward("code_tests", seconds=40.0), timeout=60.0) as scorer:
        for name, problems in load_sets(data).items():
            graded, seconds = scores(scorer, [(p, str(p.response)) for p in problems])
            pairs = zip(problems, graded, strict=True)
            failing = [p.meta["task_id"] for p, score in pairs if score.reward != 1.0]
            earned = len(problems) - len(failing)
            good &= earned >= EXPECTED[name]
            counts = len(problems), earned
            add(name, "reference solutions", *counts, seconds, f"failing: {failing}")
            graded, seconds = scores(scorer, [(p, empty(p)) for p in problems])
            pairs = zip(problems, graded, strict=True)
            passing = [p.meta["task_id"] for p, score in pairs if score.metrics.get("correct")]
            good &= not passing
            counts = len(problems), len(passing)
            add(name, "empty bodies", *counts, seconds, f"passing: {passing}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(data_argument(__doc__)))
