"""Built-in rewards for answers that are mathematics: `gsm8k` (numbers, plain string work) and
`math_correctness`.

Where the answer stands in a response: the last whole \\boxed{...} or the text after the last
"####", whichever is later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rl.errors import UserError
from rl.rewards.arithmetic import evaluated
from rl.rewards.calls import RewardResult
from rl.rewards.math_answers import answers_equal
from rl.rewards.math_text import SCIENTIFIC, TEXT, TooLarge, exact_number, spell
from rl.rewards.registry import register_reward
from rl.rewards.text import expected_answer

_BOXED = ("\\boxed", "\\fbox")
# \boxed 5, \boxed5: so some of MATH's solutions have it
_BARE = re.compile(r"\\(?:boxed|fbox) *([^\s{}$\\.,;]+)")
# no sign after an operand: x-1
_NUMBER = re.compile(r"(?<![\w)}.])[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
_MAX_NUMBER = 300  # characters of an answer that is read as one number
# A formula anywhere before the number, or an operator, a function or "and" right before it.
_NOT_BEFORE = re.compile(
    r"[\\^*+|]|[_!/<>-]\s*[({]*\s*$|\b[a-zA-Z]\($"
    r"|\b(?:minus|negative|sqrt|log|ln|sin|cos|tan|or|and)\s*[({]*\s*$", re.IGNORECASE,
)  # fmt: skip
_NOT_AFTER = re.compile(
    r"\(|\s*[*^_!+|\\{}\[<>]|\s*/\s*[^a-zA-Z\s]|\s*-\s*[^a-zA-Z\s]|\s+(?:or|and)\s+\S*$"
)
_EMPHASIS = re.compile(r"(\*\*|__|\*|`)([^*_`]+)\1")  # Markdown's
_UNIT_LETTERS = "mgshlLFC"
_NOT_UNITS = {"pi", "sin", "cos", "tan", "log", "ln", "sqrt", "factorial", "mod", "times", "plus", "minus",
              "hundred", "thousand", "million", "billion", "trillion", "dozen"}  # fmt: skip
# A formula in dollar signs has space on both its sides or on none, unlike what stands between two
# prices.
_UNMARKED = re.compile(
    r"\$\$?(?!\s)([^$]+)(?<!\s)\$(?!\d)|\$\$?\s([^$]+)\s\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]"
    r"|answer(?: is|:)\s*:?\s*([^\n]{1,200}?)\s*(?:\.\s|\.?$|\n)", re.DOTALL | re.IGNORECASE,
)  # fmt: skip
_LAST_NUMBER = re.compile(
    r"(?<![\w.])-?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+|[eE][+-]?\d+)?\s?(?:\\?%|°)?"
)
_HASHES = re.compile(r"(?<!#)####(?!#)")  # GSM8K's mark; a longer run of # is a rule or noise
# characters of a response without a marked answer that are searched: parsing is slow and grows with
# length
_MAX_TAIL = 500


def _last_boxed(text: str) -> tuple[int, str] | None:
    """Position and content of the last \\boxed{...} whose braces close (or \\boxed 5), or None.
    Time goes with the length.
    """
    open_braces: list[tuple[int, bool]] = []  # position, whether \\boxed stands before it
    best: tuple[int, int] | None = None
    for match in re.finditer(r"[{}]", text):
        position = match.start()
        if match.group() == "{":
            before = text[max(0, position - 9) : position].rstrip(" ")  # \boxed {5} as well
            open_braces.append((position, before.endswith(_BOXED)))
        elif open_braces:
            start, boxed = open_braces.pop()
            if boxed and (best is None or start > best[0]):
                best = start, position
    bare = next(iter([*_BARE.finditer(text)][-1:]), None)
    if bare is not None and (best is None or bare.start() > best[0]):
        return bare.start(), bare.group(1)
    return None if best is None else (best[0], text[best[0] + 1 : best[1]].strip())


def boxed_answer(text: str) -> str | None:
    """The content of the last whole \\boxed{...} (or \\fbox), braces within it included, or of
    \\boxed 5; None where it is empty.
    """
    boxed = _last_boxed(text)
    return (boxed[1] or None) if boxed is not None else None


def marked_answer(response: str) -> str | None:
    """The answer that the response marks with \\boxed{} or "####"; None where it marks none (an
    empty one is none).
    """
    boxed = _last_boxed(response)
    hashes = max((match.end() for match in _HASHES.finditer(response)), default=-1)
    if boxed is not None and boxed[0] > hashes:
        return boxed[1] or None
    if hashes < 0:
        return None
    lines = response[hashes:].strip().splitlines()
    return lines[0].strip() if lines else None


def parse_number(text: str) -> str | None:
    """The one number in `text`, spelled canonically ("1,200.50 dollars" -> "1200.5"); None where
    there is none, several, or a formula.

    Around it stand words and units alone: 5x, 5!, \\pm 5, f(5) and 5 million are not 5. Equations
    before it have to hold: 4 = 5 is none.
    """
    if len(text) > _MAX_NUMBER:
        return None
    text = text.strip()
    if (emphasized := _EMPHASIS.fullmatch(text)) is not None:
        text = emphasized.group(2)
    *members, text = re.sub(r"\\approx|≈", "=", spell(text)).split("=")
    text = (
        re.sub(TEXT, r" \1 ", text)
        .replace("°", " ")
        .replace("%", " ")
        .replace("$", "")
        .strip()
        .rstrip(".,")
    )
    while text[:1] + text[-1:] in ("{}", "()", "[]"):
        text = text[1:-1].strip()
    try:
        value = exact_number(text) if SCIENTIFIC.fullmatch(re.sub(r"\s", "", text)) else None
    except TooLarge:
        return None
    if value is None:
        numbers = list(_NUMBER.finditer(text))
        if len(numbers) != 1 or not _plain_around(
            text[: numbers[0].start()], text[numbers[0].end() :]
        ):
            return None
        canonical = _canonical(numbers[0].group())
    else:
        canonical = _canonical(str(value)) if value.denominator == 1 else str(float(value))
    sums = [evaluated(re.sub(r"[$,]", "", member)) for member in members]
    return (
        canonical
        if all(found is None or found[0] == Fraction(canonical) for found in sums)
        else None
    )


def _plain_around(before: str, after: str) -> bool:
    """Whether a number stands between words and units alone."""
    if _NOT_BEFORE.search(before) or _NOT_AFTER.match(after):
        return False
    if re.match(r"\s*[ap]\.?m\b", after):
        return True
    letter = re.match(r"(\s*)([A-Za-z]+)(.*)", after, re.DOTALL)
    if letter is None:
        return True
    space, word, rest = letter.groups()
    if len(word) == 1:
        return word in _UNIT_LETTERS or bool(space and re.match(r"\s+[A-Za-z]{2}", rest))
    return word.lower() not in _NOT_UNITS and not set(word) <= set("xyz")


def _canonical(number: str) -> str:
    whole, _, fraction = number.lstrip("+-").replace(",", "").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    canonical = f"{whole}.{fraction}" if fraction else whole
    return f"-{canonical}" if number.startswith("-") and canonical != "0" else canonical


@register_reward("gsm8k", bounded=True)
def gsm8k(prompt: str, response: str, meta: Mapping[str, Any] | None = None) -> RewardResult:
    """correct + 0.1 (format - 1): `format` where a number is given in \\boxed{} or after "####",
    `correct` where it is also meta["answer"]. A number that is not marked so is not looked for.
    Best 1, worst -0.1.
    """
    expected = parse_number(expected_answer(meta))
    if expected is None:
        raise UserError(
            f"the expected answer {expected_answer(meta)!r} is no number: 'math_correctness' compares formulas"
        )
    marked = marked_answer(response)
    number = parse_number(marked) if marked is not None else None
    has_format, correct = float(number is not None), float(number == expected)
    return RewardResult(
        correct + 0.1 * (has_format - 1.0), {"correct": correct, "format": has_format}
    )


def unmarked_answer(response: str) -> str | None:
    """The answer of a response that marks none: what stands last after "answer is", in dollar
    signs, or as a number.
    """
    tail = response[-_MAX_TAIL:].rstrip()
    matches = [
        (match.end(), -match.start(), match.group(match.lastindex or 0))
        for match in _UNMARKED.finditer(tail)
    ]
    if matches:
        return max(matches)[2].strip()
    numbers = list(_LAST_NUMBER.finditer(tail))
    return numbers[-1].group() if numbers else None


@register_reward("math_correctness", needs=("math_verify",), reports=("correct", "format"))
def math_correctness(
    prompt: str, response: str, meta: Mapping[str, Any] | None = None
) -> RewardResult:
    """1 where the answer equals meta["answer"] (or meta["expected_answer"]) as mathematics: 1/2 =
    0.5 = \\frac{1}{2}.

    Read is the marked answer (\\boxed{} or "####"), else the last expression of the response.
    `format`: it was marked. `gave_up`: 1 where working the answer out may not end in reasonable
    time (9^{9^{9^9}}), which scores 0.
    """
    expected = expected_answer(meta)
    marked = marked_answer(response)
    answer = marked if marked is not None else unmarked_answer(response)
    correct = gave_up = 0.0
    if answer is not None:
        try:
            correct = float(answers_equal(answer, marked_answer(expected) or expected))
        except ImportError:
            raise
        except (
            Exception
        ):  # boundary: what a text breaks in the parser or in sympy is a wrong answer
            gave_up = 1.0
    return RewardResult(
        correct, {"correct": correct, "format": float(marked is not None), "gave_up": gave_up}
    )
