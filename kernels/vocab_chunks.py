"""Split the vocabulary and the tokens so that no [T, V] tensor is needed, and estimate the bytes
that this takes.

A slab is a chunk of consecutive vocabulary columns.
"""

from __future__ import annotations

from collections.abc import Iterator

# dlogits of this many columns at a time: wide enough for cuBLAS; 8192 x 16384 in bf16 takes 256
# MiB.
CHUNK_COLUMNS = 16_384
CHUNK_ELEMENTS = 1 << 27


def vocab_chunk_width(V: int, tile: int) -> int:
    """Return the columns of a slab, a multiple of `tile`: at most V / 8 and CHUNK_COLUMNS, at least
    `tile`.

    The width does not depend on the number of tokens.
    """
    return max(min(CHUNK_COLUMNS, V // 8) // tile * tile, tile)


def iter_vocab_chunks(V: int, tile: int) -> Iterator[tuple[int, int]]:
    """Iterate over the (from, to) columns of each slab."""
    width = vocab_chunk_width(V, tile)
    return ((lo, min(lo + width, V)) for lo in range(0, V, width))


def rows_per_chunk(rows: int, width: int, tile: int) -> int:
    """Return the number of rows that a slab processes at a time: all rows, or a multiple of `tile`
    within CHUNK_ELEMENTS.
    """
    return (
        rows
        if rows * width <= CHUNK_ELEMENTS
        else max(CHUNK_ELEMENTS // width // tile * tile, tile)
    )


def align_columns(columns: int) -> int:
    """Return `columns` rounded up to a multiple of 16.

    Triton requires this of a stride before it treats rows as aligned. Unaligned rows are read and
    written in pieces, which spills a kilobyte for each thread.
    """
    return columns + -columns % 16


def estimate_saved_bytes(tokens: int, V: int, itemsize: int, max_bytes: float) -> int:
    """Return the bytes that the plans "saved" and "whole" hold on CUDA at a time, if `max_bytes`
    bytes may be saved; 0 if that is too little.

    The bytes count [T, V] of `itemsize`, float32 exponents [tiles, T] (at most: for the narrowest
    tile, 128 columns), and under "whole" a gradient of the same size as [T, V].
    """
    scores, room = tokens * V * itemsize, tokens * align_columns(V) * itemsize
    return (
        0
        if scores > max_bytes
        else room * (2 if 2 * scores <= max_bytes else 1) + 4 * tokens * -(-V // 128)
    )


def estimate_workspace_bytes(
    tokens: int, D: int, V: int, itemsize: int, *, frozen: bool = False
) -> int:
    """Return the most bytes that the kernels of linear_logprob hold at a time, besides their
    inputs, dW and the saved tensors (`estimate_saved_bytes`).

    `itemsize`: bytes per element of the hidden states. `frozen`: the head gets no gradient, and the
    forward accumulates E_p[W] in place of a backward.
    """
    tile = 256
    width = vocab_chunk_width(V, tile)
    rows = min(rows_per_chunk(tokens, width, 128), tokens)
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
