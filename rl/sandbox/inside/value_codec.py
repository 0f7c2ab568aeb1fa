"""Encode values as JSON that includes their types, and decode them.

Only plain data is encoded, hence no code of the sender travels with it. A subclass of a plain type
is encoded as its base (an `int` subclass with an `__eq__` arrives as an int). Other objects are
encoded as references to the object in the sending process. Scalars are JSON scalars; every other
value is a list with the type tag as its first item.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import itertools
import re
import time
from collections.abc import Callable
from typing import Any

from rl.sandbox.inside.value_display import show

MAX_DEPTH = 400
# Bounds of single numbers, enforced by `encode` and `decode`: within them no constructor takes
# longer than reading the text.
INT_BITS = 1 << 22
FRACTION_BITS = 1 << 16  # of numerator and denominator: reducing the fraction takes quadratic time
DECIMAL_DIGITS = 1 << 17  # and the largest exponent
_NAME_LENGTH, _FAMILY_LENGTH = 1000, 200
_KEYS_AT_ONCE, _SECONDS, _SECONDS_PER_KEY = 256, 0.5, 5e-6
_SMALL = 1 << 63
_CONTAINERS: dict[str, type] = {
    "l": list,
    "t": tuple,
    "s": set,
    "f": frozenset,
    "q": collections.deque,
    "d": dict,
    "C": collections.Counter,
    "O": collections.OrderedDict,
    "D": collections.defaultdict,
}
_TAGS: dict[type, str] = {of: tag for tag, of in _CONTAINERS.items()}
_TEXTS: dict[str, tuple[type, Callable[[Any], str], re.Pattern[str], Callable[[str], Any]]] = {
    "i": (int, hex, re.compile(r"-?0x[0-9a-f]+"), lambda text: int(text, 16)),
    "B": (bytes, bytes.hex, re.compile(r"(?:[0-9a-f]{2})*"), bytes.fromhex),
    "A": (bytearray, bytearray.hex, re.compile(r"(?:[0-9a-f]{2})*"), bytearray.fromhex),
    "M": (decimal.Decimal, decimal.Decimal.__str__,
          re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?(?:[eE][+-][0-9]{1,7})?|Infinity|NaN)"), decimal.Decimal),
    "dt": (datetime.datetime, datetime.datetime.isoformat, re.compile(r"[0-9T:.+-]{1,48}"), datetime.datetime.fromisoformat),
    "da": (datetime.date, datetime.date.isoformat, re.compile(r"[0-9-]{1,12}"), datetime.date.fromisoformat),
    "ti": (datetime.time, datetime.time.isoformat, re.compile(r"[0-9:.+-]{1,40}"), datetime.time.fromisoformat),
}  # fmt: skip
# Types that may be values. Only plain types: a decoded value may get called, and `eval` is a
# built-in too.
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    list,
    tuple,
    dict,
    set,
    frozenset,
    range,
    type(None),
)
_TYPES: dict[str, type] = {of.__name__: of for of in _PLAIN}


class NotPlain(TypeError):
    """Raised with the reason if a value cannot be encoded."""


class ForgedMessageError(ValueError):
    """Raised for a message that `encode` and an honest candidate never write: outside of the
    grammar or beyond its bounds.
    """


def encode(value: Any, reference: Callable[[Any], list[Any]] | None = None, depth: int = 0) -> Any:
    """Return JSON for `value`. `reference` encodes objects that are not plain data; without it they
    raise NotPlain.
    """
    of = type(value)
    if value is None or of is bool or of is str or of is float:
        return value
    if of is int:
        return value if -_SMALL < value < _SMALL else ["i", hex(_check_bounds(value))]
    if depth > MAX_DEPTH:
        raise NotPlain(f"nested deeper than {MAX_DEPTH}")
    if of in _TAGS:
        return _encode_container(of, value, reference, depth)
    if of is complex:
        return ["c", value.real, value.imag]
    if of is range:
        return ["r", *[encode(int.__add__(n, 0)) for n in (value.start, value.stop, value.step)]]
    if of is fractions.Fraction:
        return ["R", encode(_check_bounds(value).numerator), encode(value.denominator)]
    for key, (base, text, _, _) in _TEXTS.items():
        if of is base:
            return [key, text(_check_bounds(value))]
    return _encode_other(value, of, reference, depth)


def _encode_container(of: Any, value: Any, reference: Any, depth: int) -> list[Any]:
    """Encode an instance of the container `of` or of its subclass, by the methods of `of`. The keys
    and values of a mapping alternate.
    """
    items = of.__iter__(value)
    if issubclass(of, dict):
        items = itertools.chain.from_iterable(dict.items(value))
    encoded: list[Any] = [_TAGS[of]]
    for item in items:  # no comprehension: in Python 3.11 it is a frame more for each level
        encoded.append(encode(item, reference, depth + 1))
    return encoded


def _encode_other(value: Any, of: type, reference: Any, depth: int) -> Any:
    """Encode a subclass by the methods of its base, any other object by reference."""
    mro = type.__dict__["__mro__"].__get__(of)
    for base in mro[1:]:
        if base is int:
            return encode(int.__add__(value, 0), reference, depth)
        if base is float:
            return float.__add__(value, 0.0)
        if base is str:
            return "".join(str.__iter__(value))
        is_plain_dict = base is dict and of.__module__ != "__main__"
        if is_plain_dict or (base in _TAGS and not issubclass(base, dict)):
            return _encode_container(base, value, reference, depth)
        if base is bytes:
            return ["B", bytes.hex(value)]
    if of.__module__ == "builtins" and of.__name__ in ("dict_keys", "dict_values", "dict_items"):
        return ["l", *[encode(item, reference, depth + 1) for item in value]]
    if of.__module__ == "numpy" and hasattr(of, "tolist"):
        return encode(value.tolist(), reference, depth + 1)
    if of is type and value in _TYPES.values():
        return ["type", value.__name__]
    if reference is None:
        raise NotPlain(f"a {of.__name__} is not plain data")
    return ["ref", *reference(value)]


def adds_names(of: type) -> bool:
    """Return whether a class derives from a container and adds public names, such as the fields of
    a named tuple, which are lost if an instance is encoded as the container.
    """
    added = False
    for base in type.__dict__["__mro__"].__get__(of):
        if base in _TAGS:
            return added
        added = added or any(not name.startswith("_") for name in vars(base))
    return False


def _check_bounds(value: Any) -> Any:
    """Return `value`. Raises NotPlain if it is a number beyond the bounds."""
    if isinstance(value, int) and value.bit_length() > INT_BITS:
        raise NotPlain(f"an int of {value.bit_length()} bits, at most {INT_BITS} can be sent")
    if (
        isinstance(value, fractions.Fraction)
        and max(value.numerator.bit_length(), value.denominator.bit_length()) > FRACTION_BITS
    ):
        raise NotPlain(
            f"a Fraction with more than {FRACTION_BITS} bits in its numerator or denominator"
        )
    if isinstance(value, decimal.Decimal) and not _is_bounded_decimal(value):
        raise NotPlain(
            f"a signaling Decimal, or a Decimal with more than {DECIMAL_DIGITS} digits "
            f"or a larger exponent"
        )
    return value


def _is_bounded_decimal(value: decimal.Decimal) -> bool:
    _, digits, exponent = value.as_tuple()
    if isinstance(exponent, str):  # infinity or nan; a nan may have digits
        return exponent in ("F", "n") and len(digits) <= (exponent == "F")
    return (
        len(digits) <= DECIMAL_DIGITS
        and abs(value.adjusted()) <= DECIMAL_DIGITS
        and abs(exponent) <= 2 * DECIMAL_DIGITS
    )


def decode(
    value: Any, referent: Callable[[list[Any]], Any] | None = None, longest_range: int | None = None
) -> Any:
    """Return the value that `encode` wrote.

    `referent`: returns the object for the output of `reference` in `encode`; without it a reference
    raises NotPlain. `longest_range`: total length allowed for all ranges; longer ranges raise
    NotPlain, since a short text would become a long list. Raises ForgedMessageError on any other content that
    `encode` does not write, from any sender: no constructor is called on an unchecked text.
    """
    try:
        return _Decoder(referent, longest_range).read(value, 0)
    except RecursionError:
        raise ForgedMessageError("nested too deep") from None


def read_reference(rest: Any) -> tuple[int, str, str, list[str], bool]:
    """Return (number, kind, name, family, can be called) of an object of the candidate. Raises
    ForgedMessageError on any other content.
    """
    if len(rest) != 5:
        raise ForgedMessageError(f"a reference of {len(rest)} items, expected 5")
    number, kind, name, family, can_call = rest
    well_formed = (
        type(number) is int
        and 0 <= number < _SMALL
        and kind in ("class", "object")
        and type(can_call) is bool
    )
    if not (well_formed and is_name(name) and is_family(family)):
        raise ForgedMessageError(f"no reference: {show(rest, 80)}")
    return number, kind, name, family, can_call


def is_name(name: Any) -> bool:
    return type(name) is str and len(name) <= _NAME_LENGTH


def is_family(family: Any) -> bool:
    return (
        type(family) is list
        and len(family) <= _FAMILY_LENGTH
        and all(is_name(name) for name in family)
    )


class _Decoder:
    """Decode a single message; its bounds apply to the whole message."""

    def __init__(self, referent: Callable[[list[Any]], Any] | None, longest_range: int | None):
        self.referent, self.remaining_range_length = referent, longest_range
        self.keys, self.seconds = 0, 0.0

    def read(self, value: Any, depth: int) -> Any:
        of = type(value)
        if value is None or of is str or of is float or of is bool:
            return value
        if of is int and -_SMALL < value < _SMALL:
            return value
        if of is not list or not value or type(value[0]) is not str or depth > MAX_DEPTH:
            raise ForgedMessageError(f"no encoded value: {show(value, 80)}")
        tag = value[0]
        if tag in _CONTAINERS:
            items = []  # no comprehension, which would be a further frame for each level
            for item in value[1:]:
                items.append(self.read(item, depth + 1))
            is_map = issubclass(_CONTAINERS[tag], dict)
            return self._map(tag, items) if is_map else self._sequence(tag, items)
        if tag in _TEXTS:
            return self._text(tag, value)
        if tag == "r":
            return self._range(self._numbers(value, 3, depth))
        if tag == "R":
            return self._fraction(*self._numbers(value, 2, depth))
        if tag == "c" and len(value) == 3 and type(value[1]) is float and type(value[2]) is float:
            return complex(value[1], value[2])
        if tag == "type" and len(value) == 2 and type(value[1]) is str and value[1] in _TYPES:
            return _TYPES[value[1]]
        if tag == "ref":
            if self.referent is not None:
                return self.referent(value[1:])
            raise NotPlain(f"a {read_reference(value[1:])[2][:100]} is not plain data")
        raise ForgedMessageError(f"no encoded value: {show(value, 80)}")

    def _sequence(self, tag: str, items: list[Any]) -> Any:
        if tag not in ("s", "f"):
            return _CONTAINERS[tag](items)
        unique: set[Any] = set()
        self._insert(unique.update, items)
        return unique if tag == "s" else frozenset(unique)

    def _map(self, tag: str, items: list[Any]) -> Any:
        if len(items) % 2:
            raise ForgedMessageError("a mapping with a key that has no value")
        pairs = list(zip(items[::2], items[1::2], strict=True))
        mapping: dict[Any, Any] = {}
        self._insert(mapping.update, pairs)
        return collections.defaultdict(None, mapping) if tag == "D" else _CONTAINERS[tag](mapping)

    def _insert(self, update: Callable[[Any], None], keys: list[Any]) -> None:
        """Insert keys into a set or mapping in small batches and bound the time: a hostile sender
        can choose many keys with colliding hashes.
        """
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            batch, begun = keys[start : start + _KEYS_AT_ONCE], time.thread_time()
            try:
                update(batch)
            except TypeError as error:
                raise ForgedMessageError(f"a key without a hash: {error}") from error
            self.keys += len(batch)
            self.seconds += time.thread_time() - begun
            if self.seconds > _SECONDS + _SECONDS_PER_KEY * self.keys:
                raise ForgedMessageError("keys chosen to have colliding hashes")

    def _text(self, tag: str, value: list[Any]) -> Any:
        if len(value) != 2 or type(value[1]) is not str or not _TEXTS[tag][2].fullmatch(value[1]):
            raise ForgedMessageError(f"no encoded value: {show(value, 80)}")
        if (
            tag == "i"
            and len(value[1]) > INT_BITS // 4 + 3
            or tag == "M"
            and len(value[1]) > 2 * DECIMAL_DIGITS + 20
        ):
            raise ForgedMessageError(f"a number of {len(value[1])} characters")
        try:
            return _check_bounds(_TEXTS[tag][3](value[1]))
        except (ValueError, OverflowError, NotPlain) as error:
            raise ForgedMessageError(f"no encoded value: {show(value, 80)} ({error})") from error

    def _numbers(self, value: list[Any], count: int, depth: int) -> list[int]:
        numbers = (
            [self.read(item, depth + 1) for item in value[1:]] if len(value) == count + 1 else []
        )
        if len(numbers) != count or not all(type(number) is int for number in numbers):
            raise ForgedMessageError(f"no encoded value: {show(value, 80)}")
        return numbers

    def _range(self, numbers: list[int]) -> range:
        if numbers[2] == 0:
            raise ForgedMessageError("a range with step 0")
        if self.remaining_range_length is not None:
            start, stop, step = numbers
            self.remaining_range_length -= max(0, -((start - stop) // step))
            if self.remaining_range_length < 0:
                raise NotPlain("a range over more numbers than could be sent")
        return range(*numbers)

    def _fraction(self, above: int, below: int) -> fractions.Fraction:
        if below <= 0 or max(above.bit_length(), below.bit_length()) > FRACTION_BITS:
            raise ForgedMessageError(
                f"no fraction of numbers with {above.bit_length()} and {below.bit_length()} bits"
            )
        return fractions.Fraction(above, below)


def assign(target: Any, source: Any) -> None:
    """Copy the contents of `source` into the mutable `target`, to reproduce the changes that a call
    made to an argument.
    """
    if isinstance(target, list | bytearray) and type(target) is type(source):
        target[:] = source
    elif isinstance(target, dict | set) and type(target) is type(source):
        target.clear()
        target.update(source)
    elif isinstance(target, collections.deque) and isinstance(source, collections.deque):
        target.clear()
        target.extend(source)
