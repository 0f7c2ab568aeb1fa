"""Compare the math graders with published grades on real text: `python bench/graders.py [DATA]`.

DATA is the folder with gsm8k/, math/ and rollouts/ (default: $WHETSTONE_DATA). Writes
results/graders.csv: a row for each comparison (number of solutions, number of grades that agree),
and a row for each disagreement with its reason. The exit code is 1 if less than 99% of a
comparison's grades agree or have an explanation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.harness import RESULTS, data_argument, write_table  # noqa: E402
from rl.rewards import resolve_reward  # noqa: E402
from rl.rewards.math_reward import extract_marked_answer  # noqa: E402

BAR = 0.99


@dataclass(frozen=True)
class GradedResponse:
    """Hold a solution, the answer that it is compared with, and the published grade. `read`: the
    answer that the published grader extracted.
    """

    place: str
    response: str
    answer: str
    correct: bool
    read: str = ""


def gsm8k(data: Path) -> Iterator[GradedResponse]:
    """Yield four models' solutions of 1,319 problems. Their mark of the answer, "A:", is replaced
    by the mark of the data set.
    """
    path = data / "gsm8k" / "example_model_solutions.jsonl"
    for number, line in enumerate(path.read_text().splitlines()):
        row = json.loads(line)
        answer = row["ground_truth"].rpartition("A:")[2].strip()
        for model, judged in row.items():
            if isinstance(judged, dict):
                response = "####".join(judged["solution"].rsplit("A:", 1))
                right = str(judged["is_correct"]).lower() in ("true", "1")
                yield GradedResponse(f"{number} {model}", response, answer, right)


def qwen(data: Path, column: str) -> Iterator[GradedResponse]:
    """Yield eight solutions of each of 100 problems. `column`: "gt", the answer that the published
    score was computed with, or "answer", MATH's answer.
    """
    for line in (data / "rollouts" / "qwen25math" / "math_cot_100.jsonl").read_text().splitlines():
        row = json.loads(line)
        samples = zip(row["code"], row["pred"], row["score"], strict=True)
        for sample, (text, read, score) in enumerate(samples):
            yield GradedResponse(
                f"{row['idx']} sample {sample}", text, row[column], bool(score), read
            )


def math500(data: Path) -> Iterator[GradedResponse]:
    """Yield MATH's solutions, which are correct: their boxed text is their answer."""
    for row in json.loads((data / "math" / "math500_test.json").read_text()):
        yield GradedResponse(row["unique_id"], row["solution"], row["answer"], True)


def math500_shuffled(data: Path) -> Iterator[GradedResponse]:
    """Yield the same solutions with the next problem's answer: wrong, unless both answers are
    spelled alike.
    """
    rows = json.loads((data / "math" / "math500_test.json").read_text())
    for row, after in zip(rows, [*rows[1:], rows[0]], strict=True):
        place, right = f"{row['unique_id']} by the next", row["answer"] == after["answer"]
        yield GradedResponse(place, row["solution"], after["answer"], right)


COMPARISONS = {
    "gsm8k, four models (is_correct)": ("gsm8k", gsm8k),
    "Qwen2.5-Math on MATH (score), against gt": ("math_correctness", lambda data: qwen(data, "gt")),
    "Qwen2.5-Math on MATH (score), against MATH's answer": (
        "math_correctness",
        lambda data: qwen(data, "answer"),
    ),
    "MATH-500's solutions (right by definition)": ("math_correctness", math500),
    "MATH-500's solutions against the next answer (wrong)": ("math_correctness", math500_shuffled),
}


def reason(first: GradedResponse, result: bool) -> str:
    """Explain from the compared texts why the grades differ; "" if the reason is unknown."""
    marked = extract_marked_answer(first.response) or ""
    if result and ("m." in marked or "m." in first.answer) and first.read in marked:
        cut = f"it cut {marked!r} to {first.read!r} before comparing"
        return f"theirs is mistaken: {cut}; the answer is as MATH has it"
    if result and first.answer.replace("{,}", "") == marked:
        return (
            "theirs is mistaken: it compared the spelling of a number with and without a "
            "thousands separator"
        )
    if result and marked in (first.answer.rpartition("=")[2], first.answer):
        return "the two problems have the same answer, spelled in two ways"
    return ""


def compare(
    reward: str, solutions: Iterator[GradedResponse]
) -> tuple[int, list[tuple[GradedResponse, bool]]]:
    """Return (number of graded solutions, the solutions that our grade disagrees on, with our
    grade).
    """
    graded, differ, resolved = 0, [], resolve_reward(reward)
    for item in solutions:
        scored = resolved.evaluate("", item.response, {"answer": item.answer})
        result = scored.metrics["correct"] == 1.0
        graded += 1
        if result != item.correct:
            differ.append((item, result))
    return graded, differ


def main(data: Path) -> int:
    rows, worst = [], 1.0
    for name, (reward, solutions) in COMPARISONS.items():
        graded, differ = compare(reward, solutions(data))
        unexplained = [first.place for first, result in differ if not reason(first, result)]
        share = 1 - len(differ) / graded
        explained = len(differ) - len(unexplained)
        worst = min(worst, 1 - len(unexplained) / graded)
        note = f"{explained} of {len(differ)} disagreements are explained" if differ else ""
        rows.append([name, reward, "all", graded, graded - len(differ), f"{share:.4f}", note])
        for first, result in differ:
            what = (
                f"answer {first.answer!r}, solution says {extract_marked_answer(first.response)!r}"
            )
            why = f"published {first.correct}, ours {result}: {reason(first, result) or 'unexplained'}"
            rows.append([name, reward, first.place, "", "", "", f"{what}; {why}"])
        print(f"{name}: {graded - len(differ)} of {graded} agree ({share:.2%}); {note}")
    columns = "comparison reward solution graded agree share note command".split()
    command = "python bench/graders.py"
    cells = [dict(zip(columns, [*row, command], strict=True)) for row in rows]
    write_table(RESULTS / "graders.csv", cells)
    return 0 if worst >= BAR else 1


if __name__ == "__main__":
    sys.exit(main(data_argument(__doc__)))
