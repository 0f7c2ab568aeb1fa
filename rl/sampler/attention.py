"""One step of attention for many rows that share prompts: the prompt's keys are read once for all
rows that answer it.

Shapes: P prompts of a band, G rows a prompt at most, N rows (n of a band), H key heads, r query
heads a key head, L positions, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# (row, prompt position) pairs that a band may waste: less than the fixed cost of another band
_SLACK = 16_384
_MOST_BANDS = 8


@dataclass(frozen=True, slots=True)
class Band:
    """Neighbouring prompts of about the same length with about as many rows, as a [P, G] grid of
    cells that rows sit in.

    `rows_n` are the band's rows (None: all of them, in order), `cell_n` their cells (None: row i is
    cell i), `hidden_PL` True past the end of a prompt (None: all are `length` long).
    """

    first: int
    prompts: int
    width: int
    length: int
    rows_n: Tensor | None
    cell_n: Tensor | None
    hidden_PL: Tensor | None

    def scores(self, q_NHrD: Tensor, prompt_k: Tensor) -> Tensor:
        """Scores of the band's rows on their prompts, float32 [n, H, r, L]. `prompt_k` [all
        prompts, H, longest, D].
        """
        score = scores_fp32(self._spread(q_NHrD), self._own(prompt_k))
        if self.hidden_PL is not None:
            score.view(self.prompts, -1, self.length).masked_fill_(
                self.hidden_PL[:, None], -torch.inf
            )
        return self._gather(score, q_NHrD.shape[1])

    def values(self, probability_NHrL: Tensor, prompt_v: Tensor) -> Tensor:
        """Values of the prompts under the rows' probabilities, [n, H, r, D]."""
        spread = self._spread(probability_NHrL[..., : self.length])
        return self._gather(torch.bmm(spread, self._own(prompt_v)), prompt_v.shape[1])

    def _own(self, block_PHLD: Tensor) -> Tensor:
        return block_PHLD[self.first : self.first + self.prompts, :, : self.length].flatten(0, 1)

    def _spread(self, x_NHrX: Tensor) -> Tensor:
        """Rows to the grid, [P * H, G * r, X]; empty cells are zero."""
        x = x_NHrX if self.rows_n is None else x_NHrX.index_select(0, self.rows_n)
        _, heads, repeat, width = x.shape
        if self.cell_n is not None:
            x = x.new_zeros(self.prompts * self.width, heads, repeat, width).index_copy_(
                0, self.cell_n, x
            )
        x = x.reshape(self.prompts, self.width, heads, repeat, width).transpose(1, 2)
        return x.reshape(self.prompts * heads, self.width * repeat, width)

    def _gather(self, x: Tensor, heads: int) -> Tensor:
        """The way back: [P * H, G * r, X] to the band's rows [n, H, r, X]."""
        repeat = x.shape[1] // self.width
        cells = x.view(self.prompts, heads, self.width, repeat, -1).transpose(1, 2)
        cells = cells.reshape(self.prompts * self.width, heads, repeat, -1)
        return cells if self.cell_n is None else cells.index_select(0, self.cell_n)


def make_bands(prompt_of_row: np.ndarray, lengths: np.ndarray, device: torch.device) -> list[Band]:
    """Cut the prompts into bands, so that a long prompt or a large group does not set the size of
    all the others' grid.

    `prompt_of_row` [N], `lengths` [prompts]. A band grows while its grid is at most twice what its
    rows need, plus a slack.
    """
    counts = np.bincount(prompt_of_row, minlength=len(lengths))
    slack = _SLACK
    while True:
        starts, needed, width, longest = [0], 0, 0, 0
        for i, (count, length) in enumerate(zip(counts.tolist(), lengths.tolist(), strict=True)):
            needed, width, longest = (
                needed + count * length,
                max(width, count),
                max(longest, length),
            )
            if (i + 1 - starts[-1]) * width * longest > 2 * needed + slack:
                starts.append(i)
                needed, width, longest = count * length, count, length
        if len(starts) <= _MOST_BANDS:
            break
        slack *= 2
    ends = [*starts[1:], len(lengths)]
    bands = [
        _band(first, end, prompt_of_row, counts, lengths, device)
        for first, end in zip(starts, ends, strict=True)
    ]
    return [band for band in bands if band.width]


def _band(
    first: int,
    end: int,
    prompt_of_row: np.ndarray,
    counts: np.ndarray,
    lengths: np.ndarray,
    device: torch.device,
) -> Band:
    rows = np.flatnonzero((prompt_of_row >= first) & (prompt_of_row < end))
    own, counts, lengths = prompt_of_row[rows] - first, counts[first:end], lengths[first:end]
    width, longest = int(counts.max()), int(lengths.max())
    order = np.argsort(own, kind="stable")
    member = np.empty(len(own), np.int64)  # which of its prompt's rows each one is
    member[order] = np.arange(len(own)) - np.repeat(np.cumsum(counts) - counts, counts)
    cell = own * width + member
    hidden = np.arange(longest) >= lengths[:, None]
    in_place = (end - first) * width == len(cell) and bool((cell == np.arange(len(cell))).all())
    return Band(
        first,
        end - first,
        width,
        longest,
        rows_n=None if len(rows) == len(prompt_of_row) else torch.from_numpy(rows).to(device),
        cell_n=None if in_place else torch.from_numpy(cell).to(device),
        hidden_PL=torch.from_numpy(hidden).to(device) if hidden.any() else None,
    )


def without_cudnn() -> None:
    """For this process: scaled_dot_product_attention never goes through cuDNN, which torch puts
    first on Hopper.

    cuDNN builds a graph for every shape, tens of milliseconds of the host each; here the key length
    grows with every step.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def scores_fp32(q: Tensor, k: Tensor) -> Tensor:
    """q [B, M, D] times k [B, L, D] transposed, in float32 also for half precision: the softmax
    would feel their rounding.
    """
    if q.dtype == torch.float32:
        return torch.bmm(q, k.transpose(1, 2))
    if q.is_cuda:
        return torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(q.float(), k.float().transpose(1, 2))


def attention(q_NHrD: Tensor, kv: Tensor, hidden_NL: Tensor | None) -> Tensor:
    """Each row over keys and values of its own, [N, H, r, D].

    `kv` [2, N, H, L, D]: keys, then values. The mask is True where a position is not to be seen
    (None: all are seen); what lies there must be finite. The query heads of a key head go as if
    they were r positions, so keys are not repeated.
    """
    seen = None if hidden_NL is None else ~hidden_NL[:, None, None]
    return F.scaled_dot_product_attention(q_NHrD, kv[0], kv[1], attn_mask=seen)


def shared_attention(
    q_NHrD: Tensor,
    prompt_kv: Tensor,
    row_kv: Tensor,
    bands: list[Band],
    row_hidden_NL: Tensor | None,
) -> Tensor:
    """Each row over its prompt, shared with other rows, and its own response: one softmax over
    both. As `attention` otherwise.

    `prompt_kv` [2, prompts, H, L, D], `row_kv` [2, N, H, L, D].
    """
    rows, heads, repeat, width = q_NHrD.shape
    q_NHrD = q_NHrD * width**-0.5
    row_k, row_v = row_kv[0].flatten(0, 1), row_kv[1].flatten(0, 1)
    to_response = scores_fp32(q_NHrD.flatten(0, 1), row_k).view(rows, heads, repeat, -1)
    if row_hidden_NL is not None:
        to_response.masked_fill_(row_hidden_NL[:, None, None], -torch.inf)
    if len(bands) == 1:
        to_prompt = bands[0].scores(q_NHrD, prompt_kv[0])
    else:
        to_prompt = to_response.new_full(
            (rows, heads, repeat, max(band.length for band in bands)), -torch.inf
        )
        for band in bands:
            to_prompt[band.rows_n, :, :, : band.length] = band.scores(q_NHrD, prompt_kv[0])
    probability = torch.cat([to_prompt, to_response], dim=-1).softmax(-1).to(q_NHrD.dtype)
    on_prompt, on_response = probability.split([to_prompt.shape[-1], to_response.shape[-1]], dim=-1)
    out = torch.bmm(on_response.flatten(0, 1), row_v).view(q_NHrD.shape)
    for band in bands:
        values = band.values(on_prompt, prompt_kv[1])
        out = out.add_(values) if band.rows_n is None else out.index_add_(0, band.rows_n, values)
    return out
