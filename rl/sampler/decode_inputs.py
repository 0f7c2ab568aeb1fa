"""Run a decode step without the host: all its inputs and outputs are in buffers at fixed addresses.

All devices use the same function: a CUDA graph captures it (cuda_graphs.py), and other devices call
it directly, which verifies the graph. A finished row (`remaining` 0) still takes part: it writes to
an unused page, and its token does not change. Shapes: R rows (of a bucket), B pages of a table, S
positions of a page, G groups, H query heads, K key heads, D head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kernels import SharedPages, compute_paged_attention, decode_ops, sample_tokens
from rl.sampler.expert_layers import stack_choices
from rl.sampler.forward_fast import FastForward
from rl.sampler.token_sampling import RowSamplingSettings
from rl.sampler.token_sampling import sample_tokens as draw_from_logits


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Hold the inputs and outputs of a step, for the largest number of rows; `allocate` sets the
    sizes.

    By row: the `token` to feed, its `position`, the number of `remaining` tokens to sample (0:
    finished), `skip` positions that are in shared pages, `table` of the other pages, `stop_row` of
    `stops`. `shares` to `shared_length` are `kernels.SharedPages`. `at`: the step since the last
    host synchronization; it selects the row of `uniform`, `tokens` and `logprobs`.
    """

    token: Tensor  # [R] int64
    position: Tensor  # [R] int64
    remaining: Tensor  # [R] int64
    skip: Tensor  # [R] int64
    table: Tensor  # [R, B] int32
    stop_row: Tensor  # [R] int64
    temperature: Tensor  # [R] float32, above 0; 1 for greedy rows
    greedy: Tensor  # [R] bool
    shares: Tensor  # [R] bool: whether the row is in a group
    order: Tensor  # [R] int64
    place: Tensor  # [R] int64
    group: Tensor  # [R] int64
    starts: Tensor  # [G + 1] int32: start of each group's rows in `order`
    shared_table: Tensor  # [G, B] int32
    shared_length: Tensor  # [G] int32, positions
    stops: Tensor  # [conditions, V] bool
    at: Tensor  # [1] int64
    uniform: Tensor  # [steps, R] float64
    tokens: Tensor  # [steps, R] int64
    logprobs: Tensor  # [steps, R] float32
    experts: Tensor  # [steps, R, B K] int16: experts of the fed tokens; B K is 0 without recording

    @classmethod
    def allocate(
        cls,
        rows: int,
        pages: int,
        steps: int,
        conditions: int,
        vocab: int,
        device: torch.device,
        choices: int = 0,
    ) -> DecodeInputs:
        """Allocate the buffers: zeros, and temperature 1. `choices`: recorded experts per token."""
        groups = max(rows // 2, 1)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            **dict.fromkeys(
                ("token", "position", "remaining", "skip", "stop_row", "order", "place", "group"),
                ((rows,), torch.int64),
            ),
            **dict.fromkeys(("greedy", "shares"), ((rows,), torch.bool)),
            "table": ((rows, pages), torch.int32),
            "starts": ((groups + 1,), torch.int32),
            "shared_table": ((groups, pages), torch.int32),
            "shared_length": ((groups,), torch.int32),
            "stops": ((conditions, vocab), torch.bool),
            "at": ((1,), torch.int64),
            "uniform": ((steps, rows), torch.float64),
            "tokens": ((steps, rows), torch.int64),
            "logprobs": ((steps, rows), torch.float32),
            "experts": ((steps, rows, choices), torch.int16),
        }
        made = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in shapes.items()
        }
        made["temperature"] = torch.ones(rows, device=device)
        return cls(**made)

    def first_rows(self, rows: int) -> DecodeInputs:
        """Return views of the first `rows` rows.

        `narrow` is used because Python's indexing queries the device even of fake tensors.
        """
        groups = max(rows // 2, 1)
        row_dims = dict.fromkeys(("uniform", "tokens", "logprobs", "experts"), 1)
        counts = {"starts": groups + 1, "shared_table": groups, "shared_length": groups}
        whole = {"stops", "at"}
        views = {field.name: getattr(self, field.name) for field in fields(self)}
        return DecodeInputs(**{
            name: t if name in whole else t.narrow(row_dims.get(name, 0), 0, counts.get(name, rows))
            for name, t in views.items()
        })  # fmt: skip


def decode_step(
    model: FastForward,
    kv: list[Tensor],
    ropes: Tensor,
    buffers: DecodeInputs,
    rows: int,
    width: int,
    shared: bool,
) -> None:
    """Sample a token for each of the first `rows` rows that has not finished.

    `width`: the largest number of pages of a table to read. `kv` [2, pages + 1, S, K, D] of each
    layer; the last page belongs to no sequence. `ropes` [ropes, 2, positions, D]
    (`FastForward.rope_tables`). `shared`: whether some rows are in groups with shared pages, which
    are read once for all rows of a group.
    """
    a, b = model.architecture, buffers.first_rows(rows)
    position = b.position
    page, place, length = _locate_cache_entries(b, kv[0])
    table = b.table.narrow(1, 0, width)
    shared_table = b.shared_table.narrow(1, 0, width)
    groups = (
        SharedPages(b.order, b.place, b.group, b.shares, b.starts, shared_table, b.shared_length)
        if shared
        else None
    )
    activate = decode_ops.silu_mul if a.activation == "silu" else model.activate
    choices: list[Tensor] | None = [] if b.experts.shape[2] else None
    residual, x = model.embed_tokens(b.token), None
    for i, layer in enumerate(model.layers):
        normed = _add_and_norm(x, residual, layer.norm_in, a.eps)
        qkv = model.project_qkv(layer, normed).unflatten(
            -1, (a.heads + 2 * a.key_heads, a.head_width)
        )
        norm_qk = None if layer.norm_qk is None else layer.norm_qk.view(2, -1)
        q = decode_ops.rope_to_cache(
            qkv, norm_qk, a.eps, ropes.select(0, layer.rope), position, kv[i], page, place, a.heads
        )
        attended = compute_paged_attention(q, kv[i], table, length, groups, layer.bounds).flatten(1)
        x = model.scale_residual(model.rms(layer.out(attended), layer.norm_attention_out))
        normed = _add_and_norm(x, residual, layer.norm_mlp, a.eps)
        part = model.apply_mlp(layer, normed, activate, None, choices, fixed_shapes=True)
        x = model.scale_residual(model.rms(part, layer.norm_mlp_out))
    hidden = model.scale_hidden(decode_ops.fused_add_rms_norm(x, residual, model.norm_E, a.eps))
    token, logprob = _sample(
        model, hidden, b.uniform.index_select(0, b.at).squeeze(0), b.temperature, b.greedy
    )
    _record_tokens(b, token, logprob, choices)


def _add_and_norm(x: Tensor | None, residual: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Add x to the residual in place (None: nothing); return the norm of the sum, or the sum itself
    without a norm.
    """
    if weight is not None:
        return decode_ops.fused_add_rms_norm(x, residual, weight, eps)
    return residual if x is None else residual.add_(x)


def _locate_cache_entries(b: DecodeInputs, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the page [R] and the place in it [R] of each row's new key and value, and the number
    of positions that the row reads [R]. A finished row writes to the unused last page and reads one
    position.
    """
    unused_page, block_size = kv.shape[1] - 1, kv.shape[2]
    ended = b.remaining < 1
    private_position = b.position - b.skip
    page = (
        b.table.gather(1, (private_position // block_size).unsqueeze(1))
        .squeeze(1)
        .long()
        .masked_fill(ended, unused_page)
    )
    return page, b.position % block_size, (private_position + 1).int().masked_fill_(ended, 1)


def _record_tokens(
    b: DecodeInputs, token: Tensor, logprob: Tensor, choices: list[Tensor] | None
) -> None:
    """Store the sampled tokens [R] and logprobs [R] of the rows that have not finished, and advance
    these rows by one position. `choices`: the experts [R, K] of each layer, if recorded.
    """
    if choices is not None:
        b.experts.index_copy_(0, b.at, stack_choices(choices).unsqueeze(0))
    lives = b.remaining > 0
    token = torch.where(lives, token, b.token, out=b.token)
    b.tokens.index_copy_(0, b.at, token.unsqueeze(0))
    b.logprobs.index_copy_(0, b.at, logprob.unsqueeze(0))
    stopped = b.stops.view(-1).index_select(0, b.stop_row * b.stops.shape[1] + token)
    b.position.add_(lives)
    b.remaining.sub_(lives.long()).masked_fill_(stopped, 0)
    b.at.add_(1)


def _sample(
    model: FastForward, hidden: Tensor, uniform: Tensor, temperature: Tensor, greedy: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample tokens and logprobs, without storing logits if the head is a plain matrix."""
    head = model.head
    plain = head.adapter is None and head.bias is None and not head.softcap
    if plain and hidden.dtype == head.weight.dtype:
        return sample_tokens(hidden, head.weight, temperature, uniform, greedy)
    return draw_from_logits(
        head(hidden), uniform, RowSamplingSettings(temperature_N=temperature, greedy_N=greedy)
    )
