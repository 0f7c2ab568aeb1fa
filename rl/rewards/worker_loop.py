"""Run a reward on items, in any worker, and run the loop of a worker process (started by
rl.processes).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Iterator, Sequence
from math import isfinite

from rl.errors import UserError
from rl.processes import encode_frame, read_message
from rl.rewards.combined_reward import RewardPartError
from rl.rewards.reward_calls import RewardItem, RewardResult, RewardTimeout
from rl.rewards.reward_registry import Reward
from rl.rewards.worker_protocol import (
    MAX_ERROR_CHARACTERS,
    READY_ITEM,
    RewardReply,
    encode_reply,
)
from rl.sanitize import describe_error, sanitize_text


def evaluate_item(reward: Reward, item: RewardItem) -> RewardReply:
    """Run the reward; convert any exception of user code to a reply that names the line that raised
    it.
    """
    try:
        result = reward.evaluate(*item)
    except (Exception, SystemExit) as error:  # boundary: user code
        return _make_error_reply(error)
    return _make_result_reply(result)


def evaluate_items(reward: Reward, items: Sequence[RewardItem]) -> Iterator[RewardReply]:
    """Return the replies to all items, in order: item by item, or from a single call of a batched
    reward.
    """
    if not reward.batched:
        yield from (evaluate_item(reward, item) for item in items)
        return
    for outcome in reward.evaluate_many(items, reward.coroutine_timeout):
        yield (
            _make_error_reply(outcome)
            if isinstance(outcome, BaseException)
            else _make_result_reply(outcome)
        )


def _make_result_reply(result: RewardResult) -> RewardReply:
    return (
        RewardReply(result)
        if isfinite(result.reward)
        else RewardReply(None, "nan", f"returned {result.reward}")
    )


def _make_error_reply(error: BaseException) -> RewardReply:
    if isinstance(error, RewardTimeout):
        return RewardReply(None, "timeout", str(error))
    description = (
        f"failed {error}"[:MAX_ERROR_CHARACTERS]
        if isinstance(error, RewardPartError)
        else f"raised {describe_error(error, MAX_ERROR_CHARACTERS)}"
    )
    cause = (
        error.__cause__
        if isinstance(error, RewardPartError) and error.__cause__ is not None
        else error
    )
    return RewardReply(
        None,
        "error",
        sanitize_text(
            f"{description} (at {_get_error_location(cause)})", MAX_ERROR_CHARACTERS + 500
        ),
    )


def _get_error_location(error: BaseException) -> str:
    """Return the file and line that raised an exception."""
    trace = error.__traceback__
    if trace is None:
        return "returned instead of a reward"
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def run_worker(fd: int) -> None:
    """Run the worker process: receive the reward, send READY_ITEM or the error, then score batches
    of items.

    `fd`: file descriptor of the channel to the trainer. Returns when the channel is closed.
    """
    channel, worker_pid = socket.socket(fileno=fd), os.getpid()
    os.register_at_fork(after_in_child=lambda: _close_in_fork(channel))
    nonce, pickled = pickle.loads(read_message(channel, limit=None))

    def send(number: int, reply: RewardReply) -> None:
        channel.sendall(encode_frame(encode_reply(number, nonce, reply)))

    ready = RewardReply(RewardResult(0.0))
    send(READY_ITEM, ready)  # reports this process's id before any user code runs
    try:
        reward = pickle.loads(pickled)
        for module in reward.needs:
            __import__(module)
        reward.start()
    except Exception as error:  # boundary: user code
        reason = f"its worker process could not load it ({describe_error(error)})"
        reason = str(error) if isinstance(error, UserError) else reason
        return send(READY_ITEM, RewardReply(None, "error", reason))
    send(READY_ITEM, ready)
    number = READY_ITEM
    while batch := read_message(channel, limit=None):
        for reply in _score_batch(reward, pickle.loads(batch)):
            number += 1
            if os.getpid() != worker_pid:
                # A fork of this process, made by the reward, returned to this loop: only the
                # original may reply.
                os._exit(0)
            send(number, reply)


def _score_batch(reward: Reward, pickled: Sequence[bytes]) -> Iterator[RewardReply]:
    """Return the replies to pickled items, in order."""
    if not reward.batched:
        for payload in pickled:
            item = _unpickle_item(payload)
            yield item if isinstance(item, RewardReply) else evaluate_item(reward, item)
        return
    items = [_unpickle_item(payload) for payload in pickled]
    replies = evaluate_items(reward, [item for item in items if not isinstance(item, RewardReply)])
    for item in items:
        yield item if isinstance(item, RewardReply) else next(replies)


def _unpickle_item(pickled: bytes) -> RewardItem | RewardReply:
    try:
        return pickle.loads(pickled)
    except Exception as error:  # boundary: code of user objects
        return RewardReply(
            None,
            "error",
            "runs in another process, and this meta could not be unpickled "
            f"({describe_error(error)})",
        )


def _close_in_fork(channel: socket.socket) -> None:
    """Close the socket in a fork of the worker: it must neither reply nor keep the socket open."""
    with contextlib.suppress(OSError):  # the reward closed it
        channel.close()
