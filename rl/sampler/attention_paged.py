"""Who reads which pages in a step: each row its own, and the pages that a group shares once for all
its rows.

The attention itself is `kernels.attend_pages`. Shapes: R rows (N in a state), B pages of a table, G
groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from kernels import SharedPages


def own_and_shared(
    tables: Sequence[Sequence[int]], lengths: np.ndarray, shared: list[tuple[list[int], list[int]]], size: int, rows: int, groups: int,
    width: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:  # fmt: skip
    """(positions of each row that lie in shared pages [R], its own table [R, B], its positions
    there [R], the fields of `SharedPages`).

    Of `rows` rows, those past the tables nobody's, `groups` groups, and tables `width` pages wide.
    `lengths`: each row's positions.
    """
    skip, shares, group = (
        np.zeros(rows, np.int64),
        np.zeros(rows, np.bool_),
        np.zeros(rows, np.int64),
    )
    table, shared_table = np.zeros((rows, width), np.int32), np.zeros((groups, width), np.int32)
    shared_length = np.zeros(groups, np.int32)
    for number, (members, pages) in enumerate(shared):
        skip[members], shares[members], group[members] = len(pages) * size, True, number
        shared_table[number, : len(pages)], shared_length[number] = pages, len(pages) * size
    first = (skip // size).tolist()
    own = [pages[first[i] :] if first[i] else pages for i, pages in enumerate(tables)]
    counts = np.array([len(pages) for pages in own], np.int64)
    filled = np.zeros((rows, width), np.bool_)
    filled[: len(own)] = np.arange(width) < counts[:, None]
    table[filled] = np.fromiter(chain.from_iterable(own), np.int32, int(counts.sum()))
    order = np.argsort(np.where(shares, group, groups), kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(group[shares], minlength=groups))]).astype(
        np.int32
    )
    length = np.pad(lengths, (0, rows - len(lengths)), constant_values=1) - skip
    together = {"order": order, "place": np.argsort(order), "group": group[order], "shares": shares}
    return (
        skip,
        table,
        length.astype(np.int32),
        together | {"starts": starts, "table": shared_table, "length": shared_length},
    )


def pages_of(
    tables: Sequence[Sequence[int]],
    lengths: np.ndarray,
    shared: list[tuple[list[int], list[int]]],
    size: int,
    device: torch.device,
) -> tuple[Tensor, Tensor, SharedPages | None]:
    """What `attend_pages` asks for beside queries and pages, of as many rows and groups as there
    are.
    """
    width = max(len(pages) for pages in tables)
    _, table, length, together = own_and_shared(
        tables, lengths, shared, size, len(tables), len(shared), width
    )

    def here(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    groups = (
        SharedPages(**{field.name: here(together[field.name]) for field in fields(SharedPages)})
        if shared
        else None
    )
    return here(table), here(length), groups
