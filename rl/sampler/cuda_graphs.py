"""Run several decode steps over static buffers between two host synchronizations.

All inputs and outputs of a step are in buffers at fixed addresses. On CUDA the steps are graphs,
captured for each bucket of rows; other devices call the same function directly, which verifies the
graph. A graph refers to addresses: weights that are loaded in place (`Decoder.load_`) take effect
at its next replay, while another decoder needs separate graphs. Adapters are captured unmerged
(those of rows by the addresses of their slots, adapter_slots.py), and so are the sums over the
ranks of a tensor-parallel group, whose steps are the same.
kv_cache_pool.py keeps graphs beyond the life of an engine.

A finished row (`remaining` 0) still takes part: it writes to an unused block, and its token does
not change. Shapes: R rows (of a bucket), B blocks of a table, S positions of a block, G groups, H
query heads, K key heads, D head width, V vocabulary, M rows with logits processing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from kernels import SharedPages, compute_paged_attention, decode_ops, sample_tokens
from rl.sampler.expert_layers import stack_choices
from rl.sampler.forward_fast import FastForward, ForwardOps
from rl.sampler.step_buffers import NO_PROCESSING, ProcessedRows, StepBuffers
from rl.sampler.token_counts import MAX_COUNT
from rl.sampler.token_sampling import (
    RowSamplingSettings,
    compute_untruncated_logprobs,
    penalize_logits,
    sample_with_torch,
    truncate_logits,
)
from rl.sampler.token_sampling import sample_tokens as draw_from_logits

# Logits that are processed at once, and the most bytes of temporaries for each: while they are
# sorted, two copies of them (8), the sorted logits and their indices (12), and what torch's sort
# allocates (32: pairs of row and index twice, the keys, and cub's copies of keys and pairs).
_LOGITS_AT_ONCE, _BYTES_PER_LOGIT = 1 << 21, 52
# written by a step
_STEP_OUTPUTS = ("token", "position", "remaining", "at", "tokens", "logprobs", "experts")
# set to 0 before a step that captures: groups of an earlier batch name rows outside of the bucket
_CLEARED = ("remaining", "at", "shares", "order", "place", "group", "starts", "shared_length")


def decode_step(
    model: FastForward,
    kv: list[Tensor],
    ropes: Tensor,
    buffers: StepBuffers,
    rows: int,
    width: int,
    shared: bool,
    processed: ProcessedRows = NO_PROCESSING,
) -> None:
    """Sample a token for each of the first `rows` rows that has not finished.

    `width`: the largest number of blocks of a table to read. `kv` [2, blocks + 1, S, K, D] of each
    layer; the last block belongs to no sequence. `ropes` [ropes, 2, positions, D]
    (`FastForward.rope_tables`). `shared`: whether some rows are in groups with shared blocks, which
    are read once for all rows of a group.
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

    slots = model.adapter_slots
    tiles = None if slots is None else slots.select_tiles(rows)
    hidden = model.forward(b.token, attend, tiles, None, choices, _DEVICE_OPS)
    uniform = b.uniform.index_select(0, b.at).squeeze(0)
    logits = None if _has_plain_head(model, hidden) else model.head(hidden, tiles)
    token, logprob = _sample(model, hidden, logits, uniform, b.temperature, b.greedy)
    for index, *sampled in _sample_processed(model, hidden, logits, uniform, b, processed):
        token = token.index_copy(0, index, sampled[0])
        logprob = logprob.index_copy(0, index, sampled[1])
    if processed.penalizes:
        _count_tokens(b, token, processed.bucket)
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


def _locate_cache_entries(b: StepBuffers, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def _count_tokens(b: StepBuffers, token: Tensor, bucket: int) -> None:
    """Count the sampled tokens [R] of the rows with penalties that have not finished. This follows
    all parts of the rows with logits processing: the last may repeat a row of the first.
    """
    index, count_row, counted = (
        values.narrow(0, 0, bucket) for values in (b.processed_row, b.count_row, b.counted)
    )
    lives = b.remaining.index_select(0, index) > 0
    place = count_row * b.counts.shape[1] + token.index_select(0, index)
    b.counts.view(-1).index_add_(0, place, counted * lives)


def _record_tokens(
    b: StepBuffers, token: Tensor, logprob: Tensor, choices: list[Tensor] | None
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


def _has_plain_head(model: FastForward, hidden: Tensor) -> bool:
    """Return whether the head is a plain matrix, so that a sample needs no stored logits."""
    head = model.head
    adapted = head.adapter is not None or head.table is not None
    plain = not adapted and head.bias is None and not head.softcap
    return plain and hidden.dtype == head.weight.dtype


def _sample(
    model: FastForward,
    hidden: Tensor,
    logits: Tensor | None,
    uniform: Tensor,
    temperature: Tensor,
    greedy: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sample tokens and logprobs. `logits`: None if the head is a plain matrix."""
    if logits is None:
        head = model.head
        return sample_tokens(hidden, head.weight, temperature, uniform, greedy, head.shard)
    settings = RowSamplingSettings(temperature_N=temperature, greedy_N=greedy)
    return _share_sample(model, *draw_from_logits(logits, uniform, settings))


def _share_sample(model: FastForward, token: Tensor, logprob: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sample of the first rank on all ranks that split the decoder: cumulative sums on a
    GPU are not the same bit for bit.
    """
    if model.tp_group is None:
        return token, logprob
    sampled = model.broadcast_tokens(torch.stack([token.double(), logprob.double()]))
    token, logprob = sampled.unbind(0)
    return token.long(), logprob.float()


def _sample_processed(
    model: FastForward,
    hidden: Tensor,
    logits: Tensor | None,
    uniform: Tensor,
    b: StepBuffers,
    processed: ProcessedRows,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the rows with logits processing in parts: their indices, tokens and logprobs, [M] each.
    `logits`: those of all rows, if they are stored.
    """
    most = _count_rows_at_once(model.vocab_size)
    for first in range(0, processed.bucket, most):
        part = processed._replace(bucket=min(most, processed.bucket - first))
        yield _sample_part(model, hidden, logits, uniform, b, first, part)


def _sample_part(
    model: FastForward,
    hidden: Tensor,
    all_logits: Tensor | None,
    uniform: Tensor,
    b: StepBuffers,
    first: int,
    part: ProcessedRows,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a part of `_sample_processed`, from `first` on. This is `sample_next_tokens`."""

    def select(values: Tensor) -> Tensor:
        return values.narrow(-1, first, part.bucket)

    index = select(b.processed_row)
    logits = (
        model.head(hidden.index_select(0, index))
        if all_logits is None
        else all_logits.index_select(0, index)
    ).float()
    temperature = b.temperature.index_select(0, index).unsqueeze(1)
    scaled = _adjust_logits(logits, b, index, first, part)
    scaled.div_(temperature)
    if part.truncates:
        scaled = truncate_logits(scaled, *select(b.limits).unbind(0))
    greedy = b.greedy.index_select(0, index)
    token, logprob = sample_with_torch(scaled, uniform.index_select(0, index), greedy)
    whole = compute_untruncated_logprobs(logits / temperature, token)
    logprob = torch.where(select(b.untruncated), whole, logprob)
    return index, *_share_sample(model, token, logprob)


def _adjust_logits(
    logits: Tensor, b: StepBuffers, index: Tensor, first: int, part: ProcessedRows
) -> Tensor:
    """Return the logits [M, V] of the rows `index` [M] with biases and penalties, and -inf for stop
    ids in rows that may not stop yet. `first`, `part`: see `_sample_part`.
    """

    def select(values: Tensor) -> Tensor:
        return values.narrow(-1, first, part.bucket)

    bias_set, stop_limit = select(b.bias_set), select(b.stop_limit)
    tokens, biases = b.bias_tokens.index_select(0, bias_set), b.biases.index_select(0, bias_set)
    is_early = b.remaining.index_select(0, index) > stop_limit
    is_stop = b.stops.index_select(0, b.stop_row.index_select(0, index))
    adjusted = logits.scatter_add(1, tokens, biases)
    if part.penalizes:
        counts = b.counts.index_select(0, select(b.count_row))
        penalties = select(b.penalties).unsqueeze(-1).unbind()
        times = counts.bitwise_and(MAX_COUNT)
        adjusted = penalize_logits(adjusted, times, counts > 0, *penalties)
    return adjusted.masked_fill_(is_stop.logical_and_(is_early.unsqueeze(1)), -torch.inf)


def _count_rows_at_once(vocab: int) -> int:
    """Return the most rows whose logits are processed at once."""
    return max(_LOGITS_AT_ONCE // vocab, 1)


def count_processing_bytes(rows: int, vocab: int) -> int:
    """Return the most bytes of temporaries of a graph with logits processing of up to `rows`
    rows, which are as many as its bucket.
    """
    return _BYTES_PER_LOGIT * min(row_buckets(rows)[-1], _count_rows_at_once(vocab)) * vocab


def processed_bucket(count: int, rows: int) -> int:
    """Return the number of rows with logits processing to capture a graph for: a power of 4, at
    most `rows`.

    >>> [processed_bucket(count, 24) for count in (0, 1, 2, 5, 16, 17)]
    [0, 1, 4, 16, 16, 24]
    """
    return min(4 ** (((count - 1).bit_length() + 1) // 2), rows) if count else 0


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


# runners whose graphs contain sums over ranks
_tp_runners: WeakSet[CUDAGraphRunner] = WeakSet()


def free_tp_graphs() -> None:
    """Free the graphs that contain sums over ranks, also where the traceback of an error still
    refers to their runner: NCCL ends a communicator only when none of its graphs exists.
    """
    for runner in list(_tp_runners):
        runner.free_graphs()


class CUDAGraphRunner:
    """Run steps of `model` over `buffers` and the blocks `kv`.

    `max_blocks` is the largest number of blocks of a block table. The model is only weakly
    referenced.
    """

    def __init__(self, model: FastForward, kv: list[Tensor], buffers: StepBuffers, max_rows: int):
        self._model, self.kv, self.buffers = ref(model), kv, buffers
        self.buckets = row_buckets(max_rows)
        self.max_blocks = buffers.table.shape[1]
        self.ropes = model.rope_tables(self.max_blocks * kv[0].shape[2])
        # by rows, whether blocks are shared, and rows with logits processing
        self._graphs: dict[tuple[int, bool, ProcessedRows], torch.cuda.CUDAGraph] = {}
        self._layout = 0  # of the adapters' tables that the graphs read
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None  # of all captures: they share memory by it
        if model.tp_group is not None:
            _tp_runners.add(self)

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

    def follow_layout(self) -> None:
        """Free the graphs if the tables of the adapters of rows have been rebuilt."""
        slots = self.model.adapter_slots
        if slots is not None and slots.layout != self._layout:
            self._layout = slots.layout
            self.free_graphs()

    def free_graphs(self) -> None:
        """Free all graphs. They are captured again if steps follow."""
        self._graphs.clear()
        self._pool = None  # torch frees the memory with the last graph

    def prepare(self, rows: int, shared: bool) -> None:
        """Capture the graphs of batches of up to `rows` rows, unless that has been done.

        `shared`: whether rows may be in groups with shared blocks.
        """
        if self.uses_graphs:
            self._get_graph(self.bucket_for(rows), shared)

    def run(
        self,
        rows: int,
        width: int,
        shared: bool,
        count: int,
        processed: ProcessedRows = NO_PROCESSING,
    ) -> None:
        """Run `count` steps of the first `rows` rows (a bucket) without synchronization.

        `width`: the current number of blocks of the longest table.
        """
        graph = self._get_graph(rows, shared, processed) if self.uses_graphs else None
        step_args = (self.model, self.kv, self.ropes, self.buffers, rows, width, shared, processed)
        self.buffers.at.zero_()
        for _ in range(count):
            if graph is None:
                decode_step(*step_args)
            else:
                graph.replay()

    def _get_graph(
        self, rows: int, shared: bool, processed: ProcessedRows = NO_PROCESSING
    ) -> torch.cuda.CUDAGraph:
        """Return the bucket's graph, after capturing it and all smaller buckets that are missing
        (with logits processing: it alone).

        Batches shrink, so smaller buckets follow. The largest is captured first, so that the others
        can reuse the memory of its pool. A graph for shared blocks also serves rows without any.
        """
        shared = rows > 1 and (shared or (rows, True, processed) in self._graphs)
        if (rows, shared, processed) not in self._graphs:
            changed = self._buffers_of({*_STEP_OUTPUTS, *_CLEARED})
            saved = [buffer.clone() for buffer in changed]
            sizes = [rows] if processed.bucket else [size for size in self.buckets if size <= rows]
            for size in reversed(sizes):
                key = (size, shared and size > 1, processed)
                if key not in self._graphs:
                    self._graphs[key] = self._capture(*key)
            for buffer, before in zip(changed, saved, strict=True):
                buffer.copy_(before)
        return self._graphs[rows, shared, processed]

    def _buffers_of(self, names: Iterable[str]) -> list[Tensor]:
        """Return the buffers of these names, and the tiles of the adapters of rows."""
        slots = self.model.adapter_slots
        tiles = [] if slots is None else [slots.tiles]
        return [*(getattr(self.buffers, name) for name in names), *tiles]

    def _capture(self, rows: int, shared: bool, processed: ProcessedRows) -> torch.cuda.CUDAGraph:
        """Capture a graph of a single step; this writes to the buffers and to the unused block."""
        b, state = self.buffers, (self.model, self.kv, self.ropes, self.buffers)
        step_args = (*state, rows, self.max_blocks, shared, processed)
        with torch.cuda.device(b.token.device):
            # torch's own stream for captures is one of the first device that captured
            self._stream = stream = self._stream or torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            # warm-up: compiles kernels and allocates workspaces, which a capture may not do
            with torch.cuda.stream(stream):
                for buffer in self._buffers_of(_CLEARED):
                    buffer.zero_()
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
