"""Validate numbers at the API boundary: raise ValueError, with the expected value, for anything
that is not a number, not finite or out of range.
"""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from rl.errors import BadRequestError

_LARGEST = 3.4028234663852886e38  # the largest float32; losses and the optimizer compute in float32


def validate_number(
    name: str,
    value: Any,
    expected: str,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    open_ends: bool = False,
) -> float:
    """Return `value` as a float.

    Raises ValueError, with the text `expected`, unless `value` is a number in [minimum, maximum]
    that is finite in float32. open_ends: exclude both ends of the range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise BadRequestError(
            f"{name} is {expected}, got {shorten(value)} ({type(value).__name__})"
        )
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if isinstance(value, numbers.Integral) and abs(int(value)) >= 2**63:
        result = math.inf  # torch does not accept such an integer as a number
    inside = minimum < result < maximum if open_ends else minimum <= result <= maximum
    if not abs(result) <= _LARGEST or not inside:
        raise BadRequestError(f"{name} is {expected}, got {shorten(value)}")
    return result


def validate_integer(
    name: str,
    value: Any,
    expected: str,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
) -> int:
    """Return `value` as an int.

    Raises ValueError, with the text `expected`, unless `value` is a whole number in [minimum,
    maximum].
    """
    if isinstance(value, bool):
        raise BadRequestError(f"{name} is {expected}, got {value}")
    try:
        result = operator.index(value)
    except TypeError:
        raise BadRequestError(
            f"{name} is {expected}, got {shorten(value)} ({type(value).__name__})"
        ) from None
    if not minimum <= result <= maximum:
        raise BadRequestError(f"{name} is {expected}, got {shorten(result)}")
    return result


def validate_bool(name: str, value: Any) -> bool:
    """Return `value` as a bool. Raises ValueError unless it is True or False (or 1, 0, None)."""
    if (
        value is None
        or isinstance(value, bool | numbers.Integral)
        and value in (0, 1)
        or type(value).__name__ in ("bool", "bool_")
    ):
        return bool(value)
    raise BadRequestError(f"{name} is True or False, got {shorten(value)} ({type(value).__name__})")


def validate_target_ids(where: str, targets: np.ndarray, vocabulary: int) -> None:
    """Check that all of `targets`, shape [N] or [N, K], are in [0, vocabulary).

    Raises ValueError, with the first wrong id, otherwise.
    """
    if targets.size and (targets.min() < 0 or targets.max() >= vocabulary):
        wrong = targets[(targets < 0) | (targets >= vocabulary)][0]
        raise BadRequestError(
            f"{where}: target_tokens holds the id {wrong}; the model's ids are 0 to "
            f"{vocabulary - 1}"
        )


@dataclass(frozen=True, slots=True)
class ParameterBounds:
    """Hold the values that a number may have: from `minimum` to `maximum`, and not strictly inside
    `gap`. `expected` describes them.
    """

    expected: str
    minimum: float = -math.inf
    maximum: float = math.inf
    gap: tuple[float, float] | None = None
    whole: bool = False  # whether only integers are values

    def validate(self, name: str, value: Any) -> None:
        """Raise ValueError unless `value` is one of these numbers."""
        check = validate_integer if self.whole else validate_number
        number = check(name, value, self.expected, minimum=self.minimum, maximum=self.maximum)
        if self.gap is not None and self.gap[0] < number < self.gap[1]:
            raise BadRequestError(f"{name} is {self.expected}, got {shorten(value)}")


def bounded_field(
    default: Any,
    expected: str,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    gap: tuple[float, float] | None = None,
) -> Any:
    """Return a field of numbers with these bounds; integers if its default is no float."""
    whole = not isinstance(default, float)
    bounds = ParameterBounds(expected, minimum, maximum, gap, whole)
    return field(default=default, metadata={"bounds": bounds})


def validate_fields(instance: Any) -> None:
    """Raise ValueError unless each field of `bounded_field` has its default or is in its bounds."""
    for item in fields(instance):
        value = getattr(instance, item.name)
        if "bounds" in item.metadata and value is not item.default:
            item.metadata["bounds"].validate(item.name, value)


def shorten(value: Any, limit: int = 60) -> str:
    """Return repr(value), cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
