"""Normalize the spelling of mathematical answers: LaTeX and plain text, exact numbers, units, and
whole-number arithmetic.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

MAX_DIGITS = 2000  # of a number that is compared; also the largest exponent of ten
_SYMBOLS = str.maketrans({
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ",
    "∩": r"\cap ", "±": r"\pm ", "∈": r"\in ", "ℝ": r"\mathbb{R}", "½": r"\frac{1}{2}",
    "²": "^{2}", "³": "^{3}", "…": r"\ldots ", "º": "°", "√": r"\sqrt ",
})  # fmt: skip
_ROOTS = re.compile(r"√\s*(?:\(([^()]+)\)|(\d+(?:\.\d+)?))")
_FRACTIONS = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_SPACES = re.compile(
    r"(\\\\)|\\!\s*|\\[,;: ]"
    r"|\\(?:q?quad|displaystyle|textstyle|limits|left|right|[bB]igg?[lrm]?)(?![a-zA-Z])\.?|~"
)
_DEGREES = re.compile(
    r"\^\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?|\\degrees?(?![a-zA-Z])|\\text\s*\{\s*degrees?\s*\}"
)
_THOUSANDS = re.compile(r"(?<![\d.,])([1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+))(?!\d|,\d)")
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp"
_PLAIN_FUNCTION = re.compile(rf"(?<![a-zA-Z\\])({_FUNCTIONS})(?=\s*[(\d])")
_PLAIN_ROOT = re.compile(r"(?<![a-zA-Z\\])sqrt\s*\(([^()]*)\)")
_PLAIN_NAME = re.compile(r"(?<![a-zA-Z\\])(pi|infinity|inf)(?![a-zA-Z])")
TEXT_COMMAND = (
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|boldsymbol|underline|mbox|operatorname|rm)"
    r"\s*\{([^{}]*)\}"
)

# a choice and its value, as the solutions of contests write it: (C) 12
LABELLED_CHOICE = re.compile(r"\s*\(([A-Z])\)\s+(-?[\d\\$.](?:(?!\([A-Z]\)).)*)", re.DOTALL)
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_SIGNED = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(_SIGNED)
SCIENTIFIC_NUMBER = re.compile(
    rf"({_SIGNED})(?:[eE]|(?:\\times|\\cdot|\*|x)10\^)(?:\{{([+-]?\d+)\}}|([+-]?\d+))"
)
_POWER_OF_TEN = re.compile(r"([+-]?)10\^(?:\{([+-]?\d+)\}|(-?\d+))")
_RATIO = re.compile(rf"({_SIGNED})/({_SIGNED})")
_FRACTION = re.compile(rf"([+-]?)(\d*)\\frac(?:\{{({_SIGNED})\}}|(\d))(?:\{{({_SIGNED})\}}|(\d))")
_MIXED = re.compile(r"([+-]?)(\d+)\s+(\d+)/(\d+)")
_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\(?:overline|bar|dot)(?:\{(\d+)\}|(\d))")
_DOTS = re.compile(r"([+-]?)(\d*)\.(\d*?)(\d+?)\4+(?:\\(?:l|c)?dots|\.\.\.)")

_MULTIPLIERS = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12,
}  # fmt: skip
_UNITS = {
    "cm": "cm centimeter centimeters centimetre centimetres", "mm": "mm millimeter millimeters",
    "km": "km kilometer kilometers kilometre kilometres", "m": "m meter meters metre metres",
    "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles",
    "g": "g gram grams", "kg": "kg kilogram kilograms", "lb": "lb lbs pound pounds £",
    "oz": "oz ounce ounces", "s": "s sec secs second seconds", "min": "min mins minute minutes",
    "h": "h hr hrs hour hours", "day": "day days", "week": "week weeks", "month": "month months",
    "year": "yr yrs year years", "°": "° deg degree degrees", "rad": "rad rads radian radians",
    "dollar": "$ dollar dollars usd", "euro": "€ euro euros eur", "cent": "cent cents",
    "l": "l liter liters litre litres", "ml": "ml milliliter milliliters", "mi/h": "mph",
    "unit": "unit units",
}  # fmt: skip
_UNIT_OF = {word: unit for unit, words in _UNITS.items() for word in words.split()}
_UNIT_WORDS = {*_UNIT_OF, *_MULTIPLIERS, "percent", "per", "square", "sq", "cubic", "cu"}
_TRAILING_TEXT = re.compile(
    rf"(.*?[\d\w}})\]°])\s*((?:{TEXT_COMMAND}\s*)+)(?:\^\s*\{{?([23])\}}?)?", re.DOTALL
)
_TRAILING_WORDS = re.compile(
    r"(.*?[\d})\]])\s*((?:(?<=\s)[a-zA-Z]|[a-zA-Z]{2,})(?:[ /.]+[a-zA-Z]+)*)"
    r"\.?(?:\^\s*\{?([23])\}?)?",
    re.DOTALL,
)


class FormulaTooLargeError(Exception):
    """Raised for an answer that is not evaluated because that may not end in reasonable time."""


@dataclass(frozen=True)
class MathQuantity:
    """Hold an answer without its units.

    `percent`: the answer has a percent sign. `unit`: None if the answer has no known unit.
    """

    text: str
    percent: bool = False
    unit: str | None = None
    factor: int = 1


def normalize_spelling(text: str) -> str:
    """Return the answer in LaTeX's names, without dollar signs, spacing and size commands."""
    text = _ROOTS.sub(lambda match: rf"\sqrt{{{match.group(1) or match.group(2)}}}", text)
    text = text.translate(_SYMBOLS)
    text = text.replace("{,}", ",").replace(r"\%", "%").replace(r"\$", "$")
    if text.startswith((r"\(", r"\[")):
        text = re.sub(r"\\[()\[\]](?!\s*\d*(?:pt|em))", "", text)
    text = _SPACES.sub(
        lambda match: match.group(1) or (" " if match.group(0)[:2] != r"\!" else ""), text
    )
    text = _DEGREES.sub("°", _FRACTIONS.sub(r"\\frac", text)).strip()
    if text.count("$") == 2 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1]
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\log\s*_\s*(?:e(?![a-z])|\{e\})", r"\\ln ", text)
    text = _PLAIN_ROOT.sub(r"\\sqrt{\1}", text.replace("**", "^"))
    text = _PLAIN_NAME.sub(lambda match: r"\pi " if match.group(1) == "pi" else r"\infty ", text)
    text = _PLAIN_FUNCTION.sub(r"\\\1 ", text)
    text = text.strip()
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("..") else text


def join_thousands(text: str) -> str:
    """Return the text with 1,234 written as 1234."""
    return _THOUSANDS.sub(lambda match: re.sub("[, ]", "", match.group(1)), text)


def compute_bracket_depths(text: str) -> list[int]:
    """Return how many brackets are open after each character."""
    return list(accumulate((sign in "([{") - (sign in ")]}") for sign in text))


def remove_spaces(text: str) -> str:
    """Return the text without white space and dollar signs, words in \\text{} unchanged."""
    text = re.sub(r"(?<=\d)\s+(?=\d)", "~", re.sub(TEXT_COMMAND, r"\1", text))  # 1 0 is not 10
    return re.sub(r"[\s$]", "", text).rstrip(".")


def parse_words(text: str) -> str | None:
    """Return an answer of words ("east", "(C)") in a canonical spelling, the letter of "(C) 12";
    None for a formula.
    """
    plain = re.sub(TEXT_COMMAND, r" \1 ", text)
    marked = plain != text
    if (choice := LABELLED_CHOICE.fullmatch(plain)) is not None:
        return choice[1]
    plain = re.sub(r"^[\s(]+|[\s).]+$", "", plain)
    if re.match(r"[+-]?[\d.,/]+(?:\s|$)", plain):  # a number and its unit
        return None
    if not plain or re.search(r"[\\^_=<>{}]", plain) or not re.search(r"[^\W\d_]", plain):
        return None
    plain = re.sub(r"\s+", "" if marked and len(plain) < 3 else " ", plain)
    if re.fullmatch(r"[A-Z]", plain):
        return plain
    is_word = (
        marked
        or re.fullmatch(r"[A-Z]{2,}", plain)  # AB may be a segment or choices, not a product
        or re.search(r"[^\W\d_]{4}|^(?:yes|no|odd|even|all|one|two|six|ten)$", plain, re.I)
    )
    return plain.lower() if is_word else None


def parse_quantity(text: str) -> MathQuantity:
    """Split off a currency sign, a percent sign, and units in words."""
    text, unit = re.sub(r"°\s*[CF]$", "°", text.strip()), None
    money = re.match(r"([+-]?)\s*([$€£])\s*(?=[\d.\\])", text)
    if money:
        text, unit = money.group(1) + text[money.end() :], _UNIT_OF[money.group(2)]
    elif text.endswith(("$", "€", "£")):
        text, unit = text[:-1].rstrip(), _UNIT_OF[text[-1]]
    match = _TRAILING_TEXT.fullmatch(text)
    words, power = "", None
    if match and not match.group(1).endswith(("\\", "text")):
        text, commands, _, power = match.groups()
        words = " ".join(re.findall(TEXT_COMMAND, commands))
    elif match := _TRAILING_WORDS.fullmatch(text):
        if all(word.lower() in _UNIT_WORDS for word in re.split(r"[ /.]+", match.group(2)) if word):
            text, words, power = match.groups()
    names = [word for word in re.split(r"[\s/.]+", words.lower()) if word]
    factor = math.prod(_MULTIPLIERS.get(name, 1) for name in names)
    percent = not {"percent", "%"}.isdisjoint(names)
    known = [_UNIT_OF[name] for name in names if name in _UNIT_OF]
    if known:
        power = power or (
            "2" if {"square", "sq"} & {*names} else "3" if {"cubic", "cu"} & {*names} else None
        )
        unit = "/".join(known) + (f"^{power}" if power else "")
    text = text.strip()
    if text.endswith("°") and not _TRIGONOMETRY.search(text):
        text, unit = text[:-1].rstrip(), "°"
    if text.endswith("%"):
        text, percent = text[:-1].rstrip(), True
    return MathQuantity(text, percent, None if unit == "unit" else unit, factor)


def parse_exact_number(text: str) -> Fraction | None:
    """Return the value of a written number: decimal, fraction, mixed, scientific, repeating; else
    None.

    Raises FormulaTooLargeError for a number of more than MAX_DIGITS digits.
    """
    if match := _MIXED.fullmatch(text.strip()):
        return _make_mixed_number(*match.groups())
    if re.search(r"\d\s+[\d.]", text):
        return None
    text = re.sub(r"\s", "", text)
    while (
        len(text) > 2
        and text[0] + text[-1] in ("{}", "()")
        and not re.search(r"[(){}]", text[1:-1])
    ):
        text = text[1:-1]
    if _DECIMAL.fullmatch(text):
        return _parse_decimal(text)
    if match := SCIENTIFIC_NUMBER.fullmatch(text):
        return _parse_decimal(match.group(1)) * _compute_power_of_ten(
            match.group(2) or match.group(3)
        )
    if match := _POWER_OF_TEN.fullmatch(text):
        return _apply_sign(match.group(1), _compute_power_of_ten(match.group(2) or match.group(3)))
    if match := _RATIO.fullmatch(text):
        return _make_mixed_number("", "", *match.groups())
    if match := _FRACTION.fullmatch(text):
        sign, whole, top, digit, bottom, last = match.groups()
        return _make_mixed_number(sign, whole, top or digit, bottom or last)
    if match := _REPEATING.fullmatch(text) or _DOTS.fullmatch(text):
        sign, whole, start, *block = match.groups()
        return _make_repeating_number(sign, whole, start, "".join(filter(None, block)))
    return None


def _parse_decimal(text: str) -> Fraction:
    if len(text) > MAX_DIGITS:
        raise FormulaTooLargeError(f"a number of {len(text)} digits")
    return Fraction(text if re.search(r"\.\d", text) else text.replace(".", ""))


def _compute_power_of_ten(exponent: str) -> Fraction:
    if len(exponent) > 6 or abs(int(exponent)) > MAX_DIGITS:
        raise FormulaTooLargeError(f"ten to the power of {exponent[:20]}")
    return Fraction(10) ** int(exponent)


def _apply_sign(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def _make_mixed_number(sign: str, whole: str, top: str, bottom: str) -> Fraction | None:
    """Return whole + top / bottom with a sign; None if the fraction divides by 0."""
    numerator, denominator = _parse_decimal(top), _parse_decimal(bottom)
    if not denominator:
        return None
    return _apply_sign(sign, _parse_decimal(whole or "0") + numerator / denominator)


def _make_repeating_number(sign: str, whole: str, start: str, block: str) -> Fraction:
    """Return the value of whole.start and then block without end."""
    value = _parse_decimal(whole + start or "0") + _parse_decimal(block) / (10 ** len(block) - 1)
    return _apply_sign(sign, value / 10 ** len(start))


# At most 200 characters, which bounds both the parsing time and the size of the numbers.
_ARITHMETIC = re.compile(r"[\d\s+\-*/()]{1,200}")
_MAX_ARITHMETIC = 1000  # characters of LaTeX
_ARITHMETIC_SIGNS = (
    (r"\times", "*"), (r"\cdot", "*"), (r"\div", "/"), ("[", "("), ("]", ")"),
)  # fmt: skip
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate_arithmetic(text: str) -> tuple[Fraction, list[int]] | None:
    """Return (exact value, numbers used) of an expression in plain text or LaTeX.

    Return None if the text is no arithmetic expression or divides by 0.
    """
    if len(text) > _MAX_ARITHMETIC:
        return None
    text = re.sub(r"\\frac\{([^{}]+)\}\{([^{}]+)\}", r"((\1)/(\2))", normalize_spelling(text))
    for latex, sign in _ARITHMETIC_SIGNS:
        text = text.replace(latex, sign)
    text = text.strip()
    if not _ARITHMETIC.fullmatch(text) or "**" in text or "//" in text:
        return None
    used: list[int] = []
    try:
        return _evaluate_node(ast.parse(text, mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _evaluate_node(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate_node(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        operands = _evaluate_node(node.left, used), _evaluate_node(node.right, used)
        return _OPERATORS[type(node.op)](*operands)
    raise ValueError(f"not an arithmetic expression: {ast.dump(node)[:60]}")
