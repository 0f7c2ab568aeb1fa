"""Build the block tables of a step: private blocks of each row, and blocks that a prefix group
shares.

The attention itself is `kernels.compute_paged_attention`. Shared blocks are read once for all rows
of a group. Shapes: R rows (N in a state), B blocks of a table, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from kernels import SharedPages


def split_block_tables(
    tables: Sequence[Sequence[int]],
    lengths: np.ndarray,
    shared: list[tuple[list[int], list[int]]],
    block_size: int,
    rows: int,
    groups: int,
    table_width: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Split block tables into private and shared parts.

    Returns a tuple: the positions of each row that are in shared blocks [R], the private table of
    each row [R, B], the positions of each row in its private blocks [R], and the fields of
    `SharedPages`.

    The output has `rows` rows, `groups` groups and tables that are `table_width` blocks wide. Rows
    past `tables` are padding. `lengths` holds the positions of each row.
    """
    skip, shares, group = (
        np.zeros(rows, np.int64),
        np.zeros(rows, np.bool_),
        np.zeros(rows, np.int64),
    )
    shared_table = np.zeros((groups, table_width), np.int32)
    shared_length = np.zeros(groups, np.int32)
    for number, (members, pages) in enumerate(shared):
        skip[members], shares[members], group[members] = len(pages) * block_size, True, number
        shared_table[number, : len(pages)], shared_length[number] = pages, len(pages) * block_size
    table = _private_tables(tables, skip // block_size, rows, table_width)
    order = np.argsort(np.where(shares, group, groups), kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(group[shares], minlength=groups))]).astype(
        np.int32
    )
    length = np.pad(lengths, (0, rows - len(lengths)), constant_values=1) - skip
    shared_fields = {
        "order": order,
        "place": np.argsort(order),
        "group": group[order],
        "shares": shares,
    }
    return (
        skip,
        table,
        length.astype(np.int32),
        shared_fields | {"starts": starts, "table": shared_table, "length": shared_length},
    )


def _private_tables(
    tables: Sequence[Sequence[int]], first: np.ndarray, rows: int, table_width: int
) -> np.ndarray:
    """Return the table of each row [R, B] from its block `first` [R] on, padded with zeros."""
    starts = first.tolist()
    row_tables = [pages[starts[i] :] if starts[i] else pages for i, pages in enumerate(tables)]
    counts = np.array([len(pages) for pages in row_tables], np.int64)
    table = np.zeros((rows, table_width), np.int32)
    filled = np.zeros((rows, table_width), np.bool_)
    filled[: len(row_tables)] = np.arange(table_width) < counts[:, None]
    table[filled] = np.fromiter(chain.from_iterable(row_tables), np.int32, int(counts.sum()))
    return table


def make_block_tables(
    tables: Sequence[Sequence[int]],
    lengths: np.ndarray,
    shared: list[tuple[list[int], list[int]]],
    block_size: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, SharedPages | None]:
    """Return the arguments of `attend_pages` besides queries and blocks, without padded rows or
    groups.
    """
    width = max(len(pages) for pages in tables)
    _, table, length, shared_fields = split_block_tables(
        tables, lengths, shared, block_size, len(tables), len(shared), width
    )

    def to_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    groups = (
        SharedPages(
            **{field.name: to_device(shared_fields[field.name]) for field in fields(SharedPages)}
        )
        if shared
        else None
    )
    return to_device(table), to_device(length), groups
