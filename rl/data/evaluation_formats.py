"""Define the row formats of published mathematics problems (GSM8K, MATH, AIME) and of other
evaluations: multiple choice (GPQA) and IFEval.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace

from rl.data.row_formats import (
    ColumnNames,
    RowFormat,
    collect_meta,
    make_prompt,
    read_text,
)
from rl.data.row_readers import BadRow, Columns
from rl.errors import UserError, install_command
from rl.rewards import instruction_checks, math_reward
from rl.seed import derive_seed
from rl.types import Problem

GSM8K_INSTRUCTION = "\n\nReason step by step, then write the final number alone inside \\boxed{}."
MATH_INSTRUCTION = "\n\nReason step by step, then write the final answer inside \\boxed{}."
AIME_INSTRUCTION = (
    "\n\nThe answer is an integer from 0 to 999. Reason step by step, then write it inside "
    "\\boxed{}."
)
CHOICE_INSTRUCTION = (
    '\n\nReason step by step, then write as the last line "Answer: X", where X is one of {letters}.'
)
_CORRECT = "Correct Answer"
_INCORRECT = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_DEGREES = re.compile(r"\s*(?:\^\s*(?:\\circ|\{\s*\\circ\s*\})|\u00b0)\Z")
_SHUFFLE_SEED = 0
_MOST_CHOICES = 26


def _answer_column(columns: Columns, names: ColumnNames) -> str:
    """Return the name of the column with the answer: the one that the caller named if the row has
    it, else "answer".
    """
    return names.answer if names.answer is not None and names.answer in columns else "answer"


class GSM8K(RowFormat):
    """Read question, and answer: a solution that ends in "#### N".

    meta["answer"] is N without commas, or the value of another column that the caller named; the
    response is the solution without its <<...>> notes, ending in \\boxed{N}.
    """

    @classmethod
    def matches(cls, columns: Columns, names: ColumnNames) -> bool:
        return "question" in columns and "####" in str(columns.get("answer"))

    def read(self, columns: Columns) -> Problem:
        question, worked = read_text(columns, "question"), read_text(columns, "answer")
        solution, marker, number = worked.rpartition("####")
        number = number.strip().replace(",", "")
        if not marker or not re.fullmatch(r"[-+]?\d+(\.\d+)?", number):
            raise BadRow(f"'answer' does not end in '#### ' and a number: {worked[-40:]!r}")
        solution = re.sub(r"<<[^<>]*>>", "", solution).strip()
        response = f"{solution}\nThe answer is \\boxed{{{number}}}.".lstrip()
        name = _answer_column(columns, self.names)
        meta = collect_meta(columns, name, {"question"})
        if name == "answer":
            meta["answer"] = number
        return Problem(make_prompt(question + GSM8K_INSTRUCTION), meta, response)


class MATH(RowFormat):
    """Read problem, and solution (its last \\boxed{} is the answer) or answer or both.

    This is the format of MATH, MATH-500 and similar data sets.
    """

    required = ({"problem", "solution"}, {"problem", "answer"})

    def read(self, columns: Columns) -> Problem:
        solution = columns.get("solution")
        worked = solution if isinstance(solution, str) and solution.strip() else None
        name = _answer_column(columns, self.names)
        has_answer = name in columns and name != "solution"
        answer = columns[name] if has_answer else math_reward.extract_boxed_answer(worked or "")
        if answer is None or answer != answer or not str(answer).strip():  # NaN: a missing value
            unmarked = f"'solution' ends without an answer in \\boxed{{}}: {str(solution)[-40:]!r}"
            raise BadRow(f"{name!r} is empty" if has_answer else unmarked)
        meta = {**collect_meta(columns, None, {"problem", "solution"}), "answer": str(answer)}
        prompt = read_text(columns, "problem") + MATH_INSTRUCTION
        boxed = worked is not None and math_reward.extract_boxed_answer(worked) is not None
        response = (
            worked if boxed or worked is None else f"{worked}\nThe answer is \\boxed{{{answer}}}."
        )
        return Problem(make_prompt(prompt), meta, response)


class AIMEFormat(RowFormat):
    """Read problem and answer, an integer from 0 to 999, with or without leading zeros or a sign of
    degrees behind it, which is left out. The columns may be capitalized.
    """

    example = json.dumps({"problem": "Find 2+2.", "answer": "004"})

    def read(self, columns: Columns) -> Problem:
        renamed = {
            name.lower() if name in ("Problem", "Answer", "Solution") else name: value
            for name, value in columns.items()
        }
        problem = read_text(renamed, "problem")
        name = _answer_column(renamed, self.names)
        answer = renamed.get(name)
        text = _DEGREES.sub("", str(answer).strip())
        if not (text.isascii() and text.isdigit() and int(text) <= 999):
            raise BadRow(f"{name!r} is an integer from 0 to 999, this is {answer!r}")
        row = MATH().read({**renamed, "answer": str(int(text))})
        return replace(row, messages=make_prompt(problem + AIME_INSTRUCTION))


class MultipleChoiceFormat(RowFormat):
    """Read a question and its choices; meta["answer"] is the letter of the right choice.

    With GPQA's columns (Question, Correct Answer, Incorrect Answer 1 to 3) the choices are
    shuffled, by a seed derived from the question: a question always has the same order. With the
    columns question, choices (or options) and answer (a letter or a position from 0), their order
    is kept.
    """

    example = json.dumps({"question": "2+2=", "choices": ["3", "4"], "answer": "B"})
    required = ({"Question", _CORRECT}, {"question", "choices"}, {"question", "options"})
    reward = "multiple_choice"

    def read(self, columns: Columns) -> Problem:
        if _CORRECT in columns:
            question = read_text(columns, "Question").strip()
            texts = [read_text(columns, name).strip() for name in (_CORRECT, *_INCORRECT)]
            order = list(range(len(texts)))
            random.Random(derive_seed(_SHUFFLE_SEED, "choices", question)).shuffle(order)
            choices, position = [texts[i] for i in order], order.index(0)
            meta = {"record": columns["Record ID"]} if "Record ID" in columns else {}
        else:
            question = read_text(columns, "question").strip()
            choices, position = self._read_choices(columns, _answer_column(columns, self.names))
            used = {"question", "choices", "options", "answer"}
            meta = collect_meta(columns, None, used)
        letters = [chr(ord("A") + i) for i in range(len(choices))]
        listing = "\n".join(
            f"{letter}) {text}" for letter, text in zip(letters, choices, strict=True)
        )
        prompt = f"{question}\n\n{listing}" + CHOICE_INSTRUCTION.format(letters=", ".join(letters))
        return Problem(
            make_prompt(prompt),
            {**meta, "answer": letters[position], "choices": choices},
            f"Answer: {letters[position]}",
        )

    @staticmethod
    def _read_choices(columns: Columns, answer_column: str) -> tuple[list[str], int]:
        """Return the texts of the choices and the position of the right choice."""
        name = "choices" if "choices" in columns else "options"
        texts = columns.get(name)
        if not (
            isinstance(texts, Sequence)
            and not isinstance(texts, str)
            and 2 <= len(texts) <= _MOST_CHOICES
            and all(isinstance(text, str) and text.strip() for text in texts)
        ):
            raise BadRow(
                f"'choices' is a list of 2 to {_MOST_CHOICES} texts, this is {str(texts)[:60]!r}"
            )
        answer = columns.get(answer_column)
        position = -1
        if isinstance(answer, int) and not isinstance(answer, bool):
            position = answer
        elif isinstance(answer, str) and re.fullmatch("[A-Za-z]", answer.strip()):
            position = ord(answer.strip().upper()) - ord("A")
        if not 0 <= position < len(texts):
            raise BadRow(
                f"{answer_column!r} is a letter from A to {chr(ord('A') + len(texts) - 1)} or a "
                f"position from 0 to {len(texts) - 1}, this is {answer!r}"
            )
        return [text.strip() for text in texts], position


class IFEvalFormat(RowFormat):
    """Read prompt, instruction_id_list and kwargs. Raises UserError if a row needs the detection of
    languages and its package is missing.
    """

    example = json.dumps(
        {
            "prompt": "Write two words without a comma.",
            "instruction_id_list": ["punctuation:no_comma"],
            "kwargs": [{}],
        }
    )
    required = ({"instruction_id_list", "kwargs"},)
    reward = "ifeval"

    def read(self, columns: Columns) -> Problem:
        prompt = read_text(columns, "prompt")
        try:
            instructions = instruction_checks.bind_instructions(
                columns.get("instruction_id_list"), columns.get("kwargs")
            )
        except ValueError as error:
            raise BadRow(str(error)) from error
        ids, kwargs = map(list, zip(*instructions, strict=True))
        languages = instruction_checks.LANGUAGE_INSTRUCTIONS.intersection(ids)
        if languages and importlib.util.find_spec("py3langid") is None:
            raise UserError(
                f"{', '.join(sorted(languages))}: these instructions need the package py3langid, "
                f"which is not installed: {install_command('language')}"
            )
        meta = collect_meta(columns, None, {"prompt", "instruction_id_list", "kwargs"})
        return Problem(make_prompt(prompt), {**meta, "instruction_id_list": ids, "kwargs": kwargs})
