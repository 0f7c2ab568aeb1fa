"""Drive all ranks from rank 0: rank 0 runs the script, and holds only futures of what the ranks
execute.

Each ServiceClient has a `Driver`, and a separate worker on every rank (rl.runtime.worker_group).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from rl.runtime.rank_settings import WorkerSettings
from rl.runtime.router import VerbRouter
from rl.runtime.verb_table import LEARNER, VERBS, VerbCall, VerbFuture
from rl.runtime.worker_group import GroupService
from rl.sampler import SamplingRequest


def is_driver() -> bool:
    """Return whether this process runs the script. It is known before torch.distributed is
    initialized.
    """
    return int(os.environ.get("RANK", "0")) == 0


class Driver:
    """Submit the verbs of a service to its worker on every rank."""

    def __init__(self, settings: WorkerSettings):
        self._lock = threading.RLock()
        self._pending: list[tuple[int, Future, SamplingRequest, Future]] = []
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
            self._pending.append((version_id, created, request, future))
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
            pending, self._pending = self._pending, []
            by_version: dict[tuple[int, Future], list[tuple[SamplingRequest, Future]]] = {}
            for version_id, created, request, future in pending:
                by_version.setdefault((version_id, created), []).append((request, future))
            for (version_id, created), items in by_version.items():
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
