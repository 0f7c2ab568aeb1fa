"""All ranks at work: rank 0 broadcasts verbs, the others execute them until it ends.

On rank 0 one thread executes the verbs in the order they were submitted. With one process the
broadcast is a no-op and nothing else differs. All services of a script share the thread and the
ranks, which stay until the script ends, for another service may come. Where some ranks sample
(`sampler_ranks`) these are a crew of their own, with a thread of its own on rank 0, which executes
nothing there: what learns and what samples go on side by side.
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
OPEN, LEAVE = "open_service", "leave_service"  # verbs of the ranks themselves, not of a worker


class Desk:
    """One rank's workers, by the number of the service that they belong to."""

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
        """What executes a verb of that service."""
        return (
            self
            if verb in (OPEN, LEAVE)
            else self._workers.get(service) or Gone(self.objects, service)
        )

    def open_service(self, service: int, settings: WorkerSettings) -> str:
        """Makes its worker; the device it computes on."""
        if service not in self._workers:  # the first is made before any verb can be broadcast
            self._workers[service] = self._kind(settings, self.objects)
        return str(self._workers[service].accelerator.device)

    def leave_service(self, service: int) -> None:
        """Gives back what its models and samplers took."""
        self._workers.pop(service).forget_all()

    def merge(self, verb: str, parts: Sequence[Any]) -> Any:
        return parts[0]


class Gone:
    """In the place of a worker whose service has been closed: a verb that comes too late is an
    error, and no dead rank.
    """

    def __init__(self, objects: distributed.ObjectGroup, service: int):
        self.objects, self._service = objects, service

    def __getattr__(self, verb: str) -> Any:
        raise RuntimeError(f"{verb} came after its service ({self._service}) was closed")


class FarDesk:
    """Rank 0's desk of the samplers: nothing is executed at it, and what they report is put
    together.
    """

    def __init__(self, settings: WorkerSettings):
        role = take_role(settings.sampler_ranks, settings.timeout_seconds)
        assert role is not None and role.bridge is not None
        self.objects = distributed.ObjectGroup(settings.timeout_seconds, role.bridge)
        require_same(self.objects, settings)

    def worker(self, service: int, verb: str) -> FarDesk:
        return self

    def __getattr__(self, verb: str) -> Any:
        return _nothing

    def merge(self, verb: str, parts: Sequence[Any]) -> Any:
        return parts[1] if verb in (OPEN, LEAVE) else Hangar.together(verb, parts[1:])


def _nothing(*arguments: Any) -> None:
    """What rank 0 does of a verb of the samplers."""


def serve(settings: WorkerSettings) -> None:
    """Executes broadcast verbs on a rank other than 0 until the driver ends. RankLost where the
    driver is gone.
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
    """Runs a verb on this rank and brings the ranks' parts together on rank 0, where it raises if
    any rank failed.

    One gather carries result and error of every rank, so a rank that fails keeps nobody waiting.
    Where a collective failed, the ranks are out of step: RankLost, which names the rank that failed
    for another reason, if one did.
    """
    error: BaseException | None = None
    part = None
    try:
        part = getattr(worker, verb)(*arguments)
    except RankLost:
        raise
    except FailedElsewhere:
        pass  # the rank where it failed reports why
    except (
        Exception
    ) as caught:  # reported to the driver, which raises it where the result is asked for
        error = caught
    report = None
    if error is not None:
        says = str(error) if isinstance(error, (UserError, FloatingPointError)) else None
        report = (
            "".join(traceback.format_exception(error)),
            distributed.is_communication_error(error),
            says,
        )
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
        raise RankLost(
            f"{verb} failed on {worker.objects.name(rank)}, the ranks are out of step:\n{text}"
        ) from error
    if error is not None:
        raise error
    for rank, (text, _, says) in failed.items():
        if says is not None:
            raise UserError(f"{says} (on {worker.objects.name(rank)})")
        raise RuntimeError(f"{verb} failed on {worker.objects.name(rank)}:\n{text}")
    return worker.merge(verb, [part for part, _ in reports])


def _beat(desk: Desk | FarDesk, verb: str = ALIVE) -> RankLost | None:
    """Lets the other ranks know that the driver lives (or closes). Returns the error if one of them
    does not.
    """
    try:
        desk.objects.broadcast_verb((0, verb, ()))
    except RankLost as lost:
        return lost
    return None


class Crew:
    """Rank 0's side of all ranks: a queue of verbs and the thread that executes them. There is one
    in a process.
    """

    name = "whetstone-worker"
    # seconds that the end of the script waits for what was submitted
    patience: ClassVar[float] = 60.0
    _lock: ClassVar[Any] = threading.RLock()
    # the other ranks serve this process alone, however many services its script makes
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
        """The crew at work (a new one where there is none) and a number for one more service."""
        with cls._lock:
            crew = cls._at_work
            if crew is None or not crew.thread.is_alive():
                crew = cls._at_work = cls(settings)
            number, crew.services = crew.services, crew.services + 1
            crew.open.add(number)
            return crew, number

    def leave(self, number: int, timeout: float) -> None:
        """One service less. One process alone has nobody to keep for another service: its thread
        ends with the last one.
        """
        done: Future = Future()
        with self._lock:
            self.open.discard(number)
            self.queue.put((number, LEAVE, (number,), (), done))
            last = not self.open and self._alone()
            if last:
                # who joins meanwhile, in another thread, waits, and begins a crew of its own
                self.end(timeout)
        if not last:
            wait([done], timeout)

    def end(self, timeout: float = 60.0) -> None:
        """Ends the thread and the other ranks; verbs already submitted run first. Ending twice does
        nothing.
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
        """The end of the script. A thread that is still at work must not see the interpreter end:
        it would be unwound on its way out of torch, which C++ answers with "terminate called
        without an active exception" and an abort.
        """
        self.end(self.patience)
        if self.thread.is_alive():
            print(
                f"the script has ended, and what it submitted was still under way {self.patience:g} s later: it is given up. Wait for the "
                "last result, or close the service, before the script ends",
                file=sys.stderr,
            )
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _alone(self) -> bool:
        return distributed.world() == 1

    def _desk(self, settings: WorkerSettings) -> Any:
        return Desk(settings)

    def _part(self) -> None:
        distributed.shutdown()

    def _loop(self, settings: WorkerSettings, started: Future) -> None:
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
                said = lost is None and not isinstance(_beat(desk, CLOSE), RankLost)
                desk.objects.close()
                del desk
                if said:
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
                    # the others are out of step: whatever is asked for from now on fails alike
                    lost = error
                future.set_exception(error)
            # nothing of a finished verb is kept alive while waiting for the next
            del verb, arguments, after, future


class Samplers(Crew):
    """The same of the ranks that sample."""

    name = "whetstone-samplers"
    _lock = threading.RLock()
    _at_work = None

    def _alone(self) -> bool:
        return False

    def _desk(self, settings: WorkerSettings) -> FarDesk:
        return FarDesk(settings)

    def _part(self) -> None:
        """The world of rank 0 is the learners', who go on."""


def _everywhere(desk: Any, number: int, verb: str, arguments: Sequence[Any]) -> Any:
    desk.objects.broadcast_verb((number, verb, arguments))
    return _execute(desk.worker(number, verb), verb, arguments)


def _refuse_after_failure(
    desk: Any, number: int, verb: str, arguments: Sequence[Any], after: Sequence[Future]
) -> None:
    """An update on half of what was meant would be worse than none: refuse it and drop the
    gradients.

    Likewise a sampling client of weights whose saving under a name failed: the error must not be
    lost.
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
