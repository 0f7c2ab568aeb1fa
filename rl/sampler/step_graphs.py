"""Steps over static buffers, several between two looks of the host: on CUDA as graphs, one for each bucket of rows.

A graph knows addresses: weights that are loaded in place (`Decoder.load_`) are those of its next replay; another decoder's are not, and
the graphs are captured anew. Adapters are captured as they stand, unmerged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl.sampler.forward_fast import FastForward
from rl.sampler.step_buffers import StepBuffers, run_step

_WRITTEN = ("token", "position", "left", "at", "tokens", "logprobs")  # by a step


def buckets(most: int) -> list[int]:
    """Rows that a graph may be captured for, ascending: at most half of them are nobody's. The last holds `most`.

    >>> buckets(100)
    [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]
    """
    found = [1, 2, 4, 8, 16, 24, 32]
    while found[-1] < most:
        found.append(found[-2] * 2)
    return [rows for i, rows in enumerate(found) if i == 0 or found[i - 1] < most]


class Steps:
    """Runs steps of `model` over `buffers` and the pages `kv`. `pages`: the most that a table has."""

    def __init__(self, model: FastForward, kv: list[Tensor], buffers: StepBuffers, most: int):
        self.model, self.kv, self.buffers = model, kv, buffers
        self.buckets = buckets(most)
        self.pages = buffers.table.shape[1]
        self.rope = model.rope_table(self.pages * kv[0].shape[2])
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def bucket(self, rows: int) -> int:
        return next(size for size in self.buckets if size >= rows)

    def run(self, rows: int, width: int, shared: bool, count: int) -> None:
        """`count` steps of the first `rows` rows, a bucket; nothing waits. `width`: the pages of the longest table now."""
        graph = self._captured(rows, shared and rows > 1) if self.buffers.token.is_cuda else None
        self.buffers.at.zero_()
        for _ in range(count):
            if graph is None:
                run_step(self.model, self.kv, self.rope, self.buffers, rows, width, shared)
            else:
                graph.replay()

    def _captured(self, rows: int, shared: bool) -> torch.cuda.CUDAGraph:
        """Captured as they are asked for. A batch shrinks, so the largest comes first, and the others find their memory in its pool."""
        if (rows, shared) in self._graphs:
            return self._graphs[rows, shared]
        b, given = self.buffers, (self.model, self.kv, self.rope, self.buffers, rows, self.pages, shared)
        with torch.cuda.device(b.token.device):
            kept = {name: getattr(b, name).clone() for name in _WRITTEN}
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):  # compiles kernels and makes workspaces, which a capture may not
                b.left.zero_()  # what runs here writes to the page of nobody
                b.at.zero_()
                run_step(*given)
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                run_step(*given)
            for name, before in kept.items():
                getattr(b, name).copy_(before)
        self._pool = self._pool or graph.pool()
        self._graphs[rows, shared] = graph
        return graph
