"""The one-driver contract: rank 0 runs the script and broadcasts verbs; the others execute them until it closes.

On rank 0 one thread executes the verbs in the order they were submitted, so a future is all the script ever holds.
With one process the broadcast is a no-op and nothing else differs.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rl import distributed, interrupts
from rl.errors import FailedElsewhere, RankLost, UserError
from rl.sampler import Request
from rl.worker import Worker, WorkerSettings

CLOSE, ALIVE = "close", "alive"


def is_driver() -> bool:
    """Whether this process runs the script (known before torch.distributed is up)."""
    return int(os.environ.get("RANK", "0")) == 0


def serve(settings: WorkerSettings) -> None:
    """Executes broadcast verbs on a rank other than 0 until the driver closes. RankLost where the driver is gone."""
    worker = Worker(settings)
    interrupts.leave_to_the_driver(settings.stop_grace_seconds)
    while True:
        verb, arguments = worker.objects.broadcast_verb(None)
        if verb == CLOSE:
            break
        if verb != ALIVE:
            _execute(worker, verb, arguments)
    distributed.shutdown()


def _execute(worker: Worker, verb: str, arguments: Sequence[Any]) -> Any:
    """Runs a verb on this rank and brings the ranks' parts together on rank 0, where it raises if any rank failed.

    One gather carries result and error of every rank, so a rank that fails keeps nobody waiting. Where a collective failed,
    the ranks are out of step: RankLost, which names the rank that failed for another reason, if one did.
    """
    error: BaseException | None = None
    part = None
    try:
        part = getattr(worker, verb)(*arguments)
    except RankLost:
        raise
    except FailedElsewhere:
        pass  # the rank where it failed reports why
    except Exception as caught:  # reported to the driver, which raises it where the result is asked for
        error = caught
    report = None
    if error is not None:
        says = str(error) if isinstance(error, UserError) else None
        report = ("".join(traceback.format_exception(error)), distributed.is_communication_error(error), says)
    try:
        reports = worker.objects.gather((part, report))
    except RankLost as lost:
        raise RankLost(f"{verb}: {lost}") from error
    if reports is None:
        return None
    failed = {rank: report for rank, (_, report) in enumerate(reports) if report is not None}
    if any(out_of_step for _, out_of_step, _ in failed.values()):
        causes = {rank: text for rank, (text, out_of_step, _) in failed.items() if not out_of_step}
        rank, text = next(iter(causes.items())) if causes else (min(failed), failed[min(failed)][0])
        raise RankLost(f"{verb} failed on {worker.objects.name(rank)}, the ranks are out of step:\n{text}") from error
    if error is not None:
        raise error
    for rank, (text, _, says) in failed.items():
        if says is not None:
            raise UserError(f"{says} (on {worker.objects.name(rank)})")
        raise RuntimeError(f"{verb} failed on {worker.objects.name(rank)}:\n{text}")
    return worker.merge(verb, [part for part, _ in reports])


def _beat(worker: Worker, verb: str = ALIVE) -> RankLost | None:
    """Lets the other ranks know that the driver lives (or closes). Returns the error if one of them does not."""
    try:
        worker.objects.broadcast_verb((verb, ()))
    except RankLost as lost:
        return lost
    return None


class Driver:
    """Rank 0's side: a queue of verbs and the thread that executes them."""

    def __init__(self, settings: WorkerSettings):
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._pending: list[tuple[int, Request, Future]] = []
        self._closed = False
        started: Future = Future()
        self._thread = threading.Thread(target=self._loop, args=(settings, started), name="whetstone-worker", daemon=True)
        self._thread.start()
        self.device: str = started.result()
        atexit.register(self.close)

    def _loop(self, settings: WorkerSettings, started: Future) -> None:
        try:
            worker = Worker(settings)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(str(worker.accelerator.device))
        lost: RankLost | None = None
        while True:
            try:
                verb, arguments, after, future = self._queue.get(timeout=worker.objects.beat_seconds)
            except queue.Empty:
                lost = lost or _beat(worker)
                continue
            if verb == CLOSE:
                if lost is None and not isinstance(_beat(worker, CLOSE), RankLost):
                    distributed.shutdown()
                future.set_result(None)
                return
            try:
                if lost is not None:
                    raise lost
                self._refuse_after_failure(worker, verb, arguments, after)
                worker.objects.broadcast_verb((verb, arguments))
                future.set_result(_execute(worker, verb, arguments))
            except BaseException as error:
                if isinstance(error, RankLost):
                    lost = error  # the others are out of step: whatever is asked for from now on fails alike
                future.set_exception(error)
            del verb, arguments, after, future  # nothing of a finished verb is kept alive while waiting for the next

    @staticmethod
    def _refuse_after_failure(worker: Worker, verb: str, arguments: Sequence[Any], after: Sequence[Future]) -> None:
        """An update on half of what was meant would be worse than none: refuse it and drop the gradients.

        Likewise a sampling client of weights whose saving under a name failed: the error must not be lost.
        """
        errors = [error for error in (earlier.exception() for earlier in after) if error is not None]
        if not errors:
            return
        if verb != "optim_step":
            raise errors[0]
        worker.objects.broadcast_verb(("drop_gradients", arguments[:1]))
        _execute(worker, "drop_gradients", arguments[:1])
        raise RuntimeError(f"{verb} was not run, because a forward_backward before it failed: {errors[0]}") from errors[0]

    def submit(self, verb: str, *arguments: Any, after: Sequence[Future] = ()) -> Future:
        """Queues a verb. `after`: earlier futures that must have succeeded, or the verb is refused."""
        with self._lock:
            if verb not in ("forget_version", "forget_model"):  # a finaliser's verb: whoever it concerns has no one waiting
                self._flush()
            future = self._promise(verb)
            self._queue.put((verb, arguments, tuple(after), future))
            return future

    def _promise(self, verb: str) -> Future:
        """A future that cannot be cancelled: a verb that was submitted runs, whoever stops waiting for it."""
        if self._closed:
            raise RuntimeError(f"the service is closed: {verb} cannot run any more")
        if not self._thread.is_alive():
            raise RuntimeError(f"the thread that executes verbs has died: {verb} cannot run; start again")
        future: Future = Future()
        future.set_running_or_notify_cancel()
        return future

    def submit_sample(self, version_id: int, request: Request) -> Future:
        """Holds a sample back until somebody waits or another verb comes, so that samples asked for one by one run together."""
        with self._lock:
            future = self._promise("sample")
            self._pending.append((version_id, request, future))
            return future

    @property
    def closed(self) -> bool:
        return self._closed

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
            self._queue.put(("sample", (version_id, [request for request, _ in items]), (), batch))

    def close(self, timeout: float = 60.0) -> None:
        """Ends the worker thread and the other ranks; verbs already submitted run first. Closing twice does nothing."""
        with self._lock:
            if self._closed or not self._thread.is_alive():
                self._closed = True
                return
            self._flush()
            self._closed = True
            self._queue.put((CLOSE, (), (), Future()))
        self._thread.join(timeout)
        atexit.unregister(self.close)


def _spread(futures: Sequence[Future], batch: Future) -> None:
    error = batch.exception()
    if error is not None:
        for future in futures:
            future.set_exception(error)
        return
    responses, _ = batch.result()
    for future, response in zip(futures, responses, strict=True):
        future.set_result(response)
