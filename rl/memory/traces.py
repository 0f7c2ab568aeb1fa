"""Shapes and micro-batches of models, each worked out once: here, or by two processes that began to
import before this one could ask.

A command that plans has a model's code to import and then several micro-batches to follow, which do
not depend on one another; so `rl.quick.beside` starts a process at the command's very beginning,
which goes on to `follow` what it is asked, and makes a second one like itself as soon as it has
imported everything. What they cannot do is done here, as without them.
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
Run = tuple[Model, MicroBatch, Arithmetic]  # a micro-batch to follow
_SHAPE, _HELD, _FORK = "shape", "held", "fork"


class Traces:
    """`connections`: to processes that `follow`, first the one that makes the others."""

    def __init__(self) -> None:
        self._skeletons: dict[Model, Skeleton] = {}
        self._shapes: dict[Model, ModelShape] = {}
        self._held: dict[Run, Held] = {}
        self._failed: dict[Run, UserError] = {}
        self._queue: deque[Run] = deque()
        self._free: list[Connection] = []
        self._asleep: list[Connection] = []  # of processes that are not there yet
        self._busy: dict[Connection, Run] = {}
        self._made: set[tuple[Connection, Model]] = set()  # which has made what

    @contextlib.contextmanager
    def helped(self, connections: Iterable[Connection]) -> Iterator[None]:
        first, *more = connections
        self._free, self._asleep = [first], more
        try:
            yield
        finally:
            self._alone()

    def shape(self, model: Model) -> ModelShape:
        """Raises UserError where the model cannot be had."""
        if model not in self._shapes:
            told = self._ask(model)
            self._shapes[model] = self._skeleton(model).shape if told is None else told
        return self._shapes[model]

    @property
    def are_helped(self) -> bool:
        return bool(self._free or self._busy)

    def want(self, runs: Iterable[Run]) -> None:
        """These will be asked for, in this order, and those that were wanted before and are not
        begun will not.
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
        """What the micro-batch holds. Raises UserError where that cannot be known."""
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
            model, batch, how = run
            self._held[run] = self._skeleton(model).held(batch, how)
        return self._held[run]

    def _skeleton(self, model: Model) -> Skeleton:
        if model not in self._skeletons:
            self._skeletons[model] = Skeleton(*model)
        return self._skeletons[model]

    def _ask(self, model: Model) -> ModelShape | None:
        """By a process that has nothing else to do; the first one makes the others after the first
        question. None where none can tell.
        """
        with self._or_alone():
            while not self._free and self._busy:
                self._hear()
            if not self._free:
                return None
            first = self._free[0]
            first.send((_SHAPE, model))
            self._made.add((first, model))
            error, told = first.recv()
            if error is not None:
                raise UserError(error)
            if told is None:
                raise EOFError
            for _ in self._asleep:
                first.send((_FORK, None))
            self._free, self._asleep = [*self._free, *self._asleep], []
            return told
        return None

    def _hand_out(self) -> None:
        while self._queue and self._free:
            run = self._queue.popleft()
            # a model is not made twice
            process = next(
                (one for one in self._free if (one, run[0]) in self._made), self._free[0]
            )
            self._free.remove(process)
            self._busy[process] = run
            self._made.add((process, run[0]))
            process.send((_HELD, run))

    def _hear(self) -> None:
        """Waits for an answer. EOFError where a process fails for another reason than that the
        model's forward does not run so.
        """
        for process in wait(list(self._busy)):
            assert isinstance(process, Connection)
            error, told = process.recv()
            run = self._busy.pop(process)
            self._free.append(process)
            if error is not None:
                self._failed[run] = UserError(error)
            elif told is not None:
                self._held[run] = told
            else:
                raise EOFError

    @contextlib.contextmanager
    def _or_alone(self) -> Iterator[None]:
        """Whatever becomes of the processes: what they did not tell is worked out here."""
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
    """Answers a `Traces` until it is gone, each question by (the text of a UserError, the answer).
    `others`: of further processes.
    """
    gc.disable()  # of a process that lives for seconds
    traces, unborn = Traces(), list(others)
    _warm_up(mine, traces)
    while True:
        try:
            asked, what = mine.recv()
            if asked == _FORK:
                born = unborn.pop(0)
                if os.fork() == 0:
                    mine, unborn = born, []
                continue
            mine.send(_answer(traces, asked, what))
        except (EOFError, OSError):
            return


def _warm_up(mine: Connection, traces: Traces) -> None:
    """Imports what the first question will need, and makes a tiny model; as long as nothing is
    asked.

    No backward: torch may start threads for one, and a process that is forked then has none.
    """
    small: Model = ("tiny:addition", None, LoraConfig(2))
    with contextlib.suppress(Exception):  # the question itself meets it again
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
    except Exception:  # whatever it is, who asked meets it again
        return None, None
