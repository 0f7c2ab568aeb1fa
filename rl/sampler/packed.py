"""Matrices once more in the layout that oneDNN reads fastest, for products on a CPU in float32.

The library that torch calls for a plain product there reads the matrix as it lies, anew in each
step: on a CPU with AVX-512 that gave 60 to 95 GFLOP/s for 64 rows where this gives 100 to 113, and
35 against 80 for 16 rows of a large head (one thread). Small matrices lie in a cache anyway, and
large models would take the memory twice: both stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

LEAST = 1 << 18  # numbers of a matrix
MOST = 512 << 20  # bytes of all matrices that a decoder would have twice
_ROWS = 64  # that the layout is made for; it serves any number

# By matrix, so that decoders that share one share this too: (what its version was, the other
# layout).
_made = WeakTensorKeyDictionary()


def fits(matrices: Iterable[Tensor]) -> bool:
    """Whether a decoder of these may have them twice."""
    mine = [w for w in matrices if _may(w)]
    return 0 < sum(w.nbytes for w in mine) <= MOST


def _may(weight: Tensor) -> bool:
    plain = (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and type(weight) is Tensor
    )
    # An inference tensor does not count its changes, so that a layout of older numbers would not be
    # noticed.
    return (
        plain
        and weight.numel() >= LEAST
        and not weight.is_inference()
        and torch.backends.mkldnn.is_available()
    )


def layout(weight: Tensor) -> tuple[int, Tensor] | None:
    """(the matrix's version that this is of, its other layout); None where the matrix stays as it
    is. To be asked again after a change.
    """
    if not _may(weight):
        return None
    made = _made.get(weight)
    if made is None or made[0] != weight._version:
        made = _made[weight] = (
            weight._version,
            torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS),
        )
    return made


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [.., I] times the matrix [O, I] of that layout."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
