"""Route verbs between the learner ranks and the sampler ranks, and transfer weights to the sampler
ranks.

A verb that names a weight version which has not arrived waits here, not at the samplers, which
continue with other work. So a script's loop is the same with and without sampler ranks: only its
futures complete concurrently.
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

# index of the argument that holds the version id
_OF_A_VERSION = {"sample": 0, "compute_logprobs": 0, "forget_version": 0, "sample_slice": 1}
_OF_A_STREAM = ("unfinished", "close_stream")
Waiting = tuple[str, Sequence[Any], Future]


class Far:
    """Route verbs to the sampler ranks. `near`: puts a verb into the queue of the learner ranks."""

    def __init__(
        self,
        settings: WorkerSettings,
        near: Callable[[str, Sequence[Any], tuple[Future, ...], Future], None],
    ):
        self.ranks = settings.sampler_ranks
        self._near, self._lock = near, threading.RLock()
        self._crew, self._number = Samplers.join(settings)
        self._arriving: dict[int, list[Waiting]] = {}  # by version: verbs that wait for it
        self._sent: set[int] = set()  # models with weights sent to the samplers
        # by version: (model id, version of the learner)
        self._learners: dict[int, tuple[int, int]] = {}
        self._saved_by: dict[str, int] = {}
        # by version: (temperature, reshapes) pairs reported to the learner
        self._noted: dict[int, set[tuple[float, bool]]] = {}
        opened: Future = Future()
        self._crew.queue.put((self._number, OPEN, (self._number, settings), (), opened))
        opened.result()

    @property
    def alive(self) -> bool:
        """Return whether the thread of the sampler ranks is running."""
        return self._crew.thread.is_alive()

    def leave(self, timeout: float) -> None:
        """Close the service on the sampler ranks once pending weights have arrived: later verbs of
        a closed service would fail.
        """
        deadline = time.monotonic() + timeout
        while self.alive and time.monotonic() < deadline and self._on_the_way():
            time.sleep(0.01)
        self._crew.leave(self._number, timeout)

    def _on_the_way(self) -> bool:
        """Return whether any weight version is still in transfer."""
        with self._lock:
            return bool(self._arriving)

    def put(
        self, verb: str, arguments: Sequence[Any], after: tuple[Future, ...], future: Future
    ) -> bool:
        """Route a verb that is not (only) the learners'. Return whether it was handled here."""
        if verb in _OF_A_VERSION:
            self._when_there(arguments[_OF_A_VERSION[verb]], (verb, arguments, future))
        elif verb in _OF_A_STREAM:
            self._queue(verb, arguments, future)
        elif verb == "snapshot":
            self._snapshot(arguments[0], arguments[1], after, future)
        elif verb == "snapshot_base":
            self._then(
                "stage_nothing",
                arguments[:1],
                arguments[1],
                future,
                lambda staged, inner: self._queue(
                    "base_version", (arguments[1], staged.manifest()), inner
                ),
            )
        elif verb == "load_sampler":  # an earlier verb may write the folder that it reads
            self._then(
                "reach", (), arguments[0], future, lambda _, inner: self._load(arguments, inner)
            )
        else:
            if verb == "forget_model":
                # after the learners freed it: transfers staged before have begun by then
                future.add_done_callback(lambda _: self._queue(verb, arguments, Future()))
                self._sent.discard(arguments[0])
            elif verb == "load_state":
                # send the whole model again: the adapter's scale may have changed
                self._sent.discard(arguments[0])
            elif verb in ("save_state", "save_for_sampler"):
                self._saved_by[str(Path(arguments[1]).resolve())] = arguments[0]
            return False
        return True

    def send(self, staged: Staged, version_id: int) -> Future:
        """Transfer weights to the samplers under a new version. Return the future of what
        `snapshot` returns.
        """
        done: Future = Future()
        with self._lock:
            self._arriving[version_id] = []
        done.add_done_callback(lambda completed: self._arrived(version_id, completed))
        self._hand_over(staged, version_id, done)
        return done

    # ------------------------------------------------------------------------------ weight transfer

    def _snapshot(
        self, model_id: int, version_id: int, after: tuple[Future, ...], future: Future
    ) -> None:
        """Stage the learner's weights and transfer them to the samplers."""
        first = model_id not in self._sent
        future.add_done_callback(
            lambda completed: self._sent.add(model_id) if completed.exception() is None else None
        )
        self._then(
            "stage",
            (model_id, first),
            version_id,
            future,
            lambda staged, inner: self._hand_over(staged, version_id, inner),
            after,
        )

    def _then(
        self,
        verb: str,
        arguments: Sequence[Any],
        version_id: int,
        future: Future,
        go: Callable[[Any, Future], None],
        after: tuple[Future, ...] = (),
    ) -> None:
        """Run a verb on the learners, then call `go` with its result. `go` completes `future`, at
        which the version has arrived.
        """
        with self._lock:
            self._arriving[version_id] = []
        future.add_done_callback(lambda completed: self._arrived(version_id, completed))
        learner_future: Future = Future()

        def continue_transfer(completed: Future) -> None:
            if (error := completed.exception()) is not None:
                future.set_exception(error)
                return
            try:
                go(completed.result(), future)
            except Exception as failed:  # an error in a callback is lost otherwise
                future.set_exception(failed)

        learner_future.add_done_callback(continue_transfer)
        self._near(verb, arguments, after, learner_future)

    def _hand_over(self, staged: Staged, version_id: int, future: Future) -> None:
        """Send the weights chunk by chunk. Each chunk is sent when the previous chunk has arrived,
        so that steps of streams run in between.
        """
        self._learners[version_id] = (staged.model_id, staged.version)
        begin_future: Future = Future()

        def send_chunks(started: Future) -> None:
            dtypes = None if started.exception() is not None else started.result()
            self._next_piece(started, staged.pieces(dtypes=dtypes), version_id, future)

        begin_future.add_done_callback(send_chunks)
        self._queue("begin_landing", (version_id, staged.manifest()), begin_future)

    def _next_piece(
        self, before: Future, pieces: Iterator[Piece], version_id: int, future: Future
    ) -> None:
        """Send the next chunk, or complete the transfer. A failure frees the version and sets the
        error on `future`.
        """
        try:
            before.result()
            chunk = next(pieces, None)
        except BaseException as error:  # an error in a callback is lost otherwise
            # this frees the chunks that have arrived
            self._queue("forget_version", (version_id,), Future())
            future.set_exception(error)
            return
        if chunk is None:
            self._queue("end_landing", (version_id,), future)
            return
        received: Future = Future()
        received.add_done_callback(
            lambda completed: self._next_piece(completed, pieces, version_id, future)
        )
        self._queue("land", (version_id, chunk), received)

    def _load(self, arguments: Sequence[Any], future: Future) -> None:
        """Load a sampler version on the sampler ranks, and record the learner that saved its
        folder.
        """
        version_id, path = arguments[:2]
        owner = None if path is None else self._saved_by.get(str(Path(path).resolve()))
        if owner is not None:
            future.add_done_callback(lambda completed: self._owned(version_id, owner, completed))
        self._queue("load_sampler", arguments, future)

    def _owned(self, version_id: int, owner: int, found: Future) -> None:
        """Record the learner that saved the weights of a version."""
        if found.exception() is None:
            self._learners[version_id] = (owner, found.result()["version"])

    def _arrived(self, version_id: int, found: Future) -> None:
        """Release the verbs that wait for a version. If its transfer failed, set the error on their
        futures.
        """
        error = found.exception()
        with self._lock:
            for verb, arguments, future in self._arriving.pop(version_id, ()):
                if error is None or verb == "forget_version":
                    self._go(verb, arguments, future)
                else:
                    future.set_exception(error)

    # -------------------------------------------------------------------------------------- routing

    def _when_there(self, version_id: int, waiting: Waiting) -> None:
        """Queue a verb, or make it wait until the version has arrived."""
        with self._lock:
            if version_id in self._arriving:
                self._arriving[version_id].append(waiting)
            else:
                self._go(*waiting)

    def _go(self, verb: str, arguments: Sequence[Any], future: Future) -> None:
        """Queue a verb on a version that has arrived, and report its sampling parameters to the
        learner.
        """
        if verb == "sample":
            self._note(arguments[0], [request.params for request in arguments[1]])
        elif verb == "sample_slice":
            self._note(arguments[1], [request.params for _, _, request in arguments[2].arrived])
        elif verb == "forget_version":
            self._learners.pop(arguments[0], None)
            self._noted.pop(arguments[0], None)
        self._queue(verb, arguments, future)

    def _note(self, version_id: int, params: Sequence[SamplingParams]) -> None:
        """Report to the learner of these weights the way they are sampled, once for each
        (temperature, reshapes) pair.
        """
        owner = self._learners.get(version_id)
        if owner is None:
            return
        new_params, known_modes = [], self._noted.setdefault(version_id, set())
        for sampling_params in params:
            mode = (sampling_params.temperature, sampling_params.reshapes)
            if mode not in known_modes:
                known_modes.add(mode)
                new_params.append(sampling_params)
        if new_params:
            self._near("note_drawn", (*owner, new_params), (), Future())

    def _queue(self, verb: str, arguments: Sequence[Any], future: Future) -> None:
        """Queue a verb for the sampler ranks."""
        self._crew.queue.put((self._number, verb, arguments, (), future))
