"""Run several decode steps over static buffers between two host synchronizations.

All inputs and outputs of a step are in buffers at fixed addresses. On CUDA the steps are graphs,
captured for each bucket of rows; other devices call the same function directly, which verifies the
graph. A graph refers to addresses: weights that are loaded in place (`Decoder.load_`) take effect
at its next replay, while another decoder needs separate graphs. Adapters are captured unmerged.
kv_cache_pool.py keeps graphs beyond the life of an engine.

A finished row (`remaining` 0) still takes part: it writes to an unused block, and its token does
not change. Shapes: R rows (of a bucket), B blocks of a table, S positions of a block, G groups, H
query heads, K key heads, D head width, V vocabulary, M truncated rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from kernels import SharedPages, compute_paged_attention, decode_ops, sample_tokens
from rl.sampler.expert_layers import stack_choices
from rl.sampler.forward_fast import FastForward, ForwardOps
from rl.sampler.token_sampling import (
    RowSamplingSettings,
    compute_untruncated_logprobs,
    sample_with_torch,
    truncate_logits,
)
from rl.sampler.token_sampling import sample_tokens as draw_from_logits
from rl.types import TRUNCATION_DEFAULTS

# truncated rows that are sampled at once: sorting a row of 152,000 logits takes 8 MB
_TRUNCATED_AT_ONCE = 64
# written by a step
_STEP_OUTPUTS = ("token", "position", "remaining", "at", "tokens", "logprobs", "experts")


def _buffer(dims: str, dtype: torch.dtype = torch.int64) -> Any:
    """Describe a buffer: its dimensions, as `DecodeInputs.allocate` names them, and its dtype."""
    return field(metadata={"dims": dims, "dtype": dtype})


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Hold the inputs and outputs of a step, for the largest number of rows; `allocate` sets the
    sizes.

    By row: the `token` to feed, its `position`, the number of `remaining` tokens to sample (0:
    finished), `skip` positions that are in shared blocks, `table` of the other blocks, `stop_row`
    of `stops`. `truncated`: the rows whose distribution is truncated, with repeated rows up to a
    bucket, their `limits` (`find_limits`), and whether their logprobs are `untruncated`. `shares`
    to `shared_length` are `kernels.SharedPages`. `at`: the step since the last
    host synchronization; it selects the row of `uniform`, `tokens` and `logprobs`. `packed`: the
    memory of the buffers with an entry for each row or group, a line each, so that a single copy
    fills them (`pack`).
    """

    token: Tensor = _buffer("R")
    position: Tensor = _buffer("R")
    remaining: Tensor = _buffer("R")
    skip: Tensor = _buffer("R")
    table: Tensor = _buffer("RB", torch.int32)
    stop_row: Tensor = _buffer("R")
    temperature: Tensor = _buffer("R", torch.float32)  # above 0; 1 for greedy rows
    greedy: Tensor = _buffer("R", torch.bool)
    truncated: Tensor = _buffer("R")
    limits: Tensor = _buffer("LR", torch.float64)
    untruncated: Tensor = _buffer("R", torch.bool)
    shares: Tensor = _buffer("R", torch.bool)  # whether the row is in a group
    order: Tensor = _buffer("R")
    place: Tensor = _buffer("R")
    group: Tensor = _buffer("R")
    starts: Tensor = _buffer("+", torch.int32)  # start of each group's rows in `order`
    shared_table: Tensor = _buffer("GB", torch.int32)
    shared_length: Tensor = _buffer("G", torch.int32)  # positions
    stops: Tensor = _buffer("CV", torch.bool)
    at: Tensor = _buffer("1")
    uniform: Tensor = _buffer("SR", torch.float64)
    tokens: Tensor = _buffer("SR")
    logprobs: Tensor = _buffer("SR", torch.float32)
    experts: Tensor = _buffer("SRK", torch.int16)  # of the fed tokens
    packed: Tensor = _buffer("NY", torch.uint8)

    @classmethod
    def allocate(
        cls,
        rows: int,
        blocks: int,
        steps: int,
        conditions: int,
        vocab: int,
        device: torch.device,
        choices: int = 0,
    ) -> DecodeInputs:
        """Allocate the buffers: zeros, and temperature 1. `choices`: recorded experts per token.

        Dimensions: R rows, G groups, + groups and 1 more, B blocks of a table, S steps, C stop
        conditions, V vocabulary, K choices, L parameters that truncate, N packed buffers, Y bytes.
        """
        packed = _find_packed_buffers()
        groups = max(rows // 2, 1)
        sizes = {"R": rows, "G": groups, "+": groups + 1, "B": blocks, "S": steps, "1": 1}
        sizes |= {"C": conditions, "V": vocab, "K": choices, "L": len(TRUNCATION_DEFAULTS)}
        sizes |= {"N": len(packed), "Y": 8 * rows}
        buffers = {
            buffer.name: torch.zeros(
                [sizes[dim] for dim in buffer.metadata["dims"]],
                dtype=buffer.metadata["dtype"],
                device=device,
            )
            for buffer in fields(cls)
        }
        for line, name in zip(buffers["packed"].unbind(), packed, strict=True):
            buffers[name] = line.view(buffers[name].dtype).narrow(0, 0, len(buffers[name]))
        buffers["temperature"].fill_(1.0)
        return cls(**buffers)

    @staticmethod
    def pack(rows: int, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the first bytes of `packed`, for `rows` rows: these values, then zeros. Values of
        other names are ignored.
        """
        dtypes = _find_packed_buffers()
        packed = np.zeros((len(dtypes), 8 * rows), np.uint8)
        for line, (name, dtype) in zip(packed, dtypes.items(), strict=True):
            if name in values:
                line.view(dtype)[: len(values[name])] = values[name]
        return packed

    def first_rows(self, rows: int) -> DecodeInputs:
        """Return views of the first `rows` rows.

        `narrow` is used because Python's indexing queries the device even of fake tensors.
        """
        groups, views = max(rows // 2, 1), dict[str, Tensor]()
        counts = {"R": rows, "G": groups, "+": groups + 1}
        for buffer in fields(self):
            view = getattr(self, buffer.name)
            for dim, name in enumerate(buffer.metadata["dims"]):
                if name in counts:
                    view = view.narrow(dim, 0, counts[name])
            views[buffer.name] = view
        return DecodeInputs(**views)


@cache
def _find_packed_buffers() -> dict[str, np.dtype]:
    """Return the numpy dtype of each buffer of `DecodeInputs.packed`, in order."""
    return {
        buffer.name: np.dtype(str(buffer.metadata["dtype"]).removeprefix("torch."))
        for buffer in fields(DecodeInputs)
        if buffer.metadata["dims"] in ("R", "G", "+")
    }


def decode_step(
    model: FastForward,
    kv: list[Tensor],
    ropes: Tensor,
    buffers: DecodeInputs,
    rows: int,
    width: int,
    shared: bool,
    truncated: int = 0,
) -> None:
    """Sample a token for each of the first `rows` rows that has not finished.

    `width`: the largest number of blocks of a table to read. `kv` [2, blocks + 1, S, K, D] of each
    layer; the last block belongs to no sequence. `ropes` [ropes, 2, positions, D]
    (`FastForward.rope_tables`). `shared`: whether some rows are in groups with shared blocks, which
    are read once for all rows of a group. `truncated`: number of rows in `buffers.truncated`.
    """
    a, b = model.architecture, buffers.first_rows(rows)
    position = b.position
    block, place, length = _locate_cache_entries(b, kv[0])
    table = b.table.narrow(1, 0, width)
    shared_table = b.shared_table.narrow(1, 0, width)
    groups = (
        SharedPages(b.order, b.place, b.group, b.shares, b.starts, shared_table, b.shared_length)
        if shared
        else None
    )
    choices: list[Tensor] | None = [] if b.experts.shape[2] else None

    def attend(index: int, qkv: Tensor) -> Tensor:
        layer = model.layers[index]
        qkv = qkv.unflatten(-1, (a.heads + 2 * a.key_heads, a.head_width))
        norm_qk = None if layer.norm_qk is None else layer.norm_qk.view(2, -1)
        rope = ropes.select(0, layer.rope)
        q = decode_ops.rope_to_cache(
            qkv, norm_qk, a.eps, rope, position, kv[index], block, place, a.heads
        )
        return compute_paged_attention(q, kv[index], table, length, groups, layer.bounds).flatten(1)

    hidden = model.forward(b.token, attend, None, None, choices, _DEVICE_OPS)
    uniform = b.uniform.index_select(0, b.at).squeeze(0)
    token, logprob = _sample(model, hidden, uniform, b.temperature, b.greedy)
    for first in range(0, truncated, _TRUNCATED_AT_ONCE):
        count = min(_TRUNCATED_AT_ONCE, truncated - first)
        index, new_token, new_logprob = _sample_truncated(model, hidden, uniform, b, first, count)
        token = token.index_copy(0, index, new_token)
        logprob = logprob.index_copy(0, index, new_logprob)
    _record_tokens(b, token, logprob, choices)


def _add_and_norm(
    part: Tensor | None, x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add a part to x in place (None: nothing); return x and its norm (see `ForwardOps`)."""
    if weight is not None:
        return x, decode_ops.fused_add_rms_norm(part, x, weight, eps)
    x = x if part is None else x.add_(part)
    return x, x


_DEVICE_OPS = ForwardOps(
    _add_and_norm, lambda gate_up: decode_ops.silu_mul(gate_up), fixed_shapes=True
)


def _locate_cache_entries(b: DecodeInputs, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the block [R] and the place in it [R] of each row's new key and value, and the number
    of positions that the row reads [R]. A finished row writes to the unused last block and reads
    one position.
    """
    unused_block, block_size = kv.shape[1] - 1, kv.shape[2]
    ended = b.remaining < 1
    private_position = b.position - b.skip
    block = (
        b.table.gather(1, (private_position // block_size).unsqueeze(1))
        .squeeze(1)
        .long()
        .masked_fill(ended, unused_block)
    )
    return block, b.position % block_size, (private_position + 1).int().masked_fill_(ended, 1)


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


def _sample_truncated(
    model: FastForward, hidden: Tensor, uniform: Tensor, b: DecodeInputs, first: int, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `count` truncated rows from `first` on, their tokens and logprobs, [M] each."""
    index = b.truncated.narrow(0, first, count)
    logits = model.head(hidden.index_select(0, index)).float()
    scaled = logits / b.temperature.index_select(0, index).unsqueeze(1)
    cut = truncate_logits(scaled, *b.limits.narrow(1, first, count).unbind(0))
    token, logprob = sample_with_torch(cut, uniform.index_select(0, index))
    whole = compute_untruncated_logprobs(scaled, token)
    return index, token, torch.where(b.untruncated.narrow(0, first, count), whole, logprob)


def truncated_bucket(truncated: int, rows: int) -> int:
    """Return the number of truncated rows to capture a graph for: a power of 4, at most `rows`.

    >>> [truncated_bucket(truncated, 24) for truncated in (0, 1, 2, 5, 16, 17)]
    [0, 1, 4, 16, 16, 24]
    """
    return min(4 ** (((truncated - 1).bit_length() + 1) // 2), rows) if truncated else 0


def row_buckets(max_rows: int) -> list[int]:
    """Return the row counts to capture graphs for, ascending; at most half of a bucket's rows are
    unused.

    The last bucket holds `max_rows` rows.

    >>> row_buckets(100)
    [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    """
    sizes = [1, 2, 4, 8, 16, 24, 32]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-2] * 2)
    return [rows for i, rows in enumerate(sizes) if i == 0 or sizes[i - 1] < max_rows]


@contextmanager
def clear_cublas_workspaces() -> Iterator[None]:
    """Clear cuBLAS's workspaces before and after a capture, so that the graph has its own.

    torch keeps a workspace for each stream. Later captures on the stream would use it too, and
    torch frees it with the first of their graphs that ends (pytorch#193402).
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class CUDAGraphRunner:
    """Run steps of `model` over `buffers` and the blocks `kv`.

    `max_blocks` is the largest number of blocks of a block table. The model is only weakly
    referenced.
    """

    def __init__(self, model: FastForward, kv: list[Tensor], buffers: DecodeInputs, max_rows: int):
        self._model, self.kv, self.buffers = ref(model), kv, buffers
        self.buckets = row_buckets(max_rows)
        self.max_blocks = buffers.table.shape[1]
        self.ropes = model.rope_tables(self.max_blocks * kv[0].shape[2])
        # by rows, whether blocks are shared, and truncated rows
        self._graphs: dict[tuple[int, bool, int], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None  # of all captures: they share memory by it

    @property
    def model(self) -> FastForward:
        """Return the decoder's forward, which the engine keeps alive."""
        model = self._model()
        assert model is not None, "the engine must keep the decoder alive"
        return model

    @property
    def uses_graphs(self) -> bool:
        """Return whether steps run as CUDA graphs."""
        return self.buffers.token.is_cuda

    def bucket_for(self, rows: int) -> int:
        """Return the smallest bucket that holds `rows` rows."""
        return next(size for size in self.buckets if size >= rows)

    def prepare(self, rows: int, shared: bool) -> None:
        """Capture the graphs of batches of up to `rows` rows, unless that has been done.

        `shared`: whether rows may be in groups with shared blocks.
        """
        if self.uses_graphs:
            self._get_graph(self.bucket_for(rows), shared)

    def run(self, rows: int, width: int, shared: bool, count: int, truncated: int = 0) -> None:
        """Run `count` steps of the first `rows` rows (a bucket) without synchronization.

        `width`: the current number of blocks of the longest table. `truncated`: a bucket.
        """
        graph = self._get_graph(rows, shared, truncated) if self.uses_graphs else None
        step_args = (self.model, self.kv, self.ropes, self.buffers, rows, width, shared, truncated)
        self.buffers.at.zero_()
        for _ in range(count):
            if graph is None:
                decode_step(*step_args)
            else:
                graph.replay()

    def _get_graph(self, rows: int, shared: bool, truncated: int = 0) -> torch.cuda.CUDAGraph:
        """Return the bucket's graph, after capturing it and all smaller buckets that are missing
        (for truncated rows: it alone).

        Batches shrink, so smaller buckets follow. The largest is captured first, so that the others
        can reuse the memory of its pool. A graph for shared blocks also serves rows without any.
        """
        shared = rows > 1 and (shared or (rows, True, truncated) in self._graphs)
        if (rows, shared, truncated) not in self._graphs:
            saved = {name: getattr(self.buffers, name).clone() for name in _STEP_OUTPUTS}
            sizes = [rows] if truncated else [size for size in self.buckets if size <= rows]
            for size in reversed(sizes):
                key = (size, shared and size > 1, truncated)
                if key not in self._graphs:
                    self._graphs[key] = self._capture(*key)
            for name, before in saved.items():
                getattr(self.buffers, name).copy_(before)
        return self._graphs[rows, shared, truncated]

    def _capture(self, rows: int, shared: bool, truncated: int) -> torch.cuda.CUDAGraph:
        """Capture a graph of a single step; this writes to the buffers and to the unused block."""
        b, state = self.buffers, (self.model, self.kv, self.ropes, self.buffers)
        step_args = (*state, rows, self.max_blocks, shared, truncated)
        with torch.cuda.device(b.token.device):
            # torch's own stream for captures is one of the first device that captured
            self._stream = stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            # warm-up: compiles kernels and allocates workspaces, which a capture may not do
            with torch.cuda.stream(stream):
                b.remaining.zero_()
                b.at.zero_()
                decode_step(*step_args)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: other threads may use the device meanwhile
            with (
                clear_cublas_workspaces(),
                torch.cuda.graph(
                    graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
                ),
            ):
                decode_step(*step_args)
        self._pool = self._pool or graph.pool()
        return graph
