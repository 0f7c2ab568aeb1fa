"""Decide whether an answer equals the expected answer.

The rules for equations, lists, intervals, units and words are in docs/rewards.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rl.rewards.math_formulas import COMPARE_SECONDS, formulas_equal, load_math_verify, time_limit
from rl.rewards.math_text import (
    LABELLED_CHOICE,
    TEXT_COMMAND,
    FormulaTooLargeError,
    MathQuantity,
    compute_bracket_depths,
    join_thousands,
    normalize_spelling,
    parse_exact_number,
    parse_quantity,
    parse_words,
    remove_spaces,
)

MAX_CHARACTERS = 2000  # of an answer that is compared
_MAX_ITEMS = 40  # of a list, or entries of a matrix
_OPEN, _CLOSE = "([{", ")]}"
_MATRIX = re.compile(
    r"\\begin\{([pbBvV]?matrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}", re.DOTALL
)
_BASE = re.compile(r"(?:\\text)?\{?([0-9A-Z]+)\}?_(?:\{?(?:\\text\s*\{)?(\d+|[a-z]+)\}*)")
_SIGNS = re.compile(r"\\(?:pm|mp)(?![a-z])")  # \pm and \mp, not \pmod
# Separators for `split_top`. A command ends where its letters end: \\in does not begin \\infty.
_ITEMS = "[,;]"
_EQUALS = r"(?<![<>!:=])=(?!=)|(?<![a-zA-Z])(?:\\approx|\\equiv)(?![a-zA-Z])"
_RELATION = re.compile(r"(<=?|>=?|\\(?:[lg]t|[lg]e(?:q(?:q|slant)?)?)(?![a-zA-Z]))")
_STRICT = ("<", ">", r"\lt", r"\gt")
_IN, _UNION = (rf"\\{command}(?![^\W\d_])" for command in ("in", "cup"))
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
    r"(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|\\(?:text|mbox|textrm|mathrm)\s*\{\s*,?\s*(?:and|or)(?![a-zA-Z])([^{}]*)\}"
)
# 45' and 1 0, which the parser reads as 45 and as a sum
_NO_FORMULA = re.compile(r"\d\s*'|(?<!_)\d\s+[\d.]")
_SCALE = re.compile(r"°\s*(?:\\[a-z]+\s*\{\s*)?([CF])\s*\}?$")  # of a temperature
# Texts of which the parser computes a product, a ratio or a difference
_LETTER, _ANGLE = re.compile("[a-zA-Z]"), re.compile(r"\\angle\s*([A-Z]{3})")
_CLOCK, _DATE = re.compile(r"\d{1,2}:[0-5]\d"), re.compile(r"\d{4}-\d\d-\d\d")
_REALS = {
    r"(-\infty,\infty)", r"(-\infty,+\infty)", r"\mathbb{R}", r"\mathbbR", r"\R", r"\Reals",
    r"\text{allrealnumbers}", "allrealnumbers",
}  # fmt: skip
_EMPTY = {r"\emptyset", r"\varnothing", r"\{\}", "∅"}


def answers_equal(answer: str, expected: str) -> bool:
    """Return whether `answer` equals `expected` mathematically.

    Raises FormulaTooLargeError if the comparison may not end in reasonable time.
    """
    if remove_spaces(answer) == remove_spaces(expected):
        return True
    if len(answer) > MAX_CHARACTERS:
        raise FormulaTooLargeError(f"an answer of {len(answer)} characters")
    load_math_verify()
    with time_limit(COMPARE_SECONDS):
        return _equal_readings(normalize_spelling(answer), normalize_spelling(expected))


def _equal_readings(answer: str, expected: str) -> bool:
    """Compare both readings of commas, applied to both texts: 1,234 is a number, or two numbers."""
    if remove_spaces(answer) == remove_spaces(expected):
        return True
    without_commas = [join_thousands(text) for text in (answer, expected)]
    if _equal(*without_commas):
        return True
    # 1,000 is not a list
    if without_commas == [answer, expected] or any(
        re.search(r",0\d", text) for text in (answer, expected)
    ):
        return False
    return len(split_top(expected, ",")) > 1 and _equal(answer, expected)


def _equal(answer: str, expected: str) -> bool:
    answer, expected = _strip_brackets(answer), _strip_brackets(expected)
    if not answer:
        return False
    for synonyms in (_REALS, _EMPTY):
        if re.sub(r"\s", "", expected) in synonyms:
            return re.sub(r"\s", "", answer) in synonyms
    if _DATE.fullmatch(expected):
        return answer == expected
    for pattern in (_LETTER, _CLOCK):
        if pattern.fullmatch(expected) and pattern.fullmatch(answer):
            return answer.lstrip("0") == expected.lstrip("0")
    angles = [_ANGLE.fullmatch(text) for text in (answer, expected)]
    if angles[0] and angles[1]:
        return angles[0].group(1) in (angles[1].group(1), angles[1].group(1)[::-1])
    choices = [
        LABELLED_CHOICE.fullmatch(re.sub(TEXT_COMMAND, r" \1 ", text))
        for text in (answer, expected)
    ]
    if choices[0] and choices[1]:
        return choices[0][1] == choices[1][1] and _equal(choices[0][2], choices[1][2])
    expected_words = parse_words(expected)
    if expected_words is not None and (answer_words := parse_words(answer)) is not None:
        return expected_words == answer_words
    rules: Sequence[Callable[[str, str], bool | None]] = (
        _equal_plus_minus, _equal_intervals, _equal_membership, _equal_lists, _equal_chains,
        _equal_sequences, _equal_unions, _equal_matrices,
    )  # fmt: skip
    for rule in rules:
        verdict = rule(answer, expected)
        if verdict is not None:
            return verdict
    return _equal_values(answer, expected)


def split_top(text: str, separator: str) -> list[str]:
    """Split at the matches of the pattern `separator` outside all brackets."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"[(\[{{)\]}}]|{separator}", text):
        token = match.group()
        if token in _OPEN or token in _CLOSE:
            depth += 1 if token in _OPEN else -1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [part.strip() for part in [*parts, text[start:]]]


def _is_bracketed(text: str) -> bool:
    """Return whether the first bracket closes with the last character."""
    *before, last = compute_bracket_depths(text) or [1]
    return text[:1] in tuple(_OPEN) and last == 0 and 0 not in before


def _strip_brackets(text: str) -> str:
    """Remove brackets around a single value: {5}, (5)."""
    text = text.strip()
    while (
        _is_bracketed(text)
        and text[0] + text[-1] in ("{}", "()")
        and len(split_top(text[1:-1], _ITEMS)) == 1
    ):
        if text[0] == "(" and parse_words(text) is not None:
            break
        text = text[1:-1].strip()
    return text


def _parse_sequence(text: str) -> tuple[str, list[str]] | None:
    """Return (its two brackets, its items) of a tuple, interval or set; None for any other text."""
    text = text.strip()
    if text.startswith(r"\{") and text.endswith(r"\}") and _is_bracketed(text[1:-2] + "}"):
        return "{}", _split_items(text[2:-2])
    if _is_bracketed(text) and text[0] != "{":
        items = split_top(text[1:-1], _ITEMS)
        return (text[0] + text[-1], items) if len(items) > 1 else None
    return None


def _split_list(text: str) -> tuple[bool, list[str]]:
    """Return (whether the text is a set, the items of the set or of the list without brackets)."""
    sequence = _parse_sequence(text)
    if sequence is not None and sequence[0] == "{}":
        return True, sequence[1]
    return False, _split_items(text)


def _check_count(items: Sequence[str], kind: str = "a list of too many items") -> None:
    if len(items) > _MAX_ITEMS:
        raise FormulaTooLargeError(kind)


def _split_items(text: str) -> list[str]:
    return [item for item in split_top(_AND.sub(r",\1", text), _ITEMS) if item]


def _equal_plus_minus(answer: str, expected: str) -> bool | None:
    """Compare a \\pm b as its two values, also within a list or set."""
    if not _SIGNS.search(f"{answer} {expected}"):
        return None
    sides = []
    for text in (answer, expected):
        _, items = _split_list(text)
        _check_count(items)
        sides.append([v for item in items for v in _expand_signs(_split_assignment(item)[1])])
    return _same_items(*sides)


def _expand_signs(text: str) -> list[str]:
    if not _SIGNS.search(text):
        return [text]
    signs = (("+", "-"), ("-", "+"))
    values = [
        re.sub(r"\\pm(?![a-z])", plus, re.sub(r"\\mp(?![a-z])", minus, text))
        for plus, minus in signs
    ]
    return [re.sub(r"(^|[(,=]\s*)\+", r"\1", value) for value in values]


def _split_assignment(item: str) -> tuple[str, str]:
    """Return (x, value) of "x = value"; ("", item) of any other item."""
    match split_top(item, _EQUALS):
        case [name, value] if is_name(name):
            return name, value
    return "", item


def _equal_lists(answer: str, expected: str) -> bool | None:
    """Compare lists without brackets, and sets, in any order.

    Names of the values count: x = 1, y = 2 is 1, 2 but not 2, 1. x = 1, 2 has only one name.
    """
    lists = [_split_list(text) for text in (answer, expected)]
    sides = [items if is_set or len(items) > 1 else [] for is_set, items in lists]
    if not any(sides):
        return None
    sides = [sides[0] or [answer], sides[1] or [expected]]
    if len(sides[0]) != len(sides[1]):
        return False
    names, values = (
        [[_split_assignment(item)[part] for item in side] for side in sides] for part in (0, 1)
    )
    if len({*names[0], *names[1]} - {""}) < 2:
        return _same_items(*values)
    if names[0] == names[1] or all(map(all, names)):
        return _same_items(*sides)
    is_shared = names[1][0] and not any(names[1][1:])  # x = 1, 2 is x = 1, x = 2
    expected_names = names[1][:1] * len(names[1]) if is_shared else names[1]
    return all(
        name in ("", expected_name) or not expected_name
        for name, expected_name in zip(names[0], expected_names, strict=True)
    ) and all(map(_equal_readings, *values))


def _same_items(answer_items: Sequence[str], expected_items: Sequence[str]) -> bool:
    """Return whether the items are equal in some order."""
    if len(answer_items) != len(expected_items):
        return False
    _check_count(expected_items)
    remaining = list(expected_items)
    for item in answer_items:
        match = next((i for i, other in enumerate(remaining) if _equal_readings(item, other)), None)
        if match is None:
            return False
        del remaining[match]
    return True


def _equal_membership(answer: str, expected: str) -> bool | None:
    """Compare x \\in S as S."""
    sides = [
        split_top(text, _IN) if len(_split_items(text)) == 1 else [text]
        for text in (answer, expected)
    ]
    if not any(len(side) == 2 and is_name(side[0]) for side in sides):
        return None
    if len({remove_spaces(side[0]) for side in sides if len(side) == 2}) > 1:
        return False
    return _equal(sides[0][-1], sides[1][-1])


def _equal_intervals(answer: str, expected: str) -> bool | None:
    """Compare an inequality with an interval: 1 < x \\le 3 and (1, 3]."""
    sides = [_convert_inequalities(text) for text in (answer, expected)]
    if not any(sides) or all(map(_RELATION.search, (answer, expected))):
        return None
    return _equal(sides[0] or answer, sides[1] or expected)


def _convert_inequalities(text: str) -> str | None:
    """Return x < 1 or x > 3 as x \\in a union of intervals; None for any other text."""
    intervals: list[str] = []
    names: set[str] = set()
    for item in _split_items(text):
        members = [member.strip() for member in _RELATION.split(item)]
        if len({relation[0] == ">" or relation[1:2] == "g" for relation in members[1::2]}) != 1:
            return None
        if members[1][0] == ">" or members[1][1:2] == "g":
            members.reverse()
        match members:
            case [low, first, name, second, high] if is_name(name):
                pass
            case [name, second, high] if is_name(name) and not is_name(high):
                low, first = r"-\infty", "<"
            case [low, first, name] if is_name(name) and not is_name(low):
                second, high = "<", r"\infty"
            case _:
                return None
        brackets = ["()"[i] if r in _STRICT else "[]"[i] for i, r in enumerate((first, second))]
        intervals.append(f"{brackets[0]}{low},{high}{brackets[1]}")
        names.add(name)
    return rf"{names.pop()} \in " + r"\cup".join(intervals) if len(names) == 1 else None


def is_name(text: str) -> bool:
    """Return whether a text names a quantity: x, x_1, f(x), \\angle ABC, Area."""
    text = text.strip()
    return (
        bool(_NAME.fullmatch(text)) and not _FUNCTION_NAMES.match(text) and text not in ("e", "i")
    )


def _find_letters(text: str) -> set[str]:
    plain = re.sub(r"\\[a-zA-Z]+", " ", re.sub(r"\\text\s*\{[^{}]*\}", "", text))
    return set(re.findall(r"[a-zA-Z]", plain)) - {"e", "i"}


def _equal_chains(answer: str, expected: str) -> bool | None:
    """Compare chains of equalities. x = value and value = x are the value.

    Each other member of the chain must equal the expected value too, except for names and formulas
    in other letters.
    """
    answer_members, expected_members = _split_chain(answer), _split_chain(expected)
    if len(answer_members) < 2 and len(expected_members) < 2:
        return None
    if len(expected_members) > 2:
        return bool(remove_spaces(expected_members[-1])) and _equal(answer, expected_members[-1])
    if len(expected_members) == 2:
        return _equal_equation(answer_members, expected_members, answer, expected)
    gold = expected_members[0]
    letters = _find_letters(gold)
    first = answer_members[0]
    free = is_name(first) or bool(_SYMBOLS.fullmatch(first) and _find_letters(first) - letters)
    members = answer_members[1:] if free else answer_members
    compared = [  # the last, the first if it is no name, and the others without other letters
        member
        for position, member in enumerate(members, start=free)
        if member is members[-1] or position == 0 or not _find_letters(member) - letters
    ]
    return all(_equal(member, gold) for member in compared)


def _split_chain(text: str) -> list[str]:
    """Return the members of a chain of equalities, those of value = x as x = value."""
    members = [member for member in split_top(text, _EQUALS) if member]
    is_reversed = len(members) == 2 and is_name(members[1]) and not is_name(members[0])
    return members[::-1] if is_reversed else members


def _equal_equation(
    answer_members: list[str], expected_members: list[str], answer: str, expected: str
) -> bool:
    """Compare with an expected equation.

    For an expected assignment, its value is enough. Any other equation is compared as a whole.
    """
    if (
        is_name(expected_members[0])
        or parse_exact_number(parse_quantity(expected_members[0]).text) is not None
    ):
        if len(answer_members) == 1:
            return _equal(answer_members[0], expected_members[1])
        if remove_spaces(answer_members[0]) == remove_spaces(expected_members[0]):
            return _equal_chains("=".join(answer_members), expected_members[1]) is True
        if len(answer_members) > 2:
            return False
    return len(answer_members) == 2 and formulas_equal(answer, expected)


def _equal_sequences(answer: str, expected: str) -> bool | None:
    """Compare tuples, points and intervals: the same brackets, and equal values in order."""
    sequences = [_parse_sequence(answer), _parse_sequence(expected)]
    match sequences:
        case [None, None]:
            return None
        case [(brackets, items), (expected_brackets, expected_items)] if (
            brackets == expected_brackets and len(items) == len(expected_items)
        ):
            _check_count(expected_items)
            return all(map(_equal, items, expected_items))
    return False


def _equal_unions(answer: str, expected: str) -> bool | None:
    sides = [split_top(text, _UNION) for text in (answer, expected)]
    return None if max(map(len, sides)) == 1 else _same_items(*sides)


def _parse_matrix(text: str) -> list[list[str]] | None:
    """Return the rows of a matrix or column, in round or square brackets; None for any other text.
    Determinants are formulas.
    """
    match = _MATRIX.fullmatch(text.strip())
    if match is None or match.group(1) in ("vmatrix", "Vmatrix"):
        return None
    rows = re.split(r"\\\\(?:\s*\[-?[\d.]+ ?(?:pt|em|ex|mm|cm)\])?", match.group(2))
    return [row.replace(r"\phantom", "").split("&") for row in rows if row.strip()]


def _equal_matrices(answer: str, expected: str) -> bool | None:
    """Compare matrices and columns by their entries."""
    rows, expected_rows = _parse_matrix(answer), _parse_matrix(expected)
    if expected_rows is None:
        return None
    if rows is None or [*map(len, rows)] != [*map(len, expected_rows)]:
        return False
    entries, expected_entries = (
        [entry.strip() for row in side for entry in row] for side in (rows, expected_rows)
    )
    _check_count(entries, "a matrix of too many entries")
    return all(map(_equal_readings, entries, expected_entries))


def _equal_values(answer: str, expected: str) -> bool:
    """Compare single values.

    Numbers are compared exactly, with their units; numbers with a base digit by digit; formulas by
    sympy.
    """
    bases = [_BASE.fullmatch(re.sub(r"\s", "", text)) for text in (answer, expected)]
    if any(bases):
        digits = [match and match.groups() for match in bases]
        return digits[0] == digits[1]
    scales = [match[1] for text in (answer, expected) if (match := _SCALE.search(text))]
    sides = [parse_quantity(answer), parse_quantity(expected)]
    if len({side.unit for side in sides} - {None}) > 1 or len(set(scales)) > 1:
        return False
    numbers = [parse_exact_number(side.text) for side in sides]
    if None in numbers:
        return _equal_formulas(*sides)
    values = [
        n * side.factor / (100 if side.percent else 1)
        for n, side in zip(numbers, sides, strict=True)
        if n is not None
    ]
    # A percent sign or a unit may be omitted. An unexpected percent sign divides the number by 100.
    return values[0] == values[1] or (
        sides[1].percent and not sides[0].percent and numbers[0] == numbers[1]
    )


def _equal_formulas(answer: MathQuantity, expected: MathQuantity) -> bool:
    if answer.factor != expected.factor or (answer.percent and not expected.percent):
        return False
    if not re.search(r"[\w\\]", answer.text) or _NO_FORMULA.search(answer.text):
        return False
    return remove_spaces(answer.text) == remove_spaces(expected.text) or formulas_equal(
        answer.text, expected.text
    )
