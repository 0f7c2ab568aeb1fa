"""Is what a program gave what was expected? On plain data, outside the sandbox."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

TOLERANCE = 1e-6  # of floats, relative and absolute
_DEEPEST = 200


def exact(value: Any, expected: Any) -> bool:
    """Equal with equal types of numbers and containers, but a tuple is as good as a list. Of texts: character by character."""
    return _same(value, expected, lambda a, b: type(a) is type(b) and a == b)


def trimmed(value: Any, expected: Any) -> bool:
    """Texts line by line, without spaces at the ends of lines and empty lines at the end. Else as exact."""
    if isinstance(value, str) and isinstance(expected, str):
        return _lines(value) == _lines(expected)
    return exact(value, expected)


def tokens(value: Any, expected: Any) -> bool:
    """Texts word by word, whatever the space between. Else as exact."""
    if isinstance(value, str) and isinstance(expected, str):
        return value.split() == expected.split()
    return exact(value, expected)


def floats(value: Any, expected: Any) -> bool:
    """As tokens, but two numbers are equal within 1e-6, relative or absolute; ints and floats alike."""
    if isinstance(value, str) and isinstance(expected, str):
        ours, theirs = value.split(), expected.split()
        return len(ours) == len(theirs) and all(a == b or _near_texts(a, b) for a, b in zip(ours, theirs, strict=True))
    return _same(value, expected, _near)


def sets(value: Any, expected: Any) -> bool:
    """In any order: lines of texts, items of a list (each as often)."""
    if isinstance(value, str) and isinstance(expected, str):
        return sorted(line.split() for line in _lines(value)) == sorted(line.split() for line in _lines(expected))
    if isinstance(value, Mapping) or isinstance(expected, Mapping):
        return exact(value, expected)
    try:
        left = list(expected)
        for item in value:
            found = next((i for i, other in enumerate(left) if exact(item, other)), None)
            if found is None:
                return False
            left.pop(found)
    except TypeError:
        return exact(value, expected)
    return not left


COMPARERS: dict[str, Callable[[Any, Any], bool]] = {"exact": exact, "trimmed": trimmed, "tokens": tokens, "floats": floats, "sets": sets}


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _same(a: Any, b: Any, equal: Callable[[Any, Any], bool], deep: int = 0) -> bool:
    if deep > _DEEPEST:
        return False
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y, equal, deep + 1) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key], equal, deep + 1) for key in a)
    return equal(a, b)


def _near(a: Any, b: Any) -> bool:
    numbers = (int, float)
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, numbers) and isinstance(b, numbers)):
        return type(a) is type(b) and bool(a == b)
    try:
        return a == b or math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:
        return False


# A number as programs print it; float() itself takes "nan", "1_0" and more.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\Z", re.ASCII)


def _near_texts(a: str, b: str) -> bool:
    return bool(_NUMBER.match(a) and _NUMBER.match(b)) and _near(float(a), float(b))
