"""Pad the new tokens of several cached prompts to one forward.

Shapes: B prompts, T new tokens of the longest, X new tokens in total, H query heads, K key heads,
D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class SuffixBatch:
    """Hold the new tokens of B cached prompts, padded on the right, and their positions."""

    ids_BT: Tensor
    position_BT: Tensor
    row_index_X: Tensor  # row of each new token in ids_BT
    column_index_X: Tensor  # column of each new token in ids_BT
    last_B: Tensor  # column of each row's last token
    attention_mask: Tensor  # [B, 1, T, positions] bool: positions that a new token attends to
    max_positions: int  # positions of the longest prompt, new tokens included
    rope_positions: int  # positions that the rotary table must have

    @classmethod
    def pad(
        cls, lengths: np.ndarray, suffixes: Sequence[Sequence[int]], device: torch.device
    ) -> SuffixBatch:
        """Pad suffixes that follow the `lengths` cached positions of their prompts [B]."""
        start_B = torch.from_numpy(lengths)
        counts_B = torch.tensor([len(suffix) for suffix in suffixes])
        longest = int(counts_B.max())
        ids_BT = torch.tensor([[*suffix, *[0] * (longest - len(suffix))] for suffix in suffixes])
        row_index_X, column_index_X = torch.nonzero(
            torch.arange(longest) < counts_B[:, None], as_tuple=True
        )
        position_BT = (start_B[:, None] + torch.arange(longest)).to(device)
        max_positions = int((start_B + counts_B).max())
        return cls(
            ids_BT.to(device),
            position_BT,
            row_index_X.to(device),
            column_index_X.to(device),
            (counts_B - 1).to(device),
            torch.arange(max_positions, device=device) <= position_BT[:, None, :, None],
            max_positions,
            int(start_B.max()) + longest,
        )

    @property
    def position_X(self) -> Tensor:
        """Return the position of each new token in its prompt."""
        return self.position_BT[self.row_index_X, self.column_index_X]

    def select(self, values_BT: Tensor) -> Tensor:
        """Return the values of the new tokens [X, ...], without padding."""
        return values_BT[self.row_index_X, self.column_index_X]

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Return the attention [B, T, H * D] of queries [B, T, H, D] to the keys and values
        [B, K, positions, D] of their prompts, up to each query's own position.
        """
        repeat = q.shape[2] // keys.shape[1]
        keys, values = (x.repeat_interleave(repeat, dim=1) for x in (keys, values))
        attention = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=self.attention_mask
        )
        return attention.transpose(1, 2).flatten(2)
