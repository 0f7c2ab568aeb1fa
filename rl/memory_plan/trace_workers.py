"""Compute shapes and micro-batch memory of models, each only once: in this process, or in two
helper processes that started to import before this process.

A plan command imports a model's code and then traces several independent micro-batches.
`rl.startup.fork_helper` therefore starts a process at the very beginning of the command. That
process runs `serve_traces` and forks a second helper once it has imported everything. This process
computes whatever the helpers cannot.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

from rl.errors import UserError
from rl.memory_plan.shapes import MicroBatch, MicroBatchMemory, ModelShape
from rl.memory_plan.tracing import ComputeConfig, ModelSkeleton
from rl.types import LoraConfig

ModelKey = tuple[str, str | None, LoraConfig | None]  # base model, tokenizer, adapter
TraceRequest = tuple[ModelKey, MicroBatch, ComputeConfig]  # a micro-batch to trace
_SHAPE, _HELD, _FORK = "shape", "held", "fork"


class TraceCache:
    """Cache traces, and distribute them to helper processes if `use_helpers`."""

    def __init__(self) -> None:
        self._skeletons: dict[ModelKey, ModelSkeleton] = {}
        self._shapes: dict[ModelKey, ModelShape] = {}
        self._memories: dict[TraceRequest, MicroBatchMemory] = {}
        self._failed: dict[TraceRequest, UserError] = {}
        self._queue: deque[TraceRequest] = deque()
        self._free: list[Connection] = []
        self._unforked: list[Connection] = []  # connections of helpers that are not forked yet
        self._busy: dict[Connection, TraceRequest] = {}
        self._built: set[tuple[Connection, ModelKey]] = set()  # models that each helper has built

    @contextlib.contextmanager
    def use_helpers(self, connections: Iterable[Connection]) -> Iterator[None]:
        first, *more = connections
        self._free, self._unforked = [first], more
        try:
            yield
        finally:
            self._release_helpers()

    def get_shape(self, model: ModelKey) -> ModelShape:
        """Return the shape of a model. Raises UserError if the model is not available."""
        if model not in self._shapes:
            answer = self._request_shape(model)
            self._shapes[model] = self._get_skeleton(model).shape if answer is None else answer
        return self._shapes[model]

    @property
    def has_helpers(self) -> bool:
        return bool(self._free or self._busy)

    def queue_runs(self, runs: Iterable[TraceRequest]) -> None:
        """Queue the runs that will be requested, in this order. Earlier queued runs that have not
        begun are dropped.
        """
        known = {*self._memories, *self._failed, *self._busy.values()}
        self._queue = (
            deque(run for run in dict.fromkeys(runs) if run not in known)
            if self.has_helpers
            else deque()
        )
        with self._fall_back_on_failure():
            self._send_queued()

    def get_memory(self, run: TraceRequest) -> MicroBatchMemory:
        """Return what the micro-batch holds. Raises UserError if it cannot be computed."""
        if run not in self._memories and run not in self._failed and self.has_helpers:
            if run not in self._busy.values():
                with contextlib.suppress(ValueError):
                    self._queue.remove(run)
                self._queue.appendleft(run)
            with self._fall_back_on_failure():
                self._send_queued()
                while run not in self._memories and run not in self._failed:
                    self._receive_answers()
                    self._send_queued()
        if run in self._failed:
            raise self._failed[run]
        if run not in self._memories:
            model, batch, config = run
            self._memories[run] = self._get_skeleton(model).measure_micro_batch(batch, config)
        return self._memories[run]

    def _get_skeleton(self, model: ModelKey) -> ModelSkeleton:
        if model not in self._skeletons:
            self._skeletons[model] = ModelSkeleton(*model)
        return self._skeletons[model]

    def _request_shape(self, model: ModelKey) -> ModelShape | None:
        """Return the shape from a free helper, or None if no helper is available.

        The first helper forks the others after its first request.
        """
        with self._fall_back_on_failure():
            while not self._free and self._busy:
                self._receive_answers()
            if not self._free:
                return None
            first = self._free[0]
            first.send((_SHAPE, model))
            self._built.add((first, model))
            error, answer = first.recv()
            if error is not None:
                raise UserError(error)
            if answer is None:
                raise EOFError
            for _ in self._unforked:
                first.send((_FORK, None))
            self._free, self._unforked = [*self._free, *self._unforked], []
            return answer
        return None

    def _send_queued(self) -> None:
        while self._queue and self._free:
            run = self._queue.popleft()
            # prefer a helper that has built the model already
            process = next(
                (connection for connection in self._free if (connection, run[0]) in self._built),
                self._free[0],
            )
            self._free.remove(process)
            self._busy[process] = run
            self._built.add((process, run[0]))
            process.send((_HELD, run))

    def _receive_answers(self) -> None:
        """Wait for answers. Raises EOFError if a helper fails for another reason than a forward
        that cannot be traced.
        """
        for process in wait(list(self._busy)):
            assert isinstance(process, Connection)
            error, answer = process.recv()
            run = self._busy.pop(process)
            self._free.append(process)
            if error is not None:
                self._failed[run] = UserError(error)
            elif answer is not None:
                self._memories[run] = answer
            else:
                raise EOFError

    @contextlib.contextmanager
    def _fall_back_on_failure(self) -> Iterator[None]:
        """Continue in this process if the helpers fail."""
        try:
            yield
        except (EOFError, OSError):
            self._release_helpers()

    def _release_helpers(self) -> None:
        for process in (*self._free, *self._busy, *self._unforked):
            process.close()
        self._free, self._busy, self._unforked = [], {}, []
        self._queue.clear()


def serve_traces(connection: Connection, *others: Connection) -> None:
    """Serve a `TraceCache` in a helper process until its connection closes. Each answer is (text of
    a UserError or None, result).

    `others`: connections of further helpers.
    """
    gc.disable()  # the process lives only for seconds
    traces, child_connections = TraceCache(), list(others)
    _warm_up(connection, traces)
    while True:
        try:
            kind, payload = connection.recv()
            if kind == _FORK:
                child = child_connections.pop(0)
                if os.fork() == 0:
                    connection, child_connections = child, []
                continue
            connection.send(_answer_request(traces, kind, payload))
        except (EOFError, OSError):
            return


def _warm_up(mine: Connection, traces: TraceCache) -> None:
    """Import what the first request will need, and build a tiny model, while no request is pending.

    No backward runs: torch may start threads for it, which a forked process would lack.
    """
    small: ModelKey = ("tiny:addition", None, LoraConfig(2))
    with contextlib.suppress(Exception):  # the request itself raises the error again
        for name in ("transformers.models.auto.modeling_auto", "peft"):
            if mine.poll():
                return
            importlib.import_module(name)
        if not mine.poll():
            traces.get_shape(small)


def _answer_request(
    traces: TraceCache, kind: str, payload: Any
) -> tuple[str | None, ModelShape | MicroBatchMemory | None]:
    try:
        return None, traces.get_shape(payload) if kind == _SHAPE else traces.get_memory(payload)
    except UserError as error:
        return str(error), None
    except Exception:  # the requesting process raises the error again
        return None, None
