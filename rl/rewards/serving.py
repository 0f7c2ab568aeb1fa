"""Run a reward on items, in any worker, and run the loop of a worker process (forked by
rl.rewards.guard).
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from math import isfinite

from rl.errors import UserError
from rl.plain import plain_text, says
from rl.rewards.calls import Item, RewardResult, TookTooLong
from rl.rewards.combined import PartFailed
from rl.rewards.frames import MAX_ERROR, READY, Frames, Reply, encode_reply
from rl.rewards.registry import Reward


def evaluate_item(reward: Reward, item: Item) -> Reply:
    """Run the reward; convert any exception of user code to a reply that names the line that raised
    it.
    """
    try:
        result = reward.evaluate(*item)
    except (Exception, SystemExit) as error:  # boundary: user code
        return _failure(error)
    return _reply(result)


def evaluate_items(reward: Reward, items: Sequence[Item]) -> Iterator[Reply]:
    """Return the replies to all items, in order: item by item, or from a single call of a batched
    reward.
    """
    if not reward.together:
        yield from (evaluate_item(reward, item) for item in items)
        return
    for outcome in reward.evaluate_many(items, reward.limit):
        yield _failure(outcome) if isinstance(outcome, BaseException) else _reply(outcome)


def _reply(result: RewardResult) -> Reply:
    return (
        Reply(result)
        if isfinite(result.reward)
        else Reply(None, "nan", f"returned {result.reward}")
    )


def _failure(error: BaseException) -> Reply:
    if isinstance(error, TookTooLong):
        return Reply(None, "timeout", str(error))
    description = (
        f"failed {error}"[:MAX_ERROR]
        if isinstance(error, PartFailed)
        else f"raised {says(error, MAX_ERROR)}"
    )
    cause = (
        error.__cause__ if isinstance(error, PartFailed) and error.__cause__ is not None else error
    )
    return Reply(None, "error", plain_text(f"{description} (at {_where(cause)})", MAX_ERROR + 500))


def _where(error: BaseException) -> str:
    """Return the file and line that raised an exception."""
    trace = error.__traceback__
    if trace is None:
        return "returned instead of a reward"
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def serve(channel: int) -> None:
    """Run the worker process: receive the reward, send READY or the error, then score batches of
    items.

    Returns when the socket is closed.
    """
    os.register_at_fork(after_in_child=lambda: _let_go(channel))
    worker_pid = os.getpid()
    frames = Frames(limit=1 << 62)  # no limit: the trainer is trusted
    nonce, pickled = pickle.loads(_read(channel, frames))
    ready = Reply(RewardResult(0.0))
    # Reports this process's id before any user code runs.
    _write(channel, encode_reply(READY, nonce, ready))
    try:
        reward = pickle.loads(pickled)
        for module in reward.needs:
            __import__(module)
        reward.begin()
    except UserError as error:
        _write(channel, encode_reply(READY, nonce, Reply(None, "error", str(error))))
        return
    except Exception as error:  # boundary: user code
        _write(
            channel,
            encode_reply(
                READY,
                nonce,
                Reply(None, "error", f"its worker process could not load it ({says(error)})"),
            ),
        )
        return
    _write(channel, encode_reply(READY, nonce, ready))
    number = READY
    while batch := _read(channel, frames):
        for reply in _answers(reward, pickle.loads(batch)):
            number += 1
            if os.getpid() != worker_pid:
                # A fork of this process, made by the reward, returned to this loop: only the
                # original may reply.
                os._exit(0)
            _write(channel, encode_reply(number, nonce, reply))


def _answers(reward: Reward, pickled: Sequence[bytes]) -> Iterator[Reply]:
    """Return the replies to pickled items, in order."""
    if not reward.together:
        for payload in pickled:
            item = _unpickled(payload)
            yield item if isinstance(item, Reply) else evaluate_item(reward, item)
        return
    items = [_unpickled(payload) for payload in pickled]
    replies = evaluate_items(reward, [item for item in items if not isinstance(item, Reply)])
    for item in items:
        yield item if isinstance(item, Reply) else next(replies)


def _unpickled(pickled: bytes) -> Item | Reply:
    try:
        return pickle.loads(pickled)
    except Exception as error:  # boundary: code of user objects
        return Reply(
            None,
            "error",
            f"runs in another process, and this meta could not be unpickled ({says(error)})",
        )


def _let_go(channel: int) -> None:
    """Close the socket in a fork of the worker: it must neither reply nor keep the socket open."""
    try:
        os.close(channel)
    except OSError:
        pass  # the reward closed it


def _read(channel: int, frames: Frames) -> bytes:
    """Return the next message; b"" if the trainer closed the socket or ended."""
    while (message := frames.next()) is None:
        data = os.read(channel, 1 << 16)
        if not data:
            return b""
        frames.feed(data)
    return message


def _write(channel: int, message: bytes) -> None:
    remaining = memoryview(message)
    while remaining:
        remaining = remaining[os.write(channel, remaining) :]
