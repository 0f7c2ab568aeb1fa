"""Encode the replies of a reward's worker as JSON (Python's, which has NaN).

A worker runs user code, so its output is parsed as data: never unpickled, of bounded length, with a
checksum (rl.processes), the number of its item, the worker's process id and a secret of this worker
(its nonce). Anything else is an InvalidReply.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

from rl.processes import InvalidReply
from rl.rewards.reward_calls import RewardResult
from rl.sanitize import sanitize_text

MAX_REPLY_BYTES = 1 << 20  # bytes of a single reply: a reward, its metrics, an error's text
MAX_ERROR_CHARACTERS = 2000  # characters of an error's text that are kept
_SECONDS_PREFIX = "time/"  # prefix of the metrics that hold a reward's run time in seconds
_MAX_NAME_CHARACTERS = 200  # characters of a metric's name
READY_ITEM = 0  # item number of the message "the worker is ready"; items count from 1

_FIELDS = {"item", "pid", "nonce", "reward", "metrics", "failure", "error"}


@dataclass(frozen=True, slots=True)
class RewardReply:
    """Hold the outcome of an item: a result, or a failure ("error" | "nan" | "timeout") and its
    description.
    """

    result: RewardResult | None
    failure: str | None = None
    error: str | None = None


def encode_reply(number: int, nonce: str, reply: RewardReply) -> bytes:
    """Encode a reply of the calling process as a message."""
    fields: dict[str, Any] = {
        "item": number,
        "pid": os.getpid(),
        "nonce": nonce,
        "reward": None,
        "metrics": {},
        "failure": reply.failure,
        "error": reply.error,
    }
    if reply.result is not None:
        fields["reward"] = reply.result.reward
        seconds = {_SECONDS_PREFIX + name: taken for name, taken in reply.result.seconds.items()}
        fields["metrics"] = {**reply.result.metrics, **seconds}
    payload = json.dumps(fields).encode()  # in ASCII: a lone surrogate is encoded as \ud800
    if len(payload) > MAX_REPLY_BYTES:
        too_long = f"returned metrics of {len(payload)} bytes, the maximum is {MAX_REPLY_BYTES}"
        return encode_reply(number, nonce, RewardReply(None, "error", too_long))
    return payload


def decode_reply(
    payload: bytes, number: int, pid: int | None, nonce: str
) -> tuple[RewardReply, int]:
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


def as_remote_reply(reply: RewardReply) -> RewardReply:
    """Return a closure's reply as if received from another process: bounded, sanitized, numbers and
    text only.
    """
    return decode_reply(encode_reply(READY_ITEM, "", reply), READY_ITEM, None, "")[0]


def _parse_reply(fields: dict[str, Any]) -> RewardReply:
    failure, error, metrics = fields["failure"], fields["error"], fields["metrics"]
    if failure is not None:
        if failure not in ("error", "nan", "timeout") or not isinstance(error, str):
            raise InvalidReply(
                f"its failure is malformed: {sanitize_text(repr((failure, error)), 100)}"
            )
        return RewardReply(None, failure, sanitize_text(error, MAX_ERROR_CHARACTERS))
    if not isinstance(metrics, dict):
        raise InvalidReply(f"its metrics are {sanitize_text(repr(metrics), 100)}")
    result = RewardResult(_decode_number(fields["reward"], "reward"))
    for name, value in metrics.items():
        number = _decode_number(value, f"metric {name[:40]!r}")
        if name.startswith(_SECONDS_PREFIX):
            result.seconds[name.removeprefix(_SECONDS_PREFIX)] = number
        else:
            result.metrics[sanitize_text(name, _MAX_NAME_CHARACTERS)] = number
    return (
        RewardReply(result)
        if math.isfinite(result.reward)
        else RewardReply(None, "nan", f"returned {result.reward}")
    )


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
