"""Declare the range of numbers that a setting accepts, in the annotation of its field, and check
it.

    learning_rate: Annotated[float | None, Range(0, 1, above=True)] = None

A value from the command line, a recipe or config.json is checked when it is read, and the error
names its place. `check_ranges` in rl.config.fields, which every settings class calls, checks an
instance that Python code creates. A bound is either inherent to the quantity (a share, a discount)
or lies where no sensible value remains: a number beyond it is a typing mistake that would otherwise
appear late or never.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any

_MAX_NUMBER_CHARS = 40  # characters of a number in a message


@dataclass(frozen=True)
class Range:
    """Hold an interval from `low` to `high`. `above` excludes `low`, `below` excludes `high`. `why`
    explains the limit or gives an example value. NaN and infinity are in no range.
    """

    low: float
    high: float
    above: bool = False
    below: bool = False
    why: str = ""

    def contains(self, value: float) -> bool:
        """Return whether `value` is in the range."""
        return (self.low < value if self.above else self.low <= value) and (
            value < self.high if self.below else value <= self.high
        )

    def describe_violation(self, value: float) -> str:
        """Return the text of the requirement that `value` violates: both bounds of a narrow range,
        the violated bound of a wide range.
        """
        if self.high <= _MAX_NARROW_BOUND:
            ends = _ENDS[self.above, self.below]
            text = f"lies {ends.format(_format_number(self.low), _format_number(self.high))}"
        elif value > self.high:
            text = f"is at most {_format_number(self.high)}"
        elif self.above:
            text = "is positive" if self.low == 0 else f"is above {_format_number(self.low)}"
        else:
            text = f"is at least {_format_number(self.low)}"
        return text + (f" ({self.why})" if self.why else "")


_MAX_NARROW_BOUND = 10.0
_ENDS = {  # by whether the bounds are excluded
    (False, False): "from {} to {}",
    (False, True): "from {} to below {}",
    (True, True): "between {} and {}",
    (True, False): "above {} and up to {}",
}
MANY = 10**9
LARGE = 1e9

SIZE = Range(1, MANY)
POSITIVE, FINITE = Range(0, LARGE, above=True), Range(-LARGE, LARGE)
WEIGHT = Range(0, 1e6)  # coefficient of a loss term
# AdamW changes every weight by about the learning rate: a rate of 1 destroys the model.
RATE = Range(0, 1, above=True)

Count = Annotated[int, Range(0, MANY)]
Size = Annotated[int, SIZE]
Share = Annotated[float, Range(0, 1)]
BelowOne = Annotated[float, Range(0, 1, below=True)]
Inside = Annotated[float, Range(0, 1, above=True, below=True)]
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, Range(0, LARGE)]
Weight = Annotated[float, WEIGHT]
Seconds = Annotated[float, Range(0, 1e7, above=True)]  # up to four months


def _format_number(value: float) -> str:
    """Format a number for a message; long integers are replaced by their number of digits."""
    text = str(value) if isinstance(value, Integral) else f"{value:.10g}"
    return text if len(text) <= _MAX_NUMBER_CHARS else f"a number of {len(text)} digits"


def get_range(annotation: Any) -> Range | None:
    """Return the range declared in `Annotated[..., Range(...)]`, or None."""
    if typing.get_origin(annotation) is not Annotated:
        return None
    return next(
        (extra for extra in typing.get_args(annotation)[1:] if isinstance(extra, Range)), None
    )


def strip_annotation(annotation: Any) -> Any:
    """Return the annotation without its `Annotated` metadata."""
    return (
        typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    )


def get_number_types(annotation: Any) -> set[type]:
    """Return the number types (int, float) that values of this annotation hold; bool does not
    count.
    """
    annotation = strip_annotation(annotation)
    if annotation in (int, float):
        return {annotation}
    parts = () if typing.get_origin(annotation) is typing.Literal else typing.get_args(annotation)
    return set().union(*map(get_number_types, parts))


def find_range_error(value: Any, allowed: Range, whole: bool) -> str | None:
    """Return the problem of `value` (a number, None, or a tuple), such as "is at least 0, got -1",
    or None if it is valid.

    Strings and None are accepted. A bool is rejected, although it is a number in Python. `whole`:
    only integers are accepted.
    """
    if isinstance(value, (tuple, list)):
        return next(
            (
                text
                for item in value
                if (text := find_range_error(item, allowed, whole)) is not None
            ),
            None,
        )
    if isinstance(value, bool) or (
        whole and isinstance(value, Real) and not isinstance(value, Integral)
    ):
        return f"is a {'whole ' if whole else ''}number, got {value}"
    if not isinstance(value, Real):
        return None
    number = typing.cast(float, value)
    return (
        None
        if allowed.contains(number)
        else f"{allowed.describe_violation(number)}, got "
        f"{_format_number(number) if isinstance(value, Integral) else value}"
    )
