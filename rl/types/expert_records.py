"""Encode the experts of each token (router replay) as text, for stored rollouts and checkpoints.

The text is "ROWSxCOLUMNS:", then the base64 of the zlib stream of the int16 numbers, little-endian,
row by row.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from typing import Any

import numpy as np

_KIND = np.dtype("<i2")


def experts_as_text(experts: np.ndarray) -> str:
    """Encode an int16 array [tokens, layers with experts * experts per token] as text."""
    packed = zlib.compress(np.ascontiguousarray(experts, _KIND).tobytes())
    return f"{experts.shape[0]}x{experts.shape[1]}:{base64.b64encode(packed).decode('ascii')}"


def experts_from_text(text: Any) -> np.ndarray:
    """Decode the text of `experts_as_text` to an int16 array. Raises ValueError for other text."""
    try:
        shape, _, packed = text.partition(":")
        rows, columns = (int(number) for number in shape.split("x"))
        if min(rows, columns) < 1:
            raise ValueError
        size = rows * columns * _KIND.itemsize
        reader = zlib.decompressobj()
        # at most the announced size
        data = reader.decompress(base64.b64decode(packed, validate=True), size + 1)
        if len(data) != size or not reader.eof:
            raise ValueError
        experts = np.frombuffer(data, _KIND).reshape(rows, columns).astype(np.int16)
        if experts.min() < -1:
            raise ValueError
    except (AttributeError, TypeError, ValueError, OverflowError, binascii.Error, zlib.error):
        raise ValueError(
            f"no record of experts as rollouts hold it (ROWSxCOLUMNS:base64): {str(text)[:60]!r}"
        ) from None
    return experts
