"""JSON messages with a length before them, over a socket or a pair of pipes, and descriptors beside
them.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any

_HEAD = struct.Struct("!Q")
LONGEST = 1 << 30  # bytes of a message


class Ended(Exception):
    """The other end is closed, in the middle of a message or between two."""


class BadMessage(Exception):
    """What came is no message: too long, or no JSON object."""


class TooLong(BadMessage):
    """A message with more bytes than are taken."""


def send(to: socket.socket | int, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """`fds` only over a unix socket; they travel with the first byte. Raises Ended."""
    data = memoryview(pack(message))
    try:
        if isinstance(to, int):
            while data:
                data = data[os.write(to, data) :]
        else:
            if fds:
                sent = to.sendmsg(
                    [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                )
                data = data[sent:]
            to.sendall(data)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Ended(str(error)) from error


def encode_text(text: str) -> bytes:
    """Return a text as a file or an input holds it. Bytes that were no UTF-8 come back as they
    were; no text raises.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def pack(message: dict[str, Any]) -> bytes:
    """Return a message as it travels."""
    body = json.dumps(message).encode()
    return _HEAD.pack(len(body)) + body


def receive(of: socket.socket | int, longest: int = LONGEST) -> dict[str, Any]:
    """The next message. Raises Ended, BadMessage, TimeoutError where the socket has a timeout."""
    return _read(receive_bytes(of, longest))


def receive_bytes(of: socket.socket | int, longest: int = LONGEST) -> bytes:
    """The bytes of the next message, unread. Raises Ended, TooLong, TimeoutError where the socket
    has a timeout.
    """
    (size,) = _HEAD.unpack(_exactly(of, _HEAD.size))
    if size > longest:
        raise TooLong(f"a message of {size} bytes, the longest has {longest}")
    return _exactly(of, size)


def receive_with_fds(of: socket.socket, most: int = 8) -> tuple[dict[str, Any], list[int]]:
    """A message and the descriptors that came with it."""
    first, fds, _, _ = socket.recv_fds(of, _HEAD.size, most)
    if not first:
        raise Ended("closed")
    head = first + (_exactly(of, _HEAD.size - len(first)) if len(first) < _HEAD.size else b"")
    (size,) = _HEAD.unpack(head)
    if size > LONGEST:
        raise BadMessage(f"a message of {size} bytes")
    return _read(_exactly(of, size)), list(fds)


def _read(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"no JSON: {error}") from error
    if not isinstance(message, dict):
        raise BadMessage(f"a JSON {type(message).__name__}, expected an object")
    return message


def _exactly(of: socket.socket | int, size: int) -> bytes:
    parts = []
    while size:
        try:
            part = (
                os.read(of, min(size, 1 << 20))
                if isinstance(of, int)
                else of.recv(min(size, 1 << 20))
            )
        except ConnectionResetError as error:
            raise Ended(str(error)) from error
        if not part:
            raise Ended("closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
