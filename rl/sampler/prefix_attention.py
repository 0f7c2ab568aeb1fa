"""Compute one decode step of attention for many rows that share prompts (prefix groups), and the
attention of new tokens that follow cached prompts (`SuffixBatch`).

The keys of a prompt are read once for all rows that respond to it. Shapes: P prompts of a band, G
rows per prompt at most, N rows (n of a band), H key heads, r query heads per key head, L positions,
D head width; for new tokens B cached prompts, T new tokens of the longest, X new tokens in total, H
query heads, K key heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import UNBOUNDED, AttentionBounds
from kernels.device_checks import check_mm_to_fp32
from rl.sampler.decode_state import pad_right

# Number of (row, prompt position) pairs that a band may waste. This costs less than the fixed cost
# of another band.
_MAX_WASTED_PAIRS = 16_384
_MAX_BANDS = 8
_QUERY_BLOCK = 256  # queries of a prompt whose bounded attention is computed at a time


class PromptBand:
    """Hold neighboring prompts of similar length and row count as a padded grid [P, G] of cells.

    Each row of the band occupies a cell. `rows_n` holds the indices of the band's rows (None: all
    rows in order). `cell_n` holds the cell of each row (None: row i occupies cell i). `hidden_PL`
    is True past the end of a prompt (None: all prompts are `length` long).
    """

    def __init__(
        self,
        first: int,
        end: int,
        prompt_of_row: np.ndarray,
        counts: np.ndarray,
        lengths: np.ndarray,
        device: torch.device,
    ):
        """Build the band of the prompts `first` to `end` - 1."""
        rows = np.flatnonzero((prompt_of_row >= first) & (prompt_of_row < end))
        slots, counts, lengths = prompt_of_row[rows] - first, counts[first:end], lengths[first:end]
        self.first, self.prompts = first, end - first
        self.width, self.length = int(counts.max()), int(lengths.max())
        order = np.argsort(slots, kind="stable")
        member = np.empty(len(slots), np.int64)  # index of each row among the rows of its prompt
        member[order] = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
        cell = slots * self.width + member
        hidden = np.arange(self.length) >= lengths[:, None]
        in_place = self.prompts * self.width == len(cell) and np.array_equal(
            cell, np.arange(len(cell))
        )
        is_whole = len(rows) == len(prompt_of_row)
        self.rows_n = None if is_whole else torch.from_numpy(rows).to(device)
        self.cell_n = None if in_place else torch.from_numpy(cell).to(device)
        self.hidden_PL = torch.from_numpy(hidden).to(device) if hidden.any() else None

    def compute_scores(self, q_NHrD: Tensor, prompt_k: Tensor, softcap: float = 0.0) -> Tensor:
        """Return the attention scores of the band's rows on their prompts, float32 [n, H, r, L].

        `prompt_k` has shape [all prompts, H, longest, D].
        """
        score = compute_scores_fp32(self._scatter(q_NHrD), self._select_prompts(prompt_k))
        score = cap_scores(score, softcap)
        if self.hidden_PL is not None:
            score.view(self.prompts, -1, self.length).masked_fill_(
                self.hidden_PL[:, None], -torch.inf
            )
        return self._gather(score, q_NHrD.shape[1])

    def weighted_values(self, probability_NHrL: Tensor, prompt_v: Tensor) -> Tensor:
        """Return the prompt values weighted by the rows' attention probabilities, [n, H, r, D]."""
        spread = self._scatter(probability_NHrL[..., : self.length])
        return self._gather(torch.bmm(spread, self._select_prompts(prompt_v)), prompt_v.shape[1])

    def _select_prompts(self, block_PHLD: Tensor) -> Tensor:
        """Return the keys or values of the band's prompts, [P * H, L, D]."""
        return block_PHLD[self.first : self.first + self.prompts, :, : self.length].flatten(0, 1)

    def _scatter(self, x_NHrX: Tensor) -> Tensor:
        """Scatter rows into the grid, [P * H, G * r, X]. Empty cells are zero."""
        x = x_NHrX if self.rows_n is None else x_NHrX.index_select(0, self.rows_n)
        _, heads, repeat, width = x.shape
        if self.cell_n is not None:
            x = x.new_zeros(self.prompts * self.width, heads, repeat, width).index_copy_(
                0, self.cell_n, x
            )
        x = x.reshape(self.prompts, self.width, heads, repeat, width).transpose(1, 2)
        return x.reshape(self.prompts * heads, self.width * repeat, width)

    def _gather(self, x: Tensor, heads: int) -> Tensor:
        """Gather the band's rows [n, H, r, X] from the grid [P * H, G * r, X]; the inverse of
        `_scatter`.
        """
        repeat = x.shape[1] // self.width
        cells = x.view(self.prompts, heads, self.width, repeat, -1).transpose(1, 2)
        cells = cells.reshape(self.prompts * self.width, heads, repeat, -1)
        return cells if self.cell_n is None else cells.index_select(0, self.cell_n)


def make_bands(
    prompt_of_row: np.ndarray, lengths: np.ndarray, device: torch.device
) -> list[PromptBand]:
    """Partition the prompts into bands.

    A long prompt or a large group then does not set the grid size of all other prompts.
    `prompt_of_row` has shape [N], `lengths` has shape [prompts]. A band grows while its grid is at
    most twice the size that its rows need, plus a slack.
    """
    counts = np.bincount(prompt_of_row, minlength=len(lengths))
    slack = _MAX_WASTED_PAIRS
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
        if len(starts) <= _MAX_BANDS:
            break
        slack *= 2
    ends = [*starts[1:], len(lengths)]
    bands = [
        PromptBand(first, end, prompt_of_row, counts, lengths, device)
        for first, end in zip(starts, ends, strict=True)
    ]
    return [band for band in bands if band.width]


def disable_cudnn_attention() -> None:
    """Disable the cuDNN backend of scaled_dot_product_attention in this process.

    torch prefers cuDNN on Hopper. cuDNN builds a graph for every shape, which takes tens of
    milliseconds of host time. During decoding, the key length grows with every step.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def compute_scores_fp32(q: Tensor, k: Tensor) -> Tensor:
    """Return q [B, M, D] times k [B, L, D] transposed, in float32.

    Half-precision inputs are also multiplied into float32, because rounded scores change the
    softmax.
    """
    if q.dtype == torch.float32:
        return torch.bmm(q, k.transpose(1, 2))
    if q.is_cuda:
        check_mm_to_fp32()
        return torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(q.float(), k.float().transpose(1, 2))


def cap_scores(score: Tensor, softcap: float) -> Tensor:
    """Return softcap * tanh(score / softcap), in the memory of `score`; the scores for 0."""
    return score.div_(softcap).tanh_().mul_(softcap) if softcap else score


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softcap: float = 0.0
) -> Tensor:
    """Attend with queries [B, H, T, D] to keys and values [B, H, L, D] where `visible` (bool,
    broadcast to [B, H, T, L]) is true.
    """
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    score = compute_scores_fp32((q * q.shape[-1] ** -0.5).flatten(0, 1), k.flatten(0, 1)).unflatten(
        0, q.shape[:2]
    )
    score = cap_scores(score, softcap).masked_fill_(~visible, -torch.inf)
    return score.softmax(-1).to(v.dtype) @ v


def causal_attention(q: Tensor, k: Tensor, v: Tensor, bounds: AttentionBounds) -> Tensor:
    """Attend with each position of [B, H, T, D] to those up to itself, within the bounds."""
    length, window = q.shape[2], bounds.window
    if not bounds.softcap and not 0 < window < length:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out, position = torch.empty_like(q), torch.arange(length, device=q.device)
    for start in range(0, length, _QUERY_BLOCK):
        end = min(start + _QUERY_BLOCK, length)
        first = max(start + 1 - window, 0) if window else 0
        distance = position[start:end, None] - position[first:end]
        visible = (distance >= 0) & (distance < window) if window else distance >= 0
        out[:, :, start:end] = masked_attention(
            q[:, :, start:end], k[:, :, first:end], v[:, :, first:end], visible, bounds.softcap
        )
    return out


def row_attention(q_NHrD: Tensor, kv: Tensor, hidden_NL: Tensor | None) -> Tensor:
    """Attend each row to the keys and values of its separate cache, [N, H, r, D].

    `kv` [2, N, H, L, D] holds keys, then values. `hidden_NL` is True where a position is masked
    (None: no mask); the keys and values at masked positions must be finite. The query heads of a
    key head are passed as r query positions, so keys are not repeated.
    """
    visible = None if hidden_NL is None else ~hidden_NL[:, None, None]
    return F.scaled_dot_product_attention(q_NHrD, kv[0], kv[1], attn_mask=visible)


def shared_attention(
    q_NHrD: Tensor,
    prompt_kv: Tensor,
    row_kv: Tensor,
    bands: list[PromptBand],
    row_hidden_NL: Tensor | None,
    prompt_hidden_NL: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Attend each row to its prompt, which other rows share, and to its response, with a single
    softmax.

    `prompt_kv` has shape [2, prompts, H, L, D], `row_kv` has shape [2, N, H, L, D].
    `prompt_hidden_NL`: positions of the prompt that the row's window leaves out. Otherwise the same
    as `row_attention`.
    """
    rows, heads, repeat, width = q_NHrD.shape
    q_NHrD = q_NHrD * width**-0.5
    row_k, row_v = row_kv[0].flatten(0, 1), row_kv[1].flatten(0, 1)
    to_response = compute_scores_fp32(q_NHrD.flatten(0, 1), row_k).view(rows, heads, repeat, -1)
    to_response = cap_scores(to_response, softcap)
    if row_hidden_NL is not None:
        to_response.masked_fill_(row_hidden_NL[:, None, None], -torch.inf)
    if len(bands) == 1:
        to_prompt = bands[0].compute_scores(q_NHrD, prompt_kv[0], softcap)
    else:
        to_prompt = to_response.new_full(
            (rows, heads, repeat, max(band.length for band in bands)), -torch.inf
        )
        for band in bands:
            to_prompt[band.rows_n, :, :, : band.length] = band.compute_scores(
                q_NHrD, prompt_kv[0], softcap
            )
    if prompt_hidden_NL is not None:
        to_prompt.masked_fill_(prompt_hidden_NL[:, None, None], -torch.inf)
    probability = torch.cat([to_prompt, to_response], dim=-1).softmax(-1).to(q_NHrD.dtype)
    on_prompt, on_response = probability.split([to_prompt.shape[-1], to_response.shape[-1]], dim=-1)
    out = torch.bmm(on_response.flatten(0, 1), row_v).view(q_NHrD.shape)
    for band in bands:
        values = band.weighted_values(on_prompt, prompt_kv[1])
        out = out.add_(values) if band.rows_n is None else out.index_add_(0, band.rows_n, values)
    return out


class SuffixBatch:
    """Hold the new tokens of B cached prompts, padded on the right, and their positions."""

    def __init__(
        self, lengths: np.ndarray, suffixes: Sequence[Sequence[int]], device: torch.device
    ):
        """Pad suffixes that follow the `lengths` cached positions of their prompts [B]."""
        start_B = torch.from_numpy(lengths)
        counts_B = torch.tensor([len(suffix) for suffix in suffixes])
        self.ids_BT = pad_right(suffixes).to(device)
        offset_T = torch.arange(self.ids_BT.shape[1])
        self.position_BT = (start_B[:, None] + offset_T).to(device)
        # row and column of each new token in ids_BT
        row_X, column_X = torch.nonzero(offset_T < counts_B[:, None], as_tuple=True)
        self.row_index_X, self.column_index_X = row_X.to(device), column_X.to(device)
        self.last_B = (counts_B - 1).to(device)  # column of each row's last token
        # positions of the longest prompt, new tokens included
        self.max_positions = int((start_B + counts_B).max())
        # positions that the rotary table must have
        self.rope_positions = int(start_B.max()) + len(offset_T)
        self.masks: dict[tuple[int, int], Tensor] = {}  # see `_visible`

    @property
    def position_X(self) -> Tensor:
        """Return the position of each new token in its prompt."""
        return self.position_BT[self.row_index_X, self.column_index_X]

    def select(self, values_BT: Tensor) -> Tensor:
        """Return the values of the new tokens [X, ...], without padding."""
        return values_BT[self.row_index_X, self.column_index_X]

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, bounds: AttentionBounds = UNBOUNDED
    ) -> Tensor:
        """Return the attention [B, T, H * D] of queries [B, T, H, D] to the keys and values
        [B, K, positions, D] of their prompts, up to each query's own position.
        """
        repeat, length = q.shape[2] // keys.shape[1], q.shape[1]
        keys, values = (x.repeat_interleave(repeat, dim=1) for x in (keys, values))
        q, parts = q.transpose(1, 2), list[Tensor]()
        for start in range(0, length, _QUERY_BLOCK):  # no query sees keys after its block
            visible = self._visible(start, bounds.window)
            end, seen = start + visible.shape[2], visible.shape[3]
            block = q[:, :, start:end], keys[:, :, :seen], values[:, :, :seen]
            parts.append(masked_attention(*block, visible, bounds.softcap))
        return torch.cat(parts, dim=2).transpose(1, 2).flatten(2)

    def _visible(self, start: int, window: int) -> Tensor:
        """Return which positions the block of queries from `start` on sees, bool
        [B, 1, queries, positions].
        """
        if (start, window) not in self.masks:
            end = min(start + _QUERY_BLOCK, self.ids_BT.shape[1])
            last = self.rope_positions - self.ids_BT.shape[1] + end
            position = torch.arange(min(last, self.max_positions), device=self.ids_BT.device)
            query = self.position_BT[:, None, start:end, None]
            visible = position <= query
            self.masks[start, window] = visible & (position > query - window) if window else visible
        return self.masks[start, window]
