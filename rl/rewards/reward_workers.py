"""Run a reward in a process that can be killed, or in a thread that can be abandoned.

A worker sends a `Score` to each item of a call, in order, as soon as it is available, so the
scorer can time every item. A worker process is a fresh interpreter. It is not a fork (forks of a
process with threads or CUDA hang) and not multiprocessing's spawn (which runs the user's script
again): it imports only the reward's module. It runs under a reaper (rl.processes.reaper), which
ends all processes that it started. It receives only the named environment variables.

A worker runs user code, so its output is parsed as data: JSON (Python's, which has NaN), never
unpickled, of bounded length, with a checksum (rl.processes), the number of its item, the worker's
process id and a secret of this worker (its nonce). Anything else is an InvalidReply.
"""

from __future__ import annotations

import contextlib
import fnmatch
import itertools
import json
import math
import os
import pickle
import queue
import secrets
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from rl.errors import UserError
from rl.processes import InvalidReply, MessageChannel, WorkerDiedError, encode_frame, read_message
from rl.rewards.captured_output import capture_thread_output
from rl.rewards.reward_calls import (
    RewardItem,
    RewardPartError,
    RewardTimeout,
    Score,
    make_failed_score,
    try_call,
)
from rl.rewards.reward_registry import Reward
from rl.sanitize import describe_error, sanitize_text

MAX_REPLY_BYTES = 1 << 20  # bytes of a single reply: a reward, its metrics, an error's text
MAX_ERROR_CHARACTERS = 2000  # characters of an error's text that are kept
_SECONDS_PREFIX = "time/"  # prefix of the metrics that hold a reward's run time in seconds
_MAX_NAME_CHARACTERS = 200  # characters of a metric's name
RUN_WORKER = "rl.rewards.reward_workers:run_worker"  # what a worker process runs
READY_ITEM = 0  # item number of the message "the worker is ready"; items count from 1

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

_FIELDS = {"item", "pid", "nonce", "reward", "metrics", "failure", "error"}


# ------------------------------------------------------------------------- the messages


def encode_reply(number: int, nonce: str, reply: Score) -> bytes:
    """Encode a reply of the calling process as a message."""
    seconds = {_SECONDS_PREFIX + name: taken for name, taken in reply.seconds.items()}
    fields = {
        "item": number,
        "pid": os.getpid(),
        "nonce": nonce,
        "reward": reply.reward,
        "metrics": {**reply.metrics, **seconds},
        "failure": reply.failure,
        "error": reply.error,
    }
    payload = json.dumps(fields).encode()  # in ASCII: a lone surrogate is encoded as \ud800
    if len(payload) > MAX_REPLY_BYTES:
        too_long = f"returned metrics of {len(payload)} bytes, the maximum is {MAX_REPLY_BYTES}"
        return encode_reply(number, nonce, make_failed_score("error", too_long))
    return payload


def decode_reply(payload: bytes, number: int, pid: int | None, nonce: str) -> tuple[Score, int]:
    """Return (reply to item `number`, process id of the sender).

    `pid`: process id of the worker, None if not known yet. Raises InvalidReply, with the reason, if
    the payload is not the reply of the worker with this process id and nonce.
    """
    try:
        fields = json.loads(payload.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        # UnicodeDecodeError is a ValueError, and so is the error for a number of 5,000 digits.
        raise InvalidReply(f"it is not JSON ({sanitize_text(str(error), 100)})") from None
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise InvalidReply(f"it has unexpected fields: {sanitize_text(repr(fields), 100)}")
    if fields["nonce"] != nonce:
        raise InvalidReply("it does not hold the worker's nonce")
    sender = fields["pid"]
    if type(sender) is not int or (pid is not None and sender != pid):
        raise InvalidReply(
            f"process {sanitize_text(repr(sender), 40)} sent it, the worker is process {pid}"
        )
    if type(fields["item"]) is not int or fields["item"] != number:
        raise InvalidReply(
            f"it answers item {sanitize_text(repr(fields['item']), 40)}, expected item {number}"
        )
    return _parse_reply(fields), sender


def _parse_reply(fields: dict[str, Any]) -> Score:
    failure, error, metrics = fields["failure"], fields["error"], fields["metrics"]
    if failure is not None:
        if failure not in ("error", "nan", "timeout") or not isinstance(error, str):
            raise InvalidReply(
                f"its failure is malformed: {sanitize_text(repr((failure, error)), 100)}"
            )
        return make_failed_score(failure, sanitize_text(error, MAX_ERROR_CHARACTERS))
    if not isinstance(metrics, dict):
        raise InvalidReply(f"its metrics are {sanitize_text(repr(metrics), 100)}")
    reward = _decode_number(fields["reward"], "reward")
    score = Score(reward)
    for name, value in metrics.items():
        number = _decode_number(value, f"metric {name[:40]!r}")
        name = sanitize_text(name, _MAX_NAME_CHARACTERS)
        if name.startswith(_SECONDS_PREFIX):
            score.seconds[name.removeprefix(_SECONDS_PREFIX)] = number
        else:
            score.metrics[name] = number
    return score if math.isfinite(reward) else make_failed_score("nan", f"returned {reward}")


def _decode_number(value: object, label: str) -> float:
    if type(value) not in (int, float):
        raise InvalidReply(
            f"its {sanitize_text(label, 60)} is {sanitize_text(repr(value), 60)}, a number is "
            "expected"
        )
    try:
        return float(value)  # type: ignore[arg-type]  # an int or a float
    except OverflowError:
        raise InvalidReply(
            f"its {sanitize_text(label, 60)} is beyond the range of a float"
        ) from None


class WorkerStartError(Exception):
    """Raised when the worker or its reward could not be started."""


def build_worker_environment(names: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment variables for a reward's worker.

    They are the variables of this process that match ENVIRONMENT or `names` (both may have patterns
    with *).
    """
    # Workers are many and small: a thread pool for linear algebra in each would only compete for
    # the cores. The GPU belongs to the trainer.
    variables = select_variables((*ENVIRONMENT, *names))
    return {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}


def select_variables(patterns: Sequence[str]) -> dict[str, str]:
    """Return this process's environment variables that match any of `patterns`."""
    return {
        name: value
        for name, value in os.environ.items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def iter_scores(
    reward: Reward, items: Sequence[RewardItem], coroutine_timeout: float | None = None
) -> Iterator[Score]:
    """Yield the reply to each item: its result, or an error that names the line of user code that
    raised it.

    `coroutine_timeout`: time limit of each coroutine in seconds.
    """
    for outcome in reward.iter_results(items, coroutine_timeout):
        yield (
            _make_error_reply(outcome)
            if isinstance(outcome, BaseException)
            else Score(outcome.reward, outcome.metrics, seconds=outcome.seconds)
            if math.isfinite(outcome.reward)
            else make_failed_score("nan", f"returned {outcome.reward}")
        )


def _make_error_reply(error: BaseException) -> Score:
    if isinstance(error, RewardTimeout):
        return make_failed_score("timeout", str(error))
    cause = error
    description = f"raised {describe_error(error, MAX_ERROR_CHARACTERS)}"
    if isinstance(error, RewardPartError):
        cause = error.__cause__ or error
        description = f"failed {error}"[:MAX_ERROR_CHARACTERS]
    place = "returned instead of a reward"
    for frame, line in traceback.walk_tb(cause.__traceback__):
        place = f"{frame.f_code.co_filename}:{line}"
    text = sanitize_text(f"{description} (at {place})", MAX_ERROR_CHARACTERS + 500)
    return make_failed_score("error", text)


# ------------------------------------------------------------------------- in the worker process


def run_worker(fd: int) -> None:
    """Run the worker process: receive the reward, send READY_ITEM or the error, then score calls of
    pickled items.

    `fd`: file descriptor of the channel to the trainer. Returns when the channel is closed.
    """
    channel, worker_pid = socket.socket(fileno=fd), os.getpid()
    os.register_at_fork(after_in_child=lambda: _close_in_fork(channel))
    nonce, timeout, pickled = pickle.loads(read_message(channel, limit=None))

    def send(number: int, reply: Score) -> None:
        channel.sendall(encode_frame(encode_reply(number, nonce, reply)))

    ready = Score(0.0)
    send(READY_ITEM, ready)  # reports this process's id before any user code runs
    try:
        reward = pickle.loads(pickled)
        for module in reward.needs:
            __import__(module)
        reward.start()
    except Exception as error:  # boundary: user code
        reason = f"its worker process could not load it ({describe_error(error)})"
        reason = str(error) if isinstance(error, UserError) else reason
        return send(READY_ITEM, make_failed_score("error", reason))
    send(READY_ITEM, ready)
    number = READY_ITEM
    while message := read_message(channel, limit=None):
        payloads = pickle.loads(message)
        # The items of a message are one call of a batched reward alone.
        calls = [payloads] if reward.batched else [[payload] for payload in payloads]
        replies = (_iter_pickled_scores(reward, call, timeout) for call in calls)
        for reply in itertools.chain.from_iterable(replies):
            if os.getpid() != worker_pid:
                # A fork of this process, made by the reward, returned to this loop: only the
                # original may reply.
                os._exit(0)
            number += 1
            send(number, reply)


def _iter_pickled_scores(
    reward: Reward, payloads: Sequence[bytes], timeout: float
) -> Iterator[Score]:
    """Yield the replies to pickled items, in order."""
    items = [try_call(pickle.loads, payload) for payload in payloads]  # runs code of user objects
    valid_items = [item for item in items if not isinstance(item, BaseException)]
    replies = iter_scores(reward, valid_items, timeout)
    refusal = "runs in another process, and this meta could not be unpickled"
    for item in items:
        yield (
            make_failed_score("error", f"{refusal} ({describe_error(item)})")
            if isinstance(item, BaseException)
            else next(replies)
        )


def _close_in_fork(channel: socket.socket) -> None:
    """Close the socket in a fork of the worker: it must neither reply nor keep the socket open."""
    with contextlib.suppress(OSError):  # the reward closed it
        channel.close()


# ------------------------------------------------------------------------------- in the trainer


class ThreadRewardWorker:
    """Run items in a daemon thread.

    The thread shares the caller's objects. If an item hangs, the thread can only be abandoned, and
    continues to use its core.
    """

    def __init__(self, reward: Reward, timeout: float, output: Callable[[bytes], None]):
        self._calls: queue.SimpleQueue[Sequence[RewardItem] | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Score] = queue.SimpleQueue()
        thread = threading.Thread(target=self._serve, args=(reward, timeout, output), daemon=True)
        thread.name = f"reward {reward.name}"
        try:
            thread.start()
        except RuntimeError as error:
            raise WorkerStartError(f"its thread did not start ({error})") from error

    def _serve(self, reward: Reward, timeout: float, output: Callable[[bytes], None]) -> None:
        while (items := self._calls.get()) is not None:
            count = 0
            with capture_thread_output(output):
                try:
                    for reply in iter_scores(reward, items, timeout):
                        # as if received from another process: bounded, sanitized, plain data
                        payload = encode_reply(READY_ITEM, "", reply)
                        self._replies.put(decode_reply(payload, READY_ITEM, None, "")[0])
                        count += 1
                except BaseException as error:  # boundary: user code
                    failure = make_failed_score("error", f"raised {describe_error(error)}")
                    for _ in items[count:]:
                        self._replies.put(failure)

    def send(self, items: Sequence[RewardItem]) -> None:
        """Send the items of a call."""
        self._calls.put(items)

    def receive(self, timeout: float) -> Score:
        """Return the next reply. Raises TimeoutError after `timeout` seconds."""
        try:
            return self._replies.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None

    def stop(self) -> None:
        """End the thread after the call that it runs."""
        self._calls.put(None)


class ProcessRewardWorker:
    """Run items in a fresh interpreter in its own session, under a reaper.

    `stop` ends the interpreter and every process that it started; so does the end of this process.
    `start`: starts the process; it raises OSError if that fails.
    """

    def __init__(self, reward: Reward, timeout: float, start: Callable[[], MessageChannel]):
        self._nonce = secrets.token_hex(16)
        # Of the process that runs the reward, known from its first message
        self._pid: int | None = None
        self._last_item = READY_ITEM
        try:
            self._process = start()
        except OSError as error:
            raise WorkerStartError(
                f"its worker process did not start ({describe_error(error)})"
            ) from error
        try:
            first_message = pickle.dumps((self._nonce, timeout, pickle.dumps(reward)))
            self._process.send(first_message, _START_SECONDS)
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
        """Send the pickled items of a call. Raises WorkerDiedError if the worker ended."""
        try:
            self._process.send(pickle.dumps(items), _SEND_SECONDS)
        except TimeoutError:
            raise WorkerDiedError(f"it received no items for {_SEND_SECONDS:g} s") from None

    def receive(self, timeout: float) -> Score:
        """Return the next reply. Raises TimeoutError after `timeout` seconds, WorkerDiedError or
        InvalidReply.
        """
        reply = self._receive_reply(self._last_item + 1, timeout)
        self._last_item += 1
        return reply

    def _receive_reply(self, number: int, timeout: float) -> Score:
        payload = self._process.receive(timeout)
        reply, self._pid = decode_reply(payload, number, self._pid, self._nonce)
        return reply

    def stop(self) -> None:
        """End the worker immediately, even while it runs an item."""
        self._process.stop()


RewardWorker = ThreadRewardWorker | ProcessRewardWorker  # used by a single thread at a time
