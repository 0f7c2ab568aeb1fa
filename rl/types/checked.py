"""Numbers are looked at where they enter: what is no number, not finite or out of range is a
ValueError that says what to give.
"""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np

from rl.errors import BadRequestError

_LARGEST = 3.4028234663852886e38  # of float32, in which losses and the optimizer compute


def number(
    name: str,
    value: Any,
    wanted: str,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    open_ends: bool = False,
) -> float:
    """`value` as a float. Raises ValueError, saying `wanted`, unless it is a number in [least,
    most] that is finite in float32.

    `open_ends`: the ends do not belong to the range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise BadRequestError(f"{name} is {wanted}, got {_shortly(value)} ({type(value).__name__})")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if isinstance(value, numbers.Integral) and abs(int(value)) >= 2**63:
        found = math.inf  # torch takes no such integer for a number
    inside = least < found < most if open_ends else least <= found <= most
    if not abs(found) <= _LARGEST or not inside:
        raise BadRequestError(f"{name} is {wanted}, got {_shortly(value)}")
    return found


def whole(
    name: str, value: Any, wanted: str, *, least: int | None = None, most: int | None = None
) -> int:
    """`value` as an int. Raises ValueError, saying `wanted`, unless it is a whole number in [least,
    most].
    """
    if isinstance(value, bool):
        raise BadRequestError(f"{name} is {wanted}, got {value}")
    try:
        found = operator.index(value)
    except TypeError:
        raise BadRequestError(
            f"{name} is {wanted}, got {_shortly(value)} ({type(value).__name__})"
        ) from None
    if (least is not None and found < least) or (most is not None and found > most):
        raise BadRequestError(f"{name} is {wanted}, got {_shortly(found)}")
    return found


def switch(name: str, value: Any) -> bool:
    """`value` as a bool. Raises ValueError unless it is True or False (or 1, 0, None)."""
    if (
        value is None
        or isinstance(value, bool | numbers.Integral)
        and value in (0, 1)
        or type(value).__name__ in ("bool", "bool_")
    ):
        return bool(value)
    raise BadRequestError(
        f"{name} is True or False, got {_shortly(value)} ({type(value).__name__})"
    )


def target_ids(where: str, targets: np.ndarray, vocabulary: int) -> None:
    """Raises ValueError, naming the first, unless all of `targets` [N] or [N, K] lie in [0,
    vocabulary).
    """
    if targets.size and (targets.min() < 0 or targets.max() >= vocabulary):
        wrong = targets[(targets < 0) | (targets >= vocabulary)][0]
        raise BadRequestError(
            f"{where}: target_tokens holds the id {wrong}; the model's ids are 0 to {vocabulary - 1}"
        )


def _shortly(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
