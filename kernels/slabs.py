"""How the vocabulary and the tokens are cut so that no [T, V] tensor exists, and how many bytes
that takes.
"""

from __future__ import annotations

from collections.abc import Iterator

# dlogits of this many columns at a time: wide enough for cuBLAS, and 8192 x 16384 in bf16 is 256
# MiB.
SLAB_COLUMNS = 16_384
SLAB_ELEMENTS = 1 << 27


def slab_width(V: int, tile: int) -> int:
    """Columns of a slab, a whole number of tiles: at most an eighth of V and SLAB_COLUMNS. The
    number of tokens has no say in it.
    """
    return max(min(SLAB_COLUMNS, V // 8) // tile * tile, tile)


def slabs(V: int, tile: int) -> Iterator[tuple[int, int]]:
    """(from, to) columns of each slab."""
    width = slab_width(V, tile)
    return ((lo, min(lo + width, V)) for lo in range(0, V, width))


def chunk_rows(rows: int, width: int, tile: int) -> int:
    """How many rows go through a slab at a time: all of them, or a whole number of tiles within
    SLAB_ELEMENTS.
    """
    return (
        rows if rows * width <= SLAB_ELEMENTS else max(SLAB_ELEMENTS // width // tile * tile, tile)
    )


def whole_lines(columns: int) -> int:
    """Columns, up to a multiple of 16: what Triton asks of a stride before it takes rows for
    aligned. Others are read and written in pieces, which spills a kilobyte a thread.
    """
    return columns + -columns % 16


def kept_bytes(tokens: int, V: int, itemsize: int, most: float) -> int:
    """What the plans "saved" and "whole" hold on CUDA at a time, where `most` bytes may be kept; 0
    where that is too little for them.

    [T, V] of `itemsize`, float32 exponents [tiles, T] (of the narrowest tile, 128 columns: at
    most), and under "whole" a gradient of that size.
    """
    scores, room = tokens * V * itemsize, tokens * whole_lines(V) * itemsize
    return (
        0 if scores > most else room * (2 if 2 * scores <= most else 1) + 4 * tokens * -(-V // 128)
    )


def head_bytes(tokens: int, D: int, V: int, itemsize: int, *, frozen: bool = False) -> int:
    """The most that linear_logprob's kernels hold at a time beside their inputs, dW and what they
    keep (`kept_bytes`).

    `itemsize`: of the hidden states. `frozen`: the head gets no gradient, and the forward gathers
    E_p[W] in place of a backward.
    """
    tile = 256
    width = slab_width(V, tile)
    rows = min(chunk_rows(tokens, width, 128), tokens)
    spans, pieces = -(-V // width), -(-tokens // max(rows, 1))
    slab, states, product = rows * width * itemsize, 4 * tokens * D, 4 * rows * D
    if frozen:
        parts = 4 * rows * (3 * 33 * spans + width // 128)
        return max(
            states + slab + parts + product + rows * D * itemsize, 0 if pieces == 1 else 2 * states
        )
    sums = 0 if pieces == 1 else width * D * 4
    return max(
        4 * tokens * 3 * 132,
        states + slab + sums + max(product, tokens * D * itemsize) + 24 * tokens,
    )
