"""Share each micro-batch among a group of N ranks by its positions (context parallelism).

Rank r of a group holds the columns [r C, (r + 1) C) of every row, C = L / N. Embedding, MLPs, norms
and the output head run on these columns alone. Attention exchanges its inputs (DeepSpeed-Ulysses,
arXiv 2309.14509): each rank gets all L positions of 1/N of the heads, and its output is exchanged
back. The logprobs of all tokens are then gathered on each rank of the group, which all compute the
same loss. So a loss over whole sequences needs no other code. Each rank's backward yields its
columns' part of the gradient, and a backend's sum over all ranks yields the gradient.

DeepSpeed's UlyssesSPAttentionHF, which accelerate uses, does not fit: it takes no masks (packed
rows, shared prompts, windows), fixes the number of rows, rejects models whose number of heads is no
multiple of N, and accelerate uses it under DeepSpeed alone. Shapes: B rows, H heads, L positions, D
head width.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rl.distributed import collectives
from rl.errors import UserError
from rl.layers import ModelLayers, get_config_number
from rl.learner.varlen_attention import replace_attention
from rl.sampler import find_rope_switch


@dataclass(frozen=True)
class SequenceShard:
    """Hold this rank's columns of a micro-batch, and what its attention needs of all columns.

    input_ids, position_ids  int64 [B, C]
    all_positions            int64 [B, L]
    sequences                int32 [B, L] the sequence of each position of a packed row; None if a
                             row is a single sequence, has a mask, or the batch has `bounds`
    token_index              int64 [S] this rank's tokens in input_ids.flatten(). S is the same on
                             every rank of the group: index 0 is repeated
    tokens                   int64 [S] the same tokens in the flat tokens of the micro-batch
    order                    int64 [T] each token of the micro-batch in the gathered [N S]
    """

    input_ids: Tensor
    position_ids: Tensor
    all_positions: Tensor
    sequences: Tensor | None
    token_index: Tensor
    tokens: Tensor
    order: Tensor


def pad_columns(array: np.ndarray, size: int, value: int) -> np.ndarray:
    """Return [B, L] with columns of `value` on the right, so that `size` divides their number."""
    return np.pad(array, ((0, 0), (0, -array.shape[1] % size)), constant_values=value)


def make_shard(
    input_ids: np.ndarray,
    position_ids: np.ndarray | None,
    token_index: np.ndarray,
    lengths: Sequence[int] | None,
    group: collectives.RankGroup,
    put: Callable[[np.ndarray], Tensor],
) -> tuple[SequenceShard, np.ndarray]:
    """Return this rank's shard of a micro-batch whose columns are padded (`pad_columns`), and its
    `tokens` in host memory.

    `token_index`: int64 [T] position of each token in input_ids.flatten(). `lengths`: of the
    sequences of a packed row, else None. `put`: copies an array to the device.
    """
    rows, width = input_ids.shape
    columns = width // group.size
    if position_ids is None:
        position_ids = np.tile(np.arange(width), (rows, 1))
    sequences = None
    if lengths is not None and len(lengths) > 1:
        ends = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        sequences = np.full((1, width), len(lengths), np.int32)
        sequences[0, : len(ends)] = ends
    row, column = np.divmod(token_index, width)
    holder = column // columns
    local = row * columns + column % columns
    most = int(np.bincount(holder, minlength=group.size).max())
    order = np.empty_like(token_index)
    for rank in range(group.size):
        (held,) = np.nonzero(holder == rank)
        order[held] = rank * most + np.arange(len(held))
    (mine,) = np.nonzero(holder == group.rank)
    padding = (0, most - len(mine))
    tokens = np.pad(mine, padding)
    part = slice(group.rank * columns, (group.rank + 1) * columns)
    shard = SequenceShard(
        put(np.ascontiguousarray(input_ids[:, part])),
        put(np.ascontiguousarray(position_ids[:, part])),
        put(position_ids),
        None if sequences is None else put(sequences),
        put(np.pad(local[mine], padding)),
        put(tokens),
        put(order),
    )
    return shard, tokens


class _Exchange(torch.autograd.Function):
    """Send part i of the first dimension, of N parts, to rank i, and receive a part of each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: ContextParallel) -> Tensor:
        ctx.parallel = parallel
        return parallel.exchange(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.parallel.exchange(gradients[0]), None


class _Gather(torch.autograd.Function):
    """Concatenate the [S, ...] of all ranks of a group to [N S, ...].

    Every rank computes the same function of the result, so the backward keeps this rank's part of
    the gradient and adds nothing up.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: ContextParallel) -> Tensor:
        ctx.part = slice(parallel.group.rank * len(x), (parallel.group.rank + 1) * len(x))
        return parallel.gather(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0][ctx.part], None


class ContextParallel:
    """Run a model's attention on a group of ranks. `device`: that of the group's messages (a layout
    probe may run on the CPU of a GPU's rank).
    """

    def __init__(self, group: collectives.RankGroup, device: torch.device):
        self.group, self.device = group, device

    def exchange(self, x: Tensor) -> Tensor:
        return self.group.all_to_all(x.to(self.device)).to(x.device)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.group.all_gather(x.to(self.device))).to(x.device)

    def gather_tokens(self, x: Tensor | None, shard: SequenceShard) -> Any:
        """Return the output [T, ...] of all tokens from this rank's [S, ...]; None stays None."""
        return None if x is None else _Gather.apply(x, self)[shard.order]

    def split_attention(
        self, model: Any, shard: SequenceShard, attend_row: Callable[..., Any] | None = None
    ) -> AbstractContextManager[None]:
        """Return a context that runs attention on all positions of this rank's heads, in forwards
        and backwards. `attend_row`: attention that needs no mask, in the place of the model's;
        otherwise the lengths of masks become those of all positions.
        """
        return replace_attention(
            model,
            lambda before, *args, **kwargs: self._attend(
                attend_row or before, shard, *args, **kwargs
            ),
            lambda before, **kwargs: (
                _make_full_mask(before, shard, **kwargs) if attend_row is None else None
            ),
        )

    def _attend(
        self,
        attend: Callable[..., Any],
        shard: SequenceShard,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return attention's output [B, C, H, D] of this rank's columns; the inputs are
        [B, H, C, D]. `attend`: computes attention over all positions.
        """
        key_heads, per_key = key.shape[1], query.shape[1] // key.shape[1]
        spread = _spread_heads(query, key, value, self.group.size)
        padded_heads = spread[0].shape[1]
        query, key, value = (self._exchange_dims(x) for x in spread)
        if "position_ids" in kwargs:
            kwargs["position_ids"] = shard.all_positions
        with _set_query_groups(module, query.shape[1] // key.shape[1]):
            out, *_ = attend(module, query, key, value, attention_mask, **kwargs)
        out = self._exchange_dims(out)
        padded_keys = key_heads + (-key_heads % self.group.size) * (key_heads >= self.group.size)
        out = out.unflatten(2, (padded_keys, padded_heads // padded_keys))
        return out[:, :, :key_heads, :per_key].flatten(2, 3).contiguous(), None

    def _exchange_dims(self, x: Tensor) -> Tensor:
        """Return `x` with its second dimension divided among the ranks and its third gathered.

        [B, H, C, D] becomes [B, H / N, L, D], and [B, L, H / N, D] becomes [B, C, H, D].
        """
        parts = x.unflatten(1, (self.group.size, -1)).movedim(1, 0).contiguous()
        return _Exchange.apply(parts, self).movedim(0, 2).flatten(2, 3)


def _spread_heads(
    query: Tensor, key: Tensor, value: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return heads whose numbers are multiples of `size`, each query head beside its key head.

    Fewer key heads than ranks are repeated, and the query heads of a key head are divided among its
    copies. Heads of zeros fill up where a number does not divide.
    """
    key_heads = key.shape[1]
    query = query.unflatten(1, (key_heads, -1))
    if key_heads >= size:
        query, key, value = (_append_heads(x, 1, -key_heads % size) for x in (query, key, value))
    else:
        copies = size // math.gcd(key_heads, size)
        query = _append_heads(query, 2, -query.shape[2] % copies)
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    return query.flatten(1, 2), key, value


def _append_heads(x: Tensor, dim: int, count: int) -> Tensor:
    """Return `x` with `count` heads of zeros at the end of dimension `dim`."""
    return F.pad(x, (*[0, 0] * (x.ndim - dim - 1), 0, count)) if count else x


@contextlib.contextmanager
def _set_query_groups(module: Any, count: int) -> Iterator[None]:
    """Let attention functions repeat each key head for `count` query heads."""
    before = getattr(module, "num_key_value_groups", None)
    if before is not None:
        module.num_key_value_groups = count
    try:
        yield
    finally:
        if before is not None:
            module.num_key_value_groups = before


def _make_full_mask(
    make_mask: Callable[..., Any], shard: SequenceShard, **kwargs: Any
) -> Tensor | None:
    """Return transformers' mask for all positions instead of this rank's."""
    from transformers.masking_utils import packed_sequence_compatibility_function

    if shard.sequences is not None:
        kwargs["mask_function"] = packed_sequence_compatibility_function(
            kwargs["mask_function"], shard.all_positions, shard.sequences
        )
        kwargs["allow_is_causal_skip"] = False
    length = shard.all_positions.shape[1]
    return make_mask(**{**kwargs, "q_length": length, "kv_length": length})


def check_divisible(model: Any, layers: ModelLayers, size: int, name: str) -> None:
    """Raise UserError if a model's sequences cannot be divided among `size` ranks."""
    heads = get_config_number(model, "num_attention_heads", "n_head") or 1
    reasons = {
        "has layers that carry a state from token to token": layers.has_state,
        "reads images, whose positions are not divided": layers.images,
        "selects positions before attention": layers.selected_positions is not None,
        "takes no position_ids": not layers.takes_positions,
        "has rotary frequencies that depend on the length of a row": find_rope_switch(model)
        is not None,
        f"has {heads} attention heads, fewer than the ranks": heads < size,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UserError(
                f"context_parallel_size {size} divides sequences among ranks, but {name} {reason}: "
                "set it to 1"
            )
