"""Where a reward runs: in the calling thread, in a process that can be killed, or in a thread that can be abandoned.

A worker answers one `Reply` to each item, in order, as soon as it is there, so its owner can time every item.
The process is a fresh interpreter, not a fork (forks of a process with threads or CUDA hang) and not multiprocessing's spawn
(which runs the user's script again): it imports the reward's module alone.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from multiprocessing.connection import Connection
from typing import Any

from rl.rewards.registry import Reward, RewardResult

Item = tuple[str, str, Mapping[str, Any] | None]  # prompt, response, meta

_START_SECONDS = 120.0  # to import the reward's module, which may be heavy; the time limit of an item starts after it


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one item: a result, or a failure ("error" | "nan") and its description."""

    result: RewardResult | None
    failure: str | None = None
    error: str | None = None


class WorkerDied(Exception):
    """The worker ended without an answer."""


class WorkerFailedToStart(Exception):
    """The reward could not be set up in the worker."""


def evaluate_item(reward: Reward, item: Item) -> Reply:
    """Run the reward; whatever the user's code raises becomes the reply, with the line that raised it."""
    try:
        result = reward.evaluate(*item)
    except (Exception, SystemExit) as error:  # boundary: the user's code
        line = traceback.extract_tb(error.__traceback__)[-1]
        return Reply(None, "error", f"raised {type(error).__name__}: {error} (at {line.filename}:{line.lineno})")
    if not isfinite(result.reward):
        return Reply(None, "nan", f"returned {result.reward}")
    return Reply(result)


class Worker(ABC):
    """Runs items one after the other. Used by one thread."""

    @abstractmethod
    def send(self, items: Sequence[Any]) -> None:
        """Hand over items, as the kind of worker takes them: `Item`s, or pickled ones for a process. Raises WorkerDied."""

    @abstractmethod
    def receive(self, timeout: float) -> Reply:
        """The next reply. Raises TimeoutError after `timeout` seconds, WorkerDied."""

    @abstractmethod
    def stop(self) -> None:
        """End it now, whatever it does."""


class ThreadWorker(Worker):
    """A daemon thread: sees the caller's objects, but one that hangs can only be abandoned, and goes on using its core."""

    def __init__(self, reward: Reward):
        self._inbox: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        threading.Thread(target=self._serve, args=(reward,), name=f"reward {reward.name}", daemon=True).start()

    def _serve(self, reward: Reward) -> None:
        while (item := self._inbox.get()) is not None:
            self._outbox.put(evaluate_item(reward, item))

    def send(self, items: Sequence[Item]) -> None:
        for item in items:
            self._inbox.put(item)

    def receive(self, timeout: float) -> Reply:
        try:
            return self._outbox.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None

    def stop(self) -> None:
        while not self._inbox.empty():  # what was sent is sent again to the next worker: do not run it twice
            try:
                self._inbox.get_nowait()
            except queue.Empty:
                break
        self._inbox.put(None)


class ProcessWorker(Worker):
    """A fresh interpreter in a session of its own; `stop` kills it and what it started. Linux: it dies with its parent."""

    def __init__(self, reward: Reward):
        read_items, write_items = os.pipe()
        read_replies, write_replies = os.pipe()
        # Signals that ask a run to stop may reach all its processes (a scheduler's do), and it needs its rewards to finish the step.
        # Handlers that do nothing, since what a reward starts would inherit SIG_IGN.
        code = (
            "import signal, sys; [signal.signal(s, lambda *_: None) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]; "
            f"sys.path[:] = {sys.path!r}; from rl.rewards.workers import serve; "
            f"serve({read_items}, {write_replies}, {os.getpid()})"
        )
        # Workers are many and small: a thread pool for linear algebra in each would only fight over the cores.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=(read_items, write_replies),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        os.close(read_items)
        os.close(write_replies)
        self._items = Connection(write_items, readable=False)
        self._replies = Connection(read_replies, writable=False)
        try:
            self._items.send_bytes(pickle.dumps(reward))
            ready = self._receive(_START_SECONDS)
        except (OSError, WorkerDied, TimeoutError) as error:
            self.stop()
            why = f"not ready after {_START_SECONDS:.0f} s" if isinstance(error, TimeoutError) else self._end()
            raise WorkerFailedToStart(f"its worker process did not start ({why})") from error
        if ready is not None:
            self.stop()
            raise WorkerFailedToStart(str(ready))

    def send(self, items: Sequence[bytes]) -> None:
        try:
            self._items.send_bytes(pickle.dumps(list(items)))
        except OSError as error:
            raise WorkerDied(self._end()) from error

    def receive(self, timeout: float) -> Reply:
        reply = self._receive(timeout)
        assert isinstance(reply, Reply)
        return reply

    def _receive(self, timeout: float) -> object:
        try:
            if not self._replies.poll(timeout):
                raise TimeoutError
            return self._replies.recv()
        except (EOFError, ConnectionError) as error:
            raise WorkerDied(self._end()) from error

    def _end(self) -> str:
        """How the process ended, in words."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its pipe but runs on"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def stop(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it and all it started have ended
        self._process.wait()
        self._items.close()
        self._replies.close()


def serve(read_items: int, write_replies: int, parent: int) -> None:
    """The worker process: receives the reward, says None when ready (or why it is not), then answers lists of items."""
    # What a reward starts must not hold our pipes: their end is how either side learns that the other one died.
    os.set_inheritable(read_items, False)
    os.set_inheritable(write_replies, False)
    _die_with(parent)
    items, replies = Connection(read_items, writable=False), Connection(write_replies, readable=False)
    try:
        reward = pickle.loads(items.recv_bytes())
        for module in reward.needs:
            __import__(module)
    except Exception as error:  # boundary: the user's module
        replies.send(f"its worker process could not load it ({type(error).__name__}: {error})")
        return
    replies.send(None)
    while True:
        try:
            batch = pickle.loads(items.recv_bytes())
        except EOFError:
            return  # the parent closed the scorer, or is gone
        for item in batch:
            replies.send(evaluate_item(reward, pickle.loads(item)))


def _die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the thread that started it ends; elsewhere than on Linux do without."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)
