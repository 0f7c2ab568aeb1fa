"""Helpers shared by the tests of data sets: messages, files of rows, and the texts of prompts."""

import json
from pathlib import Path

USER, SAID = {"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}


def write_rows(path: Path, *rows: object) -> Path:
    """Write a row a line; a text is a line as it stands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def make_sum_rows(count: int, start: int = 10) -> list[dict]:
    return [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(start, start + count)]


def get_contents(problems) -> list[str]:
    """Return the last message of each problem's prompt."""
    return [problem.messages[-1]["content"] for problem in problems]
