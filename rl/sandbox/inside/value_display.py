"""Display values that a candidate sent: short, printable texts, quick to build for any value."""

from __future__ import annotations

import collections
import fractions
from collections.abc import Callable
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
    pieces: list[str] = []
    _show(value, pieces, most, str)
    return make_printable("".join(pieces), most)


def make_printable(text: str, most: int | None = None) -> str:
    """Return the first `most` characters of `text`, with lone surrogates replaced by "?", for files
    and tokenizers.
    """
    return text[:most].encode("utf-8", "replace").decode("utf-8")


def _show(value: Any, pieces: list[str], room: int, write: Callable[[Any], str] = repr) -> int:
    """Append the output of `write` for `value` until `room` characters are used. Return the
    remaining room.
    """
    of = type(value)
    if of in _BRACKETS and (value or of in (list, tuple, dict)):
        return _show_items(value, pieces, room)
    if of is int and value.bit_length() > _LONGEST_NUMBER:
        text = f"<int of {value.bit_length()} bits>"
    elif (
        of is fractions.Fraction
        and max(value.numerator.bit_length(), value.denominator.bit_length()) > _LONGEST_NUMBER
    ):
        text = f"<Fraction of {value.numerator.bit_length()} and {value.denominator.bit_length()} bits>"
    elif (
        of is range
        and max(number.bit_length() for number in (value.start, value.stop, value.step))
        > _LONGEST_NUMBER
    ):
        text = "<range of long ints>"
    else:
        text = write(value[: max(room, 0)] if of in (str, bytes, bytearray) else value)
    pieces.append(text)
    return room - len(text)


def _show_items(value: Any, pieces: list[str], room: int) -> int:
    """Append a container as `_show` does. Each level uses room before the next level, which bounds
    the depth too.
    """
    opening, closing = _BRACKETS[type(value)]
    pieces.append(opening)
    room -= len(opening)
    pairs = value.items() if isinstance(value, dict) else None
    for number, item in enumerate(value if pairs is None else pairs):
        if room <= 0:
            return room
        if number:
            pieces.append(", ")
            room -= 2
        room = _show(item if pairs is None else item[0], pieces, room)
        if pairs is not None:
            pieces.append(": ")
            room = _show(item[1], pieces, room - 2)
    pieces.append(",)" if type(value) is tuple and len(value) == 1 else closing)
    return room - len(closing)
