"""Run a reward in a process that can be killed, or in a thread that can be abandoned.

A worker sends a `RewardReply` to each item, in order, as soon as it is available, so the scorer can
time every item. A worker process is a fresh interpreter. It is not a fork (forks of a process with
threads or CUDA hang) and not multiprocessing's spawn (which runs the user's script again): it
imports only the reward's module. It runs under a reaper (rl.processes.reaper), which ends all
processes that it started. Its messages are parsed as data (rl.rewards.worker_protocol). It receives
only the named environment variables.
"""

from __future__ import annotations

import fnmatch
import os
import pickle
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from rl.processes import InvalidReply, WorkerDiedError, WorkerProcess
from rl.rewards.captured_output import capture_thread_output
from rl.rewards.reward_calls import RewardItem
from rl.rewards.reward_registry import Reward
from rl.rewards.worker_loop import evaluate_items
from rl.rewards.worker_protocol import (
    MAX_REPLY_BYTES,
    READY_ITEM,
    RewardReply,
    as_remote_reply,
    decode_reply,
)
from rl.sanitize import describe_error

# To import the reward's module, which may take long; an item's time limit starts after it.
_START_SECONDS = 120.0
_SEND_SECONDS = 30.0  # for an idle worker to receive its items

# Variables that a reward may need to find its libraries and files. Keys and tokens are not among
# them; pass further variables by name.
ENVIRONMENT = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "LC_*", "TMPDIR",
    "TEMP", "TMP", "XDG_CACHE_HOME", "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH", "LD_PRELOAD", "OMP_*", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE",
    "TOKENIZERS_PARALLELISM", "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip


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


class ThreadRewardWorker:
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
        """Send items, which are run sequentially."""
        for part in [items] if self._batched else [[item] for item in items]:
            self._inbox.put(part)

    def receive(self, timeout: float) -> RewardReply:
        """Return the next reply. Raises TimeoutError after `timeout` seconds."""
        try:
            return self._outbox.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None

    def stop(self) -> None:
        """Drop items that are still queued: they are sent again to the next worker and must not run
        twice.
        """
        while not self._inbox.empty():
            try:
                self._inbox.get_nowait()
            except queue.Empty:
                break
        self._inbox.put(None)


class ProcessRewardWorker:
    """Run items in a fresh interpreter in its own session, under a reaper.

    `stop` ends the interpreter and every process that it started; so does the end of this process.
    `environment`: its complete environment. `output`: called with chunks of the reward's output.
    """

    def __init__(
        self, reward: Reward, environment: Mapping[str, str], output: Callable[[bytes], None]
    ):
        self._nonce = secrets.token_hex(16)
        # Of the process that runs the reward, known from its first message
        self._pid: int | None = None
        self._last_item = READY_ITEM
        try:
            self._process = WorkerProcess(
                "rl.rewards.worker_loop:run_worker", environment, MAX_REPLY_BYTES, output
            )
        except OSError as error:
            raise WorkerStartError(
                f"its worker process did not start ({describe_error(error)})"
            ) from error
        try:
            self._process.send(pickle.dumps((self._nonce, pickle.dumps(reward))), _START_SECONDS)
            self._receive_reply(READY_ITEM, _START_SECONDS)  # sent before any user code runs
            ready = self._receive_reply(READY_ITEM, _START_SECONDS)
        except TimeoutError as error:
            self._fail(f"not ready after {_START_SECONDS:.0f} s", error)
        except InvalidReply as error:
            self._fail(f"it sent an invalid reply: {error}", error)
        except WorkerDiedError as error:
            self._fail(str(error), error)
        if ready.error is not None:
            self.stop()
            raise WorkerStartError(ready.error)

    def _fail(self, reason: str, cause: Exception) -> NoReturn:
        self.stop()
        raise WorkerStartError(f"its worker process did not start ({reason})") from cause

    def send(self, items: Sequence[bytes]) -> None:
        """Send pickled items. Raises WorkerDiedError if the worker ended."""
        try:
            self._process.send(pickle.dumps(list(items)), _SEND_SECONDS)
        except TimeoutError:
            raise WorkerDiedError(f"it received no items for {_SEND_SECONDS:g} s") from None

    def receive(self, timeout: float) -> RewardReply:
        """Return the next reply. Raises TimeoutError after `timeout` seconds, WorkerDiedError or
        InvalidReply.
        """
        reply = self._receive_reply(self._last_item + 1, timeout)
        self._last_item += 1
        return reply

    def _receive_reply(self, number: int, timeout: float) -> RewardReply:
        payload = self._process.receive(timeout)
        reply, self._pid = decode_reply(payload, number, self._pid, self._nonce)
        return reply

    def stop(self) -> None:
        """End the worker immediately, even while it runs an item."""
        self._process.stop()


RewardWorker = ThreadRewardWorker | ProcessRewardWorker  # used by a single thread at a time
