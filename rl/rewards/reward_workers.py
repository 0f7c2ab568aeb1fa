"""Run a reward in a process that can be killed, or in a thread that can be abandoned.

A worker sends a `RewardReply` to each item, in order, as soon as it is available, so the scorer can
time every item. A worker process is a fresh interpreter. It is not a fork (forks of a process with
threads or CUDA hang) and not multiprocessing's spawn (which runs the user's script again): it
imports only the reward's module. It runs under a reaper (rl.rewards.reaper), which ends all
processes that it started. Its messages are parsed as data (rl.rewards.worker_protocol). It receives
only the named environment variables.
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

from rl.rewards import reaper
from rl.rewards.captured_output import capture_thread_output
from rl.rewards.reward_calls import RewardItem
from rl.rewards.reward_registry import Reward
from rl.rewards.worker_loop import evaluate_items
from rl.rewards.worker_protocol import (
    MAX_REPLY_BYTES,
    READY_ITEM,
    FrameReader,
    InvalidReply,
    RewardReply,
    as_remote_reply,
    decode_reply,
    encode_frame,
)
from rl.sanitize import describe_error, sanitize_text

# To import the reward's module, which may take long; an item's time limit starts after it.
_START_SECONDS = 120.0
_SEND_SECONDS = 30.0  # for an idle worker to receive its items
# For a reaper to end. After it, the reaper is killed, and the processes below it are
# searched for.
_END_SECONDS = reaper.KILL_SECONDS + 2.0

# Variables that a reward may need to find its libraries and files. Keys and tokens are not among
# them; pass further variables by name.
ENVIRONMENT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "LC_*", "TMPDIR",
    "TEMP", "TMP", "XDG_CACHE_HOME", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH", "LD_PRELOAD", "OMP_*", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip


class WorkerDiedError(Exception):
    """Raised when the worker ended without a reply."""


class WorkerStartError(Exception):
    """Raised when the worker or its reward could not be started."""


def build_worker_environment(names: Sequence[str] = ()) -> dict[str, str]:
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


class RewardWorker(ABC):
    """Run items sequentially. A worker is used by a single thread."""

    @abstractmethod
    def send(self, items: Sequence[Any]) -> None:
        """Send items: `RewardItem`s for a thread, pickled items for a process. Raises
        WorkerDiedError if the worker ended.
        """

    @abstractmethod
    def receive(self, timeout: float) -> RewardReply:
        """Return the next reply. Raises TimeoutError after `timeout` seconds, WorkerDiedError or
        InvalidReply.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the worker immediately, even while it runs an item."""


class ThreadRewardWorker(RewardWorker):
    """Run items in a daemon thread.

    The thread shares the caller's objects. If an item hangs, the thread can only be abandoned, and
    continues to use its core.
    """

    def __init__(self, reward: Reward, output: Callable[[bytes], None]):
        self._output = output
        self._inbox: queue.SimpleQueue[Sequence[RewardItem] | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[RewardReply] = queue.SimpleQueue()
        self._batched = reward.batched
        try:
            threading.Thread(
                target=self._serve, args=(reward,), name=f"reward {reward.name}", daemon=True
            ).start()
        except RuntimeError as error:
            raise WorkerStartError(f"its thread did not start ({error})") from error

    def _serve(self, reward: Reward) -> None:
        while (items := self._inbox.get()) is not None:
            with capture_thread_output(self._output):
                replies = evaluate_items(reward, items)
                for _ in items:
                    try:
                        self._outbox.put(as_remote_reply(next(replies)))
                    except BaseException as error:  # boundary: user code may raise SystemExit
                        self._outbox.put(
                            RewardReply(None, "error", f"raised {describe_error(error)}")
                        )

    def send(self, items: Sequence[RewardItem]) -> None:
        for part in [items] if self._batched else [[item] for item in items]:
            self._inbox.put(part)

    def receive(self, timeout: float) -> RewardReply:
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


class ProcessRewardWorker(RewardWorker):
    """Run items in a fresh interpreter in its own session, under a reaper.

    `stop` ends the interpreter and every process that it started; so does the end of this process.
    `environment`: its complete environment. `output`: called with chunks of the reward's output.
    """

    def __init__(
        self, reward: Reward, environment: Mapping[str, str], output: Callable[[bytes], None]
    ):
        self._output, self._output_tail = output, b""
        self._nonce, self._mark = secrets.token_hex(16), secrets.token_hex(16)
        # Of the process that runs the reward, known from its first message
        self._pid: int | None = None
        self._last_item = READY_ITEM
        self._ended = False
        self._frames = FrameReader(MAX_REPLY_BYTES)
        try:
            self._start({**environment, reaper.MARK_VARIABLE: self._mark})
        except OSError as error:
            raise WorkerStartError(
                f"its worker process did not start ({describe_error(error)})"
            ) from error
        try:
            self._write(
                encode_frame(pickle.dumps((self._nonce, pickle.dumps(reward)))), _START_SECONDS
            )
            self._receive_reply(READY_ITEM, _START_SECONDS)  # sent before any user code runs
            ready = self._receive_reply(READY_ITEM, _START_SECONDS)
        except TimeoutError as error:
            self._fail(f"not ready after {_START_SECONDS:.0f} s", error)
        except InvalidReply as error:
            self._fail(f"it sent an invalid reply: {error}", error)
        except (OSError, WorkerDiedError) as error:
            self._fail(self._describe_end(), error)
        if ready.error is not None:
            self.stop()
            raise WorkerStartError(ready.error)

    def _fail(self, reason: str, cause: Exception) -> NoReturn:
        self.stop()
        raise WorkerStartError(f"its worker process did not start ({reason})") from cause

    def _start(self, environment: Mapping[str, str]) -> None:
        pairs: list[socket.socket] = []
        try:
            for _ in range(2):
                pairs += socket.socketpair()
            self._channel, worker_end, self._output_socket, guard_end = pairs
            guard_fd = guard_end.fileno()
            command = [
                sys.executable,
                "-P",
                str(Path(reaper.__file__)),
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
        for parent_end in (self._channel, self._output_socket):
            parent_end.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._channel, select.POLLIN)
        self._poller.register(self._output_socket, select.POLLIN)

    def send(self, items: Sequence[bytes]) -> None:
        try:
            self._write(encode_frame(pickle.dumps(list(items))), _SEND_SECONDS)
        except TimeoutError:
            raise WorkerDiedError(f"it received no items for {_SEND_SECONDS:g} s") from None
        except OSError as error:
            raise WorkerDiedError(self._describe_end()) from error

    def receive(self, timeout: float) -> RewardReply:
        reply = self._receive_reply(self._last_item + 1, timeout)
        self._last_item += 1
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

    def _receive_reply(self, number: int, timeout: float) -> RewardReply:
        deadline = time.monotonic() + timeout
        while (payload := self._frames.next()) is None:
            if self._ended:
                raise WorkerDiedError(self._describe_end())
            self._wait(max(0.0, deadline - time.monotonic()))
        reply, self._pid = decode_reply(payload, number, self._pid, self._nonce)
        return reply

    def _wait(self, seconds: float) -> None:
        """Wait for data from the worker or its reaper. Raises TimeoutError after `seconds`."""
        events = self._poller.poll(1000 * seconds)
        if not events:
            raise TimeoutError
        for fd, _ in events:
            if not (self._read_replies() if fd == self._channel.fileno() else self._read_output()):
                self._ended = True
        if self._ended:  # messages sent before the end count
            _read_remaining(self._channel, self._read_replies)

    def _read_replies(self) -> bool:
        """Read replies. Return False if the worker has ended."""
        try:
            data = self._channel.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:  # it ended with items unread
            return False
        self._frames.feed(data)
        return bool(data)

    def _read_output(self) -> bool:
        """Read the reward's output. Return False if the reaper has ended."""
        try:
            data = self._output_socket.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._output_tail = (self._output_tail + data)[-reaper.OUTPUT_TAIL_BYTES :]
        if data:
            self._output(data)
        return bool(data)

    def _describe_end(self) -> str:
        """Describe how the process ended, with its last line of output."""
        try:
            code = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its pipe but is still running"
        _read_remaining(self._output_socket, self._read_output)
        lines = self._output_tail.decode(errors="replace").strip().splitlines()
        # The line that ends a traceback, which other output may follow.
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        last_output = (
            f", it last printed: {sanitize_text((errors or lines)[-1].strip(), 300)}"
            if lines
            else ""
        )
        return (
            f"killed by {_get_signal_name(-code)}" if code < 0 else f"exit code {code}"
        ) + last_output

    def stop(self) -> None:
        """End the worker and all its descendants. Takes seconds only if a process evades;
        idempotent.
        """
        self._channel.close()
        self._output_socket.close()  # the reaper detects this and ends all processes
        try:
            code = self._process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        # The reward may have killed or stopped its reaper.
        if code is None or code < 0:
            self._kill_remaining()

    def _kill_remaining(self) -> None:
        """Kill the processes that a reaper did not end.

        They are identified by ancestry while the reaper exists (it adopts orphans), by mark
        otherwise.
        """
        for _ in range(3):  # again for processes forked in the meantime
            guarded = (
                []
                if self._process.poll() is not None
                else reaper.find_descendants(self._process.pid)
            )
            for pid in {*guarded, *reaper.find_marked_processes(self._mark)} - {os.getpid()}:
                reaper.kill_process(pid)
        if self._process.poll() is None:
            self._process.kill()
            # If the kernel blocks it, nothing more can be done.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5.0)


def _read_remaining(stream: socket.socket, read: Callable[[], bool]) -> None:
    """Read the remaining data of a stream with an ended sender.

    The number of reads is bounded, since another process may continue to send.
    """
    poller = select.poll()  # select.select takes no descriptor above 1023
    poller.register(stream, select.POLLIN)
    for _ in range(64):
        if not poller.poll(0) or not read():
            return


def _get_signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
