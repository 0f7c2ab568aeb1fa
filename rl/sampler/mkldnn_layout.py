"""Keep a second copy of matrices in the layout that oneDNN reads fastest, for float32 products on a
CPU.

A plain torch product reads the matrix in its stored layout and reorders it in each step. On a CPU
with AVX-512 (1 thread) that gave 60 to 95 GFLOP/s for 64 rows against 100 to 113 with this layout,
and 35 against 80 for 16 rows of a large head. Small matrices fit into the CPU's cache and large
models would need twice the memory: both keep the plain layout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

MIN_ELEMENTS = 1 << 18  # elements of a matrix
MAX_BYTES = 512 << 20  # bytes of all matrices that a decoder may hold twice
_TUNED_ROWS = 64  # row count that the layout is tuned for; it works for any number

# Keyed by matrix, so that decoders that share a matrix share its second layout: (version of the
# matrix, second layout).
_layouts = WeakTensorKeyDictionary()


def fits_budget(matrices: Iterable[Tensor]) -> bool:
    """Return whether a decoder of these matrices may hold them in a second layout."""
    matching = [w for w in matrices if _is_supported(w)]
    return 0 < sum(w.nbytes for w in matching) <= MAX_BYTES


def _is_supported(weight: Tensor) -> bool:
    """Return whether this matrix is supported: a large, contiguous float32 CPU tensor."""
    plain = (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and type(weight) is Tensor
    )
    # An inference tensor has no version counter, so an outdated layout would not be noticed.
    return (
        plain
        and weight.numel() >= MIN_ELEMENTS
        and not weight.is_inference()
        and torch.backends.mkldnn.is_available()
    )


def get_layout(weight: Tensor) -> tuple[int, Tensor] | None:
    """Return (version of the matrix, its second layout); None if the matrix keeps the plain layout.

    Call it again after the matrix has changed.
    """
    if not _is_supported(weight):
        return None
    made = _layouts.get(weight)
    if made is None or made[0] != weight._version:
        made = _layouts[weight] = (
            weight._version,
            torch.ops.mkldnn._reorder_linear_weight(weight, _TUNED_ROWS),
        )
    return made


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [.., I] times the matrix [O, I] in its second layout, plus `bias`: [.., O]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
