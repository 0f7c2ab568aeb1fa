"""Split the vocabulary and the tokens so that no [T, V] tensor is needed, and estimate the bytes
that this takes.

A slab is a chunk of consecutive vocabulary columns.
"""

from __future__ import annotations

from collections.abc import Iterator

# dlogits of this many columns at a time: wide enough for cuBLAS; 8192 x 16384 in bf16 takes 256
# MiB.
SLAB_COLUMNS = 16_384
SLAB_ELEMENTS = 1 << 27


def slab_width(V: int, tile: int) -> int:
    """Return the columns of a slab, a multiple of `tile`: at most V / 8 and SLAB_COLUMNS, at least
    `tile`.

    The width does not depend on the number of tokens.
    """
    return max(min(SLAB_COLUMNS, V // 8) // tile * tile, tile)


def slabs(V: int, tile: int) -> Iterator[tuple[int, int]]:
    """Iterate over the (from, to) columns of each slab."""
    width = slab_width(V, tile)
    return ((lo, min(lo + width, V)) for lo in range(0, V, width))


def chunk_rows(rows: int, width: int, tile: int) -> int:
    """Return the number of rows that a slab processes at a time: all rows, or a multiple of `tile`
    within SLAB_ELEMENTS.
    """
    return (
        rows if rows * width <= SLAB_ELEMENTS else max(SLAB_ELEMENTS // width // tile * tile, tile)
    )


def whole_lines(columns: int) -> int:
    """Return `columns` rounded up to a multiple of 16.

    Triton requires this of a stride before it treats rows as aligned. Unaligned rows are read and
    written in pieces, which spills a kilobyte for each thread.
    """
    return columns + -columns % 16


def kept_bytes(tokens: int, V: int, itemsize: int, most: float) -> int:
    """Return the bytes that the plans "saved" and "whole" hold on CUDA at a time, if `most` bytes
    may be saved; 0 if that is too little.

    The bytes count [T, V] of `itemsize`, float32 exponents [tiles, T] (at most: for the narrowest
    tile, 128 columns), and under "whole" a gradient of the same size as [T, V].
    """
    scores, room = tokens * V * itemsize, tokens * whole_lines(V) * itemsize
    return (
        0 if scores > most else room * (2 if 2 * scores <= most else 1) + 4 * tokens * -(-V // 128)
    )


def head_bytes(tokens: int, D: int, V: int, itemsize: int, *, frozen: bool = False) -> int:
    """Return the most bytes that the kernels of linear_logprob hold at a time, besides their
    inputs, dW and the saved tensors (`kept_bytes`).

    `itemsize`: bytes per element of the hidden states. `frozen`: the head gets no gradient, and the
    forward accumulates E_p[W] in place of a backward.
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
