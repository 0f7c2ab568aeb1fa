"""Compute shapes and micro-batch memory of models, each only once: in this process, or in two
helper processes that started to import before this process.

A plan command imports a model's code and then traces several independent micro-batches.
`rl.quick.beside` therefore starts a process at the very beginning of the command. That process runs
`follow` and forks a second helper once it has imported everything. This process computes whatever
the helpers cannot.
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
from rl.memory.given import Held, MicroBatch, ModelShape
from rl.memory.trace import Arithmetic, Skeleton
from rl.types import LoraConfig

Model = tuple[str, str | None, LoraConfig | None]  # base model, tokenizer, adapter
Run = tuple[Model, MicroBatch, Arithmetic]  # a micro-batch to trace
_SHAPE, _HELD, _FORK = "shape", "held", "fork"


class Traces:
    """Cache traces, and distribute them to helper processes if `helped`."""

    def __init__(self) -> None:
        self._skeletons: dict[Model, Skeleton] = {}
        self._shapes: dict[Model, ModelShape] = {}
        self._held: dict[Run, Held] = {}
        self._failed: dict[Run, UserError] = {}
        self._queue: deque[Run] = deque()
        self._free: list[Connection] = []
        self._asleep: list[Connection] = []  # connections of helpers that are not forked yet
        self._busy: dict[Connection, Run] = {}
        self._made: set[tuple[Connection, Model]] = set()  # models that each helper has built

    @contextlib.contextmanager
    def helped(self, connections: Iterable[Connection]) -> Iterator[None]:
        first, *more = connections
        self._free, self._asleep = [first], more
        try:
            yield
        finally:
            self._alone()

    def shape(self, model: Model) -> ModelShape:
        """Return the shape of a model. Raises UserError if the model is not available."""
        if model not in self._shapes:
            answer = self._ask(model)
            self._shapes[model] = self._skeleton(model).shape if answer is None else answer
        return self._shapes[model]

    @property
    def are_helped(self) -> bool:
        return bool(self._free or self._busy)

    def want(self, runs: Iterable[Run]) -> None:
        """Queue the runs that will be requested, in this order. Earlier queued runs that have not
        begun are dropped.
        """
        known = {*self._held, *self._failed, *self._busy.values()}
        self._queue = (
            deque(run for run in dict.fromkeys(runs) if run not in known)
            if self.are_helped
            else deque()
        )
        with self._or_alone():
            self._hand_out()

    def held(self, run: Run) -> Held:
        """Return what the micro-batch holds. Raises UserError if it cannot be computed."""
        if run not in self._held and run not in self._failed and self.are_helped:
            if run not in self._busy.values():
                with contextlib.suppress(ValueError):
                    self._queue.remove(run)
                self._queue.appendleft(run)
            with self._or_alone():
                self._hand_out()
                while run not in self._held and run not in self._failed:
                    self._hear()
                    self._hand_out()
        if run in self._failed:
            raise self._failed[run]
        if run not in self._held:
            model, batch, config = run
            self._held[run] = self._skeleton(model).held(batch, config)
        return self._held[run]

    def _skeleton(self, model: Model) -> Skeleton:
        if model not in self._skeletons:
            self._skeletons[model] = Skeleton(*model)
        return self._skeletons[model]

    def _ask(self, model: Model) -> ModelShape | None:
        """Return the shape from a free helper, or None if no helper is available.

        The first helper forks the others after its first request.
        """
        with self._or_alone():
            while not self._free and self._busy:
                self._hear()
            if not self._free:
                return None
            first = self._free[0]
            first.send((_SHAPE, model))
            self._made.add((first, model))
            error, answer = first.recv()
            if error is not None:
                raise UserError(error)
            if answer is None:
                raise EOFError
            for _ in self._asleep:
                first.send((_FORK, None))
            self._free, self._asleep = [*self._free, *self._asleep], []
            return answer
        return None

    def _hand_out(self) -> None:
        while self._queue and self._free:
            run = self._queue.popleft()
            # prefer a helper that has built the model already
            process = next(
                (connection for connection in self._free if (connection, run[0]) in self._made),
                self._free[0],
            )
            self._free.remove(process)
            self._busy[process] = run
            self._made.add((process, run[0]))
            process.send((_HELD, run))

    def _hear(self) -> None:
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
                self._held[run] = answer
            else:
                raise EOFError

    @contextlib.contextmanager
    def _or_alone(self) -> Iterator[None]:
        """Continue in this process if the helpers fail."""
        try:
            yield
        except (EOFError, OSError):
            self._alone()

    def _alone(self) -> None:
        for process in (*self._free, *self._busy, *self._asleep):
            process.close()
        self._free, self._busy, self._asleep = [], {}, []
        self._queue.clear()


def follow(mine: Connection, *others: Connection) -> None:
    """Serve a `Traces` in a helper process until its connection closes. Each answer is (text of a
    UserError or None, result).

    `others`: connections of further helpers.
    """
    gc.disable()  # the process lives only for seconds
    traces, child_connections = Traces(), list(others)
    _warm_up(mine, traces)
    while True:
        try:
            kind, payload = mine.recv()
            if kind == _FORK:
                child = child_connections.pop(0)
                if os.fork() == 0:
                    mine, child_connections = child, []
                continue
            mine.send(_answer(traces, kind, payload))
        except (EOFError, OSError):
            return


def _warm_up(mine: Connection, traces: Traces) -> None:
    """Import what the first request will need, and build a tiny model, while no request is pending.

    No backward runs: torch may start threads for it, which a forked process would lack.
    """
    small: Model = ("tiny:addition", None, LoraConfig(2))
    with contextlib.suppress(Exception):  # the request itself raises the error again
        for name in ("transformers.models.auto.modeling_auto", "peft"):
            if mine.poll():
                return
            importlib.import_module(name)
        if not mine.poll():
            traces.shape(small)


def _answer(traces: Traces, asked: str, what: Any) -> tuple[str | None, ModelShape | Held | None]:
    try:
        return None, traces.shape(what) if asked == _SHAPE else traces.held(what)
    except UserError as error:
        return str(error), None
    except Exception:  # the requesting process raises the error again
        return None, None
