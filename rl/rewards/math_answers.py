"""Whether an answer equals the expected one: the rules for equations, lists, intervals, units and
words (docs/rewards.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rl.rewards.math_text import (
    Quantity,
    TooLarge,
    as_words,
    compact,
    exact_number,
    join_thousands,
    read_quantity,
    spell,
)
from rl.rewards.math_values import SECONDS, formulas_equal, load_math_verify, time_limit

MAX_CHARACTERS = 2000  # of an answer that is compared
_MAX_ITEMS = 40  # of a list, or entries of a matrix
_OPEN, _CLOSE = "([{", ")]}"
_MATRIX = re.compile(
    r"\\begin\{([pbBvV]?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}", re.DOTALL
)
_BASE = re.compile(r"(?:\\text)?\{?([0-9A-Z]+)\}?_(?:\{?(?:\\text\s*\{)?(\d+|[a-z]+)\}*)")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)|(?<![a-zA-Z])(?:\\approx|\\equiv)(?![a-zA-Z])")
_NAME = re.compile(
    r"(?:\\?[a-zA-Z]+(?:_(?:\{[^{}]*\}|\w))?'*)(?:\s*\([^()=]*\))?"  # x, \theta, x_{12}, f(x), Area
    r"|\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])+\s*\)"  # (x, y)
    r"|(?:\\(?:text|mathrm|operatorname|overline|angle|triangle|vec|mathbf|hat|bar)\s*\{?[^={}+*/^-]*\}?\s*[A-Za-z]*)"
)
_SYMBOLS = re.compile(r"[a-zA-Z\s+*/()_{}-]+")
_FUNCTION_NAMES = re.compile(
    r"\\(?:frac|sqrt|pi|cdot|times|infty|sin|cos|tan|cot|sec|csc|log|ln|exp|left|right|begin|end|cup|pm|mp)"
)
_AND = re.compile(
    r"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}"
)
# 45' and 1 0, which the parser reads as 45 and as a sum
_NO_FORMULA = re.compile(r"\d\s*'|(?<!_)\d\s+[\d.]")
_REALS = {r"(-\infty,\infty)", r"(-\infty,+\infty)", r"\mathbb{R}", r"\mathbbR", r"\R", r"\Reals", r"\text{allrealnumbers}",
          "allrealnumbers"}  # fmt: skip
_EMPTY = {r"\emptyset", r"\varnothing", r"\{\}", "∅"}


def answers_equal(answer: str, expected: str) -> bool:
    """Whether `answer` is `expected` as mathematics. Raises TooLarge if working it out may not end
    in reasonable time.
    """
    if compact(answer) == compact(expected):
        return True
    if len(answer) > MAX_CHARACTERS:
        raise TooLarge(f"an answer of {len(answer)} characters")
    load_math_verify()
    with time_limit(SECONDS):
        return _readings_equal(spell(answer), spell(expected))


def _readings_equal(answer: str, expected: str) -> bool:
    """1,234 is a number, or two of them: both texts are read in the same way."""
    if compact(answer) == compact(expected):
        return True
    joined = [join_thousands(text) for text in (answer, expected)]
    if _equal(joined[0], joined[1]):
        return True
    # 1,000 is no list
    if joined == [answer, expected] or any(re.search(r",0\d", text) for text in (answer, expected)):
        return False
    return len(split_top(expected, ",")) > 1 and _equal(answer, expected)


def _equal(answer: str, expected: str) -> bool:
    answer, expected = _strip_brackets(answer), _strip_brackets(expected)
    for same in (_REALS, _EMPTY):
        if re.sub(r"\s", "", expected) in same:
            return re.sub(r"\s", "", answer) in same
    if re.fullmatch("[a-zA-Z]", answer) and re.fullmatch("[a-zA-Z]", expected):
        return answer == expected
    words = as_words(expected)
    if words is not None and (said := as_words(answer)) is not None:
        return words == said
    rules: Sequence[Callable[[str, str], bool | None]] = (
        _equal_plus_minus, _equal_lists, _equal_membership, _equal_chains, _equal_sequences, _equal_unions, _equal_matrices,
    )  # fmt: skip
    for rule in rules:
        verdict = rule(answer, expected)
        if verdict is not None:
            return verdict
    return _equal_values(answer, expected)


def split_top(text: str, *separators: str) -> list[str]:
    """Split at separators that stand outside all brackets."""
    parts, depth, begin, place = [], 0, 0, 0
    while place < len(text):
        character = text[place]
        depth += (character in _OPEN) - (character in _CLOSE)
        separator = (
            next((s for s in separators if text.startswith(s, place)), None) if depth == 0 else None
        )
        if separator is not None and not (
            separator[0] == "\\" and text[place + len(separator) :][:1].isalpha()
        ):
            parts.append(text[begin:place])
            place = begin = place + len(separator)
            continue
        place += 1
    return [part.strip() for part in [*parts, text[begin:]]]


def _wrapped(text: str) -> bool:
    """Whether the first bracket closes with the last one."""
    if len(text) < 2 or text[0] not in _OPEN or text[-1] not in _CLOSE:
        return False
    depth = 0
    for place, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0:
            return place == len(text) - 1
    return False


def _strip_brackets(text: str) -> str:
    """Without brackets around all of one value: {5}, (5)."""
    text = text.strip()
    while (
        _wrapped(text)
        and text[0] + text[-1] in ("{}", "()")
        and len(split_top(text[1:-1], ",", ";")) == 1
    ):
        if text[0] == "(" and as_words(text) is not None:
            break
        text = text[1:-1].strip()
    return text


def _sequence(text: str) -> tuple[str, list[str]] | None:
    """(its two brackets, its items) of a tuple, an interval or a set; None if it is none."""
    text = text.strip()
    if text.startswith(r"\{") and text.endswith(r"\}") and _wrapped(text[1:-2] + "}"):
        return "{}", _commas(text[2:-2])
    if _wrapped(text) and text[0] != "{":
        items = split_top(text[1:-1], ",", ";")
        return (text[0] + text[-1], items) if len(items) > 1 else None
    return None


def _commas(text: str) -> list[str]:
    return [item for item in split_top(_AND.sub(",", text), ",", ";") if item]


def _equal_plus_minus(answer: str, expected: str) -> bool | None:
    """a \\pm b is the two values of it, also within a list or set."""
    if not any(sign in text for text in (answer, expected) for sign in (r"\pm", r"\mp")):
        return None
    sides = []
    for text in (answer, expected):
        sequence = _sequence(text)
        items = sequence[1] if sequence is not None and sequence[0] == "{}" else _commas(text)
        if len(items) > _MAX_ITEMS:
            raise TooLarge("a list of too many items")
        sides.append([value for item in items for value in _both_signs(_value_of(item))])
    return _same_items(sides[0], sides[1])


def _both_signs(text: str) -> list[str]:
    if r"\pm" not in text and r"\mp" not in text:
        return [text]
    signs = (("+", "-"), ("-", "+"))
    values = [
        re.sub(r"\\pm(?![a-z])", plus, re.sub(r"\\mp(?![a-z])", minus, text))
        for plus, minus in signs
    ]
    return [re.sub(r"(^|[(,=]\s*)\+", r"\1", value) for value in values]


def _value_of(item: str) -> str:
    """The value of "x = value"; the item itself if it is no such thing."""
    members = _members(item)
    return members[-1] if len(members) == 2 and is_name(members[0]) else item


def _equal_lists(answer: str, expected: str) -> bool | None:
    """Lists without brackets, and sets, in any order. Names of the values count: x = 1, y = 2 is 1,
    2 but not 2, 1.
    """
    sides = []
    for text in (answer, expected):
        sequence = _sequence(text)
        items = sequence[1] if sequence is not None and sequence[0] == "{}" else _commas(text)
        sides.append(
            items if len(items) > 1 or (sequence is not None and sequence[0] == "{}") else []
        )
    if not any(sides):
        return None
    found, wanted = sides[0] or [answer], sides[1] or [expected]
    if len(found) != len(wanted):
        return False
    names = [
        [_members(item)[0] if _value_of(item) != item else "" for item in side]
        for side in (found, wanted)
    ]
    if (
        any(len(set(side)) > 1 for side in names)
        and names[0] != names[1]
        and not all(all(side) for side in names)
    ):
        return all(
            _readings_equal(_value_of(a), _value_of(b)) for a, b in zip(found, wanted, strict=True)
        )
    return _same_items(found, wanted)


def _same_items(found: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether the items are equal in some order."""
    if len(found) != len(wanted):
        return False
    if len(wanted) > _MAX_ITEMS:
        raise TooLarge("a list of too many items")
    left = list(wanted)
    for item in found:
        match = next((i for i, other in enumerate(left) if _readings_equal(item, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _equal_membership(answer: str, expected: str) -> bool | None:
    """x \\in S is S."""
    sides = [split_top(text, r"\in") for text in (answer, expected)]
    if not any(len(side) == 2 and is_name(side[0]) for side in sides):
        return None
    if all(len(side) == 2 for side in sides) and compact(sides[0][0]) != compact(sides[1][0]):
        return False
    return _equal(sides[0][-1], sides[1][-1])


def _members(text: str) -> list[str]:
    """The members of a chain of equalities."""
    marked, places = text, [match for match in _EQUALS.finditer(text)]
    parts, begin = [], 0
    for match in places:
        before = marked[: match.start()]
        if sum(before.count(c) for c in _OPEN) == sum(before.count(c) for c in _CLOSE):
            parts.append(text[begin : match.start()].strip())
            begin = match.end()
    return [*parts, text[begin:].strip()]


def is_name(text: str) -> bool:
    """Whether a text names a quantity: x, x_1, f(x), \\angle ABC, Area."""
    return (
        _NAME.fullmatch(text.strip()) is not None
        and not _FUNCTION_NAMES.match(text.strip())
        and text.strip() not in ("e", "i")
    )


def _letters(text: str) -> set[str]:
    return set(
        re.findall(
            r"[a-zA-Z]",
            re.sub(r"\\[a-zA-Z]+", lambda m: " ", re.sub(r"\\text\s*\{[^{}]*\}", "", text)),
        )
    ) - {"e", "i"}


def _equal_chains(answer: str, expected: str) -> bool | None:
    """x = value is the value, as is value = x; each member of a chain has to be it too, but a name
    or a formula of other letters.
    """
    found, wanted = [[member for member in _members(text) if member] for text in (answer, expected)]
    if len(found) < 2 and len(wanted) < 2:
        return None
    if len(wanted) > 2:
        return _equal(answer, wanted[-1]) if compact(wanted[-1]) else False
    if len(found) == 2 and is_name(found[1]) and not is_name(found[0]):
        found = found[::-1]
    if len(wanted) == 2 and is_name(wanted[1]) and not is_name(wanted[0]):
        wanted = wanted[::-1]
    if len(wanted) == 2:
        return _equal_equation(found, wanted, answer, expected)
    gold = wanted[0]
    letters = _letters(gold)
    first = found[0]
    free = is_name(first) or (
        _SYMBOLS.fullmatch(first) is not None
        and bool(_letters(first))
        and not _letters(first) <= letters
    )
    members = found[1:] if free else found
    for place, member in enumerate(members):
        last = place == len(members) - 1
        foreign = bool(_letters(member) - letters) and (free or place > 0) and not last
        if not foreign and not _equal(member, gold):
            return False
    return True


def _equal_equation(found: list[str], wanted: list[str], answer: str, expected: str) -> bool:
    """What is expected is an equation: an assignment, whose value is enough, or another, which is
    compared as a whole.
    """
    if is_name(wanted[0]) or exact_number(read_quantity(wanted[0]).text) is not None:
        if len(found) == 1:
            return _equal(found[0], wanted[1])
        if compact(found[0]) == compact(wanted[0]):
            return _equal_chains("=".join(found), wanted[1]) is True
        if len(found) > 2:
            return False
    return len(found) == 2 and formulas_equal(answer, expected)


def _equal_sequences(answer: str, expected: str) -> bool | None:
    """Tuples, points and intervals: the same brackets, and the same values in order."""
    found, wanted = _sequence(answer), _sequence(expected)
    if found is None and wanted is None:
        return None
    if found is None or wanted is None or found[0] != wanted[0] or len(found[1]) != len(wanted[1]):
        return False
    if len(wanted[1]) > _MAX_ITEMS:
        raise TooLarge("a list of too many items")
    return all(_equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


def _equal_unions(answer: str, expected: str) -> bool | None:
    found, wanted = split_top(answer, r"\cup"), split_top(expected, r"\cup")
    if len(found) == len(wanted) == 1:
        return None
    return _same_items(found, wanted)


def _equal_matrices(answer: str, expected: str) -> bool | None:
    """Matrices and columns, in round or square brackets: the same entries. Determinants are
    formulas.
    """
    found, wanted = _MATRIX.fullmatch(answer.strip()), _MATRIX.fullmatch(expected.strip())
    if wanted is None or wanted.group(1) in ("vmatrix", "Vmatrix"):
        return None
    if found is None or found.group(1) in ("vmatrix", "Vmatrix"):
        return False
    sides = [
        [row.split("&") for row in re.split(r"\\\\", side.group(2)) if row.strip()]
        for side in (found, wanted)
    ]
    if [len(row) for row in sides[0]] != [len(row) for row in sides[1]]:
        return False
    entries = [[entry.replace(r"\phantom", "") for row in side for entry in row] for side in sides]
    if len(entries[0]) > _MAX_ITEMS:
        raise TooLarge("a matrix of too many entries")
    return all(
        _readings_equal(a.strip(), b.strip()) for a, b in zip(entries[0], entries[1], strict=True)
    )


def _equal_values(answer: str, expected: str) -> bool:
    """Single values: numbers exactly, with their units; numbers of a base digit by digit; formulas
    by sympy.
    """
    bases = [_BASE.fullmatch(re.sub(r"\s", "", text)) for text in (answer, expected)]
    if any(bases):
        return all(bases) and bases[0].groups() == bases[1].groups()  # type: ignore[union-attr]  # all of them are matches
    found, wanted = read_quantity(answer), read_quantity(expected)
    if found.unit is not None and wanted.unit is not None and found.unit != wanted.unit:
        return False
    numbers = [exact_number(side.text) for side in (found, wanted)]
    if numbers[0] is None or numbers[1] is None:
        return _equal_formulas(found, wanted)
    values = [
        n * side.factor / (100 if side.percent else 1)
        for n, side in zip(numbers, (found, wanted), strict=True)
        if n is not None
    ]
    # A percent sign may be left out, as a unit may; one that was not expected makes a hundredth of
    # the number.
    return values[0] == values[1] or (
        wanted.percent and not found.percent and numbers[0] == numbers[1]
    )


def _equal_formulas(found: Quantity, wanted: Quantity) -> bool:
    if found.factor != wanted.factor or (found.percent and not wanted.percent):
        return False
    if not re.search(r"[\w\\]", found.text) or _NO_FORMULA.search(found.text):
        return False
    return compact(found.text) == compact(wanted.text) or formulas_equal(found.text, wanted.text)
