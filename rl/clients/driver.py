"""Drive all ranks from rank 0: rank 0 runs the script, and holds only futures of what the ranks
execute.

Each ServiceClient has a `Driver`, and a separate worker on every rank (rl.clients.crew).
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rl.clients.crew import OPEN, Crew
from rl.clients.far import Far
from rl.clients.settings import WorkerSettings
from rl.sampler import Request


def is_driver() -> bool:
    """Return whether this process runs the script. It is known before torch.distributed is
    initialized.
    """
    return int(os.environ.get("RANK", "0")) == 0


class Driver:
    """Submit the verbs of a service to its worker on every rank."""

    def __init__(self, settings: WorkerSettings):
        self._lock = threading.RLock()
        self._pending: list[tuple[int, Request, Future]] = []
        self._closed = False
        self._crew, self._number = Crew.join(settings)
        opened: Future = Future()
        self._crew.queue.put((self._number, OPEN, (self._number, settings), (), opened))
        self.device: str = opened.result()
        # router to the ranks that only sample; None if all ranks learn
        self.far = Far(settings, self._put_here) if settings.sampler_ranks else None

    def submit(self, verb: str, *arguments: Any, after: Sequence[Future] = ()) -> Future:
        """Queue a verb and return its future. `after`: earlier futures; if any of them failed, the
        verb is refused.
        """
        with self._lock:
            # a finalizer's verb: no sample request depends on it
            if verb not in ("forget_version", "forget_model", "close_stream"):
                self._flush()
            future = self._promise(verb)
            self._put(verb, arguments, tuple(after), future)
            return future

    def _put(
        self, verb: str, arguments: Sequence[Any], after: tuple[Future, ...], future: Future
    ) -> None:
        """Route a verb to the sampler ranks, or queue it for the learner ranks."""
        if self.far is None or not self.far.put(verb, arguments, after, future):
            self._put_here(verb, arguments, after, future)

    def _put_here(
        self, verb: str, arguments: Sequence[Any], after: tuple[Future, ...], future: Future
    ) -> None:
        """Queue a verb for the learner ranks."""
        self._crew.queue.put((self._number, verb, arguments, after, future))

    def _promise(self, verb: str) -> Future:
        """Return a future that cannot be cancelled: a submitted verb runs even if its caller stops
        waiting. Raises RuntimeError if the service is closed, or its thread has died.
        """
        if self._closed:
            raise RuntimeError(f"the service is closed: {verb} can no longer run")
        if self.closed:
            raise RuntimeError(
                f"the thread that executes verbs has died: {verb} cannot run; start again"
            )
        future: Future = Future()
        future.set_running_or_notify_cancel()
        return future

    def submit_sample(self, version_id: int, request: Request) -> Future:
        """Hold a sample request back until a caller waits or another verb comes, so that samples
        requested separately run as a batch.
        """
        with self._lock:
            future = self._promise("sample")
            self._pending.append((version_id, request, future))
            return future

    @property
    def closed(self) -> bool:
        """Return whether the service is closed, or a thread that executes its verbs has ended."""
        return (
            self._closed
            or not self._crew.thread.is_alive()
            or (self.far is not None and not self.far.alive)
        )

    def flush(self) -> None:
        """Submit the sample requests held back."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        """Submit the sample requests held back, a batch for each weight version. The caller holds
        the lock.
        """
        pending, self._pending = self._pending, []
        by_version: dict[int, list[tuple[Request, Future]]] = {}
        for version_id, request, future in pending:
            by_version.setdefault(version_id, []).append((request, future))
        for version_id, items in by_version.items():
            batch: Future = Future()
            batch.add_done_callback(functools.partial(_spread, [future for _, future in items]))
            self._put("sample", (version_id, [request for request, _ in items]), (), batch)

    def close(self, timeout: float = 60.0) -> None:
        """Run the submitted verbs, then free the service's models on every rank. A second call is a
        no-op.
        """
        with self._lock:
            if self.closed:
                self._closed = True
                return
            self._flush()
            self._closed = True
        if self.far is not None:
            self.far.leave(timeout)
        self._crew.leave(self._number, timeout)


def _spread(futures: Sequence[Future], batch: Future) -> None:
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
