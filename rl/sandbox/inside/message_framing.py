"""Send and receive JSON messages with a length prefix, over a socket or a pair of pipes.

File descriptors can be sent with a message.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any

JsonObject = dict[str, Any]
HEAD = struct.Struct("!Q")  # the length of a message
_MAX_FDS = 8  # of a message
MAX_MESSAGE_BYTES = 1 << 30  # bytes of a message


class ConnectionClosedError(Exception):
    """Raised if the other end is closed, in the middle of a message or between two messages."""


class BadMessage(Exception):
    """Raised for content that is not a message: too long, or not a JSON object."""


class TooLong(BadMessage):
    """Raised for a message that is longer than allowed."""


def send(to: socket.socket | int, message: JsonObject, fds: tuple[int, ...] = ()) -> None:
    """Send a message. `fds` need a unix socket; they are sent with the first byte. Raises ConnectionClosedError."""
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
        raise ConnectionClosedError(str(error)) from error


def encode_text(text: str) -> bytes:
    """Return the bytes of a text for a file or an input. Bytes that were not UTF-8 are restored; no
    text raises.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def pack(message: JsonObject) -> bytes:
    """Return the bytes of a message."""
    body = json.dumps(message).encode()
    return HEAD.pack(len(body)) + body


def receive(channel: socket.socket | int) -> JsonObject:
    """Return the next message. Raises ConnectionClosedError, BadMessage, and TimeoutError if the socket has a
    timeout.
    """
    return parse_object(receive_bytes(channel))


def receive_bytes(
    channel: socket.socket | int,
    max_bytes: int = MAX_MESSAGE_BYTES,
    fds: list[int] | None = None,
) -> bytes:
    """Return the bytes of the next message, unparsed. `fds`: list to which the file descriptors sent
    with it are appended. Raises ConnectionClosedError, TooLong, and TimeoutError if the socket has a
    timeout.
    """
    (size,) = HEAD.unpack(_read_exactly(channel, HEAD.size, fds))
    if size > max_bytes:
        raise TooLong(f"a message of {size} bytes, at most {max_bytes} are allowed")
    return _read_exactly(channel, size)


def receive_with_fds(channel: socket.socket) -> tuple[JsonObject, list[int]]:
    """Return a message and the file descriptors sent with it."""
    fds: list[int] = []
    return parse_object(receive_bytes(channel, fds=fds)), fds


def parse_object(body: bytes | str, error: type[Exception] = BadMessage) -> JsonObject:
    """Return the JSON object of a message. Raises `error` for any other content."""
    try:
        message = json.loads(body if isinstance(body, str) else body.decode("utf-8"))
    except (ValueError, RecursionError) as cause:
        raise error(f"not JSON: {str(cause)[:100]}") from cause
    if type(message) is not dict:
        raise error(f"a JSON {type(message).__name__}, expected an object")
    return message


def _read_exactly(channel: socket.socket | int, size: int, fds: list[int] | None = None) -> bytes:
    parts = []
    while size:
        try:
            if isinstance(channel, int):
                part = os.read(channel, min(size, 1 << 20))
            elif fds is None:
                part = channel.recv(min(size, 1 << 20))
            else:
                part, received, _, _ = socket.recv_fds(channel, size, _MAX_FDS)
                fds += received
        except ConnectionResetError as error:
            raise ConnectionClosedError(str(error)) from error
        if not part:
            raise ConnectionClosedError("closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
