"""Run all ranks: rank 0 sends verbs, and the other ranks execute them until rank 0 ends.

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

import torch
from torch.profiler import record_function

from rl.distributed import (
    assign_role,
    check_same_launch,
    collectives,
    spans_machines,
    stop_signals,
)
from rl.errors import OtherRankFailed, RankLost, UserError
from rl.rewards import get_reward_machines, serve_reward_workers
from rl.runtime.rank_settings import WorkerSettings
from rl.runtime.sampling_worker import SamplingWorker
from rl.runtime.training_worker import TrainingWorker
from rl.runtime.verb_table import LEARNER, SAMPLER, SERVICE, VERBS, VerbCall, VerbFuture, verb
from rl.runtime.weight_sync import SamplerWorker, WeightChunk
from rl.sampler import free_tp_graphs

CLOSE_RANKS, HEARTBEAT = "close", "alive"  # messages to the ranks' loops, not verbs
FAILURE_SECONDS = 60.0  # how long a failed rank waits for ranks that may be stuck in a collective


class RankExecutor:
    """Execute verbs on a rank: hold its workers by service number."""

    def __init__(self, settings: WorkerSettings):
        # A role may change the environment.
        self._is_first_of_machine = int(os.environ.get("LOCAL_RANK", "0")) == 0
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

    def worker(self, service: int, name: str) -> Any:
        """Return the object that executes the verb `name` of that service."""
        return (
            self
            if VERBS[name].group == SERVICE
            else self._workers.get(service) or ClosedService(self.objects, service)
        )

    @verb(SERVICE)
    def open_service(
        self, service: int, settings: WorkerSettings, reward_address: tuple[int, str] | None
    ) -> str:
        """Create the service's worker. Return the device that it computes on.

        `reward_address`: of rank 0, for which the first rank of each other machine runs reward
        workers from the first service on; None if all ranks are on one machine.
        """
        if reward_address is not None and self._is_first_of_machine and self.objects.rank > 0:
            serve_reward_workers(os.environ.get("MASTER_ADDR", "localhost"), *reward_address)
            self._is_first_of_machine = False  # once
        if service not in self._workers:  # worker 0 is made before any verb can be broadcast
            self._workers[service] = self._worker_class(settings, self.objects)
        return str(self._workers[service].accelerator.device)

    @verb(SERVICE, is_cleanup=True)
    def close_service(self, service: int) -> None:
        """Free the memory of the service's models and samplers."""
        worker = self._workers.pop(service, None)
        if worker is not None:  # None if its creation failed
            worker.free_all()


class ClosedService:
    """Stand in for the worker of a closed service: late verbs raise an error instead of killing the
    rank.
    """

    def __init__(self, objects: collectives.ObjectGroup, service: int):
        self.objects, self._service = objects, service

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} was called after its service ({self._service}) was closed")


class RemoteExecutor:
    """Serve as rank 0's executor of the sampler ranks: execute nothing, and send the weights."""

    def __init__(self, settings: WorkerSettings):
        role = assign_role(settings.sampler_ranks, settings.timeout_seconds)
        assert role is not None and role.bridge is not None
        self.objects = collectives.ObjectGroup(settings.timeout_seconds, role.bridge)
        check_same_launch(self.objects, settings)

    def worker(self, service: int, name: str) -> RemoteExecutor:
        """Return this object, for any service and verb."""
        return self

    def receive_chunk(self, version_id: int, chunk: WeightChunk) -> None:
        """Send the payload of a chunk after its verb."""
        assert chunk.payload is not None
        self.objects.broadcast_buffer(chunk.payload, chunk.following)

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None


def serve_verbs(settings: WorkerSettings) -> None:
    """Execute broadcast verbs on a rank other than 0 until the driver ends. Raises RankLost if the
    driver is lost.
    """
    stop_signals.end_with_launcher()
    executor = RankExecutor(settings)
    stop_signals.defer_signals_to_driver(settings.stop_grace_seconds)
    while True:
        service, verb, arguments = executor.objects.broadcast_verb(None)
        if verb == CLOSE_RANKS:
            break
        if verb != HEARTBEAT:
            _execute(executor.worker(service, verb), verb, arguments)
    executor.objects.close()
    del executor
    free_tp_graphs()
    collectives.shutdown()


def _execute(worker: Any, verb: str, arguments: Sequence[Any]) -> Any:
    """Run a verb on this rank and gather the results of all ranks on rank 0. Rank 0 raises if any
    rank failed.

    A single gather carries result and error of every rank, so a rank that fails blocks no other
    rank. In a verb whose ranks run in step the others may wait for it in a collective: it ends
    after FAILURE_SECONDS, which ends their wait. After a failed collective the ranks are out of
    step: RankLost is raised, which names the rank that failed for another reason, if any.
    """
    error: BaseException | None = None
    result = None
    try:
        with record_function(f"whetstone/{verb}"):  # a profile shows the parts of a step
            result = getattr(worker, verb)(*arguments)
    except RankLost:
        raise
    except OtherRankFailed:
        pass  # the rank that failed reports the reason
    except (
        Exception
    ) as caught:  # reported to the driver, which raises it from the future's result()
        error = caught
        if isinstance(caught, torch.OutOfMemoryError):
            error = _explain_out_of_memory(caught, verb, worker)
    report = None
    if error is not None:
        out_of_step = collectives.is_communication_error(error)
        report = ("".join(traceback.format_exception(error)), out_of_step, _make_user_error(error))
    seconds = FAILURE_SECONDS if report is not None and VERBS[verb].in_step else None
    try:
        reports = worker.objects.gather((result, report), seconds)
    except RankLost as lost:
        prefix = "" if report is None or report[1] else f"{error}. After that, "
        raise RankLost(f"{verb}: {prefix}{lost}") from error
    if reports is None:
        return None
    failures = {rank: report for rank, (_, report) in enumerate(reports) if report is not None}
    if any(out_of_step for _, out_of_step, _ in failures.values()):
        cause = min(failures, key=lambda rank: (failures[rank][1], rank))
        raise RankLost(
            f"{verb} failed on {worker.objects.rank_name(cause)}, the ranks are out of step:\n"
            f"{failures[cause][0]}"
        ) from error
    if error is not None:
        try:
            raise error
        finally:
            error = None  # its traceback has this frame: a cycle would keep the verb's tensors
    for rank, (text, _, user_error) in failures.items():
        if user_error is not None:
            raise type(user_error)(f"{user_error} (on {worker.objects.rank_name(rank)})")
        raise RuntimeError(f"{verb} failed on {worker.objects.rank_name(rank)}:\n{text}")
    # rank 0 has no part in the verbs of the sampler ranks
    first = 1 if isinstance(worker, RemoteExecutor) else 0
    results, reduce = [result for result, _ in reports[first:]], VERBS[verb].reduce
    return results[0] if reduce is None else reduce(results)


def _make_user_error(error: BaseException) -> Exception | None:
    """Return the error that rank 0 raises for an error of another rank that its user can fix, None
    for other errors.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return torch.OutOfMemoryError(str(error))
    return UserError(str(error)) if isinstance(error, (UserError, FloatingPointError)) else None


def _explain_out_of_memory(
    error: torch.OutOfMemoryError, verb: str, worker: Any
) -> torch.OutOfMemoryError:
    """Return the error of a full GPU, with the settings to lower. Free what the verb's calls held,
    which a caller that keeps the error would keep with it.
    """
    traceback.clear_frames(error.__traceback__)
    if not isinstance(worker, SamplingWorker):
        return error
    learner, sampler = worker.settings.learner, worker.settings.sampler
    remedy = (
        f"lower kv_cache_tokens ({sampler.kv_cache_tokens}) or max_rows ({sampler.max_rows})"
        if VERBS[verb].group == SAMPLER
        else f"lower token_budget ({learner.token_budget} positions of a micro-batch), set "
        "gradient_checkpointing, or shard over more processes (accelerate_configs/zero3.yaml)"
    )
    text = str(error).partition(" If reserved but unallocated")[0].rstrip(". ")
    explained = torch.OutOfMemoryError(
        f"out of memory in {verb}: {text}. To use less, {remedy}; train.py --plan lists what each "
        "part of a run takes"
    )
    return explained.with_traceback(error.__traceback__)


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
    """Queue verbs on rank 0, and run the thread that executes them on the ranks of a group: the
    learners, or the ranks that only sample. A process has a single worker group of each.
    """

    # seconds that the end of the script waits for submitted verbs
    exit_timeout: ClassVar[float] = 60.0
    _lock: ClassVar[Any] = threading.RLock()
    # by group; the other ranks serve this process only, for any number of services
    _running: ClassVar[dict[str, WorkerGroup]] = {}

    def __init__(self, settings: WorkerSettings, group: str):
        stop_signals.end_with_launcher()
        self.group = group
        self.num_services = 0
        self.open_services: set[int] = set()
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        started: Future = Future()
        self.thread = threading.Thread(
            target=self._run_verbs, args=(settings, started), name=f"whetstone-{group}", daemon=True
        )
        self.thread.start()
        started.result()
        atexit.register(self._at_exit)

    @classmethod
    def join(cls, settings: WorkerSettings, group: str) -> tuple[WorkerGroup, int]:
        """Return the running worker group (a new one if none is running) and a new service
        number.
        """
        with cls._lock:
            worker_group = cls._running.get(group)
            if worker_group is None or not worker_group.thread.is_alive():
                worker_group = cls._running[group] = cls(settings, group)
            service = worker_group.num_services
            worker_group.num_services += 1
            worker_group.open_services.add(service)
            return worker_group, service

    def close_service(self, service: int) -> None:
        """Close a service after its verbs. In a single-process run the thread ends with the last
        service, since no other rank waits for another service.
        """
        call = VerbCall("close_service", (service,))
        with self._lock:
            self.open_services.discard(service)
            self.queue.put((service, call))
            is_last = not self.open_services and self.group == LEARNER and collectives.world() == 1
            if is_last:
                # a thread that joins meanwhile waits for the lock and starts a new worker group
                self.shut_down()
        if not is_last:
            wait([call.future])

    def shut_down(self, timeout: float | None = None) -> None:
        """End the thread and the other ranks; verbs already submitted run first, for `timeout`
        seconds if it is set. A second call is a no-op.
        """
        with self._lock:
            if self._running.get(self.group) is self:
                del self._running[self.group]
            if self.thread.is_alive():
                self.queue.put((0, VerbCall(CLOSE_RANKS)))
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
                f"{self.exit_timeout:g} s later: they are abandoned. Wait for the last result, or "
                "close the service, before the script ends",
                file=sys.stderr,
            )
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _run_verbs(self, settings: WorkerSettings, started: Future) -> None:
        """Execute queued verbs until CLOSE_RANKS. Send heartbeats while the queue is empty."""
        try:
            executor = (RankExecutor if self.group == LEARNER else RemoteExecutor)(settings)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        lost: RankLost | None = None
        while True:
            try:
                service, call = self.queue.get(timeout=executor.objects.heartbeat_seconds)
            except queue.Empty:
                lost = lost or _send_heartbeat(executor)
                continue
            if call.verb == CLOSE_RANKS:
                announced = lost is None and not isinstance(
                    _send_heartbeat(executor, CLOSE_RANKS), RankLost
                )
                executor.objects.close()
                del executor
                # the process group belongs to the learners, which continue without samplers
                if announced and self.group == LEARNER:
                    free_tp_graphs()
                    collectives.shutdown()
                call.future.set_result(None)
                return
            try:
                if lost is not None:
                    raise lost
                # without `call`: the frames of an error would keep it, and its future the error
                _refuse_after_failure(
                    executor, service, call.verb, call.arguments, call.dependencies
                )
                result = _execute_everywhere(executor, service, call.verb, call.arguments)
                call.future.set_result(result)
            except BaseException as error:
                if isinstance(error, RankLost):
                    # the ranks are out of step: every later verb fails with the same error
                    lost = error
                call.future.set_exception(error)
            # release the arguments and result of a finished verb before waiting for the next verb
            call = result = None


class GroupService:
    """Submit the verbs of a service to a group of ranks. `device`: that its workers compute on."""

    def __init__(self, settings: WorkerSettings, group: str):
        machines = get_reward_machines()
        if spans_machines():  # before a role changes the environment
            machines.listen()
        self._group, self._service_id = WorkerGroup.join(settings, group)
        opened = VerbCall("open_service", (self._service_id, settings, machines.address))
        self.submit(opened)
        try:
            self.device: str = opened.future.result()
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        """Return whether the thread that executes the verbs is running."""
        return self._group.thread.is_alive()

    def submit(self, call: VerbCall) -> None:
        """Queue a verb."""
        self._group.queue.put((self._service_id, call))

    def close(self) -> None:
        """Run the queued verbs, then free the memory of the service's workers."""
        self._group.close_service(self._service_id)


def _execute_everywhere(executor: Any, service: int, verb: str, arguments: Sequence[Any]) -> Any:
    """Run a verb on all ranks, each with its arguments, and return the merged result."""
    worker, split = executor.worker(service, verb), VERBS[verb].split
    if split is None:
        executor.objects.broadcast_verb((service, verb, arguments))
    else:
        try:
            shares = getattr(worker, split)(*arguments)
        except Exception:
            if (on_refusal := VERBS[verb].on_refusal) is not None:
                _execute_everywhere(executor, service, on_refusal, arguments[:1])
            raise
        *_, arguments = executor.objects.broadcast_verb((service, verb), shares)
    return _execute(worker, verb, arguments)


def _refuse_after_failure(
    executor: Any, service: int, verb: str, arguments: Sequence[Any], dependencies: Sequence[Future]
) -> None:
    """Raise the error of an earlier verb that this verb depends on, after the verb's `on_refusal`:
    `optim_step` drops the gradients, since an update on part of the batch is worse than none.

    A sampling client of weights raises likewise if saving them under a name failed, so that the
    error is not lost.
    """
    # all are read: one that fails for the same reason is no failure that nothing reads
    errors = [(earlier, earlier.exception()) for earlier in dependencies]
    failed, error = next((pair for pair in errors if pair[1] is not None), (None, None))
    del errors  # of other verbs, which the frame of this error would keep
    if error is None:
        return
    if (on_refusal := VERBS[verb].on_refusal) is None:
        raise error
    _execute_everywhere(executor, service, on_refusal, arguments[:1])
    failed_verb = failed.verb if isinstance(failed, VerbFuture) else "call"
    raise RuntimeError(
        f"{verb} was not run, because an earlier {failed_verb} failed: {error}"
    ) from error
