"""Attention of one query a row over keys and values in pages, with the pages that a group shares read once for the group.

Two parts merged by their log-sum-exp: the shared pages, where a group's rows are the queries of one sequence, and each row's own.
On CUDA both go through torch's own varlen attention over block tables, with one split: with more, only some rows are written
(pytorch#194167), and a sequence's bits depend on its neighbours. Elsewhere pages are gathered, which is the reference of both.
Shapes: N rows, H query heads, K key heads, D head width, B pages of a table, S positions of a page, M queries of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagePart:
    """Sequences of pages and the rows that read them.

    `rows_n` the rows in the order of the sequences (None: row i reads sequence i), `starts` where each sequence's rows begin
    [sequences + 1], `table` its pages int32 [sequences, B], `lengths` its positions int32 [sequences].
    """

    rows_n: Tensor | None
    starts: np.ndarray
    table: Tensor
    lengths: np.ndarray


def parts_of(
    tables: Sequence[Sequence[int]], lengths: np.ndarray, shared: list[tuple[list[int], list[int]]], size: int, device: torch.device
) -> list[PagePart]:
    """The parts of a step: each row's own pages, and each group's shared ones."""
    skip = np.zeros(len(tables), np.int64)
    for rows, pages in shared:
        skip[rows] = len(pages)
    own = [table[first:] for table, first in zip(tables, skip.tolist(), strict=True)]
    parts = [PagePart(None, np.arange(len(tables) + 1), _table(own, device), lengths - skip * size)]
    if shared:
        order = torch.tensor([row for rows, _ in shared for row in rows], device=device)
        starts = np.cumsum([0, *(len(rows) for rows, _ in shared)])
        counts = np.array([len(pages) * size for _, pages in shared])
        parts.append(PagePart(order, starts, _table([pages for _, pages in shared], device), counts))
    return parts


def _table(pages: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    table = np.zeros((len(pages), max(len(p) for p in pages)), np.int32)
    for i, p in enumerate(pages):
        table[i, : len(p)] = p
    return torch.from_numpy(table).to(device)


def paged_attention(q_NHD: Tensor, kv: Tensor, parts: list[PagePart]) -> Tensor:
    """Attention output [N, H, D]; `kv` [2, pages, S, K, D]. Every row has a position in its own part at least."""
    read = _read_cuda if q_NHD.is_cuda else _read_gathered
    out, lse = read(q_NHD, kv, parts[0])
    for part in parts[1:]:
        rows = part.rows_n
        assert rows is not None
        more, more_lse = read(q_NHD.index_select(0, rows), kv, part)
        mine = lse.index_select(0, rows)
        share = torch.sigmoid(more_lse - mine).unsqueeze(-1)  # e^a / (e^a + e^b)
        merged = torch.lerp(out.index_select(0, rows).float(), more.float(), share).to(out.dtype)
        out = out.index_copy(0, rows, merged)
        lse = lse.index_copy(0, rows, torch.logaddexp(mine, more_lse))
    return out


def _read_gathered(q_NHD: Tensor, kv: Tensor, part: PagePart) -> tuple[Tensor, Tensor]:
    """Outputs [N, H, D] and log-sum-exps [N, H] (float32): one sequence after the other, its pages side by side."""
    heads, width = q_NHD.shape[1:]
    outputs, sums = [], []
    for i, length in enumerate(part.lengths.tolist()):
        pages = part.table[i, : -(-length // kv.shape[2])].long()
        k_KLD, v_KLD = kv[:, pages].flatten(1, 2)[:, :length].float().transpose(1, 2).unbind(0)
        q = q_NHD[int(part.starts[i]) : int(part.starts[i + 1])].float().unflatten(1, (k_KLD.shape[0], -1))  # [M, K, r, D]
        score = torch.einsum("mkrd,kld->mkrl", q, k_KLD) * width**-0.5
        lse = score.logsumexp(-1)
        outputs.append(torch.einsum("mkrl,kld->mkrd", (score - lse.unsqueeze(-1)).exp(), v_KLD).flatten(1, 2))
        sums.append(lse.flatten(1))
    return torch.cat(outputs).to(q_NHD.dtype), torch.cat(sums).view(-1, heads)


def _read_cuda(q_NHD: Tensor, kv: Tensor, part: PagePart) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    device, most = q_NHD.device, int(np.diff(part.starts).max())
    starts = torch.from_numpy(part.starts.astype(np.int32)).to(device)
    lengths = torch.from_numpy(part.lengths.astype(np.int32)).to(device)
    out, lse = varlen_attn(
        q_NHD, kv[0], kv[1], starts, None, most, int(part.lengths.max()), enable_gqa=True, seqused_k=lengths,
        block_table=part.table, num_splits=1, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, lse.transpose(0, 1)
