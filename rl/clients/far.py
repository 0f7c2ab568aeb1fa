"""The driver's way to the ranks that sample, where some do nothing else: which verbs are theirs,
and weights on their way to them.

What names a version of the weights that has not arrived yet waits for it here, and not at the
samplers, who go on with what else there is. So a script's loop is the same with and without such
ranks: its futures only take their time side by side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rl.clients.crew import OPEN, Samplers
from rl.clients.landing import Piece, Staged
from rl.clients.settings import WorkerSettings
from rl.types import SamplingParams

# the argument that says which
_OF_A_VERSION = {"sample": 0, "compute_logprobs": 0, "forget_version": 0, "sample_slice": 1}
_OF_A_STREAM = ("unfinished", "close_stream")
Waiting = tuple[str, Sequence[Any], Future]


class Far:
    """See the module. `near`: puts a verb into the queue of the ranks that learn."""

    def __init__(
        self,
        settings: WorkerSettings,
        near: Callable[[str, Sequence[Any], tuple[Future, ...], Future], None],
    ):
        self.ranks = settings.sampler_ranks
        self._near, self._lock = near, threading.RLock()
        self._crew, self._number = Samplers.join(settings)
        self._arriving: dict[int, list[Waiting]] = {}  # by version: what waits for it
        self._sent: set[int] = set()  # models of which samplers have something
        # by version: the model, and its number there
        self._learners: dict[int, tuple[int, int]] = {}
        self._saved_by: dict[str, int] = {}
        # by version: ways in which it is drawn from
        self._noted: dict[int, set[tuple[float, bool]]] = {}
        opened: Future = Future()
        self._crew.queue.put((self._number, OPEN, (self._number, settings), (), opened))
        opened.result()

    @property
    def alive(self) -> bool:
        return self._crew.thread.is_alive()

    def leave(self, timeout: float) -> None:
        """Once what is on its way has arrived: nobody would know the service that it names."""
        until = time.monotonic() + timeout
        while self.alive and time.monotonic() < until and self._on_the_way():
            time.sleep(0.01)
        self._crew.leave(self._number, timeout)

    def _on_the_way(self) -> bool:
        with self._lock:
            return bool(self._arriving)

    def put(
        self, verb: str, arguments: Sequence[Any], after: tuple[Future, ...], future: Future
    ) -> bool:
        """Takes a verb that is not (only) the learners'; whether it was one."""
        if verb in _OF_A_VERSION:
            self._when_there(arguments[_OF_A_VERSION[verb]], (verb, arguments, future))
        elif verb in _OF_A_STREAM:
            self._queue(verb, arguments, future)
        elif verb == "snapshot":
            self._snapshot(arguments[0], arguments[1], after, future)
        elif verb == "snapshot_base":
            self._then("stage_nothing", arguments[:1], arguments[1], future, lambda staged, done: self._queue(
                "base_version", (arguments[1], staged.manifest()), done))  # fmt: skip
        elif verb == "load_sampler":  # what it reads may be written by a verb before it
            self._then(
                "reach", (), arguments[0], future, lambda _, done: self._load(arguments, done)
            )
        else:
            if verb == "forget_model":
                # once the learners did: what they stage of it before has begun to land by then
                future.add_done_callback(lambda _: self._queue(verb, arguments, Future()))
                self._sent.discard(arguments[0])
            elif verb == "load_state":
                # the whole model is sent again: the adapter's scale may have changed
                self._sent.discard(arguments[0])
            elif verb in ("save_state", "save_for_sampler"):
                self._saved_by[str(Path(arguments[1]).resolve())] = arguments[0]
            return False
        return True

    def send(self, staged: Staged, version_id: int) -> Future:
        """Brings weights to the samplers, under a new version; what `snapshot` returns."""
        done: Future = Future()
        with self._lock:
            self._arriving[version_id] = []
        done.add_done_callback(lambda found: self._arrived(version_id, found))
        self._hand_over(staged, version_id, done)
        return done

    # ------------------------------------------------------------------------------------- arriving

    def _snapshot(
        self, model_id: int, version_id: int, after: tuple[Future, ...], future: Future
    ) -> None:
        first = model_id not in self._sent
        future.add_done_callback(
            lambda found: self._sent.add(model_id) if found.exception() is None else None
        )
        self._then(
            "stage",
            (model_id, first),
            version_id,
            future,
            lambda staged, done: self._hand_over(staged, version_id, done),
            after,
        )

    def _then(
        self, verb: str, arguments: Sequence[Any], version_id: int, future: Future, go: Callable[[Any, Future], None],
        after: tuple[Future, ...] = (),
    ) -> None:  # fmt: skip
        """A verb of the learners first, then `go` with what it found, which makes the version be
        there.
        """
        with self._lock:
            self._arriving[version_id] = []
        future.add_done_callback(lambda found: self._arrived(version_id, found))
        here: Future = Future()

        def went(found: Future) -> None:
            if (error := found.exception()) is not None:
                future.set_exception(error)
                return
            try:
                go(found.result(), future)
            except Exception as failed:  # in a callback nobody else would hear of it
                future.set_exception(failed)

        here.add_done_callback(went)
        self._near(verb, arguments, after, here)

    def _hand_over(self, staged: Staged, version_id: int, future: Future) -> None:
        """Piece after piece, each once the one before has landed, so that slices come in between."""
        self._learners[version_id] = (staged.model_id, staged.version)
        begun: Future = Future()

        def go(found: Future) -> None:
            dtypes = None if found.exception() is not None else found.result()
            self._next_piece(found, staged.pieces(dtypes=dtypes), version_id, future)

        begun.add_done_callback(go)
        self._queue("begin_landing", (version_id, staged.manifest()), begun)

    def _next_piece(
        self, before: Future, pieces: Iterator[Piece], version_id: int, future: Future
    ) -> None:
        try:
            before.result()
            piece = next(pieces, None)
        except BaseException as error:  # in a callback nobody else would hear of it
            self._queue("forget_version", (version_id,), Future())  # and with it what has landed
            future.set_exception(error)
            return
        if piece is None:
            self._queue("end_landing", (version_id,), future)
            return
        landed: Future = Future()
        landed.add_done_callback(lambda found: self._next_piece(found, pieces, version_id, future))
        self._queue("land", (version_id, piece), landed)

    def _load(self, arguments: Sequence[Any], future: Future) -> None:
        version_id, path = arguments[:2]
        owner = None if path is None else self._saved_by.get(str(Path(path).resolve()))
        if owner is not None:
            future.add_done_callback(lambda found: self._owned(version_id, owner, found))
        self._queue("load_sampler", arguments, future)

    def _owned(self, version_id: int, owner: int, found: Future) -> None:
        if found.exception() is None:
            self._learners[version_id] = (owner, found.result()["version"])

    def _arrived(self, version_id: int, found: Future) -> None:
        """The version is there, or will never be: what waited for it goes on, or fails alike."""
        error = found.exception()
        with self._lock:
            for verb, arguments, future in self._arriving.pop(version_id, ()):
                if error is None or verb == "forget_version":
                    self._go(verb, arguments, future)
                else:
                    future.set_exception(error)

    # ---------------------------------------------------------------------------------------- going

    def _when_there(self, version_id: int, waiting: Waiting) -> None:
        with self._lock:
            if version_id in self._arriving:
                self._arriving[version_id].append(waiting)
            else:
                self._go(*waiting)

    def _go(self, verb: str, arguments: Sequence[Any], future: Future) -> None:
        if verb == "sample":
            self._note(arguments[0], [request.params for request in arguments[1]])
        elif verb == "sample_slice":
            self._note(arguments[1], [request.params for _, _, request in arguments[2].arrived])
        elif verb == "forget_version":
            self._learners.pop(arguments[0], None)
            self._noted.pop(arguments[0], None)
        self._queue(verb, arguments, future)

    def _note(self, version_id: int, params: Sequence[SamplingParams]) -> None:
        """The learner of these weights is told how is drawn from them, each way once."""
        owner = self._learners.get(version_id)
        if owner is None:
            return
        new, known = [], self._noted.setdefault(version_id, set())
        for one in params:
            how = (one.temperature, one.reshapes)
            if how not in known:
                known.add(how)
                new.append(one)
        if new:
            self._near("note_drawn", (*owner, new), (), Future())

    def _queue(self, verb: str, arguments: Sequence[Any], future: Future) -> None:
        self._crew.queue.put((self._number, verb, arguments, (), future))
