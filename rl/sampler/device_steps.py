"""Run several decode steps of the rows of a paged cache between two host syncs (multi-step
scheduling).

The device feeds and samples tokens and ends rows by itself, because the random number of each token
is known in advance. cuda_graphs.py runs the steps; this module copies the rows to its buffers, and
their tokens back. Shapes: N rows of the engine, R rows of a bucket, S steps, B * K recorded experts
of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl.sampler.block_tables import private_tables, split_block_tables
from rl.sampler.cuda_graphs import CUDAGraphRunner, processed_bucket, row_buckets
from rl.sampler.decoder_fast import MultiAdapterDecoder
from rl.sampler.kv_cache_pool import KVCachePool
from rl.sampler.paged_state import PagedState
from rl.sampler.running_rows import RunningRows
from rl.sampler.sampling_requests import SequenceGroup
from rl.sampler.step_buffers import ProcessedRows, StepBuffers
from rl.sampler.stop_conditions import StopTable
from rl.sampler.token_counts import PENALTIES, TokenCountTable
from rl.sampler.token_sampling import (
    find_adjusted_rows,
    find_host_rows,
    find_limits,
    find_truncated_rows,
)


@dataclass(slots=True)
class Chunk:
    """Hold steps that were launched, and their results on the host, complete after `event`."""

    count: int  # steps
    rows: int  # device rows
    shared: bool
    processed: ProcessedRows
    columns: np.ndarray  # device row of each running row, when the chunk before it has been read
    sampled: Tensor  # tokens and logprobs, float64 [2, count, rows]
    experts: Tensor | None  # of the fed tokens, [count, rows, B * K], if recorded
    event: torch.cuda.Event | None = None

    def read(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Wait for the results; return tokens and logprobs [count, rows], and the experts."""
        if self.event is not None:
            self.event.synchronize()
        tokens, logprobs = self.sampled.numpy()
        experts = None if self.experts is None else self.experts.numpy()
        return tokens.astype(np.int64), logprobs, experts


class DeviceSteps:
    """Launch steps of `rows`, whose keys and values are in `state`, while `can_run`.

    `groups`: the requests of the rows, by id. `max_positions`: the most positions of a sequence.
    """

    def __init__(
        self,
        rows: RunningRows,
        groups: Mapping[int, SequenceGroup],
        state: PagedState,
        stops: StopTable,
        pool: KVCachePool,
        max_rows: int,
        max_positions: int,
        steps_per_sync: int,
    ):
        self._rows, self._groups, self._state = rows, groups, state
        self._stops, self._pool = stops, pool
        # the position of an ended row is one past its last token
        self._max_blocks = state.block_manager.num_blocks_for(max_positions) + 1
        self._max_rows, self.steps_per_sync = max_rows, steps_per_sync
        self.num_syncs = 0
        self.runner: CUDAGraphRunner | None = None  # of the last steps
        # step buffers that hold the stop table, and the table that they hold
        self._stop_table_copy: tuple[StepBuffers | None, np.ndarray | None] = (None, None)
        # step buffers that hold biases, and the requests of their sets
        self._biases_copy: tuple[StepBuffers | None, list[int]] = (None, [])
        self._counts = TokenCountTable()  # of rows with penalties
        self._skip = np.zeros(0, np.int64)  # positions of the device rows in shared blocks
        self._tiles = np.zeros((0, 0), np.int32)  # of the adapters of rows, on the device
        self._layout = 0  # of their tables (`AdapterSlots.layout`)

    def can_run(self) -> bool:
        """Return whether steps of the device can sample all rows."""
        decoder = self._state.decoder
        if isinstance(decoder, MultiAdapterDecoder):
            decoder.adapter_slots.update(decoder.names, row_buckets(self._max_rows)[-1])
            if not decoder.adapter_slots.holds(self._find_adapters()):
                return False
        return not find_host_rows(self._rows, decoder.vocab_size).any()

    def _find_adapters(self) -> np.ndarray:
        """Return the number of each row's adapter, [N]."""
        numbers = np.array([prompt.adapter_id for prompt in self._state.prompts], np.int64)
        return numbers[self._state.prompt_of_row]

    def remaining_tokens(self) -> np.ndarray:
        """Return the number of tokens that each row may still sample, [N]."""
        return self._rows["max_tokens"] - self._rows["num_sampled"]

    def plan(self, most: int) -> int:
        """Return the number of steps, up to `most`, that have blocks; 0 if a row must be preempted
        first.
        """
        remaining = self.remaining_tokens()
        count = min(most, int(remaining.max()))
        while count and not self._state.block_manager.fits(np.minimum(remaining, count)):
            count //= 2
        return count

    def launch(self, count: int, most_rows: int, may_share: bool) -> Chunk:
        """Launch `count` steps of all rows.

        `most_rows`: the most rows that the present requests can run at once, `may_share`: whether
        some of these may share blocks. Their graphs are captured first.
        """
        state, manager, runner = self._state, self._state.block_manager, self._prepare_runner()
        rows = len(self._rows)
        remaining, written = self.remaining_tokens(), state.lengths()
        state.copy_blocks(manager.append_positions(np.minimum(remaining, count)))
        prefixes, bucket = manager.shared_prefixes(), runner.bucket_for(rows)
        shared = bool(prefixes[1].any())
        runner.prepare(most_rows, shared or may_share)
        self._upload_rows(runner.buffers, bucket, remaining, written, *prefixes)
        self._upload_tiles(bucket)
        processed = self._upload_processing(runner.buffers, bucket)
        graph = (bucket, shared, processed)
        return self._run(runner, *graph, self._rows.uniforms_ahead(count), np.arange(rows))

    def _run(
        self,
        runner: CUDAGraphRunner,
        bucket: int,
        shared: bool,
        processed: ProcessedRows,
        uniforms: np.ndarray,
        columns: np.ndarray,
    ) -> Chunk:
        """Launch a step for each row of `uniforms` [S, device rows]."""
        upload(runner.buffers.uniform, uniforms)
        width = self._state.block_manager.tables.shape[1]
        runner.run(bucket, min(width, runner.max_blocks), shared, len(uniforms), processed)
        self.num_syncs += 1
        count, rows = uniforms.shape
        if processed.penalizes:
            self._counts.advance(count)
        else:  # no row that the table holds takes part
            self._counts.forget()
        return self._start_copy(count, rows, shared, processed, columns)

    def launch_next(self, chunk: Chunk, most: int) -> Chunk | None:
        """Launch the chunk after `chunk`, of up to `most` steps. `chunk` has not been read: the
        device knows its last tokens and which rows it ended.

        Returns None if the rows may change otherwise between the two chunks: a row has stop
        strings, blocks are short, or smaller buckets hold the rows or those with logits processing.
        """
        runner, manager = self.runner, self._state.block_manager
        remaining = self.remaining_tokens() - chunk.count
        count = min(most, int(remaining.max(initial=0)))
        if runner is None or count < 1 or self._rows["has_strings"].any():
            return None
        bucket, columns = runner.bucket_for(chunk.rows), chunk.columns
        if (
            runner.bucket_for(len(self._rows)) < bucket
            or self._find_processed_rows(bucket, chunk.count)[1] < chunk.processed
        ):
            return None
        counts = np.clip(remaining, 0, count)
        if not manager.fits(counts):
            return None
        copies = manager.append_positions(counts)
        assert not copies, "a row writes to blocks of its own since its first step"
        table = np.zeros((chunk.rows, manager.tables.shape[1]), np.int32)
        table[columns] = private_tables(manager.tables, self._skip[columns] // manager.block_size)
        upload(runner.buffers.table, table)
        uniforms = np.zeros((count, chunk.rows))
        uniforms[:, columns] = self._rows.uniforms_ahead(count, chunk.count)
        return self._run(runner, bucket, chunk.shared, chunk.processed, uniforms, columns)

    def drop(self, chunk: Chunk | None) -> None:
        """Wait for a chunk, if there is one, and drop all positions without recorded tokens. Until
        then the device writes to their blocks.
        """
        self._counts.forget()
        if chunk is not None and len(self._rows):
            chunk.read()
            manager = self._state.block_manager
            manager.drop_positions(manager.rows["length"] - self._state.lengths())

    def _start_copy(
        self, count: int, rows: int, shared: bool, processed: ProcessedRows, columns: np.ndarray
    ) -> Chunk:
        """Return the steps that were launched last as a chunk, and start to copy its results."""
        assert self.runner is not None, "no step was launched"
        b, event = self.runner.buffers, None
        sampled = torch.stack([t[:count, :rows].double() for t in (b.tokens, b.logprobs)])
        experts = b.experts[:count, :rows].clone() if self._state.records_experts else None
        if sampled.is_cuda:
            sampled = _copy_to_pinned(sampled)
            experts = None if experts is None else _copy_to_pinned(experts)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._state.decoder.device))
        return Chunk(count, rows, shared, processed, columns, sampled, experts, event)

    def _prepare_runner(self) -> CUDAGraphRunner:
        """Return the runner of the present weights: a graph reads the weights that it was captured
        with.
        """
        table, decoder = self._stops.table, self._state.decoder
        self.runner = runner = self._pool.get_step_graphs(
            decoder,
            self._max_rows,
            self._max_blocks,
            self.steps_per_sync,
            len(table),
            decoder.num_choices if self._state.records_experts else 0,
            int(self._rows["penalizes"].sum()),
        )
        runner.follow_layout()
        buffers, copied_table = self._stop_table_copy
        if buffers is not runner.buffers or copied_table is not table:
            upload(runner.buffers.stops, table)
            self._stop_table_copy = (runner.buffers, table)
        return runner

    def _upload_rows(
        self,
        b: StepBuffers,
        bucket: int,
        remaining: np.ndarray,
        written: np.ndarray,
        group: np.ndarray,
        shared: np.ndarray,
    ) -> None:
        """Copy the present rows to the device, with their groups and the blocks that they share
        (`BlockManager.shared_prefixes`). The padding rows of the bucket are marked as ended.
        """
        rows, tables, size = self._rows, self._state.block_manager.tables, self._state.block_size
        groups = max(bucket // 2, 1)
        split = split_block_tables(tables, written + 1, group, shared, size, bucket, groups)
        self._skip = split["skip"]
        for name in ("table", "shared_table"):
            upload(getattr(b, name), split[name])
        greedy = rows["temperature"] == 0
        inputs = {
            "token": rows.last_tokens(),
            "position": written,
            "remaining": remaining,
            "stop_row": rows["stop_row"],
            "greedy": greedy,
            # the whole line of `packed`: a larger bucket divides by them too
            "temperature": _pad_to(np.where(greedy, 1.0, rows["temperature"]), 2 * bucket, 1.0),
            **split,
        }
        upload(b.packed, b.pack(bucket, inputs))

    def _upload_tiles(self, bucket: int) -> None:
        """Copy the slots of the rows' adapters to the device, unless it holds them."""
        slots = self._state.decoder.adapter_slots
        if slots is not None:
            tiles = slots.make_tiles(slots.find_slots(self._find_adapters()), bucket)
            if self._layout != slots.layout or not np.array_equal(tiles, self._tiles):
                upload(slots.select_tiles(bucket), tiles)
            self._tiles, self._layout = tiles, slots.layout

    def _find_processed_rows(self, bucket: int, ahead: int = 0) -> tuple[np.ndarray, ProcessedRows]:
        """Return the rows with logits processing after `ahead` more tokens of each row, [M], and
        their bucket.
        """
        truncates = find_truncated_rows(self._rows, self._state.decoder.vocab_size)
        index = np.flatnonzero(truncates | find_adjusted_rows(self._rows, ahead))
        count = processed_bucket(len(index), bucket)
        penalizes = bool(self._rows["penalizes"].any())
        return index, ProcessedRows(count, bool(truncates.any()), penalizes)

    def _upload_processing(self, b: StepBuffers, bucket: int) -> ProcessedRows:
        """Copy the settings of the rows with logits processing to the device; return their
        bucket.
        """
        rows, (index, processed) = self._rows, self._find_processed_rows(bucket)
        if not processed.bucket:
            return processed
        inputs = {
            "processed_row": index,
            "limits": find_limits(rows, index, self._state.decoder.vocab_size),
            "untruncated": rows["untruncated_logprobs"][index],
            "stop_limit": (rows["max_tokens"] - rows["min_tokens"])[index],
            "bias_set": self._upload_biases(b, index),
        }
        if processed.penalizes:
            inputs["count_row"] = self._upload_counts(b, index)
            inputs["penalties"] = np.array([rows[name][index] for name in PENALTIES], np.float32)
            upload(b.counted, _pad_to(rows["penalizes"][index].astype(np.int16), processed.bucket))
        padded = _pad_to(np.arange(len(index)), processed.bucket)  # the first row is repeated
        for name, values in inputs.items():
            upload(getattr(b, name), values[..., padded])
        return processed

    def _upload_counts(self, b: StepBuffers, index: np.ndarray) -> np.ndarray:
        """Write the token counts of the rows with penalties among the rows `index` [M] to the
        device, unless it holds them; return the row of the table of each row [M]. The last has no
        counts.
        """
        rows, penalizes = self._rows, self._rows["penalizes"][index]
        count_row = np.full(len(index), len(b.counts) - 1)
        count_row[penalizes] = self._counts.write(b.counts, rows, self._groups, index[penalizes])
        return count_row

    def _upload_biases(self, b: StepBuffers, index: np.ndarray) -> np.ndarray:
        """Copy the biases of the requests of the rows `index` [M] to the device, unless it holds
        them; return the set of each row [M]. The first set has no biases.
        """
        is_biased = self._rows["num_biases"][index] > 0
        owners = np.where(is_biased, self._rows["request_id"][index], -1)
        owners, sets = np.unique(np.append(-1, owners), return_inverse=True)
        requests = owners.tolist()
        if self._biases_copy[0] is not b or self._biases_copy[1] != requests:
            shape = len(requests), b.biases.shape[1]
            tokens = np.tile(np.arange(shape[1]), (shape[0], 1))
            biases = np.zeros(shape, np.float32)
            for i, request_id in enumerate(requests[1:], 1):
                logit_bias = self._groups[request_id].request.params.logit_bias or {}
                tokens[i, : len(logit_bias)] = list(logit_bias)
                biases[i, : len(logit_bias)] = list(logit_bias.values())
            upload(b.bias_tokens, tokens)
            upload(b.biases, biases)
            self._biases_copy = (b, requests)
        return sets[1:]


def upload(target: Tensor, values: np.ndarray) -> None:
    """Copy an array to the first entries of a device tensor, from pinned memory, so that the host
    does not wait.
    """
    host = torch.from_numpy(np.ascontiguousarray(values))
    region = target[tuple(map(slice, values.shape))]
    region.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)


def _copy_to_pinned(values: Tensor) -> Tensor:
    """Start to copy a device tensor to the host."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def _pad_to(values: np.ndarray, count: int, fill_value: float = 0) -> np.ndarray:
    """Pad an array to `count` entries with `fill_value`.

    np.pad takes ten times as long, and the device would wait for it.
    """
    padded = np.full(count, fill_value, values.dtype)
    padded[: len(values)] = values
    return padded
