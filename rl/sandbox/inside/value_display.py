"""Display values that a candidate sent: short, printable texts, quick to build for any value."""

from __future__ import annotations

import collections
import fractions
from collections.abc import Callable, Iterator
from typing import Any

_LONGEST_NUMBER = 2000  # bits, about 600 digits; Python itself prints 4300 digits at most
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}"), frozenset: ("frozenset({", "})"), collections.deque: ("deque([", "])"),
    dict: ("{", "}"), collections.Counter: ("Counter({", "})"), collections.OrderedDict: ("OrderedDict({", "})"),
    collections.defaultdict: ("defaultdict(None, {", "})"),
}  # fmt: skip


def show(value: Any, most: int = 200) -> str:
    """Return the first `most` characters of str(value) for plain data. A number too long to print
    is described by its bit length.
    """
    text = ""
    for piece in _iter_pieces(value, most, str):
        text += piece
        if len(text) >= most:
            break
    return make_printable(text, most)


def make_printable(text: str, most: int | None = None) -> str:
    """Return the first `most` characters of `text`, with lone surrogates replaced by "?", for files
    and tokenizers.
    """
    return text[:most].encode("utf-8", "replace").decode("utf-8")


def _iter_pieces(value: Any, most: int, write: Callable[[Any], str] = repr) -> Iterator[str]:
    """Yield the output of `write` for `value` in pieces, of which the first `most` characters are
    needed. Each level yields its bracket before the next level, which bounds the depth too.
    """
    of = type(value)
    if of not in _BRACKETS or not (value or of in (list, tuple, dict)):
        yield _show_scalar(value, most, write)
        return
    opening, closing = _BRACKETS[of]
    yield opening
    for number, item in enumerate(value):
        if number:
            yield ", "
        yield from _iter_pieces(item, most)
        if isinstance(value, dict):
            yield ": "
            yield from _iter_pieces(value[item], most)
    yield ",)" if of is tuple and len(value) == 1 else closing


def _show_scalar(value: Any, most: int, write: Callable[[Any], str]) -> str:
    of = type(value)
    if of is int and value.bit_length() > _LONGEST_NUMBER:
        return f"<int of {value.bit_length()} bits>"
    if of is fractions.Fraction:
        bits = value.numerator.bit_length(), value.denominator.bit_length()
        if max(bits) > _LONGEST_NUMBER:
            return f"<Fraction of {bits[0]} and {bits[1]} bits>"
    if of is range:
        numbers = (value.start, value.stop, value.step)
        if max(number.bit_length() for number in numbers) > _LONGEST_NUMBER:
            return "<range of long ints>"
    return write(value[:most] if of in (str, bytes, bytearray) else value)
