"""Steps over static buffers, several between two looks of the host: on CUDA as graphs, one for each
bucket of rows.

A graph knows addresses: weights that are loaded in place (`Decoder.load_`) are those of its next
replay; another decoder has graphs of its own. Adapters are captured as they stand, unmerged. What
outlives an engine: kept.py.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from rl.sampler.forward_fast import FastForward
from rl.sampler.step_buffers import StepBuffers, run_step

_WRITTEN = ("token", "position", "left", "at", "tokens", "logprobs")  # by a step


def buckets(most: int) -> list[int]:
    """Rows that a graph may be captured for, ascending: at most half of them are nobody's. The last
    holds `most`.

    >>> buckets(100)
    [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    """
    found = [1, 2, 4, 8, 16, 24, 32]
    while found[-1] < most:
        found.append(found[-2] * 2)
    return [rows for i, rows in enumerate(found) if i == 0 or found[i - 1] < most]


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None: ...


class Steps:
    """Runs steps of `model` over `buffers` and the pages `kv`. `pages`: the most that a table has.
    The model is not held.
    """

    def __init__(self, model: FastForward, kv: list[Tensor], buffers: StepBuffers, most: int):
        self._model, self.kv, self.buffers = ref(model), kv, buffers
        self.buckets = buckets(most)
        self.pages = buffers.table.shape[1]
        self.rope = model.rope_table(self.pages * kv[0].shape[2])
        self._graphs: dict[tuple[int, bool], Graph] = {}
        self._pool: Any = None

    @property
    def model(self) -> FastForward:
        model = self._model()
        assert model is not None, "the engine whose steps these are holds the decoder"
        return model

    @property
    def captures(self) -> bool:
        return self.buffers.token.is_cuda

    def bucket(self, rows: int) -> int:
        return next(size for size in self.buckets if size >= rows)

    def run(self, rows: int, width: int, shared: bool, count: int) -> None:
        """`count` steps of the first `rows` rows, a bucket; nothing waits. `width`: the pages of
        the longest table now.
        """
        graph = self._captured(rows, shared and rows > 1) if self.captures else None
        self.buffers.at.zero_()
        for _ in range(count):
            if graph is None:
                run_step(self.model, self.kv, self.rope, self.buffers, rows, width, shared)
            else:
                graph.replay()

    def _captured(self, rows: int, shared: bool) -> Graph:
        """That bucket's graph. A batch shrinks, so with it come all smaller ones that are not there
        yet: the largest first, so that the others find their memory in its pool.
        """
        if (rows, shared) not in self._graphs:
            kept = {name: getattr(self.buffers, name).clone() for name in _WRITTEN}
            for size in reversed([size for size in self.buckets if size <= rows]):
                if (size, shared) not in self._graphs and (size > 1 or not shared):
                    self._graphs[size, shared] = self._capture(size, shared)
            for name, before in kept.items():
                getattr(self.buffers, name).copy_(before)
        return self._graphs[rows, shared]

    def _capture(self, rows: int, shared: bool) -> Graph:
        """A graph of one step; it writes to the buffers, and to the page of nobody."""
        b, given = (
            self.buffers,
            (self.model, self.kv, self.rope, self.buffers, rows, self.pages, shared),
        )
        with torch.cuda.device(b.token.device):
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            # compiles kernels and makes workspaces, which a capture may not
            with torch.cuda.stream(aside):
                b.left.zero_()
                b.at.zero_()
                run_step(*given)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                run_step(*given)
        self._pool = self._pool or graph.pool()
        return graph
