"""`Scorer`: runs a reward on many responses at once, each within a time limit, and survives whatever the reward does."""

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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rl.errors import UserError
from rl.rewards.registry import Reward, RewardFunction, resolve_reward
from rl.rewards.workers import (
    Item,
    ProcessWorker,
    Reply,
    ThreadWorker,
    Worker,
    WorkerDied,
    WorkerFailedToStart,
    evaluate_item,
)

logger = logging.getLogger(__name__)

Failure = Literal["error", "timeout", "nan", "death"]
Place = Literal["inline", "process", "thread"]

_MAX_CHUNK = 64
_CHUNK_SECONDS = 0.01  # items that together take about this long travel together: 100 round trips a second cost nothing
_CLOSE_SECONDS = 0.2  # how often a wait for a reply looks whether the scorer was closed


@dataclass(frozen=True, slots=True)
class Score:
    """A response's reward and metrics. Where the reward failed, `reward` is None, `error` says how, `failure` of what kind."""

    reward: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    failure: Failure | None = None


class PendingScore:
    """A score that is being worked out."""

    __slots__ = ("_done", "_score", "item", "prompt")

    def __init__(self, prompt: str, item: Any):
        self.prompt = prompt
        self.item = item
        self._done = threading.Event()
        self._score: Score | None = None

    def done(self) -> bool:
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Score:
        """Wait for the score, at most `timeout` seconds. None still ends: each item before it has its time limit.

        Raises TimeoutError.
        """
        if not self._done.wait(timeout) or self._score is None:
            raise TimeoutError(f"no score within {timeout} s for the response to {_excerpt(self.prompt)}")
        return self._score

    def set(self, score: Score) -> None:
        self._score = score
        self.item = None
        self._done.set()


class Scorer:
    """Scores responses by one reward, `timeout` seconds for each, measured from when its turn comes.

    Where the reward runs (`place`) follows from what it is:
    - "inline": built-ins that cannot hang, at once, in the calling thread;
    - "process": all that another process can import: other built-ins, registered functions of a module, "module:object",
      "file.py:object". One that hangs is killed with all it started, one that crashes is replaced, the rest is not lost;
    - "thread": closures, lambdas and functions of the script itself (`__main__`, which a worker must not run again). One that
      hangs is abandoned: its sample is given up, but its thread goes on. Move the function into a module to have it killed.
    `workers`: how many at a time; default half the cores, from 2 to 16, for processes; 1 for threads, so that a closure
    need not be thread-safe. Safe to use from any thread. A reward that cannot be loaded is a UserError here.
    """

    def __init__(self, reward: str | RewardFunction | Reward, *, timeout: float = 10.0, workers: int | None = None):
        if not timeout > 0:
            raise UserError(f"a reward's timeout is a positive number of seconds, got {timeout}")
        if workers is not None and workers < 1:
            raise UserError(f"a scorer has at least 1 worker, got {workers}")
        self.reward = resolve_reward(reward)
        self.timeout = timeout
        self.counts = {"calls": 0, "errors": 0, "timeouts": 0, "nan": 0, "deaths": 0}
        for module in self.reward.needs:
            if importlib.util.find_spec(module) is None:
                package = module.replace("_", "-")
                raise UserError(f"reward {self.reward.name!r} needs the package {package}: pip install {package}")
        self.place: Place = _place(self.reward)
        self._lock = threading.Condition()
        self._waiting: deque[PendingScore] = deque()
        self._closed = False
        self._item_seconds = _CHUNK_SECONDS  # running mean; so the first items travel alone
        self._threads: list[threading.Thread] = []
        if self.place == "inline":
            return
        default = 1 if self.place == "thread" else max(2, min(16, _cores() // 2))
        first = _Start()
        for number in range(workers or default):
            thread = threading.Thread(target=self._feed, args=(first if number == 0 else None,), daemon=True)
            thread.name = f"scorer {number}"
            self._threads.append(thread)
            thread.start()
        atexit.register(self.close)
        first.done.wait()
        if first.error is not None:
            self.close()
            raise UserError(f"reward {self.reward.name!r} cannot be used: {first.error}")

    def submit(self, prompt: str, response: str, meta: Mapping[str, Any] | None = None) -> PendingScore:
        """Hand over a response; its score is worked out while the caller goes on."""
        item: Item = (prompt, response, dict(meta) if meta is not None else None)
        pending = PendingScore(prompt, item)
        if self.place == "inline":
            self._finish(pending, evaluate_item(self.reward, item))
            return pending
        if self.place == "process":
            try:
                pending.item = pickle.dumps(item)
            except Exception as error:  # boundary: pickling calls the code of the user's objects
                why = f"runs in another process, where this meta cannot go ({type(error).__name__}: {error})"
                self._finish(pending, Reply(None, "error", why))
                return pending
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the scorer of reward {self.reward.name!r} is closed: make a new one")
            self._waiting.append(pending)
            self._lock.notify()
        return pending

    def score_many(self, items: Iterable[tuple[str, str, Mapping[str, Any] | None]]) -> list[Score]:
        """The scores of (prompt, response, meta) items, in their order."""
        return [pending.result() for pending in [self.submit(*item) for item in items]]

    def close(self) -> None:
        """Stop the workers. What was not scored yet gets a score without reward."""
        with self._lock:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
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

    def _finish(self, pending: PendingScore, reply: Reply) -> None:
        """Turn a reply into the score, and count it."""
        kinds: dict[str, str] = {"error": "errors", "timeout": "timeouts", "nan": "nan", "death": "deaths"}
        failure: Failure | None = reply.failure  # type: ignore[assignment]  # Reply has plain text
        with self._lock:
            self.counts["calls"] += 1
            if failure is not None:
                self.counts[kinds[failure]] += 1
        if reply.result is not None:
            pending.set(Score(reply.result.reward, reply.result.metrics))
        else:
            error = f"reward {self.reward.name!r} {reply.error} (prompt {_excerpt(pending.prompt)})"
            pending.set(Score(None, {}, error, failure))

    def _take(self) -> list[PendingScore]:
        """Wait for work; as many items as fit into a chunk, leaving the other workers their share. Empty when closed."""
        with self._lock:
            while not self._waiting and not self._closed:
                self._lock.wait()
            share = -(-len(self._waiting) // max(1, len(self._threads)))
            chunk = min(share, _MAX_CHUNK, max(1, int(_CHUNK_SECONDS / self._item_seconds)))
            return [self._waiting.popleft() for _ in range(chunk)]

    def _feed(self, start: _Start | None) -> None:
        """One worker's owner: starts it when there is work (the first at once, as a proof), and again when it is lost."""
        worker: Worker | None = None
        try:
            if start is not None:
                try:
                    worker = self._make_worker()
                except WorkerFailedToStart as error:
                    start.error = str(error)
                    return
                finally:
                    start.done.set()
            while taken := self._take():
                chunk = deque(taken)
                while chunk:
                    worker = self._run_chunk(worker, chunk)
        finally:
            if worker is not None:
                worker.stop()

    def _run_chunk(self, worker: Worker | None, chunk: deque[PendingScore]) -> Worker | None:
        """Score a chunk until it is empty or the worker is lost to its first item. Returns the worker that is left."""
        try:
            worker = worker or self._make_worker()
            worker.send([pending.item for pending in chunk])
            while chunk:
                reply = self._receive(worker)
                self._finish(chunk.popleft(), reply)
            return worker
        except (WorkerFailedToStart, _Closed) as error:
            while chunk:
                self._finish(chunk.popleft(), Reply(None, "error", f"was not run: {error}"))
            return worker
        except TimeoutError:
            reply = Reply(None, "timeout", f"did not end within {self.timeout:g} s")
        except WorkerDied as error:
            reply = Reply(None, "death", f"ended its worker process: {error}")
        assert worker is not None
        worker.stop()
        culprit = chunk.popleft()
        logger.warning("reward %r %s (prompt %s)", self.reward.name, reply.error, _excerpt(culprit.prompt))
        self._finish(culprit, reply)
        return None

    def _receive(self, worker: Worker) -> Reply:
        """The reply to the item that began just now. Raises TimeoutError, WorkerDied, _Closed."""
        begin = time.monotonic()
        while True:
            left = begin + self.timeout - time.monotonic()
            try:
                reply = worker.receive(min(_CLOSE_SECONDS, max(0.0, left)))
            except TimeoutError:
                if self._closed:
                    raise _Closed("the scorer was closed") from None
                if left <= 0:
                    raise
                continue
            # Workers write this without a lock: a lost update of a running mean does no harm.
            self._item_seconds += 0.2 * max(1e-6, time.monotonic() - begin) - 0.2 * self._item_seconds
            return reply

    def _make_worker(self) -> Worker:
        return ThreadWorker(self.reward) if self.place == "thread" else ProcessWorker(self.reward)


class _Closed(Exception):
    """The scorer was closed while an item ran."""


class _Start:
    """How the start of the first worker went."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: str | None = None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _place(reward: Reward) -> Place:
    if reward.bounded:
        return "inline"
    try:
        payload = pickle.dumps(reward)
    except Exception:  # boundary: pickling calls the code of the user's objects; what cannot be pickled stays here
        return "thread"
    # Functions of the script itself pickle by name, but the name means another module in the worker.
    return "thread" if b"__main__" in payload else "process"
