"""The one-driver contract: rank 0 runs the script and broadcasts verbs; the others execute them until it ends.

On rank 0 one thread executes the verbs in the order they were submitted, so a future is all the script ever holds.
With one process the broadcast is a no-op and nothing else differs. Each ServiceClient has a `Driver`, and a worker of its own on
every rank; all of them share the thread and the ranks, which stay until the script ends, for another ServiceClient may come.
"""

from __future__ import annotations

import atexit
import functools
import os
import queue
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any

from rl.clients.settings import WorkerSettings
from rl.clients.worker import Worker
from rl.errors import FailedElsewhere, RankLost, UserError
from rl.ranks import distributed, interrupts, require_same
from rl.sampler import Request

CLOSE, ALIVE = "close", "alive"
OPEN, LEAVE = "open_service", "leave_service"  # verbs of the ranks themselves, not of a worker


def is_driver() -> bool:
    """Whether this process runs the script (known before torch.distributed is up)."""
    return int(os.environ.get("RANK", "0")) == 0


class Desk:
    """One rank's workers, by the number of the service that they belong to."""

    def __init__(self, settings: WorkerSettings):
        first = Worker(settings)
        require_same(first.objects, settings)
        self.objects = first.objects
        self.device = str(first.accelerator.device)
        self._workers: dict[int, Worker] = {0: first}

    def worker(self, service: int, verb: str) -> Any:
        """What executes a verb of that service."""
        return self if verb in (OPEN, LEAVE) else self._workers[service]

    def open_service(self, service: int, settings: WorkerSettings) -> str:
        """Makes its worker; the device it computes on."""
        if service not in self._workers:  # the first is made before any verb can be broadcast
            self._workers[service] = Worker(settings, self.objects)
        return str(self._workers[service].accelerator.device)

    def leave_service(self, service: int) -> None:
        """Gives back what its models and samplers took."""
        worker = self._workers.pop(service)
        for model_id in list(worker.learners):
            worker.forget_model(model_id)

    def merge(self, verb: str, parts: Sequence[Any]) -> Any:
        return parts[0]


def serve(settings: WorkerSettings) -> None:
    """Executes broadcast verbs on a rank other than 0 until the driver ends. RankLost where the driver is gone."""
    interrupts.end_with_the_launcher()
    desk = Desk(settings)
    interrupts.leave_to_the_driver(settings.stop_grace_seconds)
    while True:
        service, verb, arguments = desk.objects.broadcast_verb(None)
        if verb == CLOSE:
            break
        if verb != ALIVE:
            _execute(desk.worker(service, verb), verb, arguments)
    desk.objects.close()
    distributed.shutdown()


def _execute(worker: Any, verb: str, arguments: Sequence[Any]) -> Any:
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
        says = str(error) if isinstance(error, (UserError, FloatingPointError)) else None
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


def _beat(desk: Desk, verb: str = ALIVE) -> RankLost | None:
    """Lets the other ranks know that the driver lives (or closes). Returns the error if one of them does not."""
    try:
        desk.objects.broadcast_verb((0, verb, ()))
    except RankLost as lost:
        return lost
    return None


class Crew:
    """Rank 0's side of all ranks: a queue of verbs and the thread that executes them. There is one in a process."""

    _lock = threading.RLock()
    _at_work: Crew | None = None  # the other ranks serve this process alone, however many services its script makes

    def __init__(self, settings: WorkerSettings):
        interrupts.end_with_the_launcher()
        self.services = 0
        self.open: set[int] = set()
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        started: Future = Future()
        self.thread = threading.Thread(target=self._loop, args=(settings, started), name="whetstone-worker", daemon=True)
        self.thread.start()
        started.result()
        atexit.register(self.end)

    @classmethod
    def join(cls, settings: WorkerSettings) -> tuple[Crew, int]:
        """The crew at work (a new one where there is none) and a number for one more service."""
        with cls._lock:
            crew = cls._at_work
            if crew is None or not crew.thread.is_alive():
                crew = cls._at_work = Crew(settings)
            number, crew.services = crew.services, crew.services + 1
            crew.open.add(number)
            return crew, number

    def leave(self, number: int, timeout: float) -> None:
        """One service less. One process alone has nobody to keep for another service: its thread ends with the last one."""
        done: Future = Future()
        with self._lock:
            self.open.discard(number)
            self.queue.put((number, LEAVE, (number,), (), done))
            last = not self.open and distributed.world() == 1
            if last:
                self.end(timeout)  # who joins meanwhile, in another thread, waits, and begins a crew of its own
        if not last:
            wait([done], timeout)

    def end(self, timeout: float = 60.0) -> None:
        """Ends the thread and the other ranks; verbs already submitted run first. Ending twice does nothing."""
        with self._lock:
            if Crew._at_work is self:
                Crew._at_work = None
            if self.thread.is_alive():
                self.queue.put((0, CLOSE, (), (), Future()))
        self.thread.join(timeout)
        atexit.unregister(self.end)

    def _loop(self, settings: WorkerSettings, started: Future) -> None:
        try:
            desk = Desk(settings)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        lost: RankLost | None = None
        while True:
            try:
                number, verb, arguments, after, future = self.queue.get(timeout=desk.objects.beat_seconds)
            except queue.Empty:
                lost = lost or _beat(desk)
                continue
            if verb == CLOSE:
                said = lost is None and not isinstance(_beat(desk, CLOSE), RankLost)
                desk.objects.close()
                if said:
                    distributed.shutdown()
                future.set_result(None)
                return
            try:
                if lost is not None:
                    raise lost
                _refuse_after_failure(desk, number, verb, arguments, after)
                future.set_result(_everywhere(desk, number, verb, arguments))
            except BaseException as error:
                if isinstance(error, RankLost):
                    lost = error  # the others are out of step: whatever is asked for from now on fails alike
                future.set_exception(error)
            del verb, arguments, after, future  # nothing of a finished verb is kept alive while waiting for the next


def _everywhere(desk: Desk, number: int, verb: str, arguments: Sequence[Any]) -> Any:
    desk.objects.broadcast_verb((number, verb, arguments))
    return _execute(desk.worker(number, verb), verb, arguments)


def _refuse_after_failure(desk: Desk, number: int, verb: str, arguments: Sequence[Any], after: Sequence[Future]) -> None:
    """An update on half of what was meant would be worse than none: refuse it and drop the gradients.

    Likewise a sampling client of weights whose saving under a name failed: the error must not be lost.
    """
    errors = [error for error in (earlier.exception() for earlier in after) if error is not None]
    if not errors:
        return
    if verb != "optim_step":
        raise errors[0]
    _everywhere(desk, number, "drop_gradients", arguments[:1])
    raise RuntimeError(f"{verb} was not run, because a forward_backward before it failed: {errors[0]}") from errors[0]


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

    def submit(self, verb: str, *arguments: Any, after: Sequence[Future] = ()) -> Future:
        """Queues a verb. `after`: earlier futures that must have succeeded, or the verb is refused."""
        with self._lock:
            if verb not in ("forget_version", "forget_model", "close_stream"):  # a finaliser's verb: whoever it concerns has no one waiting
                self._flush()
            future = self._promise(verb)
            self._put(verb, arguments, tuple(after), future)
            return future

    def _put(self, verb: str, arguments: Sequence[Any], after: tuple[Future, ...], future: Future) -> None:
        self._crew.queue.put((self._number, verb, arguments, after, future))

    def _promise(self, verb: str) -> Future:
        """A future that cannot be cancelled: a verb that was submitted runs, whoever stops waiting for it."""
        if self._closed:
            raise RuntimeError(f"the service is closed: {verb} cannot run any more")
        if not self._crew.thread.is_alive():
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
        return self._closed or not self._crew.thread.is_alive()

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
        """Runs what was submitted, then gives its models back on every rank. Closing twice does nothing."""
        with self._lock:
            if self.closed:
                self._closed = True
                return
            self._flush()
            self._closed = True
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
