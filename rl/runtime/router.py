"""Route verbs between the learner ranks and the sampler ranks, and transfer weights to the sampler
ranks.

A verb that names a weight version which has not arrived waits here, not at the samplers, which
continue with other work. So a script's loop is the same with and without sampler ranks: only its
futures complete concurrently.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from rl.runtime.rank_settings import WorkerSettings
from rl.runtime.weight_sync import TransferSchedule, WeightChunk, WeightSnapshot
from rl.runtime.worker_group import OPEN_SERVICE, SamplerGroup
from rl.types import SamplingParams

# index of the argument that holds the version id
_VERSION_VERBS = {"sample": 0, "compute_logprobs": 0, "free_version": 0, "run_steps": 1}
_STREAM_VERBS = ("unfinished", "close_stream")
WaitingVerb = tuple[str, Sequence[Any], Future]


class VerbRouter:
    """Route verbs to the sampler ranks. `submit_to_learners`: puts a verb into the queue of the
    learner ranks.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        submit_to_learners: Callable[[str, Sequence[Any], tuple[Future, ...], Future], None],
    ):
        self.sampler_ranks = settings.sampler_ranks
        self._submit_to_learners, self._lock = submit_to_learners, threading.RLock()
        self._group, self._service_id = SamplerGroup.join(settings)
        self._pending_versions: dict[
            int, list[WaitingVerb]
        ] = {}  # by version: verbs that wait for it
        self._sent_models: set[int] = set()  # models with weights sent to the samplers
        # by version: (model id, version of the learner)
        self._version_sources: dict[int, tuple[int, int]] = {}
        self._folder_models: dict[str, int] = {}
        # by version: (temperature, changes_distribution) pairs reported to the learner
        self._reported_params: dict[int, set[tuple[float, bool]]] = {}
        opened: Future = Future()
        self._group.queue.put(
            (self._service_id, OPEN_SERVICE, (self._service_id, settings), (), opened)
        )
        opened.result()

    @property
    def alive(self) -> bool:
        """Return whether the thread of the sampler ranks is running."""
        return self._group.thread.is_alive()

    def close(self, timeout: float) -> None:
        """Close the service on the sampler ranks once pending weights have arrived: later verbs of
        a closed service would fail.
        """
        deadline = time.monotonic() + timeout
        while self.alive and time.monotonic() < deadline and self._has_pending_versions():
            time.sleep(0.01)
        self._group.close_service(self._service_id, timeout)

    def _has_pending_versions(self) -> bool:
        """Return whether any weight version is still in transfer."""
        with self._lock:
            return bool(self._pending_versions)

    def route(
        self, verb: str, arguments: Sequence[Any], dependencies: tuple[Future, ...], future: Future
    ) -> bool:
        """Route a verb that is not (only) the learners'. Return whether it was handled here."""
        if verb in _VERSION_VERBS:
            self._queue_when_ready(arguments[_VERSION_VERBS[verb]], (verb, arguments, future))
        elif verb in _STREAM_VERBS:
            self._queue(verb, arguments, future)
        elif verb == "snapshot":
            self._transfer_snapshot(arguments[0], arguments[1], dependencies, future)
        elif verb == "snapshot_base":
            self._run_on_learners_first(
                "take_empty_snapshot",
                arguments[:1],
                arguments[1],
                future,
                lambda staged, inner: self._queue(
                    "create_base_version", (arguments[1], staged.make_manifest()), inner
                ),
            )
        elif verb == "load_sampler":  # an earlier verb may write the folder that it reads
            self._run_on_learners_first(
                "wait_for_verbs",
                (),
                arguments[0],
                future,
                lambda _, inner: self._load_sampler(arguments, inner),
            )
        else:
            if verb == "free_model":
                # after the learners freed it: transfers staged before have begun by then
                future.add_done_callback(lambda _: self._queue(verb, arguments, Future()))
                self._sent_models.discard(arguments[0])
            elif verb == "load_state":
                # send the whole model again: the adapter's scale may have changed
                self._sent_models.discard(arguments[0])
            elif verb in ("save_state", "save_for_sampler"):
                self._folder_models[str(Path(arguments[1]).resolve())] = arguments[0]
            return False
        return True

    def send_weights(self, snapshot: WeightSnapshot, version_id: int) -> Future:
        """Transfer weights to the samplers under a new version. Return the future of what
        `snapshot` returns.
        """
        done: Future = Future()
        with self._lock:
            self._pending_versions[version_id] = []
        done.add_done_callback(lambda completed: self._release_waiting_verbs(version_id, completed))
        self._start_transfer(snapshot, version_id, done)
        return done

    # ------------------------------------------------------------------------------ weight transfer

    def _transfer_snapshot(
        self, model_id: int, version_id: int, dependencies: tuple[Future, ...], future: Future
    ) -> None:
        """Stage the learner's weights and transfer them to the samplers."""
        first = model_id not in self._sent_models
        future.add_done_callback(
            lambda completed: (
                self._sent_models.add(model_id) if completed.exception() is None else None
            )
        )
        self._run_on_learners_first(
            "take_snapshot",
            (model_id, first),
            version_id,
            future,
            lambda staged, inner: self._start_transfer(staged, version_id, inner),
            dependencies,
        )

    def _run_on_learners_first(
        self,
        verb: str,
        arguments: Sequence[Any],
        version_id: int,
        future: Future,
        continuation: Callable[[Any, Future], None],
        dependencies: tuple[Future, ...] = (),
    ) -> None:
        """Run a verb on the learners, then call `continuation` with its result. `continuation`
        completes `future`, at which the version has arrived.
        """
        with self._lock:
            self._pending_versions[version_id] = []
        future.add_done_callback(
            lambda completed: self._release_waiting_verbs(version_id, completed)
        )
        learner_future: Future = Future()

        def continue_transfer(completed: Future) -> None:
            if (error := completed.exception()) is not None:
                future.set_exception(error)
                return
            try:
                continuation(completed.result(), future)
            except Exception as failed:  # an error in a callback is lost otherwise
                future.set_exception(failed)

        learner_future.add_done_callback(continue_transfer)
        self._submit_to_learners(verb, arguments, dependencies, learner_future)

    def _start_transfer(self, snapshot: WeightSnapshot, version_id: int, future: Future) -> None:
        """Send the weights in rounds of chunks. A round is queued when the previous round has
        arrived, so that steps of streams run in between.
        """
        self._version_sources[version_id] = (snapshot.model_id, snapshot.version)
        begin_future: Future = Future()

        def send_chunks(started: Future) -> None:
            dtypes = None if started.exception() is not None else started.result()
            chunks = snapshot.iter_chunks(dtypes=dtypes)
            self._send_round([started], chunks, TransferSchedule(), version_id, future)

        begin_future.add_done_callback(send_chunks)
        self._queue("begin_transfer", (version_id, snapshot.make_manifest()), begin_future)

    def _send_round(
        self,
        previous: Sequence[Future],
        chunks: Iterator[WeightChunk],
        schedule: TransferSchedule,
        version_id: int,
        future: Future,
    ) -> None:
        """Send the next round of chunks, or complete the transfer. A failure frees the version and
        sets the error on `future`.
        """
        try:
            for completed in previous:
                completed.result()
            batch = list(itertools.islice(chunks, schedule.num_chunks))
        except BaseException as error:  # an error in a callback is lost otherwise
            # this frees the chunks that have arrived
            self._queue("free_version", (version_id,), Future())
            future.set_exception(error)
            return
        if not batch:
            self._queue("end_transfer", (version_id,), future)
            return

        def end_round(_: Future) -> None:
            if len(batch) == schedule.num_chunks:  # not the last round
                schedule.end_round()
            self._send_round(received, chunks, schedule, version_id, future)

        received: list[Future] = [Future() for _ in batch]
        for arrival in received:
            arrival.add_done_callback(lambda _: schedule.record_arrival())
        received[-1].add_done_callback(end_round)
        schedule.start_round()
        for chunk, arrival in zip(batch, received, strict=True):
            self._queue("receive_chunk", (version_id, chunk), arrival)

    def _load_sampler(self, arguments: Sequence[Any], future: Future) -> None:
        """Load a sampler version on the sampler ranks, and record the learner that saved its
        folder.
        """
        version_id, path = arguments[:2]
        owner = None if path is None else self._folder_models.get(str(Path(path).resolve()))
        if owner is not None:
            future.add_done_callback(
                lambda completed: self._record_source(version_id, owner, completed)
            )
        self._queue("load_sampler", arguments, future)

    def _record_source(self, version_id: int, owner: int, completed: Future) -> None:
        """Record the learner that saved the weights of a version."""
        if completed.exception() is None:
            self._version_sources[version_id] = (owner, completed.result()["version"])

    def _release_waiting_verbs(self, version_id: int, completed: Future) -> None:
        """Release the verbs that wait for a version. If its transfer failed, set the error on their
        futures.
        """
        error = completed.exception()
        with self._lock:
            for verb, arguments, future in self._pending_versions.pop(version_id, ()):
                if error is None or verb == "free_version":
                    self._queue_ready(verb, arguments, future)
                else:
                    future.set_exception(error)

    # -------------------------------------------------------------------------------------- routing

    def _queue_when_ready(self, version_id: int, waiting_verb: WaitingVerb) -> None:
        """Queue a verb, or make it wait until the version has arrived."""
        with self._lock:
            if version_id in self._pending_versions:
                self._pending_versions[version_id].append(waiting_verb)
            else:
                self._queue_ready(*waiting_verb)

    def _queue_ready(self, verb: str, arguments: Sequence[Any], future: Future) -> None:
        """Queue a verb on a version that has arrived, and report its sampling parameters to the
        learner.
        """
        if verb == "sample":
            self._report_params(arguments[0], [request.params for request in arguments[1]])
        elif verb == "run_steps":
            self._report_params(
                arguments[1], [request.params for _, _, request in arguments[2].new_requests]
            )
        elif verb == "free_version":
            self._version_sources.pop(arguments[0], None)
            self._reported_params.pop(arguments[0], None)
        self._queue(verb, arguments, future)

    def _report_params(self, version_id: int, params: Sequence[SamplingParams]) -> None:
        """Report to the learner of these weights the way they are sampled, once for each
        (temperature, changes_distribution) pair.
        """
        owner = self._version_sources.get(version_id)
        if owner is None:
            return
        new_params, reported = [], self._reported_params.setdefault(version_id, set())
        for sampling_params in params:
            pair = (sampling_params.temperature, sampling_params.changes_distribution)
            if pair not in reported:
                reported.add(pair)
                new_params.append(sampling_params)
        if new_params:
            self._submit_to_learners("record_params", (*owner, new_params), (), Future())

    def _queue(self, verb: str, arguments: Sequence[Any], future: Future) -> None:
        """Queue a verb for the sampler ranks."""
        self._group.queue.put((self._service_id, verb, arguments, (), future))
