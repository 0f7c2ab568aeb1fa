"""Run a reward on many responses concurrently, with a time limit for each, and recover from
failures.
"""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

from rl.errors import UserError, install_command
from rl.processes import InvalidReply, WorkerDiedError, WorkerProcess
from rl.rewards.captured_output import RewardOutput
from rl.rewards.reward_calls import Episode, Meta, RewardItem, Score, make_failed_score
from rl.rewards.reward_machines import ConnectionLostError, RewardMachine, RewardMachines
from rl.rewards.reward_registry import Reward, RewardFunction, resolve_reward
from rl.rewards.reward_workers import (
    MAX_REPLY_BYTES,
    RUN_WORKER,
    ProcessRewardWorker,
    RewardWorker,
    ThreadRewardWorker,
    WorkerStartError,
    build_worker_environment,
    iter_scores,
    select_variables,
)
from rl.sanitize import describe_error, sanitize_text

logger = logging.getLogger(__name__)

WorkerPlace = Literal["inline", "process", "thread"]

# extras that install the module of a built-in reward
_EXTRAS = {"py3langid": "language"}
_FAILURE_COUNTS = {"error": "errors", "timeout": "timeouts", "nan": "nan", "death": "deaths"}
# interval at which a wait for a reply checks whether the scorer was closed
_CLOSE_POLL_SECONDS = 0.2
# Grace after the time limit, in which a cancelled coroutine reports the timeout itself
_CANCEL_GRACE_SECONDS = 2.0
# Pauses between attempts to restart a lost worker: a missing resource may become available.
_RESTART_SECONDS = (0.2, 1.0, 3.0)
# A message to a worker holds as many answers of a long queue as it scores in that time, because
# rank 0 needs about as long for a message as for an answer.
_MESSAGE_SECONDS = 0.05
_MAX_MESSAGE_ITEMS = 32


class RewardsLost(UserError):
    """Raised when no worker of a scorer can be restarted: no further response can be scored."""


class PendingScore(Future[Score]):
    """Represent a score that is being computed.

    `on_request`: called when the score is first requested; responses that are scored in a batch are
    queued until then. `immediate`: whether the score was available at once, which is constant for a
    scorer.
    """

    deadline = None  # each item before this one has its time limit

    def __init__(
        self,
        prompt: str,
        item: Any,
        on_request: Callable[[], None] | None = None,
        response: str = "",
    ):
        super().__init__()
        self.prompt, self.item, self.immediate = prompt, item, False
        self.response = response
        self.has_lost_connection = False  # to the machine that scored it, once
        self._on_request = on_request

    def cancel(self) -> bool:
        """Return False: a worker may be computing the score already."""
        return False

    def done(self) -> bool:
        self._request()
        return super().done()

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call `callback` when the score has been computed."""
        self._request()
        super().add_done_callback(callback)

    def result(self, timeout: float | None = None) -> Score:
        """Wait at most `timeout` seconds for the score.

        None also ends: each item before this one has its time limit. Raises TimeoutError at the
        timeout, RewardsLost if no worker remains.
        """
        self._request()
        try:
            return super().result(timeout)
        except TimeoutError as error:
            raise TimeoutError(
                f"no score within {timeout} s for the response to {_shorten(self.prompt)}"
            ) from error

    def _request(self) -> None:
        on_request, self._on_request = self._on_request, None
        if on_request is not None and not super().done():
            on_request()


def _shorten(prompt: str) -> str:
    """Return the beginning of a prompt, for an error message."""
    return sanitize_text(repr(prompt if len(prompt) <= 60 else prompt[:57] + "..."), 400)


def _check_packages(reward: Reward) -> None:
    """Raise UserError, with the command, if a package that the reward needs is missing."""
    for module in reward.needs:
        if importlib.util.find_spec(module) is None:
            package, extra = module.replace("_", "-"), _EXTRAS.get(module)
            command = install_command(extra) if extra else f"pip install {package}"
            raise UserError(f"reward {reward.name!r} needs the package {package}: {command}")


class Scorer:
    """Score responses with a single reward. Thread-safe.

    `timeout`: time limit of each response in seconds, measured from the start of its evaluation.
    `workers`: number of concurrent workers on a machine. Default for processes: half the
    cores, from 2 to 16 (each core, up to 64, if answers are run as programs); for threads: 1, so
    that a closure need not be thread-safe.

    The reward's type determines where it runs (`place`):
    - "inline": built-in rewards that cannot hang run immediately in the calling thread.
    - "process": every reward that another process can import: other built-ins, registered functions
      of a module, "module:object", "file.py:object". A reward that hangs is killed with all
      processes that it started; a worker that crashes is replaced; no other scores are lost.
    - "thread": closures, lambdas and functions of the script itself (`__main__`, which a worker
      must not run again). A reward that hangs is abandoned: its sample is given up, but its thread
      continues. Move the function into a module to have it killed.

    A reward that cannot be loaded raises UserError here. If workers are lost and none can be
    restarted, waiting for a score raises RewardsLost. A reward that takes many items at once
    (batched, or a coroutine) receives all submitted items when the first score is waited for, in a
    single call within the time limit (coroutines: each within it). A call that hangs, dies or
    raises is repeated on each half of its items, so an answer that breaks it affects only its own
    score. `seconds`: run time of each reward, summed over answers, until `take_seconds`. An answer
    for which a built-in reward exceeds the time limit, or ends its worker, scores 0 with the metric
    `gave_up`. A worker process receives the environment variables in reward_workers.ENVIRONMENT
    and those in `environment` (names, or patterns such as PREFIX*; or a table of their values).
    `machines`: other machines, on each of which as many workers score, if the place is "process"
    and the reward takes one item at a time. `num_processes`: processes of this machine that divide
    its workers; each has at least one. While many answers wait, a worker process receives several
    quick ones in a message, and scores them in turn, each within the time limit.
    """

    def __init__(
        self,
        reward: str | RewardFunction | Reward,
        *,
        timeout: float = 10.0,
        workers: int | None = None,
        environment: Sequence[str] | Mapping[str, str] = (),
        machines: RewardMachines | None = None,
        num_processes: int = 1,
    ):
        if not timeout > 0:
            raise UserError(f"a reward's timeout is a positive number of seconds, got {timeout}")
        if workers is not None and workers < 1:
            raise UserError(f"a scorer has at least 1 worker, got {workers}")
        self.reward = resolve_reward(reward)
        self.timeout, self.workers = timeout, workers
        self.seconds: dict[str, float] = {}
        self.counts = {"calls": 0, "errors": 0, "timeouts": 0, "nan": 0, "deaths": 0}
        _check_packages(self.reward)
        self.place: WorkerPlace = _select_place(self.reward)
        # the variables of this machine, and those that workers of other machines receive as well
        self.variables: Mapping[str, str] = (
            environment if isinstance(environment, Mapping) else select_variables(environment)
        )
        self._environment = {**build_worker_environment(), **self.variables}
        self._output = RewardOutput(self.reward.name)
        self._lost_workers: dict[str | None, int] = {}  # number by kind of failure
        self._lock = threading.Condition()
        # A call is scored by a single message to a worker: an item or several (`_take_call`), or
        # many of a batched reward, whose items are held until the first score is requested.
        self._calls: deque[deque[PendingScore]] = deque()
        self._held_items: list[PendingScore] = []
        self._closed = False
        self._mean_seconds = timeout  # recent run time of the reward for an answer
        self._threads: list[threading.Thread] = []
        self._machines: RewardMachines | None = None
        self._active_workers = 0  # number of worker threads that have not given up
        self._failure: RewardsLost | None = None
        if self.place == "inline":
            return
        # A worker waits while a program runs: a worker for each core keeps all cores busy.
        single_worker = 1 if self.place == "thread" or self.reward.batched else 0
        default = single_worker or max(
            2,
            min(64, _count_cores()) if self.reward.runs_programs else min(16, _count_cores() // 2),
        )
        try:
            worker = self._make_worker()  # checks that the reward can be loaded
        except Exception as error:
            reason = str(error) if isinstance(error, WorkerStartError) else describe_error(error)
            raise UserError(f"reward {self.reward.name!r} cannot be used: {reason}") from error
        self._workers_per_machine = -(-(workers or default) // num_processes)
        self._start_workers(None, worker)
        # A batched reward may compare the answers of a call, which more workers would divide.
        self._machines = None if self.reward.batched or self.place != "process" else machines
        if self._machines is not None:
            self._machines.subscribe(self._start_workers)
        atexit.register(self.close)

    def _start_workers(
        self, machine: RewardMachine | None, worker: RewardWorker | None = None
    ) -> None:
        """Start the threads of a machine's workers (None: this machine). `worker`: the first, if it
        was started already.

        Raises UserError if that worker has no thread.
        """
        for first in (worker, *[None] * (self._workers_per_machine - 1)):
            name = f"scorer {len(self._threads)}"
            thread = threading.Thread(
                target=self._manage_worker, args=(first, machine), name=name, daemon=True
            )
            with self._lock:
                self._active_workers += 1
            try:
                thread.start()
            except RuntimeError as error:  # no process or memory is available for it
                with self._lock:
                    self._active_workers -= 1
                if first is not None:
                    first.stop()
                    raise UserError(
                        f"reward {self.reward.name!r} cannot be used: {error}"
                    ) from error
                logger.warning(
                    "reward %r runs on %d workers: a thread for another worker cannot be "
                    "started (%s)",
                    self.reward.name,
                    len(self._threads),
                    error,
                )
                break
            self._threads.append(thread)

    def submit(
        self,
        prompt: str,
        response: str,
        meta: Meta = None,
        episode: Episode | None = None,
    ) -> PendingScore:
        """Submit a response for scoring, and its episode if the reward takes episodes
        (`reward.episode`).

        The score is computed in the background; a reward that scores many at once starts when the
        first score is waited for.
        """
        item: RewardItem = (prompt, response, dict(meta) if meta is not None else None, episode)
        on_request = self._flush if self.reward.batched else None
        pending = PendingScore(prompt, item, on_request, response)
        if self.place == "inline":
            self._finish(pending, *iter_scores(self.reward, [item]))
            pending.immediate = True
            return pending
        if self.place == "process":
            try:
                pending.item = pickle.dumps(item)
            except Exception as error:  # boundary: pickling runs code of user objects
                reason = (
                    "runs in another process, and this meta cannot be pickled "
                    f"({describe_error(error)})"
                )
                self._finish(pending, make_failed_score("error", reason))
                return pending
        with self._lock:
            if self._closed:
                raise RuntimeError(
                    f"the scorer of reward {self.reward.name!r} is closed: create a new scorer"
                )
            if self._failure is not None:
                raise self._failure
            if self.reward.batched:
                self._held_items.append(pending)
            else:
                self._calls.append(deque([pending]))
                self._lock.notify()
        return pending

    def _flush(self) -> None:
        """Start scoring the held responses, a call for each worker."""
        with self._lock:
            self._queue_calls(self._held_items, len(self._threads))
            self._held_items = []

    def _queue_calls(self, items: Sequence[PendingScore], number: int) -> None:
        """Queue items as calls of equal size. The caller holds the lock."""
        size = -(-len(items) // number) or 1
        self._calls.extend(deque(items[i : i + size]) for i in range(0, len(items), size))
        self._lock.notify_all()

    def _drain(self) -> list[PendingScore]:
        """Remove and return all items that no worker has taken. The caller holds the lock."""
        items = [*(item for call in self._calls for item in call), *self._held_items]
        self._calls.clear()
        self._held_items = []
        return items

    def take_seconds(self) -> dict[str, float]:
        """Return seconds per reward name since the last call, summed over all workers, and reset
        them.
        """
        with self._lock:
            seconds, self.seconds = self.seconds, {}
        return seconds

    def record_score(self, score: Score) -> None:
        """Count a score that another scorer computed."""
        with self._lock:
            self._count(score)

    def _count(self, reply: Score) -> None:
        """Count a reply and its seconds. The caller holds the lock."""
        for name, seconds in reply.seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.counts["calls"] += 1
        failure = reply.failure or reply.gave_up
        if failure is not None:
            self.counts[_FAILURE_COUNTS[failure]] += 1

    def score_many(self, items: Iterable[tuple[Any, ...]]) -> list[Score]:
        """Return the scores of (prompt, response, meta) items, in order.

        For an episode reward the items are (prompt, response, meta, episode).
        """
        return [pending.result() for pending in [self.submit(*item) for item in items]]

    def close(self) -> None:
        """Stop the workers. Responses that were not scored yet get a score without reward."""
        if self._machines is not None:
            self._machines.unsubscribe(self._start_workers)
        with self._lock:
            self._closed = True
            remaining = self._drain()
            self._lock.notify_all()
        for pending in remaining:
            self._finish(pending, make_failed_score("error", "was not run: the scorer was closed"))
        deadline = time.monotonic() + 5.0
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        atexit.unregister(self.close)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _finish(self, pending: PendingScore, reply: Score, *, give_up: bool = False) -> None:
        """Count a worker's reply and set the score, whose error names the reward and the prompt.

        `give_up`: a failure scores 0, as for an answer on which a built-in reward gives up.
        """
        with self._lock:
            self._count(reply)
            is_lost = reply.failure in ("timeout", "death")
            # the reward's code can set its seconds to any number; max(0.0, nan) is 0.0
            run_time = self.timeout if is_lost else max(0.0, sum(reply.seconds.values()))
            self._mean_seconds += 0.1 * (min(run_time, self.timeout) - self._mean_seconds)
        score = reply
        if give_up:
            result = self.reward.give_up_result((pending.prompt, pending.response, None))
            score = Score(result.reward, result.metrics, gave_up=reply.failure)
        elif reply.failure is not None:
            error = f"reward {self.reward.name!r} {reply.error} (prompt {_shorten(pending.prompt)})"
            score = make_failed_score(reply.failure, error)
        pending.item = None
        pending.set_result(score)

    def _manage_worker(self, worker: RewardWorker | None, machine: RewardMachine | None) -> None:
        """Run the thread that manages a worker: start it when work arrives, and restart it if it is
        lost.

        `worker`: the worker, if it was started already. `machine`: on which it runs, None: this.
        """
        call: deque[PendingScore] = deque()
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._calls or self._closed)
                    if not self._calls:  # the scorer was closed
                        return
                    call = self._take_call()
                worker = worker or self._restart(machine)
                worker = self._run_call(worker, call, machine)
        except _ScorerClosed:
            reply = make_failed_score("error", "was not run: the scorer was closed")
            with self._lock:  # `_run_call` may have queued items again
                call.extend(self._drain())
            for pending in call:
                self._finish(pending, reply)
        except Exception as error:  # no caller may wait forever for the items of this thread
            logger.warning(
                "reward %r lost a worker permanently: %s", self.reward.name, describe_error(error)
            )
            self._end_manager(call, error)
        finally:
            if worker is not None:
                worker.stop()

    def _take_call(self) -> deque[PendingScore]:
        """Remove and return the next call, with further items of a long queue: at most half of a
        worker's part, so that no worker waits for another at the end. The caller holds the lock.
        """
        call = self._calls.popleft()
        if self.place == "process" and not self.reward.batched:
            waiting = len(self._calls) // (2 * self._active_workers)
            quick = int(_MESSAGE_SECONDS / max(self._mean_seconds, 1e-6))
            for _ in range(min(waiting, quick, _MAX_MESSAGE_ITEMS) - len(call)):
                call += self._calls.popleft()
        return call

    def _restart(self, machine: RewardMachine | None) -> RewardWorker:
        """Start a replacement for a lost worker.

        Raises WorkerStartError after the last attempt, _ScorerClosed if the scorer was closed.
        """
        for pause in (*_RESTART_SECONDS, None):
            if self._closed:
                raise _ScorerClosed
            try:
                return self._make_worker(machine)
            except WorkerStartError as error:
                if pause is None:
                    raise
                logger.warning(
                    "reward %r: %s; next attempt in %g s", self.reward.name, error, pause
                )
            with self._lock:
                self._lock.wait_for(lambda: self._closed, timeout=pause)
        raise AssertionError("the last attempt returns or raises")

    def _end_manager(self, call: deque[PendingScore], cause: Exception) -> None:
        """End this worker's thread: return its call to the queue; after the last worker, fail all
        items.
        """
        with self._lock:
            if call:
                self._calls.appendleft(call)
            self._active_workers -= 1
            self._lock.notify_all()
            if self._active_workers:
                return
            self._failure = RewardsLost(
                f"reward {self.reward.name!r} cannot score any more: none of its workers could be "
                f"restarted: {cause}. If a resource is exhausted, free some: processes "
                "(ulimit -u), descriptors (ulimit -n), memory"
            )
            remaining = self._drain()
        for pending in remaining:
            pending.item = None
            pending.set_exception(self._failure)

    def _run_call(
        self, worker: RewardWorker, call: deque[PendingScore], machine: RewardMachine | None
    ) -> RewardWorker | None:
        """Score the items of a call until one loses the worker. Returns the worker, or None if it
        was lost.

        A worker that ended while it was idle is replaced: no item is to blame. A worker scores the
        items in turn, so the first without a reply is to blame, and the others are queued again. Of
        a batched reward, each half of them is queued as a call of its own, which shows the item to
        blame.
        """
        try:
            items = [pending.item for pending in call]
            try:
                worker.send(items)
            except WorkerDiedError:
                worker.stop()
                worker = self._restart(machine)
                worker.send(items)
            while call:
                reply = self._receive(worker)
                self._finish(call.popleft(), reply)
            return worker
        except TimeoutError:
            reply = make_failed_score("timeout", f"did not end within {self.timeout:g} s")
        except ConnectionLostError as error:
            if not call[0].has_lost_connection:
                call[0].has_lost_connection = True
                worker.stop()
                with self._lock:
                    self._queue_calls(list(call), 1 if self.reward.batched else len(call))
                call.clear()
                return None
            reply = make_failed_score("death", f"lost its machine twice: {error}")
        except WorkerDiedError as error:
            reply = make_failed_score("death", f"ended its worker process: {error}")
        except InvalidReply as error:
            reply = make_failed_score("error", f"sent an invalid reply: {error}")
        worker.stop()
        number = 2
        if len(call) == 1 or not self.reward.batched:
            culprit, number = call.popleft(), len(call) + 1
            self._log_lost_worker(reply, culprit)
            self._finish(culprit, reply, give_up=self.reward.builtin)
        with self._lock:
            self._queue_calls(list(call), number)
        call.clear()
        return None

    def _log_lost_worker(self, reply: Score, culprit: PendingScore) -> None:
        """Log the 1st, 10th, 100th, ... worker lost to each kind of failure.

        `reply`: the failure. `culprit`: the answer that the worker was scoring. A reward may lose
        its worker at every answer.
        """
        with self._lock:
            count = self._lost_workers.get(reply.failure, 0) + 1
            self._lost_workers[reply.failure] = count
        if str(count).rstrip("0") == "1":
            total = f" ({count} answers so far)" if count > 1 else ""
            logger.warning(
                "reward %r %s%s (prompt %s)",
                self.reward.name,
                reply.error,
                total,
                _shorten(culprit.prompt),
            )

    def _receive(self, worker: RewardWorker) -> Score:
        """Return the reply to the item that just started. Raises TimeoutError, WorkerDiedError,
        InvalidReply or _ScorerClosed.
        """
        grace = _CANCEL_GRACE_SECONDS if self.reward.batched else 0.0
        deadline = time.monotonic() + self.timeout + grace
        while True:
            remaining = deadline - time.monotonic()
            try:
                return worker.receive(min(_CLOSE_POLL_SECONDS, max(0.0, remaining)))
            except TimeoutError:
                if self._closed:
                    raise _ScorerClosed from None
                if remaining <= 0:
                    raise

    def _make_worker(self, machine: RewardMachine | None = None) -> RewardWorker:
        if self.place == "thread":
            return ThreadRewardWorker(self.reward, self.timeout, self._output)
        start = (
            partial(WorkerProcess, RUN_WORKER, self._environment, MAX_REPLY_BYTES, self._output)
            if machine is None
            else partial(machine.start_process, self.reward.name, self.variables)
        )
        return ProcessRewardWorker(self.reward, self.timeout, start)


class _ScorerClosed(Exception):
    """Raised when the scorer was closed while an item ran."""


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _select_place(reward: Reward) -> WorkerPlace:
    if reward.bounded:
        return "inline"
    try:
        payload = pickle.dumps(reward)
    except Exception:
        # boundary: pickling runs code of user objects; an object that cannot be pickled stays here
        return "thread"
    # Functions of the script itself are pickled by name, but in the worker the name means another
    # module.
    return "thread" if b"__main__" in payload else "process"
