"""Define the row formats of published mathematics problems."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl.data.row_formats import ParsedRow, RowFormat, collect_meta, read_text
from rl.data.row_readers import BadRow
from rl.rewards import math_reward

GSM8K_INSTRUCTION = "\n\nReason step by step, then write the final number alone inside \\boxed{}."
MATH_INSTRUCTION = "\n\nReason step by step, then write the final answer inside \\boxed{}."


class GSM8K(RowFormat):
    """Read question, and answer: a solution that ends in "#### N".

    meta["answer"] is N without commas; the response is the solution without its <<...>> notes,
    ending in \\boxed{N}.
    """

    def read(self, columns: Mapping[str, Any]) -> ParsedRow:
        question, worked = read_text(columns, "question"), read_text(columns, "answer")
        solution, marker, number = worked.rpartition("####")
        number = number.strip().replace(",", "")
        if not marker or not re.fullmatch(r"[-+]?\d+(\.\d+)?", number):
            raise BadRow(f"'answer' does not end in '#### ' and a number: {worked[-40:]!r}")
        solution = re.sub(r"<<[^<>]*>>", "", solution).strip()
        response = f"{solution}\nThe answer is \\boxed{{{number}}}.".lstrip()
        return ParsedRow(
            [{"role": "user", "content": question + GSM8K_INSTRUCTION}],
            {"answer": number},
            response,
        )


class MATH(RowFormat):
    """Read problem, and solution (its last \\boxed{} is the answer) or answer or both.

    This is the format of MATH, MATH-500 and similar data sets.
    """

    def read(self, columns: Mapping[str, Any]) -> ParsedRow:
        solution = columns.get("solution")
        worked = solution if isinstance(solution, str) and solution.strip() else None
        answer = (
            columns["answer"]
            if "answer" in columns
            else math_reward.extract_boxed_answer(worked or "")
        )
        if answer is None or not str(answer).strip():
            unmarked = f"'solution' ends without an answer in \\boxed{{}}: {str(solution)[-40:]!r}"
            raise BadRow("'answer' is empty" if "answer" in columns else unmarked)
        meta = {**collect_meta(columns, None, {"problem", "solution"}), "answer": str(answer)}
        prompt = read_text(columns, "problem") + MATH_INSTRUCTION
        boxed = worked is not None and math_reward.extract_boxed_answer(worked) is not None
        response = (
            worked if boxed or worked is None else f"{worked}\nThe answer is \\boxed{{{answer}}}."
        )
        return ParsedRow([{"role": "user", "content": prompt}], meta, response)
