"""Run all ranks: rank 0 broadcasts verbs, and the other ranks execute them until rank 0 ends.

On rank 0 a single thread executes the verbs in the order they were submitted. With a single process
the broadcast is a no-op and nothing else differs. All services of a script share the thread and the
ranks, which run until the script ends, because another service may be created. If some ranks only
sample (`sampler_ranks`), they form a separate worker group with a separate thread on rank 0, which
executes no verbs itself. Learning and sampling then run concurrently.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any, ClassVar

from rl.clients.drawing import Drawing
from rl.clients.landing import Hangar
from rl.clients.settings import WorkerSettings
from rl.clients.worker import Worker
from rl.errors import FailedElsewhere, RankLost, UserError
from rl.ranks import distributed, interrupts, require_same, take_role

CLOSE, ALIVE = "close", "alive"
OPEN, LEAVE = "open_service", "leave_service"  # verbs of the executor, not of a worker


class Desk:
    """Execute verbs on a rank: hold its workers by service number."""

    def __init__(self, settings: WorkerSettings):
        role = take_role(settings.sampler_ranks, settings.timeout_seconds)
        samples = role is not None and role.samples
        self._kind: type[Drawing] = Hangar if samples else Worker
        bridge = (
            distributed.ObjectGroup(settings.timeout_seconds, role.bridge)
            if samples and role is not None
            else None
        )
        first = self._kind(settings, bridge)
        require_same(first.objects, settings)
        self.objects = first.objects
        self.device = str(first.accelerator.device)
        self._workers: dict[int, Drawing] = {0: first}

    def worker(self, service: int, verb: str) -> Any:
        """Return the object that executes `verb` of that service."""
        return (
            self
            if verb in (OPEN, LEAVE)
            else self._workers.get(service) or Gone(self.objects, service)
        )

    def open_service(self, service: int, settings: WorkerSettings) -> str:
        """Create the service's worker. Return the device that it computes on."""
        if service not in self._workers:  # worker 0 is made before any verb can be broadcast
            self._workers[service] = self._kind(settings, self.objects)
        return str(self._workers[service].accelerator.device)

    def leave_service(self, service: int) -> None:
        """Free the memory of the service's models and samplers."""
        self._workers.pop(service).forget_all()

    def merge(self, verb: str, parts: Sequence[Any]) -> Any:
        """Return rank 0's result."""
        return parts[0]


class Gone:
    """Stand in for the worker of a closed service: late verbs raise an error instead of killing the
    rank.
    """

    def __init__(self, objects: distributed.ObjectGroup, service: int):
        self.objects, self._service = objects, service

    def __getattr__(self, verb: str) -> Any:
        raise RuntimeError(f"{verb} was called after its service ({self._service}) was closed")


class FarDesk:
    """Serve as rank 0's executor of the sampler ranks: execute nothing, and merge the results of
    the sampler ranks.
    """

    def __init__(self, settings: WorkerSettings):
        role = take_role(settings.sampler_ranks, settings.timeout_seconds)
        assert role is not None and role.bridge is not None
        self.objects = distributed.ObjectGroup(settings.timeout_seconds, role.bridge)
        require_same(self.objects, settings)

    def worker(self, service: int, verb: str) -> FarDesk:
        """Return this object, for any service and verb."""
        return self

    def __getattr__(self, verb: str) -> Any:
        return _nothing

    def merge(self, verb: str, parts: Sequence[Any]) -> Any:
        """Return the merged results of the sampler ranks; rank 0's part (index 0) is empty."""
        return parts[1] if verb in (OPEN, LEAVE) else Hangar.together(verb, parts[1:])


def _nothing(*arguments: Any) -> None:
    """Do nothing: rank 0's part in a verb of the sampler ranks."""


def serve(settings: WorkerSettings) -> None:
    """Execute broadcast verbs on a rank other than 0 until the driver ends. Raises RankLost if the
    driver is lost.
    """
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
    del desk
    distributed.shutdown()


def _execute(worker: Any, verb: str, arguments: Sequence[Any]) -> Any:
    """Run a verb on this rank and gather the results of all ranks on rank 0. Rank 0 raises if any
    rank failed.

    A single gather carries result and error of every rank, so a rank that fails blocks no other
    rank. After a failed collective the ranks are out of step: RankLost is raised, which names the
    rank that failed for another reason, if any.
    """
    error: BaseException | None = None
    result = None
    try:
        result = getattr(worker, verb)(*arguments)
    except RankLost:
        raise
    except FailedElsewhere:
        pass  # the rank that failed reports the reason
    except (
        Exception
    ) as caught:  # reported to the driver, which raises it from the future's result()
        error = caught
    report = None
    if error is not None:
        user_message = str(error) if isinstance(error, (UserError, FloatingPointError)) else None
        report = (
            "".join(traceback.format_exception(error)),
            distributed.is_communication_error(error),
            user_message,
        )
    try:
        reports = worker.objects.gather((result, report))
    except RankLost as lost:
        raise RankLost(f"{verb}: {lost}") from error
    if reports is None:
        return None
    failures = {rank: report for rank, (_, report) in enumerate(reports) if report is not None}
    if any(out_of_step for _, out_of_step, _ in failures.values()):
        causes = {
            rank: text for rank, (text, out_of_step, _) in failures.items() if not out_of_step
        }
        rank, text = (
            next(iter(causes.items())) if causes else (min(failures), failures[min(failures)][0])
        )
        raise RankLost(
            f"{verb} failed on {worker.objects.name(rank)}, the ranks are out of step:\n{text}"
        ) from error
    if error is not None:
        raise error
    for rank, (text, _, user_message) in failures.items():
        if user_message is not None:
            raise UserError(f"{user_message} (on {worker.objects.name(rank)})")
        raise RuntimeError(f"{verb} failed on {worker.objects.name(rank)}:\n{text}")
    return worker.merge(verb, [result for result, _ in reports])


def _beat(desk: Desk | FarDesk, verb: str = ALIVE) -> RankLost | None:
    """Broadcast that the driver is alive (or closes). Return the error if another rank is lost."""
    try:
        desk.objects.broadcast_verb((0, verb, ()))
    except RankLost as lost:
        return lost
    return None


class Crew:
    """Queue verbs on rank 0, and run the thread that executes them on all ranks. A process has a
    single worker group.
    """

    name = "whetstone-worker"
    # seconds that the end of the script waits for submitted verbs
    patience: ClassVar[float] = 60.0
    _lock: ClassVar[Any] = threading.RLock()
    # the other ranks serve this process only, for any number of services
    _at_work: ClassVar[Crew | None] = None

    def __init__(self, settings: WorkerSettings):
        interrupts.end_with_the_launcher()
        self.services = 0
        self.open: set[int] = set()
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        started: Future = Future()
        self.thread = threading.Thread(
            target=self._loop, args=(settings, started), name=self.name, daemon=True
        )
        self.thread.start()
        started.result()
        atexit.register(self._at_exit)

    @classmethod
    def join(cls, settings: WorkerSettings) -> tuple[Crew, int]:
        """Return the running worker group (a new group if none is running) and a new service
        number.
        """
        with cls._lock:
            crew = cls._at_work
            if crew is None or not crew.thread.is_alive():
                crew = cls._at_work = cls(settings)
            service, crew.services = crew.services, crew.services + 1
            crew.open.add(service)
            return crew, service

    def leave(self, number: int, timeout: float) -> None:
        """Close a service. In a single-process run the thread ends with the last service, since no
        other rank waits for another service.
        """
        done: Future = Future()
        with self._lock:
            self.open.discard(number)
            self.queue.put((number, LEAVE, (number,), (), done))
            is_last = not self.open and self._alone()
            if is_last:
                # a thread that joins meanwhile waits for the lock and starts a new worker group
                self.end(timeout)
        if not is_last:
            wait([done], timeout)

    def end(self, timeout: float = 60.0) -> None:
        """End the thread and the other ranks; verbs already submitted run first. A second call is a
        no-op.
        """
        with self._lock:
            if type(self)._at_work is self:
                type(self)._at_work = None
            if self.thread.is_alive():
                self.queue.put((0, CLOSE, (), (), Future()))
        self.thread.join(timeout)
        if not self.thread.is_alive():
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """End the worker group at the end of the script. A thread that still runs must not outlive
        the interpreter: the interpreter would unwind it inside torch, and C++ would abort with
        "terminate called without an active exception".
        """
        self.end(self.patience)
        if self.thread.is_alive():
            print(
                f"the script has ended, and submitted verbs were still running {self.patience:g} "
                "s later: they are abandoned. Wait for the last result, or close the service, "
                "before the script ends",
                file=sys.stderr,
            )
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _alone(self) -> bool:
        """Return whether this process is the only rank."""
        return distributed.world() == 1

    def _desk(self, settings: WorkerSettings) -> Any:
        """Return the executor of rank 0."""
        return Desk(settings)

    def _part(self) -> None:
        """Shut down the process group after all ranks have received CLOSE."""
        distributed.shutdown()

    def _loop(self, settings: WorkerSettings, started: Future) -> None:
        """Execute queued verbs until CLOSE. Send heartbeats while the queue is empty."""
        try:
            desk = self._desk(settings)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        lost: RankLost | None = None
        while True:
            try:
                number, verb, arguments, after, future = self.queue.get(
                    timeout=desk.objects.beat_seconds
                )
            except queue.Empty:
                lost = lost or _beat(desk)
                continue
            if verb == CLOSE:
                announced = lost is None and not isinstance(_beat(desk, CLOSE), RankLost)
                desk.objects.close()
                del desk
                if announced:
                    self._part()
                future.set_result(None)
                return
            try:
                if lost is not None:
                    raise lost
                _refuse_after_failure(desk, number, verb, arguments, after)
                future.set_result(_everywhere(desk, number, verb, arguments))
            except BaseException as error:
                if isinstance(error, RankLost):
                    # the ranks are out of step: every later verb fails with the same error
                    lost = error
                future.set_exception(error)
            # release the arguments of a finished verb before waiting for the next verb
            del verb, arguments, after, future


class Samplers(Crew):
    """Run the worker group of the ranks that only sample."""

    name = "whetstone-samplers"
    _lock = threading.RLock()
    _at_work = None

    def _alone(self) -> bool:
        return False

    def _desk(self, settings: WorkerSettings) -> FarDesk:
        return FarDesk(settings)

    def _part(self) -> None:
        """Do nothing: rank 0's process group belongs to the learner ranks, which continue."""


def _everywhere(desk: Any, number: int, verb: str, arguments: Sequence[Any]) -> Any:
    """Run a verb on all ranks and return the merged result."""
    desk.objects.broadcast_verb((number, verb, arguments))
    return _execute(desk.worker(number, verb), verb, arguments)


def _refuse_after_failure(
    desk: Any, number: int, verb: str, arguments: Sequence[Any], after: Sequence[Future]
) -> None:
    """Raise the error of an earlier verb that this verb depends on. For `optim_step`, drop the
    gradients first: an update on part of the intended batch would be worse than no update.

    A sampling client of weights raises likewise if saving them under a name failed, so that the
    error is not lost.
    """
    errors = [error for error in (earlier.exception() for earlier in after) if error is not None]
    if not errors:
        return
    if verb != "optim_step":
        raise errors[0]
    _everywhere(desk, number, "drop_gradients", arguments[:1])
    raise RuntimeError(
        f"{verb} was not run, because a forward_backward before it failed: {errors[0]}"
    ) from errors[0]
