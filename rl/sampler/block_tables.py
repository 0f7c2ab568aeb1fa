"""Build the block tables of a step: private blocks of each row, and blocks that a prefix group
shares, which `kernels.compute_paged_attention` reads once for all rows of a group.

Shapes: N rows, R rows with padding, B blocks of a table, G groups.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from kernels import SharedPages


def split_block_tables(
    tables: np.ndarray,
    lengths: np.ndarray,
    group: np.ndarray,
    shared: np.ndarray,
    block_size: int,
    rows: int,
    groups: int,
) -> dict[str, np.ndarray]:
    """Split block tables [N, B] into private and shared parts.

    Returns the positions of each row that are in shared blocks (`skip` [R]), the private `table` of
    each row [R, B], the positions of each row in its private blocks (`length` [R]), and the fields
    of `SharedPages`; those of its tables are `shared_table` and `shared_length`.

    The output has `rows` rows and `groups` groups. Rows past `tables` are padding. `lengths` [N]
    holds the positions of each row, `group` and `shared` [N] are `BlockManager.shared_prefixes`.
    """
    count, width = tables.shape
    skip, by_row, leaders = (np.zeros(size, np.int64) for size in (rows, rows, groups))
    skip[:count] = shared * block_size
    shares, members = skip > 0, np.flatnonzero(shared)
    by_row[members] = group_of_member = group[members]
    leaders[group_of_member] = members
    table, length = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
    table[:count] = private_tables(tables, shared)
    length[:count] = lengths - skip[:count]
    order = np.argsort(np.where(shares, by_row, groups), kind="stable")
    place = np.empty(rows, np.int64)
    place[order] = np.arange(rows)
    sizes = np.bincount(group_of_member, minlength=groups)
    blocks = np.where(sizes > 0, shared.take(leaders), 0)  # of each group
    shared_table = tables.take(leaders, 0) * (np.arange(width) < blocks[:, None])
    return {
        "skip": skip,
        "table": table,
        "length": length,
        "order": order,
        "place": place,
        "group": by_row.take(order),
        "shares": shares,
        "starts": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        "shared_table": shared_table.astype(np.int32),
        "shared_length": (blocks * block_size).astype(np.int32),
    }


def private_tables(tables: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the table of each row [R, B] from its block `first` [R] on, padded with zeros."""
    if not first.any():
        return tables
    rows, width = tables.shape
    padded = np.zeros((rows, 2 * width), tables.dtype)
    padded[:, :width] = tables
    starts = 2 * width * np.arange(rows) + first
    return padded.take(starts[:, None] + np.arange(width))


def make_block_tables(
    tables: np.ndarray,
    lengths: np.ndarray,
    group: np.ndarray,
    shared: np.ndarray,
    block_size: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, SharedPages | None]:
    """Return the arguments of `kernels.compute_paged_attention` besides queries and blocks, without
    padded rows or groups (`split_block_tables`).
    """
    groups = int(group.max(initial=-1)) + 1
    arrays = split_block_tables(tables, lengths, group, shared, block_size, len(tables), groups)
    parts = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    table, length = parts.pop("table"), parts.pop("length")
    if not groups:
        return table, length, None
    parts |= {"table": parts.pop("shared_table"), "length": parts.pop("shared_length")}
    return table, length, SharedPages(**{f.name: parts[f.name] for f in fields(SharedPages)})
