"""Build right answers to the rows of a data set, and mutants of them: wrong or changed answers."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rl.rewards import code, math_reward
from rl.types import Problem

_BOXED, _HASHES, _FENCED, _BARE = (
    ("\\boxed{", "}"),
    ("#### ", ""),
    ("```python\n", "\n```"),
    ("", ""),
)
_PLACEHOLDER = "{answer}"
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_PLAIN_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_OTHER_CANDIDATES = 4  # wrong answers in a list of candidates
_LONG_FILLER = "Let me look at this again, step by step. " * 200  # without a number


@dataclass(frozen=True)
class ReferenceAnswer:
    """Hold a right answer: before + final + after.

    final: the part that a reward compares, such as 46 or a program
    mark: the text around `final` in the shortest answer of this format, such as \\boxed{ and }
    """

    final: str
    before: str
    after: str
    mark: tuple[str, str]
    is_program: bool = False

    @property
    def text(self) -> str:
        return self.before + self.final + self.after

    def replace_final(self, final: str) -> str:
        """Return the answer with another final part."""
        return self.before + final + self.after

    def write_marked(self, final: str) -> str:
        """Return the shortest answer of this format with a final part."""
        return self.mark[0] + final + self.mark[1]


@dataclass(frozen=True)
class MutantSource:
    """Hold what the mutants of a row are made of.

    others: right answers of other rows, whose final parts differ
    number: the row's position; some mutants alternate between two forms
    """

    answer: ReferenceAnswer
    question: str
    others: Sequence[ReferenceAnswer]
    number: int


@dataclass(frozen=True)
class AnswerMutant:
    """Describe one way to change a right answer.

    build: returns the mutant of a row, or None if the row has none
    remedy: what to do if a reward pays for it; empty if it may be right, so that no reward is
        accused of paying for it
    judges_programs: whether the mutant of a program is wrong for certain
    """

    name: str
    build: Callable[[MutantSource], str | None]
    remedy: str = ""
    judges_programs: bool = True

    def is_wrong(self, program: bool) -> bool:
        """Return whether no reward should pay for this mutant."""
        return bool(self.remedy) and (self.judges_programs or not program)


def _change_number(source: MutantSource) -> str | None:
    """Change the first digit of the last number."""
    final = source.answer.final
    numbers = list(re.finditer(r"\d+", final))
    if not numbers:
        return None
    start = numbers[-1].start()
    digit = int(final[start]) % 9 + 1
    return source.answer.replace_final(f"{final[:start]}{digit}{final[start + 1 :]}")


def _flip_sign(source: MutantSource) -> str | None:
    """Change the sign of an answer that is a single number."""
    final = source.answer.final.strip()
    if not _PLAIN_NUMBER.fullmatch(final) or not final.strip("+-0.,"):
        return None
    return source.answer.replace_final(final[1:] if final[0] == "-" else f"-{final.lstrip('+')}")


def _list_candidates(source: MutantSource) -> str | None:
    """List several answers, the right one in the middle: each in the format, or (odd rows) all of
    them in the format once.
    """
    finals = [other.final for other in source.others[:_OTHER_CANDIDATES]]
    if not finals:
        return None
    finals.insert(len(finals) // 2, source.answer.final)
    if source.number % 2 and not source.answer.is_program:
        return source.answer.write_marked(", ".join(finals))
    return "\n".join(map(source.answer.write_marked, finals))


def _truncate(source: MutantSource) -> str | None:
    """Cut the shortest right answer in the middle of its final part. The work before it is left
    out, because it may state the answer already.
    """
    final = source.answer.final.strip()
    return source.answer.mark[0] + final[: len(final) // 2] if len(final) > 1 else None


def _exit_program(source: MutantSource) -> str | None:
    if not source.answer.is_program:
        return None
    lines = ("import os\nos._exit(0)", "raise SystemExit(0)")
    return source.answer.write_marked(lines[source.number % 2])


RIGHT = AnswerMutant("the right answer", lambda source: source.answer.text)
MUTANTS = (
    RIGHT,
    AnswerMutant("the answer without format", lambda source: source.answer.final),
    AnswerMutant(
        "one number changed",
        _change_number,
        "compare the whole final answer with the expected answer, not its shape or likeness",
        judges_programs=False,
    ),
    AnswerMutant(
        "the sign changed",
        _flip_sign,
        "compare the numbers with their signs",
        judges_programs=False,
    ),
    AnswerMutant(
        "the format without answer",
        lambda source: source.answer.write_marked("") if any(source.answer.mark) else None,
        "pay less for the format than for a right answer in it",
    ),
    AnswerMutant("an empty answer", lambda source: "", "pay nothing for an empty answer"),
    AnswerMutant(
        "the question repeated",
        lambda source: source.question,
        "do not pay for words that the question has",
    ),
    AnswerMutant(
        "another row's answer",
        lambda source: source.others[0].text if source.others else None,
        "compare with the expected answer of the same row, not with its shape",
    ),
    AnswerMutant(
        "all candidates listed",
        _list_candidates,
        "extract one final answer, such as the last \\boxed{}, and compare it as a whole; do not "
        "search the text for the expected answer",
    ),
    AnswerMutant(
        "the answer truncated",
        _truncate,
        "compare the whole final answer; do not accept the beginning of it",
    ),
    AnswerMutant(
        "a program that exits 0",
        _exit_program,
        "check the results of the program outside of it, as code_tests does; do not trust its exit "
        "code",
    ),
    AnswerMutant(
        "a very long text, no answer",
        lambda source: _LONG_FILLER,
        "do not pay for length, or pay for it only together with a right answer",
    ),
)


def build_mutants(source: MutantSource) -> dict[AnswerMutant, str]:
    """Return the mutants of a row with their texts, the right answer first. Texts that equal the
    right answer are left out.
    """
    texts = {mutant: mutant.build(source) for mutant in MUTANTS}
    right = source.answer.text.strip()
    return {
        mutant: text
        for mutant, text in texts.items()
        if text is not None and (mutant is RIGHT or text.strip() != right)
    }


def list_answer_forms(
    row: Problem, programs: bool, answer_format: str | None
) -> dict[str, ReferenceAnswer]:
    """Return right answers to a row in the forms that rewards expect, by the name of the form.

    The row's worked response, if any, is the first. `programs`: whether the reward runs programs.
    `answer_format`: a text with {answer} in it, which is then the only form.
    """
    expected, response = get_expected_answer(row), row.response
    final = None if expected is None else math_reward.extract_marked_answer(expected) or expected
    if answer_format is not None:
        before, _, after = answer_format.partition(_PLACEHOLDER)
        final = response if final is None else final
        return {} if final is None else {answer_format: _wrap(final, (before, after))}
    forms: dict[str, ReferenceAnswer] = {}
    if response is not None:
        forms["the data's responses"] = split_response(response, expected, programs)
        if programs and not _FENCE.search(response):
            forms["the data's responses in a code block"] = _wrap(response, _FENCED)
    if programs and expected is not None:
        printed = f"print({expected!r})"
        forms["a program that prints the expected answer"] = _wrap(printed, _FENCED)
    if final is not None and not programs:
        forms |= {name: _wrap(final, mark) for name, mark in _ANSWER_MARKS.items()}
        if expected != final and expected is not None:
            forms["the expected answer as it is in the row"] = split_response(expected, None, False)
    return forms


_ANSWER_MARKS: Mapping[str, tuple[str, str]] = {
    "\\boxed{answer}": _BOXED,
    "#### answer": _HASHES,
    "<answer>answer</answer>": ("<answer>", "</answer>"),
    "<think>...</think><answer>answer</answer>": (
        "<think>\nI work it out.\n</think>\n<answer>\n",
        "\n</answer>",
    ),
    "the expected answer alone": _BARE,
}


def split_response(response: str, expected: str | None, programs: bool) -> ReferenceAnswer:
    """Return a worked response, split at its final answer: its program, the marked answer, or the
    last place of the expected answer; else the whole response is the final answer.
    """
    program = code.extract_program(response, "fenced") if _FENCE.search(response) else None
    program = "" if program is None else program.rstrip("\n")
    if program.strip() and program in response:
        return replace(_split_at(response, program, _FENCED), is_program=True)
    if programs or program.strip() or _is_program(response):  # also of an indented block
        return ReferenceAnswer(response, "", "", _FENCED if programs else _BARE, is_program=True)
    marked = math_reward.extract_marked_answer(response)
    if marked is not None:
        boxed = math_reward.extract_boxed_answer(response) == marked
        return _split_at(response, marked, _BOXED if boxed else _HASHES)
    if expected is None or expected not in response:
        return _wrap(response, _BARE)
    answer = _split_at(response, expected, _BARE)
    line = answer.before.rpartition("\n")[2], answer.after.partition("\n")[0]
    return answer if expected in "".join(line) else replace(answer, mark=line)


def _is_program(text: str) -> bool:
    """Return whether a text is Python that defines or imports something."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return any(isinstance(statement, kinds) for statement in statements)


def _split_at(text: str, final: str, mark: tuple[str, str]) -> ReferenceAnswer:
    marked = text.rfind(mark[0] + final)
    start = text.rindex(final) if marked < 0 else marked + len(mark[0])
    return ReferenceAnswer(final, text[:start], text[start + len(final) :], mark)


def _wrap(final: str, mark: tuple[str, str]) -> ReferenceAnswer:
    return ReferenceAnswer(final, *mark, mark, is_program=mark == _FENCED)


def get_reference_answer(row: Problem) -> str | None:
    """Return the row's worked response, else its expected answer as text; None without both."""
    return get_expected_answer(row) if row.response is None else row.response


def get_expected_answer(row: Problem) -> str | None:
    """Return the row's expected answer as text; None without one."""
    answer = row.meta.get("answer")
    return str(answer) if isinstance(answer, (str, int, float)) else None
