"""Encode Python objects as messages between ranks, with arrays beside the pickle, which are copied
once.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

_ALIGNMENT = 64  # bytes, of an array in a message
_MIN_ARRAY_BYTES = 1024  # of an array beside the pickle: a smaller one is copied in less time


def pack_message(item: Any) -> torch.Tensor:
    """Return a pickled object, uint8 [bytes]: a table of sizes (int64: that of the pickle, then of
    each array), the pickle, and the arrays, which are copied once.
    """
    arrays: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        array = buffer.raw()
        if array.nbytes < _MIN_ARRAY_BYTES:
            return True
        arrays.append(array)
        return False

    packed = pickle.dumps(item, pickle.HIGHEST_PROTOCOL, buffer_callback=keep_inside)
    parts = [memoryview(packed), *arrays]
    sizes = np.array([len(parts), *map(len, parts)], np.int64)
    ends = _place_parts(sizes)
    message = np.empty(int(ends[-1]), np.uint8)
    message[: sizes.nbytes] = sizes.view(np.uint8)
    for begin, part in zip(ends.tolist(), parts, strict=False):
        message.data[begin : begin + len(part)] = part
    return torch.from_numpy(message)


def _place_parts(sizes: np.ndarray) -> np.ndarray:
    """Return the offsets of the parts in a message of this table, and the message's length."""
    aligned = -(-np.array([sizes.nbytes, *sizes[1:]]) // _ALIGNMENT) * _ALIGNMENT
    return np.cumsum(aligned)


def unpack_message(payload: torch.Tensor) -> Any:
    """Return the object of `pack_message`. Its arrays are copies: an array that is kept does not
    keep the message.
    """
    message = payload.numpy()
    count = int(message[:8].view(np.int64)[0])
    sizes = message[: 8 * (1 + count)].view(np.int64)
    packed, *buffers = (
        message[begin : begin + size]
        for begin, size in zip(_place_parts(sizes), sizes[1:], strict=False)
    )
    return pickle.loads(packed.data, buffers=[buffer.copy() for buffer in buffers])
