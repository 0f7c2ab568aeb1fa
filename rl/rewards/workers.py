"""Run a reward in a process that can be killed, or in a thread that can be abandoned.

A worker sends a `Reply` to each item, in order, as soon as it is available, so the scorer can time
every item. A worker process is a fresh interpreter. It is not a fork (forks of a process with
threads or CUDA hang) and not multiprocessing's spawn (which runs the user's script again): it
imports only the reward's module. It runs under a reaper (rl.rewards.guard), which ends all
processes that it started. Its messages are parsed as data (rl.rewards.frames). It receives only the
named environment variables.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import pickle
import queue
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rl.plain import plain_text, says
from rl.rewards import guard
from rl.rewards.calls import Item
from rl.rewards.frames import (
    MAX_REPLY,
    READY,
    BadReply,
    Frames,
    Reply,
    as_data,
    decode_reply,
    frame,
)
from rl.rewards.printed import from_this_thread
from rl.rewards.registry import Reward
from rl.rewards.serving import evaluate_items

# To import the reward's module, which may take long; an item's time limit starts after it.
_START_SECONDS = 120.0
_SEND_SECONDS = 30.0  # for an idle worker to receive its items
# For a reaper to end. After it, the reaper is killed, and the processes below it are
# searched for.
_END_SECONDS = guard.END_SECONDS + 2.0

# Variables that a reward may need to find its libraries and files. Keys and tokens are not among
# them; pass further variables by name.
ENVIRONMENT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "LC_*", "TMPDIR",
    "TEMP", "TMP", "XDG_CACHE_HOME", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH", "LD_PRELOAD", "OMP_*", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip


class WorkerDied(Exception):
    """Raised when the worker ended without a reply."""


class WorkerFailedToStart(Exception):
    """Raised when the worker or its reward could not be started."""


def environment_of_rewards(names: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables for a reward's worker.

    They are the variables of this process that match ENVIRONMENT or `names` (both may have patterns
    with *).
    """
    patterns = (*ENVIRONMENT, *names)
    variables = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }
    # Workers are many and small: a thread pool for linear algebra in each would only compete for
    # the cores. The GPU belongs to the trainer.
    return {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}


class Worker(ABC):
    """Run items sequentially. A worker is used by a single thread."""

    @abstractmethod
    def send(self, items: Sequence[Any]) -> None:
        """Send items: `Item`s for a thread, pickled items for a process. Raises WorkerDied if the
        worker ended.
        """

    @abstractmethod
    def receive(self, timeout: float) -> Reply:
        """Return the next reply. Raises TimeoutError after `timeout` seconds, WorkerDied or
        BadReply.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the worker immediately, even while it runs an item."""


class ThreadWorker(Worker):
    """Run items in a daemon thread.

    The thread shares the caller's objects. If an item hangs, the thread can only be abandoned, and
    continues to use its core.
    """

    def __init__(self, reward: Reward, printed: Callable[[bytes], None]):
        self._printed = printed
        self._inbox: queue.SimpleQueue[Sequence[Item] | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self._together = reward.together
        try:
            threading.Thread(
                target=self._serve, args=(reward,), name=f"reward {reward.name}", daemon=True
            ).start()
        except RuntimeError as error:
            raise WorkerFailedToStart(f"its thread did not start ({error})") from error

    def _serve(self, reward: Reward) -> None:
        while (items := self._inbox.get()) is not None:
            with from_this_thread(self._printed):
                replies = evaluate_items(reward, items)
                for _ in items:
                    try:
                        self._outbox.put(as_data(next(replies)))
                    except BaseException as error:  # boundary: user code may raise SystemExit
                        self._outbox.put(Reply(None, "error", f"raised {says(error)}"))

    def send(self, items: Sequence[Item]) -> None:
        for part in [items] if self._together else [[item] for item in items]:
            self._inbox.put(part)

    def receive(self, timeout: float) -> Reply:
        try:
            return self._outbox.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None

    def stop(self) -> None:
        # Drop items that are still queued: they are sent again to the next worker and must not run
        # twice.
        while not self._inbox.empty():
            try:
                self._inbox.get_nowait()
            except queue.Empty:
                break
        self._inbox.put(None)


class ProcessWorker(Worker):
    """Run items in a fresh interpreter in its own session, under a reaper.

    `stop` ends the interpreter and every process that it started; so does the end of this process.
    `environment`: its complete environment. `printed`: called with chunks of the reward's output.
    """

    def __init__(
        self, reward: Reward, environment: Mapping[str, str], printed: Callable[[bytes], None]
    ):
        self._printed, self._last_words = printed, b""
        self._nonce, self._mark = secrets.token_hex(16), secrets.token_hex(16)
        # Of the process that runs the reward, known from its first message
        self._pid: int | None = None
        self._answered = READY
        self._ended = False
        self._frames = Frames(MAX_REPLY)
        try:
            self._start({**environment, guard.MARK: self._mark})
        except OSError as error:
            raise WorkerFailedToStart(
                f"its worker process did not start ({says(error)})"
            ) from error
        try:
            self._write(frame(pickle.dumps((self._nonce, pickle.dumps(reward)))), _START_SECONDS)
            self._reply(READY, _START_SECONDS)  # sent before any user code runs
            ready = self._reply(READY, _START_SECONDS)
        except TimeoutError as error:
            self._fail(f"not ready after {_START_SECONDS:.0f} s", error)
        except BadReply as error:
            self._fail(f"it sent an invalid reply: {error}", error)
        except (OSError, WorkerDied) as error:
            self._fail(self._end(), error)
        if ready.error is not None:
            self.stop()
            raise WorkerFailedToStart(ready.error)

    def _fail(self, why: str, cause: Exception) -> NoReturn:
        self.stop()
        raise WorkerFailedToStart(f"its worker process did not start ({why})") from cause

    def _start(self, environment: Mapping[str, str]) -> None:
        pairs: list[socket.socket] = []
        try:
            for _ in range(2):
                pairs += socket.socketpair()
            self._channel, worker_end, self._life, guard_end = pairs
            guard_fd = guard_end.fileno()
            command = [
                sys.executable,
                "-P",
                str(Path(guard.__file__)),
                str(worker_end.fileno()),
                str(os.getpid()),
                json.dumps(sys.path),
            ]
            self._process = subprocess.Popen(
                command,
                pass_fds=(worker_end.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=guard_fd,
                stderr=guard_fd,
                env=dict(environment),
                start_new_session=True,
            )
        except BaseException:
            for end in pairs:
                end.close()
            raise
        worker_end.close()
        guard_end.close()
        for parent_end in (self._channel, self._life):
            parent_end.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._channel, select.POLLIN)
        self._poller.register(self._life, select.POLLIN)

    def send(self, items: Sequence[bytes]) -> None:
        try:
            self._write(frame(pickle.dumps(list(items))), _SEND_SECONDS)
        except TimeoutError:
            raise WorkerDied(f"it received no items for {_SEND_SECONDS:g} s") from None
        except OSError as error:
            raise WorkerDied(self._end()) from error

    def receive(self, timeout: float) -> Reply:
        reply = self._reply(self._answered + 1, timeout)
        self._answered += 1
        return reply

    def _write(self, message: bytes, seconds: float) -> None:
        """Send a message. Raises TimeoutError if the worker does not read, another OSError if it
        has ended.
        """
        remaining, deadline = memoryview(message), time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._channel, select.POLLOUT)
        while remaining:
            try:
                remaining = remaining[self._channel.send(remaining) :]
            except BlockingIOError:
                if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
                    raise TimeoutError from None

    def _reply(self, number: int, timeout: float) -> Reply:
        deadline = time.monotonic() + timeout
        while (payload := self._frames.next()) is None:
            if self._ended:
                raise WorkerDied(self._end())
            self._wait(max(0.0, deadline - time.monotonic()))
        reply, self._pid = decode_reply(payload, number, self._pid, self._nonce)
        return reply

    def _wait(self, seconds: float) -> None:
        """Wait for data from the worker or its reaper. Raises TimeoutError after `seconds`."""
        events = self._poller.poll(1000 * seconds)
        if not events:
            raise TimeoutError
        for fd, _ in events:
            if not (self._hear() if fd == self._channel.fileno() else self._listen()):
                self._ended = True
        if self._ended:  # messages sent before the end count
            _drain(self._channel, self._hear)

    def _hear(self) -> bool:
        """Read replies. Return False if the worker has ended."""
        try:
            data = self._channel.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:  # it ended with items unread
            return False
        self._frames.feed(data)
        return bool(data)

    def _listen(self) -> bool:
        """Read the reward's output. Return False if the reaper has ended."""
        try:
            data = self._life.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._last_words = (self._last_words + data)[-guard.LAST_BYTES :]
        if data:
            self._printed(data)
        return bool(data)

    def _end(self) -> str:
        """Describe how the process ended, with its last line of output."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its pipe but is still running"
        _drain(self._life, self._listen)
        lines = self._last_words.decode(errors="replace").strip().splitlines()
        # The line that ends a traceback, which other output may follow.
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        last_output = (
            f", it last printed: {plain_text((errors or lines)[-1].strip(), 300)}" if lines else ""
        )
        return (
            f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}"
        ) + last_output

    def stop(self) -> None:
        """End the worker and all its descendants. Takes seconds only if a process evades;
        idempotent.
        """
        self._channel.close()
        self._life.close()  # the reaper detects this and ends all processes
        try:
            code = self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        # The reward may have killed or stopped its reaper.
        if code is None or code < 0:
            self._sweep()

    def _sweep(self) -> None:
        """Kill the processes that a reaper did not end.

        They are identified by ancestry while the reaper exists (it adopts orphans), by mark
        otherwise.
        """
        for _ in range(3):  # again for processes forked in the meantime
            guarded = (
                [] if self._process.poll() is not None else guard.descendants(self._process.pid)
            )
            for pid in {*guarded, *guard.marked(self._mark)} - {os.getpid()}:
                guard.kill(pid)
        if self._process.poll() is None:
            self._process.kill()
            # If the kernel blocks it, nothing more can be done.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5.0)


def _drain(stream: socket.socket, read: Callable[[], bool]) -> None:
    """Read the remaining data of a stream with an ended sender.

    The number of reads is bounded, since another process may continue to send.
    """
    poller = select.poll()  # select.select takes no descriptor above 1023
    poller.register(stream, select.POLLIN)
    for _ in range(64):
        if not poller.poll(0) or not read():
            return


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
