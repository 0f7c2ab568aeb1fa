"""Matrices once more in the layout that oneDNN reads fastest, for products on a CPU in float32.

The library that torch calls for a plain product there reads the matrix as it lies, anew in each step: on a CPU with AVX-512 that
gave 60 to 95 GFLOP/s for 64 rows where this gives 100 to 113, and 35 against 80 for 16 rows of a large head (one thread).
Small matrices lie in a cache anyway, and large models would take the memory twice: both stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

LEAST = 1 << 18  # numbers of a matrix
MOST = 512 << 20  # bytes of all matrices that a decoder would have twice
_ROWS = 64  # that the layout is made for; it serves any number

# By matrix, so that decoders that share one share this too: (what its version was, the other layout).
_made = WeakTensorKeyDictionary()


def fits(matrices: Iterable[Tensor]) -> bool:
    """Whether a decoder of these may have them twice."""
    mine = [w for w in matrices if _may(w)]
    return 0 < sum(w.nbytes for w in mine) <= MOST


def _may(weight: Tensor) -> bool:
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous() and type(weight) is Tensor
    # An inference tensor does not count its changes, so that a layout of older numbers would not be noticed.
    return plain and weight.numel() >= LEAST and not weight.is_inference() and torch.backends.mkldnn.is_available()


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """x [.., I] times weight [O, I]; None where this matrix stays as it is. The layout is made anew after the matrix was written to."""
    if not _may(weight):
        return None
    version, packed = _made.get(weight, (None, None))
    if version != weight._version:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        _made[weight] = weight._version, packed
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
