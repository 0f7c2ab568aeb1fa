"""Hold lists of numbers as arrays until they are read, and pack arrays, so that moving them between
processes costs little time and few bytes for each number.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

_INT32 = np.iinfo(np.int32)
_LIST_DTYPES = {int: np.int64, float: np.float64}
_LOCK = threading.RLock()  # reentrant: a property may read a field


class ArrayLists:
    """Base of dataclasses with slots, some of whose fields are lists of numbers.

    Such a field may be set as an array (`_set_arrays`). It becomes a list when it is first read.
    """

    __slots__ = ("_arrays",)

    _arrays: dict[str, np.ndarray]

    def __getattr__(self, name: str) -> Any:
        """Return a field that is held as an array as a list. Only an empty slot gets here. Threads
        that read the field at once get the same list.
        """
        if name != "_arrays":
            with _LOCK:
                array = self._find_array(name)
                if array is not None:
                    object.__setattr__(self, name, array.tolist())
                    del self._arrays[name]
        return object.__getattribute__(self, name)

    def _set_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Hold these fields as arrays (1-D)."""
        for name in arrays:
            try:
                object.__delattr__(self, name)
            except AttributeError:  # the slot is empty
                pass
        object.__setattr__(self, "_arrays", dict(arrays))

    def _find_array(self, name: str) -> np.ndarray | None:
        """Return a field that is held as an array; None if it is a list by now. A class whose
        fields may be assigned overrides it.
        """
        return getattr(self, "_arrays", {}).get(name)


def pack_numbers(values: Any) -> Any:
    """Return a list of integers or a list of floats as an array of the narrowest type that holds
    the same numbers (int32, int64, float32, float64). Anything else is returned as it is.
    """
    if isinstance(values, np.ndarray):
        array = values
    elif type(values) is list and values and (kind := type(values[0])) in _LIST_DTYPES:
        if list(map(type, values)).count(kind) < len(values):
            return values
        array = np.asarray(values)
        if array.dtype != _LIST_DTYPES[kind]:  # a number beyond int64
            return values
    else:
        return values
    if array.dtype == np.int64 and array.ndim == 1:
        if not array.size or (array.min() >= _INT32.min and array.max() <= _INT32.max):
            return array.astype(np.int32)
    elif array.dtype == np.float64 and array.ndim == 1:
        with np.errstate(over="ignore"):
            narrow = array.astype(np.float32)
        if narrow.astype(np.float64).tobytes() == array.tobytes():
            return narrow
    return array


def pack_column(array: np.ndarray) -> tuple[np.ndarray | int, int, int]:
    """Return (values, length, number of zeros) of an array: the zeros at its start, as at the
    prompt's positions, are left out. The bits of equal values after them are a number. The length
    of an array that is not float32 [length] is -1: it is returned whole.
    """
    if array.ndim != 1 or not array.size or array.dtype != np.float32:
        return array, -1, 0
    bits = array.view(np.int32)  # tells -0.0 from 0.0
    used = bits != 0
    zeros = int(used.argmax())
    if not used[zeros]:
        return 0, len(array), len(array)
    first = bits[zeros]
    if first == bits[-1] and (bits[zeros:] == first).all():
        return int(first), len(array), zeros
    return array[zeros:], len(array), zeros


def unpack_column(values: np.ndarray | int, length: int, zeros: int) -> np.ndarray:
    """Return the array of `pack_column`."""
    if isinstance(values, np.ndarray) and length in (-1, len(values)):
        return values
    array = np.empty(length, np.float32)
    array[:zeros] = 0
    if isinstance(values, np.ndarray):
        array[zeros:] = values
    else:
        array.view(np.int32)[zeros:] = values
    return array
