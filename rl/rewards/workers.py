"""Where a reward runs: in the calling thread, in a process that can be killed, or in a thread that
can be abandoned.

A worker answers one `Reply` to each item, in order, as soon as it is there, so its owner can time
every item. The process is a fresh interpreter, not a fork (forks of a process with threads or CUDA
hang) and not multiprocessing's spawn (which runs the user's script again): it imports the reward's
module alone. It runs under a guard (rl.rewards.guard), which ends all that it started; what it
sends is read as data (rl.rewards.frames); it gets the named part of the environment alone.
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

# to import the reward's module, which may be heavy; the time limit of an item starts after it
_START_SECONDS = 120.0
_SEND_SECONDS = 30.0  # for a worker that is idle to take its items
# for a guard to end; one that does not is killed, and what it guarded is looked for
_END_SECONDS = guard.END_SECONDS + 2.0

# What a reward may need to find its libraries and files. Keys and tokens have other names; more are
# handed over by name.
ENVIRONMENT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "LC_*", "TMPDIR", "TEMP", "TMP", "XDG_CACHE_HOME",
    "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LD_PRELOAD", "OMP_*", "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip


class WorkerDied(Exception):
    """The worker ended without an answer."""


class WorkerFailedToStart(Exception):
    """The worker could not be started, or the reward not be set up in it."""


def environment_of_rewards(names: Sequence[str] = ()) -> dict[str, str]:
    """The part of this process's environment that a reward's worker gets: ENVIRONMENT and `names`
    (patterns with * both).
    """
    wanted = (*ENVIRONMENT, *names)
    found = {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in wanted)
    }
    # Workers are many and small: a thread pool for linear algebra in each would only fight over the
    # cores; the GPU is the trainer's.
    return {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **found}


class Worker(ABC):
    """Runs items one after the other. Used by one thread."""

    @abstractmethod
    def send(self, items: Sequence[Any]) -> None:
        """Hand over items, as the kind of worker takes them: `Item`s, or pickled ones for a
        process. Raises WorkerDied.
        """

    @abstractmethod
    def receive(self, timeout: float) -> Reply:
        """The next reply. Raises TimeoutError after `timeout` seconds, WorkerDied, BadReply."""

    @abstractmethod
    def stop(self) -> None:
        """End it now, whatever it does."""


class ThreadWorker(Worker):
    """A daemon thread: sees the caller's objects, but one that hangs can only be abandoned, and
    goes on using its core.
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
                    except (
                        BaseException
                    ) as error:  # boundary: the user's code raised what is meant to end a process
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
        # what was sent is sent again to the next worker: do not run it twice
        while not self._inbox.empty():
            try:
                self._inbox.get_nowait()
            except queue.Empty:
                break
        self._inbox.put(None)


class ProcessWorker(Worker):
    """A fresh interpreter in a session of its own, and its guard; `stop` ends it and all it
    started. It ends with its owner.

    `environment`: all that it gets. `printed`: called with pieces of what the reward prints.
    """

    def __init__(
        self, reward: Reward, environment: Mapping[str, str], printed: Callable[[bytes], None]
    ):
        self._printed, self._last_words = printed, b""
        self._nonce, self._mark = secrets.token_hex(16), secrets.token_hex(16)
        self._pid: int | None = None  # of the process that runs the reward, from its first message
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
            self._reply(READY, _START_SECONDS)  # before it runs any code of the user's
            ready = self._reply(READY, _START_SECONDS)
        except TimeoutError as error:
            self._fail(f"not ready after {_START_SECONDS:.0f} s", error)
        except BadReply as error:
            self._fail(f"what it sent is no reply: {error}", error)
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
            self._channel, theirs, self._life, guards = pairs
            said = guards.fileno()
            words = [
                sys.executable,
                "-P",
                str(Path(guard.__file__)),
                str(theirs.fileno()),
                str(os.getpid()),
                json.dumps(sys.path),
            ]
            self._process = subprocess.Popen(
                words,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=dict(environment),
                start_new_session=True,
            )
        except BaseException:
            for end in pairs:
                end.close()
            raise
        theirs.close()
        guards.close()
        for ours in (self._channel, self._life):
            ours.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._channel, select.POLLIN)
        self._poller.register(self._life, select.POLLIN)

    def send(self, items: Sequence[bytes]) -> None:
        try:
            self._write(frame(pickle.dumps(list(items))), _SEND_SECONDS)
        except TimeoutError:
            raise WorkerDied(f"it took no items for {_SEND_SECONDS:g} s") from None
        except OSError as error:
            raise WorkerDied(self._end()) from error

    def receive(self, timeout: float) -> Reply:
        reply = self._reply(self._answered + 1, timeout)
        self._answered += 1
        return reply

    def _write(self, message: bytes, seconds: float) -> None:
        """Raises TimeoutError where the worker does not read, another OSError where it has ended."""
        left, deadline = memoryview(message), time.monotonic() + seconds
        poller = select.poll()
        poller.register(self._channel, select.POLLOUT)
        while left:
            try:
                left = left[self._channel.send(left) :]
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
        """Until something came from the worker or its guard. Raises TimeoutError."""
        events = self._poller.poll(1000 * seconds)
        if not events:
            raise TimeoutError
        for fd, _ in events:
            if not (self._hear() if fd == self._channel.fileno() else self._listen()):
                self._ended = True
        if self._ended:  # what it sent before counts
            _drain(self._channel, self._hear)

    def _hear(self) -> bool:
        """Reads replies. False where the worker has ended."""
        try:
            data = self._channel.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:  # it ended with items unread
            return False
        self._frames.feed(data)
        return bool(data)

    def _listen(self) -> bool:
        """Reads what the reward printed. False where the guard has ended."""
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
        """How the process ended, in words, and what it said last."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its pipe but runs on"
        _drain(self._life, self._listen)
        lines = self._last_words.decode(errors="replace").strip().splitlines()
        # as a traceback ends, before what may follow
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        said = (
            f", it last printed: {plain_text((errors or lines)[-1].strip(), 300)}" if lines else ""
        )
        return (f"killed by {_signal_name(-code)}" if code < 0 else f"exit code {code}") + said

    def stop(self) -> None:
        """As in `Worker`. Takes seconds only where something evades; twice does nothing more."""
        self._channel.close()
        self._life.close()  # the guard hears this, and ends everything
        try:
            code = self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        # it may have been killed or stopped itself, by a reward that knows what it is
        if code is None or code < 0:
            self._sweep()

    def _sweep(self) -> None:
        """Kills what a guard left: by ancestry where it still is (nobody adopts what is below it),
        by mark where it is gone.
        """
        for _ in range(3):  # what was forked while we looked
            guarded = (
                [] if self._process.poll() is not None else guard.descendants(self._process.pid)
            )
            for pid in {*guarded, *guard.marked(self._mark)} - {os.getpid()}:
                guard.kill(pid)
        if self._process.poll() is None:
            self._process.kill()
            # the kernel holds it: nothing more can be done
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5.0)


def _drain(stream: socket.socket, read: Callable[[], bool]) -> None:
    """Reads what is there already of a stream whose sender has ended (bounded: somebody else may go
    on sending).
    """
    poller = select.poll()  # select itself takes no descriptor above 1023
    poller.register(stream, select.POLLIN)
    for _ in range(64):
        if not poller.poll(0) or not read():
            return


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
