"""One step of attention for many rows that share prompts: the prompt's keys are read once for all rows that answer it.

Shapes: P prompts, G rows a prompt at most, N rows, H key heads, r query heads a key head, D head width, L cached positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """Where each row sits in a [P, G] grid of prompts and the rows that answer them. `cell_N` None: row i is cell i."""

    prompts: int
    width: int
    cell_N: Tensor | None

    @classmethod
    def of(cls, prompt_of_row: np.ndarray, prompts: int, device: torch.device) -> Grid:
        """Rows of one prompt take its cells in their own order."""
        order = np.argsort(prompt_of_row, kind="stable")
        counts = np.bincount(prompt_of_row, minlength=prompts)
        member = np.empty(len(prompt_of_row), np.int64)
        member[order] = np.arange(len(prompt_of_row)) - np.repeat(np.cumsum(counts) - counts, counts)
        width = int(counts.max())
        cell = prompt_of_row * width + member
        in_place = prompts * width == len(cell) and bool((cell == np.arange(len(cell))).all())
        return cls(prompts, width, None if in_place else torch.from_numpy(cell).to(device))

    @property
    def one_to_one(self) -> bool:
        """Row i alone answers prompt i."""
        return self.width == 1 and self.cell_N is None

    def spread(self, x_NHrX: Tensor) -> Tensor:
        """Rows to the grid, [P * H, G * r, X]; empty cells are zero."""
        _, heads, repeat, width = x_NHrX.shape
        if self.cell_N is not None:
            cells = x_NHrX.new_zeros(self.prompts * self.width, heads, repeat, width)
            x_NHrX = cells.index_copy_(0, self.cell_N, x_NHrX)
        x = x_NHrX.view(self.prompts, self.width, heads, repeat, width).transpose(1, 2)
        return x.reshape(self.prompts * heads, self.width * repeat, width)

    def gather(self, x: Tensor, heads: int) -> Tensor:
        """The way back: [P * H, G * r, X] to rows [N, H, r, X]."""
        repeat = x.shape[1] // self.width
        cells = x.view(self.prompts, heads, self.width, repeat, -1).transpose(1, 2)
        if self.cell_N is None:
            return cells.reshape(self.prompts * self.width, heads, repeat, -1)
        return cells.reshape(self.prompts * self.width, heads, repeat, -1).index_select(0, self.cell_N)


def scores_fp32(q: Tensor, k: Tensor) -> Tensor:
    """q [B, M, D] times k [B, L, D] transposed, in float32 also for half precision: the softmax would feel their rounding."""
    if q.dtype == torch.float32:
        return torch.bmm(q, k.transpose(1, 2))
    if q.is_cuda:
        return torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(q.float(), k.float().transpose(1, 2))


def attention(q_NHrD: Tensor, kv: Tensor, hidden_NL: Tensor | None) -> Tensor:
    """Each row over keys and values of its own, [N, H, r, D]. Queries come scaled.

    `kv` [2, N, H, L, D]: keys, then values. The mask is True where a position is not to be seen (None: all are seen); what lies
    there must be finite.
    """
    score_NHrL = scores_fp32(q_NHrD.flatten(0, 1), kv[0].flatten(0, 1)).view(*q_NHrD.shape[:3], -1)
    if hidden_NL is not None:
        score_NHrL.masked_fill_(hidden_NL[:, None, None], -torch.inf)
    probability_NHrL = score_NHrL.softmax(-1).to(q_NHrD.dtype)
    return torch.bmm(probability_NHrL.flatten(0, 1), kv[1].flatten(0, 1)).view(q_NHrD.shape)


def shared_attention(
    q_NHrD: Tensor,
    prompt_kv: Tensor,
    row_kv: Tensor,
    grid: Grid,
    prompt_hidden_PL: Tensor | None,
    row_hidden_NL: Tensor | None,
) -> Tensor:
    """Each row over its prompt, shared with other rows, and its own response: one softmax over both. As `attention` otherwise.

    `prompt_kv` [2, P, H, L, D], `row_kv` [2, N, H, L, D].
    """
    heads = q_NHrD.shape[1]
    prompt_k, prompt_v = prompt_kv[0].flatten(0, 1), prompt_kv[1].flatten(0, 1)
    row_k, row_v = row_kv[0].flatten(0, 1), row_kv[1].flatten(0, 1)
    to_prompt = scores_fp32(grid.spread(q_NHrD), prompt_k)
    if prompt_hidden_PL is not None:
        to_prompt.view(grid.prompts, -1, prompt_k.shape[1]).masked_fill_(prompt_hidden_PL[:, None], -torch.inf)
    to_response = scores_fp32(q_NHrD.flatten(0, 1), row_k).view(*q_NHrD.shape[:3], -1)
    if row_hidden_NL is not None:
        to_response.masked_fill_(row_hidden_NL[:, None, None], -torch.inf)
    probability = torch.cat([grid.gather(to_prompt, heads), to_response], dim=-1).softmax(-1).to(q_NHrD.dtype)
    on_prompt, on_response = probability.split([prompt_k.shape[1], row_k.shape[1]], dim=-1)
    from_prompt = grid.gather(torch.bmm(grid.spread(on_prompt), prompt_v), heads)
    from_response = torch.bmm(on_response.flatten(0, 1), row_v)
    return from_prompt + from_response.view_as(from_prompt)
