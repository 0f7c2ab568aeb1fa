"""The one-driver contract: rank 0 runs the script, and all it ever holds of what ranks do is
futures.

Each ServiceClient has a `Driver`, and a worker of its own on every rank (rl.clients.crew).
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
    """Whether this process runs the script (known before torch.distributed is up)."""
    return int(os.environ.get("RANK", "0")) == 0


class Driver:
    """One service's side: what it submits goes to its own worker on every rank."""

    def __init__(self, settings: WorkerSettings):
        self._lock = threading.RLock()
        self._pending: list[tuple[int, Request, Future]] = []
        self._closed = False
        self._crew, self._number = Crew.join(settings)
        opened: Future = Future()
        self._crew.queue.put((self._number, OPEN, (self._number, settings), (), opened))
        self.device: str = opened.result()
        # the ranks that sample, where some do nothing else
        self.far = Far(settings, self._put_here) if settings.sampler_ranks else None

    def submit(self, verb: str, *arguments: Any, after: Sequence[Future] = ()) -> Future:
        """Queues a verb. `after`: earlier futures that must have succeeded, or the verb is refused."""
        with self._lock:
            # a finaliser's verb: whoever it concerns has no one waiting
            if verb not in ("forget_version", "forget_model", "close_stream"):
                self._flush()
            future = self._promise(verb)
            self._put(verb, arguments, tuple(after), future)
            return future

    def _put(
        self, verb: str, arguments: Sequence[Any], after: tuple[Future, ...], future: Future
    ) -> None:
        if self.far is None or not self.far.put(verb, arguments, after, future):
            self._put_here(verb, arguments, after, future)

    def _put_here(
        self, verb: str, arguments: Sequence[Any], after: tuple[Future, ...], future: Future
    ) -> None:
        self._crew.queue.put((self._number, verb, arguments, after, future))

    def _promise(self, verb: str) -> Future:
        """A future that cannot be cancelled: a verb that was submitted runs, whoever stops waiting
        for it.
        """
        if self._closed:
            raise RuntimeError(f"the service is closed: {verb} cannot run any more")
        if self.closed:
            raise RuntimeError(
                f"the thread that executes verbs has died: {verb} cannot run; start again"
            )
        future: Future = Future()
        future.set_running_or_notify_cancel()
        return future

    def submit_sample(self, version_id: int, request: Request) -> Future:
        """Holds a sample back until somebody waits or another verb comes, so that samples asked for
        one by one run together.
        """
        with self._lock:
            future = self._promise("sample")
            self._pending.append((version_id, request, future))
            return future

    @property
    def closed(self) -> bool:
        return (
            self._closed
            or not self._crew.thread.is_alive()
            or (self.far is not None and not self.far.alive)
        )

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        by_version: dict[int, list[tuple[Request, Future]]] = {}
        for version_id, request, future in pending:
            by_version.setdefault(version_id, []).append((request, future))
        for version_id, items in by_version.items():
            batch: Future = Future()
            batch.add_done_callback(functools.partial(_spread, [future for _, future in items]))
            self._put("sample", (version_id, [request for request, _ in items]), (), batch)

    def close(self, timeout: float = 60.0) -> None:
        """Runs what was submitted, then gives its models back on every rank. Closing twice does
        nothing.
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
    """A batch's results to those who asked: a request that was refused fails alone."""
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
