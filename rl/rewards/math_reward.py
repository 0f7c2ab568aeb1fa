"""Define built-in rewards for mathematics: `gsm8k` (numbers), `math_correctness` and `countdown`.

The answer of a response is its last complete \\boxed{...} or the text after its last "####",
whichever comes later.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

from rl.errors import UserError
from rl.rewards.math_answers import answers_equal
from rl.rewards.math_text import (
    SCIENTIFIC_NUMBER,
    TEXT_COMMAND,
    FormulaTooLargeError,
    evaluate_arithmetic,
    join_thousands,
    normalize_spelling,
    parse_exact_number,
)
from rl.rewards.reward_calls import Meta, RewardResult, make_formatted_result
from rl.rewards.reward_registry import register_reward
from rl.rewards.text import expected_answer

_BOXED = ("\\boxed", "\\fbox")
# \boxed 5 and \boxed5, which some of MATH's solutions use
_BARE = re.compile(r"\\(?:boxed|fbox) *([^\s{}$\\.,;]+)")
# no sign after an operand: x-1
_NUMBER = re.compile(r"(?<![\w)}.])[-+]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
_MAX_NUMBER = 300  # characters of an answer that is parsed as a single number
# A formula anywhere before the number, or an operator, a function or "and" right before it.
_NOT_BEFORE = re.compile(
    r"[\\^*+|]|[_!/<>-]\s*[({]*\s*$|\b[a-zA-Z]\($"
    r"|\b(?:minus|negative|sqrt|log|ln|sin|cos|tan|or|and)\s*[({]*\s*$", re.IGNORECASE,
)  # fmt: skip
_NOT_AFTER = re.compile(
    r"\(|\s*[*^_!+|\\{}\[<>]|\s*/\s*[^a-zA-Z\s]|\s*-\s*[^a-zA-Z\s]|\s+(?:or|and)\s+\S*$"
)
# a squared or cubed length, as cm^2
_UNIT_POWER = re.compile(r"(?<![a-zA-Z])([mcdk]?m|in|ft|yd|mi)\s*\^\s*\{?[23]\}?$")
_EMPHASIS = re.compile(r"(\*\*|__|\*|`)([^*`]+)\1")  # Markdown emphasis
_UNIT_LETTERS = "mgshlLFC"
_NOT_UNITS = {
    "pi", "sin", "cos", "tan", "log", "ln", "sqrt", "factorial", "mod", "times", "plus", "minus",
    "hundred", "thousand", "million", "billion", "trillion", "dozen",
}  # fmt: skip
# A formula in dollar signs has space on both its sides or on neither, unlike the text between two
# prices.
_UNMARKED = re.compile(
    r"\$\$?(?!\s)([^$]+)(?<!\s)\$(?!\d)|\$\$?\s([^$]+)\s\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]"
    # a formula, no sentence
    r"|<answer>\s*+((?:(?!(?<![a-zA-Z\\])[a-zA-Z]{2,}\s+[a-zA-Z])[^<])+?)\s*</answer>"
    r"|answer(?: is|:)(?:\s|\*\*)*+:?+(?:\s|\*\*)*+(?!\\\[\s*\n|\$\$|<answer>)"
    r"((?:(?!answer(?: is|:))[^\n]){1,200}?)\s*(?:\.\s|\.?(?:$|</answer>)|\n)",
    re.DOTALL | re.IGNORECASE,
)  # fmt: skip
_LAST_NUMBER = re.compile(
    r"(?<![\w.])-?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+|[eE][+-]?\d+)?\s?(?:\\?%|°)?"
)
_TAG = re.compile(r"<answer>([^<]{1,1000})</answer>")
# GSM8K's mark, or the Markdown heading "#### Final answer:"; a longer run of # is a rule or noise
_HASHES = re.compile(
    r"(?<!#)####(?!#)(?:[ *]*(?:the )?(?:final )?answer(?: is\b|[ *]*:|[ *]*$)[ :*]*)?",
    re.IGNORECASE | re.MULTILINE,
)
_HEADING = re.compile(r"[\s*_]*[^\W\d_]{2}")  # a word after ####, as of a Markdown heading
# Number of characters searched in a response without a marked answer: parsing time grows with
# length.
_MAX_TAIL = 500


def _find_last_boxed(text: str) -> tuple[int, str] | None:
    """Return (position, content) of the last \\boxed{...} whose braces close (or \\boxed 5), or
    None.

    Takes time linear in the length.
    """
    open_braces: list[tuple[int, bool]] = []  # position, whether \\boxed precedes it
    spans: list[tuple[int, int, int]] = []  # position, and the ends of the content
    for match in re.finditer(r"\\.|[{}]", text):  # \{ and \} need not close
        position = match.start()
        if match.group() == "{":
            before = text[max(0, position - 9) : position].rstrip(" ")  # also matches \boxed {5}
            open_braces.append((position, before.endswith(_BOXED)))
        elif match.group() == "}" and open_braces:
            start, boxed = open_braces.pop()
            if boxed:
                spans.append((start, start + 1, position))
    spans += [(match.start(), *match.span(1)) for match in _BARE.finditer(text)]
    position, start, end = max(spans, default=(-1, 0, 0))
    return None if position < 0 else (position, text[start:end].strip())


def extract_boxed_answer(text: str) -> str | None:
    """Return the content of the last complete \\boxed{...} (or \\fbox), including nested braces, or
    of \\boxed 5.

    Return None if it is empty or missing.
    """
    boxed = _find_last_boxed(text)
    return (boxed[1] or None) if boxed is not None else None


def extract_marked_answer(response: str) -> str | None:
    """Return the answer marked with \\boxed{} or "####"; None if none is marked or the mark is
    empty.
    """
    boxed = _find_last_boxed(response)
    hashes = max((match.end() for match in _HASHES.finditer(response)), default=-1)
    after_hashes = response[hashes:].strip()
    if boxed is not None and (boxed[0] > hashes or _HEADING.match(after_hashes)):
        return boxed[1] or None
    if hashes < 0:
        return None
    lines = after_hashes.splitlines()
    return lines[0].strip() if lines else None


def remove_emphasis(text: str) -> str:
    """Return the text without the Markdown emphasis around it, or half of it: **5**, `5`, 5**."""
    text = text.strip().removeprefix("**").removesuffix("**").strip()
    emphasized = _EMPHASIS.fullmatch(text)
    return text if emphasized is None else emphasized.group(2).strip()


def parse_number(text: str) -> Fraction | None:
    """Return the value of the only number in `text` ("1,200.50 dollars" -> 1200.5).

    Return None for no number, several numbers, or a formula. Only words and units may surround the
    number: 5x, 5!, \\pm 5, f(5) and 5 million are not 5. Equations before it must hold: 4 = 5 is no
    number.
    """
    if len(text) > _MAX_NUMBER:
        return None
    text = remove_emphasis(text)
    *members, text = re.sub(r"\\approx|≈", "=", normalize_spelling(text)).split("=")
    text = (
        re.sub(TEXT_COMMAND, r" \1 ", join_thousands(text))
        .replace("°", " ")
        .replace("%", " ")
        .replace("$", "")
        .strip()
        .rstrip(".,")
    )
    text = _UNIT_POWER.sub(r"\1", text)
    while text[:1] + text[-1:] in ("{}", "()", "[]"):
        text = text[1:-1].strip()
    try:
        value = (
            parse_exact_number(text)
            if SCIENTIFIC_NUMBER.fullmatch(re.sub(r"\s", "", text))
            else None
        )
    except FormulaTooLargeError:
        return None
    if value is None:
        numbers = list(_NUMBER.finditer(text))
        if len(numbers) != 1 or not _has_plain_context(
            text[: numbers[0].start()], text[numbers[0].end() :]
        ):
            return None
        value = Fraction(numbers[0].group().replace(",", ""))
    sums = [evaluate_arithmetic(re.sub(r"[$,]", "", member)) for member in members]
    return value if all(total is None or total[0] == value for total in sums) else None


def _has_plain_context(before: str, after: str) -> bool:
    """Return whether only words and units surround a number."""
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


@register_reward("gsm8k", bounded=True)
def gsm8k(prompt: str, response: str, meta: Meta = None) -> RewardResult:
    """Return correct + 0.1 (format - 1). Best 1, worst -0.1.

    `format`: \\boxed{} or "####" marks a number. `correct`: that number is also meta["answer"].
    Unmarked numbers are ignored.
    """
    expected = parse_number(expected_answer(meta))
    if expected is None:
        raise UserError(
            f"the expected answer {expected_answer(meta)!r} is not a number: "
            "'math_correctness' compares formulas"
        )
    marked = extract_marked_answer(response)
    number = parse_number(marked) if marked is not None else None
    return make_formatted_result(float(number == expected), number is not None)


def extract_unmarked_answer(response: str) -> str | None:
    """Return the answer of a response without a mark.

    It is the last match of text after "answer is" or in dollar signs, else the last number.
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
def math_correctness(prompt: str, response: str, meta: Meta = None) -> RewardResult:
    """Return 1 if the answer equals meta["answer"] (or meta["expected_answer"]): 1/2 = 0.5 =
    \\frac{1}{2}.

    The answer is the marked answer (\\boxed{} or "####"), else the last expression of the response.
    `format`: the answer was marked. `gave_up`: 1 if evaluating the answer may not end in reasonable
    time (9^{9^{9^9}}); such an answer scores 0.
    """
    expected = expected_answer(meta)
    marked = extract_marked_answer(response)
    answer = marked if marked is not None else extract_unmarked_answer(response)
    correct = gave_up = 0.0
    if answer is not None:
        try:
            expected = extract_marked_answer(expected) or expected
            correct = float(answers_equal(remove_emphasis(answer), expected))
        except ImportError:
            raise
        except Exception:  # boundary: an error in the parser or in sympy means a wrong answer
            gave_up = 1.0
    return RewardResult(
        correct, {"correct": correct, "format": float(marked is not None), "gave_up": gave_up}
    )


@register_reward("countdown", bounded=True)
def countdown(prompt: str, response: str, meta: Meta = None) -> RewardResult:
    """Return correct + 0.1 (format - 1). Best 1, worst -0.1.

    `format`: an expression of + - * / and brackets is in \\boxed{}, after "####" or in
    <answer></answer>. `correct`: the expression also uses only meta["numbers"], each at most once,
    and equals meta["target"]. It may end in "= value", if that is its value.
    """
    if meta is None or "numbers" not in meta or "target" not in meta:
        raise UserError(
            f"countdown needs meta['numbers'] and meta['target'], it has {sorted(meta or {})}"
        )
    tagged = _TAG.findall(response)
    answer = extract_marked_answer(response) or (tagged[-1] if tagged else None)
    evaluation, *others = map(evaluate_arithmetic, (answer or "").split("="))
    correct = False
    if evaluation is not None:
        value, used = evaluation
        correct = (
            value == Fraction(meta["target"])
            and not Counter(used) - Counter(int(number) for number in meta["numbers"])
            and all(other is None or other[0] == value for other in others)
        )
    return make_formatted_result(float(correct), evaluation is not None)
