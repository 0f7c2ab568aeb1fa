"""Compare a program's value with the expected value.

Both are plain data, compared outside the sandbox.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

TOLERANCE = 1e-6  # of floats, relative and absolute
_MAX_DEPTH = 200
_COLLECTIONS = (list, tuple, set, frozenset, deque)


def compare_exact(value: Any, expected: Any) -> bool:
    """Return whether the values are equal, with equal types of numbers and containers.

    A tuple equals a list of the same items. Texts are compared character by character.
    """
    return _compare_nested(value, expected, _are_equal)


def compare_texts(normalize: Callable[[str], Any], value: Any, expected: Any) -> bool:
    """Compare texts by what `normalize` returns for them; compare other values as `compare_exact`
    does.
    """
    if isinstance(value, str) and isinstance(expected, str):
        return bool(normalize(value) == normalize(expected))
    return compare_exact(value, expected)


def compare_floats(value: Any, expected: Any) -> bool:
    """Compare texts word by word, but accept floats within 1e-6, relative or absolute.

    Two integers have to be equal. A float in place of an expected integer has to round to that
    integer as well.
    """
    if isinstance(value, str) and isinstance(expected, str):
        value_words, expected_words = value.split(), expected.split()
        return len(value_words) == len(expected_words) and all(
            a == b or _are_close_texts(a, b)
            for a, b in zip(value_words, expected_words, strict=True)
        )
    return _compare_nested(value, expected, _is_close)


def compare_unordered(value: Any, expected: Any) -> bool:
    """Compare in any order: lines of texts, or items of a list, tuple, set or deque.

    Each item has to occur equally often.
    """
    if not (isinstance(value, _COLLECTIONS) and isinstance(expected, _COLLECTIONS)):
        return compare_texts(_sort_lines, value, expected)
    counts: Counter[Any] = Counter()
    others: list[Any] = []  # items of `value` without a hash, compared pair by pair
    rest: list[Any] = []  # those of `expected`
    for items, unhashable, sign in ((value, others, 1), (expected, rest, -1)):
        for item in items:
            try:
                counts[_make_key(item)] += sign
            except TypeError:
                unhashable.append(item)
    for item in others:
        match = next((i for i, other in enumerate(rest) if compare_exact(item, other)), None)
        if match is None:
            return False
        rest.pop(match)
    return not rest and not any(counts.values())


def compare_wrapped(value: Any, expected: Any) -> bool:
    """Compare as `compare_floats` does. If `expected` is a list of a single item, also accept that
    item, as the checker of APPS does: some of its problems wrap each result in a list.
    """
    is_wrapped = isinstance(expected, list) and len(expected) == 1
    return compare_floats(value, expected) or (is_wrapped and compare_floats(value, expected[0]))


COMPARERS: dict[str, Callable[[Any, Any], bool]] = {
    "exact": compare_exact,
    # without white space at the ends of lines and of the whole text
    "trimmed": partial(compare_texts, lambda text: _strip_lines(text.strip())),
    "tokens": partial(compare_texts, str.split),  # word by word
    "floats": compare_floats,
    "sets": compare_unordered,
    "wrapped": compare_wrapped,
}


def _make_key(item: Any) -> Any:
    """Return a key that two items share if `compare_exact` holds for them, and only then."""
    if isinstance(item, list | tuple):
        return list, *map(_make_key, item)
    if isinstance(item, set | frozenset):
        return type(item), frozenset(_with_types(item))
    if isinstance(item, dict):
        return dict, frozenset((type(key), key, _make_key(item[key])) for key in item)
    return type(item), item


def _strip_lines(text: str) -> str:
    """Return a text without white space at the ends of lines, and without empty last lines."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(map(str.rstrip, lines)).rstrip("\n")


def _sort_lines(text: str) -> list[list[str]]:
    return sorted(map(str.split, _strip_lines(text).split("\n")))


def _compare_nested(a: Any, b: Any, equal: Callable[[Any, Any], bool], deep: int = 0) -> bool:
    if deep > _MAX_DEPTH:
        return False
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(
            _compare_nested(x, y, equal, deep + 1) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return _with_types(a) == _with_types(b) and all(
            _compare_nested(a[key], b[key], equal, deep + 1) for key in a
        )
    return equal(a, b)


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, set | frozenset) and type(a) is type(b):
        return _with_types(a) == _with_types(b)
    return type(a) is type(b) and bool(a == b)


def _with_types(items: Any) -> set[tuple[type, Any]]:
    """Return the items with their types, since 1, 1.0 and True are the same set item and key."""
    return {(type(item), item) for item in items}


def _is_close(value: Any, expected: Any) -> bool:
    """Return whether two numbers are within the tolerance.

    An expected integer also has to be the integer nearest to the value, which means that an integer
    value has to be equal.
    """
    if bool in (type(value), type(expected)) or not (
        isinstance(value, int | float) and isinstance(expected, int | float)
    ):
        return _are_equal(value, expected)
    try:
        near = value == expected or math.isclose(
            value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE
        )
    except OverflowError:  # an integer beyond every float
        return False
    return near and (isinstance(expected, float) or round(value) == expected)


# A number in the form that programs print; float() also accepts "nan", "1_0" and more.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\Z", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d{1,300}\Z", re.ASCII)  # a longer integer is beyond every float


def _are_close_texts(value: str, expected: str) -> bool:
    """Compare the texts of two numbers, either of which is written as a float.

    Two integers are equal only as texts, which the caller has compared.
    """
    if not (_NUMBER.match(value) and _NUMBER.match(expected)) or (
        value.lstrip("+-").isdigit() and expected.lstrip("+-").isdigit()
    ):
        return False
    a, b = (int(text) if _INTEGER.match(text) else float(text) for text in (value, expected))
    return not math.isinf(a) and not math.isinf(b) and _is_close(a, b)
