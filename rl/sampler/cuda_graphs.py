"""Run several decode steps over static buffers between two host synchronizations.

On CUDA the steps are graphs, captured for each bucket of rows. A graph refers to addresses: weights
that are loaded in place (`Decoder.load_`) take effect at its next replay, while another decoder
needs separate graphs. Adapters are captured unmerged. kv_cache_pool.py keeps graphs beyond the life
of an engine.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from rl.sampler.decode_inputs import DecodeInputs, decode_step
from rl.sampler.forward_fast import FastForward

# written by a step
_STEP_OUTPUTS = ("token", "position", "remaining", "at", "tokens", "logprobs", "experts")


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


class CapturedGraph(Protocol):
    """Describe a captured step."""

    def replay(self) -> None: ...


class CUDAGraphRunner:
    """Run steps of `model` over `buffers` and the pages `kv`.

    `max_blocks` is the largest number of pages of a block table. The model is only weakly
    referenced.
    """

    def __init__(self, model: FastForward, kv: list[Tensor], buffers: DecodeInputs, max_rows: int):
        self._model, self.kv, self.buffers = ref(model), kv, buffers
        self.buckets = row_buckets(max_rows)
        self.max_blocks = buffers.table.shape[1]
        self.ropes = model.rope_tables(self.max_blocks * kv[0].shape[2])
        self._graphs: dict[tuple[int, bool], CapturedGraph] = {}
        self._pool: Any = None

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

        `shared`: whether rows may be in groups with shared pages.
        """
        if self.uses_graphs:
            self._get_graph(self.bucket_for(rows), shared)

    def run(self, rows: int, width: int, shared: bool, count: int) -> None:
        """Run `count` steps of the first `rows` rows (a bucket) without synchronization.

        `width`: the current number of pages of the longest table.
        """
        graph = self._get_graph(rows, shared) if self.uses_graphs else None
        self.buffers.at.zero_()
        for _ in range(count):
            if graph is None:
                decode_step(self.model, self.kv, self.ropes, self.buffers, rows, width, shared)
            else:
                graph.replay()

    def _get_graph(self, rows: int, shared: bool) -> CapturedGraph:
        """Return the bucket's graph, after capturing it and all smaller buckets that are missing.

        Batches shrink, so smaller buckets follow. The largest is captured first, so that the others
        can reuse the memory of its pool. A graph for shared pages also serves rows without any.
        """
        shared = rows > 1 and (shared or (rows, True) in self._graphs)
        if (rows, shared) not in self._graphs:
            saved = {name: getattr(self.buffers, name).clone() for name in _STEP_OUTPUTS}
            for size in reversed([size for size in self.buckets if size <= rows]):
                key = (size, shared and size > 1)
                if key not in self._graphs:
                    self._graphs[key] = self._capture(*key)
            for name, before in saved.items():
                getattr(self.buffers, name).copy_(before)
        return self._graphs[rows, shared]

    def _capture(self, rows: int, shared: bool) -> CapturedGraph:
        """Capture a graph of a single step; this writes to the buffers and to the unused page."""
        b, step_args = (
            self.buffers,
            (self.model, self.kv, self.ropes, self.buffers, rows, self.max_blocks, shared),
        )
        with torch.cuda.device(b.token.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            # warm-up: compiles kernels and allocates workspaces, which a capture may not do
            with torch.cuda.stream(stream):
                b.remaining.zero_()
                b.at.zero_()
                decode_step(*step_args)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # other threads may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                decode_step(*step_args)
        self._pool = self._pool or graph.pool()
        return graph
