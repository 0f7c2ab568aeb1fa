"""Running a reward on an item, wherever that is, and the loop of a worker process (which
rl.rewards.guard forks).
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
    """Run the reward; whatever the user's code raises becomes the reply, with the line that raised
    it.
    """
    try:
        result = reward.evaluate(*item)
    except (Exception, SystemExit) as error:  # boundary: the user's code
        return _failure(error)
    return _reply(result)


def evaluate_items(reward: Reward, items: Sequence[Item]) -> Iterator[Reply]:
    """The replies to all items, in order: one after the other, or of one call where the reward
    takes many at once.
    """
    if not reward.together:
        yield from (evaluate_item(reward, item) for item in items)
        return
    for found in reward.evaluate_many(items, reward.limit):
        yield _failure(found) if isinstance(found, BaseException) else _reply(found)


def _reply(result: RewardResult) -> Reply:
    return (
        Reply(result)
        if isfinite(result.reward)
        else Reply(None, "nan", f"returned {result.reward}")
    )


def _failure(error: BaseException) -> Reply:
    if isinstance(error, TookTooLong):
        return Reply(None, "timeout", str(error))
    how = (
        f"failed {error}"[:MAX_ERROR]
        if isinstance(error, PartFailed)
        else f"raised {says(error, MAX_ERROR)}"
    )
    cause = (
        error.__cause__ if isinstance(error, PartFailed) and error.__cause__ is not None else error
    )
    return Reply(None, "error", plain_text(f"{how} (at {_where(cause)})", MAX_ERROR + 500))


def _where(error: BaseException) -> str:
    """The file and line that raised it."""
    trace = error.__traceback__
    if trace is None:
        return "returned in the place of a reward"
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


def serve(channel: int) -> None:
    """The worker process: receives the reward, says READY (or why it is not), then answers lists of
    items until the socket ends.
    """
    os.register_at_fork(after_in_child=lambda: _let_go(channel))
    me = os.getpid()
    frames = Frames(limit=1 << 62)  # the trainer may send what it likes
    nonce, pickled = pickle.loads(_read(channel, frames))
    ready = Reply(RewardResult(0.0))
    # names this process before any code of the user's runs
    _write(channel, encode_reply(READY, nonce, ready))
    try:
        reward = pickle.loads(pickled)
        for module in reward.needs:
            __import__(module)
        reward.begin()
    except UserError as error:
        _write(channel, encode_reply(READY, nonce, Reply(None, "error", str(error))))
        return
    except Exception as error:  # boundary: the user's module
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
            if os.getpid() != me:
                # a copy of this process that the reward made and that came back here: the answer is
                # the original's
                os._exit(0)
            _write(channel, encode_reply(number, nonce, reply))


def _answers(reward: Reward, pickled: Sequence[bytes]) -> Iterator[Reply]:
    """The replies to items as they travelled, in order."""
    if not reward.together:
        for one in pickled:
            item = _unpickled(one)
            yield item if isinstance(item, Reply) else evaluate_item(reward, item)
        return
    items = [_unpickled(one) for one in pickled]
    replies = evaluate_items(reward, [item for item in items if not isinstance(item, Reply)])
    for item in items:
        yield item if isinstance(item, Reply) else next(replies)


def _unpickled(pickled: bytes) -> Item | Reply:
    try:
        return pickle.loads(pickled)
    except Exception as error:  # boundary: the code of the user's objects
        return Reply(
            None,
            "error",
            f"runs in another process, where this meta could not be read ({says(error)})",
        )


def _let_go(channel: int) -> None:
    """In a fork of the worker: it must neither answer nor keep the socket open."""
    try:
        os.close(channel)
    except OSError:
        pass  # the reward closed it


def _read(channel: int, frames: Frames) -> bytes:
    """The next message; b"" once the trainer closed the socket, or is gone."""
    while (message := frames.next()) is None:
        data = os.read(channel, 1 << 16)
        if not data:
            return b""
        frames.feed(data)
    return message


def _write(channel: int, message: bytes) -> None:
    left = memoryview(message)
    while left:
        left = left[os.write(channel, left) :]
