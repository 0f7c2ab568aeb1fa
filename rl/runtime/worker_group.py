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

from rl.distributed import (
    assign_role,
    check_same_launch,
    collectives,
    stop_signals,
    trace_region,
)
from rl.errors import OtherRankFailed, RankLost, UserError
from rl.runtime.rank_settings import WorkerSettings
from rl.runtime.sampling_worker import SamplingWorker
from rl.runtime.training_worker import TrainingWorker
from rl.runtime.weight_sync import SamplerWorker

CLOSE_RANKS, HEARTBEAT = "close", "alive"
OPEN_SERVICE, CLOSE_SERVICE = (
    "open_service",
    "close_service",
)  # verbs of the executor, not of a worker


class RankExecutor:
    """Execute verbs on a rank: hold its workers by service number."""

    def __init__(self, settings: WorkerSettings):
        role = assign_role(settings.sampler_ranks, settings.timeout_seconds)
        samples = role is not None and role.is_sampler
        self._worker_class: type[SamplingWorker] = SamplerWorker if samples else TrainingWorker
        bridge = (
            collectives.ObjectGroup(settings.timeout_seconds, role.bridge)
            if samples and role is not None
            else None
        )
        first = self._worker_class(settings, bridge)
        check_same_launch(first.objects, settings)
        self.objects = first.objects
        self.device = str(first.accelerator.device)
        self._workers: dict[int, SamplingWorker] = {0: first}

    def worker(self, service: int, verb: str) -> Any:
        """Return the object that executes `verb` of that service."""
        return (
            self
            if verb in (OPEN_SERVICE, CLOSE_SERVICE)
            else self._workers.get(service) or ClosedService(self.objects, service)
        )

    def open_service(self, service: int, settings: WorkerSettings) -> str:
        """Create the service's worker. Return the device that it computes on."""
        if service not in self._workers:  # worker 0 is made before any verb can be broadcast
            self._workers[service] = self._worker_class(settings, self.objects)
        return str(self._workers[service].accelerator.device)

    def close_service(self, service: int) -> None:
        """Free the memory of the service's models and samplers."""
        self._workers.pop(service).free_all()

    def merge(self, verb: str, parts: Sequence[Any]) -> Any:
        """Return rank 0's result."""
        return parts[0]


class ClosedService:
    """Stand in for the worker of a closed service: late verbs raise an error instead of killing the
    rank.
    """

    def __init__(self, objects: collectives.ObjectGroup, service: int):
        self.objects, self._service = objects, service

    def __getattr__(self, verb: str) -> Any:
        raise RuntimeError(f"{verb} was called after its service ({self._service}) was closed")


class RemoteExecutor:
    """Serve as rank 0's executor of the sampler ranks: execute nothing, and merge the results of
    the sampler ranks.
    """

    def __init__(self, settings: WorkerSettings):
        role = assign_role(settings.sampler_ranks, settings.timeout_seconds)
        assert role is not None and role.bridge is not None
        self.objects = collectives.ObjectGroup(settings.timeout_seconds, role.bridge)
        check_same_launch(self.objects, settings)

    def worker(self, service: int, verb: str) -> RemoteExecutor:
        """Return this object, for any service and verb."""
        return self

    def __getattr__(self, verb: str) -> Any:
        return _do_nothing

    def merge(self, verb: str, parts: Sequence[Any]) -> Any:
        """Return the merged results of the sampler ranks; rank 0's part (index 0) is empty."""
        return (
            parts[1]
            if verb in (OPEN_SERVICE, CLOSE_SERVICE)
            else SamplerWorker.merge_results(verb, parts[1:])
        )


def _do_nothing(*arguments: Any) -> None:
    """Do nothing: rank 0's part in a verb of the sampler ranks."""


def serve_verbs(settings: WorkerSettings) -> None:
    """Execute broadcast verbs on a rank other than 0 until the driver ends. Raises RankLost if the
    driver is lost.
    """
    stop_signals.end_with_launcher()
    desk = RankExecutor(settings)
    stop_signals.defer_signals_to_driver(settings.stop_grace_seconds)
    while True:
        service, verb, arguments = desk.objects.broadcast_verb(None)
        if verb == CLOSE_RANKS:
            break
        if verb != HEARTBEAT:
            _execute(desk.worker(service, verb), verb, arguments)
    desk.objects.close()
    del desk
    collectives.shutdown()


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
        with trace_region(verb):
            result = getattr(worker, verb)(*arguments)
    except RankLost:
        raise
    except OtherRankFailed:
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
            collectives.is_communication_error(error),
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
            f"{verb} failed on {worker.objects.rank_name(rank)}, the ranks are out of step:\n{text}"
        ) from error
    if error is not None:
        raise error
    for rank, (text, _, user_message) in failures.items():
        if user_message is not None:
            raise UserError(f"{user_message} (on {worker.objects.rank_name(rank)})")
        raise RuntimeError(f"{verb} failed on {worker.objects.rank_name(rank)}:\n{text}")
    return worker.merge(verb, [result for result, _ in reports])


def _send_heartbeat(
    executor: RankExecutor | RemoteExecutor, verb: str = HEARTBEAT
) -> RankLost | None:
    """Broadcast that the driver is alive (or closes). Return the error if another rank is lost."""
    try:
        executor.objects.broadcast_verb((0, verb, ()))
    except RankLost as lost:
        return lost
    return None


class WorkerGroup:
    """Queue verbs on rank 0, and run the thread that executes them on all ranks. A process has a
    single worker group.
    """

    name = "whetstone-worker"
    # seconds that the end of the script waits for submitted verbs
    exit_timeout: ClassVar[float] = 60.0
    _lock: ClassVar[Any] = threading.RLock()
    # the other ranks serve this process only, for any number of services
    _running: ClassVar[WorkerGroup | None] = None

    def __init__(self, settings: WorkerSettings):
        stop_signals.end_with_launcher()
        self.num_services = 0
        self.open_services: set[int] = set()
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        started: Future = Future()
        self.thread = threading.Thread(
            target=self._run_verbs, args=(settings, started), name=self.name, daemon=True
        )
        self.thread.start()
        started.result()
        atexit.register(self._at_exit)

    @classmethod
    def join(cls, settings: WorkerSettings) -> tuple[WorkerGroup, int]:
        """Return the running worker group (a new group if none is running) and a new service
        number.
        """
        with cls._lock:
            crew = cls._running
            if crew is None or not crew.thread.is_alive():
                crew = cls._running = cls(settings)
            service, crew.num_services = crew.num_services, crew.num_services + 1
            crew.open_services.add(service)
            return crew, service

    def close_service(self, service: int, timeout: float) -> None:
        """Close a service. In a single-process run the thread ends with the last service, since no
        other rank waits for another service.
        """
        done: Future = Future()
        with self._lock:
            self.open_services.discard(service)
            self.queue.put((service, CLOSE_SERVICE, (service,), (), done))
            is_last = not self.open_services and self._is_single_process()
            if is_last:
                # a thread that joins meanwhile waits for the lock and starts a new worker group
                self.shut_down(timeout)
        if not is_last:
            wait([done], timeout)

    def shut_down(self, timeout: float = 60.0) -> None:
        """End the thread and the other ranks; verbs already submitted run first. A second call is a
        no-op.
        """
        with self._lock:
            if type(self)._running is self:
                type(self)._running = None
            if self.thread.is_alive():
                self.queue.put((0, CLOSE_RANKS, (), (), Future()))
        self.thread.join(timeout)
        if not self.thread.is_alive():
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """End the worker group at the end of the script. A thread that still runs must not outlive
        the interpreter: the interpreter would unwind it inside torch, and C++ would abort with
        "terminate called without an active exception".
        """
        self.shut_down(self.exit_timeout)
        if self.thread.is_alive():
            print(
                "the script has ended, and submitted verbs were still running "
                f"{self.exit_timeout:g} "
                "s later: they are abandoned. Wait for the last result, or close the service, "
                "before the script ends",
                file=sys.stderr,
            )
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _is_single_process(self) -> bool:
        """Return whether this process is the only rank."""
        return collectives.world() == 1

    def _make_executor(self, settings: WorkerSettings) -> Any:
        """Return the executor of rank 0."""
        return RankExecutor(settings)

    def _shut_down_ranks(self) -> None:
        """Shut down the process group after all ranks have received CLOSE_RANKS."""
        collectives.shutdown()

    def _run_verbs(self, settings: WorkerSettings, started: Future) -> None:
        """Execute queued verbs until CLOSE_RANKS. Send heartbeats while the queue is empty."""
        try:
            desk = self._make_executor(settings)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        lost: RankLost | None = None
        while True:
            try:
                number, verb, arguments, after, future = self.queue.get(
                    timeout=desk.objects.heartbeat_seconds
                )
            except queue.Empty:
                lost = lost or _send_heartbeat(desk)
                continue
            if verb == CLOSE_RANKS:
                announced = lost is None and not isinstance(
                    _send_heartbeat(desk, CLOSE_RANKS), RankLost
                )
                desk.objects.close()
                del desk
                if announced:
                    self._shut_down_ranks()
                future.set_result(None)
                return
            try:
                if lost is not None:
                    raise lost
                _refuse_after_failure(desk, number, verb, arguments, after)
                future.set_result(_execute_everywhere(desk, number, verb, arguments))
            except BaseException as error:
                if isinstance(error, RankLost):
                    # the ranks are out of step: every later verb fails with the same error
                    lost = error
                future.set_exception(error)
            # release the arguments of a finished verb before waiting for the next verb
            del verb, arguments, after, future


class SamplerGroup(WorkerGroup):
    """Run the worker group of the ranks that only sample."""

    name = "whetstone-samplers"
    _lock = threading.RLock()
    _running = None

    def _is_single_process(self) -> bool:
        return False

    def _make_executor(self, settings: WorkerSettings) -> RemoteExecutor:
        return RemoteExecutor(settings)

    def _shut_down_ranks(self) -> None:
        """Do nothing: rank 0's process group belongs to the learner ranks, which continue."""


def _execute_everywhere(executor: Any, service: int, verb: str, arguments: Sequence[Any]) -> Any:
    """Run a verb on all ranks and return the merged result."""
    executor.objects.broadcast_verb((service, verb, arguments))
    return _execute(executor.worker(service, verb), verb, arguments)


def _refuse_after_failure(
    executor: Any, service: int, verb: str, arguments: Sequence[Any], dependencies: Sequence[Future]
) -> None:
    """Raise the error of an earlier verb that this verb depends on. For `optim_step`, drop the
    gradients first: an update on part of the intended batch would be worse than no update.

    A sampling client of weights raises likewise if saving them under a name failed, so that the
    error is not lost.
    """
    errors = [
        error for error in (earlier.exception() for earlier in dependencies) if error is not None
    ]
    if not errors:
        return
    if verb != "optim_step":
        raise errors[0]
    _execute_everywhere(executor, service, "drop_gradients", arguments[:1])
    raise RuntimeError(
        f"{verb} was not run, because a forward_backward before it failed: {errors[0]}"
    ) from errors[0]
