"""Values as JSON that says their types, and back: plain data alone, so that nothing of the sender's code comes with it.

A subclass of a plain type travels as its base (an `int` with its own `__eq__` arrives as an int), what is no plain data as a
reference to the object where it lives. Scalars are JSON's own; the rest is a list whose first item says the type.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
from collections.abc import Callable
from typing import Any

DEEPEST = 400
_SMALL = 1 << 63
_SEQUENCES: dict[str, type] = {"l": list, "t": tuple, "s": set, "f": frozenset, "q": collections.deque}
_TAGS: dict[type, str] = {of: tag for tag, of in _SEQUENCES.items()}
_MAPS: dict[str, type] = {"d": dict, "C": collections.Counter, "O": collections.OrderedDict, "D": collections.defaultdict}
_MAP_TAGS: dict[type, str] = {of: tag for tag, of in _MAPS.items()}
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "i": (int, hex, lambda text: int(text, 16)),
    "B": (bytes, bytes.hex, bytes.fromhex),
    "A": (bytearray, bytearray.hex, bytearray.fromhex),
    "M": (decimal.Decimal, decimal.Decimal.__str__, decimal.Decimal),
    "R": (fractions.Fraction, fractions.Fraction.__str__, fractions.Fraction),
    "dt": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "da": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "ti": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
}
# Types as values, plain ones alone: what is decoded may get called, and `eval` is a built-in as well.
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, range, type(None))
_TYPES: dict[str, type] = {of.__name__: of for of in _PLAIN}


class NotPlain(TypeError):
    """A value that cannot travel, and why."""


def encode(value: Any, reference: Callable[[Any], list[Any]] | None = None, deep: int = 0) -> Any:
    """JSON for `value`. `reference` gives it for what is no plain data; without it that is NotPlain."""
    of = type(value)
    if value is None or of is bool or of is str or of is float:
        return value
    if of is int:
        return value if -_SMALL < value < _SMALL else ["i", hex(value)]
    if deep > DEEPEST:
        raise NotPlain(f"nested deeper than {DEEPEST}")
    tag = _TAGS.get(of)
    if tag is not None:
        return [tag, *[encode(item, reference, deep + 1) for item in value]]
    if of in _MAP_TAGS:
        return _encode_map(_MAP_TAGS[of], value, reference, deep)
    if of is complex:
        return ["c", value.real, value.imag]
    if of is range:
        return ["r", value.start, value.stop, value.step]
    for key, (base, text, _) in _TEXTS.items():
        if of is base:
            return [key, text(value)]
    return _encode_other(value, of, reference, deep)


def _encode_map(tag: str, value: dict[Any, Any], reference: Any, deep: int) -> list[Any]:
    items: list[Any] = [tag]
    for key, item in dict.items(value):
        items += [encode(key, reference, deep + 1), encode(item, reference, deep + 1)]
    return items


def _encode_other(value: Any, of: type, reference: Any, deep: int) -> Any:
    """Subclasses by their base's own reading; anything else by reference."""
    mro = type.__dict__["__mro__"].__get__(of)
    for base in mro[1:]:
        if base is int:
            return encode(int.__add__(value, 0), reference, deep)
        if base is float:
            return float.__add__(value, 0.0)
        if base is str:
            return "".join(str.__iter__(value))
        if base is dict and of.__module__ != "__main__":
            return _encode_map("d", value, reference, deep)
        if base in _TAGS:
            return [_TAGS[base], *[encode(item, reference, deep + 1) for item in base.__iter__(value)]]
        if base is bytes:
            return ["B", bytes.hex(value)]
    views = {"dict_keys": "l", "dict_values": "l", "dict_items": "l"}
    if of.__module__ == "builtins" and of.__name__ in views:
        return ["l", *[encode(item, reference, deep + 1) for item in value]]
    if of.__module__ == "numpy" and hasattr(of, "tolist"):
        return encode(value.tolist(), reference, deep + 1)
    if of is type and value in _TYPES.values():
        return ["type", value.__name__]
    if reference is None:
        raise NotPlain(f"a {of.__name__} is no plain data")
    return ["ref", *reference(value)]


def decode(value: Any, referent: Callable[..., Any] | None = None) -> Any:
    """The value that `encode` wrote. `referent(*arguments)` gives the object of a reference. Raises ValueError on anything else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ValueError(f"no encoded value: {str(value)[:80]}")
    tag, rest = value[0], value[1:]
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](decode(item, referent) for item in rest)
    if tag in _MAPS:
        pairs = {decode(rest[i], referent): decode(rest[i + 1], referent) for i in range(0, len(rest), 2)}
        return collections.defaultdict(None, pairs) if tag == "D" else _MAPS[tag](pairs)
    if tag == "c":
        return complex(*rest)
    if tag == "r":
        return range(*rest)
    if tag in _TEXTS:
        return _TEXTS[tag][2](*rest)
    if tag == "type":
        return _TYPES[rest[0]]
    if tag == "ref" and referent is not None:
        return referent(*rest)
    raise ValueError(f"no encoded value: {str(value)[:80]}")


def assign(target: Any, source: Any) -> None:
    """Give the mutable `target` the contents of `source`, in place: what a call did to an argument."""
    if isinstance(target, list | bytearray) and type(target) is type(source):
        target[:] = source
    elif isinstance(target, dict | set) and type(target) is type(source):
        target.clear()
        target.update(source)
    elif isinstance(target, collections.deque) and isinstance(source, collections.deque):
        target.clear()
        target.extend(source)
