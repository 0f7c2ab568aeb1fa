"""Encode the messages between a scorer and a worker: framed and checksummed, with JSON replies.

A worker runs user code, so its output is parsed as data: never unpickled, of bounded length, with a
checksum, the number of its item, the worker's process id and a secret of this worker (its nonce).
Anything else is a BadReply.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from dataclasses import dataclass
from typing import Any

from rl.plain import plain_text
from rl.rewards.calls import RewardResult

MAX_REPLY = 1 << 20  # bytes of a single reply: a reward, its metrics, an error's text
MAX_ERROR = 2000  # characters of an error's text that are kept
SECONDS = "time/"  # prefix of the metrics that hold a reward's run time in seconds
_MAX_NAME = 200  # characters of a metric's name
READY = 0  # item number of the message "the worker is ready"; items count from 1

_HEADER = struct.Struct(">2sQI")  # mark, length and checksum of the payload
_MARK = b"WR"
_FIELDS = {"item", "pid", "nonce", "reward", "metrics", "failure", "error"}
# Strict JSON has no literals for these.
_ODD_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class BadReply(Exception):
    """Raised when a worker's message is not a valid reply to the expected item."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Hold the outcome of an item: a result, or a failure ("error" | "nan" | "timeout") and its
    description.
    """

    result: RewardResult | None
    failure: str | None = None
    error: str | None = None


def frame(payload: bytes) -> bytes:
    return _HEADER.pack(_MARK, len(payload), zlib.crc32(payload)) + payload


class Frames:
    """Split a byte stream, received in arbitrary chunks, into messages.

    `limit`: maximum length of a message in bytes.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """Return the next message; None while it is incomplete.

        Raises BadReply as soon as the bytes cannot be a message.
        """
        buffer = self._buffer
        if not buffer.startswith(_MARK[: len(buffer)]):
            raise BadReply(f"it begins with {plain_text(repr(bytes(buffer[:24])), 100)}")
        if len(buffer) < _HEADER.size:
            return None
        _, length, checksum = _HEADER.unpack_from(buffer)
        if length > self.limit:
            raise BadReply(f"it is {length} bytes long, at most {self.limit} are read")
        end = _HEADER.size + length
        if len(buffer) < end:
            return None
        payload = bytes(buffer[_HEADER.size : end])
        if zlib.crc32(payload) != checksum:
            raise BadReply("its checksum is wrong")
        del buffer[:end]
        return payload


def encode_reply(number: int, nonce: str, reply: Reply) -> bytes:
    """Encode a reply of the calling process as a message."""
    fields: dict[str, Any] = {
        "item": number,
        "pid": os.getpid(),
        "nonce": nonce,
        "reward": None,
        "metrics": {},
    }
    fields |= {"failure": reply.failure, "error": reply.error}
    if reply.result is not None:
        fields["reward"] = _named(reply.result.reward)
        seconds = {SECONDS + name: taken for name, taken in reply.result.seconds.items()}
        fields["metrics"] = {
            key: _named(value) for key, value in {**reply.result.metrics, **seconds}.items()
        }
    payload = json.dumps(fields).encode()  # in ASCII: a lone surrogate is encoded as \ud800
    if len(payload) > MAX_REPLY:
        too_long = f"returned metrics of {len(payload)} bytes, the maximum is {MAX_REPLY}"
        return encode_reply(number, nonce, Reply(None, "error", too_long))
    return frame(payload)


def decode_reply(payload: bytes, number: int, pid: int | None, nonce: str) -> tuple[Reply, int]:
    """Return (reply to item `number`, process id of the sender).

    `pid`: process id of the worker, None if not known yet. Raises BadReply, with the reason, if the
    payload is not the reply of the worker with this process id and nonce.
    """
    try:
        fields = _DECODER.decode(payload.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        # UnicodeDecodeError is a ValueError, and so is the error for a number of 5,000 digits.
        raise BadReply(f"it is not JSON ({plain_text(str(error), 100)})") from None
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise BadReply(f"it has unexpected fields: {plain_text(repr(fields), 100)}")
    if fields["nonce"] != nonce:
        raise BadReply("it does not hold the worker's nonce")
    sender = fields["pid"]
    if type(sender) is not int or (pid is not None and sender != pid):
        raise BadReply(
            f"process {plain_text(repr(sender), 40)} sent it, the worker is process {pid}"
        )
    if type(fields["item"]) is not int or fields["item"] != number:
        raise BadReply(
            f"it answers item {plain_text(repr(fields['item']), 40)}, expected item {number}"
        )
    return _reply(fields), sender


def as_data(reply: Reply) -> Reply:
    """Return a closure's reply as if received from another process: bounded, sanitized, numbers and
    text only.
    """
    message = encode_reply(READY, "", reply)
    return decode_reply(message[_HEADER.size :], READY, None, "")[0]


def _reply(fields: dict[str, Any]) -> Reply:
    failure, error = fields["failure"], fields["error"]
    if failure is not None:
        if failure not in ("error", "nan", "timeout") or not isinstance(error, str):
            raise BadReply(f"its failure is malformed: {plain_text(repr((failure, error)), 100)}")
        return Reply(None, failure, plain_text(error, MAX_ERROR))
    reward, metrics = fields["reward"], fields["metrics"]
    if not isinstance(metrics, dict):
        raise BadReply(f"its metrics are {plain_text(repr(metrics), 100)}")
    figures = {
        plain_text(name, _MAX_NAME): _number(value, f"metric {name[:40]!r}")
        for name, value in metrics.items()
    }
    value = _number(reward, "reward")
    return (
        Reply(RewardResult(value, figures))
        if math.isfinite(value)
        else Reply(None, "nan", f"returned {value}")
    )


def _number(value: object, what: str) -> float:
    if type(value) is str and value in _ODD_NUMBERS:
        return _ODD_NUMBERS[value]
    if type(value) not in (int, float):
        raise BadReply(
            f"its {plain_text(what, 60)} is {plain_text(repr(value), 60)}, a number is expected"
        )
    try:
        return float(value)  # type: ignore[arg-type]  # an int or a float
    except OverflowError:
        raise BadReply(f"its {plain_text(what, 60)} is beyond the range of a float") from None


def _named(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
