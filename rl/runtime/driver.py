"""Drive all ranks from rank 0: rank 0 runs the script, and holds only futures of what the ranks
execute.

Each ServiceClient has a `Driver`, and a separate worker on every rank (rl.runtime.worker_group).
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rl.runtime.rank_settings import WorkerSettings
from rl.runtime.verb_table import LEARNER, SAMPLER, VERBS, VerbCall, VerbFuture
from rl.runtime.weight_sync import TransferSchedule, WeightChunk, WeightSnapshot
from rl.runtime.worker_group import GroupService
from rl.sampler import SamplingRequest
from rl.types import SamplingParams


def is_driver() -> bool:
    """Return whether this process runs the script. It is known before torch.distributed is
    initialized.
    """
    return int(os.environ.get("RANK", "0")) == 0


class Driver:
    """Submit the verbs of a service to its worker on every rank."""

    def __init__(self, settings: WorkerSettings):
        self._lock = threading.RLock()
        # sample requests held back, and their futures: a batch for each weight version
        self._pending: dict[tuple[int, Future], list[tuple[SamplingRequest, Future]]] = {}
        self._closed = False
        self._learners = GroupService(settings, LEARNER)
        self.device = self._learners.device
        # router to the ranks that only sample; None if all ranks learn
        self.router = (
            VerbRouter(settings, self._learners, self._lock) if settings.sampler_ranks else None
        )
        self._submit_call = (self.router or self._learners).submit

    def submit(self, verb: str, *arguments: Any, dependencies: Sequence[Future] = ()) -> Future:
        """Queue a verb and return its future. `dependencies`: earlier futures; if any of them
        failed, the verb is refused.
        """
        with self._lock:
            if not VERBS[verb].is_cleanup:
                self.flush()
            call = VerbCall(verb, arguments, tuple(dependencies), self._make_future(verb))
            self._submit_call(call)
            return call.future

    def _make_future(self, verb: str) -> Future:
        """Return a future that cannot be cancelled: a submitted verb runs even if its caller stops
        waiting. Raises RuntimeError if the service is closed, or its thread has died.
        """
        if self._closed:
            raise RuntimeError(f"the service is closed: {verb} can no longer run")
        if self.closed:
            raise RuntimeError(
                f"the thread that executes verbs has died: {verb} cannot run; start again"
            )
        future = VerbFuture(verb)
        future.set_running_or_notify_cancel()
        return future

    def submit_sample(self, version_id: int, created: Future, request: SamplingRequest) -> Future:
        """Hold a sample request back until a caller waits or another verb comes, so that samples
        requested separately run as a batch. `created`: the future of the weight version; if it
        failed, the request fails with its error.
        """
        with self._lock:
            future = self._make_future("sample")
            self._pending.setdefault((version_id, created), []).append((request, future))
            return future

    @property
    def closed(self) -> bool:
        """Return whether the service is closed, or a thread that executes its verbs has ended."""
        return (
            self._closed
            or not self._learners.alive
            or (self.router is not None and not self.router.alive)
        )

    def flush(self) -> None:
        """Submit the sample requests held back, a batch for each weight version."""
        with self._lock:
            pending, self._pending = self._pending, {}
            for (version_id, created), items in pending.items():
                requests = [request for request, _ in items]
                batch = VerbCall("sample", (version_id, requests), (created,))
                futures = [future for _, future in items]
                batch.future.add_done_callback(partial(_distribute_results, futures))
                self._submit_call(batch)

    def close(self) -> None:
        """Wait until the submitted verbs have run, or a rank is lost. Then free the models of the
        service on every rank. A second call is a no-op.
        """
        with self._lock:
            if self.closed:
                self._closed = True
                return
            self.flush()
            self._closed = True
        if self.router is not None:
            self.router.close()
        self._learners.close()


def _link_chunks(chunks: Iterator[WeightChunk]) -> Iterator[WeightChunk]:
    """Yield each chunk with the payload of the chunk after it."""
    for chunk, following in itertools.pairwise(itertools.chain(chunks, (None,))):
        assert chunk is not None
        yield replace(chunk, following=None if following is None else following.payload)


def _distribute_results(futures: Sequence[Future], batch: Future) -> None:
    """Set the results of a batch on the futures of its requests. A refused request fails
    by itself.
    """
    error = batch.exception()
    if error is not None:
        for future in futures:
            future.set_exception(error)
        return
    responses, _ = batch.result()
    for future, response in zip(futures, responses, strict=True):
        if isinstance(response, Exception):
            future.set_exception(response)
        else:
            future.set_result(response)


class VerbRouter:
    """Route the verbs of a service to its learner ranks and its sampler ranks, and transfer weights
    to the sampler ranks.

    A verb that names a weight version which has not arrived waits here, not at the samplers, which
    continue with other work. So a script's loop is the same with and without sampler ranks: only
    its futures complete concurrently.

    `lock`: the driver's, which holds it when it submits a verb. A finalizer may submit one on any
    thread, also in this class, so a second lock could be acquired in either order.
    """

    def __init__(self, settings: WorkerSettings, learners: GroupService, lock: Any):
        self.sampler_ranks = settings.sampler_ranks
        self._learners, self._lock = learners, lock
        self._samplers = GroupService(settings, SAMPLER)
        # by version: verbs that wait for it
        self._pending_versions: dict[int, list[VerbCall]] = {}
        # by model with weights sent to the samplers: the dtypes that the samplers narrow, by name;
        # None: no sampler has answered yet
        self._sent_models: dict[int, dict[str, torch.dtype] | None] = {}
        # by version: (model id, version of the learner), and the (temperature,
        # changes_distribution) pairs that were reported to that learner
        self._version_sources: dict[int, tuple[tuple[int, int], set[tuple[float, bool]]]] = {}

    @property
    def alive(self) -> bool:
        """Return whether the thread of the sampler ranks is running."""
        return self._samplers.alive

    def close(self) -> None:
        """Close the service on the sampler ranks once pending weights have arrived: later verbs of
        a closed service would fail.
        """
        while self.alive and self._pending_versions:
            time.sleep(0.01)
        self._samplers.close()

    def submit(self, call: VerbCall) -> None:
        """Queue a verb for the ranks of its group. A sampler verb that names a version waits until
        the version has arrived. Raises ValueError for a verb of SERVICE, which each group's
        `GroupService` submits.
        """
        if call.spec.router_method is not None:
            getattr(self, call.spec.router_method)(call)
        elif call.spec.group == SAMPLER:
            with self._lock:
                if call.version_id in self._pending_versions:
                    self._pending_versions[call.version_id].append(call)
                else:
                    self._queue_ready(call)
        elif call.spec.group != LEARNER:
            raise ValueError(
                f"{call.verb} belongs to group {call.spec.group}: submit it through GroupService"
            )
        if call.spec.group == LEARNER:
            self._learners.submit(call)

    def send_weights(self, snapshot: WeightSnapshot, version_id: int) -> Future:
        """Transfer weights to the samplers under a new version. Return the future of what
        `snapshot` returns.
        """
        done: Future = Future()
        self._await_version(version_id, done)
        self._start_transfer(snapshot, version_id, done)
        return done

    # ------------------------------------------------------------------------------ weight transfer

    def snapshot(self, call: VerbCall) -> None:
        """Stage the learner's weights and transfer them to the samplers."""
        model_id, version_id = call.arguments
        first = model_id not in self._sent_models
        known = self._sent_models.setdefault(model_id, None)
        dtypes = None if known is None else dict(known)

        def forget_if_failed(completed: Future) -> None:
            if completed.exception() is not None:
                self._sent_models.pop(model_id, None)

        call.future.add_done_callback(forget_if_failed)
        self._run_on_learners_first(
            call,
            "take_snapshot",
            (model_id, first, dtypes),
            lambda staged: self._start_transfer(staged, version_id, call.future),
        )

    def snapshot_base(self, call: VerbCall) -> None:
        """Create the version of the base model on the samplers, which have its weights."""
        model_id, version_id = call.arguments
        self._run_on_learners_first(
            call,
            "take_snapshot",
            (model_id, None),
            lambda staged: self._queue(
                "create_base_version", (version_id, staged.make_manifest()), call.future
            ),
        )

    def load_sampler(self, call: VerbCall) -> None:
        """Load a version on the samplers after the learners' earlier verbs, which may write its
        folder. Record the learner that saved the folder, before the verbs that wait are released.
        """
        version_id, saved_by = call.arguments[0], call.arguments[-1]
        if saved_by is not None:
            call.future.add_done_callback(partial(self._record_source, version_id, saved_by))
        self._run_on_learners_first(
            call, "wait_for_verbs", (), lambda _: self._samplers.submit(call)
        )

    def free_model(self, call: VerbCall) -> None:
        """Free a model on the samplers after the learners: transfers staged before have begun by
        then.
        """
        call.future.add_done_callback(lambda _: self._queue(call.verb, call.arguments))
        self.forget_sent_weights(call)

    def forget_sent_weights(self, call: VerbCall) -> None:
        """Send the whole model again next time: its adapter's scale may change."""
        self._sent_models.pop(call.arguments[0], None)

    def _run_on_learners_first(
        self,
        call: VerbCall,
        verb: str,
        arguments: Sequence[Any],
        continuation: Callable[[Any], object],
    ) -> None:
        """Run another verb on the learners, then call `continuation` with its result.
        `continuation` completes the call's future, at which the version has arrived.
        """
        assert call.version_id is not None
        self._await_version(call.version_id, call.future)

        def continue_transfer(completed: Future) -> None:
            try:
                continuation(completed.result())
            except BaseException as failed:  # an error in a callback is lost otherwise
                call.future.set_exception(failed)

        learner_call = VerbCall(verb, arguments, call.dependencies)
        learner_call.future.add_done_callback(continue_transfer)
        self._learners.submit(learner_call)

    def _await_version(self, version_id: int, future: Future) -> None:
        """Let the verbs that name a version wait until `future` completes."""
        with self._lock:
            self._pending_versions[version_id] = []
        future.add_done_callback(partial(self._release_waiting_verbs, version_id))

    def _start_transfer(self, snapshot: WeightSnapshot, version_id: int, future: Future) -> None:
        """Send the weights from a thread, which completes `future`. A failure frees the version."""
        self._version_sources[version_id] = ((snapshot.model_id, snapshot.version), set())
        started = self._queue("begin_transfer", (version_id, snapshot.make_manifest()))

        def transfer() -> None:
            try:
                dtypes = started.result()
                if (model_id := snapshot.model_id) in self._sent_models:
                    known = self._sent_models[model_id] or {}
                    self._sent_models[model_id] = {**known, **(dtypes or {})}
                cut = snapshot.payloads
                schedule = TransferSchedule() if cut is None else TransferSchedule(len(cut))
                self._send_chunks(snapshot.iter_chunks(dtypes=dtypes), version_id, schedule)
            except BaseException as error:  # an error in a thread is lost otherwise
                # this frees the chunks that have arrived
                self._queue("free_version", (version_id,))
                future.set_exception(error)
            else:
                self._queue("end_transfer", (version_id,), future)

        threading.Thread(target=transfer, name="whetstone-transfer", daemon=True).start()

    def _send_chunks(
        self, chunks: Iterator[WeightChunk], version_id: int, schedule: TransferSchedule
    ) -> None:
        """Send the weights in rounds of chunks. A round is queued when the previous round has
        arrived, so that steps of streams run in between. It is prepared before.
        """
        chunks = _link_chunks(chunks)
        batch = list(itertools.islice(chunks, schedule.num_chunks))
        while batch:
            schedule.start_round(len(batch))
            arrivals: list[Future] = [Future() for _ in batch]
            for arrival, chunk in zip(arrivals, batch, strict=True):
                # before it is queued: the time of its arrival counts
                arrival.add_done_callback(lambda _: schedule.record_arrival())
                self._queue("receive_chunk", (version_id, chunk), arrival)
            batch = list(itertools.islice(chunks, schedule.num_chunks))
            for arrival in arrivals:
                arrival.result()
            schedule.end_round()

    def _record_source(self, version_id: int, owner: int, completed: Future) -> None:
        """Record the learner that saved the weights of a version."""
        if completed.exception() is None:
            self._version_sources[version_id] = ((owner, completed.result()["version"]), set())

    def _release_waiting_verbs(self, version_id: int, completed: Future) -> None:
        """Release the verbs that wait for a version. If its transfer failed, set the error on their
        futures.
        """
        error = completed.exception()
        refused: list[Future] = []
        with self._lock:
            for call in self._pending_versions.pop(version_id, ()):
                if error is None or call.spec.is_cleanup:
                    self._queue_ready(call)
                else:
                    refused.append(call.future)
        for future in refused:  # without the lock: callbacks may wait for others
            future.set_exception(error)

    # -------------------------------------------------------------------------------------- routing

    def _queue_ready(self, call: VerbCall) -> None:
        """Queue a verb on a version that has arrived, and report its sampling parameters to the
        learner.
        """
        spec, version_id = call.spec, call.version_id
        if version_id is not None and spec.get_params is not None:
            self._report_params(version_id, spec.get_params(call.arguments))
        if version_id is not None and spec.is_cleanup:
            self._version_sources.pop(version_id, None)
        self._samplers.submit(call)

    def _report_params(self, version_id: int, params: Sequence[SamplingParams]) -> None:
        """Report to the learner of these weights the way they are sampled, once for each
        (temperature, changes_distribution) pair.
        """
        source = self._version_sources.get(version_id)  # once: a finalizer may remove it between
        if source is None:
            return
        (owner, reported), new_params = source, []
        for sampling_params in params:
            pair = (sampling_params.temperature, sampling_params.changes_distribution)
            if pair not in reported:
                reported.add(pair)
                new_params.append(sampling_params)
        if new_params:
            self._learners.submit(VerbCall("record_params", (*owner, new_params)))

    def _queue(self, verb: str, arguments: Sequence[Any], future: Future | None = None) -> Future:
        """Queue a verb for the sampler ranks. Return its future."""
        call = VerbCall(verb, arguments, (), future or Future())
        self._samplers.submit(call)
        return call.future
