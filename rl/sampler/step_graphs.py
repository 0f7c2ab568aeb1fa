"""Steps over static buffers, several between two looks of the host: on CUDA as graphs, one for each bucket of rows.

A graph knows addresses: weights that are loaded in place (`Decoder.load_`) are those of its next replay; another decoder's are not, and
the graphs are captured anew. Adapters are captured as they stand, unmerged.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl.sampler.forward_fast import FastForward
from rl.sampler.step_buffers import StepBuffers, run_step

_EVERY = 8  # rows from one bucket to the next, from 8 rows on


def buckets(most: int) -> list[int]:
    """Rows that a graph is captured for, ascending; the last holds `most`.

    >>> buckets(20)
    [1, 2, 4, 8, 16, 24]
    """
    found = [1, 2, 4]
    while found[-1] < most:
        found.append(found[-1] + 4 if found[-1] == 4 else found[-1] + _EVERY)
    return [rows for i, rows in enumerate(found) if i == 0 or found[i - 1] < most]


class Steps:
    """Runs steps of `model` over `buffers` and the pages `kv`. `pages`: the most that a table has."""

    def __init__(self, model: FastForward, kv: list[Tensor], buffers: StepBuffers, most: int):
        self.model, self.kv, self.buffers = model, kv, buffers
        self.buckets = buckets(most)
        self.pages = buffers.table.shape[1]
        self.rope = model.rope_table(self.pages * kv[0].shape[2])
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def bucket(self, rows: int) -> int:
        return next(size for size in self.buckets if size >= rows)

    def run(self, rows: int, width: int, shared: bool, count: int) -> None:
        """`count` steps of the first `rows` rows, a bucket; nothing waits. `width`: the pages of the longest table now."""
        self.buffers.at.zero_()
        if self.buffers.token.is_cuda:
            graph = self._captured()[rows, shared and rows > 1]
            for _ in range(count):
                graph.replay()
        else:
            for _ in range(count):
                run_step(self.model, self.kv, self.rope, self.buffers, rows, width, shared)

    def _captured(self) -> dict[tuple[int, bool], torch.cuda.CUDAGraph]:
        """All graphs, the largest first, so that the smaller ones find their memory in its pool."""
        if self._graphs:
            return self._graphs
        b = self.buffers
        kept = {name: getattr(b, name).clone() for name in ("token", "position", "left", "at", "tokens", "logprobs")}
        b.left.zero_()  # what runs here writes to the page of nobody
        device, pool = b.token.device, None
        for rows in reversed(self.buckets):
            for shared in (True, False) if rows > 1 else (False,):
                with torch.cuda.device(device):
                    aside = torch.cuda.Stream()
                    aside.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(aside):  # compiles kernels and makes workspaces, which a capture may not
                        b.at.zero_()
                        run_step(self.model, self.kv, self.rope, b, rows, self.pages, shared)
                    torch.cuda.current_stream().wait_stream(aside)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool):
                        run_step(self.model, self.kv, self.rope, b, rows, self.pages, shared)
                pool = pool or graph.pool()
                self._graphs[rows, shared] = graph
        for name, before in kept.items():
            getattr(b, name).copy_(before)
        return self._graphs
