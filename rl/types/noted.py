"""A record of each token's experts (router replay) as text: what stored rollouts and checkpoints
hold of it.

"ROWSxCOLUMNS:" and then, in base64, the zlib stream of its int16 numbers, little end first, row by
row.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any

import numpy as np

_KIND = np.dtype("<i2")


def experts_as_text(experts: np.ndarray) -> str:
    """int16 [tokens, layers with experts * experts a token] as one word."""
    packed = zlib.compress(np.ascontiguousarray(experts, _KIND).tobytes())
    return f"{experts.shape[0]}x{experts.shape[1]}:{base64.b64encode(packed).decode('ascii')}"


def experts_from_text(text: Any) -> np.ndarray:
    """The array that `experts_as_text` wrote. ValueError for whatever else."""
    try:
        shape, _, packed = text.partition(":")
        rows, columns = (int(number) for number in shape.split("x"))
        if min(rows, columns) < 1:
            raise ValueError
        size = rows * columns * _KIND.itemsize
        reader = zlib.decompressobj()
        # no more than was promised
        data = reader.decompress(base64.b64decode(packed, validate=True), size + 1)
        if len(data) != size or not reader.eof:
            raise ValueError
        found = np.frombuffer(data, _KIND).reshape(rows, columns).astype(np.int16)
        if found.min() < -1:
            raise ValueError
    except (AttributeError, TypeError, ValueError, OverflowError, binascii.Error, zlib.error):
        raise ValueError(
            f"no record of experts as rollouts hold it (ROWSxCOLUMNS:base64): {str(text)[:60]!r}"
        ) from None
    return found
