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
from functools import partial
from typing import Any

from rl.runtime.rank_settings import WorkerSettings
from rl.runtime.verb_table import LEARNER, SAMPLER, VerbCall
from rl.runtime.weight_sync import TransferSchedule, WeightChunk, WeightSnapshot
from rl.runtime.worker_group import GroupService
from rl.types import SamplingParams


class VerbRouter:
    """Route the verbs of a service to its learner ranks and its sampler ranks.

    `lock`: the driver's, which holds it when it submits a verb. A finalizer may submit one on any
    thread, also in this class, so a second lock could be acquired in either order.
    """

    def __init__(self, settings: WorkerSettings, learners: GroupService, lock: Any):
        self.sampler_ranks = settings.sampler_ranks
        self._learners, self._lock = learners, lock
        self._samplers = GroupService(settings, SAMPLER)
        # by version: verbs that wait for it
        self._pending_versions: dict[int, list[VerbCall]] = {}
        self._sent_models: set[int] = set()  # models with weights sent to the samplers
        # by version: (model id, version of the learner)
        self._version_sources: dict[int, tuple[int, int]] = {}
        # by version: (temperature, changes_distribution) pairs reported to the learner
        self._reported_params: dict[int, set[tuple[float, bool]]] = {}

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
        self._sent_models.add(model_id)

        def forget_if_failed(completed: Future) -> None:
            if completed.exception() is not None:
                self._sent_models.discard(model_id)

        call.future.add_done_callback(forget_if_failed)
        self._run_on_learners_first(
            call,
            "take_snapshot",
            (model_id, first),
            lambda staged: self._start_transfer(staged, version_id, call.future),
        )

    def snapshot_base(self, call: VerbCall) -> None:
        """Create the version of the base model on the samplers, which have its weights."""
        model_id, version_id = call.arguments
        self._run_on_learners_first(
            call,
            "take_empty_snapshot",
            (model_id,),
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
        self._sent_models.discard(call.arguments[0])

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
        self._version_sources[version_id] = (snapshot.model_id, snapshot.version)
        started = self._queue("begin_transfer", (version_id, snapshot.make_manifest()))

        def transfer() -> None:
            try:
                self._send_chunks(snapshot.iter_chunks(dtypes=started.result()), version_id)
            except BaseException as error:  # an error in a thread is lost otherwise
                # this frees the chunks that have arrived
                self._queue("free_version", (version_id,))
                future.set_exception(error)
            else:
                self._queue("end_transfer", (version_id,), future)

        threading.Thread(target=transfer, name="whetstone-transfer", daemon=True).start()

    def _send_chunks(self, chunks: Iterator[WeightChunk], version_id: int) -> None:
        """Send the weights in rounds of chunks. A round is queued when the previous round has
        arrived, so that steps of streams run in between. It is prepared before.
        """
        schedule = TransferSchedule()
        batch = list(itertools.islice(chunks, schedule.num_chunks))
        while batch:
            schedule.start_round(len(batch))
            arrivals = [self._queue("receive_chunk", (version_id, chunk)) for chunk in batch]
            for arrival in arrivals:
                arrival.add_done_callback(lambda _: schedule.record_arrival())
            batch = list(itertools.islice(chunks, schedule.num_chunks))
            for arrival in arrivals:
                arrival.result()
            schedule.end_round()

    def _record_source(self, version_id: int, owner: int, completed: Future) -> None:
        """Record the learner that saved the weights of a version."""
        if completed.exception() is None:
            self._version_sources[version_id] = (owner, completed.result()["version"])

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
            self._reported_params.pop(version_id, None)
        self._samplers.submit(call)

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
            self._learners.submit(VerbCall("record_params", (*owner, new_params)))

    def _queue(self, verb: str, arguments: Sequence[Any], future: Future | None = None) -> Future:
        """Queue a verb for the sampler ranks. Return its future."""
        call = VerbCall(verb, arguments, (), future or Future())
        self._samplers.submit(call)
        return call.future
