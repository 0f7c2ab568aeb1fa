"""Run a reward on many responses concurrently, with a time limit for each, and recover from
failures.
"""

from __future__ import annotations

import atexit
import copy
import importlib.util
import logging
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from rl.errors import UserError, install_command
from rl.processes import InvalidReply, WorkerDiedError
from rl.rewards.captured_output import RewardOutput
from rl.rewards.reward_calls import Episode, RewardItem, RewardResult
from rl.rewards.reward_futures import Failure, PendingScore, RewardsLost, Score, shorten_prompt
from rl.rewards.reward_queue import RewardQueue
from rl.rewards.reward_registry import Reward, RewardFunction, resolve_reward
from rl.rewards.reward_workers import (
    ProcessRewardWorker,
    RewardWorker,
    ThreadRewardWorker,
    WorkerStartError,
    build_worker_environment,
)
from rl.rewards.worker_loop import evaluate_item
from rl.rewards.worker_protocol import SECONDS_PREFIX, RewardReply
from rl.sanitize import describe_error

logger = logging.getLogger(__name__)

WorkerPlace = Literal["inline", "process", "thread"]

# extras that install the module of a built-in reward
_EXTRAS = {"py3langid": "language"}
_MAX_CHUNK = 64
# Items with about this total run time are sent in a single message: 100 round trips a second cost
# nothing.
_CHUNK_SECONDS = 0.01
_CLOSE_POLL_SECONDS = (
    0.2  # interval at which a wait for a reply checks whether the scorer was closed
)
# Grace after the time limit, in which a cancelled coroutine reports the timeout itself
_CANCEL_GRACE_SECONDS = 2.0
# Pauses between attempts to restart a lost worker: a missing resource may become available.
_RESTART_SECONDS = (0.2, 1.0, 3.0)


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
    `workers`: number of concurrent workers. Default for processes: half the cores, from 2 to 16
    (each core, up to 64, if answers are run as programs); for threads: 1, so that a closure need
    not be thread-safe.

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
    `gave_up`. A worker process receives the environment variables in workers.ENVIRONMENT and those
    in `environment` (names, or patterns such as PREFIX*).
    """

    def __init__(
        self,
        reward: str | RewardFunction | Reward,
        *,
        timeout: float = 10.0,
        workers: int | None = None,
        environment: Sequence[str] = (),
    ):
        if not timeout > 0:
            raise UserError(f"a reward's timeout is a positive number of seconds, got {timeout}")
        if workers is not None and workers < 1:
            raise UserError(f"a scorer has at least 1 worker, got {workers}")
        self.reward = resolve_reward(reward)
        self.timeout = timeout
        self.seconds: dict[str, float] = {}
        if self.reward.batched:
            self.reward = copy.copy(self.reward)
            self.reward.coroutine_timeout = timeout
        self.counts = {"calls": 0, "errors": 0, "timeouts": 0, "nan": 0, "deaths": 0}
        _check_packages(self.reward)
        self.place: WorkerPlace = _select_place(self.reward)
        self._environment = build_worker_environment(environment)
        self._output = RewardOutput(self.reward.name)
        self._lost_workers: dict[str | None, int] = {}  # number by kind of failure
        self._lock = threading.Condition()
        self._queue = RewardQueue(self.reward.batched)
        self._closed = False
        # Running mean; this initial value sends the first items individually
        self._item_seconds = _CHUNK_SECONDS
        self._threads: list[threading.Thread] = []
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
        for number in range(workers or default):
            thread = threading.Thread(
                target=self._manage_worker, args=(worker if number == 0 else None,), daemon=True
            )
            thread.name = f"scorer {number}"
            self._active_workers += 1
            try:
                thread.start()
            except RuntimeError as error:  # no process or memory is available for it
                self._active_workers -= 1
                if number == 0:
                    worker.stop()
                    raise UserError(
                        f"reward {self.reward.name!r} cannot be used: {error}"
                    ) from error
                logger.warning(
                    "reward %r runs on %d workers: a thread for another worker cannot be "
                    "started (%s)",
                    self.reward.name,
                    number,
                    error,
                )
                break
            self._threads.append(thread)
        atexit.register(self.close)

    def submit(
        self,
        prompt: str,
        response: str,
        meta: Mapping[str, Any] | None = None,
        episode: Episode | None = None,
    ) -> PendingScore:
        """Submit a response for scoring, and its episode if the reward takes episodes
        (`reward.episode`).

        The score is computed in the background; a reward that scores many at once starts when the
        first score is waited for.
        """
        item: RewardItem = (prompt, response, dict(meta) if meta is not None else None, episode)
        pending = PendingScore(prompt, item, self._flush if self.reward.batched else None)
        if self.place == "inline":
            self._finish(pending, evaluate_item(self.reward, item))
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
                self._finish(pending, RewardReply(None, "error", reason))
                return pending
        with self._lock:
            if self._closed:
                raise RuntimeError(
                    f"the scorer of reward {self.reward.name!r} is closed: create a new scorer"
                )
            if self._failure is not None:
                raise self._failure
            self._queue.add(pending)
            self._lock.notify()
        return pending

    def _flush(self) -> None:
        """Start scoring the queued responses."""
        with self._lock:
            self._queue.release()
            self._lock.notify_all()

    def take_seconds(self) -> dict[str, float]:
        """Return seconds per reward name since the last call, summed over all workers, and reset
        them.
        """
        with self._lock:
            seconds, self.seconds = self.seconds, {}
        return seconds

    def score_many(self, items: Iterable[tuple[Any, ...]]) -> list[Score]:
        """Return the scores of (prompt, response, meta) items, in order.

        For an episode reward the items are (prompt, response, meta, episode).
        """
        return [pending.result() for pending in [self.submit(*item) for item in items]]

    def close(self) -> None:
        """Stop the workers. Responses that were not scored yet get a score without reward."""
        with self._lock:
            self._closed = True
            remaining = self._queue.drain()
            self._lock.notify_all()
        for pending in remaining:
            self._finish(pending, RewardReply(None, "error", "was not run: the scorer was closed"))
        for thread in self._threads:
            thread.join(timeout=5.0)
        atexit.unregister(self.close)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _finish(
        self, pending: PendingScore, reply: RewardReply, score: RewardResult | None = None
    ) -> None:
        """Convert a reply to a score and count it.

        `score`: result to use for a failed reply that does not count as a failure of the batch.
        """
        kinds: dict[str, str] = {
            "error": "errors",
            "timeout": "timeouts",
            "nan": "nan",
            "death": "deaths",
        }
        failure: Failure | None = reply.failure  # type: ignore[assignment]  # Reply has plain text
        metrics = {} if reply.result is None else reply.result.metrics
        # Another process sends run times as metrics.
        seconds = {} if reply.result is None else dict(reply.result.seconds)
        seconds |= {
            name.removeprefix(SECONDS_PREFIX): value
            for name, value in metrics.items()
            if name.startswith(SECONDS_PREFIX)
        }
        with self._lock:
            for name, value in seconds.items():
                self.seconds[name] = self.seconds.get(name, 0.0) + value
            self.counts["calls"] += 1
            if failure is not None:
                self.counts[kinds[failure]] += 1
        if score is not None:
            pending.set(Score(score.reward, score.metrics))
        elif reply.result is not None:
            pending.set(
                Score(
                    reply.result.reward,
                    {k: v for k, v in metrics.items() if not k.startswith(SECONDS_PREFIX)},
                )
            )
        else:
            error = (
                f"reward {self.reward.name!r} {reply.error} (prompt "
                f"{shorten_prompt(pending.prompt)})"
            )
            pending.set(Score(None, {}, error, failure))

    def _take_chunk(self) -> list[PendingScore]:
        """Wait for work and return as many items as fit into a chunk, leaving the other workers
        their share.

        Returns an empty list when the scorer is closed.
        """
        with self._lock:
            while not self._queue and not self._closed:
                self._lock.wait()
            return self._queue.take(
                len(self._threads),
                min(_MAX_CHUNK, max(1, int(_CHUNK_SECONDS / self._item_seconds))),
            )

    def _manage_worker(self, worker: RewardWorker | None) -> None:
        """Run the thread that manages a worker: start it when work arrives, and restart it if it is
        lost.

        `worker`: the worker, if it was started already.
        """
        chunk: deque[PendingScore] = deque()
        try:
            while batch := self._take_chunk():
                chunk = deque(batch)
                while chunk:
                    worker = worker or self._restart()
                    worker = self._run_chunk(worker, chunk)
        except _ScorerClosed as error:
            while chunk:
                self._finish(chunk.popleft(), RewardReply(None, "error", f"was not run: {error}"))
        except Exception as error:  # no caller may wait forever for the items of this thread
            logger.warning(
                "reward %r lost a worker permanently: %s", self.reward.name, describe_error(error)
            )
            self._end_manager(chunk, error)
        finally:
            if worker is not None:
                worker.stop()

    def _restart(self) -> RewardWorker:
        """Start a replacement for a lost worker.

        Raises WorkerStartError after the last attempt, _Closed if the scorer was closed.
        """
        for pause in (*_RESTART_SECONDS, None):
            if self._closed:
                raise _ScorerClosed("the scorer was closed")
            try:
                return self._make_worker()
            except WorkerStartError as error:
                if pause is None:
                    raise
                logger.warning(
                    "reward %r: %s; next attempt in %g s", self.reward.name, error, pause
                )
            with self._lock:
                self._lock.wait_for(lambda: self._closed, timeout=pause)
        raise AssertionError("the last attempt returns or raises")

    def _end_manager(self, chunk: deque[PendingScore], cause: Exception) -> None:
        """End this worker's thread: return its items to the queue; after the last worker, fail all
        items.
        """
        with self._lock:
            self._queue.put_back(chunk)
            chunk.clear()
            self._active_workers -= 1
            remaining: list[PendingScore] = []
            if self._active_workers == 0:
                reason = (
                    f"reward {self.reward.name!r} cannot score any more: none of its workers "
                    f"could be restarted: {cause}"
                )
                remedy = (
                    "If a resource is exhausted, free some: processes (ulimit -u), descriptors "
                    "(ulimit -n), memory"
                )
                self._failure = RewardsLost(f"{reason}. {remedy}")
                remaining = self._queue.drain()
            self._lock.notify_all()
        for pending in remaining:
            assert self._failure is not None  # set above whenever items remain
            pending.fail(self._failure)

    def _run_chunk(self, worker: RewardWorker, chunk: deque[PendingScore]) -> RewardWorker | None:
        """Score a chunk until it is empty or its first item loses the worker.

        Returns the worker, or None if it was lost.
        """
        try:
            worker.send([pending.item for pending in chunk])
            while chunk:
                reply = self._receive(worker)
                self._finish(chunk.popleft(), reply)
            return worker
        except TimeoutError:
            reply = RewardReply(None, "timeout", f"did not end within {self.timeout:g} s")
        except WorkerDiedError as error:
            reply = RewardReply(None, "death", f"ended its worker process: {error}")
        except InvalidReply as error:
            reply = RewardReply(None, "error", f"sent an invalid reply: {error}")
        worker.stop()
        # Scoring the halves separately shows which item is to blame.
        if self.reward.batched and len(chunk) > 1:
            with self._lock:
                self._queue.add_halves(list(chunk))
                self._lock.notify_all()
            chunk.clear()
            return None
        culprit = chunk.popleft()
        self._log_lost_worker(reply, culprit)
        self._finish(culprit, reply, self.reward.give_up_result() if self.reward.builtin else None)
        return None

    def _log_lost_worker(self, reply: RewardReply, culprit: PendingScore) -> None:
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
                shorten_prompt(culprit.prompt),
            )

    def _receive(self, worker: RewardWorker) -> RewardReply:
        """Return the reply to the item that just started. Raises TimeoutError, WorkerDiedError or
        _Closed.
        """
        start = time.monotonic()
        while True:
            remaining = (
                start
                + self.timeout
                + (_CANCEL_GRACE_SECONDS if self.reward.batched else 0.0)
                - time.monotonic()
            )
            try:
                reply = worker.receive(min(_CLOSE_POLL_SECONDS, max(0.0, remaining)))
            except TimeoutError:
                if self._closed:
                    raise _ScorerClosed("the scorer was closed") from None
                if remaining <= 0:
                    raise
                continue
            # Workers write this without a lock: a lost update of a running mean does no harm.
            self._item_seconds += (
                0.2 * max(1e-6, time.monotonic() - start) - 0.2 * self._item_seconds
            )
            return reply

    def _make_worker(self) -> RewardWorker:
        if self.place == "thread":
            return ThreadRewardWorker(self.reward, self._output)
        return ProcessRewardWorker(self.reward, self._environment, self._output)


class _ScorerClosed(Exception):
    """Raised when the scorer was closed while an item ran."""


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _select_place(reward: Reward) -> WorkerPlace:
    if reward.inline_safe:
        return "inline"
    try:
        payload = pickle.dumps(reward)
    except Exception:
        # boundary: pickling runs code of user objects; an object that cannot be pickled stays here
        return "thread"
    # Functions of the script itself are pickled by name, but in the worker the name means another
    # module.
    return "thread" if b"__main__" in payload else "process"
