"""`Scorer`: runs a reward on many responses at once, each within a time limit, and survives
whatever the reward does.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from rl.errors import UserError
from rl.plain import says
from rl.rewards.calls import Episode, Item, RewardResult
from rl.rewards.frames import SECONDS, BadReply, Reply
from rl.rewards.losses import Losses
from rl.rewards.pending import Failure, PendingScore, RewardsLost, Score, excerpt
from rl.rewards.printed import Printed
from rl.rewards.registry import Reward, RewardFunction, resolve_reward
from rl.rewards.serving import evaluate_item
from rl.rewards.waiting import Waiting
from rl.rewards.workers import (
    ProcessWorker,
    ThreadWorker,
    Worker,
    WorkerDied,
    WorkerFailedToStart,
    environment_of_rewards,
)

logger = logging.getLogger(__name__)

Place = Literal["inline", "process", "thread"]

_MAX_CHUNK = 64
# items that together take about this long travel together: 100 round trips a second cost nothing
_CHUNK_SECONDS = 0.01
_CLOSE_SECONDS = 0.2  # how often a wait for a reply looks whether the scorer was closed
_LATE_SECONDS = 2.0  # after its limit, for a coroutine that was given up to say so itself
# between attempts to start a worker that was lost: what it lacks may come back
_RESTART_SECONDS = (0.2, 1.0, 3.0)


class Scorer:
    """Scores responses by one reward, `timeout` seconds for each, measured from when its turn
    comes.

    Where the reward runs (`place`) follows from what it is:
    - "inline": built-ins that cannot hang, at once, in the calling thread;
    - "process": all that another process can import: other built-ins, registered functions of a
      module, "module:object",
      "file.py:object". One that hangs is killed with all it started, one that crashes is replaced,
      the rest is not lost;
    - "thread": closures, lambdas and functions of the script itself (`__main__`, which a worker
      must not run again). One that
      hangs is abandoned: its sample is given up, but its thread goes on. Move the function into a
      module to have it killed.
    `workers`: how many at a time; default half the cores, from 2 to 16, for processes (each core,
    up to 64, where answers are run as programs); 1 for threads, so that a closure need not be
    thread-safe. Safe to use from any thread. A reward that cannot be loaded is a UserError here;
    where workers are lost and none can be started again, waiting for a score raises RewardsLost. A
    reward that takes many at once (batched, or a coroutine) gets all that was submitted when the
    first score is waited for, in one call within the time limit (of a coroutine: each within it). A
    call that hangs, dies or raises is made again on its halves, so that what one answer breaks
    costs that one. `seconds`: what each reward took, summed over answers, until `take_seconds`. An
    answer that takes a built-in reward longer, or ends its worker, scores 0 with the metric
    `gave_up`. A process gets the part of the environment that workers.ENVIRONMENT names, and
    `environment`: names of more (PREFIX* as well).
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
        if self.reward.together:
            self.reward = copy.copy(self.reward)
            self.reward.limit = timeout
        self.counts = {"calls": 0, "errors": 0, "timeouts": 0, "nan": 0, "deaths": 0}
        for module in self.reward.needs:
            if importlib.util.find_spec(module) is None:
                package = module.replace("_", "-")
                raise UserError(
                    f"reward {self.reward.name!r} needs the package {package}: pip install {package}"
                )
        self.place: Place = _place(self.reward)
        self._environment = environment_of_rewards(environment)
        self._printed, self._losses = Printed(self.reward.name), Losses(self.reward.name)
        self._lock = threading.Condition()
        self._waiting = Waiting(self.reward.together)
        self._closed = False
        self._item_seconds = _CHUNK_SECONDS  # running mean; so the first items travel alone
        self._threads: list[threading.Thread] = []
        self._feeding = 0  # workers' owners that have not given up
        self._lost: RewardsLost | None = None
        if self.place == "inline":
            return
        # A program is run while its worker waits: a worker for each core keeps them busy.
        own = 1 if self.place == "thread" or self.reward.together else 0
        default = own or max(
            2, min(64, _cores()) if self.reward.runs_programs else min(16, _cores() // 2)
        )
        first = _Start()
        for number in range(workers or default):
            thread = threading.Thread(
                target=self._feed, args=(first if number == 0 else None,), daemon=True
            )
            thread.name = f"scorer {number}"
            self._feeding += 1
            try:
                thread.start()
            except RuntimeError as error:  # no process or memory is left for it
                self._feeding -= 1
                if number == 0:
                    raise UserError(
                        f"reward {self.reward.name!r} cannot be used: {error}"
                    ) from error
                logger.warning(
                    "reward %r runs on %d workers, for another no thread can be started (%s)",
                    self.reward.name,
                    number,
                    error,
                )
                break
            self._threads.append(thread)
        atexit.register(self.close)
        first.done.wait()  # which the first thread sets, whatever becomes of its worker
        if first.error is not None:
            self.close()
            raise UserError(f"reward {self.reward.name!r} cannot be used: {first.error}")

    def submit(
        self,
        prompt: str,
        response: str,
        meta: Mapping[str, Any] | None = None,
        episode: Episode | None = None,
    ) -> PendingScore:
        """Hand over a response, and where the reward sees one (`reward.episode`) the episode that
        it ends; its score is worked out while the caller goes on, or where many are scored together
        once one is waited for.
        """
        item: Item = (prompt, response, dict(meta) if meta is not None else None, episode)
        pending = PendingScore(prompt, item, self._flush if self.reward.together else None)
        if self.place == "inline":
            self._finish(pending, evaluate_item(self.reward, item))
            pending.at_once = True
            return pending
        if self.place == "process":
            try:
                pending.item = pickle.dumps(item)
            except Exception as error:  # boundary: pickling calls the code of the user's objects
                why = f"runs in another process, where this meta cannot go ({says(error)})"
                self._finish(pending, Reply(None, "error", why))
                return pending
        with self._lock:
            if self._closed:
                raise RuntimeError(
                    f"the scorer of reward {self.reward.name!r} is closed: make a new one"
                )
            if self._lost is not None:
                raise self._lost
            self._waiting.add(pending)
            self._lock.notify()
        return pending

    def _flush(self) -> None:
        """What was held back is to be scored now."""
        with self._lock:
            self._waiting.release()
            self._lock.notify_all()

    def take_seconds(self) -> dict[str, float]:
        """Seconds of each reward by its name since this was last asked, over all its workers."""
        with self._lock:
            taken, self.seconds = self.seconds, {}
        return taken

    def score_many(self, items: Iterable[tuple[Any, ...]]) -> list[Score]:
        """The scores of (prompt, response, meta) items, in their order; of (prompt, response, meta,
        episode) where episodes are seen.
        """
        return [pending.result() for pending in [self.submit(*item) for item in items]]

    def close(self) -> None:
        """Stop the workers. What was not scored yet gets a score without reward."""
        with self._lock:
            self._closed = True
            left = self._waiting.drain()
            self._lock.notify_all()
        for pending in left:
            self._finish(pending, Reply(None, "error", "was not run: the scorer was closed"))
        for thread in self._threads:
            thread.join(timeout=5.0)
        atexit.unregister(self.close)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _finish(
        self, pending: PendingScore, reply: Reply, score: RewardResult | None = None
    ) -> None:
        """Turn a reply into the score, and count it. `score`: the result of a reply that failed,
        where that is no failure of the batch.
        """
        kinds: dict[str, str] = {
            "error": "errors",
            "timeout": "timeouts",
            "nan": "nan",
            "death": "deaths",
        }
        failure: Failure | None = reply.failure  # type: ignore[assignment]  # Reply has plain text
        metrics = {} if reply.result is None else reply.result.metrics
        # from another process they come as metrics
        taken = {} if reply.result is None else dict(reply.result.seconds)
        taken |= {
            name.removeprefix(SECONDS): value
            for name, value in metrics.items()
            if name.startswith(SECONDS)
        }
        with self._lock:
            for name, value in taken.items():
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
                    {k: v for k, v in metrics.items() if not k.startswith(SECONDS)},
                )
            )
        else:
            error = f"reward {self.reward.name!r} {reply.error} (prompt {excerpt(pending.prompt)})"
            pending.set(Score(None, {}, error, failure))

    def _take(self) -> list[PendingScore]:
        """Wait for work; as many items as fit into a chunk, leaving the other workers their share.
        Empty when closed.
        """
        with self._lock:
            while not self._waiting and not self._closed:
                self._lock.wait()
            return self._waiting.take(
                len(self._threads),
                min(_MAX_CHUNK, max(1, int(_CHUNK_SECONDS / self._item_seconds))),
            )

    def _feed(self, start: _Start | None) -> None:
        """One worker's owner: starts it when there is work (the first at once, as a proof), and
        again when it is lost.
        """
        worker: Worker | None = None
        chunk: deque[PendingScore] = deque()
        try:
            if start is not None:
                worker = start.attempt(self._make_worker)
                if worker is None:
                    return
            while taken := self._take():
                chunk = deque(taken)
                while chunk:
                    worker = worker or self._restart()
                    worker = self._run_chunk(worker, chunk)
        except _Closed as error:
            while chunk:
                self._finish(chunk.popleft(), Reply(None, "error", f"was not run: {error}"))
        except Exception as error:  # whatever it is, nobody may wait for what this thread holds
            logger.warning("reward %r has one worker less: %s", self.reward.name, says(error))
            self._give_up(chunk, error)
        finally:
            if worker is not None:
                worker.stop()

    def _restart(self) -> Worker:
        """A worker in the place of one that was lost. Raises WorkerFailedToStart after the last
        attempt, _Closed.
        """
        for pause in (*_RESTART_SECONDS, None):
            if self._closed:
                raise _Closed("the scorer was closed")
            try:
                return self._make_worker()
            except WorkerFailedToStart as error:
                if pause is None:
                    raise
                logger.warning("reward %r: %s; tried again in %g s", self.reward.name, error, pause)
            with self._lock:
                self._lock.wait_for(lambda: self._closed, timeout=pause)
        raise AssertionError("the last attempt returns or raises")

    def _give_up(self, chunk: deque[PendingScore], cause: Exception) -> None:
        """One owner leaves: what it holds is for the others; with the last one, nothing can be
        scored any more.
        """
        with self._lock:
            self._waiting.back(chunk)
            chunk.clear()
            self._feeding -= 1
            left: list[PendingScore] = []
            if self._feeding == 0:
                why = f"reward {self.reward.name!r} can score no more, none of its workers could be started again: {cause}"
                remedy = "Where something is used up, make room: processes (ulimit -u), descriptors (ulimit -n), memory"
                self._lost = RewardsLost(f"{why}. {remedy}")
                left = self._waiting.drain()
            self._lock.notify_all()
        for pending in left:
            assert self._lost is not None  # where anything is left
            pending.lose(self._lost)

    def _run_chunk(self, worker: Worker, chunk: deque[PendingScore]) -> Worker | None:
        """Score a chunk until it is empty or the worker is lost to its first item. Returns the
        worker that is left.
        """
        try:
            worker.send([pending.item for pending in chunk])
            while chunk:
                reply = self._receive(worker)
                self._finish(chunk.popleft(), reply)
            return worker
        except TimeoutError:
            reply = Reply(None, "timeout", f"did not end within {self.timeout:g} s")
        except WorkerDied as error:
            reply = Reply(None, "death", f"ended its worker process: {error}")
        except BadReply as error:
            reply = Reply(None, "error", f"sent what is no reply to it: {error}")
        worker.stop()
        # which of them is to blame shows where the halves are scored apart
        if self.reward.together and len(chunk) > 1:
            with self._lock:
                self._waiting.halve(list(chunk))
                self._lock.notify_all()
            chunk.clear()
            return None
        culprit = chunk.popleft()
        self._losses(reply, culprit)
        self._finish(culprit, reply, self.reward.gave_up() if self.reward.builtin else None)
        return None

    def _receive(self, worker: Worker) -> Reply:
        """The reply to the item that began just now. Raises TimeoutError, WorkerDied, _Closed."""
        begin = time.monotonic()
        while True:
            left = (
                begin
                + self.timeout
                + (_LATE_SECONDS if self.reward.together else 0.0)
                - time.monotonic()
            )
            try:
                reply = worker.receive(min(_CLOSE_SECONDS, max(0.0, left)))
            except TimeoutError:
                if self._closed:
                    raise _Closed("the scorer was closed") from None
                if left <= 0:
                    raise
                continue
            # Workers write this without a lock: a lost update of a running mean does no harm.
            self._item_seconds += (
                0.2 * max(1e-6, time.monotonic() - begin) - 0.2 * self._item_seconds
            )
            return reply

    def _make_worker(self) -> Worker:
        if self.place == "thread":
            return ThreadWorker(self.reward, self._printed)
        return ProcessWorker(self.reward, self._environment, self._printed)


class _Closed(Exception):
    """The scorer was closed while an item ran."""


class _Start:
    """How the start of the first worker went."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: str | None = None

    def attempt(self, make: Callable[[], Worker]) -> Worker | None:
        """None where it failed: `error` says why."""
        try:
            return make()
        except Exception as error:  # the constructor waits for this thread, and raises it
            self.error = str(error) if isinstance(error, WorkerFailedToStart) else says(error)
            return None
        finally:
            self.done.set()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _place(reward: Reward) -> Place:
    if reward.bounded:
        return "inline"
    try:
        payload = pickle.dumps(reward)
    except (
        Exception
    ):  # boundary: pickling calls the code of the user's objects; what cannot be pickled stays here
        return "thread"
    # Functions of the script itself pickle by name, but the name means another module in the
    # worker.
    return "thread" if b"__main__" in payload else "process"
